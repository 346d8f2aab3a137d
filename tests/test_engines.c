/* Every engine against the fp64 reference, over a grid of problems in which every option meets several values of every
 * other: case i draws each option from a list by a random number of (i, option). */
#include <gdelta/gdelta.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

enum { kCases = 104, kParts = 8 };

/* An index below `count`, drawn for case i and the option of this name. */
static int draw(int i, const char *option, int count) {
    uint64_t name = 0;
    while (*option) name = name * 131 + (unsigned char)*option++;
    return (int)(fill_key(name, i, 0, 0, 0, 0) % (uint64_t)count);
}

#define PICK(i, option, ...) \
    ((const int[]){__VA_ARGS__})[draw(i, option, (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))]

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
    c->layout = draw(i, "layout", 5) % 4 == 3 ? GDELTA_LAYOUT_THD : draw(i, "layout", 5) % 4;
    if (draw(i, "packed", 3) == 0) c->layout = GDELTA_LAYOUT_THD;
    static const test_case ragged[] = {{.sequences = 6, .lengths = {0, 5, 0, 0, 65, 0}},
                                       {.sequences = 3, .lengths = {37, 51, 40}},
                                       {.sequences = 1, .lengths = {0}},
                                       {.sequences = 3, .lengths = {1, 0, 64}}};
    int which = draw(i, "ragged", 4);
    c->sequences = large ? 1 : PICK(i, "sequences", 1, 2, 3);
    c->lengths[0] = tokens;
    if (c->layout != GDELTA_LAYOUT_THD) return;
    c->sequences = ragged[which].sequences;
    for (int n = 0; n < c->sequences; ++n) c->lengths[n] = ragged[which].lengths[n];
    if (which >= 2) c->lengths[0] = tokens;
    int64_t sum = 0, longest = 0;
    for (int n = 0; n < c->sequences; ++n) {
        sum += c->lengths[n];
        if (c->lengths[n] > longest) longest = c->lengths[n];
    }
    c->capacity = sum + PICK(i, "capacity", 0, 0, 7, 130);
    c->longest = PICK(i, "longest", 0, 1) ? longest : 0;
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
    static const uint32_t gradients =
        ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta) | ROLE(kDALog) | ROLE(kDDtBias) | ROLE(kDInitial);
    const uint32_t sets[] = {0,
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

static test_case grid_case(int i) {
    test_case c = {.seed = (uint64_t)i};
    choose_sizes(&c, i);
    choose_types(&c, i);
    choose_arithmetic(&c, i);
    choose_memory(&c, i);
    choose_roles(&c, i);
    return c;
}

static unsigned operations_of(const test_case *c) {
    bool decode = c->layout != GDELTA_LAYOUT_THD && c->lengths[0] <= 16 && !(c->absent & ROLE(kInitial)) &&
                  (c->keep_state || !(c->absent & ROLE(kFinal)));
    return kTraining | (decode ? kStep : 0);
}

ENGINE_TEST(engines, grid, kParts) {
    for (int i = part; i < kCases; i += kParts) {
        test_case c = grid_case(i);
        cr_expect(check_case(&c, engine, operations_of(&c)), "grid case %d", i);
    }
}

/* What AUTO takes is one of the engines, bit for bit. */
Test(engines, auto_is_an_engine) {
    gpu_require("engines/auto_is_an_engine");
    test_case c = {.sequences = 2, .lengths = {70}, .heads_q = 2, .heads_v = 4, .dim_k = 128, .dim_v = 128};
    instance chosen, named;
    instance_create(&chosen, &c);
    test_engine automatic = {"auto", GDELTA_ENGINE_AUTO, true, GDELTA_DTYPE_FP32};
    cr_assert(instance_run(&chosen, &automatic, GDELTA_OPERATION_FORWARD));
    bool found = false;
    for (int e = 0; e < kEngines; ++e) {
        if (!test_engines[e].on_gpu) continue;
        instance_create(&named, &c);
        cr_assert(instance_run(&named, &test_engines[e], GDELTA_OPERATION_FORWARD));
        found = compare_bits(&chosen, &named, ROLE(kO) | ROLE(kFinal)) || found;
        instance_destroy(&named);
    }
    cr_expect(found);
    instance_destroy(&chosen);
}
