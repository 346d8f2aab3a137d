/* Verification of drafts: the states of their tokens, their record, trees, and the commit of what was accepted. All bit
 * for bit against steps of the accepted tokens alone. */
#include <math.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

static test_case draft_case(const test_engine *engine, int tokens) {
    return (test_case){.sequences = 3,
                       .lengths = {tokens},
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 64,
                       .dim_v = 128,
                       .out_dtype = engine->exact_state,
                       .state_dtype = engine->exact_state,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .strength = kGateMild};
}

static bool same_rows(const instance *a, role r, int64_t n, int64_t row, int64_t rows, const instance *b, role s,
                      int64_t m, int64_t first) {
    return compare_slice_bits((slice){a, r, n, row, rows}, (slice){b, s, m, first, rows});
}

/* ---- States of tokens ---- */

/* A buffer; a pool; the pool of the states themselves. Other types, order, sizes and heads. */
static test_case token_state_variant(const test_engine *engine, int i) {
    test_case c = draft_case(engine, i == 4 ? 16 : 5);
    c.token_states = true;
    if (i == 1) case_use_slots(&c, kSlotsDistinct, 1 << 1);
    if (i == 1) c.several_slots = c.index64 = true;
    if (i == 2 || i == 5) case_use_one_pool(&c);
    if (i == 2) c.slot_padding = 8, c.state_order = GDELTA_STATE_VK;
    if (i == 3) c.dim_k = 80, c.dim_v = 96, c.gap = 1, c.recycled = 2;
    if (i == 3) c.heads_q = 4, c.heads_v = 2, c.head_map = GDELTA_HEADS_TILED;
    if (i == 4) c.dim_k = c.dim_v = 256, c.sequences = 1;
    if (i >= 4) c.state_dtype = i == 4 ? GDELTA_DTYPE_FP16 : GDELTA_DTYPE_BF16;
    return c;
}

ENGINE_TEST(drafts, token_states_are_those_of_shorter_steps, 6) {
    test_case c = token_state_variant(engine, part);
    NEEDS(&c, STEP);
    instance x = make_instance(&c);
    RUN(&x, STEP);
    cr_expect(check_instance(&x, engine, kStep));
    for (int tokens = 1; tokens <= c.lengths[0]; ++tokens) {
        test_case shorter = c;
        shorter.lengths[0] = tokens;
        shorter.token_states = shorter.several_slots = shorter.one_pool = false;
        instance y = make_instance(&shorter);
        RUN(&y, STEP);
        for (int n = 0; n < c.sequences; ++n) {
            cr_expect(same_rows(&x, kO, n, 0, tokens, &y, kO, n, 0), "%d tokens", tokens);
            bool stored = instance_rows(&x, kTokenStates, n) >= tokens * c.dim_k;
            if (!stored) continue;
            cr_expect(same_rows(&x, kTokenStates, n, (tokens - 1) * c.dim_k, c.dim_k, &y, kFinal, n, 0), "%d tokens",
                      tokens);
        }
        if (tokens == c.lengths[0]) cr_expect(compare_bits(&x, &y, ROLE(kFinal)));
        instance_destroy(&y);
    }
    instance_destroy(&x);
}

/* ---- Commit ---- */

/* A commit of x's draft, given the record's rows of accepted tokens alone: the others stay poison, and must not matter.
 */
static instance make_commit(const instance *x, const int64_t *accepted) {
    test_case c = x->c;
    for (int n = 0; n < c.sequences; ++n) c.accepted[n] = accepted[n];
    instance commit = make_instance(&c);
    instance_copy(&commit, kInitial, x, kInitial);
    instance_copy_record(&commit, x);
    for (role r = kRecordK; r <= kRecordDecay && !c.tree; ++r) {
        FOR_ELEMENTS(&commit, r, n, row, head, column) {
            if (row >= accepted[n]) instance_put(&commit, r, n, row, head, column, NAN);
        }
    }
    return commit;
}

/* A part of one sequence of x's draft, as a step without a draft. */
static instance make_accepted(const instance *x, int n, int64_t first, int64_t tokens) {
    test_case c = x->c;
    c.sequences = 1;
    c.first_sequence += n;
    c.first_token += first;
    c.lengths[0] = tokens;
    c.slot_count = c.slot_padding = 0;
    c.recycled = first == 0 ? c.recycled >> n & 1 : 0;
    c.in_place = c.keep_state = c.record = c.tree = c.token_states = c.several_slots = false;
    return make_instance(&c);
}

/* Sequence n of x goes into the only one of y: states. */
static void take_state(instance *y, const instance *x, role r, int64_t n) {
    FOR_ELEMENTS(y, kInitial, zero, row, head, column) {
        instance_put(y, kInitial, zero, row, head, column, instance_get(x, r, n, row, head, column));
    }
}

/* What `accepted` tokens of sequence n do to its state, in one step or in steps of one token each. */
static void expect_committed(const instance *commit, const instance *x, int n, int64_t accepted, bool one_by_one,
                             const test_engine *engine) {
    instance last = {.before = NULL};
    int64_t tokens = one_by_one ? 1 : accepted;
    for (int64_t t = 0; t < accepted; t += tokens) {
        instance y = make_accepted(x, n, t, tokens);
        if (t > 0) {
            take_state(&y, &last, kFinal, 0);
            instance_destroy(&last);
        } else if (!(x->c.recycled >> n & 1)) {
            take_state(&y, x, kInitial, n);
        }
        RUN(&y, STEP);
        last = y;
    }
    cr_expect(same_rows(commit, kFinal, n, 0, 0, &last, kFinal, 0, 0), "sequence %d, %d accepted", n, (int)accepted);
    instance_destroy(&last);
}

/* Rounds of four draft tokens with random acceptance, each from the states that the one before committed. */
ENGINE_TEST(drafts, commits_equal_decode, 2) {
    enum { kRounds = 20, kTokens = 4 };
    test_case c = draft_case(engine, kTokens);
    c.keep_state = c.record = true;
    bool exact = part == 0;
    if (!exact) c.state_dtype = GDELTA_DTYPE_BF16;
    case_use_slots(&c, exact ? kSlotsSame : kSlotsDistinct, 0);
    c.in_place = exact;
    NEEDS(&c, COMMIT);
    instance before = {.before = NULL};
    for (int round = 0; round < kRounds; ++round) {
        int64_t accepted[3];
        for (int n = 0; n < 3; ++n) accepted[n] = (int64_t)(fill_key(7, round, n, 0, 0, 0) % (kTokens + 1));
        c.first_token = round * kTokens;
        instance x = make_instance(&c);
        if (round > 0) instance_copy(&x, kInitial, &before, kFinal);
        RUN(&x, STEP);
        instance commit = make_commit(&x, accepted);
        RUN(&commit, COMMIT);
        for (int n = 0; n < 3; ++n) {
            if (accepted[n] == 0) {
                cr_expect(same_rows(&commit, kFinal, n, 0, 0, &x, kInitial, n, 0));
                continue;
            }
            expect_committed(&commit, &x, n, accepted[n], false, engine);
            if (exact) expect_committed(&commit, &x, n, accepted[n], true, engine);
        }
        if (round > 0) instance_destroy(&before);
        before = commit;
        instance_destroy(&x);
    }
    instance_destroy(&before);
}

/* All sizes of drafts, with everything that may surround one: skipped rows, recycled slots, layouts, odd sizes. */
ENGINE_TEST(drafts, commits_of_every_length, 1) {
    for (int tokens = 1; tokens <= 16; ++tokens) {
        test_case c = draft_case(engine, tokens);
        c.keep_state = c.record = true;
        c.layout = tokens % 3;
        c.gap = tokens % 4 ? 0 : 3;
        c.index64 = tokens % 2;
        c.head_map = tokens % 2;
        c.state_order = tokens / 2 % 2;
        c.dtype = tokens % 5 ? GDELTA_DTYPE_BF16 : GDELTA_DTYPE_FP32;
        if (tokens % 4 == 1) c.dim_k = 33, c.dim_v = 70, c.heads_q = c.heads_v = 3;
        case_use_slots(&c, tokens % 2 ? kSlotsSame : kSlotsDistinct, 1 << 1);
        c.in_place = tokens % 2;
        c.recycled = 1 << 2;
        NEEDS(&c, COMMIT);
        instance x = make_instance(&c);
        RUN(&x, STEP);
        const int64_t accepted[] = {tokens, tokens, (tokens + 1) / 2};
        instance commit = make_commit(&x, accepted);
        RUN(&commit, COMMIT);
        expect_committed(&commit, &x, 0, accepted[0], true, engine);
        expect_committed(&commit, &x, 2, accepted[2], true, engine);
        instance_destroy(&commit);

        /* Nothing accepted: the state as it was, and zeros where it was none. */
        commit = make_commit(&x, (const int64_t[]){0, 0, 0});
        RUN(&commit, COMMIT);
        cr_expect(same_rows(&commit, kFinal, 0, 0, 0, &x, kInitial, 0, 0), "T = %d", tokens);
        int64_t nonzero = 0;
        FOR_ELEMENTS(&commit, kFinal, n, row, head, column) {
            nonzero += n == 2 && !(instance_get(&commit, kFinal, n, row, head, column) == 0);
        }
        cr_expect_eq(nonzero, 0, "T = %d", tokens);
        instance_destroy(&commit);
        instance_destroy(&x);
    }
}

/* A step on states that lie in whole chunks of 16 bytes, the same on states that do not, a draft and its commit:
 * kernels of their own, the same bits. Types and orders of states, groups of heads, sizes. */
ENGINE_TEST(drafts, every_kernel_leaves_the_same_bits, 6) {
    static const gdelta_dtype dtypes[] = {GDELTA_DTYPE_FP32, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16};
    static const int32_t dims[][2] = {{128, 128}, {64, 48}, {136, 128}, {256, 256}};
    for (int i = 0; i < 8; ++i) {
        int tokens = i < 4 ? 1 : 4 * i - 13; /* 3, 7, 11, 15 */
        test_case c = draft_case(engine, tokens);
        c.heads_q = 1;
        c.heads_v = 1 << i % 4;
        c.dim_k = dims[i / 2][0], c.dim_v = dims[i / 2][1];
        c.state_dtype = dtypes[part % 3];
        c.state_order = part / 3;
        case_use_slots(&c, kSlotsSame, 0);
        c.recycled = 1 << 2;
        c.in_place = true;
        NEEDS(&c, COMMIT);
        test_case odd = c, draft = c;
        odd.slot_padding = 1;
        draft.keep_state = draft.record = true;
        instance x = make_instance(&c), y = make_instance(&odd), z = make_instance(&draft);
        RUN(&x, STEP);
        RUN(&y, STEP);
        RUN(&z, STEP);
        instance commit = make_commit(&z, (const int64_t[]){tokens, tokens, tokens});
        RUN(&commit, COMMIT);
        for (int n = 0; n < c.sequences; ++n) {
            cr_expect(same_rows(&y, kO, n, 0, tokens, &x, kO, n, 0), "o of odd slots, size %d", i);
            cr_expect(same_rows(&z, kO, n, 0, tokens, &x, kO, n, 0), "o of a draft, size %d", i);
            cr_expect(same_rows(&y, kFinal, n, 0, 0, &x, kFinal, n, 0), "state in odd slots, size %d", i);
            cr_expect(same_rows(&commit, kFinal, n, 0, 0, &x, kFinal, n, 0), "committed state, size %d", i);
        }
        instance_destroy(&x);
        instance_destroy(&y);
        instance_destroy(&z);
        instance_destroy(&commit);
    }
}

/* ---- Trees ---- */

/* The tokens from the root to t. */
static int find_path(const test_case *c, int64_t n, int64_t t, int64_t path[16]) {
    int count = t < 0 ? 0 : find_path(c, n, case_parent(c, n, t), path);
    if (t >= 0) path[count++] = t;
    return count;
}

/* A step of the path alone. */
static instance make_path(const instance *x, int n, const int64_t *path, int count) {
    static const role inputs[] = {kQ, kK, kV, kG, kBeta};
    instance y = make_accepted(x, n, 0, count);
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; ++i) {
        FOR_ELEMENTS(&y, inputs[i], zero, row, head, column) {
            double value = instance_get(x, inputs[i], n, path[row], head, column);
            instance_put(&y, inputs[i], zero, row, head, column, value);
        }
    }
    if (!(x->c.recycled >> n & 1)) take_state(&y, x, kInitial, n);
    return y;
}

/* Each token of a tree is the last of a step of its path; so is its state, and the state that a commit of it leaves. */
ENGINE_TEST(drafts, trees_are_paths, 3) {
    enum { kTokens = 7 };
    test_case c = draft_case(engine, part == 1 ? 16 : kTokens);
    c.tree = c.keep_state = c.record = c.token_states = true;
    c.seed = (uint64_t)part;
    if (part == 1) c.state_dtype = GDELTA_DTYPE_BF16, c.dim_k = 128, c.dim_v = 64, c.sequences = 2;
    if (part == 2) c.recycled = 1, c.index64 = c.host_tables = true;
    NEEDS(&c, COMMIT);
    instance x = make_instance(&c);
    RUN(&x, STEP);
    cr_expect(check_instance(&x, engine, kStep));
    int branches = 0;
    for (int64_t t = 0; t < c.lengths[0]; ++t) {
        const int64_t accepted[] = {t + 1, t + 1, t + 1};
        instance commit = make_commit(&x, accepted);
        RUN(&commit, COMMIT);
        for (int n = 0; n < c.sequences; ++n) {
            int64_t path[16];
            int count = find_path(&c, n, t, path);
            branches += count <= t;
            instance y = make_path(&x, n, path, count);
            RUN(&y, STEP);
            cr_expect(same_rows(&x, kO, n, t, 1, &y, kO, 0, count - 1), "token %d", (int)t);
            cr_expect(same_rows(&x, kTokenStates, n, t * c.dim_k, c.dim_k, &y, kFinal, 0, 0), "token %d", (int)t);
            cr_expect(same_rows(&commit, kFinal, n, 0, 0, &y, kFinal, 0, 0), "commit of token %d", (int)t);
            instance_destroy(&y);
        }
        instance_destroy(&commit);
    }
    cr_expect_gt(branches, c.lengths[0], "these trees are hardly any");
    instance_destroy(&x);
}
