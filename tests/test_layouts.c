/* The same numbers in another place in memory give the same bits: layouts, packing, strides, slices, slots, orders,
 * and whatever lies between and behind the tensors. */
#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

static const role_set forward_roles = ROLE(kO) | ROLE(kFinal);
static const role_set backward_roles = ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta) | ROLE(kDInitial);

static test_case base_case(void) {
    return (test_case){.sequences = 3,
                       .lengths = {70},
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 64,
                       .dim_v = 128,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .strength = kGateMild};
}

/* Forward and backward of both cases give the same bits, where the engine runs both. */
static void expect_same(const test_case *one, const test_case *other, const test_engine *engine, const char *what) {
    instance a, b;
    instance_create(&a, one);
    instance_create(&b, other);
    for (gdelta_operation operation = GDELTA_OPERATION_FORWARD; operation <= GDELTA_OPERATION_BACKWARD; ++operation) {
        if (!engine_runs(engine, one, operation) || !engine_runs(engine, other, operation)) continue;
        role_set roles = operation == GDELTA_OPERATION_FORWARD ? forward_roles : backward_roles;
        cr_expect(
            instance_run(&a, engine, operation) && instance_run(&b, engine, operation) && compare_bits(&b, &a, roles),
            "%s: operation %d", what, (int)operation);
    }
    instance_destroy(&a);
    instance_destroy(&b);
}

ENGINE_TEST(layouts, dense, 1) {
    test_case bshd = base_case(), other = bshd;
    other.layout = GDELTA_LAYOUT_SBHD;
    expect_same(&bshd, &other, engine, "SBHD");
    other.layout = GDELTA_LAYOUT_BHSD;
    expect_same(&bshd, &other, engine, "BHSD");
}

ENGINE_TEST(layouts, packed, 1) {
    test_case bshd = base_case(), other = bshd;
    other.layout = GDELTA_LAYOUT_THD;
    other.lengths[1] = other.lengths[2] = bshd.lengths[0];
    expect_same(&bshd, &other, engine, "THD");
    other.capacity = 333;
    other.longest = 100;
    other.index64 = other.host_tables = true;
    expect_same(&bshd, &other, engine, "THD with rows to spare");
}

/* The projection of a model: q, k, v beside one another in one row, b and a every other number. */
ENGINE_TEST(layouts, slices, 1) {
    for (gdelta_layout layout = GDELTA_LAYOUT_BSHD; layout <= GDELTA_LAYOUT_THD; ++layout) {
        if (layout == GDELTA_LAYOUT_BHSD) continue;
        test_case plain = base_case();
        plain.layout = layout;
        plain.lengths[1] = plain.lengths[2] = plain.lengths[0];
        plain.heads_q = plain.heads_v; /* all heads equal: the case in which dense strides seem to fit */
        test_case other = plain;
        other.fused = other.interleaved = true;
        expect_same(&plain, &other, engine, "slices");
    }
}

ENGINE_TEST(layouts, gaps, 1) {
    test_case plain = base_case(), other = plain;
    static const int gaps[] = {1, 4, 8}; /* no alignment but the element's, 8 and 16 bytes of bf16 */
    for (size_t i = 0; i < sizeof gaps / sizeof *gaps; ++i) {
        for (gdelta_layout layout = GDELTA_LAYOUT_BSHD; layout <= GDELTA_LAYOUT_BHSD; ++layout) {
            other.layout = layout;
            other.gap = gaps[i];
            expect_same(&plain, &other, engine, "gaps");
        }
    }
}

ENGINE_TEST(layouts, states, 1) {
    test_case plain = base_case(), other = plain;
    other.state_order = GDELTA_STATE_VK;
    expect_same(&plain, &other, engine, "VK");
    case_use_slots(&other, kSlotsDistinct, 0);
    other.slot_padding = 4096;
    expect_same(&plain, &other, engine, "slots");
    other.index64 = true;
    expect_same(&plain, &other, engine, "int64 slots");
    case_use_slots(&other, kSlotsSame, 0);
    other.in_place = true;
    expect_same(&plain, &other, engine, "slots in place");
}

/* Odd sizes, and odd lengths of whole tiles, read no further than they should, not even to multiply it by 0. */
ENGINE_TEST(layouts, neighbours, 1) {
    static const int64_t lengths[] = {2, 70};
    for (int i = 0; i < 4; ++i) {
        test_case nan = base_case();
        nan.lengths[0] = lengths[i % 2];
        nan.heads_q = 1;
        nan.heads_v = 2;
        if (i / 2 == 0) nan.dim_k = 80, nan.dim_v = 96;
        nan.gap = i / 2 ? 8 : 3;
        test_case huge = nan;
        huge.poison = 0x7e96;
        expect_same(&nan, &huge, engine, "poison");
    }
}

/* States saved by forward are those that backward would have recomputed. */
ENGINE_TEST(layouts, saved_states, 1) {
    test_case plain = base_case(), other = plain;
    plain.lengths[0] = other.lengths[0] = 150;
    other.save_mode = GDELTA_SAVE_STATES;
    expect_same(&plain, &other, engine, "saved states");
}
