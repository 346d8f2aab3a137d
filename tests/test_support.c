/* The tests' own machinery: what is wrong must be seen. What it prints about these faults is thrown away. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "host/convert.h"
#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"
#include "support/scales.h"

static const test_engine *const reference = &test_engines[kReference];
static const test_engine *const recurrent = &test_engines[kRecurrent];
static const test_engine *const rounding = &test_engines[kHopper];

/* Strides with gaps, slots with padding and a skipped sequence, ragged lengths and rows to spare. */
static test_case difficult_case(void) {
    test_case c = {.layout = GDELTA_LAYOUT_THD,
                   .sequences = 4,
                   .lengths = {3, 0, 9, 2},
                   .capacity = 17,
                   .heads_q = 2,
                   .heads_v = 4,
                   .dim_k = 6,
                   .dim_v = 5,
                   .out_dtype = GDELTA_DTYPE_FP32,
                   .state_order = GDELTA_STATE_VK,
                   .l2norm = GDELTA_L2NORM_ADD_EPS,
                   .gap = 3,
                   .slot_padding = 11};
    case_use_slots(&c, kSlotsDistinct, 1 << 3);
    return c;
}

static void make(instance *got, instance *want) {
    cr_assert(freopen("/dev/null", "w", stderr) != NULL);
    test_case c = difficult_case();
    instance_create(got, &c);
    instance_create_plain(want, got);
    cr_assert(instance_run(got, reference, GDELTA_OPERATION_FORWARD));
    cr_assert(instance_run(want, reference, GDELTA_OPERATION_FORWARD));
}

static void *output(instance *x, role role, int64_t n, int64_t row, int64_t head, int64_t column) {
    return x->after + instance_offset(x, role, n, row, head, column);
}

Test(support, an_error_in_one_head_fails) {
    instance got, want;
    make(&got, &want);
    role_set outputs = ROLE(kO) | ROLE(kFinal);
    cr_expect(compare_instances(&got, &want, outputs, recurrent));
    float *element = output(&got, kO, 2, 8, 3, 4), right = *element;
    *element = right * (1 + 1e-3f) + 1e-4f;
    cr_expect_not(compare_instances(&got, &want, outputs, recurrent));
    *element = NAN;
    cr_expect_not(compare_instances(&got, &want, outputs, recurrent));
    *element = INFINITY;
    cr_expect_not(compare_instances(&got, &want, outputs, recurrent));
    *element = right;
    cr_expect(compare_instances(&got, &want, outputs, recurrent));
    element = output(&got, kFinal, 1, 5, 0, 4); /* the state of an empty sequence */
    *element += 1e-3f;
    cr_expect_not(compare_instances(&got, &want, outputs, recurrent));
}

Test(support, a_zero_result_must_be_zero) {
    instance got, want;
    make(&got, &want);
    slice g = {&got, kO, 3, 0, 0}, w = {&want, kO, 3, 0, 0}; /* the skipped sequence */
    cr_expect(compare_slices(g, w, 1e-5));
    *(float *)output(&got, kO, 3, 1, 2, 3) = 1e-20f;
    cr_expect_not(compare_slices(g, w, 1e-5));
}

Test(support, a_missing_output_fails) {
    instance got, want;
    make(&got, &want);
    memcpy(output(&got, kO, 0, 0, 0, 0), got.before + instance_offset(&got, kO, 0, 0, 0, 0), 4);
    cr_expect_not(compare_instances(&got, &want, ROLE(kO), recurrent));
}

Test(support, one_bit_is_seen) {
    instance got, want;
    make(&got, &want);
    instance_create(&want, &got.c);
    cr_assert(instance_run(&want, reference, GDELTA_OPERATION_FORWARD));
    cr_expect(compare_bits(&got, &want, ROLE(kO) | ROLE(kFinal)));
    *(char *)output(&got, kO, 2, 8, 1, 2) ^= 1;
    cr_expect_not(compare_bits(&got, &want, ROLE(kO) | ROLE(kFinal)));
}

/* ---- Natural scales ---- */

static const role_set gradients_of_scale = SCALED_ROLES & ~ROLE(kO);

/* What is one product has its size as its scale. Of two, which may cancel, the scale is at least a root half of it. */
static void expect_scale(const instance *scales, const instance *x, role r, int64_t n, bool one_product) {
    for (int64_t row = 0; row < instance_rows(x, r, n); ++row) {
        for (int64_t head = 0; head < instance_heads(x, r); ++head) {
            for (int64_t column = 0; column < instance_columns(x, r); ++column) {
                double want = fabs(instance_get(x, r, n, row, head, column));
                double got = instance_get(scales, r, n, row, head, column);
                cr_expect(got >= want * sqrt(0.5) && (!one_product || fabs(got - want) <= 1e-12 * want),
                          "%s: %g, not %g: %s", role_name(r), got, want, case_line(&x->c));
            }
        }
    }
}

/* Where K and V are 1: through each gate, beta, norm and map of heads. Of the gradients of rows those of heads that no
 * group shares, without the norm, which takes all of q's and k's away. */
Test(support, the_scale_of_one_product_is_its_size) {
    for (int i = 0; i < 54; ++i) {
        test_case c = difficult_case();
        c.dim_k = c.dim_v = 1;
        c.gate = i % 3;
        c.beta = i / 3 % 3;
        c.l2norm = i / 9 % 3;
        c.head_map = i / 27;
        c.recycled = 4;
        c.out_dtype = GDELTA_DTYPE_FP64;
        if (c.l2norm == GDELTA_L2NORM_NONE) c.heads_q = c.heads_v;
        if (i % 5 == 4) c.absent = ROLE(kDO);
        bool one = i % 2;
        if (one) { /* token: also of the parameters */
            c.sequences = 1;
            c.lengths[0] = 1;
            c.recycled = 0;
        }
        instance x = make_instance(&c), scales, plain;
        instance_create_plain(&plain, &x);
        scales_create(&scales, &x);
        for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_BACKWARD; ++operation) {
            cr_assert(instance_run(&plain, reference, operation));
            role_set roles = instance_outputs(&plain, operation) & SCALED_ROLES;
            if (c.l2norm != GDELTA_L2NORM_NONE) roles &= ~(ROLE(kDQ) | ROLE(kDK) | ROLE(kDV));
            if (!one) roles &= ~(ROLE(kDALog) | ROLE(kDDtBias));
            for (role r = 0; r < kRoles; ++r) {
                if (!(roles & ROLE(r))) continue;
                bool one_product = ROLE(r) & (ROLE(kO) | ROLE(kDQ) | ROLE(kDV) | ROLE(kDBeta));
                for (int64_t n = 0; n < instance_sequences(&x, r); ++n)
                    expect_scale(&scales, &plain, r, n, one_product);
            }
        }
        instance_destroy(&x);
        instance_destroy(&plain);
        instance_destroy(&scales);
    }
}

static void set_output(instance *x, role role, int64_t n, int64_t row, int64_t head, int64_t column, double value) {
    gdelta_store(output(x, role, n, row, head, column), x->tensor[role].dtype, 0, value);
}

/* Adds these parts of gradient and scale to a head. */
static void corrupt(instance *got, const instance *scales, role r, int64_t n, int64_t head, double of_size,
                    double of_scale) {
    for (int64_t row = 0; row < instance_rows(got, r, n); ++row) {
        for (int64_t column = 0; column < instance_columns(got, r); ++column) {
            double sign = fill_normal(fill_key(3, r, n, row, head, column)) < 0 ? -1 : 1;
            double right = instance_get(got, r, n, row, head, column);
            double scale = instance_get(scales, r, n, row, head, column);
            set_output(got, r, n, row, head, column, right + of_size * right + of_scale * sign * scale);
        }
    }
}

typedef struct gradients {
    instance got, right, scales;
} gradients;

static gradients make_gradients(test_case c) {
    gradients g;
    cr_assert(freopen("/dev/null", "w", stderr) != NULL);
    c.heads_q = 1;
    c.heads_v = 2;
    c.dim_k = c.dim_v = 64;
    c.l2norm = GDELTA_L2NORM_ADD_EPS;
    c.gate = GDELTA_GATE_SOFTPLUS;
    instance x = make_instance(&c);
    scales_create(&g.scales, &x);
    instance_create_plain(&g.got, &x);
    instance_create_plain(&g.right, &x);
    instance_destroy(&x);
    cr_assert(instance_run(&g.right, reference, GDELTA_OPERATION_BACKWARD));
    memcpy(g.got.after, g.right.after, g.got.bytes);
    return g;
}

static bool passes(gradients *g, role_set roles, const test_engine *engine) {
    bool good = compare_instances(&g->got, &g->right, roles, engine);
    memcpy(g->got.after, g->right.after, g->got.bytes);
    return good;
}

/* What rounding does to a gradient passes. A tenth too much, one token of seventy left out, or without what comes from
 * the final state, does not; where keys are alike too. */
static void check_wrong_gradients(test_case c) {
    gradients g = make_gradients(c);
    cr_expect(passes(&g, gradients_of_scale, rounding));
    for (role r = kDQ; r <= kDDtBias; ++r) {
        bool of_tokens = r <= kDBeta;
        int64_t n = of_tokens ? 1 : 0, head = instance_heads(&g.got, r) == 2 && of_tokens ? 1 : 0;
        corrupt(&g.got, &g.scales, r, n, head, 0, 3e-3);
        cr_expect(passes(&g, ROLE(r), rounding), "%s: roundings", role_name(r));
        corrupt(&g.got, &g.scales, r, n, head, 0, 3e-3);
        cr_expect_not(passes(&g, ROLE(r), recurrent), "%s: roundings of another engine", role_name(r));
        corrupt(&g.got, &g.scales, r, n, head, 0.1, 0);
        cr_expect_not(passes(&g, ROLE(r), rounding), "%s: a tenth too much", role_name(r));
        for (int64_t column = 0; column < instance_columns(&g.got, r); ++column) {
            set_output(&g.got, r, n, of_tokens ? 41 : 0, head, column, 0);
        }
        cr_expect_not(passes(&g, ROLE(r), rounding), "%s: a token left out", role_name(r));
        set_output(&g.got, r, n, 0, head, 0, NAN);
        cr_expect_not(passes(&g, ROLE(r), rounding), "%s: NaN", role_name(r));
    }
    c.absent = ROLE(kDFinal);
    gradients other = make_gradients(c);
    for (role r = kDK; r <= kDDtBias; ++r) { /* the first whose gradient has something of it */
        cr_expect_not(compare_instances(&other.right, &g.right, ROLE(r), rounding), "%s: no final state", role_name(r));
    }
}

Test(support, wrong_gradients_fail) {
    check_wrong_gradients((test_case){.sequences = 3, .lengths = {70}});
}

Test(support, wrong_gradients_of_alike_keys_fail) {
    check_wrong_gradients((test_case){.sequences = 3, .lengths = {70}, .keys = kKeysCorrelated});
}

/* Of sequences of one token, some have a sum that chance made small: an error of half a percent of its scale passes
 * there, and not where operands have three bits more. Twice the gradient does not where nothing cancelled. */
Test(support, scales_count_where_a_sum_is_small) {
    enum { kSequences = 24 };
    for (gdelta_dtype dtype = GDELTA_DTYPE_BF16; dtype <= GDELTA_DTYPE_FP16; ++dtype) {
        gradients g = make_gradients((test_case){.sequences = kSequences, .lengths = {1}, .dtype = dtype});
        for (role r = kDG; r <= kDBeta; ++r) {
            int small = 0;
            for (int64_t n = 0; n < kSequences; ++n) {
                double size = fabs(instance_get(&g.right, r, n, 0, 0, 0));
                double scale = instance_get(&g.scales, r, n, 0, 0, 0);
                bool chance = size < scale / 10;
                small += chance;
                corrupt(&g.got, &g.scales, r, n, 0, chance ? 0 : 1, chance ? 5e-3 : 0);
                cr_expect_eq(passes(&g, ROLE(r), rounding), chance && dtype == GDELTA_DTYPE_BF16, "%s", role_name(r));
            }
            cr_expect_gt(small, 1);
        }
    }
}

/* Every byte that is no element of an output. */
Test(support, a_stray_write_is_seen) {
    instance got, want;
    make(&got, &want);
    role_set outputs = ROLE(kO) | ROLE(kFinal);
    cr_expect(instance_untouched(&got, outputs));
    const size_t strays[] = {
        0,
        got.bytes - 1,
        instance_offset(&got, kO, 0, 0, 0, 4) + 4,  /* the gap after a row */
        instance_offset(&got, kO, 3, 1, 3, 4) + 24, /* the row after the last sequence */
        instance_offset(&got, kO, 0, 0, 0, 0) - 1,
        instance_offset(&got, kV, 2, 3, 1, 1),
        instance_offset(&got, kInitial, 0, 0, 0, 0),
        instance_offset(&got, kFinal, 0, 5, 3, 4) + 4,                     /* the padding after a slot */
        instance_offset(&got, kFinal, 2, 5, 3, 4) + 4 * 4 * (30 + 3) + 99, /* a slot of nobody */
    };
    for (size_t i = 0; i < sizeof strays / sizeof *strays; ++i) {
        got.after[strays[i]] ^= 1;
        cr_expect_not(instance_untouched(&got, outputs), "stray write %zu", i);
        got.after[strays[i]] ^= 1;
    }
    cr_expect(instance_untouched(&got, outputs));
}

Test(support, numbers_depend_on_the_place_only) {
    cr_expect_eq(fill_key(1, 2, 3, 4, 5, 6), fill_key(1, 2, 3, 4, 5, 6));
    cr_expect_neq(fill_key(1, 2, 3, 4, 5, 6), fill_key(1, 2, 3, 4, 6, 5));
    double sum = 0, squares = 0;
    const int count = 100000;
    for (int i = 0; i < count; ++i) {
        double x = fill_normal(fill_key(7, 0, 0, i, 0, 0));
        sum += x;
        squares += x * x;
    }
    cr_expect_lt(fabs(sum / count), 0.02);
    cr_expect_lt(fabs(squares / count - 1), 0.02);
    cr_expect_eq(fill_round(GDELTA_DTYPE_BF16, 1 + 0x1p-9), 1);
    cr_expect_eq(fill_round(GDELTA_DTYPE_FP16, 1 + 0x1p-10), 1 + 0x1p-10);
}
