/* The reference against what needs no other implementation: finite differences of its own forward pass, the same
 * problem in other forms, and the limits of its memory and number formats. It also takes every test that all engines
 * take. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include <gdelta/reference.h>

#include "host/convert.h"
#include "support/case.h"
#include "support/compare.h"

static const test_engine *const reference = &test_engines[kReference];

static bool run(instance *x, gdelta_operation operation) {
    return instance_run(x, reference, operation);
}

/* All numbers in fp64, so that nothing is rounded but by the arithmetic. */
static test_case in_fp64(test_case c) {
    c.dtype = c.gate_dtype = c.beta_dtype = c.state_dtype = c.parameter_dtype = c.out_dtype = GDELTA_DTYPE_FP64;
    return c;
}

/* ---- Gradients against finite differences ---- */

/* <d_o, o> + <d_final_state, final_state> of the inputs in x->after. */
static double loss(instance *x) {
    gdelta_problem problem = case_problem(&x->c);
    gdelta_forward_args args = instance_forward_args(x, x->after);
    cr_assert_eq(gdelta_reference_forward(&problem, &args), GDELTA_OK, "%s", gdelta_last_error());
    double sum = 0;
    static const role pairs[][2] = {{kO, kDO}, {kFinal, kDFinal}};
    for (int i = 0; i < 2; ++i) {
        if (!x->tensor[pairs[i][1]].present) continue;
        FOR_ELEMENTS(x, pairs[i][0], n, row, head, column)
        sum += instance_get(x, pairs[i][0], n, row, head, column) * instance_get(x, pairs[i][1], n, row, head, column);
    }
    return sum;
}

/* The five-point rule: exact for polynomials of degree four, its rounding about 1e-13 of the loss. */
static double difference(instance *x, char *element, gdelta_dtype dtype) {
    const double step = 1e-3;
    static const double weights[][2] = {{1, 8}, {-1, -8}, {2, -1}, {-2, 1}};
    double original = gdelta_load(element, dtype, 0), sum = 0;
    for (int i = 0; i < 4; ++i) {
        gdelta_store(element, dtype, 0, original + weights[i][0] * step);
        sum += weights[i][1] * loss(x);
    }
    gdelta_store(element, dtype, 0, original);
    return sum / (12 * step);
}

/* Every element of the gradient `to` of the input `from`. */
static void check_gradient(instance *x, role from, role to) {
    double error = 0, size = 0, worst = -1, worst_got = 0, worst_want = 0;
    int64_t at[4] = {0};
    FOR_ELEMENTS(x, from, n, row, head, column) {
        char *element = x->after + instance_offset(x, from, n, row, head, column);
        double want = difference(x, element, x->tensor[from].dtype), got = instance_get(x, to, n, row, head, column);
        error += (got - want) * (got - want);
        size += want * want;
        if (fabs(got - want) <= worst) continue;
        worst = fabs(got - want);
        worst_got = got;
        worst_want = want;
        memcpy(at, (int64_t[]){n, row, head, column}, sizeof at);
    }
    double tolerance = x->tensor[to].dtype == GDELTA_DTYPE_FP32 ? 1e-7 : 1e-9;
    cr_expect(sqrt(error) <= tolerance * sqrt(size) + 1e-12,
              "%s: relative error %.3g, worst at sequence %d, row %d, head %d, column %d: got %.12g, want %.12g\n"
              "  case: %s",
              role_name(to), sqrt(error / size), (int)at[0], (int)at[1], (int)at[2], (int)at[3], worst_got, worst_want,
              case_line(&x->c));
}

static void check_gradients(instance *x) {
    static const role pairs[][2] = {{kQ, kDQ},       {kK, kDK},       {kV, kDV},           {kG, kDG},
                                    {kBeta, kDBeta}, {kALog, kDALog}, {kDtBias, kDDtBias}, {kInitial, kDInitial}};
    cr_assert(run(x, GDELTA_OPERATION_BACKWARD));
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; ++i)
        if (x->tensor[pairs[i][0]].present && x->tensor[pairs[i][1]].present)
            check_gradient(x, pairs[i][0], pairs[i][1]);
}

#define THD_WITH_EMPTY .layout = GDELTA_LAYOUT_THD, .sequences = 4, .lengths = {3, 0, 5, 1}, .capacity = 11
#define DENSE(tokens) .sequences = 2, .lengths = {tokens}

Test(gradients, equal_finite_differences) {
    test_case cases[] = {
        {THD_WITH_EMPTY, .heads_q = 2, .heads_v = 4, .dim_k = 3, .dim_v = 5, .strength = kGateMild},
        {THD_WITH_EMPTY, .heads_q = 2, .heads_v = 6, .dim_k = 4, .dim_v = 3, .head_map = GDELTA_HEADS_TILED,
         .gate = GDELTA_GATE_LINEAR, .beta = GDELTA_BETA_SIGMOID, .l2norm = GDELTA_L2NORM_ADD_EPS,
         .state_order = GDELTA_STATE_VK},
        {DENSE(5), .heads_q = 4, .heads_v = 2, .dim_k = 5, .dim_v = 2, .gate = GDELTA_GATE_SOFTPLUS,
         .strength = kGateMild, .beta = GDELTA_BETA_TWO_SIGMOID, .l2norm = GDELTA_L2NORM_MAX_EPS, .eps = 4},
        {DENSE(5), .heads_q = 6, .heads_v = 2, .dim_k = 2, .dim_v = 5, .head_map = GDELTA_HEADS_TILED,
         .gate = GDELTA_GATE_LINEAR, .strength = kGateResets, .keys = kKeysShort},
        {DENSE(12), .heads_q = 1, .heads_v = 3, .dim_k = 3, .dim_v = 4, .strength = kGateResets, .beta_max = 2,
         .l2norm = GDELTA_L2NORM_ADD_EPS, .eps = 0.5},
        {DENSE(12), .heads_q = 1, .heads_v = 2, .dim_k = 3, .dim_v = 4, .gate = GDELTA_GATE_SOFTPLUS,
         .strength = kGateResets, .absent = ROLE(kDtBias), .layout = GDELTA_LAYOUT_BHSD, .gap = 3},
        {DENSE(4), .heads_q = 2, .heads_v = 2, .dim_k = 3, .dim_v = 3, .absent = ROLE(kDO), .strength = kGateMild},
        {DENSE(4), .heads_q = 2, .heads_v = 2, .dim_k = 3, .dim_v = 3, .absent = ROLE(kDFinal), .has_scale = true,
         .scale = -1.5, .l2norm = GDELTA_L2NORM_MAX_EPS},
        {DENSE(4), .heads_q = 3, .heads_v = 1, .dim_k = 3, .dim_v = 4, .has_scale = true, .scale = 0},
        {DENSE(6), .heads_q = 1, .heads_v = 2, .dim_k = 4, .dim_v = 3, .absent = ROLE(kG) | ROLE(kBeta)},
        {THD_WITH_EMPTY, .heads_q = 1, .heads_v = 2, .dim_k = 3, .dim_v = 4, .recycled = 5, .index64 = true},
        {DENSE(6), .heads_q = 1, .heads_v = 2, .dim_k = 4, .dim_v = 3, .absent = ROLE(kInitial)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        test_case c = in_fp64(cases[i]);
        instance x;
        instance_create(&x, &c);
        check_gradients(&x);
        instance_destroy(&x);
    }
}

/* Where softplus is linear, the gradient of a_t is that of its straight part, and still large with a small rate. */
Test(gradients, equal_finite_differences_where_softplus_is_linear) {
    test_case c = in_fp64(
        (test_case){DENSE(5), .heads_q = 1, .heads_v = 2, .dim_k = 3, .dim_v = 4, .gate = GDELTA_GATE_SOFTPLUS});
    instance x;
    instance_create(&x, &c);
    instance_put_all(&x, kG, 25);
    instance_put_all(&x, kALog, -4);
    check_gradients(&x);
    instance_destroy(&x);
}

Test(gradients, of_parameters_add_up_under_the_flag) {
    test_case c = in_fp64(
        (test_case){DENSE(5), .heads_q = 1, .heads_v = 3, .dim_k = 3, .dim_v = 4, .gate = GDELTA_GATE_SOFTPLUS});
    instance x;
    instance_create(&x, &c);
    cr_assert(run(&x, GDELTA_OPERATION_BACKWARD));
    gdelta_problem problem = case_problem(&c);
    gdelta_backward_args args = instance_backward_args(&x, x.after);
    args.flags = GDELTA_BACKWARD_ACCUMULATE_PARAMETERS;
    static const role parameters[] = {kDALog, kDDtBias};
    float once[2][3];
    for (int i = 0; i < 2; ++i)
        for (int head = 0; head < 3; ++head) once[i][head] = (float)instance_get(&x, parameters[i], 0, 0, 0, head);
    double dq = instance_get(&x, kDQ, 1, 2, 0, 1);
    cr_assert_eq(gdelta_reference_backward(&problem, &args), GDELTA_OK, "%s", gdelta_last_error());
    for (int i = 0; i < 2; ++i)
        for (int head = 0; head < 3; ++head) {
            double twice = instance_get(&x, parameters[i], 0, 0, 0, head);
            cr_expect(once[i][head] != 0 && fabs(twice - 2 * (double)once[i][head]) <= 3e-7 * fabs(twice),
                      "%s[%d]: %g, then %g", role_name(parameters[i]), head, once[i][head], twice);
        }
    cr_expect_eq(instance_get(&x, kDQ, 1, 2, 0, 1), dq, "other gradients are not added");
    instance_destroy(&x);
}

/* A sequence without a slot: all gradients of its rows are 0, whatever its rows hold, and no state is touched. */
Test(gradients, of_skipped_sequences_are_zero) {
    test_case c = in_fp64((test_case){DENSE(5), .heads_q = 2, .heads_v = 4, .dim_k = 3, .dim_v = 4,
                                      .gate = GDELTA_GATE_SOFTPLUS, .l2norm = GDELTA_L2NORM_ADD_EPS});
    case_use_slots(&c, kSlotsSame, 1);
    instance x;
    instance_create(&x, &c);
    static const role inputs[] = {kQ, kK, kV, kG, kBeta};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; ++i) FOR_ELEMENTS(&x, inputs[i], n, row, head, column)
    if (n == 0) instance_put(&x, inputs[i], n, row, head, column, NAN);
    static const role outputs[] = {kO, kDQ, kDK, kDV, kDG, kDBeta, kDInitial};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; ++i) {
        cr_assert(run(&x, i == 0 ? GDELTA_OPERATION_FORWARD : GDELTA_OPERATION_BACKWARD));
        FOR_ELEMENTS(&x, outputs[i], n, row, head, column)
        cr_assert((instance_get(&x, outputs[i], n, row, head, column) == 0) == (n == 0), "%s", role_name(outputs[i]));
    }
    FOR_ELEMENTS(&x, kDALog, n, row, head, column)
    cr_expect(isfinite(instance_get(&x, kDALog, n, row, head, column)), "a skipped sequence reached da_log");
    instance_destroy(&x);
}

/* ---- One meaning, several forms ---- */

/* A log gate of -inf, like a decay of 0, forgets all before it; the gradients of what it cut off are 0. */
Test(forms, minus_infinity_resets) {
    for (gdelta_gate gate = GDELTA_GATE_LOG; gate <= GDELTA_GATE_LINEAR; ++gate) {
        test_case c = in_fp64((test_case){
            .sequences = 1, .lengths = {7}, .heads_q = 1, .heads_v = 2, .dim_k = 4, .dim_v = 3, .gate = gate});
        test_case tail = c;
        tail.first_token = 4;
        tail.lengths[0] = 3;
        tail.absent = ROLE(kInitial);
        instance x, y;
        instance_create(&x, &c);
        instance_create(&y, &tail);
        for (int head = 0; head < 2; ++head)
            instance_put(&x, kG, 0, 4, head, 0, gate == GDELTA_GATE_LOG ? -INFINITY : 0);
        instance_copy(&y, kDFinal, &x, kDFinal);
        cr_assert(run(&x, GDELTA_OPERATION_FORWARD) && run(&y, GDELTA_OPERATION_FORWARD));
        cr_expect(compare_slices((slice){&x, kO, 0, 4, 3}, (slice){&y, kO, 0, 0, 3}, 0));
        cr_expect(compare_slices((slice){&x, kFinal, 0, 0, 0}, (slice){&y, kFinal, 0, 0, 0}, 0));
        cr_assert(run(&x, GDELTA_OPERATION_BACKWARD) && run(&y, GDELTA_OPERATION_BACKWARD));
        cr_expect(compare_slices((slice){&x, kDK, 0, 4, 3}, (slice){&y, kDK, 0, 0, 3}, 0));
        for (int head = 0; head < 2; ++head) {
            double dg = instance_get(&x, kDG, 0, 4, head, 0);
            cr_expect(gate == GDELTA_GATE_LOG ? dg == 0 : isfinite(dg) && dg != 0, "dg is %g", dg);
        }
        instance_destroy(&x);
        instance_destroy(&y);
    }
}

/* Which head of q, k and v each output head reads, written out. */
Test(forms, each_output_head_equals_its_heads_alone) {
    static const struct {
        int heads_q, heads_v;
        gdelta_head_map map;
        int q[6], k[6], v[6];
    } maps[] = {
        {2, 6, GDELTA_HEADS_INTERLEAVED, {0, 0, 0, 1, 1, 1}, {0, 0, 0, 1, 1, 1}, {0, 1, 2, 3, 4, 5}},
        {2, 6, GDELTA_HEADS_TILED, {0, 1, 0, 1, 0, 1}, {0, 1, 0, 1, 0, 1}, {0, 1, 2, 3, 4, 5}},
        {6, 3, GDELTA_HEADS_INTERLEAVED, {0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 2, 2}, {0, 0, 1, 1, 2, 2}},
        {6, 3, GDELTA_HEADS_TILED, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 0, 1, 2}, {0, 1, 2, 0, 1, 2}},
    };
    for (size_t m = 0; m < sizeof maps / sizeof *maps; ++m) {
        test_case c =
            in_fp64((test_case){DENSE(5), .dim_k = 3, .dim_v = 4, .l2norm = GDELTA_L2NORM_ADD_EPS,
                                .heads_q = maps[m].heads_q, .heads_v = maps[m].heads_v, .head_map = maps[m].map});
        test_case single = c;
        single.heads_q = single.heads_v = 1;
        instance all, alone;
        instance_create(&all, &c);
        instance_create(&alone, &single);
        cr_assert(run(&all, GDELTA_OPERATION_FORWARD));
        for (int h = 0; h < 6; ++h) {
            const struct {
                role role;
                int head;
            } from[] = {{kQ, maps[m].q[h]}, {kK, maps[m].k[h]}, {kV, maps[m].v[h]}, {kG, h}, {kBeta, h}, {kInitial, h}};
            for (size_t i = 0; i < sizeof from / sizeof *from; ++i)
                FOR_ELEMENTS(&alone, from[i].role, n, row, head, column)
            instance_put(&alone, from[i].role, n, row, head, column,
                         instance_get(&all, from[i].role, n, row, from[i].head, column));
            cr_assert(run(&alone, GDELTA_OPERATION_FORWARD));
            for (role r = kO; r <= kFinal; ++r) FOR_ELEMENTS(&alone, r, n, row, head, column)
            cr_assert_eq(instance_get(&alone, r, n, row, head, column), instance_get(&all, r, n, row, h, column),
                         "%s, map %zu, output head %d", role_name(r), m, h);
        }
        instance_destroy(&all);
        instance_destroy(&alone);
    }
}

static double gate_of(double a, double a_log, double dt_bias) {
    double x = a + dt_bias;
    return -exp(a_log) * (x > 20 ? x : log(1 + exp(x)));
}

/* A ready log gate and beta, in each of the other forms. */
Test(forms, gates_and_betas_agree) {
    test_case c = in_fp64((test_case){DENSE(9), .heads_q = 1, .heads_v = 3, .dim_k = 4, .dim_v = 3,
                                      .gate = GDELTA_GATE_SOFTPLUS, .beta = GDELTA_BETA_TWO_SIGMOID});
    test_case ready = c, linear = c;
    ready.gate = GDELTA_GATE_LOG;
    ready.beta = GDELTA_BETA_VALUE;
    linear.gate = GDELTA_GATE_LINEAR;
    linear.beta = GDELTA_BETA_SIGMOID;
    instance x, y, z;
    instance_create(&x, &c);
    instance_create(&y, &ready);
    instance_create(&z, &linear);
    instance_put_all(&x, kALog, -7);
    instance_put(&x, kG, 0, 4, 1, 0, 800); /* exp(800) is no double, the decay is about 0.5 */
    FOR_ELEMENTS(&x, kG, n, row, head, column) {
        double g = gate_of(instance_get(&x, kG, n, row, head, column), instance_get(&x, kALog, 0, 0, 0, head),
                           instance_get(&x, kDtBias, 0, 0, 0, head));
        double b = -0.1 - fabs(instance_get(&x, kBeta, n, row, head, column)); /* beta < 1 is a sigmoid too */
        double beta = 2 / (1 + exp(-b));
        instance_put(&x, kBeta, n, row, head, column, b);
        instance_put(&y, kG, n, row, head, column, g);
        instance_put(&y, kBeta, n, row, head, column, beta);
        instance_put(&z, kG, n, row, head, column, exp(g));
        instance_put(&z, kBeta, n, row, head, column, log(beta / (1 - beta)));
    }
    cr_assert(run(&x, GDELTA_OPERATION_FORWARD) && run(&y, GDELTA_OPERATION_FORWARD) &&
              run(&z, GDELTA_OPERATION_FORWARD));
    cr_expect(compare_instances(&x, &y, ROLE(kO) | ROLE(kFinal), reference));
    cr_expect(compare_instances(&z, &y, ROLE(kO) | ROLE(kFinal), reference));
    instance_destroy(&x);
    instance_destroy(&y);
    instance_destroy(&z);
}

/* Without g there is no decay, without beta it is 1, without an initial state it is zeros. */
Test(forms, absent_inputs_have_their_defaults) {
    test_case c = in_fp64((test_case){DENSE(6), .heads_q = 2, .heads_v = 2, .dim_k = 4, .dim_v = 3});
    test_case less = c;
    less.absent = ROLE(kG) | ROLE(kBeta) | ROLE(kInitial);
    instance x, y;
    instance_create(&x, &c);
    instance_create(&y, &less);
    instance_put_all(&x, kG, 0);
    instance_put_all(&x, kBeta, 1);
    instance_put_all(&x, kInitial, 0);
    cr_assert(run(&x, GDELTA_OPERATION_FORWARD) && run(&y, GDELTA_OPERATION_FORWARD));
    cr_expect(compare_bits(&y, &x, ROLE(kO) | ROLE(kFinal)));
    cr_assert(run(&x, GDELTA_OPERATION_BACKWARD) && run(&y, GDELTA_OPERATION_BACKWARD));
    cr_expect(compare_bits(&y, &x, ROLE(kDQ) | ROLE(kDK) | ROLE(kDV)));
    instance_destroy(&x);
    instance_destroy(&y);
}

/* One slot of -1 is enough, of the initial or of the final state. */
Test(forms, either_table_skips) {
    for (int which = 0; which < 2; ++which) {
        test_case c = in_fp64((test_case){DENSE(3), .heads_q = 1, .heads_v = 2, .dim_k = 3, .dim_v = 4});
        case_use_slots(&c, kSlotsDistinct, 0);
        (which ? c.final_slots : c.initial_slots)[1] = -1;
        instance x;
        instance_create(&x, &c);
        cr_assert(run(&x, GDELTA_OPERATION_FORWARD)); /* which sees to it that no state of it is written */
        FOR_ELEMENTS(&x, kO, n, row, head, column)
        cr_assert((instance_get(&x, kO, n, row, head, column) == 0) == (n == 1));
        instance_destroy(&x);
    }
}

/* ---- Memory ---- */

/* An empty sequence hands its state on as bits: NaN payloads live, in every type, and in place. */
Test(memory, empty_sequences_hand_on_every_bit) {
    for (gdelta_dtype dtype = GDELTA_DTYPE_BF16; dtype <= GDELTA_DTYPE_FP64; ++dtype)
        for (int in_place = 0; in_place < 2; ++in_place) {
            test_case c = {.layout = GDELTA_LAYOUT_THD,
                           .sequences = 2,
                           .lengths = {0, 0},
                           .heads_q = 1,
                           .heads_v = 2,
                           .dim_k = 3,
                           .dim_v = 5,
                           .state_dtype = dtype,
                           .in_place = in_place};
            instance x;
            instance_create(&x, &c);
            unsigned char bits = 0;
            FOR_ELEMENTS(&x, kInitial, n, row, head, column) {
                char *element = x.before + instance_offset(&x, kInitial, n, row, head, column);
                for (size_t i = 0; i < x.tensor[kInitial].bytes; ++i) element[i] = (char)(bits += 37);
                if (column == 0) memset(element + x.tensor[kInitial].bytes - 2, 0x7f, 2); /* large, or NaN */
                if (column == 1) memset(element + x.tensor[kInitial].bytes - 1, 0x7f, 1);
            }
            cr_assert(run(&x, GDELTA_OPERATION_FORWARD));
            FOR_ELEMENTS(&x, kFinal, n, row, head, column)
            cr_assert_eq(memcmp(x.after + instance_offset(&x, kFinal, n, row, head, column),
                                x.before + instance_offset(&x, kInitial, n, row, head, column), x.tensor[kFinal].bytes),
                         0, "dtype %d", dtype);
            instance_destroy(&x);
        }
}

/* The states of 2^20 tokens of 2^20 x 2^20 are beyond any memory: a sentence, and no output is touched. None of the
 * tensors is as large as the problem says; nothing may be read either. */
Test(memory, too_little_is_an_error_before_anything_is_written) {
    static double q, k, v, d_o, dq = 1;
    int32_t cu_seqlens[] = {0, 1 << 20};
    gdelta_problem problem = {.struct_size = sizeof problem,
                              .layout = GDELTA_LAYOUT_THD,
                              .sequences = 1,
                              .total_tokens = 1 << 20,
                              .heads_q = 1,
                              .heads_k = 1,
                              .heads_v = 1,
                              .dim_k = 1 << 20,
                              .dim_v = 1 << 20,
                              .dtype = GDELTA_DTYPE_FP64};
    gdelta_backward_args args = {.struct_size = sizeof args,
                                 .q = {.data = &q},
                                 .k = {.data = &k},
                                 .v = {.data = &v},
                                 .cu_seqlens = {.data = cu_seqlens},
                                 .d_o = {.data = &d_o},
                                 .dq = {.data = &dq}};
    cr_expect_eq(gdelta_reference_backward(&problem, &args), GDELTA_ERROR_OUT_OF_MEMORY);
    cr_expect(strstr(gdelta_last_error(), "bytes of host memory"), "%s", gdelta_last_error());
    cr_expect_eq(dq, 1);
}

/* ---- Number formats ---- */

Test(numbers, every_half_survives_a_round_trip) {
    for (gdelta_dtype dtype = GDELTA_DTYPE_BF16; dtype <= GDELTA_DTYPE_FP16; ++dtype)
        for (uint32_t code = 0; code < 1 << 16; ++code) {
            uint16_t from[4] = {(uint16_t)code}, to[4] = {0};
            double value = gdelta_load(from, dtype, 0);
            gdelta_store(to, dtype, 0, value);
            cr_assert(from[0] == to[0] || (isnan(value) && isnan(gdelta_load(to, dtype, 0))), "%x", code);
        }
}

Test(numbers, stores_round_to_nearest_even) {
    static const struct {
        gdelta_dtype dtype;
        double value;
        uint16_t bits;
    } rows[] = {
        {GDELTA_DTYPE_BF16, 1, 0x3f80},
        {GDELTA_DTYPE_BF16, -2.5, 0xc020},
        {GDELTA_DTYPE_BF16, 1 + 0x1p-8, 0x3f80},           /* a tie, to the even below */
        {GDELTA_DTYPE_BF16, 1 + 0x3p-8, 0x3f82},           /* a tie, to the even above */
        {GDELTA_DTYPE_BF16, 1 + 0x1p-8 + 0x1p-40, 0x3f81}, /* through fp32 this would be a tie */
        {GDELTA_DTYPE_BF16, 2 - 0x1p-9, 0x4000},           /* carries into the exponent */
        {GDELTA_DTYPE_BF16, 0x1p-133, 0x0001},
        {GDELTA_DTYPE_BF16, 0x1p-134, 0x0000},
        {GDELTA_DTYPE_BF16, 0x1.fep-127, 0x0080}, /* the largest subnormal rounds up to the smallest normal */
        {GDELTA_DTYPE_BF16, 0x1.fep127, 0x7f7f},
        {GDELTA_DTYPE_BF16, 0x1.ffp127, 0x7f80}, /* the tie above the largest is infinite */
        {GDELTA_DTYPE_BF16, -1e300, 0xff80},
        {GDELTA_DTYPE_FP16, 1, 0x3c00},
        {GDELTA_DTYPE_FP16, 0.1, 0x2e66},
        {GDELTA_DTYPE_FP16, 1 + 0x1p-11, 0x3c00},
        {GDELTA_DTYPE_FP16, 1 + 0x3p-11, 0x3c02},
        {GDELTA_DTYPE_FP16, 1 + 0x1p-11 + 0x1p-40, 0x3c01},
        {GDELTA_DTYPE_FP16, 65504, 0x7bff},
        {GDELTA_DTYPE_FP16, 65519.99, 0x7bff},
        {GDELTA_DTYPE_FP16, 65520, 0x7c00},
        {GDELTA_DTYPE_FP16, 0x1p-24, 0x0001},
        {GDELTA_DTYPE_FP16, 0x1p-25, 0x0000},
        {GDELTA_DTYPE_FP16, -0x1.8p-25, 0x8001},
        {GDELTA_DTYPE_FP16, 0x1.ffcp-15, 0x0400},
        {GDELTA_DTYPE_FP16, -0.0, 0x8000},
        {GDELTA_DTYPE_FP16, INFINITY, 0x7c00},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        uint16_t bits[4] = {0}; /* room for any dtype, by which the compiler judges */
        gdelta_store(bits, rows[i].dtype, 0, rows[i].value);
        cr_expect_eq(bits[0], rows[i].bits, "%a as dtype %d is %04x, not %04x", rows[i].value, rows[i].dtype, bits[0],
                     rows[i].bits);
    }
}
