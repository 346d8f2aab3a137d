/* Every engine against the fp64 reference, over grids of problems; and what AUTO takes. */
#include <gdelta/gdelta.h>
#include <stdio.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/grid.h"

enum { kCases = 104, kChunkCases = 96, kParts = 8 };

ENGINE_TEST(engines, grid, kParts) {
    int left_out = 0;
    for (int i = part; i < kCases; i += kParts) {
        test_case c = grid_case(kEveryProblem, i);
        left_out += !RUNS(&c, FORWARD);
        cr_expect(check_case(&c, engine, grid_operations(&c)), "grid case %d", i);
    }
    if (left_out) fprintf(stderr, "grid, part %d: the engine %s is not for %d cases\n", part, engine->name, left_out);
}

/* No engine may leave out a forward. */
ENGINE_TEST(engines, tiles, kParts) {
    for (int i = part; i < kChunkCases; i += kParts) {
        test_case c = grid_case(kTiles, i);
        cr_expect(RUNS(&c, FORWARD) && check_case(&c, engine, kTraining), "tile case %d", i);
    }
}

/* ---- AUTO ---- */

static const test_engine automatic = {"auto", GDELTA_ENGINE_AUTO, true, 0, GDELTA_DTYPE_FP32, 1};

/* AUTO gives this engine's bits. */
static bool auto_is(const test_case *c, const test_engine *engine, gdelta_operation operation) {
    instance chosen, named;
    instance_create(&chosen, c);
    instance_create(&named, c);
    bool same = instance_run(&chosen, &automatic, operation) && instance_run(&named, engine, operation) &&
                compare_bits(&chosen, &named, instance_outputs(&named, operation));
    instance_destroy(&chosen);
    instance_destroy(&named);
    return same;
}

static test_case auto_case(void) {
    return (test_case){.sequences = 2, .lengths = {70}, .heads_q = 2, .heads_v = 4, .dim_k = 128, .dim_v = 128};
}

static const gdelta_operation training[] = {GDELTA_OPERATION_FORWARD, GDELTA_OPERATION_BACKWARD};

Test(engines, auto_is_an_engine) {
    gpu_require("engines/auto_is_an_engine", 0);
    const test_engine *slow = &test_engines[kRecurrent], *fast = gpu_capability() == 90 ? &test_engines[kHopper] : slow;
    for (int i = 0; i < 2; ++i) {
        for (int mode = GDELTA_SAVE_COMPACT; mode <= GDELTA_SAVE_STATES; ++mode) {
            test_case c = auto_case();
            c.save_mode = mode;
            cr_expect(auto_is(&c, fast, training[i]));
            c.dtype = GDELTA_DTYPE_FP16; /* where adjoints underflow */
            cr_expect(auto_is(&c, i == 0 ? fast : slow, training[i]));
            c.dim_k = 80;
            cr_expect(auto_is(&c, slow, training[i]));
        }
    }
}

/* What the copy engine cannot take goes to the other engine, which then has no saved states: a stride of no whole 16
 * bytes, an odd address. */
Test(engines, auto_takes_any_strides) {
    gpu_require("engines/auto_takes_any_strides", 90);
    for (int i = 0; i < 4; ++i) {
        test_case c = auto_case();
        c.save_mode = i / 2;
        for (int gap = 1; gap <= 4; gap *= 2) {
            c.gap = gap;
            cr_expect(auto_is(&c, &test_engines[kRecurrent], training[i % 2]), "gap %d", gap);
        }
        c.gap = 8;
        cr_expect(auto_is(&c, &test_engines[kHopper], training[i % 2]));
    }
}

/* Checkpoints take no other engine. */
Test(engines, auto_has_checkpoints) {
    gpu_require("engines/auto_has_checkpoints", 90);
    test_case c = auto_case();
    c.checkpoint_interval = 64;
    cr_expect(auto_is(&c, &test_engines[kHopper], GDELTA_OPERATION_FORWARD));
}

/* The gradient of a linear gate is the recurrent engine's. */
Test(engines, auto_has_linear_gates) {
    gpu_require("engines/auto_has_linear_gates", 0);
    test_case c = auto_case();
    c.gate = GDELTA_GATE_LINEAR;
    c.strength = kGateResets;
    cr_expect(auto_is(&c, &test_engines[kRecurrent], GDELTA_OPERATION_BACKWARD));
}

/* The engine refuses the call in these words, and writes nothing. */
static void expect_refusal(const test_case *c, gdelta_operation operation, const char *words) {
    instance x;
    device_instance d;
    instance_create(&x, c);
    cr_assert(device_create(&d, &x, &test_engines[kHopper], operation));
    device_upload(&d, &x);
    cr_expect_eq(device_enqueue(&d, &x, NULL), GDELTA_ERROR_UNSUPPORTED);
    cr_expect_not_null(strstr(gdelta_last_error(), words), "%s", gdelta_last_error());
    gpu_stream_finish(NULL);
    cr_expect(device_download(&d, &x) && instance_untouched(&x, 0));
    device_destroy(&d);
    instance_destroy(&x);
}

/* The same in a call for hopper by name is refused, in words that name the tensor. */
Test(engines, hopper_refuses_what_it_cannot_take) {
    gpu_require("engines/hopper_refuses_what_it_cannot_take", 90);
    test_case c = auto_case();
    c.gap = 4;
    for (int i = 0; i < 2; ++i) expect_refusal(&c, training[i], "q.stride[0] is ");
    c = auto_case();
    c.gate = GDELTA_GATE_LINEAR;
    expect_refusal(&c, GDELTA_OPERATION_BACKWARD, "gate is linear (1)");
}
