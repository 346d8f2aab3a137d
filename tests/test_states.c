/* States handed from call to call: cuts, documents, empty sequences, slots, order, decode. Bit for bit where the state
 * is held in the engine's own precision. */
#include <math.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

static const role_set forward_roles = ROLE(kO) | ROLE(kFinal);
static const role_set token_gradients = ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta);

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

enum { kMostPieces = 6 };
static const int64_t any_cuts[kMostPieces + 1] = {0, 1, 6, 64, 65, 130, 150};

typedef struct pieces {
    int count;
    int64_t cut[kMostPieces + 1];
    instance piece[kMostPieces];
} pieces;

/* Cuts after multiples of `step` tokens. */
static void make_cuts(pieces *p, int step) {
    memset(p, 0, sizeof *p);
    for (int i = 1; i <= kMostPieces; ++i) {
        int64_t cut = (any_cuts[i] + step - 1) / step * step, end = any_cuts[kMostPieces];
        if (cut > end) cut = end;
        if (cut > p->cut[p->count]) p->cut[++p->count] = cut;
    }
}

/* Compares a piece, from token `first` on, with these rows of the whole. */
static bool same_rows(const instance *piece, const instance *whole, role r, int64_t first, bool exact,
                      const test_engine *engine) {
    /* Two results within the tolerance of the truth are within twice of one another. */
    double tolerance = 2 * compare_tolerance(engine, r, piece->tensor[r].dtype);
    bool good = true;
    for (int n = 0; n < piece->c.sequences; ++n) {
        int64_t rows = piece->c.lengths[0];
        slice got = {piece, r, n, 0, rows}, want = {whole, r, n, first, rows};
        good = (exact ? compare_slice_bits(got, want) : compare_slices(got, want, tolerance)) && good;
    }
    return good;
}

/* Runs the pieces from left to right, each from the state that the one before left. */
static void forward_in_pieces(const test_case *whole, pieces *p, const test_engine *engine) {
    for (int i = 0; i < p->count; ++i) {
        test_case c = *whole;
        c.first_token = p->cut[i];
        c.lengths[0] = p->cut[i + 1] - p->cut[i];
        instance_create(&p->piece[i], &c);
        if (i > 0) instance_copy(&p->piece[i], kInitial, &p->piece[i - 1], kFinal);
        RUN(&p->piece[i], FORWARD);
    }
}

static void destroy_pieces(pieces *p) {
    for (int i = 0; i < p->count; ++i) instance_destroy(&p->piece[i]);
}

/* A cut where the engine promises it gives the same bits, any other the same numbers. */
ENGINE_TEST(states, cuts_change_nothing, 2) {
    test_case c = base_case(engine);
    bool exact = part == 0 || engine->cut == 1;
    if (!exact) c.out_dtype = GDELTA_DTYPE_FP32; /* roundings of one row alone would take the tolerance up */
    instance whole = make_instance(&c);
    pieces p;
    make_cuts(&p, part == 0 ? engine->cut : 1);
    RUN(&whole, FORWARD);
    forward_in_pieces(&c, &p, engine);
    const instance *last = &p.piece[p.count - 1];
    for (int i = 0; i < p.count; ++i) {
        cr_expect(same_rows(&p.piece[i], &whole, kO, p.cut[i], exact, engine), "piece %d", i);
    }
    cr_expect(exact ? compare_bits(last, &whole, ROLE(kFinal)) : compare_instances(last, &whole, ROLE(kFinal), engine));
    destroy_pieces(&p);
    instance_destroy(&whole);
}

ENGINE_TEST(states, gradients_are_handed_back, 1) {
    test_case c = base_case(engine);
    c.dtype = GDELTA_DTYPE_FP32;
    c.out_dtype = engine->exact_state;
    NEEDS(&c, BACKWARD);
    instance whole = make_instance(&c);
    pieces p;
    make_cuts(&p, 1);
    RUN(&whole, BACKWARD);
    forward_in_pieces(&c, &p, engine);
    for (int i = p.count - 1; i >= 0; --i) {
        if (i < p.count - 1) instance_copy(&p.piece[i], kDFinal, &p.piece[i + 1], kDInitial);
        RUN(&p.piece[i], BACKWARD);
        for (role r = 0; r < kRoles; ++r) {
            if (!(token_gradients & ROLE(r))) continue;
            cr_expect(same_rows(&p.piece[i], &whole, r, p.cut[i], false, engine), "piece %d", i);
        }
    }
    cr_expect(compare_instances(&p.piece[0], &whole, ROLE(kDInitial), engine));
    destroy_pieces(&p);
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

static bool same_sequence(const instance *a, int64_t n, const instance *b, int64_t m, role_set roles) {
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
        if (RUNS(&c, BACKWARD)) {
            RUN(&packed, BACKWARD);
            RUN(&alone, BACKWARD);
            cr_expect(same_sequence(&alone, 0, &packed, n, token_gradients | ROLE(kDInitial)), "backward, document %d",
                      n);
        }
        instance_destroy(&alone);
    }
    instance_destroy(&packed);
}

/* What a document holds, others do not see: other numbers, NaN, infinities. */
ENGINE_TEST(states, documents_do_not_meet, 1) {
    static const double values[] = {1e4, NAN, INFINITY};
    test_case c = packed_case(engine);
    instance a = make_instance(&c);
    RUN(&a, FORWARD);
    for (int i = 0; i < 9; ++i) {
        instance b = make_instance(&c);
        int changed = i / 3;
        static const role tensors[] = {kQ, kK, kV, kG, kBeta};
        for (size_t r = 0; r < sizeof tensors / sizeof *tensors; ++r) {
            FOR_ELEMENTS(&b, tensors[r], n, row, head, column) {
                if (n == changed) instance_put(&b, tensors[r], n, row, head, column, values[i % 3]);
            }
        }
        RUN(&b, FORWARD);
        for (int n = 0; n < 3; ++n) {
            if (n == changed) continue;
            cr_expect(same_sequence(&b, n, &a, n, forward_roles), "document %d, %g in %d", n, values[i % 3], changed);
        }
        instance_destroy(&b);
    }
    instance_destroy(&a);
}

/* Nor do tokens see what comes after: those of the chunks before it, where an engine has chunks. */
ENGINE_TEST(states, later_tokens_do_no_harm, 1) {
    enum { kBad = 100 };
    test_case c = base_case(engine);
    instance a = make_instance(&c), b = make_instance(&c);
    FOR_ELEMENTS(&b, kK, n, row, head, column) {
        if (row >= kBad) instance_put(&b, kK, n, row, head, column, NAN);
    }
    FOR_ELEMENTS(&b, kG, n, row, head, column) {
        if (row >= kBad) instance_put(&b, kG, n, row, head, column, NAN);
    }
    RUN(&a, FORWARD);
    RUN(&b, FORWARD);
    for (int n = 0; n < c.sequences; ++n) {
        int64_t rows = kBad / engine->cut * engine->cut;
        cr_expect(compare_slice_bits((slice){&b, kO, n, 0, rows}, (slice){&a, kO, n, 0, rows}));
    }
    instance_destroy(&a);
    instance_destroy(&b);
}

ENGINE_TEST(states, gradients_of_documents_do_not_meet, 1) {
    test_case c = packed_case(engine);
    NEEDS(&c, BACKWARD);
    instance a = make_instance(&c), b = make_instance(&c);
    FOR_ELEMENTS(&b, kV, n, row, head, column) {
        if (n == 0) instance_put(&b, kV, n, row, head, column, 100 * instance_get(&a, kV, n, row, head, column));
    }
    RUN(&a, BACKWARD);
    RUN(&b, BACKWARD);
    role_set gradients = token_gradients | ROLE(kDInitial);
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
        if (RUNS(&c, BACKWARD)) RUN(&x, BACKWARD);
        for (int n = 0; n < c.sequences && RUNS(&c, BACKWARD); ++n) {
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

/* An empty sequence's state is not that of a segment, S = M S + N, which -0 and infinities do not survive. */
ENGINE_TEST(states, empty_sequences_beside_long_ones, 3) {
    static const gdelta_dtype dtypes[] = {GDELTA_DTYPE_FP32, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16};
    static const double values[] = {-0.0, INFINITY, -INFINITY, 1.5};
    enum { kFresh = 3 };
    test_case c = base_case(engine);
    c.layout = GDELTA_LAYOUT_THD;
    c.sequences = 4;
    c.lengths[0] = 4096;
    c.lengths[1] = c.lengths[2] = c.lengths[kFresh] = 0;
    c.heads_q = c.heads_v = 1;
    c.state_dtype = dtypes[part];
    c.state_order = part % 2;
    c.recycled = 1 << kFresh;
    expect_segments(&c, engine, GDELTA_OPERATION_FORWARD);
    instance x = make_instance(&c);
    FOR_ELEMENTS(&x, kInitial, n, row, head, column) {
        if (n == 1 || n == 2) instance_put(&x, kInitial, n, row, head, column, values[(n + row + column) % 4]);
        static const uint32_t payload = 0x7fc12345; /* of a NaN, which a conversion of 16 bits may change */
        if (n != 2 || column != 5 || c.state_dtype != GDELTA_DTYPE_FP32) continue;
        memcpy(x.before + instance_offset(&x, kInitial, n, row, head, column), &payload, sizeof payload);
    }
    RUN(&x, FORWARD);
    for (int n = 1; n <= 2; ++n) {
        cr_expect(compare_slice_bits((slice){&x, kFinal, n, 0, 0}, (slice){&x, kInitial, n, 0, 0}), "sequence %d", n);
    }
    int64_t nonzero = 0;
    FOR_ELEMENTS(&x, kFinal, n, row, head, column) {
        nonzero += n == kFresh && !(instance_get(&x, kFinal, n, row, head, column) == 0);
    }
    cr_expect_eq(nonzero, 0);
    instance_destroy(&x);
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
        NEEDS(&c, STEP);
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
    if (RUNS(&c, STEP)) {
        RUN(&pool, STEP);
        for (int n = 1; n <= 2; ++n) cr_expect(same_sequence(&pool, n, &zeros, n, forward_roles), "step of %d", n);
    }
    if (RUNS(&c, BACKWARD)) {
        RUN(&zeros, BACKWARD);
        RUN(&pool, BACKWARD);
        for (int n = 1; n <= 2; ++n) cr_expect(same_sequence(&pool, n, &zeros, n, token_gradients), "sequence %d", n);
    }
    cr_expect(check_instance(&pool, engine, kTraining | kStep));
    instance_destroy(&pool);
    instance_destroy(&zeros);
}

/* ---- Checkpoints ---- */

/* Checkpoint j of sequence n, as an initial state of y's only sequence. */
static void start_from_checkpoint(instance *y, const instance *x, int64_t n, int64_t j) {
    FOR_ELEMENTS(y, kInitial, zero, row, head, column) {
        double value = instance_get(x, kCheckpoints, n, j * x->c.dim_k + row, head, column);
        instance_put(y, kInitial, zero, row, head, column, value);
    }
}

/* A part of one sequence, in a buffer of its own. */
static instance make_part(const test_case *c, int n, int64_t first, int64_t tokens) {
    test_case one = *c;
    one.layout = GDELTA_LAYOUT_BSHD;
    one.sequences = 1;
    one.first_sequence = n;
    one.first_token = first;
    one.lengths[0] = tokens;
    one.checkpoint_interval = one.slot_count = one.capacity = 0;
    one.recycled = c->recycled >> n & 1;
    one.several_slots = false;
    return make_instance(&one);
}

/* Every checkpoint is the final state of a prefill that ends there, and the rest of the text can go on from it: bit for
 * bit, where a plan may not choose by the length. */
ENGINE_TEST(states, checkpoints_are_final_states, 7) {
    test_case c = {.layout = part % 2 ? GDELTA_LAYOUT_BSHD : GDELTA_LAYOUT_THD,
                   .sequences = part % 2 ? 2 : 4,
                   .lengths = {part % 2 ? 384 : 1159, 200, 0, 64},
                   .heads_q = 1,
                   .heads_v = 2,
                   .dim_k = 64,
                   .dim_v = 64,
                   .state_dtype = engine->exact_state,
                   .l2norm = GDELTA_L2NORM_ADD_EPS,
                   .batch_invariant = engine->cut > 1,
                   .checkpoint_interval = part == 2 ? 64 : 128};
    if (part == 2) c.capacity = 1500, c.several_slots = c.index64 = true;
    if (part == 3) c.several_slots = true, c.slot_padding = 40, c.state_order = GDELTA_STATE_VK;
    if (part == 3) case_use_slots(&c, kSlotsDistinct, 0);
    if (part == 4) c.state_dtype = GDELTA_DTYPE_BF16, c.dim_k = 80, c.dim_v = 96, c.recycled = 1;
    if (part == 5) c.dim_k = 128, c.several_slots = true;
    if (part == 6) c.dtype = c.state_dtype = GDELTA_DTYPE_FP16, c.dim_v = 128, c.recycled = 1;
    NEEDS(&c, FORWARD);
    instance x = make_instance(&c);
    RUN(&x, FORWARD);
    cr_expect(check_instance(&x, engine, kForward));
    for (int n = 0; n < c.sequences; ++n) {
        int64_t interval = c.checkpoint_interval, length = case_length(&c, n), stored = length / interval;
        if (c.several_slots && stored > 1) --stored; /* the last has no slot */
        cr_assert_eq(instance_rows(&x, kCheckpoints, n), stored * c.dim_k);
        for (int64_t j = 0; j < stored; ++j) {
            instance prefix = make_part(&c, n, 0, (j + 1) * interval);
            RUN(&prefix, FORWARD);
            cr_expect(compare_slice_bits((slice){&x, kCheckpoints, n, j * c.dim_k, c.dim_k},
                                         (slice){&prefix, kFinal, 0, 0, 0}),
                      "sequence %d, checkpoint %d", n, (int)j);
            instance_destroy(&prefix);
        }
        int64_t first = stored * interval;
        if (stored == 0 || first == length || c.state_dtype != engine->exact_state) continue;
        instance rest = make_part(&c, n, first, length - first);
        start_from_checkpoint(&rest, &x, n, stored - 1);
        RUN(&rest, FORWARD);
        cr_expect(compare_slice_bits((slice){&rest, kO, 0, 0, 0}, (slice){&x, kO, n, first, length - first}));
        cr_expect(compare_slice_bits((slice){&rest, kFinal, 0, 0, 0}, (slice){&x, kFinal, n, 0, 0}));
        instance_destroy(&rest);
    }
    instance_destroy(&x);
}

/* Long enough to be cut into segments, whose checkpoints then lie anywhere in them. In the pool that the text starts
 * from such a call must not be cut. */
GPU_ENGINE_TEST(states, checkpoints_of_long_texts, 3) {
    test_case c = base_case(engine);
    c.heads_q = c.heads_v = 1;
    c.lengths[0] = 4096 + 10;
    c.checkpoint_interval = 448;
    if (part == 1) case_use_one_pool(&c);
    if (part == 2) c.state_dtype = GDELTA_DTYPE_BF16, c.several_slots = true, c.absent = ROLE(kInitial);
    expect_segments(&c, engine, GDELTA_OPERATION_FORWARD);
    cr_expect(check_case(&c, engine, kForward));
}

/* Nothing else has to be asked for. */
ENGINE_TEST(states, checkpoints_alone, 1) {
    test_case c = base_case(engine);
    c.checkpoint_interval = 64;
    NEEDS(&c, FORWARD);
    instance all = make_instance(&c);
    c.absent = ROLE(kO) | ROLE(kFinal);
    instance alone = make_instance(&c);
    RUN(&all, FORWARD);
    RUN(&alone, FORWARD);
    cr_expect(compare_bits(&alone, &all, ROLE(kCheckpoints)));
    instance_destroy(&all);
    instance_destroy(&alone);
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
        if (RUNS(&c, STEP)) {
            RUN(&x, STEP);
            expect_single(&x, kFinal, order, "step");
        }

        if (!RUNS(&c, BACKWARD)) {
            instance_destroy(&x);
            continue;
        }
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

/* forward of T tokens, and forward of T - 1 then a step, of the recurrent engine where the engine has none. */
ENGINE_TEST(states, prefill_then_decode, 1) {
    static const int64_t lengths[] = {2, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191};
    for (int i = 0; i < 24; ++i) {
        test_case c = base_case(engine);
        c.dtype = i % 2 ? GDELTA_DTYPE_FP32 : GDELTA_DTYPE_BF16;
        c.lengths[0] = lengths[i / 2];
        const test_engine *decoder = RUNS(&c, STEP) ? engine : &test_engines[kRecurrent];
        bool exact = decoder == engine;
        if (!exact) c.out_dtype = GDELTA_DTYPE_FP32;
        if (!RUNS(&c, FORWARD)) continue;
        cut_text text = make_cut_text(c, ROLE(kO)); /* a prefill that only wants the state */
        RUN(&text.whole, FORWARD);
        RUN(&text.prefill, FORWARD);
        instance_copy(&text.decode, kInitial, &text.prefill, kFinal);
        cr_assert(instance_run(&text.decode, decoder, GDELTA_OPERATION_STEP));
        int tokens = (int)lengths[i / 2];
        cr_expect(same_rows(&text.decode, &text.whole, kO, tokens - 1, exact, engine), "T = %d", tokens);
        cr_expect(exact ? compare_bits(&text.decode, &text.whole, ROLE(kFinal))
                        : compare_instances(&text.decode, &text.whole, ROLE(kFinal), engine),
                  "T = %d", tokens);
        destroy_cut_text(&text);
    }
}

ENGINE_TEST(states, step_equals_forward, 1) {
    for (int i = 0; i < 16; ++i) {
        test_case c = base_case(engine);
        c.lengths[0] = i + 1;
        c.state_dtype = i % 3 ? engine->exact_state : GDELTA_DTYPE_BF16;
        NEEDS(&c, STEP);
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
