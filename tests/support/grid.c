#include "grid.h"

#include "compare.h"
#include "fill.h"

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

/* Sizes and lengths between those of the lists. The fp64 reference sets the bound on the work. */
static void choose_anything(test_case *c, int i, bool tiles) {
    int heads = PICK(i, "heads", 1, 1, 2, 3), group = PICK(i, "group", 1, 1, 2, 3, 5, 8);
    bool queries = draw(i, "query groups", 4) == 0;
    c->heads_q = queries ? heads * group : heads;
    c->heads_v = queries ? heads : heads * group;
    if (!tiles) {
        c->dim_k = draw(i, "wide", 4) ? 1 + draw(i, "dim_k", 128) : 1 + draw(i, "dim_k", 256);
        c->dim_v = draw(i, "wide", 4) ? 1 + draw(i, "dim_v", 128) : 1 + draw(i, "dim_v", 256);
    }
    if (c->layout != GDELTA_LAYOUT_THD) {
        c->lengths[0] = draw(i, "step", 3) == 0 ? 1 + draw(i, "length", 16) : 1 + draw(i, "length", 400);
        return;
    }
    c->sequences = 1 + draw(i, "sequences", 12);
    c->capacity = c->longest = 0;
    for (int n = 0; n < c->sequences; ++n) {
        uint64_t key = fill_key((uint64_t)i, kCuSeqlens, n, 0, 0, 0);
        c->lengths[n] = key % 4 == 0 ? 0 : (int64_t)(key >> 8) % (key % 4 == 1 ? 6 : 200);
        c->capacity += c->lengths[n];
        if (c->lengths[n] > c->longest) c->longest = c->lengths[n];
    }
    c->capacity += draw(i, "spare rows", 100);
    if (draw(i, "longest", 2)) c->longest = 0;
}

test_case grid_case(grid grid, int i) {
    test_case c = {.seed = (uint64_t)i};
    bool anything = grid == kAnything, tiles = grid == kTiles || (anything && draw(i, "tiles", 3));
    if (tiles) {
        choose_tiles(&c, i);
    } else {
        choose_sizes(&c, i);
    }
    if (anything) choose_anything(&c, i, tiles);
    choose_types(&c, i);
    if (tiles && c.dtype == GDELTA_DTYPE_FP32) c.dtype = GDELTA_DTYPE_FP16;
    choose_arithmetic(&c, i);
    choose_memory(&c, i);
    if (tiles && c.gap) c.gap = 8;
    choose_roles(&c, i);
    choose_several(&c, i);
    c.batch_invariant = draw(i, "batch_invariant", 4) == 0;
    c.small_workspace = draw(i, "small_workspace", 3) == 0;
    return c;
}

unsigned grid_operations(const test_case *c) {
    bool decode = is_step(c) && !(c->absent & ROLE(kInitial)) && (c->keep_state || !(c->absent & ROLE(kFinal)));
    return kTraining | (decode ? kStep : 0);
}
