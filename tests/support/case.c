#include "case.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gdelta/reference.h>

#include "fill.h"
#include "host/convert.h"
#include "host/layout.h"

/* ---- Roles ---- */

/* What a role's logical rows are. */
typedef enum role_kind { kTokens, kState, kSeveral, kVector, kTable } role_kind;

static const struct {
    const char *name;
    role_kind kind;
    char heads, dim; /* q, k, v or o; k, v or 1 */
    bool output;
} roles[kRoles] = {
    [kQ] = {"q", kTokens, 'q', 'k', false},
    [kK] = {"k", kTokens, 'k', 'k', false},
    [kV] = {"v", kTokens, 'v', 'v', false},
    [kG] = {"g", kTokens, 'o', '1', false},
    [kBeta] = {"beta", kTokens, 'o', '1', false},
    [kALog] = {"a_log", kVector, 'o', '1', false},
    [kDtBias] = {"dt_bias", kVector, 'o', '1', false},
    [kInitial] = {"initial_state", kState, 'o', 'v', false},
    [kDO] = {"d_o", kTokens, 'o', 'v', false},
    [kDFinal] = {"d_final_state", kState, 'o', 'v', false},
    [kCuSeqlens] = {"cu_seqlens", kTable, '1', '1', false},
    [kInitialSlots] = {"initial_state.slots", kTable, '1', '1', false},
    [kFinalSlots] = {"final_state.slots", kTable, '1', '1', false},
    [kHasInitial] = {"has_initial_state", kTable, '1', '1', false},
    [kStatus] = {"device_status", kTable, '1', '1', false},
    [kTokenSlots] = {"token_states.slots", kTable, '1', '1', false},
    [kCheckpointSlots] = {"checkpoints.slots", kTable, '1', '1', false},
    [kParents] = {"parents", kTable, '1', '1', false},
    [kAccepted] = {"accepted", kTable, '1', '1', false},
    [kO] = {"o", kTokens, 'o', 'v', true},
    [kFinal] = {"final_state", kState, 'o', 'v', true},
    [kTokenStates] = {"token_states", kSeveral, 'o', 'v', true},
    [kRecordK] = {"record.k", kTokens, 'k', 'k', true},
    [kRecordU] = {"record.u", kTokens, 'o', 'v', true},
    [kRecordDecay] = {"record.decay", kTokens, 'o', '1', true},
    [kCheckpoints] = {"checkpoints", kSeveral, 'o', 'v', true},
    [kDQ] = {"dq", kTokens, 'q', 'k', true},
    [kDK] = {"dk", kTokens, 'k', 'k', true},
    [kDV] = {"dv", kTokens, 'v', 'v', true},
    [kDG] = {"dg", kTokens, 'o', '1', true},
    [kDBeta] = {"dbeta", kTokens, 'o', '1', true},
    [kDALog] = {"da_log", kVector, 'o', '1', true},
    [kDDtBias] = {"ddt_bias", kVector, 'o', '1', true},
    [kDInitial] = {"d_initial_state", kState, 'o', 'v', true},
};

const char *role_name(role role) {
    return roles[role].name;
}

/* ---- The case ---- */

static gdelta_dtype or_default(gdelta_dtype dtype, gdelta_dtype otherwise) {
    return dtype == GDELTA_DTYPE_DEFAULT ? otherwise : dtype;
}

static int32_t heads_k(const test_case *c) {
    return c->heads_q < c->heads_v ? c->heads_q : c->heads_v;
}

int32_t case_heads_o(const test_case *c) {
    return c->heads_q > c->heads_v ? c->heads_q : c->heads_v;
}

int64_t case_length(const test_case *c, int sequence) {
    return c->lengths[c->layout == GDELTA_LAYOUT_THD ? sequence : 0];
}

static int64_t total_rows(const test_case *c) {
    int64_t sum = 0;
    for (int n = 0; n < c->sequences; ++n) sum += case_length(c, n);
    return c->layout == GDELTA_LAYOUT_THD && c->capacity ? c->capacity : sum;
}

/* Several states: how many a sequence has, and the numbers in all. */
static int64_t several_of(const test_case *c, role r, int64_t n) {
    return case_length(c, (int)n) / (r == kTokenStates ? 1 : c->checkpoint_interval);
}

static int64_t several_numbers(const test_case *c, role r) {
    bool packed = r == kCheckpoints && c->layout == GDELTA_LAYOUT_THD;
    return packed ? total_rows(c) / c->checkpoint_interval : c->sequences * several_of(c, r, 0);
}

test_case two_head_case(int64_t tokens) {
    return (test_case){.sequences = 1,
                       .lengths = {tokens},
                       .heads_q = 1,
                       .heads_v = 2,
                       .dim_k = 128,
                       .dim_v = 128,
                       .out_dtype = GDELTA_DTYPE_FP32,
                       .l2norm = GDELTA_L2NORM_ADD_EPS};
}

void case_use_slots(test_case *c, enum slot_style style, uint64_t skipped) {
    c->slot_count = (style == kSlotsSame ? 1 : 2) * c->sequences + 3;
    for (int n = 0; n < c->sequences; ++n) {
        bool skip = skipped >> n & 1;
        c->initial_slots[n] = skip ? -1 : c->slot_count - 1 - n;
        c->final_slots[n] = skip || style == kSlotsSame ? c->initial_slots[n] : n;
    }
}

void case_use_one_pool(test_case *c) {
    case_use_slots(c, kSlotsSame, 0);
    c->token_states = !c->checkpoint_interval;
    int64_t more = several_numbers(c, c->token_states ? kTokenStates : kCheckpoints);
    c->slot_count += more;
    for (int n = 0; n < c->sequences; ++n) c->final_slots[n] = c->initial_slots[n] += more;
    c->in_place = c->several_slots = c->one_pool = true;
}

int64_t case_parent(const test_case *c, int64_t sequence, int64_t t) {
    uint64_t key = fill_key(c->seed, kParents, c->first_sequence + sequence, t, 0, 0);
    return (int64_t)(key % (uint64_t)(t + 1)) - 1;
}

gdelta_problem case_problem(const test_case *c) {
    bool packed = c->layout == GDELTA_LAYOUT_THD;
    return (gdelta_problem){
        .struct_size = sizeof(gdelta_problem),
        .flags = (c->batch_invariant ? GDELTA_FLAG_BATCH_INVARIANT : 0) |
                 (c->small_workspace ? GDELTA_FLAG_SMALL_WORKSPACE : 0),
        .layout = c->layout,
        .engine = c->engine,
        .batch = packed ? 0 : c->sequences,
        .tokens = packed ? c->longest : c->lengths[0],
        .sequences = packed ? c->sequences : 0,
        .total_tokens = packed ? total_rows(c) : 0,
        .heads_q = c->heads_q,
        .heads_k = heads_k(c),
        .heads_v = c->heads_v,
        .dim_k = c->dim_k,
        .dim_v = c->dim_v,
        .dtype = c->dtype,
        .gate_dtype = c->gate_dtype,
        .beta_dtype = c->beta_dtype,
        .state_dtype = c->state_dtype,
        .scale = c->scale,
        .has_scale = c->has_scale,
        .l2norm = c->l2norm,
        .l2norm_eps = c->eps,
        .gate = c->gate,
        .beta = c->beta,
        .head_map = c->head_map,
        .state_order = c->state_order,
        .save_mode = c->save_mode,
    };
}

static void append(char *text, size_t size, const char *format, ...) {
    size_t length = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

const char *case_line(const test_case *c) {
    static const char *const layouts[] = {"BSHD", "SBHD", "BHSD", "THD"};
    static const char *const dtypes[] = {"-", "bf16", "fp16", "fp32", "fp64"};
    static const char *const gates[] = {"log", "linear", "softplus"};
    static const char *const betas[] = {"value", "sigmoid", "2sigmoid"};
    static const char *const norms[] = {"none", "add", "max"};
    static const char *const strengths[] = {"weak", "zero", "mild", "strong", "extreme", "resets"};
    static const char *const keys[] = {"random", "correlated", "short"};
    static char line[2048];
    *line = '\0';
    append(line, sizeof line, "%s N=%d T=", layouts[c->layout], c->sequences);
    for (int n = 0; n < (c->layout == GDELTA_LAYOUT_THD ? c->sequences : 1); ++n) {
        append(line, sizeof line, "%s%" PRId64, n ? "," : "", c->lengths[n]);
    }
    append(line, sizeof line, " rows=%" PRId64 " longest=%" PRId64 " HQ=%d HV=%d K=%d V=%d", total_rows(c), c->longest,
           c->heads_q, c->heads_v, c->dim_k, c->dim_v);
    append(line, sizeof line, " io=%s gate=%s:%s:%s beta=%s:%s:%g state=%s:%s out=%s:%s", dtypes[c->dtype],
           gates[c->gate], dtypes[c->gate_dtype], strengths[c->strength], betas[c->beta], dtypes[c->beta_dtype],
           c->beta_max, dtypes[c->state_dtype], c->state_order == GDELTA_STATE_VK ? "VK" : "KV", dtypes[c->out_dtype],
           dtypes[c->final_dtype]);
    append(line, sizeof line, " norm=%s:%g keys=%s heads=%s save=%d engine=%d", norms[c->l2norm], c->eps, keys[c->keys],
           c->head_map == GDELTA_HEADS_TILED ? "tiled" : "interleaved", c->save_mode, c->engine);
    if (c->has_scale) append(line, sizeof line, " scale=%g", c->scale);
    if (c->gap) append(line, sizeof line, " gap=%d", c->gap);
    if (c->fused) append(line, sizeof line, " fused");
    if (c->interleaved) append(line, sizeof line, " interleaved");
    if (c->slot_count) {
        append(line, sizeof line, " slots=%" PRId64 "+%" PRId64 "[", c->slot_count, c->slot_padding);
        for (int n = 0; n < c->sequences; ++n) {
            append(line, sizeof line, " %" PRId64 ">%" PRId64, c->initial_slots[n], c->final_slots[n]);
        }
        append(line, sizeof line, " ]");
    }
    if (c->recycled) append(line, sizeof line, " recycled=%" PRIx64, c->recycled);
    if (c->in_place) append(line, sizeof line, " in-place");
    if (c->keep_state) append(line, sizeof line, " keep-state");
    if (c->token_states) append(line, sizeof line, " token-states");
    if (c->record) append(line, sizeof line, " record");
    if (c->tree) append(line, sizeof line, " tree");
    if (c->checkpoint_interval) append(line, sizeof line, " checkpoints=%" PRId64, c->checkpoint_interval);
    if (c->several_slots) append(line, sizeof line, c->one_pool ? " one-pool" : " several-slots");
    if (c->accumulate) append(line, sizeof line, " accumulate");
    if (c->batch_invariant) append(line, sizeof line, " batch-invariant");
    if (c->small_workspace) append(line, sizeof line, " small-workspace");
    if (c->index64) append(line, sizeof line, " int64");
    if (c->host_tables) append(line, sizeof line, " host-tables");
    if (c->absent) {
        append(line, sizeof line, " without");
        for (role r = 0; r < kRoles; ++r) {
            if (c->absent & ROLE(r)) append(line, sizeof line, " %s", roles[r].name);
        }
    }
    append(line, sizeof line, " poison=%x seed=%" PRIu64 " at %" PRId64 ":%" PRId64, c->poison, c->seed,
           c->first_sequence, c->first_token);
    return line;
}

/* The roles that a case has. */
static role_set case_roles(const test_case *c) {
    role_set set = ROLE(kRoles) - 1;
    set &= ~c->absent;
    if (c->gate != GDELTA_GATE_SOFTPLUS) set &= ~(ROLE(kALog) | ROLE(kDtBias));
    if (c->layout != GDELTA_LAYOUT_THD) set &= ~ROLE(kCuSeqlens);
    if (!c->slot_count || !(set & ROLE(kInitial))) set &= ~ROLE(kInitialSlots);
    if (!c->slot_count || !(set & ROLE(kFinal))) set &= ~ROLE(kFinalSlots);
    if (!c->recycled || !(set & ROLE(kInitial))) set &= ~ROLE(kHasInitial);
    if (!c->token_states) set &= ~(ROLE(kTokenStates) | ROLE(kTokenSlots));
    if (!c->checkpoint_interval) set &= ~(ROLE(kCheckpoints) | ROLE(kCheckpointSlots));
    if (!c->several_slots) set &= ~(ROLE(kTokenSlots) | ROLE(kCheckpointSlots));
    if (!c->record) set &= ~(RECORD_ROLES | ROLE(kAccepted));
    if (!c->tree) set &= ~ROLE(kParents);
    static const role pairs[][2] = {{kG, kDG}, {kBeta, kDBeta}, {kALog, kDALog}, {kDtBias, kDDtBias}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; ++i) {
        if (!(set & ROLE(pairs[i][0]))) set &= ~ROLE(pairs[i][1]);
    }
    return set;
}

static gdelta_dtype default_dtype(const test_case *c, role r) {
    switch (r) {
        case kG:
        case kDG:
            return or_default(c->gate_dtype, GDELTA_DTYPE_FP32);
        case kBeta:
        case kDBeta:
            return or_default(c->beta_dtype, GDELTA_DTYPE_FP32);
        case kALog:
        case kDtBias:
        case kDALog:
        case kDDtBias:
        case kRecordK:
        case kRecordU:
        case kRecordDecay:
            return GDELTA_DTYPE_FP32;
        case kInitial:
        case kFinal:
        case kTokenStates:
        case kCheckpoints:
        case kDInitial:
        case kDFinal:
            return or_default(c->state_dtype, GDELTA_DTYPE_FP32);
        default:
            return or_default(c->dtype, GDELTA_DTYPE_BF16);
    }
}

static gdelta_dtype role_dtype(const test_case *c, role r) {
    if (roles[r].kind == kTable) return GDELTA_DTYPE_DEFAULT;
    if (r == kALog || r == kDtBias) return or_default(c->parameter_dtype, GDELTA_DTYPE_FP32);
    if (r == kFinal || roles[r].kind == kSeveral) return or_default(c->final_dtype, default_dtype(c, r));
    if (ROLE(r) & RECORD_ROLES) return c->out_dtype == GDELTA_DTYPE_FP64 ? GDELTA_DTYPE_FP64 : GDELTA_DTYPE_FP32;
    if (roles[r].output && roles[r].kind != kVector) return or_default(c->out_dtype, default_dtype(c, r));
    return default_dtype(c, r);
}

/* ---- Shape and place of each tensor ---- */

int64_t instance_sequences(const instance *x, role r) {
    return roles[r].kind == kVector ? 1 : x->c.sequences;
}

static int64_t slot_of(const test_case *c, role r, int64_t n) {
    if (!c->slot_count || (r != kInitial && r != kFinal)) return n;
    int64_t slot = (r == kInitial ? c->initial_slots : c->final_slots)[n];
    return slot < c->slot_count ? slot : -1;
}

/* A sequence is skipped where one of its slots is no slot. */
static bool skipped(const instance *x, int64_t n) {
    return (x->tensor[kInitial].present && slot_of(&x->c, kInitial, n) < 0) ||
           (x->tensor[kFinal].present && slot_of(&x->c, kFinal, n) < 0);
}

/* The number of a sequence's first, and a number's entry. */
static int64_t several_first(const instance *x, role r, int64_t n) {
    bool packed = r == kCheckpoints && x->c.layout == GDELTA_LAYOUT_THD;
    return packed ? x->start[n] / x->c.checkpoint_interval : n * several_of(&x->c, r, 0);
}

static int64_t several_slots(const test_case *c, role r) {
    return !c->several_slots ? 0 : c->one_pool ? c->slot_count : several_numbers(c, r) + 3;
}

static int64_t several_entry(const test_case *c, role r, int64_t number) {
    return c->several_slots ? several_numbers(c, r) - 1 - number : number;
}

static int64_t several_stored(const test_case *c, role r, int64_t n) {
    int64_t count = several_of(c, r, n);
    return c->several_slots && count > 1 ? count - 1 : count;
}

int64_t instance_rows(const instance *x, role r, int64_t n) {
    if (ROLE(r) & RECORD_ROLES && skipped(x, n)) return 0;
    if (roles[r].kind == kTokens) return case_length(&x->c, (int)n);
    if (roles[r].kind == kVector) return 1;
    if (roles[r].kind == kSeveral) return skipped(x, n) ? 0 : several_stored(&x->c, r, n) * x->c.dim_k;
    return (r == kInitial || r == kFinal) && skipped(x, n) ? 0 : x->c.dim_k;
}

static int64_t role_heads(const test_case *c, role r) {
    switch (roles[r].heads) {
        case 'q':
            return c->heads_q;
        case 'k':
            return heads_k(c);
        case 'v':
            return c->heads_v;
        default:
            return case_heads_o(c);
    }
}

/* A vector [HO] is one row of HO elements: its error is that of the whole. */
int64_t instance_heads(const instance *x, role r) {
    return roles[r].kind == kVector ? 1 : role_heads(&x->c, r);
}

int64_t instance_columns(const instance *x, role r) {
    return x->tensor[r].columns;
}

size_t instance_offset(const instance *x, role r, int64_t n, int64_t row, int64_t head, int64_t column) {
    const instance_tensor *t = &x->tensor[r];
    int64_t element = head * t->stride[2] + column * t->stride[3];
    if (roles[r].kind == kTokens && x->c.layout == GDELTA_LAYOUT_THD) {
        element += (x->start[n] + row) * t->stride[1];
    } else if (roles[r].kind == kSeveral) {
        int64_t number = several_first(x, r, n) + row / x->c.dim_k;
        element += several_entry(&x->c, r, number) * t->stride[0] + row % x->c.dim_k * t->stride[1];
    } else {
        element += slot_of(&x->c, r, n) * t->stride[0] + row * t->stride[1];
    }
    return t->offset + (size_t)element * t->bytes;
}

/* Fills the strides of a tensor whose rows have `width` elements, and returns how many elements it spans. With
 * `all_heads`, rows of a token are that far apart. */
static int64_t token_strides(const test_case *c, instance_tensor *t, int64_t heads, int64_t width, int64_t all_heads) {
    enum { kSequence, kRow, kHead };
    static const int orders[][3] = {[GDELTA_LAYOUT_BSHD] = {kSequence, kRow, kHead},
                                    [GDELTA_LAYOUT_SBHD] = {kRow, kSequence, kHead},
                                    [GDELTA_LAYOUT_BHSD] = {kSequence, kHead, kRow},
                                    [GDELTA_LAYOUT_THD] = {kSequence, kRow, kHead}};
    bool packed = c->layout == GDELTA_LAYOUT_THD;
    int64_t extent[3] = {packed ? 1 : c->sequences, packed ? total_rows(c) : c->lengths[0], heads};
    int64_t step = width;
    for (int i = 2; i >= 0; --i) {
        int axis = orders[c->layout][i];
        t->stride[axis] = step + c->gap;
        step = t->stride[axis] * extent[axis];
        if (axis == kHead && all_heads) step = all_heads;
    }
    if (packed) t->stride[0] = 0;
    return step;
}

static int64_t state_strides(const test_case *c, instance_tensor *t, role r) {
    bool vk = c->state_order == GDELTA_STATE_VK, several = roles[r].kind == kSeveral;
    bool pool = several || r == kInitial || r == kFinal;
    t->stride[3] = vk ? c->dim_k : 1;
    t->stride[1] = vk ? 1 : c->dim_v;
    t->stride[2] = (int64_t)c->dim_k * c->dim_v + c->gap;
    t->stride[0] = t->stride[2] * case_heads_o(c) + c->gap + (pool ? c->slot_padding : 0);
    t->default_strides = !c->gap && !(pool && c->slot_padding);
    if (several) return t->stride[0] * (c->several_slots ? several_slots(c, r) : several_numbers(c, r));
    return t->stride[0] * (pool && c->slot_count ? c->slot_count : c->sequences);
}

/* Bytes before and after every tensor. */
static size_t pad_bytes(void) {
    return gpu_missing() ? 1 << 16 : 1 << 20;
}

/* Gives `elements` elements a place in the arena, between pads. */
static void place(instance *x, instance_tensor *t, int64_t elements) {
    size_t pad = pad_bytes();
    t->offset = (x->bytes + pad + 255) / 256 * 256 + (x->c.gap % 2 ? t->bytes : 0);
    x->bytes = t->offset + (size_t)elements * t->bytes;
}

static int64_t table_entries(const test_case *c, role r) {
    switch (r) {
        case kStatus:
            return 1;
        case kCuSeqlens:
            return c->sequences + 1;
        case kParents:
            return c->sequences * c->lengths[0];
        case kTokenSlots:
            return several_numbers(c, kTokenStates);
        case kCheckpointSlots:
            return several_numbers(c, kCheckpoints);
        default:
            return c->sequences;
    }
}

static void place_role(instance *x, role r) {
    const test_case *c = &x->c;
    instance_tensor *t = &x->tensor[r];
    t->dtype = role_dtype(c, r);
    t->bytes = gdelta_dtype_size(t->dtype);
    t->columns = roles[r].dim == 'k' ? c->dim_k : roles[r].dim == 'v' ? c->dim_v : 1;
    t->stride[3] = 1;
    t->default_strides = !c->gap;
    int64_t elements;
    switch (roles[r].kind) {
        case kTable:
            t->bytes = r == kHasInitial ? 1 : c->index64 || r == kStatus ? 8 : 4;
            t->count = table_entries(c, r);
            place(x, t, t->count);
            return;
        case kVector:
            t->columns = case_heads_o(c);
            t->stride[3] = 1 + c->gap;
            elements = t->columns * t->stride[3];
            break;
        case kState:
        case kSeveral:
            elements = state_strides(c, t, r);
            if ((r == kFinal && c->in_place) || (roles[r].kind == kSeveral && c->one_pool)) {
                t->offset = x->tensor[kInitial].offset;
                return;
            }
            break;
        default:
            elements = token_strides(c, t, role_heads(c, r), t->columns, 0);
    }
    place(x, t, elements);
}

/* Gives roles that have places of their own already one tensor together: as column slices, or, where rows have one
 * element, as every other element. */
static void share(instance *x, const role *members, int count) {
    int64_t width = 0, at = 0;
    for (int i = 0; i < count; ++i) width += role_heads(&x->c, members[i]) * x->tensor[members[i]].columns;
    bool every_other = count == 2;
    size_t base = 0;
    for (int i = 0; i < count; ++i) {
        instance_tensor *t = &x->tensor[members[i]];
        if (!t->present) continue;
        int64_t heads = role_heads(&x->c, members[i]);
        int64_t elements = every_other ? token_strides(&x->c, t, heads, count, count * heads)
                                       : token_strides(&x->c, t, heads, t->columns, width);
        t->default_strides = false;
        if (base == 0) {
            place(x, t, elements);
            base = t->offset;
        }
        t->offset = base + (size_t)at * t->bytes;
        at += every_other ? 1 : heads * t->columns;
    }
}

/* ---- Values ---- */

void instance_set_entry(instance *x, role table, int64_t entry, int64_t value) {
    const instance_tensor *t = &x->tensor[table];
    char *at = x->before + t->offset + (size_t)entry * t->bytes;
    int32_t narrow = (int32_t)value;
    if (t->bytes == 8)
        memcpy(at, &value, 8);
    else if (t->bytes == 4)
        memcpy(at, &narrow, 4);
    else
        *at = (char)value;
}

const void *instance_at(const instance *x, role r, int64_t n, int64_t row, int64_t head, int64_t column) {
    return (roles[r].output ? x->after : x->before) + instance_offset(x, r, n, row, head, column);
}

double instance_get(const instance *x, role r, int64_t n, int64_t row, int64_t head, int64_t column) {
    return gdelta_load(instance_at(x, r, n, row, head, column), x->tensor[r].dtype, 0);
}

void instance_put(instance *x, role r, int64_t n, int64_t row, int64_t head, int64_t column, double value) {
    gdelta_store(x->before + instance_offset(x, r, n, row, head, column), x->tensor[r].dtype, 0, value);
}

void instance_put_all(instance *x, role r, double value) {
    FOR_ELEMENTS(x, r, n, row, head, column) instance_put(x, r, n, row, head, column, value);
}

void instance_copy(instance *x, role to, const instance *y, role from) {
    FOR_ELEMENTS(x, to, n, row, head, column)
    instance_put(x, to, n, row, head, column, instance_get(y, from, n, row, head, column));
}

void instance_copy_record(instance *x, const instance *y) {
    for (role r = kRecordK; r <= kRecordDecay; ++r) instance_copy(x, r, y, r);
}

static double softplus(double x) {
    return x > 20 ? x : log1p(exp(x));
}

/* A log gate, and what a fused gate has in its place: a_t, to go with a_log = log of the head's rate. */
static double gate_value(const test_case *c, uint64_t key, double rate) {
    bool fused = c->gate == GDELTA_GATE_SOFTPLUS;
    double u = fill_uniform(key), normal = fill_normal(key), g;
    switch (c->strength) {
        case kGateZero:
            if (fused) return -200;
            g = 0;
            break;
        case kGateMild:
            if (fused) return normal;
            g = -u;
            break;
        case kGateStrong:
            if (fused) return normal;
            g = -rate * softplus(normal);
            break;
        case kGateExtreme:
            if (fused) return 50 * pow(20, u);
            g = -50 * pow(200, u);
            break;
        case kGateResets:
            if (fused) return u < 0.125 ? 1e4 : normal;
            g = u < 0.125 ? -INFINITY : -0.1 * u;
            break;
        default:
            if (fused) return normal;
            g = -0.1 * u;
    }
    return c->gate == GDELTA_GATE_LINEAR ? exp(g) : g;
}

/* Of -rate * softplus(..): 1 .. 16 where the gate is strong, else about what the strength says. */
static double gate_rate(const test_case *c, int64_t head) {
    double u = fill_uniform(fill_key(c->seed, kALog, 0, 0, head, 0));
    if (c->strength == kGateStrong || c->strength == kGateExtreme) return pow(16, u);
    return (c->strength == kGateMild ? 0.5 : 0.05) * (1 + u);
}

static double value_of(const test_case *c, role r, int64_t n, int64_t row, int64_t head, int64_t column) {
    int64_t sequence = n + c->first_sequence;
    if (roles[r].kind == kTokens) row += c->first_token;
    uint64_t key = fill_key(c->seed, r, sequence, row, head, column);
    switch (r) {
        case kG:
            return gate_value(c, key, gate_rate(c, head));
        case kBeta:
            return c->beta == GDELTA_BETA_VALUE ? (c->beta_max > 0 ? c->beta_max : 1) * fill_uniform(key)
                                                : 1.5 * fill_normal(key);
        case kALog:
            return log(gate_rate(c, column));
        case kDtBias:
            return 0.5 * fill_normal(fill_key(c->seed, r, 0, 0, column, 0));
        case kInitial:
            return 0.5 * fill_normal(key);
        case kQ:
        case kK:
            if (c->keys != kKeysCorrelated) return fill_normal(key);
            return 0.9 * fill_normal(fill_key(c->seed, kK, -1, 0, head, column)) + 0.436 * fill_normal(key);
        default:
            return fill_normal(key);
    }
}

/* Keys must be at most about 1 long, or the recurrence grows without bound. */
static void shorten_keys(instance *x) {
    const test_case *c = &x->c;
    if (c->l2norm != GDELTA_L2NORM_NONE) return;
    FOR_ELEMENTS(x, kK, n, row, head, column) {
        if (column > 0) continue;
        double sum = 0;
        for (int64_t d = 0; d < c->dim_k; ++d) sum += pow(value_of(c, kK, n, row, head, d), 2);
        double factor = c->keys == kKeysShort ? 0.7 / sqrt(c->dim_k) : 1 / sqrt(sum);
        for (int64_t d = 0; d < c->dim_k; ++d) {
            instance_put(x, kK, n, row, head, d, factor * value_of(c, kK, n, row, head, d));
        }
    }
}

/* Numbers that no sequence has, which a packed call's checkpoints may leave, get the slot of nobody. */
static void fill_slots(instance *x, role r, role table) {
    if (!x->tensor[table].present) return;
    for (int64_t i = 0; i < x->tensor[table].count; ++i) instance_set_entry(x, table, i, -1);
    for (int n = 0; n < x->c.sequences; ++n) {
        for (int64_t i = 0; i < several_stored(&x->c, r, n); ++i) {
            int64_t number = several_first(x, r, n) + i;
            instance_set_entry(x, table, number, several_entry(&x->c, r, number));
        }
    }
}

static bool is_input(role r) {
    return !roles[r].output && roles[r].kind != kTable;
}

static void fill(instance *x) {
    const test_case *c = &x->c;
    uint16_t poison = c->poison ? c->poison : 0xffff;
    if (poison == 0xffff) {
        memset(x->before, 0xff, x->bytes);
    } else {
        for (size_t i = 0; i < x->bytes; ++i) x->before[i] = (char)(i % 2 ? poison >> 8 : poison);
    }
    for (role r = 0; r < kRoles; ++r) {
        if (!x->tensor[r].present || !is_input(r)) continue;
        FOR_ELEMENTS(x, r, n, row, head, column) {
            if (r == kInitial && c->recycled >> n & 1) continue;
            instance_put(x, r, n, row, head, column, value_of(c, r, n, row, head, column));
        }
    }
    shorten_keys(x);
    for (role r = kDALog; c->accumulate && r <= kDDtBias; ++r) {
        if (!x->tensor[r].present) continue;
        FOR_ELEMENTS(x, r, n, row, head, column)
        instance_put(x, r, n, row, head, column, value_of(c, r, n, row, head, column));
    }

    int64_t end = 0;
    for (int n = 0; n <= c->sequences; ++n) {
        if (x->tensor[kCuSeqlens].present) instance_set_entry(x, kCuSeqlens, n, end);
        if (n == c->sequences) break;
        end += case_length(c, n);
        if (x->tensor[kInitialSlots].present) instance_set_entry(x, kInitialSlots, n, c->initial_slots[n]);
        if (x->tensor[kFinalSlots].present) instance_set_entry(x, kFinalSlots, n, c->final_slots[n]);
        if (x->tensor[kAccepted].present) instance_set_entry(x, kAccepted, n, c->accepted[n]);
        for (int64_t t = 0; x->tensor[kParents].present && t < c->lengths[0]; ++t) {
            instance_set_entry(x, kParents, n * c->lengths[0] + t, case_parent(c, n, t));
        }
        if (x->tensor[kHasInitial].present) instance_set_entry(x, kHasInitial, n, !(c->recycled >> n & 1));
    }
    if (x->tensor[kStatus].present) instance_set_entry(x, kStatus, 0, 0);
    fill_slots(x, kTokenStates, kTokenSlots);
    fill_slots(x, kCheckpoints, kCheckpointSlots);
}

void instance_create(instance *x, const test_case *c) {
    bool shares = c->fused || c->interleaved;
    assert(!shares || (c->gap == 0 && c->layout != GDELTA_LAYOUT_BHSD));
    assert(!c->interleaved || c->gate_dtype == c->beta_dtype);
    memset(x, 0, sizeof *x);
    x->c = *c;
    for (int n = 1; n < c->sequences; ++n) x->start[n] = x->start[n - 1] + case_length(c, n - 1);
    role_set set = case_roles(c);
    for (role r = 0; r < kRoles; ++r) x->tensor[r].present = set >> r & 1;
    for (role r = 0; r < kRoles; ++r) {
        if (x->tensor[r].present) place_role(x, r);
    }
    if (c->fused) share(x, (const role[]){kQ, kK, kV}, 3);
    if (c->fused) share(x, (const role[]){kDQ, kDK, kDV}, 3);
    if (c->interleaved) share(x, (const role[]){kG, kBeta}, 2);
    if (c->interleaved) share(x, (const role[]){kDG, kDBeta}, 2);
    place(x, &(instance_tensor){.bytes = 1}, 0); /* the pad after the last */
    x->before = malloc(x->bytes);
    x->after = malloc(x->bytes);
    fill(x);
    memcpy(x->after, x->before, x->bytes);
}

void instance_destroy(instance *x) {
    free(x->before);
    free(x->after);
    memset(x, 0, sizeof *x);
}

void instance_create_plain(instance *plain, const instance *x) {
    test_case c = x->c;
    if (c.layout != GDELTA_LAYOUT_THD) c.layout = GDELTA_LAYOUT_BSHD;
    c.out_dtype = c.final_dtype = GDELTA_DTYPE_FP64;
    c.state_order = GDELTA_STATE_KV;
    c.save_mode = GDELTA_SAVE_COMPACT;
    c.gap = 0;
    c.fused = c.interleaved = c.in_place = c.host_tables = c.one_pool = false;
    c.slot_padding = 0;
    c.index64 = true;
    instance_create(plain, &c);
    for (role r = 0; r < kRoles; ++r) {
        if (plain->tensor[r].present && is_input(r)) instance_copy(plain, r, x, r);
    }
}

/* ---- Calls ---- */

const test_engine test_engines[kEngines] = {
    [kReference] = {"reference", GDELTA_ENGINE_AUTO, false, 0, GDELTA_DTYPE_FP64, 1},
    [kRecurrent] = {"recurrent", GDELTA_ENGINE_RECURRENT, true, 0, GDELTA_DTYPE_FP32, 1},
    [kHopper] = {"hopper", GDELTA_ENGINE_HOPPER, true, 90, GDELTA_DTYPE_FP32, 64},
};

/* A sequence that forward skips for its final slot alone leaves no states for backward. */
static bool lacks_saved_states(const test_case *c) {
    role_set set = case_roles(c);
    bool lacks = false;
    for (int n = 0; n < c->sequences && set & ROLE(kFinalSlots) && !(set & ROLE(kInitialSlots)); ++n) {
        lacks = lacks || c->final_slots[n] == -1;
    }
    return lacks && c->save_mode == GDELTA_SAVE_STATES;
}

bool engine_runs(const test_engine *engine, const test_case *c, gdelta_operation operation) {
    if (operation == GDELTA_OPERATION_BACKWARD && engine->on_gpu && lacks_saved_states(c)) return false;
    if (engine->engine != GDELTA_ENGINE_HOPPER) return true;
    bool dims = (c->dim_k == 64 || c->dim_k == 128) && (c->dim_v == 64 || c->dim_v == 128);
    bool aligned = c->gap % 8 == 0; /* rows are multiples of 64 elements, so gaps alone move them */
    bool forward = operation == GDELTA_OPERATION_FORWARD, linear = c->gate == GDELTA_GATE_LINEAR;
    bool backward = operation == GDELTA_OPERATION_BACKWARD && !(linear && case_roles(c) & ROLE(kDG)) &&
                    (c->dtype != GDELTA_DTYPE_FP16 || c->fp16_backward);
    return (forward || backward) && c->dtype != GDELTA_DTYPE_FP32 && dims && aligned;
}

int engine_segments(const test_engine *engine, const test_case *c, gdelta_operation operation) {
    gdelta_problem problem = case_problem(c);
    problem.engine = engine->engine;
    gdelta_plan *plan;
    if (gdelta_plan_create(&problem, &plan) != GDELTA_OK) return 0;
    char line[512];
    gdelta_plan_describe(plan, line, sizeof line);
    gdelta_plan_destroy(plan);
    const char *words = ", segments ",
               *from = operation == GDELTA_OPERATION_BACKWARD ? strstr(line, "(hopper: ") : line;
    const char *segments = from ? strstr(from, words) : NULL;
    return segments ? atoi(segments + strlen(words)) : 1;
}

role_set instance_outputs(const instance *x, gdelta_operation operation) {
    role_set set = 0;
    switch (operation) {
        case GDELTA_OPERATION_FORWARD:
            set = ROLE(kO) | ROLE(kFinal) | ROLE(kCheckpoints);
            break;
        case GDELTA_OPERATION_BACKWARD:
            set = ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta) | ROLE(kDALog) | ROLE(kDDtBias) |
                  ROLE(kDInitial);
            if (x->c.save_mode == GDELTA_SAVE_STATES) set |= ROLE(kO) | ROLE(kCheckpoints);
            if (x->c.save_mode == GDELTA_SAVE_STATES && !x->c.in_place) set |= ROLE(kFinal);
            break;
        case GDELTA_OPERATION_STEP:
            set = ROLE(kO) | (x->c.keep_state ? 0 : ROLE(kFinal)) | ROLE(kTokenStates) | RECORD_ROLES;
            break;
        default:
            set = ROLE(kFinal);
    }
    return set & case_roles(&x->c);
}

static void *at(const instance *x, role r, char *arena) {
    return x->tensor[r].present ? arena + x->tensor[r].offset : NULL;
}

static gdelta_tensor tensor(const instance *x, role r, char *arena) {
    const instance_tensor *t = &x->tensor[r];
    gdelta_tensor tensor = {.data = at(x, r, arena)};
    if (!t->present) return tensor;
    if (t->dtype != default_dtype(&x->c, r)) tensor.dtype = t->dtype;
    if (t->default_strides) return tensor;
    bool state = roles[r].kind == kState || roles[r].kind == kSeveral, vector = roles[r].kind == kVector;
    tensor.stride[0] = vector ? 0 : t->stride[0];
    tensor.stride[1] = vector ? 0 : t->stride[1];
    tensor.stride[2] = vector ? t->stride[3] : t->stride[2];
    tensor.stride[3] = 1;
    if (state) {
        tensor.stride[1] = t->stride[2];
        tensor.stride[2] = x->c.state_order == GDELTA_STATE_VK ? x->c.dim_k : x->c.dim_v;
    }
    return tensor;
}

static gdelta_index index_table(const instance *x, role r, char *arena) {
    gdelta_index index = {.data = at(x, r, arena)};
    if (index.data && x->c.host_tables) index.host = at(x, r, x->before);
    if (index.data && x->c.index64) index.dtype = GDELTA_DTYPE_INT64;
    return index;
}

static gdelta_state state(const instance *x, role r, char *arena) {
    gdelta_tensor t = tensor(x, r, arena);
    gdelta_state state = {.data = t.data, .dtype = t.dtype};
    memcpy(state.stride, t.stride, sizeof state.stride);
    static const role slots[kRoles] = {[kInitial] = kInitialSlots,
                                       [kFinal] = kFinalSlots,
                                       [kTokenStates] = kTokenSlots,
                                       [kCheckpoints] = kCheckpointSlots};
    state.slots = index_table(x, slots[r], arena);
    if (state.slots.data) state.slot_count = roles[r].kind == kSeveral ? several_slots(&x->c, r) : x->c.slot_count;
    return state;
}

/* The fields that the three structs share by name. */
#define INPUTS(x, arena)                                                                                        \
    .q = tensor(x, kQ, arena), .k = tensor(x, kK, arena), .v = tensor(x, kV, arena), .g = tensor(x, kG, arena), \
    .beta = tensor(x, kBeta, arena), .a_log = tensor(x, kALog, arena), .dt_bias = tensor(x, kDtBias, arena),    \
    .has_initial_state = at(x, kHasInitial, arena), .device_status = at(x, kStatus, arena)

gdelta_forward_args instance_forward_args(const instance *x, char *arena) {
    return (gdelta_forward_args){
        .struct_size = sizeof(gdelta_forward_args),
        INPUTS(x, arena),
        .o = tensor(x, kO, arena),
        .initial_state = state(x, kInitial, arena),
        .final_state = state(x, kFinal, arena),
        .cu_seqlens = index_table(x, kCuSeqlens, arena),
        .checkpoints = state(x, kCheckpoints, arena),
        .checkpoint_interval = x->c.checkpoint_interval,
    };
}

gdelta_backward_args instance_backward_args(const instance *x, char *arena) {
    bool parameters = x->tensor[kDALog].present || x->tensor[kDDtBias].present;
    return (gdelta_backward_args){
        .struct_size = sizeof(gdelta_backward_args),
        .flags = x->c.accumulate && parameters ? GDELTA_BACKWARD_ACCUMULATE_PARAMETERS : 0,
        INPUTS(x, arena),
        .initial_state = state(x, kInitial, arena),
        .cu_seqlens = index_table(x, kCuSeqlens, arena),
        .d_o = tensor(x, kDO, arena),
        .d_final_state = tensor(x, kDFinal, arena),
        .dq = tensor(x, kDQ, arena),
        .dk = tensor(x, kDK, arena),
        .dv = tensor(x, kDV, arena),
        .dg = tensor(x, kDG, arena),
        .dbeta = tensor(x, kDBeta, arena),
        .da_log = tensor(x, kDALog, arena),
        .ddt_bias = tensor(x, kDDtBias, arena),
        .d_initial_state = tensor(x, kDInitial, arena),
    };
}

static gdelta_record record(const instance *x, char *arena) {
    return (gdelta_record){
        .k = tensor(x, kRecordK, arena), .u = tensor(x, kRecordU, arena), .decay = tensor(x, kRecordDecay, arena)};
}

/* The final states, if they are not in the place of the initial ones. */
static gdelta_state output_state(const instance *x, char *arena) {
    bool same_entries = memcmp(x->c.initial_slots, x->c.final_slots, sizeof x->c.final_slots) == 0;
    return x->c.in_place && same_entries ? (gdelta_state){.data = NULL} : state(x, kFinal, arena);
}

gdelta_step_args instance_step_args(const instance *x, char *arena) {
    return (gdelta_step_args){
        .struct_size = sizeof(gdelta_step_args),
        .flags = x->c.keep_state ? GDELTA_STEP_KEEP_STATE : 0,
        INPUTS(x, arena),
        .o = tensor(x, kO, arena),
        .state = state(x, kInitial, arena),
        .output_state = x->c.keep_state ? (gdelta_state){.data = NULL} : output_state(x, arena),
        .token_states = state(x, kTokenStates, arena),
        .record = record(x, arena),
        .parents = index_table(x, kParents, arena),
    };
}

gdelta_commit_args instance_commit_args(const instance *x, char *arena) {
    return (gdelta_commit_args){
        .struct_size = sizeof(gdelta_commit_args),
        .record = record(x, arena),
        .accepted = index_table(x, kAccepted, arena),
        .parents = index_table(x, kParents, arena),
        .state = state(x, kInitial, arena),
        .output_state = output_state(x, arena),
        .has_initial_state = at(x, kHasInitial, arena),
        .device_status = at(x, kStatus, arena),
    };
}

static gdelta_status run_reference(const instance *x, gdelta_operation operation) {
    gdelta_problem problem = case_problem(&x->c);
    if (operation == GDELTA_OPERATION_FORWARD) {
        gdelta_forward_args args = instance_forward_args(x, x->after);
        return gdelta_reference_forward(&problem, &args);
    }
    if (operation == GDELTA_OPERATION_BACKWARD) {
        gdelta_backward_args args = instance_backward_args(x, x->after);
        return gdelta_reference_backward(&problem, &args);
    }
    if (operation == GDELTA_OPERATION_COMMIT) {
        gdelta_commit_args args = instance_commit_args(x, x->after);
        return gdelta_reference_commit(&problem, &args);
    }
    gdelta_step_args args = instance_step_args(x, x->after);
    return gdelta_reference_step(&problem, &args);
}

static bool complain(const instance *x, const char *what) {
    fprintf(stderr, "%s\n  case: %s\n", what, case_line(&x->c));
    return false;
}

static bool succeeded(const instance *x, gdelta_status status) {
    if (status == GDELTA_OK) return true;
    fprintf(stderr, "%s: %s\n", gdelta_status_string(status), gdelta_last_error());
    return complain(x, "a call failed that should not");
}

static gpu_buffer scratch(const gdelta_plan *plan, gdelta_operation operation, size_t pad) {
    size_t bytes = 0;
    gdelta_plan_workspace_size(plan, operation, &bytes);
    return gpu_buffer_create(bytes, pad);
}

bool device_create(device_instance *d, const instance *x, const test_engine *engine, gdelta_operation operation) {
    memset(d, 0, sizeof *d);
    d->operation = operation;
    gdelta_problem problem = case_problem(&x->c);
    if (problem.engine == GDELTA_ENGINE_AUTO) problem.engine = engine->engine;
    if (!succeeded(x, gdelta_plan_create(&problem, &d->plan))) return false;
    size_t pad = pad_bytes(), saved = 0;
    d->arena = gpu_buffer_create(x->bytes, 0);
    d->workspace = scratch(d->plan, operation, pad);
    gdelta_plan_saved_size(d->plan, &saved);
    if (operation == GDELTA_OPERATION_BACKWARD && x->c.save_mode == GDELTA_SAVE_STATES) {
        d->saved = gpu_buffer_create(saved, pad);
        d->forward_workspace = scratch(d->plan, GDELTA_OPERATION_FORWARD, pad);
    }
    return true;
}

void device_destroy(device_instance *d) {
    gpu_buffer_destroy(&d->arena);
    gpu_buffer_destroy(&d->workspace);
    gpu_buffer_destroy(&d->saved);
    gpu_buffer_destroy(&d->forward_workspace);
    gdelta_plan_destroy(d->plan);
}

void device_upload(device_instance *d, const instance *x) {
    gpu_upload(d->arena.data, x->before, x->bytes);
}

static gdelta_status enqueue_backward(device_instance *d, const instance *x, gdelta_stream stream) {
    gdelta_backward_args args = instance_backward_args(x, d->arena.data);
    if (d->saved.data) {
        gdelta_forward_args forward = instance_forward_args(x, d->arena.data);
        args.saved = forward.saved = d->saved.data;
        args.saved_bytes = forward.saved_bytes = d->saved.bytes;
        if (x->c.in_place) forward.final_state = (gdelta_state){.data = NULL};
        gdelta_status status =
            gdelta_forward(d->plan, &forward, d->forward_workspace.data, d->forward_workspace.bytes, stream);
        if (status != GDELTA_OK) return status;
    }
    return gdelta_backward(d->plan, &args, d->workspace.data, d->workspace.bytes, stream);
}

gdelta_status device_enqueue(device_instance *d, const instance *x, gdelta_stream stream) {
    if (d->operation == GDELTA_OPERATION_BACKWARD) return enqueue_backward(d, x, stream);
    if (d->operation == GDELTA_OPERATION_STEP) {
        gdelta_step_args args = instance_step_args(x, d->arena.data);
        return gdelta_step(d->plan, &args, d->workspace.data, d->workspace.bytes, stream);
    }
    if (d->operation == GDELTA_OPERATION_COMMIT) {
        gdelta_commit_args args = instance_commit_args(x, d->arena.data);
        return gdelta_commit(d->plan, &args, d->workspace.data, d->workspace.bytes, stream);
    }
    gdelta_forward_args args = instance_forward_args(x, d->arena.data);
    return gdelta_forward(d->plan, &args, d->workspace.data, d->workspace.bytes, stream);
}

bool device_download(device_instance *d, instance *x) {
    gpu_download(x->after, d->arena.data, x->bytes);
    bool intact = gpu_buffer_intact(&d->workspace, "workspace");
    if (d->saved.data) {
        intact = gpu_buffer_intact(&d->saved, "saved") && intact;
        intact = gpu_buffer_intact(&d->forward_workspace, "the forward's workspace") && intact;
    }
    return intact || complain(x, "a pad was overwritten");
}

bool instance_untouched(const instance *x, role_set outputs) {
    char *rest = malloc(x->bytes);
    memcpy(rest, x->after, x->bytes);
    for (role r = 0; r < kRoles; ++r) {
        if (!(outputs & ROLE(r))) continue;
        FOR_ELEMENTS(x, r, n, row, head, column) {
            size_t offset = instance_offset(x, r, n, row, head, column);
            memcpy(rest + offset, x->before + offset, x->tensor[r].bytes);
        }
    }
    size_t i = memcmp(rest, x->before, x->bytes) == 0 ? x->bytes : 0;
    while (i < x->bytes && rest[i] == x->before[i]) ++i;
    free(rest);
    if (i == x->bytes) return true;
    role nearest = kQ;
    for (role r = 0; r < kRoles; ++r) {
        bool before = x->tensor[r].present && x->tensor[r].offset <= i;
        if (before && x->tensor[r].offset >= x->tensor[nearest].offset) nearest = r;
    }
    fprintf(stderr, "byte %zu of the arena was overwritten, %zu after the start of %s\n", i,
            i - x->tensor[nearest].offset, roles[nearest].name);
    return complain(x, "a call wrote what it must not");
}

static bool run_on_gpu(instance *x, const test_engine *engine, gdelta_operation operation) {
    device_instance d;
    if (!device_create(&d, x, engine, operation)) return false;
    gdelta_stream stream = gpu_stream_create();
    char *first = malloc(x->bytes);
    bool good = true;
    for (int run = 0; run < 2 && good; ++run) {
        device_upload(&d, x);
        good = succeeded(x, device_enqueue(&d, x, stream));
        gpu_stream_finish(stream);
        good = device_download(&d, x) && good;
        if (run == 0) memcpy(first, x->after, x->bytes);
    }
    if (good && memcmp(first, x->after, x->bytes) != 0) good = complain(x, "the same call gave different bits");
    free(first);
    gpu_stream_destroy(stream);
    device_destroy(&d);
    return good;
}

bool instance_run(instance *x, const test_engine *engine, gdelta_operation operation) {
    bool good;
    if (engine->on_gpu) {
        good = run_on_gpu(x, engine, operation);
    } else {
        memcpy(x->after, x->before, x->bytes);
        good = succeeded(x, run_reference(x, operation));
    }
    return good && instance_untouched(x, instance_outputs(x, operation));
}
