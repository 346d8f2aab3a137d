/* States handed from call to call: cuts, documents, empty sequences, slots, order, decode. Bit for bit where the state
 * is held in the engine's own precision. */
#include <math.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

static const uint32_t forward_roles = ROLE(kO) | ROLE(kFinal);
static const uint32_t token_gradients = ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta);

static test_case base_case(const test_engine *engine) {
    return (test_case){.sequences = 2,
                       .lengths = {150},
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 64,
                       .dim_v = 128,
                       .state_dtype = engine->exact_state,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .strength = kGateMild};
}

/* ---- Cuts ---- */

enum { kPieces = 6 };
static const int64_t cuts[kPieces + 1] = {0, 1, 6, 64, 65, 130, 150};

/* Compares a piece, from token `first` on, with these rows of the whole. */
static bool same_rows(const instance *piece, const instance *whole, role r, int64_t first, bool exact,
                      const test_engine *engine) {
    double tolerance = compare_tolerance(engine, r, piece->tensor[r].dtype);
    bool good = true;
    for (int n = 0; n < piece->c.sequences; ++n) {
        int64_t rows = piece->c.lengths[0];
        slice got = {piece, r, n, 0, rows}, want = {whole, r, n, first, rows};
        good = (exact ? compare_slice_bits(got, want) : compare_slices(got, want, tolerance)) && good;
    }
    return good;
}

/* Runs the pieces from left to right, each from the state that the one before left. */
static void forward_in_pieces(const test_case *whole, instance piece[kPieces], const test_engine *engine) {
    for (int i = 0; i < kPieces; ++i) {
        test_case c = *whole;
        c.first_token = cuts[i];
        c.lengths[0] = cuts[i + 1] - cuts[i];
        instance_create(&piece[i], &c);
        if (i > 0) instance_copy(&piece[i], kInitial, &piece[i - 1], kFinal);
        RUN(&piece[i], FORWARD);
    }
}

ENGINE_TEST(states, any_cut_gives_the_same_bits, 1) {
    test_case c = base_case(engine);
    instance whole = make_instance(&c), piece[kPieces];
    RUN(&whole, FORWARD);
    forward_in_pieces(&c, piece, engine);
    for (int i = 0; i < kPieces; ++i) cr_expect(same_rows(&piece[i], &whole, kO, cuts[i], true, engine), "piece %d", i);
    cr_expect(compare_bits(&piece[kPieces - 1], &whole, ROLE(kFinal)));
    for (int i = 0; i < kPieces; ++i) instance_destroy(&piece[i]);
    instance_destroy(&whole);
}

ENGINE_TEST(states, gradients_are_handed_back, 1) {
    test_case c = base_case(engine);
    c.dtype = GDELTA_DTYPE_FP32;
    c.out_dtype = engine->exact_state;
    instance whole = make_instance(&c), piece[kPieces];
    RUN(&whole, BACKWARD);
    forward_in_pieces(&c, piece, engine);
    for (int i = kPieces - 1; i >= 0; --i) {
        if (i < kPieces - 1) instance_copy(&piece[i], kDFinal, &piece[i + 1], kDInitial);
        RUN(&piece[i], BACKWARD);
        for (role r = 0; r < kRoles; ++r) {
            if (!(token_gradients & ROLE(r))) continue;
            cr_expect(same_rows(&piece[i], &whole, r, cuts[i], false, engine), "piece %d", i);
        }
    }
    cr_expect(compare_instances(&piece[0], &whole, ROLE(kDInitial), engine));
    for (int i = 0; i < kPieces; ++i) instance_destroy(&piece[i]);
    instance_destroy(&whole);
}

/* ---- Documents ---- */

static test_case packed_case(const test_engine *engine) {
    test_case c = base_case(engine);
    c.layout = GDELTA_LAYOUT_THD;
    c.sequences = 3;
    c.lengths[0] = 37;
    c.lengths[1] = 51;
    c.lengths[2] = 40;
    return c;
}

static bool same_sequence(const instance *a, int64_t n, const instance *b, int64_t m, uint32_t roles) {
    bool good = true;
    for (role r = 0; r < kRoles; ++r) {
        if (roles & ROLE(r)) good = compare_slice_bits((slice){a, r, n, 0, 0}, (slice){b, r, m, 0, 0}) && good;
    }
    return good;
}

ENGINE_TEST(states, packed_equals_separate_calls, 1) {
    test_case c = packed_case(engine);
    instance packed = make_instance(&c);
    for (int n = 0; n < c.sequences; ++n) {
        test_case one = c;
        one.layout = GDELTA_LAYOUT_BSHD;
        one.sequences = 1;
        one.lengths[0] = c.lengths[n];
        one.first_sequence = n;
        instance alone = make_instance(&one);
        RUN(&packed, FORWARD);
        RUN(&alone, FORWARD);
        cr_expect(same_sequence(&alone, 0, &packed, n, forward_roles), "forward, document %d", n);
        RUN(&packed, BACKWARD);
        RUN(&alone, BACKWARD);
        cr_expect(same_sequence(&alone, 0, &packed, n, token_gradients | ROLE(kDInitial)), "backward, document %d", n);
        instance_destroy(&alone);
    }
    instance_destroy(&packed);
}

ENGINE_TEST(states, documents_do_not_meet, 1) {
    test_case c = packed_case(engine);
    instance a = make_instance(&c), b = make_instance(&c);
    FOR_ELEMENTS(&b, kV, n, row, head, column) {
        if (n == 0) instance_put(&b, kV, n, row, head, column, 100 * instance_get(&a, kV, n, row, head, column));
    }
    RUN(&a, FORWARD);
    RUN(&b, FORWARD);
    for (int n = 1; n < 3; ++n) cr_expect(same_sequence(&b, n, &a, n, forward_roles), "forward, document %d", n);
    RUN(&a, BACKWARD);
    RUN(&b, BACKWARD);
    uint32_t gradients = token_gradients | ROLE(kDInitial);
    for (int n = 1; n < 3; ++n) cr_expect(same_sequence(&b, n, &a, n, gradients), "backward, document %d", n);

    /* A loss on document 1 alone. */
    FOR_ELEMENTS(&a, kDO, n, row, head, column) {
        if (n != 1) instance_put(&a, kDO, n, row, head, column, 0);
    }
    FOR_ELEMENTS(&a, kDFinal, n, row, head, column) {
        if (n != 1) instance_put(&a, kDFinal, n, row, head, column, 0);
    }
    RUN(&a, BACKWARD);
    cr_expect(same_sequence(&b, 1, &a, 1, gradients));
    for (role r = 0; r < kRoles; ++r) {
        if (!(gradients & ROLE(r))) continue;
        int64_t nonzero = 0;
        FOR_ELEMENTS(&a, r, n, row, head, column) {
            nonzero += n != 1 && !(instance_get(&a, r, n, row, head, column) == 0);
        }
        cr_expect_eq(nonzero, 0, "%s of the other documents", role_name(r));
    }
    instance_destroy(&a);
    instance_destroy(&b);
}

ENGINE_TEST(states, empty_sequences_hand_on_their_state, 1) {
    static const gdelta_dtype dtypes[] = {GDELTA_DTYPE_FP32, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16};
    for (int i = 0; i < 6; ++i) {
        test_case c = base_case(engine);
        c.layout = GDELTA_LAYOUT_THD;
        c.sequences = 6;
        static const int64_t lengths[] = {0, 5, 0, 0, 65, 0};
        for (int n = 0; n < c.sequences; ++n) c.lengths[n] = lengths[n];
        c.state_dtype = dtypes[i % 3];
        c.state_order = i / 3;
        instance x = make_instance(&c);
        RUN(&x, FORWARD);
        for (int n = 0; n < c.sequences; ++n) {
            if (lengths[n]) continue;
            cr_expect(compare_slice_bits((slice){&x, kFinal, n, 0, 0}, (slice){&x, kInitial, n, 0, 0}));
        }
        RUN(&x, BACKWARD);
        for (int n = 0; n < c.sequences; ++n) {
            if (lengths[n]) continue;
            cr_expect(compare_slice_bits((slice){&x, kDInitial, n, 0, 0}, (slice){&x, kDFinal, n, 0, 0}));
        }
        cr_expect(check_instance(&x, engine, kTraining));
        instance_destroy(&x);

        c.absent = ROLE(kInitial);
        instance_create(&x, &c);
        RUN(&x, FORWARD);
        int64_t nonzero = 0;
        FOR_ELEMENTS(&x, kFinal, n, row, head, column) {
            nonzero += !lengths[n] && !(instance_get(&x, kFinal, n, row, head, column) == 0);
        }
        cr_expect_eq(nonzero, 0);
        instance_destroy(&x);
    }
}

/* ---- Slots ---- */

/* A decode batch with padded rows. That no slot of nobody and no padding is written, instance_run looks at. */
ENGINE_TEST(states, padded_rows_have_no_slot, 1) {
    static const int64_t slots[] = {3, -1, 0, -1, 5, -1, -1, 7};
    static const gdelta_dtype dtypes[] = {GDELTA_DTYPE_FP32, GDELTA_DTYPE_BF16};
    for (int i = 0; i < 8; ++i) {
        test_case c = base_case(engine);
        c.sequences = c.slot_count = 8;
        for (int n = 0; n < 8; ++n) c.initial_slots[n] = c.final_slots[n] = slots[n];
        c.lengths[0] = i & 1 ? 4 : 1;
        c.state_dtype = dtypes[i >> 1 & 1];
        c.slot_padding = 4096;
        c.in_place = true;
        c.index64 = i >> 2 & 1;
        instance pool = make_instance(&c);
        RUN(&pool, STEP);
        for (int n = 0; n < 8; ++n) {
            if (slots[n] < 0) {
                int64_t nonzero = 0;
                FOR_ELEMENTS(&pool, kO, m, row, head, column) {
                    nonzero += m == n && !(instance_get(&pool, kO, m, row, head, column) == 0);
                }
                cr_expect_eq(nonzero, 0, "padded row %d", n);
                continue;
            }
            test_case one = c;
            one.sequences = 1;
            one.first_sequence = n;
            one.slot_count = 0;
            one.slot_padding = 0;
            one.in_place = false;
            instance alone = make_instance(&one);
            RUN(&alone, STEP);
            cr_expect(same_sequence(&pool, n, &alone, 0, forward_roles), "row %d, variant %d", n, i);
            instance_destroy(&alone);
        }
        instance_destroy(&pool);
    }
}

/* A recycled slot holds NaN, and its sequence starts from zeros as if there were no initial states. */
ENGINE_TEST(states, recycled_slots_leak_nothing, 1) {
    test_case c = base_case(engine);
    c.sequences = 4;
    c.lengths[0] = 16;
    case_use_slots(&c, kSlotsSame, 0);
    c.in_place = true;
    c.recycled = 1 << 1 | 1 << 2;
    instance pool = make_instance(&c);
    test_case fresh = c;
    fresh.absent = ROLE(kInitial);
    fresh.in_place = false;
    instance zeros = make_instance(&fresh);
    RUN(&zeros, FORWARD);
    RUN(&pool, FORWARD);
    for (int n = 1; n <= 2; ++n)
        cr_expect(same_sequence(&pool, n, &zeros, n, forward_roles), "forward, sequence %d", n);
    RUN(&pool, STEP);
    for (int n = 1; n <= 2; ++n) cr_expect(same_sequence(&pool, n, &zeros, n, forward_roles), "step, sequence %d", n);
    RUN(&zeros, BACKWARD);
    RUN(&pool, BACKWARD);
    for (int n = 1; n <= 2; ++n) cr_expect(same_sequence(&pool, n, &zeros, n, token_gradients), "sequence %d", n);
    cr_expect(check_instance(&pool, engine, kTraining | kStep));
    instance_destroy(&pool);
    instance_destroy(&zeros);
}

/* ---- Order ---- */

/* One token writes beta v = 1 under key 3, value 7: where does it lie? By hand, for this is what instance_offset, too,
 * must have right. */
static void expect_single(const instance *x, role r, gdelta_state_order order, const char *what) {
    const float *state = (const float *)(x->after + x->tensor[r].offset);
    int K = x->c.dim_k, V = x->c.dim_v, expected = order == GDELTA_STATE_KV ? 3 * V + 7 : 7 * K + 3;
    for (int i = 0; i < K * V; ++i) {
        cr_assert_float_eq(state[i], i == expected ? 1 : 0, 0, "%s, order %d: element %d is %g", what, order, i,
                           state[i]);
    }
}

ENGINE_TEST(states, order_is_as_documented, 1) {
    for (gdelta_state_order order = GDELTA_STATE_KV; order <= GDELTA_STATE_VK; ++order) {
        test_case c = {.sequences = 1,
                       .lengths = {1},
                       .heads_q = 1,
                       .heads_v = 1,
                       .dim_k = 64,
                       .dim_v = 128,
                       .dtype = GDELTA_DTYPE_FP32,
                       .state_order = order,
                       .has_scale = true,
                       .scale = 1};
        instance x = make_instance(&c);
        static const role zeroed[] = {kInitial, kQ, kK, kV, kG, kDO, kDFinal};
        for (size_t i = 0; i < sizeof zeroed / sizeof *zeroed; ++i) instance_put_all(&x, zeroed[i], 0);
        instance_put_all(&x, kBeta, 0.5);
        instance_put(&x, kK, 0, 0, 0, 3, 1);
        instance_put(&x, kV, 0, 0, 0, 7, 2);
        RUN(&x, FORWARD);
        expect_single(&x, kFinal, order, "forward");
        RUN(&x, STEP);
        expect_single(&x, kFinal, order, "step");

        /* o = S^T q with q = e_3 and beta = 0: the gradient of element 7 of o is 1 at (3, 7). */
        instance_put_all(&x, kBeta, 0);
        instance_put(&x, kQ, 0, 0, 0, 3, 1);
        instance_put(&x, kDO, 0, 0, 0, 7, 1);
        RUN(&x, BACKWARD);
        expect_single(&x, kDInitial, order, "backward from o");
        instance_put(&x, kDO, 0, 0, 0, 7, 0);
        ((float *)(x.before + x.tensor[kDFinal].offset))[order == GDELTA_STATE_KV ? 3 * 128 + 7 : 7 * 64 + 3] = 1;
        RUN(&x, BACKWARD);
        expect_single(&x, kDInitial, order, "backward from the final state");
        instance_destroy(&x);
    }
}

/* ---- Decode ---- */

/* forward of T tokens, and forward of T - 1 then a step. */
ENGINE_TEST(states, prefill_then_decode, 1) {
    static const int64_t lengths[] = {2, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191};
    for (int i = 0; i < 24; ++i) {
        test_case c = base_case(engine);
        c.dtype = i % 2 ? GDELTA_DTYPE_FP32 : GDELTA_DTYPE_BF16;
        c.lengths[0] = lengths[i / 2];
        instance whole = make_instance(&c);
        c.lengths[0] -= 1;
        c.absent = ROLE(kO); /* a prefill that only wants the state */
        instance prefill = make_instance(&c);
        c.absent = 0;
        c.first_token = c.lengths[0];
        c.lengths[0] = 1;
        instance decode = make_instance(&c);
        RUN(&whole, FORWARD);
        RUN(&prefill, FORWARD);
        instance_copy(&decode, kInitial, &prefill, kFinal);
        RUN(&decode, STEP);
        cr_expect(same_rows(&decode, &whole, kO, c.first_token, true, engine), "T = %d", (int)c.first_token + 1);
        cr_expect(compare_bits(&decode, &whole, ROLE(kFinal)), "T = %d", (int)c.first_token + 1);
        instance_destroy(&whole);
        instance_destroy(&prefill);
        instance_destroy(&decode);
    }
}

ENGINE_TEST(states, step_equals_forward, 1) {
    for (int i = 0; i < 16; ++i) {
        test_case c = base_case(engine);
        c.lengths[0] = i + 1;
        c.state_dtype = i % 3 ? engine->exact_state : GDELTA_DTYPE_BF16;
        instance step = make_instance(&c), forward = make_instance(&c);
        RUN(&step, STEP);
        RUN(&forward, FORWARD);
        cr_expect(compare_bits(&step, &forward, forward_roles), "T = %d", i + 1);
        c.keep_state = true; /* a draft: the same o, and no state written, which instance_run looks at */
        instance draft = make_instance(&c);
        RUN(&draft, STEP);
        cr_expect(compare_bits(&draft, &forward, ROLE(kO)), "T = %d, draft", i + 1);
        instance_destroy(&step);
        instance_destroy(&forward);
        instance_destroy(&draft);
    }
}
