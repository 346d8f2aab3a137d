#include "golden.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compare.h"
#include "scales.h"

enum { kInputFile = 0, kExpectedFile = 1, kNeeded = 2 };

/* The shape of each file, one letter an axis: T tokens, N sequences, M = N + 1; Q, K, V, O heads; k, v elements. */
static const struct {
    const char *name, *shape;
    int kind;
} files[kRoles] = {
    [kQ] = {"q", "TQk", kInputFile | kNeeded},
    [kK] = {"k", "TKk", kInputFile | kNeeded},
    [kV] = {"v", "TVv", kInputFile | kNeeded},
    [kG] = {"g", "TO", kInputFile},
    [kBeta] = {"beta", "TO", kInputFile},
    [kInitial] = {"h0", "NOkv", kInputFile},
    [kDO] = {"do", "TOv", kInputFile},
    [kDFinal] = {"dht", "NOkv", kInputFile},
    [kCuSeqlens] = {"cu_seqlens", "M", kInputFile},
    [kO] = {"o", "TOv", kExpectedFile},
    [kFinal] = {"ht", "NOkv", kExpectedFile},
    [kDQ] = {"dq", "TQk", kExpectedFile},
    [kDK] = {"dk", "TKk", kExpectedFile},
    [kDV] = {"dv", "TVv", kExpectedFile},
    [kDG] = {"dg", "TO", kExpectedFile},
    [kDBeta] = {"dbeta", "TO", kExpectedFile},
    [kDInitial] = {"dh0", "NOkv", kExpectedFile},
};

static const role_set gradients = ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta) | ROLE(kDInitial);

const char *golden_name(role role) {
    return files[role].name;
}

/* ---- meta.txt ---- */

typedef struct meta {
    double hq, hv, dk, dv, use_l2, scale, l2_eps, tokens, sequences;
    gdelta_dtype dtype;
} meta;

static bool set(meta *m, const char *key, const char *value) {
    const struct {
        const char *key;
        double *to;
        bool whole;
    } numbers[] = {{"hq", &m->hq, true},        {"hv", &m->hv, true},          {"dk", &m->dk, true},
                   {"dv", &m->dv, true},        {"use_l2", &m->use_l2, true},  {"tokens", &m->tokens, true},
                   {"scale", &m->scale, false}, {"l2_eps", &m->l2_eps, false}, {"sequences", &m->sequences, true}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
        if (strcmp(key, numbers[i].key) != 0) continue;
        char *end;
        double number = strtod(value, &end);
        bool good = end != value && !*end && isfinite(number) && number >= (numbers[i].whole ? 0 : -INFINITY);
        *numbers[i].to = number;
        return good && (!numbers[i].whole || (number == floor(number) && number < 0x1p31));
    }
    if (strcmp(key, "dtype") == 0) {
        static const char *const names[] = {"", "bf16", "fp16", "fp32"};
        m->dtype = GDELTA_DTYPE_DEFAULT;
        for (gdelta_dtype d = GDELTA_DTYPE_BF16; d <= GDELTA_DTYPE_FP32; ++d)
            if (strcmp(value, names[d]) == 0) m->dtype = d;
        return m->dtype != GDELTA_DTYPE_DEFAULT;
    }
    return strncmp(key, "note_", 5) == 0 || strcmp(key, "transformers_rel_l2") == 0;
}

static bool read_meta(const char *folder, meta *m) {
    char path[4096], line[512];
    snprintf(path, sizeof path, "%s/meta.txt", folder);
    FILE *file = fopen(path, "r");
    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }
    *m = (meta){.scale = NAN, .tokens = NAN, .sequences = NAN, .l2_eps = 1e-6};
    bool good = true;
    while (good && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        char *value = strchr(line, '=');
        if (value) *value++ = '\0';
        good = !*line || (value && set(m, line, value));
        if (!good) fprintf(stderr, "%s: \"%s=%s\" is no key with a legal value\n", path, line, value ? value : "");
    }
    fclose(file);
    if (!good) return false;
    if (m->hq && m->hv && m->dk && m->dv && m->dtype && !isnan(m->tokens) && !isnan(m->sequences)) return true;
    fprintf(stderr, "%s: needs hq, hv, dk, dv, dtype, tokens and sequences\n", path);
    return false;
}

/* ---- The folder ---- */

static bool right_shape(const char *path, const npy_array *array, const char *shape, const meta *m) {
    const struct {
        char axis;
        double extent;
    } extents[] = {{'T', m->tokens}, {'N', m->sequences},       {'M', m->sequences + 1},   {'Q', m->hq},
                   {'V', m->hv},     {'K', fmin(m->hq, m->hv)}, {'O', fmax(m->hq, m->hv)}, {'k', m->dk},
                   {'v', m->dv}};
    char want[128] = "", got[256] = "";
    for (const char *axis = shape; *axis; ++axis)
        for (size_t i = 0; i < sizeof extents / sizeof *extents; ++i)
            if (*axis == extents[i].axis) sprintf(want + strlen(want), " %.0f", extents[i].extent);
    for (int axis = 0; axis < array->axes; ++axis) sprintf(got + strlen(got), " %lld", (long long)array->shape[axis]);
    if (strcmp(want, got) == 0) return true;
    fprintf(stderr, "%s: the shape is (%s ); by meta.txt it must be (%s )\n", path, got, want);
    return false;
}

static bool load_arrays(const char *folder, const meta *m, npy_array arrays[kRoles]) {
    for (role r = 0; r < kRoles; ++r) {
        if (!files[r].name) continue;
        char path[4096];
        snprintf(path, sizeof path, "%s/%s.npy", folder, files[r].name);
        if (!(files[r].kind & kNeeded) && access(path, F_OK) != 0) continue;
        if (!npy_load(path, &arrays[r]) || !right_shape(path, &arrays[r], files[r].shape, m)) return false;
        bool whole = arrays[r].dtype == GDELTA_DTYPE_INT32 || arrays[r].dtype == GDELTA_DTYPE_INT64;
        if (whole == (r == kCuSeqlens)) continue;
        fprintf(stderr, "%s: the elements must be %s\n", path, whole ? "floats" : "integers");
        return false;
    }
    return true;
}

static bool cut(const char *folder, const npy_array *cu_seqlens, const meta *m, test_case *c) {
    if (m->sequences < 1 || m->sequences > kMaxSequences || (!cu_seqlens->data && m->sequences != 1)) {
        fprintf(stderr, "%s: %.0f sequences; there must be 1 to %d, and cu_seqlens.npy if more than 1\n", folder,
                m->sequences, kMaxSequences);
        return false;
    }
    c->sequences = (int)m->sequences;
    c->capacity = (int64_t)m->tokens;
    c->lengths[0] = (int64_t)m->tokens;
    if (!cu_seqlens->data) return true;
    bool good = npy_get(cu_seqlens, 0) == 0 && npy_get(cu_seqlens, c->sequences) == m->tokens;
    for (int n = 0; n < c->sequences; ++n) {
        c->lengths[n] = (int64_t)(npy_get(cu_seqlens, n + 1) - npy_get(cu_seqlens, n));
        good = good && c->lengths[n] >= 0;
    }
    if (!good) fprintf(stderr, "%s: cu_seqlens must rise from 0 to the number of tokens\n", folder);
    return good;
}

/* The element of a file for an element of the instance. */
static int64_t place(const golden *g, role r, int64_t n, int64_t row, int64_t head, int64_t column) {
    int64_t heads = instance_heads(&g->x, r), columns = instance_columns(&g->x, r);
    bool state = files[r].shape[0] == 'N';
    if (state) return ((n * heads + head) * g->x.c.dim_k + row) * columns + column;
    return ((g->x.start[n] + row) * heads + head) * columns + column;
}

/* Turns the arrays into g, which keeps the expected ones. */
static bool assemble(const char *folder, const meta *m, npy_array arrays[kRoles], golden *g) {
    role_set given = 0;
    for (role r = 0; r < kRoles; ++r)
        if (arrays[r].data) given |= ROLE(r);
    test_case c = {.layout = GDELTA_LAYOUT_THD,
                   .heads_q = (int32_t)m->hq,
                   .heads_v = (int32_t)m->hv,
                   .dim_k = (int32_t)m->dk,
                   .dim_v = (int32_t)m->dv,
                   .dtype = m->dtype,
                   .out_dtype = GDELTA_DTYPE_FP32,
                   .l2norm = (gdelta_l2norm)m->use_l2,
                   .eps = m->use_l2 ? m->l2_eps : 0,
                   .has_scale = !isnan(m->scale),
                   .scale = isnan(m->scale) ? 0 : m->scale};
    if (!cut(folder, &arrays[kCuSeqlens], m, &c)) return false;
    bool outputs = given & (gradients | ROLE(kO) | ROLE(kFinal));
    if (!outputs || (given & gradients && !(given & (ROLE(kDO) | ROLE(kDFinal))))) {
        fprintf(stderr, "%s: %s\n", folder,
                outputs ? "expects gradients, but has neither do.npy nor dht.npy" : "expects nothing: no o.npy, ...");
        return false;
    }
    for (role r = 0; r < kRoles; ++r)
        if (files[r].name && files[r].kind == kInputFile && r != kCuSeqlens && !arrays[r].data) c.absent |= ROLE(r);
    instance_create(&g->x, &c);
    for (role r = 0; r < kRoles; ++r) {
        if (!arrays[r].data || r == kCuSeqlens) continue;
        if (files[r].kind == kExpectedFile && !g->x.tensor[r].present) {
            fprintf(stderr, "%s: expects %s, but lacks the input that this is the gradient of\n", folder,
                    files[r].name);
            instance_destroy(&g->x);
            return false;
        }
        if (files[r].kind == kExpectedFile) continue;
        FOR_ELEMENTS(&g->x, r, n, row, head, column)
        instance_put(&g->x, r, n, row, head, column, npy_get(&arrays[r], place(g, r, n, row, head, column)));
    }
    for (role r = 0; r < kRoles; ++r) {
        if (files[r].kind != kExpectedFile) continue;
        g->expected[r] = arrays[r];
        arrays[r].data = NULL;
    }
    return true;
}

bool golden_load(const char *folder, golden *g) {
    meta m;
    npy_array arrays[kRoles] = {{.data = NULL}};
    memset(g, 0, sizeof *g);
    bool good = read_meta(folder, &m) && load_arrays(folder, &m, arrays) && assemble(folder, &m, arrays, g);
    for (role r = 0; r < kRoles; ++r) npy_free(&arrays[r]);
    return good;
}

void golden_free(golden *g) {
    instance_destroy(&g->x);
    for (role r = 0; r < kRoles; ++r) npy_free(&g->expected[r]);
}

/* ---- Results ---- */

/* Where all that is expected is 0, the error is not relative: it must be 0 too. NaN counts as infinite. */
static double worst_error(const golden *g, role r, const test_engine *engine, const instance *scales) {
    double worst = 0;
    for (int64_t n = 0; n < instance_sequences(&g->x, r); ++n)
        for (int64_t head = 0; head < instance_heads(&g->x, r); ++head) {
            double error = 0, size = 0;
            for (int64_t row = 0; row < instance_rows(&g->x, r, n); ++row)
                for (int64_t column = 0; column < instance_columns(&g->x, r); ++column) {
                    double want = npy_get(&g->expected[r], place(g, r, n, row, head, column));
                    error += pow(instance_get(&g->x, r, n, row, head, column) - want, 2);
                    size += want * want;
                }
            size = fmax(sqrt(size), scales ? compare_scale(scales, engine, r, n, head) : 0);
            double relative = error == 0 ? 0 : sqrt(error) / size;
            worst = isnan(relative) ? INFINITY : fmax(worst, relative);
        }
    return worst;
}

bool golden_needs_backward(const golden *g) {
    for (role r = 0; r < kRoles; ++r)
        if (gradients & ROLE(r) && g->expected[r].data) return true;
    return false;
}

bool golden_run(golden *g, const test_engine *engine, double error[kRoles]) {
    instance scales = {.before = NULL};
    bool good = true;
    for (role r = 0; r < kRoles; ++r) error[r] = -1;
    for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_BACKWARD && good; ++operation) {
        if (operation == GDELTA_OPERATION_BACKWARD && !golden_needs_backward(g)) continue;
        if (!engine_runs(engine, &g->x.c, operation)) continue;
        good = instance_run(&g->x, engine, operation);
        for (role r = 0; r < kRoles && good; ++r) {
            if (!g->expected[r].data || !(instance_outputs(&g->x, operation) & ROLE(r))) continue;
            error[r] = worst_error(g, r, engine, NULL);
            if (error[r] <= golden_tolerance(engine, r) || !compare_needs_scales(engine, r)) continue;
            if (!scales.before) scales_create(&scales, &g->x);
            error[r] = worst_error(g, r, engine, &scales);
        }
    }
    instance_destroy(&scales);
    return good;
}

double golden_tolerance(const test_engine *engine, role r) {
    return fmax(compare_tolerance(engine, r, GDELTA_DTYPE_FP32), 2e-6);
}
