/* Every engine against the fp64 reference, over grids of problems in which every option meets several values of every
 * other: case i draws each option from a list by a random number of (i, option). */
#include <gdelta/gdelta.h>
#include <stdio.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

enum { kCases = 104, kChunkCases = 96, kParts = 8 };

/* Two grids: every problem, and, for engines that work on tiles and chunks of 64 tokens, what these can do, with
 * lengths around theirs. */
typedef enum grid { kEveryProblem, kTiles } grid;

/* An index below `count`, drawn for case i and the option of this name. */
static int draw(int i, const char *option, int count) {
    uint64_t name = 0;
    while (*option) name = name * 131 + (unsigned char)*option++;
    return (int)(fill_key(name, i, 0, 0, 0, 0) % (uint64_t)count);
}

#define PICK(i, option, ...) \
    ((const int[]){__VA_ARGS__})[draw(i, option, (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))]

static void choose_ragged(test_case *c, int i, int64_t tokens, const test_case *ragged, int count) {
    int which = draw(i, "ragged", count);
    c->sequences = ragged[which].sequences;
    for (int n = 0; n < c->sequences; ++n) c->lengths[n] = ragged[which].lengths[n];
    if (which >= count - 2) c->lengths[0] = tokens;
    int64_t sum = 0, longest = 0;
    for (int n = 0; n < c->sequences; ++n) {
        sum += c->lengths[n];
        if (c->lengths[n] > longest) longest = c->lengths[n];
    }
    c->capacity = sum + PICK(i, "capacity", 0, 0, 7, 130);
    c->longest = PICK(i, "longest", 0, 1) ? longest : 0;
}

static void choose_layout(test_case *c, int i) {
    c->layout = draw(i, "layout", 5) % 4 == 3 ? GDELTA_LAYOUT_THD : draw(i, "layout", 5) % 4;
    if (draw(i, "packed", 3) == 0) c->layout = GDELTA_LAYOUT_THD;
}

static void choose_sizes(test_case *c, int i) {
    static const int dims[][2] = {{64, 64}, {128, 128}, {96, 192}, {80, 96}, {64, 128}, {256, 256}, {7, 5}, {33, 200}};
    static const int heads[][2] = {{1, 1}, {2, 4}, {1, 3}, {1, 4}, {4, 2}, {3, 1}, {3, 3}};
    c->dim_k = dims[i % 8][0];
    c->dim_v = dims[i % 8][1];
    c->heads_q = heads[i % 7][0];
    c->heads_v = heads[i % 7][1];
    bool large = c->dim_k * c->dim_v > 128 * 128;
    int64_t tokens = large ? PICK(i, "tokens", 1, 2, 5, 31, 63, 64, 65)
                           : PICK(i, "tokens", 1, 2, 5, 15, 31, 63, 64, 65, 127, 130, 191);
    choose_layout(c, i);
    c->sequences = large ? 1 : PICK(i, "sequences", 1, 2, 3);
    c->lengths[0] = tokens;
    static const test_case ragged[] = {{.sequences = 6, .lengths = {0, 5, 0, 0, 65, 0}},
                                       {.sequences = 3, .lengths = {37, 51, 40}},
                                       {.sequences = 1, .lengths = {0}},
                                       {.sequences = 3, .lengths = {1, 0, 64}}};
    if (c->layout == GDELTA_LAYOUT_THD) choose_ragged(c, i, tokens, ragged, 4);
}

static void choose_tiles(test_case *c, int i) {
    static const int heads[][2] = {{1, 1}, {1, 2}, {2, 2}, {1, 3}, {2, 4}, {1, 4}, {2, 1}, {4, 2}, {2, 6}};
    c->dim_k = i & 1 ? 128 : 64;
    c->dim_v = i & 2 ? 128 : 64;
    c->heads_q = heads[i % 9][0];
    c->heads_v = heads[i % 9][1];
    choose_layout(c, i);
    c->sequences = PICK(i, "sequences", 1, 2, 3);
    c->lengths[0] = PICK(i, "tokens", 1, 63, 64, 65, 130, 200, 257);
    static const test_case ragged[] = {{.sequences = 7, .lengths = {0, 5, 0, 64, 65, 129, 0}},
                                       {.sequences = 3, .lengths = {37, 151, 40}},
                                       {.sequences = 4, .lengths = {128, 64, 192, 1}},
                                       {.sequences = 1, .lengths = {0}},
                                       {.sequences = 3, .lengths = {1, 0, 100}}};
    if (c->layout == GDELTA_LAYOUT_THD) choose_ragged(c, i, c->lengths[0], ragged, 5);
}

static void choose_types(test_case *c, int i) {
    c->dtype = PICK(i, "dtype", GDELTA_DTYPE_DEFAULT, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16, GDELTA_DTYPE_FP32);
    c->gate_dtype = PICK(i, "gate_dtype", GDELTA_DTYPE_DEFAULT, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16);
    c->beta_dtype = PICK(i, "beta_dtype", GDELTA_DTYPE_DEFAULT, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16);
    c->state_dtype =
        PICK(i, "state_dtype", GDELTA_DTYPE_DEFAULT, GDELTA_DTYPE_FP32, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16);
    c->parameter_dtype = PICK(i, "parameters", GDELTA_DTYPE_DEFAULT, GDELTA_DTYPE_BF16, GDELTA_DTYPE_FP16);
    /* fp32 results show an engine's own error; results in the problem's type, that they are rounded once. */
    c->out_dtype = PICK(i, "out_dtype", GDELTA_DTYPE_FP32, GDELTA_DTYPE_FP32, GDELTA_DTYPE_DEFAULT);
    c->final_dtype = PICK(i, "final_dtype", GDELTA_DTYPE_FP32, GDELTA_DTYPE_DEFAULT);
}

static void choose_arithmetic(test_case *c, int i) {
    c->gate = draw(i, "gate", 3);
    c->strength = draw(i, "strength", kGateResets + 1);
    c->beta = draw(i, "beta", 3);
    c->beta_max = PICK(i, "beta_max", 1, 2);
    c->l2norm = draw(i, "l2norm", 3);
    if (c->l2norm) c->eps = PICK(i, "eps", 0, 0, 1) * 0.5;
    c->keys = draw(i, "keys", kKeysShort + 1);
    c->head_map = draw(i, "head_map", 2);
    c->has_scale = PICK(i, "scale", 0, 1);
    if (c->has_scale) c->scale = PICK(i, "scale value", 1, 2, 0) * 0.25;
    c->save_mode = draw(i, "save_mode", 2);
}

static void choose_memory(test_case *c, int i) {
    c->state_order = draw(i, "state_order", 2);
    bool may_share = c->layout != GDELTA_LAYOUT_BHSD;
    c->gap = PICK(i, "gap", 0, 0, 0, 1, 3, 8);
    c->fused = may_share && c->gap == 0 && draw(i, "fused", 2);
    c->interleaved = may_share && c->gap == 0 && c->gate_dtype == c->beta_dtype && draw(i, "interleaved", 3) > 0;
    int slots = PICK(i, "slots", -1, kSlotsSame, kSlotsDistinct);
    if (slots >= 0) case_use_slots(c, slots, (uint64_t)PICK(i, "skipped", 0, 0, 1, 2, 5));
    c->slot_padding = PICK(i, "slot_padding", 0, 5, 4096);
    c->recycled = (uint64_t)PICK(i, "recycled", 0, 0, 1, 2, 7);
    c->index64 = draw(i, "index64", 2);
    c->host_tables = draw(i, "host_tables", 2);
    c->keep_state = draw(i, "keep_state", 4) == 0;
    c->accumulate = draw(i, "accumulate", 2);
    c->wide_pads = draw(i, "wide_pads", 16) == 0;
}

static void choose_roles(test_case *c, int i) {
    static const role_set gradients =
        ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta) | ROLE(kDALog) | ROLE(kDDtBias) | ROLE(kDInitial);
    const role_set sets[] = {0,
                             0,
                             0,
                             ROLE(kInitial),
                             ROLE(kInitial) | ROLE(kDInitial) | ROLE(kDFinal),
                             ROLE(kFinal) | ROLE(kDFinal),
                             ROLE(kO),
                             ROLE(kG),
                             ROLE(kBeta),
                             ROLE(kG) | ROLE(kBeta),
                             ROLE(kDtBias),
                             ROLE(kDO),
                             ROLE(kDFinal),
                             ROLE(kStatus),
                             gradients & ~ROLE(kDG),
                             gradients & ~ROLE(kDBeta),
                             gradients & ~ROLE(kDK),
                             gradients & ~ROLE(kDInitial),
                             ROLE(kDQ),
                             ROLE(kDV) | ROLE(kDALog)};
    c->absent = sets[i % (int)(sizeof sets / sizeof *sets)];
    if (c->absent & ROLE(kG)) c->gate = GDELTA_GATE_LOG;
    if (c->absent & ROLE(kBeta)) {
        c->beta = GDELTA_BETA_VALUE;
        if (c->l2norm == GDELTA_L2NORM_NONE) c->keys = kKeysShort;
    }
    if (c->absent & ROLE(kDtBias)) c->gate = GDELTA_GATE_SOFTPLUS;
    bool both = !(c->absent & (ROLE(kInitial) | ROLE(kFinal)));
    c->in_place = both && draw(i, "in_place", 2);
    if (c->in_place) c->final_dtype = GDELTA_DTYPE_DEFAULT;
    if (c->absent & ROLE(kO)) c->keep_state = false;
}

/* A step has at most 16 tokens. */
static bool is_step(const test_case *c) {
    return c->layout != GDELTA_LAYOUT_THD && c->lengths[0] <= 16;
}

static void choose_several(test_case *c, int i) {
    c->checkpoint_interval = PICK(i, "checkpoints", 0, 0, 64, 128);
    c->several_slots = draw(i, "several_slots", 2);
    c->token_states = is_step(c) && draw(i, "token_states", 2);
    c->record = is_step(c) && draw(i, "record", 2);
    c->tree = is_step(c) && c->keep_state && draw(i, "tree", 2);
}

static test_case grid_case(grid grid, int i) {
    test_case c = {.seed = (uint64_t)i};
    bool tiles = grid == kTiles;
    if (tiles) {
        choose_tiles(&c, i);
    } else {
        choose_sizes(&c, i);
    }
    choose_types(&c, i);
    if (tiles && c.dtype == GDELTA_DTYPE_FP32) c.dtype = GDELTA_DTYPE_FP16;
    choose_arithmetic(&c, i);
    choose_memory(&c, i);
    if (tiles && c.gap) c.gap = 8;
    choose_roles(&c, i);
    if (!tiles) choose_several(&c, i);
    return c;
}

static unsigned operations_of(const test_case *c) {
    bool decode = is_step(c) && !(c->absent & ROLE(kInitial)) && (c->keep_state || !(c->absent & ROLE(kFinal)));
    return kTraining | (decode ? kStep : 0);
}

ENGINE_TEST(engines, grid, kParts) {
    int left_out = 0;
    for (int i = part; i < kCases; i += kParts) {
        test_case c = grid_case(kEveryProblem, i);
        left_out += !RUNS(&c, FORWARD);
        cr_expect(check_case(&c, engine, operations_of(&c)), "grid case %d", i);
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
    /* Backward is the recurrent engine's unless another is named, and so is a forward that saves states for it. */
    const test_engine *slow = &test_engines[kRecurrent], *fast = gpu_capability() == 90 ? &test_engines[kHopper] : slow;
    for (int i = 0; i < 2; ++i) {
        for (int mode = GDELTA_SAVE_COMPACT; mode <= GDELTA_SAVE_STATES; ++mode) {
            test_case c = auto_case();
            c.save_mode = mode;
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
        cr_expect(auto_is(&c, &test_engines[i % 2 == 0 ? kHopper : kRecurrent], training[i % 2]));
    }
}

/* Checkpoints are the recurrent engine's. */
Test(engines, auto_has_checkpoints) {
    gpu_require("engines/auto_has_checkpoints", 0);
    test_case c = auto_case();
    c.checkpoint_interval = 64;
    cr_expect(auto_is(&c, &test_engines[kRecurrent], GDELTA_OPERATION_FORWARD));
}

/* So is the gradient of a linear gate. */
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
