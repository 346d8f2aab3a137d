/* The tests' own machinery: what is wrong must be seen. What it prints about these faults is thrown away. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

static const test_engine *const reference = &test_engines[kReference];
static const test_engine *const recurrent = &test_engines[kRecurrent];

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
