/* What is hard for an engine that works on chunks of 64 tokens: keys that are alike, long texts, numbers without bound,
 * batches of other sizes. Every engine must pass. */
#include <math.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

static const role_set forward_roles = ROLE(kO) | ROLE(kFinal);

/* ---- Keys ---- */

/* Relative L2 error of a role, all heads together. */
static double error_of(const instance *got, const instance *want, role r) {
    double error = 0, size = 0;
    FOR_ELEMENTS(want, r, n, row, head, column) {
        double w = instance_get(want, r, n, row, head, column);
        error += pow(instance_get(got, r, n, row, head, column) - w, 2);
        size += w * w;
    }
    return sqrt(error / size);
}

/* With beta = 2 every token mirrors the state at its key. Nothing is forgotten, and T alternates between 2 and -2
 * without getting smaller: no chunked form is stable there. Asked for is the result of keys that are one rounding of
 * their type away. */
static void check_mirrors(instance *x, const test_engine *engine) {
    instance plain, moved;
    instance_create_plain(&plain, x);
    instance_create_plain(&moved, x);
    FOR_ELEMENTS(&moved, kK, n, row, head, column) {
        double k = instance_get(&moved, kK, n, row, head, column);
        double sign = fill_key(7, kK, n, row, head, column) % 2 ? 1 : -1;
        instance_put(&moved, kK, n, row, head, column, k * (1 + sign / 256));
    }
    cr_assert(instance_run(&plain, &test_engines[kReference], GDELTA_OPERATION_FORWARD));
    cr_assert(instance_run(&moved, &test_engines[kReference], GDELTA_OPERATION_FORWARD));
    RUN(x, FORWARD);
    for (role r = kO; r <= kFinal; ++r) {
        double tolerance = compare_tolerance(engine, r, x->tensor[r].dtype);
        double allowed = fmax(tolerance, error_of(&moved, &plain, r)), error = error_of(x, &plain, r);
        cr_expect_leq(error, allowed, "%s: relative error %g, a rounding of the keys makes %g", role_name(r), error,
                      allowed);
    }
    instance_destroy(&plain);
    instance_destroy(&moved);
}

/* All keys of a head the same: no entry of the triangle that a chunk has to invert is small. The inverse is tame, but
 * the powers of the triangle are not: they pass 2^60. */
ENGINE_TEST(chunks, identical_keys, 3) {
    static const double betas[] = {0.5, 1, 2};
    for (int decays = 0; decays < 2; ++decays) {
        test_case c = two_head_case(200);
        c.strength = decays ? kGateWeak : kGateZero;
        instance x = make_instance(&c);
        FOR_ELEMENTS(&x, kK, n, row, head, column) {
            instance_put(&x, kK, n, row, head, column, instance_get(&x, kK, n, 0, head, column));
        }
        instance_put_all(&x, kBeta, betas[part]);
        if (betas[part] < 2) {
            cr_expect(check_instance(&x, engine, kForward), "beta %g, decays %d", betas[part], decays);
        } else {
            check_mirrors(&x, engine);
        }
        instance_destroy(&x);
    }
}

ENGINE_TEST(chunks, correlated_keys, 2) {
    for (int map = 0; map < 2; ++map) {
        test_case c = two_head_case(257);
        c.heads_q = 2;
        c.heads_v = 4;
        c.dtype = part ? GDELTA_DTYPE_FP16 : GDELTA_DTYPE_BF16;
        c.keys = kKeysCorrelated;
        c.beta = GDELTA_BETA_TWO_SIGMOID;
        c.head_map = map;
        cr_expect(check_case(&c, engine, kForward));
    }
}

/* Keys of length 11 and no norm: that head's numbers grow without bound and may end as infinities or NaN, but the call
 * ends, and the other heads keep their bits. */
ENGINE_TEST(chunks, unbounded_heads_harm_no_other, 1) {
    test_case c = two_head_case(300);
    c.heads_q = c.heads_v = 2;
    c.l2norm = GDELTA_L2NORM_NONE;
    instance a = make_instance(&c), b = make_instance(&c);
    FOR_ELEMENTS(&b, kK, n, row, head, column) {
        if (head == 0) instance_put(&b, kK, n, row, head, column, fill_normal(fill_key(3, 0, n, row, 0, column)));
    }
    RUN(&a, FORWARD);
    RUN(&b, FORWARD);
    for (role r = kO; r <= kFinal; ++r) {
        int64_t different = 0;
        FOR_ELEMENTS(&a, r, n, row, head, column) {
            different += head == 1 && memcmp(instance_at(&a, r, n, row, head, column),
                                             instance_at(&b, r, n, row, head, column), a.tensor[r].bytes) != 0;
        }
        cr_expect_eq(different, 0, "%s: %d elements", role_name(r), (int)different);
    }
    instance_destroy(&a);
    instance_destroy(&b);
}

/* ---- Length ---- */

/* The reference takes its time over these: one head, and on the GPU's machine only. */
GPU_ENGINE_TEST(chunks, long_texts, 4) {
    test_case c = two_head_case(part < 3 ? 4096 : 131072);
    c.heads_v = 1;
    c.strength = part == 1 ? kGateZero : part == 2 ? kGateResets : kGateWeak;
    c.beta = GDELTA_BETA_SIGMOID;
    if (part == 3) c.dim_k = 64;
    cr_expect(check_case(&c, engine, kForward));
}

/* Few heads of long texts, which an engine may cut: each sequence its own way, some not at all. In place, where the
 * first piece's state must not be overwritten by the last one's. With checkpoints, also within pieces and in the pool
 * of the states. */
GPU_ENGINE_TEST(chunks, cut_texts, 8) {
    static const int64_t lengths[] = {1500, 0, 6000, 1, 130, 2049};
    enum { kSequences = sizeof lengths / sizeof *lengths };
    test_case c = two_head_case(0);
    c.layout = GDELTA_LAYOUT_THD;
    c.sequences = kSequences;
    memcpy(c.lengths, lengths, sizeof lengths);
    c.heads_v = 1;
    c.dim_k = part & 1 ? 64 : 128;
    c.dim_v = part & 2 ? 64 : 128;
    c.dtype = part == 3 ? GDELTA_DTYPE_FP16 : GDELTA_DTYPE_BF16;
    c.strength = part == 1 ? kGateZero : kGateWeak; /* what the first token did reaches the last */
    c.beta = GDELTA_BETA_SIGMOID;
    c.in_place = part == 4;
    if (part > 4) c.checkpoint_interval = part == 6 ? 320 : 64;
    if (part == 6) c.several_slots = c.index64 = true, c.state_dtype = GDELTA_DTYPE_BF16;
    if (part == 7) case_use_one_pool(&c), c.state_order = GDELTA_STATE_VK;
    cr_expect(check_case(&c, engine, kForward));
}

/* ---- Batches and calls ---- */

/* A sequence in a crowd, which may be worked on in another way than when alone, keeps its bits. */
ENGINE_TEST(chunks, a_crowd_changes_no_bits, 1) {
    test_case c = two_head_case(70);
    c.heads_v = 4;
    cr_expect(check_crowd(&c, engine, GDELTA_OPERATION_FORWARD));
}

/* Calls of other shapes in between leave nothing behind. */
ENGINE_TEST(chunks, shapes_may_alternate, 1) {
    test_case c = two_head_case(130), other = c;
    other.layout = GDELTA_LAYOUT_THD;
    other.sequences = 3;
    other.lengths[0] = 1, other.lengths[1] = 500, other.lengths[2] = 77;
    other.dim_k = 64;
    other.heads_v = 3;
    instance first = make_instance(&c), again = make_instance(&c);
    cr_expect(check_instance(&first, engine, kForward));
    cr_expect(check_case(&other, engine, kForward));
    cr_expect(check_instance(&again, engine, kForward));
    cr_expect(compare_bits(&again, &first, forward_roles));
    instance_destroy(&again);
    instance_destroy(&first);
}

/* No order of blocks and warps shows. */
GPU_ENGINE_TEST(chunks, a_hundred_calls_give_the_same_bits, 3) {
    test_case c = two_head_case(part == 0 ? 1000 : part == 1 ? 64 : 4100);
    c.sequences = part == 0 ? 3 : part == 1 ? 33 : 1;
    c.heads_v = 4;
    cr_expect(check_repeats(&c, engine, GDELTA_OPERATION_FORWARD));
}
