/* The checks stand in the order of the header's fields. Sentences read "<field> is <value>; <rule>". */
#include "host/validate.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "host/layout.h"
#include "host/status.h"

#define REQUIRE(condition, ...)                                                           \
    do {                                                                                  \
        if (!(condition)) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
    } while (0)

#define TRY(call)                                 \
    do {                                          \
        gdelta_status status_ = (call);           \
        if (status_ != GDELTA_OK) return status_; \
    } while (0)

enum { kMaxHeads = 1 << 20, kMaxDim = 1 << 20, kMaxStepTokens = 16, kCheckpointUnit = 64 };

/* Sets of dtypes. */
#define BIT(dtype) (1u << (dtype))
#define HALVES_AND_FP32 (BIT(GDELTA_DTYPE_BF16) | BIT(GDELTA_DTYPE_FP16) | BIT(GDELTA_DTYPE_FP32))

/* ---- Problem ---- */

static gdelta_status check_enum(const char *name, int32_t value, int32_t last) {
    REQUIRE(value >= 0 && value <= last, "%s is %" PRId32 "; it must be 0 to %" PRId32, name, value, last);
    return GDELTA_OK;
}

static gdelta_status check_problem_dtype(const char *name, gdelta_dtype dtype, gdelta_place place) {
    if (dtype == GDELTA_DTYPE_DEFAULT || (dtype > 0 && dtype < 32 && (HALVES_AND_FP32 & BIT(dtype)))) return GDELTA_OK;
    REQUIRE(dtype == GDELTA_DTYPE_FP64, "%s is %" PRId32 " (%s); it must be bf16, fp16 or fp32", name, dtype,
            gdelta_dtype_name(dtype));
    if (place == GDELTA_PLACE_HOST) return GDELTA_OK;
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED, "%s is fp64; only the CPU reference takes fp64", name);
}

static gdelta_dtype or_default(gdelta_dtype dtype, gdelta_dtype otherwise) {
    return dtype == GDELTA_DTYPE_DEFAULT ? otherwise : dtype;
}

static gdelta_status check_sizes(const gdelta_problem *p, gdelta_shape *shape) {
    if (p->layout == GDELTA_LAYOUT_THD) {
        REQUIRE(p->batch == 0, "batch is %" PRId64 "; with THD it must be 0, the count goes into sequences", p->batch);
        REQUIRE(p->sequences >= 1 && p->sequences < INT32_MAX,
                "sequences is %" PRId64 "; with THD it must be at least 1 and less than 2^31 - 1", p->sequences);
        REQUIRE(p->total_tokens >= 0, "total_tokens is %" PRId64 "; it must not be negative", p->total_tokens);
        REQUIRE(p->tokens >= 0 && p->tokens <= p->total_tokens,
                "tokens is %" PRId64 "; with THD it is the longest sequence, 0 (not known) to total_tokens (%" PRId64
                ")",
                p->tokens, p->total_tokens);
        shape->packed = 1;
        shape->sequences = p->sequences;
        shape->tokens = p->tokens ? p->tokens : p->total_tokens;
        shape->rows = p->total_tokens;
    } else {
        REQUIRE(p->batch >= 1 && p->batch < INT32_MAX,
                "batch is %" PRId64 "; it must be at least 1 and less than 2^31 - 1", p->batch);
        REQUIRE(p->tokens >= 0, "tokens is %" PRId64 "; it must not be negative", p->tokens);
        REQUIRE(p->sequences == 0, "sequences is %" PRId64 "; it is for THD only, else it must be 0", p->sequences);
        REQUIRE(p->total_tokens == 0, "total_tokens is %" PRId64 "; it is for THD only, else it must be 0",
                p->total_tokens);
        shape->packed = 0;
        shape->sequences = p->batch;
        shape->tokens = p->tokens;
        REQUIRE(!__builtin_mul_overflow(p->batch, p->tokens, &shape->rows),
                "batch (%" PRId64 ") times tokens (%" PRId64 ") passes 2^63", p->batch, p->tokens);
    }

    const struct {
        const char *name;
        int32_t value, most;
    } counts[] = {{"heads_q", p->heads_q, kMaxHeads},
                  {"heads_k", p->heads_k, kMaxHeads},
                  {"heads_v", p->heads_v, kMaxHeads},
                  {"dim_k", p->dim_k, kMaxDim},
                  {"dim_v", p->dim_v, kMaxDim}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
        REQUIRE(counts[i].value >= 1 && counts[i].value <= counts[i].most,
                "%s is %" PRId32 "; it must be 1 to %" PRId32, counts[i].name, counts[i].value, counts[i].most);
    }
    bool grouped_values = p->heads_q == p->heads_k && p->heads_v % p->heads_q == 0;
    bool grouped_queries = p->heads_k == p->heads_v && p->heads_q % p->heads_k == 0;
    REQUIRE(grouped_values || grouped_queries,
            "heads_q, heads_k, heads_v are %" PRId32 ", %" PRId32 ", %" PRId32
            "; either heads_q = heads_k divides heads_v, or heads_k = heads_v divides heads_q",
            p->heads_q, p->heads_k, p->heads_v);
    shape->heads_q = p->heads_q;
    shape->heads_k = p->heads_k;
    shape->heads_v = p->heads_v;
    shape->heads_o = p->heads_q > p->heads_v ? p->heads_q : p->heads_v;
    shape->dim_k = p->dim_k;
    shape->dim_v = p->dim_v;

    int64_t elements, states;
    int32_t widest = p->dim_k > p->dim_v ? p->dim_k : p->dim_v;
    bool fits = !__builtin_mul_overflow(shape->rows, (int64_t)shape->heads_o * widest, &elements) &&
                elements < INT64_MAX / 1024;
    fits = fits && !__builtin_mul_overflow(shape->sequences * shape->heads_o, (int64_t)p->dim_k * p->dim_v, &states) &&
           states < INT64_MAX / 1024;
    REQUIRE(fits,
            "%" PRId64 " token rows and %" PRId64 " sequences of %" PRId32 " heads of %" PRId32 " x %" PRId32
            " elements pass 2^63 bytes",
            shape->rows, shape->sequences, shape->heads_o, p->dim_k, p->dim_v);
    return GDELTA_OK;
}

gdelta_status gdelta_validate_problem(const gdelta_problem *p, gdelta_place place, gdelta_shape *shape) {
    REQUIRE(p != NULL, "problem is NULL");
    REQUIRE(p->struct_size == sizeof *p,
            "problem.struct_size is %" PRIu32 "; this library's gdelta_problem has %zu bytes", p->struct_size,
            sizeof *p);
    REQUIRE((p->flags & ~(uint32_t)(GDELTA_FLAG_BATCH_INVARIANT | GDELTA_FLAG_SMALL_WORKSPACE)) == 0,
            "problem.flags is 0x%" PRIx32
            "; only GDELTA_FLAG_BATCH_INVARIANT and GDELTA_FLAG_SMALL_WORKSPACE are known",
            p->flags);
    for (size_t i = 0; i < sizeof p->reserved / sizeof *p->reserved; ++i) {
        REQUIRE(p->reserved[i] == 0, "problem.reserved[%zu] is %" PRId32 "; it must be 0", i, p->reserved[i]);
    }
    TRY(check_enum("layout", p->layout, GDELTA_LAYOUT_THD));
    TRY(check_enum("engine", p->engine, GDELTA_ENGINE_HOPPER));
    memset(shape, 0, sizeof *shape);
    TRY(check_sizes(p, shape));
    TRY(check_problem_dtype("dtype", p->dtype, place));
    TRY(check_problem_dtype("gate_dtype", p->gate_dtype, place));
    TRY(check_problem_dtype("beta_dtype", p->beta_dtype, place));
    TRY(check_problem_dtype("state_dtype", p->state_dtype, place));

    REQUIRE(p->has_scale == 0 || p->has_scale == 1, "has_scale is %" PRId32 "; it must be 0 or 1", p->has_scale);
    REQUIRE(isfinite(p->scale), "scale is %g; it must be finite", p->scale);
    REQUIRE(p->has_scale || p->scale == 0, "scale is %g but has_scale is 0; set has_scale to 1 to use it", p->scale);
    shape->scale = p->has_scale ? p->scale : 1 / sqrt((double)p->dim_k);

    TRY(check_enum("l2norm", p->l2norm, GDELTA_L2NORM_MAX_EPS));
    REQUIRE(isfinite(p->l2norm_eps) && p->l2norm_eps >= 0, "l2norm_eps is %g; it must be finite and not negative",
            p->l2norm_eps);
    REQUIRE(p->l2norm != GDELTA_L2NORM_NONE || p->l2norm_eps == 0,
            "l2norm_eps is %g but l2norm is NONE; without a norm it must be 0", p->l2norm_eps);
    shape->l2norm = p->l2norm;
    shape->l2norm_eps = p->l2norm_eps > 0 ? p->l2norm_eps : 1e-6;

    TRY(check_enum("gate", p->gate, GDELTA_GATE_SOFTPLUS));
    TRY(check_enum("beta", p->beta, GDELTA_BETA_TWO_SIGMOID));
    TRY(check_enum("head_map", p->head_map, GDELTA_HEADS_TILED));
    TRY(check_enum("state_order", p->state_order, GDELTA_STATE_VK));
    TRY(check_enum("save_mode", p->save_mode, GDELTA_SAVE_STATES));
    shape->gate = p->gate;
    shape->beta = p->beta;
    shape->head_map = p->head_map;

    REQUIRE(p->compute_capability >= 0 && p->compute_capability < 1000,
            "compute_capability is %" PRId32 "; it is 10 * major + minor, or 0", p->compute_capability);
    REQUIRE(p->multiprocessors >= 0 && p->multiprocessors <= 65536,
            "multiprocessors is %" PRId32 "; it must be 0 to 65536", p->multiprocessors);
    return GDELTA_OK;
}

/* ---- Tensors, tables and states of a call ---- */

/* One call being checked. Remembers every pointer, to refuse an output that is also something else. */
typedef struct checker {
    const gdelta_problem *problem;
    const gdelta_shape *shape;
    gdelta_place place;
    struct {
        const char *name;
        const void *data;
        bool output;
    } seen[32];
    int count;
} checker;

enum { kInput = 0, kOutput = 1, kRequired = 2 };

static gdelta_status remember(checker *c, const char *name, const void *data, bool output) {
    for (int i = 0; i < c->count; ++i) {
        REQUIRE(c->seen[i].data != data || !(output || c->seen[i].output),
                "%s.data is %p, which is also %s.data; an output must have memory of its own", name, data,
                c->seen[i].name);
    }
    c->seen[c->count].name = name;
    c->seen[c->count].data = data;
    c->seen[c->count].output = output;
    ++c->count;
    return GDELTA_OK;
}

static gdelta_status check_pointer(const char *name, const void *data, gdelta_dtype dtype) {
    REQUIRE((uintptr_t)data % gdelta_dtype_size(dtype) == 0, "%s.data is %p; it must be aligned to its %s elements",
            name, data, gdelta_dtype_name(dtype));
    return GDELTA_OK;
}

static gdelta_status check_dtype(const checker *c, const char *name, gdelta_dtype dtype, unsigned allowed) {
    if (c->place == GDELTA_PLACE_HOST) allowed |= BIT(GDELTA_DTYPE_FP64);
    if (dtype > 0 && dtype < 32 && (allowed & BIT(dtype))) return GDELTA_OK;
    char list[64] = "";
    for (gdelta_dtype d = GDELTA_DTYPE_BF16; d <= GDELTA_DTYPE_FP64; ++d) {
        if (!(allowed & BIT(d))) continue;
        if (*list) strcat(list, " or ");
        strcat(list, gdelta_dtype_name(d));
    }
    return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "%s.dtype is %" PRId32 " (%s); here it must be %s", name, dtype,
                       gdelta_dtype_name(dtype), list);
}

static gdelta_status check_strides(const char *name, const int64_t extent[4], const int64_t stride[4], bool output) {
    REQUIRE(stride[3] == 1 || (extent[3] == 1 && stride[3] == 0),
            "%s.stride[3] is %" PRId64 "; the innermost stride must be 1", name, stride[3]);
    for (int axis = 0; axis < 3; ++axis) {
        REQUIRE(stride[axis] > 0 || (stride[axis] == 0 && extent[axis] <= 1),
                "%s.stride[%d] is %" PRId64 "; an axis of %" PRId64 " elements needs a positive stride", name, axis,
                stride[axis], extent[axis]);
    }
    int64_t span;
    REQUIRE(gdelta_layout_span(extent, stride, &span),
            "%s.stride is [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]; the tensor passes 2^63 bytes", name,
            stride[0], stride[1], stride[2], stride[3]);
    REQUIRE(!output || gdelta_layout_distinct(extent, stride),
            "%s.stride is [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
            "]; elements of an output must not share addresses",
            name, stride[0], stride[1], stride[2], stride[3]);
    return GDELTA_OK;
}

static bool all_zero(const int64_t stride[4]) {
    return stride[0] == 0 && stride[1] == 0 && stride[2] == 0 && stride[3] == 0;
}

static gdelta_status check_extents(checker *c, const char *name, const gdelta_tensor *t, const int64_t extent[4],
                                   gdelta_dtype default_dtype, unsigned dtypes, int role, gdelta_view *view) {
    memset(view, 0, sizeof *view);
    REQUIRE(t->reserved == 0, "%s.reserved is %" PRId32 "; it must be 0", name, t->reserved);
    view->dtype = or_default(t->dtype, default_dtype);
    if (t->data == NULL) {
        REQUIRE(!(role & kRequired) || extent[0] * extent[1] == 0, "%s.data is NULL; this tensor is needed", name);
        return GDELTA_OK;
    }
    TRY(check_dtype(c, name, view->dtype, dtypes));
    TRY(check_pointer(name, t->data, view->dtype));
    int64_t stride[4];
    if (all_zero(t->stride)) {
        gdelta_layout_strides(c->problem->layout, extent, stride);
    } else {
        memcpy(stride, t->stride, sizeof stride);
        REQUIRE(!c->shape->packed || stride[0] == 0, "%s.stride[0] is %" PRId64 "; with THD the batch stride must be 0",
                name, stride[0]);
        TRY(check_strides(name, extent, stride, role & kOutput));
    }
    view->data = t->data;
    view->batch = stride[0];
    view->token = stride[1];
    view->head = stride[2];
    return remember(c, name, t->data, role & kOutput);
}

/* A token tensor [B, T, heads, dim]; dim 1 has no innermost axis. */
static gdelta_status check_tensor(checker *c, const char *name, const gdelta_tensor *t, int32_t heads, int32_t dim,
                                  gdelta_dtype default_dtype, unsigned dtypes, int role, gdelta_view *view) {
    const gdelta_shape *shape = c->shape;
    int64_t extent[4] = {shape->packed ? 1 : shape->sequences, shape->packed ? shape->rows : shape->tokens, heads, dim};
    return check_extents(c, name, t, extent, default_dtype, dtypes, role, view);
}

/* A vector [HO] of the gate's parameters. */
static gdelta_status check_vector(checker *c, const char *name, const gdelta_tensor *t, unsigned dtypes, int role,
                                  gdelta_view *view) {
    int64_t extent[4] = {1, 1, c->shape->heads_o, 1};
    return check_extents(c, name, t, extent, GDELTA_DTYPE_FP32, dtypes, role, view);
}

static int64_t entry(const void *table, bool is_int64, int64_t i) {
    return is_int64 ? ((const int64_t *)table)[i] : ((const int32_t *)table)[i];
}

static gdelta_status check_index(const char *name, const gdelta_index *index, gdelta_table *table) {
    gdelta_dtype dtype = or_default(index->dtype, GDELTA_DTYPE_INT32);
    REQUIRE(index->reserved == 0, "%s.reserved is %" PRId32 "; it must be 0", name, index->reserved);
    REQUIRE(index->data != NULL || index->host == NULL, "%s.host is given but %s.data is NULL", name, name);
    REQUIRE(dtype == GDELTA_DTYPE_INT32 || dtype == GDELTA_DTYPE_INT64,
            "%s.dtype is %" PRId32 " (%s); it must be int32 or int64", name, dtype, gdelta_dtype_name(dtype));
    TRY(check_pointer(name, index->data, dtype));
    REQUIRE((uintptr_t)index->host % gdelta_dtype_size(dtype) == 0,
            "%s.host is %p; it must be aligned to its %s entries", name, index->host, gdelta_dtype_name(dtype));
    table->data = index->data;
    table->is_int64 = dtype == GDELTA_DTYPE_INT64;
    return GDELTA_OK;
}

/* The table as the host may read it: its host copy, or the table itself if that is on the host; else NULL. */
static const void *readable(const checker *c, const gdelta_index *index) {
    return c->place == GDELTA_PLACE_HOST ? index->data : index->host;
}

static gdelta_status check_cu_seqlens(const checker *c, const gdelta_index *index, gdelta_table *table) {
    const gdelta_shape *shape = c->shape;
    TRY(check_index("cu_seqlens", index, table));
    if (!shape->packed) {
        REQUIRE(index->data == NULL, "cu_seqlens.data is %p; only THD takes cu_seqlens", index->data);
        return GDELTA_OK;
    }
    REQUIRE(index->data != NULL, "cu_seqlens.data is NULL; THD needs cu_seqlens");
    const void *host = readable(c, index);
    if (host == NULL) return GDELTA_OK;
    int64_t before = entry(host, table->is_int64, 0);
    REQUIRE(before == 0, "cu_seqlens[0] is %" PRId64 "; it must be 0", before);
    for (int64_t i = 1; i <= shape->sequences; ++i) {
        int64_t here = entry(host, table->is_int64, i);
        REQUIRE(here >= before,
                "cu_seqlens[%" PRId64 "] is %" PRId64 "; it must not be less than the entry before it (%" PRId64 ")", i,
                here, before);
        REQUIRE(here <= shape->rows,
                "cu_seqlens[%" PRId64 "] is %" PRId64 "; it must be at most total_tokens (%" PRId64 ")", i, here,
                shape->rows);
        REQUIRE(here - before <= shape->tokens,
                "cu_seqlens[%" PRId64 "] is %" PRId64 "; it ends a sequence of %" PRId64
                " tokens, and problem.tokens allows %" PRId64,
                i, here, here - before, shape->tokens);
        before = here;
    }
    return GDELTA_OK;
}

static gdelta_status check_slots(const checker *c, const char *name, const gdelta_index *index, int64_t slot_count,
                                 int64_t states, gdelta_table *table) {
    char slots[48] = "";
    strcat(strcat(slots, name), ".slots");
    TRY(check_index(slots, index, table));
    if (index->data == NULL) {
        REQUIRE(slot_count == 0, "%s.slot_count is %" PRId64 " but there are no slots; then it must be 0", name,
                slot_count);
        return GDELTA_OK;
    }
    REQUIRE(slot_count >= 1 && slot_count <= INT64_MAX / 2,
            "%s.slot_count is %" PRId64 "; with slots it must be 1 to 2^62", name, slot_count);
    const void *host = readable(c, index);
    if (host == NULL) return GDELTA_OK;
    for (int64_t i = 0; i < states; ++i) {
        int64_t slot = entry(host, table->is_int64, i);
        REQUIRE(slot >= -1 && slot < slot_count, "%s[%" PRId64 "] is %" PRId64 "; it must be -1 (skip) to %" PRId64,
                slots, i, slot, slot_count - 1);
    }
    return GDELTA_OK;
}

/* `states` of them, each with an entry of its own or a slot. */
static gdelta_status check_states(checker *c, const char *name, const gdelta_state *s, int64_t states, int role,
                                  gdelta_state_view *view) {
    const gdelta_shape *shape = c->shape;
    memset(view, 0, sizeof *view);
    REQUIRE(s->reserved == 0, "%s.reserved is %" PRId32 "; it must be 0", name, s->reserved);
    view->dtype = or_default(s->dtype, or_default(c->problem->state_dtype, GDELTA_DTYPE_FP32));
    view->order = c->problem->state_order;
    if (s->data == NULL) {
        REQUIRE(s->slots.data == NULL && s->slots.host == NULL, "%s.slots is given but %s.data is NULL", name, name);
        return GDELTA_OK;
    }
    TRY(check_dtype(c, name, view->dtype, HALVES_AND_FP32));
    TRY(check_pointer(name, s->data, view->dtype));
    TRY(check_slots(c, name, &s->slots, s->slot_count, states, &view->slots));

    int64_t entries = s->slots.data ? s->slot_count : states;
    bool vk = view->order == GDELTA_STATE_VK;
    int64_t rows = vk ? shape->dim_v : shape->dim_k, columns = vk ? shape->dim_k : shape->dim_v;
    int64_t extent[4] = {entries, shape->heads_o, rows, columns};
    int64_t stride[4] = {rows * columns * shape->heads_o, rows * columns, columns, 1};
    if (!all_zero(s->stride)) {
        memcpy(stride, s->stride, sizeof stride);
        REQUIRE(rows == 1 || stride[2] == columns,
                "%s.stride[2] is %" PRId64 "; one head's state is contiguous, so it must be %" PRId64, name, stride[2],
                columns);
    }
    TRY(check_strides(name, extent, stride, role & kOutput));
    view->data = s->data;
    view->slot = stride[0];
    view->head = stride[1];
    view->slot_count = s->slot_count;
    return GDELTA_OK;
}

/* One of each sequence. */
static gdelta_status check_state(checker *c, const char *name, const gdelta_state *s, int role,
                                 gdelta_state_view *view) {
    return check_states(c, name, s, c->shape->sequences, role, view);
}

/* A gradient of states: by sequence, no slots. */
static gdelta_status check_state_gradient(checker *c, const char *name, const gdelta_tensor *t, int role,
                                          gdelta_state_view *view) {
    gdelta_state state = {.data = t->data, .dtype = t->dtype, .reserved = t->reserved};
    memcpy(state.stride, t->stride, sizeof state.stride);
    TRY(check_state(c, name, &state, role, view));
    return t->data ? remember(c, name, t->data, role & kOutput) : GDELTA_OK;
}

static bool same_entries(const gdelta_state_view *a, const gdelta_state_view *b) {
    return a->dtype == b->dtype && a->slot == b->slot && a->head == b->head;
}

/* States that are written: memory of their own, or the initial state's, in place. */
static gdelta_status check_final(checker *c, const char *name, const gdelta_state *s, const gdelta_inputs *in,
                                 gdelta_state_view *view) {
    TRY(check_state(c, name, s, kOutput, view));
    const gdelta_state_view *initial = &in->initial;
    if (s->data == NULL || s->data != initial->data) return s->data ? remember(c, name, s->data, true) : GDELTA_OK;
    REQUIRE(same_entries(view, initial),
            "%s.data is the initial state's; in place its dtype and strides must be the same too", name);
    const char *first = NULL;
    for (int i = 0; i < c->count; ++i) {
        if (c->seen[i].data != s->data) continue;
        REQUIRE(first == NULL, "%s.data is %p, which is also %s.data; an output must have memory of its own", name,
                s->data, first);
        first = c->seen[i].name;
    }
    return GDELTA_OK;
}

/* Several states of each sequence, written: memory of their own, or a pool that they share with initial or final ones.
 */
static gdelta_status check_several(checker *c, const char *name, const gdelta_state *s, int64_t states,
                                   const gdelta_state_view *initial, const gdelta_state_view *final,
                                   gdelta_state_view *view) {
    TRY(check_states(c, name, s, states, kOutput, view));
    if (s->data == NULL) return GDELTA_OK;
    const gdelta_state_view *pool = s->data == initial->data ? initial : s->data == final->data ? final : NULL;
    if (pool == NULL) return remember(c, name, s->data, true);
    REQUIRE(view->slots.data && pool->slots.data && same_entries(view, pool),
            "%s.data is also the initial or final state's; in one pool both need slots, and the same dtype and strides",
            name);
    return GDELTA_OK;
}

/* ---- Calls ---- */

/* The fields that forward, backward and step share. */
typedef struct common_args {
    const gdelta_tensor *q, *k, *v, *g, *beta, *a_log, *dt_bias;
    const char *state_name;
    const gdelta_state *initial;
    const uint8_t *has_initial;
    const gdelta_index *cu_seqlens;
    uint64_t *device_status;
} common_args;

static gdelta_dtype io_dtype(const checker *c) {
    return or_default(c->problem->dtype, GDELTA_DTYPE_BF16);
}

static gdelta_dtype gate_dtype(const checker *c) {
    return or_default(c->problem->gate_dtype, GDELTA_DTYPE_FP32);
}

static gdelta_dtype beta_dtype(const checker *c) {
    return or_default(c->problem->beta_dtype, GDELTA_DTYPE_FP32);
}

/* What an output, or a gradient coming in, may be: the role's dtype or fp32. */
static unsigned or_fp32(gdelta_dtype dtype) {
    return BIT(dtype) | BIT(GDELTA_DTYPE_FP32);
}

/* Where sequences start from, and the status word. */
static gdelta_status check_start(checker *c, const char *name, const gdelta_state *state, const uint8_t *has_initial,
                                 uint64_t *device_status, gdelta_inputs *in) {
    TRY(check_state(c, name, state, kInput, &in->initial));
    if (in->initial.data) TRY(remember(c, name, in->initial.data, false));
    REQUIRE(has_initial == NULL || in->initial.data, "has_initial_state is given but %s.data is NULL", name);
    in->has_initial = has_initial;
    REQUIRE((uintptr_t)device_status % 8 == 0, "device_status is %p; it must be aligned to 8 bytes",
            (void *)device_status);
    in->device_status = device_status;
    return GDELTA_OK;
}

static gdelta_status check_inputs(checker *c, const common_args *a, gdelta_inputs *in) {
    const gdelta_shape *s = c->shape;
    gdelta_dtype io = io_dtype(c), gate = gate_dtype(c), beta = beta_dtype(c);
    memset(in, 0, sizeof *in);
    TRY(check_tensor(c, "q", a->q, s->heads_q, s->dim_k, io, BIT(io), kRequired, &in->q));
    TRY(check_tensor(c, "k", a->k, s->heads_k, s->dim_k, io, BIT(io), kRequired, &in->k));
    TRY(check_tensor(c, "v", a->v, s->heads_v, s->dim_v, io, BIT(io), kRequired, &in->v));
    TRY(check_tensor(c, "g", a->g, s->heads_o, 1, gate, BIT(gate), kInput, &in->g));
    TRY(check_tensor(c, "beta", a->beta, s->heads_o, 1, beta, BIT(beta), kInput, &in->beta));
    TRY(check_vector(c, "a_log", a->a_log, HALVES_AND_FP32, kInput, &in->a_log));
    TRY(check_vector(c, "dt_bias", a->dt_bias, HALVES_AND_FP32, kInput, &in->dt_bias));

    bool fused = s->gate == GDELTA_GATE_SOFTPLUS;
    REQUIRE(s->gate == GDELTA_GATE_LOG || in->g.data || s->rows == 0,
            "g.data is NULL but gate is %" PRId32 "; only a log gate (0) may be absent", s->gate);
    REQUIRE(s->beta == GDELTA_BETA_VALUE || in->beta.data || s->rows == 0,
            "beta.data is NULL but problem.beta is %" PRId32 "; only a plain value (0) may be absent", s->beta);
    REQUIRE(!fused || in->a_log.data, "a_log.data is NULL; a softplus gate needs it");
    REQUIRE(fused || !in->a_log.data, "a_log.data is given but gate is %" PRId32 "; only a softplus gate (2) takes it",
            s->gate);
    REQUIRE(fused || !in->dt_bias.data,
            "dt_bias.data is given but gate is %" PRId32 "; only a softplus gate (2) takes it", s->gate);

    TRY(check_cu_seqlens(c, a->cu_seqlens, &in->cu_seqlens));
    return check_start(c, a->state_name, a->initial, a->has_initial, a->device_status, in);
}

#define REQUIRE_STRUCT(args, type)                                                                              \
    do {                                                                                                        \
        REQUIRE((args) != NULL, "args is NULL");                                                                \
        REQUIRE((args)->struct_size == sizeof(type),                                                            \
                "args.struct_size is %" PRIu32 "; this library's " #type " has %zu bytes", (args)->struct_size, \
                sizeof(type));                                                                                  \
    } while (0)

static gdelta_status check_checkpoints(checker *c, const gdelta_state *checkpoints, int64_t interval,
                                       gdelta_forward_call *call) {
    const gdelta_shape *shape = c->shape;
    bool given = checkpoints->data != NULL;
    REQUIRE(!given || (interval > 0 && interval % kCheckpointUnit == 0),
            "checkpoint_interval is %" PRId64 "; with checkpoints it must be a positive multiple of %d", interval,
            kCheckpointUnit);
    int64_t states = !given          ? 0
                     : shape->packed ? shape->rows / interval
                                     : shape->sequences * (shape->tokens / interval);
    call->checkpoint_interval = interval;
    TRY(check_several(c, "checkpoints", checkpoints, states, &call->in.initial, &call->final, &call->checkpoints));
    REQUIRE(given || interval == 0,
            "checkpoint_interval is %" PRId64 " but checkpoints.data is NULL; without checkpoints it must be 0",
            interval);
    return GDELTA_OK;
}

gdelta_status gdelta_validate_forward(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                      const gdelta_forward_args *a, gdelta_forward_call *call) {
    checker c = {.problem = problem, .shape = shape, .place = place};
    REQUIRE_STRUCT(a, gdelta_forward_args);
    REQUIRE(a->reserved == 0, "args.reserved is %" PRIu32 "; it must be 0", a->reserved);
    memset(call, 0, sizeof *call);
    call->shape = *shape;
    TRY(check_inputs(&c,
                     &(common_args){&a->q, &a->k, &a->v, &a->g, &a->beta, &a->a_log, &a->dt_bias, "initial_state",
                                    &a->initial_state, a->has_initial_state, &a->cu_seqlens, a->device_status},
                     &call->in));
    gdelta_dtype io = io_dtype(&c);
    TRY(check_tensor(&c, "o", &a->o, shape->heads_o, shape->dim_v, io, or_fp32(io), kOutput, &call->o));
    TRY(check_final(&c, "final_state", &a->final_state, &call->in, &call->final));
    TRY(check_checkpoints(&c, &a->checkpoints, a->checkpoint_interval, call));
    REQUIRE(call->o.data || call->final.data || call->checkpoints.data || a->saved || shape->rows == 0,
            "o.data, final_state.data, checkpoints.data and saved are NULL; forward has nothing to write");
    REQUIRE(a->saved != NULL || a->saved_bytes == 0, "saved_bytes is %zu but saved is NULL", a->saved_bytes);
    REQUIRE(place == GDELTA_PLACE_DEVICE || a->saved == NULL, "saved is %p; the CPU reference saves nothing", a->saved);
    return GDELTA_OK;
}

/* A named engine runs all or nothing. */
static gdelta_status check_engine(const gdelta_problem *problem, const char *operation) {
    if (problem->engine != GDELTA_ENGINE_HOPPER) return GDELTA_OK;
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                       "engine is hopper (2); its %s is not in this version, use auto (0) or recurrent (1)", operation);
}

gdelta_status gdelta_validate_backward(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                       const gdelta_backward_args *a, gdelta_backward_call *call) {
    checker c = {.problem = problem, .shape = shape, .place = place};
    REQUIRE_STRUCT(a, gdelta_backward_args);
    REQUIRE((a->flags & ~(uint32_t)GDELTA_BACKWARD_ACCUMULATE_PARAMETERS) == 0,
            "args.flags is 0x%" PRIx32 "; only GDELTA_BACKWARD_ACCUMULATE_PARAMETERS is known", a->flags);
    memset(call, 0, sizeof *call);
    call->shape = *shape;
    call->accumulate_parameters = a->flags & GDELTA_BACKWARD_ACCUMULATE_PARAMETERS;
    gdelta_inputs *in = &call->in;
    TRY(check_inputs(&c,
                     &(common_args){&a->q, &a->k, &a->v, &a->g, &a->beta, &a->a_log, &a->dt_bias, "initial_state",
                                    &a->initial_state, a->has_initial_state, &a->cu_seqlens, a->device_status},
                     in));

    gdelta_dtype io = io_dtype(&c), gate = gate_dtype(&c), beta = beta_dtype(&c);
    const gdelta_shape *s = shape;
    TRY(check_tensor(&c, "d_o", &a->d_o, s->heads_o, s->dim_v, io, or_fp32(io), kInput, &call->d_o));
    TRY(check_state_gradient(&c, "d_final_state", &a->d_final_state, kInput, &call->d_final));
    REQUIRE(call->d_o.data || call->d_final.data || s->rows == 0,
            "d_o.data and d_final_state.data are NULL; backward needs a gradient to start from");

    TRY(check_tensor(&c, "dq", &a->dq, s->heads_q, s->dim_k, io, or_fp32(io), kOutput, &call->dq));
    TRY(check_tensor(&c, "dk", &a->dk, s->heads_k, s->dim_k, io, or_fp32(io), kOutput, &call->dk));
    TRY(check_tensor(&c, "dv", &a->dv, s->heads_v, s->dim_v, io, or_fp32(io), kOutput, &call->dv));
    TRY(check_tensor(&c, "dg", &a->dg, s->heads_o, 1, gate, or_fp32(gate), kOutput, &call->dg));
    TRY(check_tensor(&c, "dbeta", &a->dbeta, s->heads_o, 1, beta, or_fp32(beta), kOutput, &call->dbeta));
    TRY(check_vector(&c, "da_log", &a->da_log, BIT(GDELTA_DTYPE_FP32), kOutput, &call->da_log));
    TRY(check_vector(&c, "ddt_bias", &a->ddt_bias, BIT(GDELTA_DTYPE_FP32), kOutput, &call->ddt_bias));
    TRY(check_state_gradient(&c, "d_initial_state", &a->d_initial_state, kOutput, &call->d_initial));

    REQUIRE(!call->dg.data || in->g.data, "dg.data is given but g.data is NULL");
    REQUIRE(!call->dbeta.data || in->beta.data, "dbeta.data is given but beta.data is NULL");
    REQUIRE(!call->da_log.data || in->a_log.data, "da_log.data is given but a_log.data is NULL");
    REQUIRE(!call->ddt_bias.data || in->dt_bias.data, "ddt_bias.data is given but dt_bias.data is NULL");
    REQUIRE(call->dq.data || call->dk.data || call->dv.data || call->dg.data || call->dbeta.data || call->da_log.data ||
                call->ddt_bias.data || call->d_initial.data || s->rows == 0,
            "no gradient's data is given; backward has nothing to write");
    REQUIRE(!call->accumulate_parameters || call->da_log.data || call->ddt_bias.data,
            "args.flags has GDELTA_BACKWARD_ACCUMULATE_PARAMETERS but da_log.data and ddt_bias.data are NULL");
    REQUIRE(a->saved != NULL || a->saved_bytes == 0, "saved_bytes is %zu but saved is NULL", a->saved_bytes);
    REQUIRE(place == GDELTA_PLACE_DEVICE || a->saved == NULL, "saved is %p; the CPU reference saves nothing", a->saved);
    return GDELTA_OK;
}

static gdelta_status check_step_tokens(const gdelta_problem *problem, const gdelta_shape *shape) {
    if (shape->packed) {
        return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                           "layout is THD; a step takes dense layouts: a packed [B * T, H, D] is BSHD with batch B");
    }
    REQUIRE(problem->tokens >= 1 && problem->tokens <= kMaxStepTokens,
            "tokens is %" PRId64 "; a step takes 1 to %d tokens a sequence", problem->tokens, kMaxStepTokens);
    return GDELTA_OK;
}

gdelta_status gdelta_validate_operation(const gdelta_problem *problem, const gdelta_shape *shape,
                                        gdelta_operation operation) {
    switch (operation) {
        case GDELTA_OPERATION_FORWARD:
        case GDELTA_OPERATION_BACKWARD:
            return GDELTA_OK;
        case GDELTA_OPERATION_STEP:
            TRY(check_step_tokens(problem, shape));
            return check_engine(problem, "step");
        case GDELTA_OPERATION_COMMIT:
            TRY(check_step_tokens(problem, shape));
            return check_engine(problem, "commit");
        default:
            return check_enum("operation", operation, GDELTA_OPERATION_COMMIT);
    }
}

/* All of a record or nothing. */
static gdelta_status check_record(checker *c, const gdelta_record *record, int role, gdelta_record_view *view) {
    const gdelta_shape *s = c->shape;
    const unsigned fp32 = BIT(GDELTA_DTYPE_FP32);
    const gdelta_dtype dtype = GDELTA_DTYPE_FP32;
    const gdelta_tensor *parts[] = {&record->k, &record->u, &record->decay};
    static const char *const names[] = {"record.k", "record.u", "record.decay"};
    bool any = role & kRequired;
    for (int i = 0; i < 3; ++i) any = any || parts[i]->data;
    for (int i = 0; i < 3; ++i) {
        REQUIRE(!any || parts[i]->data, "%s.data is NULL; a record is k, u and decay", names[i]);
    }
    TRY(check_tensor(c, names[0], parts[0], s->heads_k, s->dim_k, dtype, fp32, role, &view->k));
    TRY(check_tensor(c, names[1], parts[1], s->heads_o, s->dim_v, dtype, fp32, role, &view->u));
    return check_tensor(c, names[2], parts[2], s->heads_o, 1, dtype, fp32, role, &view->decay);
}

static gdelta_status check_parents(const checker *c, const gdelta_index *index, gdelta_table *table) {
    TRY(check_index("parents", index, table));
    const void *host = index->data ? readable(c, index) : NULL;
    if (host == NULL) return GDELTA_OK;
    int64_t tokens = c->shape->tokens;
    for (int64_t i = 0; i < c->shape->rows; ++i) {
        int64_t parent = entry(host, table->is_int64, i);
        REQUIRE(parent >= -1 && parent < i % tokens,
                "parents[%" PRId64 "] is %" PRId64 "; for token %" PRId64
                " of a sequence it must be an earlier one, or -1 (the state before the draft)",
                i, parent, i % tokens);
    }
    return GDELTA_OK;
}

static gdelta_status check_accepted(const checker *c, const gdelta_index *index, gdelta_table *table) {
    TRY(check_index("accepted", index, table));
    REQUIRE(index->data != NULL, "accepted.data is NULL; a commit needs the counts");
    const void *host = readable(c, index);
    for (int64_t i = 0; host && i < c->shape->sequences; ++i) {
        int64_t count = entry(host, table->is_int64, i);
        REQUIRE(count >= 0 && count <= c->shape->tokens,
                "accepted[%" PRId64 "] is %" PRId64 "; it must be 0 to %" PRId64, i, count, c->shape->tokens);
    }
    return GDELTA_OK;
}

/* The state that is written, if none is given for it, is the one that is read. */
static gdelta_status check_output_state(checker *c, const gdelta_state *state, const gdelta_state *output,
                                        const gdelta_inputs *in, gdelta_state_view *final) {
    if (output->data == NULL) return check_final(c, "state", state, in, final);
    return check_final(c, "output_state", output, in, final);
}

gdelta_status gdelta_validate_step(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                   const gdelta_step_args *a, gdelta_draft_call *draft) {
    checker c = {.problem = problem, .shape = shape, .place = place};
    gdelta_forward_call *call = &draft->step;
    REQUIRE_STRUCT(a, gdelta_step_args);
    TRY(check_step_tokens(problem, shape));
    if (place == GDELTA_PLACE_DEVICE) TRY(check_engine(problem, "step"));
    REQUIRE((a->flags & ~(uint32_t)GDELTA_STEP_KEEP_STATE) == 0,
            "args.flags is 0x%" PRIx32 "; only GDELTA_STEP_KEEP_STATE is known", a->flags);
    memset(draft, 0, sizeof *draft);
    call->shape = *shape;
    gdelta_index no_table = {.data = NULL};
    TRY(check_inputs(&c,
                     &(common_args){&a->q, &a->k, &a->v, &a->g, &a->beta, &a->a_log, &a->dt_bias, "state", &a->state,
                                    a->has_initial_state, &no_table, a->device_status},
                     &call->in));
    gdelta_dtype io = io_dtype(&c);
    TRY(check_tensor(&c, "o", &a->o, shape->heads_o, shape->dim_v, io, or_fp32(io), kOutput, &call->o));
    bool keep = a->flags & GDELTA_STEP_KEEP_STATE;
    REQUIRE(!keep || a->output_state.data == NULL, "output_state.data is %p but args.flags has GDELTA_STEP_KEEP_STATE",
            a->output_state.data);
    REQUIRE(call->in.initial.data != NULL, "state.data is NULL; a step needs a state");
    if (!keep) TRY(check_output_state(&c, &a->state, &a->output_state, &call->in, &call->final));
    TRY(check_several(&c, "token_states", &a->token_states, shape->rows, &call->in.initial, &call->final,
                      &draft->token_states));
    TRY(check_record(&c, &a->record, kOutput, &draft->record));
    TRY(check_parents(&c, &a->parents, &draft->parents));
    REQUIRE(keep || draft->parents.data == NULL,
            "parents.data is %p but args.flags lacks GDELTA_STEP_KEEP_STATE; no token of a tree is the last",
            draft->parents.data);
    REQUIRE(!keep || call->o.data || draft->token_states.data || draft->record.u.data,
            "o.data is NULL and args.flags has GDELTA_STEP_KEEP_STATE; without token_states and record the step has "
            "nothing to write");
    return GDELTA_OK;
}

gdelta_status gdelta_validate_commit(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                     const gdelta_commit_args *a, gdelta_commit_call *call) {
    checker c = {.problem = problem, .shape = shape, .place = place};
    REQUIRE_STRUCT(a, gdelta_commit_args);
    TRY(check_step_tokens(problem, shape));
    if (place == GDELTA_PLACE_DEVICE) TRY(check_engine(problem, "commit"));
    REQUIRE(a->flags == 0, "args.flags is 0x%" PRIx32 "; it must be 0", a->flags);
    memset(call, 0, sizeof *call);
    call->shape = *shape;
    TRY(check_record(&c, &a->record, kRequired, &call->record));
    TRY(check_accepted(&c, &a->accepted, &call->accepted));
    TRY(check_parents(&c, &a->parents, &call->parents));
    TRY(check_start(&c, "state", &a->state, a->has_initial_state, a->device_status, &call->in));
    REQUIRE(call->in.initial.data != NULL, "state.data is NULL; a commit needs a state");
    return check_output_state(&c, &a->state, &a->output_state, &call->in, &call->final);
}
