/* What is hard for a backward that works on chunks of 64 tokens: losses at the end of long texts, gradients handed from
 * call to call, sums that cancel. Every engine must pass. */
#include <math.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

static test_case base_case(int64_t tokens) {
    test_case c = two_head_case(tokens);
    c.fp16_backward = true;
    return c;
}

/* ---- Losses ---- */

/* A loss on the last tokens alone, whose chunk is whole or not, or on the final state: what comes first gets its
 * gradients through the states only. None is lost on the way. */
ENGINE_TEST(chunks_backward, losses_at_the_end, 3) {
    static const int64_t lengths[] = {64, 65, 300, 320};
    for (int i = 0; i < 4; ++i) {
        test_case c = base_case(lengths[i]);
        c.absent = part == 0 ? ROLE(kDFinal) : part == 1 ? ROLE(kDO) : 0;
        instance x = make_instance(&c);
        if (part != 1) {
            FOR_ELEMENTS(&x, kDO, n, row, head, column) {
                if (row < lengths[i] - 3) instance_put(&x, kDO, n, row, head, column, 0);
            }
        }
        cr_expect(check_instance(&x, engine, kBackward), "%d tokens", (int)lengths[i]);
        for (role r = kDK; r <= kDV; ++r) {
            int64_t zeros = 0;
            FOR_ELEMENTS(&x, r, n, row, head, column) zeros += instance_get(&x, r, n, row, head, column) == 0;
            cr_expect_eq(zeros, 0, "%s: %d elements are 0", role_name(r), (int)zeros);
        }
        instance_destroy(&x);
    }
}

/* Before the first token there is nothing to forget: its gate has no gradient, but for roundings. */
ENGINE_TEST(chunks_backward, nothing_to_forget_at_first, 2) {
    test_case c = base_case(part ? 64 : 200);
    c.absent = ROLE(kInitial);
    instance x = make_instance(&c);
    RUN(&x, BACKWARD);
    for (int head = 0; head < 2; ++head) {
        double largest = 0;
        for (int row = 0; row < c.lengths[0]; ++row) {
            largest = fmax(largest, fabs(instance_get(&x, kDG, 0, row, head, 0)));
        }
        cr_expect_leq(fabs(instance_get(&x, kDG, 0, 0, head, 0)), 1e-6 * largest);
    }
    instance_destroy(&x);
}

/* ---- Calls ---- */

/* A text cut in three, the gradient of each piece's initial state handed to the one before it, has the gradients of the
 * whole. */
ENGINE_TEST(chunks_backward, pieces_hand_gradients_back, 2) {
    enum { kPieces = 3 };
    static const int64_t cuts[2][kPieces + 1] = {{0, 64, 256, 300}, {0, 1, 130, 300}};
    test_case c = base_case(cuts[part][kPieces]);
    instance whole = make_instance(&c), piece[kPieces];
    RUN(&whole, BACKWARD);
    for (int i = 0; i < kPieces; ++i) {
        c.first_token = cuts[part][i];
        c.lengths[0] = cuts[part][i + 1] - cuts[part][i];
        piece[i] = make_instance(&c);
        if (i > 0) instance_copy(&piece[i], kInitial, &piece[i - 1], kFinal);
        RUN(&piece[i], FORWARD);
    }
    for (int i = kPieces - 1; i >= 0; --i) {
        if (i < kPieces - 1) instance_copy(&piece[i], kDFinal, &piece[i + 1], kDInitial);
        RUN(&piece[i], BACKWARD);
        for (role r = kDQ; r <= kDBeta; ++r) {
            /* Two results within the tolerance of the truth are within twice of one another. */
            double tolerance = 2 * compare_tolerance(engine, r, GDELTA_DTYPE_FP32);
            int64_t rows = piece[i].c.lengths[0];
            slice got = {&piece[i], r, 0, 0, rows}, want = {&whole, r, 0, cuts[part][i], rows};
            cr_expect(compare_slices(got, want, tolerance), "piece %d", i);
        }
    }
    cr_expect(compare_instances(&piece[0], &whole, ROLE(kDInitial), engine));
    for (int i = 0; i < kPieces; ++i) instance_destroy(&piece[i]);
    instance_destroy(&whole);
}

/* A sequence in a crowd keeps its bits. */
ENGINE_TEST(chunks_backward, a_crowd_changes_no_bits, 1) {
    test_case c = base_case(70);
    c.heads_v = 4;
    cr_expect(check_crowd(&c, engine, GDELTA_OPERATION_BACKWARD));
}

/* No order of blocks and warps shows: many jobs a block, groups of heads, parameters summed over all tokens. */
GPU_ENGINE_TEST(chunks_backward, a_hundred_calls_give_the_same_bits, 2) {
    test_case c = base_case(part ? 64 : 1000);
    c.sequences = part ? 33 : 3;
    c.heads_q = part ? 1 : 4;
    c.heads_v = part ? 4 : 2;
    c.gate = GDELTA_GATE_SOFTPLUS;
    cr_expect(check_repeats(&c, engine, GDELTA_OPERATION_BACKWARD));
}

/* ---- Length and keys ---- */

/* The reference takes its time over these: one head, and on the GPU's machine only. */
GPU_ENGINE_TEST(chunks_backward, long_texts, 3) {
    test_case c = base_case(part < 2 ? 4096 : 16384);
    c.heads_v = 1;
    c.strength = part == 1 ? kGateResets : kGateWeak;
    c.beta = GDELTA_BETA_SIGMOID;
    if (part == 2) c.dim_k = 64;
    cr_expect(check_case(&c, engine, kBackward));
}

ENGINE_TEST(chunks_backward, correlated_keys, 2) {
    test_case c = base_case(257);
    c.heads_q = 2;
    c.heads_v = 4;
    c.dtype = part ? GDELTA_DTYPE_FP16 : GDELTA_DTYPE_BF16;
    c.keys = kKeysCorrelated;
    c.beta = GDELTA_BETA_SIGMOID;
    cr_expect(check_case(&c, engine, kBackward));
}

/* Rows of zeros and rows far below the norm's epsilon, and their gradients through it. */
ENGINE_TEST(chunks_backward, zero_and_tiny_rows, 2) {
    test_case c = base_case(200);
    c.l2norm = part ? GDELTA_L2NORM_MAX_EPS : GDELTA_L2NORM_ADD_EPS;
    instance x = make_instance(&c);
    for (role r = kQ; r <= kK; ++r) {
        FOR_ELEMENTS(&x, r, n, row, head, column) {
            if (row % 5) continue;
            double value = instance_get(&x, r, n, row, head, column);
            instance_put(&x, r, n, row, head, column, row % 2 == (r == kQ) ? 0 : 1e-5 * value);
        }
    }
    cr_expect(check_instance(&x, engine, kBackward));
    instance_destroy(&x);
}
