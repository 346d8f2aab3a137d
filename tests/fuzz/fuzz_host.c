/* A fuzzer of the host layer (libFuzzer; GDELTA_FUZZ in CMake, scripts/fuzz.sh), with address and undefined behaviour
 * sanitizers. An input is a problem and one call: mostly good ones, with words of the structs overwritten.
 *
 * It stands in for the device and the launchers, and so sees what would be launched. Held are:
 *   - no crash, no overflow, whatever the structs hold; what the caller passed is not changed; a failure has a
 * sentence;
 *   - what is launched is good: sizes, strides, alignment, grids, as the kernels take them for granted;
 *   - every part of workspace and saved buffer, with the size that kernels/launch.h gives, lies in the plan's bytes,
 * and none overlaps another; parts are written, in memory of exactly these bytes;
 *   - every output head is in one launch of a backward, with the heads that it reads;
 *   - plan sizes never shrink, and GDELTA_FLAG_SMALL_WORKSPACE keeps its word;
 *   - the CPU reference touches nothing but what strides and tables say: each tensor has memory of exactly its span. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gdelta/reference.h>

#include "host/device.h"
#include "host/layout.h"
#include "kernels/config.h"
#include "kernels/launch.h"

#define HOLD(condition)                                                             \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                \
        }                                                                           \
    } while (0)

__extension__ typedef __int128 wide; /* holds every product that is formed here */

/* ---- What the input says: where it ends, zeros follow, and they say the usual ---- */

static const uint8_t *input;
static size_t left;

static unsigned byte(void) {
    if (left == 0) return 0;
    --left;
    return *input++;
}

static int64_t word(void) {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return (int64_t)value;
}

static int below(int count) {
    return (int)(byte() % (unsigned)count);
}

/* A number that is near some limit, or any. */
static int64_t number(void) {
    static const int64_t limits[] = {0,
                                     1,
                                     2,
                                     16,
                                     64,
                                     65535,
                                     65536,
                                     1 << 20,
                                     INT32_MAX,
                                     UINT32_MAX,
                                     INT64_MAX,
                                     INT64_MIN,
                                     -1,
                                     INT32_MIN,
                                     INT64_MAX / 2,
                                     INT64_C(1) << 40,
                                     INT64_C(1) << 31,
                                     INT64_C(1) << 53};
    int which = below((int)(sizeof limits / sizeof *limits) + 2);
    if (which >= (int)(sizeof limits / sizeof *limits)) return word();
    return (int64_t)((uint64_t)limits[which] + (uint64_t)(which % 3 ? below(3) : 0));
}

/* Overwrites some words of a struct. Most inputs leave it alone. */
static void poke(void *data, size_t size) {
    for (int count = below(4) == 3 ? 1 + below(3) : 0; count > 0; --count) {
        size_t bytes = byte() % 2 ? 4 : 8, at = (byte() * 256u + byte()) % (size / bytes) * bytes;
        int64_t value = number();
        memcpy((char *)data + at, &value, bytes);
    }
}

/* ---- The device, and what is launched on it ---- */

enum { kMostHeads = 64 };

static struct {
    char *workspace, *saved;
    size_t workspace_bytes, saved_bytes;
    bool real;      /* these are memory, not addresses alone */
    bool automatic; /* the engine is not named */
    struct {
        char *begin, *end;
    } part[16];
    int parts, launches;
    const gdelta_problem *problem;
    const gdelta_backward_args *backward;
    int seen[kMostHeads]; /* backwards that were launched for an output head */
} device;

bool gdelta_device_query(int32_t *compute_capability, int32_t *multiprocessors) {
    *compute_capability = 90;
    *multiprocessors = 132;
    return true;
}

gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, bool *entered) {
    *entered = stream != NULL;
    *compute_capability = 90;
    return GDELTA_OK;
}

void gdelta_device_leave(bool entered) {
    (void)entered;
}

gdelta_status gdelta_device_status(int error, const char *what) {
    (void)what;
    return error ? GDELTA_ERROR_CUDA : GDELTA_OK;
}

gdelta_status gdelta_device_encode_map(gdelta_tensor_map *map, const char *name, const gdelta_view *view,
                                       const uint64_t extent[5], const uint64_t byte_stride[4], const uint32_t box[5]) {
    memset(map, 1, sizeof *map);
    HOLD(name && (uintptr_t)view->data % 16 == 0);
    for (int i = 0; i < 5; ++i) HOLD(extent[i] >= 1 && extent[i] <= UINT32_MAX && box[i] >= 1 && box[i] <= 256);
    for (int i = 0; i < 4; ++i) HOLD(byte_stride[i] % 16 == 0 && byte_stride[i] < UINT64_C(1) << 40);
    return GDELTA_OK;
}

/* A part of workspace or saved buffer: in its bytes, and apart from the others. */
static void use(const void *data, wide bytes) {
    char *begin = (char *)data;
    HOLD(bytes >= 0);
    if (bytes == 0) return;
    bool in_workspace = begin >= device.workspace && begin - device.workspace + bytes <= (wide)device.workspace_bytes;
    bool in_saved = begin >= device.saved && begin - device.saved + bytes <= (wide)device.saved_bytes;
    HOLD(in_workspace || (device.saved && in_saved));
    HOLD((uintptr_t)begin % 256 == 0);
    for (int i = 0; i < device.parts; ++i) {
        HOLD(begin + bytes <= device.part[i].begin || begin >= device.part[i].end);
    }
    HOLD(device.parts < 16);
    device.part[device.parts].begin = begin;
    device.part[device.parts++].end = begin + bytes;
    if (device.real) memset(begin, 0xff, (size_t)bytes);
}

static size_t element_size(gdelta_dtype dtype) {
    HOLD(dtype >= GDELTA_DTYPE_BF16 && dtype <= GDELTA_DTYPE_FP32);
    return dtype == GDELTA_DTYPE_FP32 ? 4 : 2;
}

static void hold_view(const gdelta_shape *s, const gdelta_view *view, int64_t heads, int64_t dim) {
    if (view->data == NULL) return;
    HOLD((uintptr_t)view->data % element_size(view->dtype) == 0);
    const int64_t extent[] = {s->packed ? 1 : s->sequences, s->packed ? s->rows : s->tokens, heads};
    const int64_t stride[] = {view->batch, view->token, view->head};
    wide span = dim;
    if (s->rows == 0) return; /* no elements, and a dense batch stride of 0 */
    for (int i = 0; i < 3; ++i) {
        HOLD(extent[i] <= 1 || stride[i] > 0);
        if (extent[i] > 1) span += (wide)(extent[i] - 1) * stride[i];
    }
    HOLD(span * 8 < INT64_MAX);
}

static void hold_states(const gdelta_shape *s, const gdelta_state_view *view, wide entries) {
    if (view->data == NULL) return;
    HOLD((uintptr_t)view->data % element_size(view->dtype) == 0);
    if (view->slots.data) entries = view->slot_count;
    HOLD(entries >= 0 && (entries <= 1 || view->slot > 0) && (s->heads_o == 1 || view->head > 0));
    wide span = (entries > 0 ? entries - 1 : 0) * view->slot + (wide)(s->heads_o - 1) * view->head;
    HOLD((span + (wide)s->dim_k * s->dim_v) * 4 < INT64_MAX);
}

static void hold_call(const gdelta_shape *s, const gdelta_inputs *in) {
    ++device.launches;
    device.parts = 0;
    HOLD(s->sequences >= 1 && s->tokens >= 0 && s->rows >= 0 && s->heads_q >= 1 && s->heads_k >= 1 && s->heads_v >= 1);
    HOLD(s->packed || s->rows == s->sequences * s->tokens);
    HOLD((s->heads_q == s->heads_k && s->heads_v % s->heads_q == 0) ||
         (s->heads_k == s->heads_v && s->heads_q % s->heads_k == 0));
    HOLD(s->heads_o == (s->heads_q > s->heads_v ? s->heads_q : s->heads_v));
    HOLD(s->dim_k >= 1 && s->dim_k <= kRecurrentMaxDim && s->dim_v >= 1 && s->dim_v <= kRecurrentMaxDim);
    HOLD((wide)s->sequences * s->heads_o * gdelta_forward_tiles(s->dim_v) <= INT32_MAX);
    HOLD(s->packed == (in->cu_seqlens.data != NULL));
    HOLD((s->gate == GDELTA_GATE_SOFTPLUS) == (in->a_log.data != NULL));
    hold_view(s, &in->q, s->heads_q, s->dim_k);
    hold_view(s, &in->k, s->heads_k, s->dim_k);
    hold_view(s, &in->v, s->heads_v, s->dim_v);
    hold_view(s, &in->g, s->heads_o, 1);
    hold_view(s, &in->beta, s->heads_o, 1);
    hold_states(s, &in->initial, s->sequences);
    HOLD(!in->has_initial || in->initial.data);
}

static void hold_forward(const gdelta_forward_call *call) {
    const gdelta_shape *s = &call->shape;
    hold_call(s, &call->in);
    HOLD(s->rows == 0 || (call->in.q.data && call->in.k.data && call->in.v.data));
    hold_view(s, &call->o, s->heads_o, s->dim_v);
    hold_states(s, &call->final, s->sequences);
    HOLD(!call->checkpoints.data || (call->checkpoint_interval > 0 && call->checkpoint_interval % 64 == 0));
}

static wide saved_states(const gdelta_shape *s) {
    return (wide)(s->rows / 64) * s->heads_o * s->dim_k * s->dim_v * 4;
}

int gdelta_launch_recurrent_forward(const gdelta_forward_call *call, const gdelta_recurrent_work *work,
                                    gdelta_stream stream) {
    (void)stream;
    hold_forward(call);
    HOLD((work->malformed != NULL) == (call->shape.packed != 0));
    if (work->malformed) use(work->malformed, 4);
    if (work->checkpoints) use(work->checkpoints, saved_states(&call->shape));
    return 0;
}

int gdelta_launch_recurrent_draft(const gdelta_draft_call *call, gdelta_stream stream) {
    (void)stream;
    const gdelta_shape *s = &call->step.shape;
    hold_forward(&call->step);
    HOLD(!s->packed && s->tokens >= 1 && s->tokens <= 16 && call->step.in.initial.data);
    hold_states(s, &call->token_states, s->rows);
    HOLD(!call->parents.data || !call->step.final.data);
    return 0;
}

int gdelta_launch_recurrent_commit(const gdelta_commit_call *call, gdelta_stream stream) {
    (void)stream;
    const gdelta_shape *s = &call->shape;
    HOLD(!s->packed && s->tokens >= 1 && s->tokens <= 16 && call->in.initial.data && call->final.data);
    HOLD(call->record.k.data && call->record.u.data && call->record.decay.data && call->accepted.data);
    hold_states(s, &call->final, s->sequences);
    ++device.launches;
    return 0;
}

/* The head of the caller's tensor, whose heads are `stride` apart, that is head h of a launch. */
static int64_t head_number(const void *whole, int64_t stride, int64_t heads, const void *data, gdelta_dtype dtype,
                           int64_t step, int64_t h) {
    if (heads == 1) {
        HOLD(data == whole && h == 0);
        return 0;
    }
    wide bytes = (wide)(uintptr_t)data - (wide)(uintptr_t)whole, unit = (wide)stride * (wide)element_size(dtype);
    HOLD(stride > 0 && bytes >= 0 && bytes % unit == 0 && step % stride == 0);
    return (int64_t)(bytes / unit) + h * (step / stride);
}

static int64_t tensor_head(const gdelta_shape *s, const gdelta_tensor *whole, int64_t heads, int64_t dim,
                           const gdelta_view *view, int64_t h) {
    int64_t stride[4];
    const int64_t extent[4] = {s->packed ? 1 : s->sequences, s->packed ? s->rows : s->tokens, heads, dim},
                  zero[4] = {0};
    memcpy(stride, whole->stride, sizeof stride);
    if (memcmp(stride, zero, sizeof zero) == 0) gdelta_layout_strides(device.problem->layout, extent, stride);
    return head_number(whole->data, stride[2], heads, view->data, view->dtype, view->head, h);
}

static int64_t vector_head(const gdelta_tensor *whole, int64_t heads, const gdelta_view *view, int64_t h) {
    int64_t stride = whole->stride[2] ? whole->stride[2] : 1;
    return head_number(whole->data, stride, heads, view->data, view->dtype, view->head, h);
}

static int64_t state_head(const void *whole, int64_t stride, const gdelta_problem *p, int64_t heads,
                          const gdelta_state_view *view, int64_t h) {
    if (stride == 0) stride = (int64_t)p->dim_k * p->dim_v;
    return head_number(whole, stride, heads, view->data, view->dtype, view->head, h);
}

/* Of `heads` heads, the one that output head `o` of `outputs` reads. */
static int64_t head_read(const gdelta_problem *p, int64_t o, int64_t outputs, int64_t heads) {
    return p->head_map == GDELTA_HEADS_TILED ? o % heads : o / (outputs / heads);
}

/* The heads of a launch are the caller's, each with those that it reads. */
static void hold_heads(const gdelta_backward_call *call) {
    const gdelta_shape *s = &call->shape;
    const gdelta_problem *p = device.problem;
    const gdelta_backward_args *a = device.backward;
    int64_t outputs = p->heads_q > p->heads_v ? p->heads_q : p->heads_v;
    if (s->rows == 0 || outputs > kMostHeads) return;
    for (int64_t h = 0; h < s->heads_o; ++h) {
        int64_t q = head_read(p, h, s->heads_o, s->heads_q), k = head_read(p, h, s->heads_o, s->heads_k);
        int64_t v = head_read(p, h, s->heads_o, s->heads_v);
        int64_t o = p->heads_v == outputs ? tensor_head(s, &a->v, p->heads_v, p->dim_v, &call->in.v, h)
                                          : tensor_head(s, &a->q, p->heads_q, p->dim_k, &call->in.q, h);
        HOLD(o >= 0 && o < outputs);
        ++device.seen[o];
        const struct {
            const gdelta_tensor *whole;
            const gdelta_view *view;
            int64_t h, heads, dim;
        } tensors[] = {{&a->q, &call->in.q, q, p->heads_q, p->dim_k},
                       {&a->dq, &call->dq, q, p->heads_q, p->dim_k},
                       {&a->k, &call->in.k, k, p->heads_k, p->dim_k},
                       {&a->dk, &call->dk, k, p->heads_k, p->dim_k},
                       {&a->v, &call->in.v, v, p->heads_v, p->dim_v},
                       {&a->dv, &call->dv, v, p->heads_v, p->dim_v},
                       {&a->d_o, &call->d_o, h, outputs, p->dim_v},
                       {&a->g, &call->in.g, h, outputs, 1},
                       {&a->dg, &call->dg, h, outputs, 1},
                       {&a->beta, &call->in.beta, h, outputs, 1},
                       {&a->dbeta, &call->dbeta, h, outputs, 1}};
        for (size_t i = 0; i < sizeof tensors / sizeof *tensors; ++i) {
            HOLD((tensors[i].whole->data != NULL) == (tensors[i].view->data != NULL));
            if (tensors[i].view->data == NULL) continue;
            int64_t number =
                tensor_head(s, tensors[i].whole, tensors[i].heads, tensors[i].dim, tensors[i].view, tensors[i].h);
            HOLD(number == head_read(p, o, outputs, tensors[i].heads));
        }
        const gdelta_tensor *vectors[] = {&a->a_log, &a->dt_bias, &a->da_log, &a->ddt_bias};
        const gdelta_view *views[] = {&call->in.a_log, &call->in.dt_bias, &call->da_log, &call->ddt_bias};
        for (int i = 0; i < 4; ++i) HOLD(!views[i]->data || vector_head(vectors[i], outputs, views[i], h) == o);
        const gdelta_state_view *first = &call->in.initial;
        HOLD(!first->data || state_head(a->initial_state.data, a->initial_state.stride[1], p, outputs, first, h) == o);
        const gdelta_tensor *gradients[] = {&a->d_final_state, &a->d_initial_state};
        const gdelta_state_view *states[] = {&call->d_final, &call->d_initial};
        for (int i = 0; i < 2; ++i) {
            HOLD(!states[i]->data ||
                 state_head(gradients[i]->data, gradients[i]->stride[1], p, outputs, states[i], h) == o);
        }
    }
}

static void hold_backward(const gdelta_backward_call *call) {
    const gdelta_shape *s = &call->shape;
    hold_call(s, &call->in);
    hold_heads(call);
    HOLD((wide)s->sequences * s->heads_o * gdelta_backward_tiles(s->dim_k, s->dim_v) <= INT32_MAX);
    HOLD(s->rows == 0 || call->d_o.data || call->d_final.data);
    hold_view(s, &call->d_o, s->heads_o, s->dim_v);
    hold_view(s, &call->dq, s->heads_q, s->dim_k);
    hold_view(s, &call->dk, s->heads_k, s->dim_k);
    hold_view(s, &call->dv, s->heads_v, s->dim_v);
    hold_view(s, &call->dg, s->heads_o, 1);
    hold_view(s, &call->dbeta, s->heads_o, 1);
    HOLD(!call->dg.data || call->in.g.data);
    HOLD(!call->dbeta.data || call->in.beta.data);
    hold_states(s, &call->d_final, s->sequences);
    hold_states(s, &call->d_initial, s->sequences);
}

int gdelta_launch_recurrent_backward(const gdelta_backward_call *call, const gdelta_recurrent_work *work,
                                     gdelta_stream stream) {
    (void)stream;
    const gdelta_shape *s = &call->shape;
    hold_backward(call);
    wide rows = (wide)s->rows * s->heads_o, tiles = gdelta_backward_tiles(s->dim_k, s->dim_v);
    HOLD((work->malformed != NULL) == (s->packed != 0));
    if (work->malformed) use(work->malformed, 4);
    use(work->checkpoints, saved_states(s));
    use(work->dq, rows * tiles * s->dim_k * 4);
    use(work->dk, rows * tiles * s->dim_k * 4);
    if (s->heads_v < s->heads_o) use(work->dv, rows * s->dim_v * 4);
    use(work->ddecay, rows * tiles * 4);
    use(work->dbeta, rows * tiles * 4);
    return 0;
}

static wide chunk_heads(const gdelta_shape *s, int64_t heads) {
    wide chunks = s->packed ? s->rows / 64 + s->sequences : s->sequences * ((s->tokens + 63) / 64);
    HOLD(chunks * heads <= INT32_MAX);
    return chunks * heads;
}

static void use_chunks(const gdelta_shape *s, const gdelta_hopper_work *work, wide row_floats, wide z_bytes) {
    HOLD((s->dim_k == 64 || s->dim_k == 128) && (s->dim_v == 64 || s->dim_v == 128) && s->rows > 0);
    HOLD((work->malformed != NULL) == (s->packed != 0));
    if (work->malformed) use(work->malformed, 4);
    use(work->rows, chunk_heads(s, s->heads_o) * row_floats * 4);
    use(work->x, chunk_heads(s, s->heads_o) * 64 * s->dim_k * 2);
    use(work->z, chunk_heads(s, s->heads_o) * z_bytes);
}

int gdelta_launch_hopper_forward(const gdelta_forward_call *call, const gdelta_hopper_work *work,
                                 const gdelta_hopper_maps *maps, gdelta_stream stream) {
    (void)stream;
    const gdelta_shape *s = &call->shape;
    hold_forward(call);
    use_chunks(s, work, 132, 5120);
    HOLD(work->choice.segments >= 1 && (work->choice.split_v == 1 || work->choice.split_v == 2));
    HOLD((wide)s->sequences * s->heads_o * work->choice.segments * work->choice.split_v <= INT32_MAX);
    const void *pool = call->in.initial.data;
    HOLD(!pool || (call->final.data != pool && call->checkpoints.data != pool) || work->choice.segments == 1);
    wide summaries = (wide)s->sequences * s->heads_o * (work->choice.segments - 1);
    use(work->m, summaries * s->dim_k * s->dim_k * 4);
    use(work->n, summaries * s->dim_v * s->dim_k * 4);
    HOLD(maps->has_o == 0 || call->o.data);
    return 0;
}

int gdelta_launch_hopper_backward(const gdelta_backward_call *call, const gdelta_hopper_backward_work *work,
                                  const gdelta_hopper_backward_maps *maps, gdelta_stream stream) {
    (void)stream, (void)maps;
    const gdelta_shape *s = &call->shape;
    hold_backward(call);
    HOLD(!device.automatic || (call->in.q.dtype == GDELTA_DTYPE_BF16 && s->gate != GDELTA_GATE_LINEAR));
    use_chunks(s, &work->chunk, 324, 8192);
    wide heads = chunk_heads(s, s->heads_o);
    use(work->chunk.r, heads * 8192);
    use(work->chunk.p, chunk_heads(s, s->heads_q) * 8192);
    use(work->chunk.l, chunk_heads(s, s->heads_q) * 8192);
    use(work->s, heads * s->dim_k * s->dim_v * 2);
    use(work->ds, heads * s->dim_k * s->dim_v * 2);
    use(work->w, heads * 64 * s->dim_v * 2);
    use(work->y, heads * 64 * s->dim_v * 2);
    if (work->parameters) use(work->parameters, heads * 2 * 8);
    return 0;
}

/* ---- The call ---- */

enum { kMostBlocks = 64, kMostBytes = 1 << 20, kMostWork = 1 << 17 };

static void *blocks[kMostBlocks];
static int block_count;

/* Of exactly the size that is asked for, so that one byte more is seen. */
static void *allocate(size_t bytes) {
    HOLD(block_count < kMostBlocks);
    void *block = malloc(bytes ? bytes : 1);
    HOLD(block != NULL);
    return blocks[block_count++] = block;
}

/* Addresses that nobody may touch, apart from one another. */
static uintptr_t next_address;

static void *address(void) {
    next_address += UINT64_C(1) << 44 >> below(12);
    return (void *)(next_address / 256 * 256);
}

static gdelta_problem make_problem(gdelta_operation operation) {
    static const int32_t heads[][3] = {{1, 1, 1}, {1, 1, 2}, {2, 2, 4}, {4, 2, 2}, {3, 1, 1},
                                       {1, 1, 3}, {4, 4, 8}, {8, 4, 4}, {6, 6, 6}};
    static const int32_t dims[] = {64, 128, 64, 128, 1, 2, 7, 16, 33, 129, 256};
    int h = below(9);
    bool step = operation >= GDELTA_OPERATION_STEP;
    gdelta_problem p = {.struct_size = sizeof p, .layout = below(step ? 3 : 4), .engine = below(3)};
    p.flags = below(2) ? (uint32_t)below(4) : 0;
    if (p.layout == GDELTA_LAYOUT_THD) {
        p.sequences = 1 + below(5);
        p.total_tokens = 199 - below(200);
        p.tokens = below(2) ? below((int)p.total_tokens + 1) : 0;
    } else {
        p.batch = 1 + below(4);
        p.tokens = step ? 1 + below(16) : 149 - below(150);
    }
    p.heads_q = heads[h][0], p.heads_k = heads[h][1], p.heads_v = heads[h][2];
    p.dim_k = dims[below(11)], p.dim_v = dims[below(11)];
    p.dtype = below(4), p.gate_dtype = below(4), p.beta_dtype = below(4), p.state_dtype = below(4);
    p.has_scale = below(2);
    p.scale = p.has_scale ? below(9) / 4.0 : 0;
    p.l2norm = below(3);
    p.gate = below(3), p.beta = below(3), p.head_map = below(2), p.state_order = below(2), p.save_mode = below(2);
    if (below(16) == 15) { /* large, and good or not */
        int64_t *const sizes[] = {&p.batch, &p.tokens, &p.sequences, &p.total_tokens};
        *sizes[below(4)] = number();
    }
    poke(&p, sizeof p);
    return p;
}

/* Sizes of the problem, if they are small enough to give its tensors memory. */
typedef struct sizes {
    bool small, packed;
    int64_t sequences, tokens, rows, heads_o;
} sizes;

static sizes sizes_of(const gdelta_problem *p) {
    sizes s = {.packed = p->layout == GDELTA_LAYOUT_THD};
    s.sequences = s.packed ? p->sequences : p->batch;
    s.tokens = s.packed ? p->total_tokens : p->tokens;
    s.heads_o = p->heads_q > p->heads_v ? p->heads_q : p->heads_v;
    bool counts = s.sequences >= 0 && s.sequences <= 8 && s.tokens >= 0 && s.tokens <= 256 && p->heads_q >= 1 &&
                  p->heads_q <= 8 && p->heads_k >= 1 && p->heads_k <= 8 && p->heads_v >= 1 && p->heads_v <= 8;
    s.small = counts && p->dim_k >= 1 && p->dim_k <= 256 && p->dim_v >= 1 && p->dim_v <= 256 && p->layout >= 0 &&
              p->layout <= GDELTA_LAYOUT_THD;
    s.rows = s.small ? (s.packed ? s.tokens : s.sequences * s.tokens) : 0;
    return s;
}

static size_t bytes_of(gdelta_dtype dtype) {
    return dtype == GDELTA_DTYPE_FP64 ? 8 : dtype == GDELTA_DTYPE_BF16 || dtype == GDELTA_DTYPE_FP16 ? 2 : 4;
}

/* Memory of exactly the tensor's span: NULL if that is too large or no span. */
static void *span_memory(const int64_t extent[4], const int64_t stride[4], gdelta_dtype dtype) {
    wide span = 1;
    for (int i = 0; i < 4; ++i) {
        if (extent[i] == 0) return allocate(0);
        if (extent[i] > 1 && stride[i] < 0) return NULL;
        if (extent[i] > 1) span += (wide)(extent[i] - 1) * stride[i];
        if (span > kMostBytes) return NULL;
    }
    char *data = allocate((size_t)span * bytes_of(dtype));
    memset(data, 0x3c, (size_t)span * bytes_of(dtype)); /* a number near 0.01 or 1 in every type */
    return data;
}

/* What becomes of pointers: addresses for the device, memory for the reference. False where there is no memory. */
static bool on_host, has_memory;

static void set_tensor(gdelta_tensor *t, const gdelta_problem *p, sizes s, int64_t heads, int64_t dim,
                       gdelta_dtype dtype) {
    const int64_t extent[4] = {s.packed ? 1 : s.sequences, s.tokens, heads, dim};
    if (below(8) == 7) t->dtype = below(5);
    if (below(3) == 2) {
        int64_t gap = below(4);
        t->stride[3] = 1;
        t->stride[2] = dim + gap;
        t->stride[1] = t->stride[2] * (heads > 0 && heads < 9 ? heads : 1) + gap * below(2);
        t->stride[0] = s.packed ? 0 : (int64_t)((uint64_t)t->stride[1] * (uint64_t)s.tokens);
    }
    poke(t->stride, sizeof t->stride);
    if (!on_host) {
        t->data = address();
        return;
    }
    int64_t dense[4] = {0};
    bool zero = memcmp(t->stride, dense, sizeof dense) == 0;
    int64_t count = s.small ? extent[0] * extent[1] * extent[2] : 0;
    /* A dense tensor spans its elements, whatever the layout. */
    const int64_t flat[4] = {1, 1, 1, count * dim}, unit[4] = {0, 0, 0, 1};
    gdelta_dtype actual = t->dtype ? t->dtype : dtype ? dtype : p->dtype ? p->dtype : GDELTA_DTYPE_BF16;
    t->data = !s.small ? NULL : zero ? span_memory(flat, unit, actual) : span_memory(extent, t->stride, actual);
    has_memory = has_memory && t->data != NULL;
}

/* A table of which some are as they should be: `count` entries from `first`, rising by `step`. */
static void set_index(gdelta_index *index, int64_t count, int64_t first, int64_t step, int64_t last) {
    if (count < 0 || count > 4096) {
        has_memory = false;
        index->data = address();
        return;
    }
    bool wide_entries = below(2), broken = below(6) == 5;
    index->dtype = wide_entries ? GDELTA_DTYPE_INT64 : below(2) ? GDELTA_DTYPE_INT32 : GDELTA_DTYPE_DEFAULT;
    char *table = allocate((size_t)count * (wide_entries ? 8 : 4));
    for (int64_t i = 0; i < count; ++i) {
        int64_t entry = first + i * step;
        if (entry > last) entry = last;
        if (broken && below(4) == 3) entry = number();
        int32_t narrow = (int32_t)entry;
        memcpy(table + i * (wide_entries ? 8 : 4), wide_entries ? (void *)&entry : (void *)&narrow,
               wide_entries ? 8 : 4);
    }
    index->data = on_host ? table : address();
    if (!on_host && below(2)) index->host = table;
}

static void set_state(gdelta_state *state, const gdelta_problem *p, sizes s, int64_t entries) {
    if (below(8) == 7) state->dtype = below(5);
    if (below(3) == 2) {
        state->slot_count = 1 + below(12);
        set_index(&state->slots, entries, 0, 1, state->slot_count - 1);
        entries = state->slot_count;
    }
    bool vk = p->state_order == GDELTA_STATE_VK;
    int64_t rows = vk ? p->dim_v : p->dim_k, columns = vk ? p->dim_k : p->dim_v;
    const int64_t extent[4] = {entries, s.heads_o, rows, columns};
    int64_t dense[4] = {0, 0, columns, 1};
    dense[1] = s.small ? rows * columns : 1;
    dense[0] = s.small ? dense[1] * s.heads_o : 1;
    if (below(3) == 2) {
        memcpy(state->stride, dense, sizeof dense);
        state->stride[0] += below(5);
    }
    poke(state->stride, sizeof state->stride);
    if (!on_host) {
        state->data = address();
        return;
    }
    const int64_t none[4] = {0};
    bool zero = memcmp(state->stride, none, sizeof none) == 0;
    gdelta_dtype actual = state->dtype ? state->dtype : p->state_dtype ? p->state_dtype : GDELTA_DTYPE_FP32;
    state->data = s.small ? span_memory(extent, zero ? dense : state->stride, actual) : NULL;
    has_memory = has_memory && state->data != NULL;
}

static void set_state_gradient(gdelta_tensor *t, const gdelta_problem *p, sizes s) {
    gdelta_state state = {.data = NULL};
    set_state(&state, p, s, s.sequences);
    t->data = state.data;
    t->dtype = state.dtype;
    memcpy(t->stride, state.stride, sizeof t->stride);
}

typedef union any_args {
    gdelta_forward_args forward;
    gdelta_backward_args backward;
    gdelta_step_args step;
    gdelta_commit_args commit;
} any_args;

static gdelta_dtype gate_type(const gdelta_problem *p) {
    return p->gate_dtype ? p->gate_dtype : GDELTA_DTYPE_FP32;
}

static gdelta_dtype beta_type(const gdelta_problem *p) {
    return p->beta_dtype ? p->beta_dtype : GDELTA_DTYPE_FP32;
}

#define SET_INPUTS(a, p, s)                                                                         \
    do {                                                                                            \
        set_tensor(&(a)->q, p, s, (p)->heads_q, (p)->dim_k, 0);                                     \
        set_tensor(&(a)->k, p, s, (p)->heads_k, (p)->dim_k, 0);                                     \
        set_tensor(&(a)->v, p, s, (p)->heads_v, (p)->dim_v, 0);                                     \
        if (below(8) != 7 || (p)->gate) set_tensor(&(a)->g, p, s, (s).heads_o, 1, gate_type(p));    \
        if (below(8) != 7 || (p)->beta) set_tensor(&(a)->beta, p, s, (s).heads_o, 1, beta_type(p)); \
        if ((p)->gate == GDELTA_GATE_SOFTPLUS) set_vector(&(a)->a_log, p, s);                       \
        if ((p)->gate == GDELTA_GATE_SOFTPLUS && below(2)) set_vector(&(a)->dt_bias, p, s);         \
    } while (0)

static void set_vector(gdelta_tensor *t, const gdelta_problem *p, sizes s) {
    sizes one = s;
    one.packed = false;
    one.sequences = one.tokens = 1;
    set_tensor(t, p, one, s.heads_o, 1, GDELTA_DTYPE_FP32);
}

static void set_record(gdelta_record *r, const gdelta_problem *p, sizes s) {
    set_tensor(&r->k, p, s, p->heads_k, p->dim_k, GDELTA_DTYPE_FP32);
    set_tensor(&r->u, p, s, s.heads_o, p->dim_v, GDELTA_DTYPE_FP32);
    set_tensor(&r->decay, p, s, s.heads_o, 1, GDELTA_DTYPE_FP32);
}

static void set_lengths(gdelta_index *index, const gdelta_problem *p, sizes s) {
    if (!s.packed) return;
    set_index(index, s.sequences < 0 || s.sequences > 4000 ? -1 : s.sequences + 1, 0, below(60), p->total_tokens);
}

static void make_forward(gdelta_forward_args *a, const gdelta_problem *p, sizes s) {
    a->struct_size = sizeof *a;
    SET_INPUTS(a, p, s);
    if (below(8) != 7) set_tensor(&a->o, p, s, s.heads_o, p->dim_v, 0);
    if (below(2)) set_state(&a->initial_state, p, s, s.sequences);
    if (below(2)) set_state(&a->final_state, p, s, s.sequences);
    set_lengths(&a->cu_seqlens, p, s);
    if (below(4) == 3 && s.small) {
        a->checkpoint_interval = 64 * (1 + below(2));
        int64_t each = s.tokens / a->checkpoint_interval;
        set_state(&a->checkpoints, p, s, s.packed ? each : s.sequences * each);
    }
}

static void make_backward(gdelta_backward_args *a, const gdelta_problem *p, sizes s) {
    a->struct_size = sizeof *a;
    SET_INPUTS(a, p, s);
    if (below(2)) set_state(&a->initial_state, p, s, s.sequences);
    set_lengths(&a->cu_seqlens, p, s);
    if (below(8) != 7) set_tensor(&a->d_o, p, s, s.heads_o, p->dim_v, 0);
    if (below(8) != 7) set_tensor(&a->dq, p, s, p->heads_q, p->dim_k, 0);
    if (below(8) != 7) set_tensor(&a->dk, p, s, p->heads_k, p->dim_k, 0);
    if (below(8) != 7) set_tensor(&a->dv, p, s, p->heads_v, p->dim_v, 0);
    if (a->g.data && below(4) != 3) set_tensor(&a->dg, p, s, s.heads_o, 1, gate_type(p));
    if (a->beta.data && below(4) != 3) set_tensor(&a->dbeta, p, s, s.heads_o, 1, beta_type(p));
    if (a->a_log.data && below(2)) set_vector(&a->da_log, p, s);
    if (a->dt_bias.data && below(2)) set_vector(&a->ddt_bias, p, s);
    if (below(4) == 3) set_state_gradient(&a->d_final_state, p, s);
    if (below(4) == 3) set_state_gradient(&a->d_initial_state, p, s);
}

static void make_step(gdelta_step_args *a, const gdelta_problem *p, sizes s) {
    a->struct_size = sizeof *a;
    a->flags = (uint32_t)below(2);
    SET_INPUTS(a, p, s);
    set_tensor(&a->o, p, s, s.heads_o, p->dim_v, 0);
    set_state(&a->state, p, s, s.sequences);
    if (a->flags == 0 && below(2)) set_state(&a->output_state, p, s, s.sequences);
    if (below(2) && s.small) set_state(&a->token_states, p, s, s.rows);
    if (below(2)) set_record(&a->record, p, s);
    if (a->flags && below(2) && s.small) set_index(&a->parents, s.rows, -1, 0, -1);
}

static void make_commit(gdelta_commit_args *a, const gdelta_problem *p, sizes s) {
    a->struct_size = sizeof *a;
    set_record(&a->record, p, s);
    set_index(&a->accepted, s.sequences, 0, 1, p->tokens);
    if (below(4) == 3 && s.small) set_index(&a->parents, s.rows, -1, 0, -1);
    set_state(&a->state, p, s, s.sequences);
    if (below(2)) set_state(&a->output_state, p, s, s.sequences);
}

static void make_args(any_args *args, const gdelta_problem *p, gdelta_operation operation) {
    sizes s = sizes_of(p);
    memset(args, 0, sizeof *args);
    next_address = 0;
    has_memory = s.small;
    if (operation == GDELTA_OPERATION_FORWARD) make_forward(&args->forward, p, s);
    if (operation == GDELTA_OPERATION_BACKWARD) make_backward(&args->backward, p, s);
    if (operation == GDELTA_OPERATION_STEP) make_step(&args->step, p, s);
    if (operation == GDELTA_OPERATION_COMMIT) make_commit(&args->commit, p, s);
}

/* ---- Runs ---- */

static void hold_status(gdelta_status status) {
    HOLD(status == GDELTA_OK || status == GDELTA_ERROR_INVALID_ARGUMENT || status == GDELTA_ERROR_UNSUPPORTED ||
         status == GDELTA_ERROR_WORKSPACE_TOO_SMALL || status == GDELTA_ERROR_OUT_OF_MEMORY);
    HOLD(status == GDELTA_OK || *gdelta_last_error() != '\0');
}

static void run_reference(const gdelta_problem *p, const any_args *args, gdelta_operation operation) {
    sizes s = sizes_of(p);
    if (!has_memory || (wide)(s.rows + s.sequences) * s.heads_o * p->dim_k * p->dim_v > kMostWork) return;
    gdelta_status status;
    if (operation == GDELTA_OPERATION_FORWARD)
        status = gdelta_reference_forward(p, &args->forward);
    else if (operation == GDELTA_OPERATION_BACKWARD)
        status = gdelta_reference_backward(p, &args->backward);
    else if (operation == GDELTA_OPERATION_STEP)
        status = gdelta_reference_step(p, &args->step);
    else
        status = gdelta_reference_commit(p, &args->commit);
    hold_status(status);
}

static gdelta_status launch(const gdelta_plan *plan, const any_args *args, gdelta_operation operation) {
    char *w = device.workspace;
    size_t bytes = device.workspace_bytes;
    if (operation == GDELTA_OPERATION_FORWARD) return gdelta_forward(plan, &args->forward, w, bytes, NULL);
    if (operation == GDELTA_OPERATION_BACKWARD) return gdelta_backward(plan, &args->backward, w, bytes, NULL);
    if (operation == GDELTA_OPERATION_STEP) return gdelta_step(plan, &args->step, w, bytes, NULL);
    return gdelta_commit(plan, &args->commit, w, bytes, NULL);
}

static char *buffer(size_t bytes) {
    if (bytes == 0) return NULL;
    if (!device.real) {
        char *start = address();
        next_address += bytes; /* nothing else lies in it */
        return start;
    }
    void *data;
    HOLD(posix_memalign(&data, 256, bytes) == 0 && block_count < kMostBlocks);
    return blocks[block_count++] = data;
}

/* What gdelta.h says of GDELTA_FLAG_SMALL_WORKSPACE and K, V that the hopper engine takes; 4 KB: alignment. */
static void hold_small(const gdelta_problem *p, size_t bytes) {
    bool tiles = (p->dim_k == 64 || p->dim_k == 128) && (p->dim_v == 64 || p->dim_v == 128);
    int32_t least = p->dim_k + p->dim_v == 256 ? 3 : p->dim_k + p->dim_v == 192 ? 4 : 6;
    if (!(p->flags & GDELTA_FLAG_SMALL_WORKSPACE) || !tiles || p->heads_k < least) return;
    bool packed = p->layout == GDELTA_LAYOUT_THD;
    wide chunks = packed ? p->total_tokens / 64 + (wide)p->sequences : p->batch * (((wide)p->tokens + 63) / 64);
    wide heads = p->heads_q > p->heads_v ? p->heads_q : p->heads_v;
    HOLD(bytes <= 2 * chunks * heads * p->dim_k * p->dim_v * 2 + 4096);
}

/* Sizes of a plan with more tokens or sequences are no smaller. */
static void hold_growth(const gdelta_problem *p, size_t bytes, gdelta_operation operation) {
    gdelta_problem more = *p;
    int64_t *const sizes[] = {&more.batch, &more.tokens, &more.sequences, &more.total_tokens};
    int64_t *size = sizes[below(4)], grown;
    if (*size <= 0 || __builtin_add_overflow(*size, 1 + below(200), &grown)) return;
    *size = grown;
    bool packed = p->layout == GDELTA_LAYOUT_THD;
    wide heads = p->heads_q > p->heads_v ? p->heads_q : p->heads_v;
    wide chunks = packed ? more.total_tokens / 64 + (wide)more.sequences : (wide)more.batch * (more.tokens / 64 + 1);
    if (chunks * heads > INT32_MAX / 2) return; /* near there AUTO leaves the hopper engine, as gdelta.h says */
    gdelta_plan *plan;
    size_t larger;
    if (gdelta_plan_create(&more, &plan) != GDELTA_OK) return;
    if (gdelta_plan_workspace_size(plan, operation, &larger) == GDELTA_OK) HOLD(larger >= bytes);
    gdelta_plan_destroy(plan);
}

static void run_device(const gdelta_problem *p, any_args *args, gdelta_operation operation) {
    gdelta_plan *plan = NULL;
    gdelta_problem before = *p;
    gdelta_status status = gdelta_plan_create(p, &plan);
    hold_status(status);
    HOLD((status == GDELTA_OK) == (plan != NULL) && memcmp(&before, p, sizeof before) == 0);
    HOLD(gdelta_supported(p, operation, 90, NULL) != GDELTA_OK || plan || p->compute_capability);
    if (plan == NULL) return;
    char line[64];
    gdelta_plan_describe(plan, line, sizeof line);
    memset(&device, 0, sizeof device);
    size_t workspace = 0, saved = 0;
    status = gdelta_plan_workspace_size(plan, operation, &workspace);
    hold_status(status);
    HOLD(gdelta_plan_saved_size(plan, &saved) == GDELTA_OK);
    if (status == GDELTA_OK) hold_growth(p, workspace, operation);
    if (operation == GDELTA_OPERATION_BACKWARD) hold_small(p, workspace);
    device.real = workspace <= kMostBytes && saved <= kMostBytes;
    device.automatic = p->engine == GDELTA_ENGINE_AUTO;
    device.problem = p;
    device.backward = &args->backward;
    device.workspace_bytes = workspace;
    device.saved_bytes = saved;
    device.workspace = buffer(workspace);
    device.saved = buffer(saved);
    bool gives_saved = below(2) && saved > 0;
    if (operation == GDELTA_OPERATION_FORWARD && gives_saved) {
        args->forward.saved = device.saved;
        args->forward.saved_bytes = saved;
    }
    if (operation == GDELTA_OPERATION_BACKWARD && saved) {
        args->backward.saved = device.saved;
        args->backward.saved_bytes = saved;
    }
    any_args same = *args;
    status = launch(plan, args, operation);
    hold_status(status);
    HOLD(status == GDELTA_OK || device.launches == 0);
    HOLD(memcmp(&same, args, sizeof same) == 0);
    int32_t outputs = p->heads_q > p->heads_v ? p->heads_q : p->heads_v;
    bool rows = p->layout == GDELTA_LAYOUT_THD ? p->total_tokens > 0 : p->tokens > 0;
    for (int32_t o = 0; operation == GDELTA_OPERATION_BACKWARD && o < outputs && outputs <= kMostHeads; ++o) {
        HOLD(device.seen[o] == (status == GDELTA_OK && rows));
    }
    if (status == GDELTA_OK && workspace > 0) {
        int launches = device.launches;
        device.workspace_bytes = workspace - 1 - byte() % workspace;
        HOLD(launch(plan, args, operation) == GDELTA_ERROR_WORKSPACE_TOO_SMALL && device.launches == launches);
    }
    gdelta_plan_destroy(plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input = data;
    left = size;
    on_host = below(3) == 2;
    gdelta_operation operation = below(4);
    gdelta_problem problem = make_problem(operation);
    any_args args;
    make_args(&args, &problem, operation);
    if (on_host) {
        run_reference(&problem, &args, operation);
    } else {
        run_device(&problem, &args, operation);
    }
    while (block_count > 0) free(blocks[--block_count]);
    return 0;
}
