/* A backward in slices of heads, GDELTA_FLAG_SMALL_WORKSPACE: the gradients of one that takes all heads at once. */
#include <stdlib.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

/* Of the engine's plan, as its line says. */
static int slices_of(const test_engine *engine, const test_case *c) {
    gdelta_problem problem = case_problem(c);
    problem.engine = engine->engine;
    gdelta_plan *plan;
    cr_assert_eq(gdelta_plan_create(&problem, &plan), GDELTA_OK, "%s", gdelta_last_error());
    char line[512];
    const char *words = ", slices ";
    gdelta_plan_describe(plan, line, sizeof line);
    gdelta_plan_destroy(plan);
    const char *slices = strstr(line, words);
    cr_assert_not_null(slices, "'%s'", line);
    return atoi(slices + strlen(words));
}

/* All gradients there are; parameters' are added to numbers. */
static test_case base_case(int heads_q, int heads_v) {
    return (test_case){.sequences = 2,
                       .lengths = {70},
                       .heads_q = heads_q,
                       .heads_v = heads_v,
                       .dim_k = 128,
                       .dim_v = 128,
                       .out_dtype = GDELTA_DTYPE_FP32,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .gate = GDELTA_GATE_SOFTPLUS,
                       .beta = GDELTA_BETA_SIGMOID,
                       .strength = kGateMild,
                       .accumulate = true,
                       .batch_invariant = true};
}

/* Packed sequences, one empty, one skipped, one without an initial state; in slots. */
static void pack(test_case *c) {
    static const int64_t lengths[] = {70, 0, 130, 1, 64, 5};
    enum { kSkipped = 4, kFresh = 2 };
    c->layout = GDELTA_LAYOUT_THD;
    c->sequences = sizeof lengths / sizeof *lengths;
    memcpy(c->lengths, lengths, sizeof lengths);
    c->capacity = 300;
    c->longest = 130;
    case_use_slots(c, kSlotsDistinct, 1 << kSkipped);
    c->slot_padding = 5;
    c->recycled = 1 << kFresh;
}

static void expect_bits(test_case c, const test_engine *engine) {
    instance whole = make_instance(&c);
    c.small_workspace = true;
    instance sliced = make_instance(&c);
    cr_assert_gt(slices_of(engine, &c), 1, "%s", case_line(&c));
    RUN(&whole, BACKWARD);
    RUN(&sliced, BACKWARD);
    cr_expect(compare_bits(&sliced, &whole, instance_outputs(&whole, GDELTA_OPERATION_BACKWARD)));
    instance_destroy(&whole);
    instance_destroy(&sliced);
}

/* Value heads and query heads in groups of 1 to 4; slices of one key head and, of 8, of two. Interleaved and tiled. */
enum { kHeads = 8 };
static const int heads[kHeads][2] = {{4, 4}, {4, 8}, {3, 9}, {4, 16}, {8, 16}, {8, 4}, {9, 3}, {16, 8}};

GPU_ENGINE_TEST(slices, dense, kHeads) {
    for (gdelta_head_map map = GDELTA_HEADS_INTERLEAVED; map <= GDELTA_HEADS_TILED; ++map) {
        test_case c = base_case(heads[part][0], heads[part][1]);
        c.head_map = map;
        c.layout = part % 3;
        c.state_order = part % 2;
        c.gap = part % 2 ? 8 : 0;
        expect_bits(c, engine);
    }
}

GPU_ENGINE_TEST(slices, packed, kHeads) {
    for (gdelta_head_map map = GDELTA_HEADS_INTERLEAVED; map <= GDELTA_HEADS_TILED; ++map) {
        test_case c = base_case(heads[part][0], heads[part][1]);
        c.head_map = map;
        c.state_dtype = part % 2 ? GDELTA_DTYPE_BF16 : GDELTA_DTYPE_FP32;
        c.fused = c.interleaved = part % 2 == 0;
        pack(&c);
        expect_bits(c, engine);
    }
}

/* Other K and V, and a part of the gradients. */
GPU_ENGINE_TEST(slices, dims, 4) {
    static const int dims[4][2] = {{64, 64}, {64, 128}, {128, 64}, {33, 200}};
    test_case c = base_case(8, 16);
    c.dim_k = dims[part][0];
    c.dim_v = dims[part][1];
    c.head_map = part % 2;
    c.absent = part < 2 ? ROLE(kDO) | ROLE(kDALog) | ROLE(kInitial) : ROLE(kDQ) | ROLE(kDFinal) | ROLE(kDtBias);
    NEEDS(&c, BACKWARD);
    expect_bits(c, engine);
}

/* What forward would save, it does not; the recurrent engine's slices make their own states. */
GPU_ENGINE_TEST(slices, nothing_is_saved, 1) {
    test_case c = base_case(4, 8);
    c.save_mode = GDELTA_SAVE_STATES;
    expect_bits(c, engine);
}

/* The workspace is written anew while the former slice is not long done. */
GPU_ENGINE_TEST(slices, a_hundred_calls_give_the_same_bits, 2) {
    test_case c = base_case(8, 8);
    c.small_workspace = true;
    if (part) pack(&c);
    cr_assert_gt(slices_of(engine, &c), 1);
    cr_expect(check_repeats(&c, engine, GDELTA_OPERATION_BACKWARD));
}

/* Texts that are cut into segments, as a slice's few heads allow: bits are others than without. */
GPU_ENGINE_TEST(slices, segments, 2) {
    test_case c = base_case(4, 4);
    c.batch_invariant = false;
    c.small_workspace = true;
    c.gate = GDELTA_GATE_LOG;
    c.strength = kGateZero; /* nothing is forgotten on the way */
    c.sequences = 1;
    c.lengths[0] = 2100;
    if (part) {
        c.layout = GDELTA_LAYOUT_THD;
        c.sequences = 3;
        c.lengths[2] = 2000;
    }
    expect_segments(&c, engine, GDELTA_OPERATION_BACKWARD);
    cr_assert_gt(slices_of(engine, &c), 1);
    cr_expect(check_case(&c, engine, kBackward));
}
