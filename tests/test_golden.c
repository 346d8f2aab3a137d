/* Every engine against stored results: the token recurrence and its gradients in double precision, rounded to fp32, of
 * bf16, fp16 and fp32 inputs. And what the loader of such folders must refuse. */
#define _XOPEN_SOURCE 700 /* mkdtemp, P_tmpdir */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/engine_test.h"
#include "support/golden.h"

static const char *const folders[] = {
    "fp32_io",           "k96_v192",          "neg_eigenvalues", "no_l2norm_unit_scale", "one_chunk_plus_tail",
    "ragged_with_empty", "strong_decay_d128", "tiny_rows"};

ENGINE_TEST(golden, cases, 1) {
    int tensors = 0;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; ++i) {
        char path[1024];
        golden g;
        double error[kRoles];
        snprintf(path, sizeof path, "%s/%s", GDELTA_GOLDEN_DIR, folders[i]);
        cr_assert(golden_load(path, &g));
        cr_assert(golden_run(&g, engine, error));
        int compared = 0;
        for (role r = 0; r < kRoles; ++r) {
            if (!g.expected[r].data || error[r] == -1) continue;
            ++compared;
            cr_expect(error[r] <= golden_tolerance(engine, r), "%s %s: %g", folders[i], golden_name(r), error[r]);
        }
        /* o and ht; dq, dk, dv, dg, dbeta and dh0 */
        int wanted = 2 * RUNS(&g.x.c, FORWARD) + 6 * RUNS(&g.x.c, BACKWARD);
        cr_expect_eq(compared, wanted, "%s: %d tensors", folders[i], compared);
        tensors += compared;
        golden_free(&g);
    }
    cr_expect_gt(tensors, 0, "no case at all");
}

/* ---- The loader ---- */

static char folder[] = P_tmpdir "/gdelta-golden-XXXXXX";

static void write_file(const char *name, const void *data, size_t bytes) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
}

/* One token of one head, K = V = 2: four floats are the most that any file has. */
static void write_npy(const char *name, const char *version, const char *descr, const char *order, const char *shape,
                      size_t bytes) {
    static const float numbers[4] = {1, 2, 3, 4};
    char text[256] = "\x93NUMPY";
    int length = snprintf(text + 10, sizeof text - 10, "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }\n", descr,
                          order, shape);
    memcpy(text + 6, version, 2);
    text[8] = (char)length;
    text[9] = 0;
    memcpy(text + 10 + length, numbers, bytes);
    write_file(name, text, 10 + (size_t)length + bytes);
}

static const char plain_meta[] = "hq=1\nhv=1\ndk=2\ndv=2\ndtype=fp32\nuse_l2=0\nscale=1\ntokens=1\nsequences=1\n";

static void write_good_folder(void) {
    write_npy("q.npy", "\1", "<f4", "False", "(1, 1, 2)", 8);
    write_npy("k.npy", "\1", "<f4", "False", "(1, 1, 2)", 8);
    write_npy("v.npy", "\1", "<f4", "False", "(1, 1, 2)", 8);
    write_npy("ht.npy", "\1", "<f4", "False", "(1, 1, 2, 2)", 16);
    write_file("meta.txt", plain_meta, sizeof plain_meta - 1);
}

static bool loads(void) {
    golden g;
    if (!golden_load(folder, &g)) return false;
    golden_free(&g);
    return true;
}

static void remove_file(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    remove(path);
}

static void remove_folder(void) {
    static const char *const names[] = {"q.npy",  "k.npy",  "v.npy",          "ht.npy",
                                        "dg.npy", "do.npy", "cu_seqlens.npy", "meta.txt"};
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) remove_file(names[i]);
    remove(folder);
}

Test(golden, loader_refuses_what_it_cannot_read, .fini = remove_folder) {
    cr_assert_not_null(mkdtemp(folder));
    write_good_folder();
    cr_assert(loads());
    cr_assert_not_null(freopen("/dev/null", "w", stderr));

    static const struct {
        const char *version, *descr, *order, *shape;
        size_t bytes;
    } arrays[] = {
        {"\4", "<f4", "False", "(1, 1, 2)", 8}, /* an unknown version */
        {"\1", ">f4", "False", "(1, 1, 2)", 8},  {"\1", "<c8", "False", "(1, 1, 2)", 8},
        {"\1", "<f4", "True", "(1, 1, 2)", 8},   {"\1", "<f4", "False", "(1, 2, 1)", 8},
        {"\1", "<f4", "False", "(2, 1, 2)", 16}, {"\1", "<f4", "False", "(1, 2)", 8},
        {"\1", "<f4", "False", "(1, -1, 2)", 8}, {"\1", "<i4", "False", "(1, 1, 2)", 8},
        {"\1", "<f4", "False", "(1, 1, 2)", 4}, /* too short, and too long */
        {"\1", "<f4", "False", "(1, 1, 2)", 12},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) {
        write_npy("q.npy", arrays[i].version, arrays[i].descr, arrays[i].order, arrays[i].shape, arrays[i].bytes);
        cr_expect_not(loads(), "array %zu", i);
    }
    write_file("q.npy", "numbers", 7);
    cr_expect_not(loads(), "not a .npy file");
    remove_file("q.npy");
    cr_expect_not(loads(), "no q");
    write_good_folder();

    static const char *const metas[] = {"scal=1\n", "hq=0\n", "hq=1.5\n", "dtype=fp8\n", "use_l2=\n", "words\n"};
    for (size_t i = 0; i < sizeof metas / sizeof *metas; ++i) {
        char text[512];
        snprintf(text, sizeof text, "%s%s", plain_meta, metas[i]);
        write_file("meta.txt", text, strlen(text));
        cr_expect_not(loads(), "meta %zu", i);
    }
    remove_file("meta.txt");
    cr_expect_not(loads(), "no meta.txt");
    write_good_folder();

    write_npy("dg.npy", "\1", "<f4", "False", "(1, 1)", 4);
    cr_expect_not(loads(), "a gradient without one that comes in");
    write_npy("do.npy", "\1", "<f4", "False", "(1, 1, 2)", 8);
    cr_expect_not(loads(), "a gradient of a gate that is not there");
    remove_file("dg.npy");
    remove_file("ht.npy");
    cr_expect_not(loads(), "nothing expected");
    write_good_folder();

    write_npy("cu_seqlens.npy", "\1", "<i4", "False", "(2,)", 8); /* the bits of 1.0f, 2.0f */
    cr_expect_not(loads(), "cu_seqlens that does not start at 0");
    remove_file("cu_seqlens.npy");
    cr_expect(loads());
}
