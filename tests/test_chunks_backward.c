/* What is hard for a backward that works on chunks of 64 tokens: losses at the end of long texts, gradients handed from
 * call to call, sums that cancel. Every engine must pass. */
#include <math.h>
#include <string.h>

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

enum { kPieces = 3 };

/* A text cut in three, the gradient of each piece's initial state handed to the one before it, has the gradients of the
 * whole. */
static void check_pieces(test_case c, const int64_t cuts[kPieces + 1], const test_engine *engine) {
    c.lengths[0] = cuts[kPieces];
    instance whole = make_instance(&c), piece[kPieces];
    RUN(&whole, BACKWARD);
    for (int i = 0; i < kPieces; ++i) {
        c.first_token = cuts[i];
        c.lengths[0] = cuts[i + 1] - cuts[i];
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
            slice got = {&piece[i], r, 0, 0, rows}, want = {&whole, r, 0, cuts[i], rows};
            cr_expect(compare_slices(got, want, tolerance), "piece %d", i);
        }
    }
    cr_expect(compare_instances(&piece[0], &whole, ROLE(kDInitial), engine));
    for (int i = 0; i < kPieces; ++i) instance_destroy(&piece[i]);
    instance_destroy(&whole);
}

ENGINE_TEST(chunks_backward, pieces_hand_gradients_back, 2) {
    static const int64_t cuts[2][kPieces + 1] = {{0, 64, 256, 300}, {0, 1, 130, 300}};
    check_pieces(base_case(0), cuts[part], engine);
}

/* A sequence in a crowd keeps its bits. */
ENGINE_TEST(chunks_backward, a_crowd_changes_no_bits, 1) {
    test_case c = base_case(70);
    c.heads_v = 4;
    cr_expect(check_crowd(&c, engine, GDELTA_OPERATION_BACKWARD));
}

/* No order of blocks and warps shows: many jobs a block, groups of heads, parameters summed over all tokens. */
GPU_ENGINE_TEST(chunks_backward, a_hundred_calls_give_the_same_bits, 3) {
    static const int shapes[3][4] = {{1000, 3, 4, 2}, {64, 33, 1, 4}, {2048, 1, 1, 2}};
    test_case c = base_case(shapes[part][0]);
    c.sequences = shapes[part][1];
    c.heads_q = shapes[part][2];
    c.heads_v = shapes[part][3];
    c.gate = GDELTA_GATE_SOFTPLUS;
    cr_expect(check_repeats(&c, engine, GDELTA_OPERATION_BACKWARD));
}

/* ---- Segments: a long text of few heads, which the hopper engine cuts ---- */

/* No decay: else nothing of a segment's start is left at its end, and M could be anything. */
static test_case segment_case(int64_t tokens) {
    test_case c = base_case(tokens);
    c.strength = kGateZero;
    return c;
}

/* Gates, sizes and types; a last chunk that is not whole. */
GPU_ENGINE_TEST(chunks_backward, segments, 6) {
    static const int dims[6][2] = {{128, 128}, {128, 128}, {64, 128}, {128, 64}, {64, 64}, {128, 128}};
    test_case c = segment_case(2100);
    c.dim_k = dims[part][0];
    c.dim_v = dims[part][1];
    if (part == 1) c.strength = kGateStrong;
    if (part == 2) c.beta = GDELTA_BETA_SIGMOID;
    if (part == 3) c.dtype = GDELTA_DTYPE_FP16;
    if (part == 4) c.strength = kGateResets;
    if (part == 5) c.keys = kKeysCorrelated, c.strength = kGateWeak;
    expect_segments(&c, engine, GDELTA_OPERATION_BACKWARD);
    cr_expect(check_case(&c, engine, kBackward));
}

/* Packed sequences, one long: shorter than a chunk a segment, skipped, without an initial state, empty; in slots. */
GPU_ENGINE_TEST(chunks_backward, segments_of_packed_sequences, 2) {
    static const int64_t lengths[] = {70, 2085, 0, 640, 257, 1};
    enum { kSkipped = 3, kFresh = 4 };
    test_case c = segment_case(0);
    c.layout = GDELTA_LAYOUT_THD;
    c.sequences = sizeof lengths / sizeof *lengths;
    memcpy(c.lengths, lengths, sizeof lengths);
    c.longest = part ? 2085 : 0;
    c.heads_v = 1;
    c.state_dtype = part ? GDELTA_DTYPE_BF16 : GDELTA_DTYPE_FP32;
    c.state_order = part ? GDELTA_STATE_VK : GDELTA_STATE_KV;
    case_use_slots(&c, kSlotsDistinct, 1 << kSkipped);
    c.recycled = 1 << kFresh;
    expect_segments(&c, engine, GDELTA_OPERATION_BACKWARD);
    cr_expect(check_case(&c, engine, kBackward));
}

/* Beside a text in segments an empty sequence still hands its gradient on as it is: it is not M^T dS + N', which -0 and
 * infinities do not survive. */
GPU_ENGINE_TEST(chunks_backward, empty_sequences_beside_segments, 2) {
    static const double values[] = {-0.0, INFINITY, -INFINITY, 1.5};
    test_case c = segment_case(0);
    c.layout = GDELTA_LAYOUT_THD;
    c.sequences = 4;
    c.lengths[1] = 4096;
    c.heads_v = 1;
    c.state_order = part;
    c.recycled = 1 << 3;
    expect_segments(&c, engine, GDELTA_OPERATION_BACKWARD);
    instance x = make_instance(&c);
    FOR_ELEMENTS(&x, kDFinal, n, row, head, column) {
        if (c.lengths[n]) continue;
        instance_put(&x, kDFinal, n, row, head, column, values[(n + row + column) % 4]);
        static const uint32_t payload = 0x7fc12345; /* of a NaN */
        if (column == 5) memcpy(x.before + instance_offset(&x, kDFinal, n, row, head, column), &payload, 4);
    }
    RUN(&x, BACKWARD);
    for (int n = 0; n < 3; n += 2) {
        cr_expect(compare_slice_bits((slice){&x, kDInitial, n, 0, 0}, (slice){&x, kDFinal, n, 0, 0}), "sequence %d", n);
    }
    int64_t wrong = 0;
    FOR_ELEMENTS(&x, kDInitial, n, row, head, column) {
        double value = instance_get(&x, kDInitial, n, row, head, column);
        wrong += n == 3 ? value != 0 : n == 1 && !isfinite(value);
    }
    cr_expect_eq(wrong, 0, "%d elements", (int)wrong);
    instance_destroy(&x);
}

/* Pieces that are cut into segments themselves. */
GPU_ENGINE_TEST(chunks_backward, pieces_of_segments_hand_gradients_back, 1) {
    static const int64_t cuts[kPieces + 1] = {0, 2080, 4200, 6400};
    test_case c = segment_case(2080);
    expect_segments(&c, engine, GDELTA_OPERATION_BACKWARD);
    check_pieces(c, cuts, engine);
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
