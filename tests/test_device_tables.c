/* Tables in device memory that break a rule, with no host copy to find it in: nothing outside the tensors is touched,
 * the status word says what was wrong, and the GPU is as good as before. */
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

enum { kSequences = 5, kCapacity = 160 };

static test_case packed_case(const test_engine *engine, bool index64) {
    return (test_case){.layout = GDELTA_LAYOUT_THD,
                       .sequences = kSequences,
                       .lengths = {37, 0, 51, 1, 40},
                       .capacity = kCapacity,
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 64,
                       .dim_v = 64,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .gate = GDELTA_GATE_SOFTPLUS,
                       .engine = engine->engine,
                       .index64 = index64};
}

/* The word that a call left, which is then taken back, so that the arena can be looked at for other changes. */
static uint64_t take_status(instance *x) {
    size_t offset = x->tensor[kStatus].offset;
    uint64_t word;
    memcpy(&word, x->after + offset, sizeof word);
    memcpy(x->after + offset, x->before + offset, sizeof word);
    return word;
}

/* Enqueues one call, `times` times over. */
static uint64_t run_for_status(instance *x, const test_engine *engine, gdelta_operation operation, int times) {
    device_instance d;
    cr_assert(device_create(&d, x, engine, operation));
    device_upload(&d, x);
    gdelta_stream stream = gpu_stream_create();
    for (int i = 0; i < times; ++i) {
        cr_expect_eq(device_enqueue(&d, x, stream), GDELTA_OK, "%s", gdelta_last_error());
    }
    gpu_stream_finish(stream);
    cr_expect(device_download(&d, x));
    gpu_stream_destroy(stream);
    device_destroy(&d);
    return take_status(x);
}

/* An entry of [0, 37, 37, 88, 89, 129], under this problem.tokens, and what is wrong with it. */
static const struct {
    int entry;
    int64_t value, longest;
    uint64_t rule, index;
} faults[] = {
    {0, 1, 60, GDELTA_DEVICE_CU_SEQLENS_START, 0},          {0, -1, 60, GDELTA_DEVICE_CU_SEQLENS_START, 0},
    {2, 36, 60, GDELTA_DEVICE_CU_SEQLENS_ORDER, 2},         {1, -5, 60, GDELTA_DEVICE_CU_SEQLENS_ORDER, 1},
    {5, -(1 << 30), 60, GDELTA_DEVICE_CU_SEQLENS_ORDER, 5}, {5, kCapacity + 1, 0, GDELTA_DEVICE_CU_SEQLENS_END, 5},
    {5, 1 << 30, 0, GDELTA_DEVICE_CU_SEQLENS_END, 5},       {3, 89, 51, GDELTA_DEVICE_CU_SEQLENS_LENGTH, 3},
};
enum { kFaults = sizeof faults / sizeof *faults };

/* The table that breaks one rule; entries of int64 also far outside 32 bits. */
static instance make_fault(const test_case *c, int fault, bool wide) {
    test_case with_longest = *c;
    with_longest.longest = faults[fault].longest;
    instance x;
    instance_create(&x, &with_longest);
    int64_t value = faults[fault].value;
    if (wide) value += value < 0 ? -(INT64_C(1) << 40) : INT64_C(1) << 40;
    instance_set_entry(&x, kCuSeqlens, faults[fault].entry, value);
    return x;
}

GPU_ENGINE_TEST(device_tables, malformed_cu_seqlens_write_nothing, 1) {
    for (int variant = 0; variant < 3; ++variant) {
        for (int i = 0; i < kFaults; ++i) {
            bool wide = variant == 2;
            if (wide && faults[i].value != 1 << 30 && faults[i].value >= 0) continue;
            test_case c = packed_case(engine, variant > 0);
            c.save_mode = i % 2;
            c.small_workspace = i / 2 % 2; /* two slices of heads, each of which finds the fault */
            for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_BACKWARD; ++operation) {
                if (!engine_runs(engine, &c, operation)) continue;
                instance x = make_fault(&c, i, wide);
                uint64_t word = run_for_status(&x, engine, operation, 1);
                cr_expect_eq(word >> 32, faults[i].rule, "fault %d, operation %d: %s", i, operation,
                             gdelta_device_status_string(word));
                cr_expect_eq(word & 0xffffffff, faults[i].index, "fault %d, operation %d: %s", i, operation,
                             gdelta_device_status_string(word));
                cr_expect(instance_untouched(&x, 0), "fault %d, operation %d", i, operation);
                instance_destroy(&x);
            }
        }
    }
    test_case good = packed_case(engine, false);
    cr_expect(check_case(&good, engine, kTraining));
}

/* Nobody has to ask for the word. */
GPU_ENGINE_TEST(device_tables, the_status_word_is_optional, 1) {
    test_case c = packed_case(engine, false);
    c.absent = ROLE(kStatus);
    for (int i = 0; i < kFaults; ++i) {
        for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_BACKWARD; ++operation) {
            if (!engine_runs(engine, &c, operation)) continue;
            instance x = make_fault(&c, i, false);
            device_instance d;
            cr_assert(device_create(&d, &x, engine, operation));
            device_upload(&d, &x);
            cr_expect_eq(device_enqueue(&d, &x, NULL), GDELTA_OK);
            gpu_stream_finish(NULL);
            cr_expect(device_download(&d, &x) && instance_untouched(&x, 0), "fault %d, operation %d", i, operation);
            device_destroy(&d);
            instance_destroy(&x);
        }
    }
}

/* A host copy turns the same faults into errors of the call: the sentence names the entry. */
GPU_ENGINE_TEST(device_tables, a_host_copy_is_checked_before_the_launch, 1) {
    test_case c = packed_case(engine, false);
    c.host_tables = true;
    for (int i = 0; i < kFaults; ++i) {
        for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_BACKWARD; ++operation) {
            if (!engine_runs(engine, &c, operation)) continue;
            instance x = make_fault(&c, i, false);
            device_instance d;
            cr_assert(device_create(&d, &x, engine, operation));
            device_upload(&d, &x);
            cr_expect_eq(device_enqueue(&d, &x, NULL), GDELTA_ERROR_INVALID_ARGUMENT);
            char words[32] = "cu_seqlens[0]";
            words[11] = (char)('0' + faults[i].index);
            cr_expect(strstr(gdelta_last_error(), words) != NULL, "%s", gdelta_last_error());
            gpu_stream_finish(NULL);
            cr_expect(device_download(&d, &x) && instance_untouched(&x, 0), "fault %d", i);
            device_destroy(&d);
            instance_destroy(&x);
        }
    }
}

/* Slots out of range count as -1, and are reported. */
GPU_ENGINE_TEST(device_tables, slots_out_of_range_are_skipped, 1) {
    static const int64_t bad[] = {1 << 20, -2, -(1 << 30), 100};
    for (int i = 0; i < 8; ++i) {
        bool final = i % 2;
        test_case c = {.sequences = 4,
                       .lengths = {9},
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 64,
                       .dim_v = 64,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .index64 = i & 4};
        case_use_slots(&c, kSlotsDistinct, 0);
        int64_t *slots = final ? c.final_slots : c.initial_slots;
        slots[2] = -1;
        instance skipped;
        instance_create(&skipped, &c);
        slots[2] = bad[i / 2];
        instance x;
        instance_create(&x, &c);
        const uint64_t expected =
            (uint64_t)(final ? GDELTA_DEVICE_FINAL_SLOT_RANGE : GDELTA_DEVICE_INITIAL_SLOT_RANGE) << 32 | 2;
        for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_STEP; ++operation) {
            if (final && operation == GDELTA_OPERATION_BACKWARD) continue; /* has no final slots */
            if (!engine_runs(engine, &c, operation)) continue;
            cr_assert(instance_run(&skipped, engine, operation));
            role_set outputs = instance_outputs(&x, operation);
            uint64_t word = run_for_status(&x, engine, operation, 1);
            cr_expect_eq(word, expected, "slot %d, operation %d: %s", i, operation, gdelta_device_status_string(word));
            cr_expect(instance_untouched(&x, outputs));
            cr_expect(compare_bits(&x, &skipped, outputs), "slot %d, operation %d", i, operation);
        }
        instance_destroy(&x);
        instance_destroy(&skipped);
    }
}

/* ---- Tables of drafts and checkpoints ---- */

/* Runs x, whose table has a mistake, and y, whose tables say what is made of it: the same memory but for the tables. */
static void expect_like(instance *x, instance *y, const test_engine *engine, gdelta_operation operation, uint64_t rule,
                        uint64_t index) {
    uint64_t word = run_for_status(x, engine, operation, 1);
    cr_expect_eq(word, rule << 32 | index, "%s", gdelta_device_status_string(word));
    cr_expect_eq(run_for_status(y, engine, operation, 1), 0);
    cr_expect(instance_untouched(y, instance_outputs(y, operation)));
    memcpy(x->before, y->before, y->bytes); /* the tables among it */
    static const role tables[] = {kInitialSlots, kFinalSlots, kTokenSlots, kCheckpointSlots, kParents, kAccepted};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; ++i) {
        const instance_tensor *t = &x->tensor[tables[i]];
        if (t->present) memcpy(x->after + t->offset, y->after + t->offset, (size_t)t->count * t->bytes);
    }
    cr_expect_eq(memcmp(x->after, y->after, x->bytes), 0, "%s", case_line(&x->c));
}

static test_case draft_case(int i) {
    test_case c = {.sequences = 3,
                   .lengths = {5},
                   .heads_q = 2,
                   .heads_v = 4,
                   .dim_k = 64,
                   .dim_v = 128,
                   .l2norm = GDELTA_L2NORM_ADD_EPS,
                   .index64 = i & 1};
    case_use_slots(&c, kSlotsDistinct, 0);
    return c;
}

static void skip_sequence(instance *x, int n) {
    x->c.initial_slots[n] = -1;
    instance_set_entry(x, kInitialSlots, n, -1);
}

GPU_ENGINE_TEST(device_tables, several_slots_out_of_range_store_nothing, 1) {
    for (int i = 0; i < 8; ++i) {
        static const int64_t bad[] = {1 << 20, -2, -(1 << 30), 1000};
        bool tokens = i & 4;
        test_case c = draft_case(i);
        c.token_states = tokens;
        c.lengths[0] = tokens ? 5 : 200;
        c.checkpoint_interval = tokens ? 0 : 64;
        c.several_slots = true;
        gdelta_operation operation = tokens ? GDELTA_OPERATION_STEP : GDELTA_OPERATION_FORWARD;
        if (!engine_runs(engine, &c, operation)) continue;
        instance x = make_instance(&c), y = make_instance(&c);
        instance_set_entry(&x, tokens ? kTokenSlots : kCheckpointSlots, 3, bad[i % 4]);
        instance_set_entry(&y, tokens ? kTokenSlots : kCheckpointSlots, 3, -1);
        expect_like(&x, &y, engine, operation,
                    tokens ? GDELTA_DEVICE_TOKEN_SLOT_RANGE : GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE, 3);
        instance_destroy(&x);
        instance_destroy(&y);
    }
}

GPU_ENGINE_TEST(device_tables, broken_trees_and_counts_skip_the_sequence, 1) {
    static const struct {
        role table;
        int entry;
        int64_t value;
        uint64_t rule;
    } mistakes[] = {
        {kParents, 7, 2, GDELTA_DEVICE_PARENT_RANGE},    {kParents, 5, 0, GDELTA_DEVICE_PARENT_RANGE},
        {kParents, 8, -2, GDELTA_DEVICE_PARENT_RANGE},   {kParents, 9, 1 << 30, GDELTA_DEVICE_PARENT_RANGE},
        {kAccepted, 1, 6, GDELTA_DEVICE_ACCEPTED_RANGE}, {kAccepted, 1, -1, GDELTA_DEVICE_ACCEPTED_RANGE},
    };
    for (int i = 0; i < 24; ++i) {
        test_case c = draft_case(i);
        int mistake = i / 2 % 6;
        bool tree = mistakes[mistake].table == kParents, commit = !tree || i >= 12;
        c.tree = tree;
        c.record = c.token_states = c.keep_state = true;
        for (int n = 0; n < 3; ++n) c.accepted[n] = 5;
        NEEDS(&c, COMMIT);
        instance x = make_instance(&c), y = make_instance(&c);
        for (int64_t t = 0; tree && t < 5; ++t) { /* a chain, so that a commit looks at every entry */
            instance_set_entry(&x, kParents, 5 + t, t - 1);
            instance_set_entry(&y, kParents, 5 + t, t - 1);
        }
        for (role r = kRecordK; r <= kRecordDecay; ++r) {
            instance_put_all(&x, r, 0.5);
            instance_put_all(&y, r, 0.5);
        }
        instance_set_entry(&x, mistakes[mistake].table, mistakes[mistake].entry, mistakes[mistake].value);
        skip_sequence(&y, 1);
        expect_like(&x, &y, engine, commit ? GDELTA_OPERATION_COMMIT : GDELTA_OPERATION_STEP, mistakes[mistake].rule,
                    (uint64_t)mistakes[mistake].entry);
        instance_destroy(&x);
        instance_destroy(&y);
    }
}

/* What the tables hold for a padded row does not matter. */
GPU_ENGINE_TEST(device_tables, padded_rows_are_not_looked_at, 1) {
    test_case c = draft_case(0);
    c.tree = c.record = c.keep_state = true;
    NEEDS(&c, COMMIT);
    for (gdelta_operation operation = GDELTA_OPERATION_STEP; operation <= GDELTA_OPERATION_COMMIT; ++operation) {
        instance x = make_instance(&c);
        skip_sequence(&x, 1);
        instance_set_entry(&x, kParents, 6, 77);
        instance_set_entry(&x, kAccepted, 1, 99);
        for (role r = kRecordK; r <= kRecordDecay; ++r) instance_put_all(&x, r, 0.5);
        cr_expect_eq(run_for_status(&x, engine, operation, 1), 0);
        cr_expect(instance_untouched(&x, instance_outputs(&x, operation)));
        instance_destroy(&x);
    }
}

/* The first mistake stays until the word is cleared. */
GPU_ENGINE_TEST(device_tables, the_first_mistake_is_kept, 1) {
    test_case c = packed_case(engine, false);
    instance x = make_fault(&c, 2, false);
    instance_set_entry(&x, kStatus, 0, INT64_C(6) << 32 | 3);
    uint64_t word = run_for_status(&x, engine, GDELTA_OPERATION_FORWARD, 2);
    cr_expect_eq(word, UINT64_C(6) << 32 | 3);
    cr_expect(instance_untouched(&x, 0));
    instance_destroy(&x);
}
