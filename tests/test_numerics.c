/* Gates, beta, norms and types at their limits, with numbers that can be checked by hand. */
#include <gdelta/reference.h>
#include <math.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

static const role_set forward_roles = ROLE(kO) | ROLE(kFinal);

/* ---- Gates ---- */

/* A decay of 1 is no decay, however long: g = 0, and no g. */
ENGINE_TEST(numerics, zero_gate_is_no_gate, 1) {
    for (gdelta_dtype dtype = GDELTA_DTYPE_BF16; dtype <= GDELTA_DTYPE_FP32; dtype += 2) {
        test_case c = two_head_case(130);
        c.dtype = dtype;
        c.strength = kGateZero;
        instance zero = make_instance(&c);
        c.absent = ROLE(kG);
        instance none = make_instance(&c);
        if (RUNS(&c, FORWARD)) {
            RUN(&zero, FORWARD);
            RUN(&none, FORWARD);
            cr_expect(compare_bits(&zero, &none, forward_roles));
        }
        if (RUNS(&c, BACKWARD)) {
            RUN(&zero, BACKWARD);
            RUN(&none, BACKWARD);
            cr_expect(compare_bits(&zero, &none, ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDBeta) | ROLE(kDInitial)));
        }
        cr_expect(check_instance(&zero, engine, kTraining));
        instance_destroy(&zero);
        instance_destroy(&none);
    }
}

/* g is 0, or -0.1 half of the time: no error that grows with the length. */
ENGINE_TEST(numerics, no_drift_without_decay, 4) {
    static const int64_t lengths[] = {7, 100, 1000, 4096};
    for (int half = 0; half < 2; ++half) {
        test_case c = two_head_case(lengths[part]);
        c.dtype = half ? GDELTA_DTYPE_BF16 : GDELTA_DTYPE_FP32;
        c.beta = GDELTA_BETA_SIGMOID;
        if (part == 3) c.dim_k = c.dim_v = 64;
        instance x = make_instance(&c);
        FOR_ELEMENTS(&x, kG, n, row, head, column) {
            bool decays = half && fill_uniform(fill_key(1, kG, n, row, head, column)) < 0.5;
            instance_put(&x, kG, n, row, head, column, decays ? -0.1 : 0);
        }
        cr_expect(check_instance(&x, engine, part < 3 ? kTraining : kForward));
        instance_destroy(&x);
    }
}

/* Gates so strong that a product of decays, or its inverse, leaves the range of fp32. All finite, all as the reference
 * has it; so is an exact reset in the middle, whose gate has no gradient. */
ENGINE_TEST(numerics, strong_gates_stay_finite, 4) {
    for (int large = 0; large < 2; ++large) {
        instance x = make_instance(&(test_case){.sequences = 1,
                                                .lengths = {130},
                                                .heads_q = 2,
                                                .heads_v = 2,
                                                .dim_k = 128,
                                                .dim_v = 128,
                                                .out_dtype = GDELTA_DTYPE_FP32,
                                                .l2norm = GDELTA_L2NORM_ADD_EPS});
        FOR_ELEMENTS(&x, kG, n, row, head, column) {
            const double gates[] = {-100, row % 2 ? -50 : 0, -1e4, row == 70 ? -INFINITY : -0.05};
            instance_put(&x, kG, n, row, head, column, gates[part]);
        }
        FOR_ELEMENTS(&x, kInitial, n, row, head, column) {
            double value = instance_get(&x, kInitial, n, row, head, column);
            instance_put(&x, kInitial, n, row, head, column, large ? 2e3 * value : value);
        }
        cr_expect(check_instance(&x, engine, kTraining), "gate %d", part);
        if (part == 3 && RUNS(&x.c, BACKWARD)) {
            for (int head = 0; head < 2; ++head) cr_expect_eq(instance_get(&x, kDG, 0, 70, head, 0), 0);
            double sum = 0;
            FOR_ELEMENTS(&x, kDInitial, n, row, head, column) {
                sum += fabs(instance_get(&x, kDInitial, n, row, head, column));
            }
            cr_expect_gt(sum, 0); /* from the tokens before the reset */
        }
        instance_destroy(&x);
    }
}

/* softplus is linear where exp overflows: the decay of a state of ones, with nothing written. */
ENGINE_TEST(numerics, fused_gate_at_large_logits, 1) {
    enum { kLogits = 5 };
    static const double logits[kLogits] = {20.0, 20.001, 87.9, 88.1, 100};
    test_case c = two_head_case(1);
    c.heads_q = c.heads_v = kLogits;
    c.gate = GDELTA_GATE_SOFTPLUS;
    instance x = make_instance(&c);
    instance_put_all(&x, kALog, -7);
    instance_put_all(&x, kDtBias, 0);
    instance_put_all(&x, kBeta, 0);
    instance_put_all(&x, kInitial, 1);
    for (int head = 0; head < kLogits; ++head) instance_put(&x, kG, 0, 0, head, 0, logits[head]);
    for (int step = 0; step < 1 + RUNS(&c, STEP); ++step) {
        cr_assert(instance_run(&x, engine, step ? GDELTA_OPERATION_STEP : GDELTA_OPERATION_FORWARD));
        for (int head = 0; head < kLogits; ++head) {
            double decay = instance_get(&x, kFinal, 0, 5, head, 9);
            cr_expect_float_eq(decay, exp(-exp(-7) * logits[head]), 1e-6, "logit %g: decay %.8g", logits[head], decay);
            if (head > 0) cr_expect_lt(decay, instance_get(&x, kFinal, 0, 5, head - 1, 9));
        }
        cr_expect_float_eq(instance_get(&x, kFinal, 0, 0, kLogits - 1, 0), 0.91285, 1e-5);
    }
    cr_expect(check_instance(&x, engine, kTraining | kStep));
    instance_destroy(&x);
}

/* ---- Beta ---- */

static double largest(const instance *x, role r) {
    double most = 0;
    FOR_ELEMENTS(x, r, n, row, head, column) most = fmax(most, fabs(instance_get(x, r, n, row, head, column)));
    return most;
}

static double largest_difference(const instance *x, role a, role b) {
    double most = 0;
    FOR_ELEMENTS(x, a, n, row, head, column) {
        double difference = fabs(instance_get(x, a, n, row, head, column) - instance_get(x, b, n, row, head, column));
        most = isnan(difference) ? INFINITY : fmax(most, difference);
    }
    return most;
}

/* beta = 2 reflects the state along k, twice is as before; beta = 1 removes what is under k; beta = 0 writes nothing.
 */
ENGINE_TEST(numerics, beta_reflects_projects_and_rests, 1) {
    for (gdelta_dtype dtype = GDELTA_DTYPE_BF16; dtype <= GDELTA_DTYPE_FP32; dtype += 2) {
        double tolerance = dtype == GDELTA_DTYPE_FP32 ? 1e-5 : 1e-2;
        test_case c = two_head_case(2);
        c.dtype = dtype;
        c.l2norm = GDELTA_L2NORM_NONE;
        c.strength = kGateZero;
        if (!RUNS(&c, FORWARD)) continue;
        instance x = make_instance(&c);
        instance_put_all(&x, kV, 0);
        FOR_ELEMENTS(&x, kK, n, row, head, column) {
            instance_put(&x, kK, n, row, head, column, instance_get(&x, kK, n, 0, head, column));
        }
        instance_put_all(&x, kBeta, 2);
        RUN(&x, FORWARD);
        cr_expect_leq(largest_difference(&x, kFinal, kInitial), tolerance * largest(&x, kInitial));

        instance_put_all(&x, kBeta, 1);
        RUN(&x, FORWARD);
        for (int head = 0; head < 2; ++head) {
            for (int column = 0; column < 128; ++column) {
                double under_key = 0;
                for (int row = 0; row < 128; ++row) {
                    under_key += instance_get(&x, kK, 0, 0, 0, row) * instance_get(&x, kFinal, 0, row, head, column);
                }
                cr_assert_float_eq(under_key, 0, tolerance * largest(&x, kInitial));
            }
        }

        instance_put_all(&x, kBeta, 0);
        RUN(&x, FORWARD);
        cr_expect_eq(largest_difference(&x, kFinal, kInitial), 0);
        instance_destroy(&x);
    }
}

/* Nearly undamped reflections, thousands of them: the state grows, the error must not grow faster. */
ENGINE_TEST(numerics, long_run_of_negative_eigenvalues, 1) {
    test_case c = two_head_case(4096);
    c.dim_k = c.dim_v = 64;
    c.heads_v = 1;
    c.dtype = GDELTA_DTYPE_FP32;
    c.l2norm = GDELTA_L2NORM_NONE;
    c.strength = kGateZero;
    NEEDS(&c, FORWARD);
    instance x = make_instance(&c);
    instance_put_all(&x, kBeta, 1.99);
    cr_expect(check_instance(&x, engine, kForward));
    instance_destroy(&x);
}

/* ---- Norm ---- */

/* With v = 1, beta = 1 and S = 0, one token leaves the normalised key in every column of the state, and reads the
 * product of the normalised query and key. */
static void expect_length(const test_engine *engine, gdelta_dtype dtype, gdelta_l2norm norm, double element,
                          double length) {
    test_case c = two_head_case(1);
    c.dtype = dtype;
    c.l2norm = norm;
    c.has_scale = true;
    c.scale = 1;
    c.strength = kGateZero;
    if (!RUNS(&c, FORWARD)) return;
    double tolerance = fmax(1e-5, compare_tolerance(engine, kFinal, GDELTA_DTYPE_FP32));
    instance x = make_instance(&c);
    instance_put_all(&x, kQ, element);
    instance_put_all(&x, kK, element);
    instance_put_all(&x, kV, 1);
    instance_put_all(&x, kBeta, 1);
    instance_put_all(&x, kInitial, 0);
    for (int step = 0; step < 1 + RUNS(&c, STEP); ++step) {
        cr_assert(instance_run(&x, engine, step ? GDELTA_OPERATION_STEP : GDELTA_OPERATION_FORWARD));
        double sum = 0;
        for (int row = 0; row < 128; ++row) sum += pow(instance_get(&x, kFinal, 0, row, 1, 3), 2);
        cr_expect_float_eq(sqrt(sum), length, tolerance, "norm %d of %g: key %g", norm, element, sqrt(sum));
        double o = instance_get(&x, kO, 0, 0, 1, 3);
        cr_expect_float_eq(o, length * length, tolerance, "norm %d of %g: o %g", norm, element, o);
    }
    cr_expect(check_instance(&x, engine, kForward | kStep));
    instance_destroy(&x);
}

ENGINE_TEST(numerics, norm_places_eps_as_documented, 1) {
    double length = sqrt(128e-8 / (128e-8 + 1e-6)); /* 0.7493 */
    expect_length(engine, GDELTA_DTYPE_FP32, GDELTA_L2NORM_ADD_EPS, 1e-4, length);
    expect_length(engine, GDELTA_DTYPE_FP32, GDELTA_L2NORM_MAX_EPS, 1e-4, 1);
    expect_length(engine, GDELTA_DTYPE_FP32, GDELTA_L2NORM_MAX_EPS, 1e-5, sqrt(128e-10 / 1e-6));
    for (gdelta_l2norm norm = GDELTA_L2NORM_ADD_EPS; norm <= GDELTA_L2NORM_MAX_EPS; ++norm) {
        expect_length(engine, GDELTA_DTYPE_FP32, norm, 0, 0);
        expect_length(engine, GDELTA_DTYPE_BF16, norm, 300, 1);
        expect_length(engine, GDELTA_DTYPE_FP16, norm, 300, 1); /* the sum of squares, 1.2e7, is no fp16 number */
    }
}

/* ---- Types ---- */

/* A state that is too large for fp16, under fp16 inputs, and a gradient of one that is too small. */
ENGINE_TEST(numerics, fp16_inputs_keep_fp32_states, 1) {
    test_case c = two_head_case(1);
    c.dtype = GDELTA_DTYPE_FP16;
    c.l2norm = GDELTA_L2NORM_NONE;
    c.has_scale = true;
    c.scale = 1;
    instance x = make_instance(&c);
    instance_put_all(&x, kInitial, 0);
    instance_put_all(&x, kQ, 0);
    instance_put_all(&x, kBeta, 0);
    instance_put_all(&x, kG, -4);
    for (int head = 0; head < 2; ++head) instance_put(&x, kInitial, 0, 0, head, 0, 65536);
    instance_put(&x, kQ, 0, 0, 0, 0, 1);
    for (int step = 0; step < 1 + RUNS(&c, STEP); ++step) {
        cr_assert(instance_run(&x, engine, step ? GDELTA_OPERATION_STEP : GDELTA_OPERATION_FORWARD));
        cr_expect_float_eq(instance_get(&x, kO, 0, 0, 1, 0), 1200.33, 1.2);
        cr_expect_eq(instance_get(&x, kO, 0, 0, 1, 1), 0);
    }
    cr_expect(check_instance(&x, engine, kTraining | kStep));
    instance_destroy(&x);

    c = two_head_case(64);
    c.dtype = GDELTA_DTYPE_FP16;
    c.absent = ROLE(kDO);
    if (!RUNS(&c, BACKWARD)) return;
    instance_create(&x, &c);
    instance_put_all(&x, kDFinal, 0x1p-25);
    cr_expect(check_instance(&x, engine, kBackward));
    cr_expect_gt(largest(&x, kDV), 0);
    instance_destroy(&x);
}

/* A step of one token: token t of a text that lies in memory as a whole. */
static gdelta_step_args step_of_token(const instance *text, char *arena, int64_t t) {
    gdelta_step_args args = instance_step_args(text, arena);
    gdelta_tensor *tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.o};
    static const role roles[] = {kQ, kK, kV, kG, kBeta, kO};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; ++i) {
        tensors[i]->data = arena + instance_offset(text, roles[i], 0, t, 0, 0);
    }
    return args;
}

/* Decodes the text in place on its initial state. */
static void decode(instance *text, const test_engine *engine) {
    test_case one = text->c;
    one.lengths[0] = 1;
    gdelta_problem problem = case_problem(&one);
    if (!engine->on_gpu) {
        memcpy(text->after, text->before, text->bytes);
        for (int64_t t = 0; t < text->c.lengths[0]; ++t) {
            gdelta_step_args args = step_of_token(text, text->after, t);
            cr_assert_eq(gdelta_reference_step(&problem, &args), GDELTA_OK, "%s", gdelta_last_error());
        }
        return;
    }
    device_instance d;
    gdelta_plan *plan;
    problem.engine = engine->engine;
    cr_assert_eq(gdelta_plan_create(&problem, &plan), GDELTA_OK, "%s", gdelta_last_error());
    cr_assert(device_create(&d, text, engine, GDELTA_OPERATION_FORWARD));
    device_upload(&d, text);
    for (int64_t t = 0; t < text->c.lengths[0]; ++t) {
        gdelta_step_args args = step_of_token(text, d.arena.data, t);
        cr_assert_eq(gdelta_step(plan, &args, NULL, 0, NULL), GDELTA_OK, "%s", gdelta_last_error());
    }
    gpu_stream_finish(NULL);
    cr_expect(device_download(&d, text));
    device_destroy(&d);
    gdelta_plan_destroy(plan);
}

/* Decode on a state that is stored in each type: what is lost is one rounding of the storage a token, half a unit of
 * the last place, which adds up at random while the weak decay forgets little of it. Against the unrounded state, so
 * that the error counts the last rounding too. */
ENGINE_TEST(numerics, decode_drifts_by_storage_alone, 3) {
    static const gdelta_dtype dtypes[] = {GDELTA_DTYPE_FP32, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16};
    static const double tolerances[] = {1e-5, 3e-2, 4e-3};
    test_case c = two_head_case(4096);
    c.heads_v = 1;
    c.state_dtype = dtypes[part];
    c.in_place = true;
    NEEDS(&c, STEP);
    instance text = make_instance(&c), plain;
    FOR_ELEMENTS(&text, kG, n, row, head, column) {
        instance_put(&text, kG, n, row, head, column, 0.02 * instance_get(&text, kG, n, row, head, column));
    }
    instance_put_all(&text, kInitial, 0);
    instance_create_plain(&plain, &text);
    cr_assert(instance_run(&plain, &test_engines[kReference], GDELTA_OPERATION_FORWARD));
    decode(&text, engine);
    cr_expect(instance_untouched(&text, ROLE(kO) | ROLE(kFinal)));
    double error = 0, size = 0;
    FOR_ELEMENTS(&text, kFinal, n, row, head, column) {
        double want = instance_get(&plain, kFinal, n, row, head, column);
        error += pow(instance_get(&text, kFinal, n, row, head, column) - want, 2);
        size += want * want;
    }
    cr_expect_leq(sqrt(error / size), tolerances[part], "relative error %g", sqrt(error / size));
    instance_destroy(&plain);
    instance_destroy(&text);
}

/* Calls with other types in between change nothing. */
ENGINE_TEST(numerics, types_may_alternate, 1) {
    test_case c = two_head_case(70);
    c.gate = GDELTA_GATE_SOFTPLUS;
    case_use_slots(&c, kSlotsDistinct, 0);
    c.out_dtype = GDELTA_DTYPE_DEFAULT;
    instance first = make_instance(&c), again = make_instance(&c);
    cr_expect(check_instance(&first, engine, kForward));
    c.dtype = c.gate_dtype = c.parameter_dtype = GDELTA_DTYPE_FP16;
    c.index64 = true;
    cr_expect(check_case(&c, engine, kForward));
    cr_expect(check_instance(&again, engine, kForward));
    cr_expect(compare_bits(&again, &first, forward_roles));
    c.parameter_dtype = GDELTA_DTYPE_BF16;
    cr_expect(check_case(&c, engine, kForward));
    instance_destroy(&again);
    instance_destroy(&first);
}
