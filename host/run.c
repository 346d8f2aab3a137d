#include "host/run.h"

#include <inttypes.h>
#include <stdio.h>

#include "host/device.h"
#include "host/layout.h"
#include "host/status.h"
#include "host/tensor_map.h"
#include "kernels/launch.h"

static gdelta_status check_buffer(const char *name, const void *data, size_t bytes, size_t needed) {
    if (bytes < needed) {
        return gdelta_fail(GDELTA_ERROR_WORKSPACE_TOO_SMALL, "%s has %zu bytes; the plan needs %zu", name, bytes,
                           needed);
    }
    if (needed > 0 && data == NULL) {
        return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "%s is NULL; the plan needs %zu bytes", name, needed);
    }
    if ((uintptr_t)data % kWorkspaceAlignment != 0) {
        return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "%s is %p; it must be aligned to %d bytes", name, data,
                           kWorkspaceAlignment);
    }
    return GDELTA_OK;
}

/* The stream's device becomes current, if it is what the plan was made for. */
static gdelta_status enter(const gdelta_plan *plan, gdelta_stream stream, bool *entered) {
    int32_t here;
    gdelta_status status = gdelta_device_enter(stream, &here, entered);
    if (status != GDELTA_OK || here == plan->compute_capability) return status;
    gdelta_device_leave(*entered);
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                       "the stream's device has compute capability %" PRId32 "; this plan was made for %" PRId32, here,
                       plan->compute_capability);
}

/* NULL where the plan asks for no bytes and there are none. */
static void *at(const gdelta_buffers *buffers, size_t offset) {
    return buffers->workspace ? (char *)buffers->workspace + offset : NULL;
}

/* Launchers that were not compiled are not linked either: without CUDA gdelta_device_enter has refused before, and no
 * plan has an engine that is not there. */
#define LAUNCH(launcher, ...) gdelta_device_status(launcher(__VA_ARGS__), #launcher)
#define UNLINKED(launcher, ...) ((void)sizeof launcher(__VA_ARGS__), GDELTA_OK)
#ifdef GDELTA_HAVE_CUDA
#define LAUNCH_RECURRENT LAUNCH
#else
#define LAUNCH_RECURRENT UNLINKED
#endif
#ifdef GDELTA_HAVE_HOPPER
#define LAUNCH_HOPPER LAUNCH
#else
#define LAUNCH_HOPPER UNLINKED
#endif

static gdelta_status run_recurrent(const gdelta_plan *plan, const gdelta_forward_call *call,
                                   const gdelta_buffers *buffers, gdelta_stream stream) {
    gdelta_recurrent_work work = {.checkpoints = plan->saved_bytes ? buffers->saved : NULL};
    if (call->shape.packed) work.malformed = at(buffers, plan->forward.malformed);
    bool entered;
    gdelta_status status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    status = LAUNCH_RECURRENT(gdelta_launch_recurrent_forward, call, &work, stream);
    gdelta_device_leave(entered);
    return status;
}

/* ---- Hopper ---- */

enum { kMapQ, kMapK, kMapV, kInputMaps, kMapOutput = kInputMaps, kMaps };

/* The tensors that the copy engine loads, and `output`: o, which it may store, or d_o, which it loads if it is there.
 */
static void find_mapped(const gdelta_shape *s, const gdelta_inputs *in, const char *name, const gdelta_view *output,
                        gdelta_mapped tensors[kMaps]) {
    tensors[kMapQ] = (gdelta_mapped){"q", &in->q, s->heads_q, s->dim_k};
    tensors[kMapK] = (gdelta_mapped){"k", &in->k, s->heads_k, s->dim_k};
    tensors[kMapV] = (gdelta_mapped){"v", &in->v, s->heads_v, s->dim_v};
    tensors[kMapOutput] = (gdelta_mapped){name, output, s->heads_o, s->dim_v};
}

static bool maps_fit(const gdelta_shape *shape, const gdelta_mapped *tensors, int count, char *why, size_t size) {
    for (int i = 0; i < count; ++i) {
        if (!gdelta_tensor_map_fits(shape, &tensors[i], why, size)) return false;
    }
    return true;
}

static gdelta_status encode_maps(const gdelta_shape *shape, const gdelta_mapped *tensors, int count,
                                 gdelta_tensor_map *const maps[kMaps]) {
    gdelta_status status = GDELTA_OK;
    for (int i = 0; i < count && status == GDELTA_OK; ++i) {
        status = gdelta_tensor_map_encode(shape, &tensors[i], maps[i]);
    }
    return status;
}

static gdelta_hopper_work chunk_work(const gdelta_shape *shape, const gdelta_workspace_table *table,
                                     const gdelta_buffers *buffers) {
    gdelta_hopper_work work = {
        .rows = at(buffers, table->rows),
        .choice = {.split_v = 1, .segments = 1},
    };
    if (shape->packed) work.malformed = at(buffers, table->malformed);
    return work;
}

/* Can the engine run this call? If not, `why` gets the rest of a sentence. */
static bool hopper_forward_fits(const gdelta_forward_call *call, char *why, size_t size) {
    gdelta_mapped tensors[kMaps];
    find_mapped(&call->shape, &call->in, "o", &call->o, tensors);
    return maps_fit(&call->shape, tensors, kInputMaps, why, size);
}

static bool hopper_backward_fits(const gdelta_backward_call *call, char *why, size_t size) {
    if (call->shape.gate == GDELTA_GATE_LINEAR && call->dg.data) {
        snprintf(why, size, "dg.data is %p and gate is linear (1); that gradient is the recurrent engine's",
                 call->dg.data);
        return false;
    }
    gdelta_mapped tensors[kMaps];
    find_mapped(&call->shape, &call->in, "d_o", &call->d_o, tensors);
    return maps_fit(&call->shape, tensors, call->d_o.data ? kMaps : kInputMaps, why, size);
}

static gdelta_status run_hopper_forward(const gdelta_plan *plan, const gdelta_forward_call *call,
                                        const gdelta_buffers *buffers, gdelta_stream stream) {
    gdelta_hopper_work work = chunk_work(&call->shape, &plan->forward, buffers);
    work.choice = plan->choice;
    /* In one pool, a segment could write what the first one may still have to read. */
    const void *initial = call->in.initial.data;
    if (initial && (call->final.data == initial || call->checkpoints.data == initial)) work.choice.segments = 1;
    work.x = at(buffers, plan->forward.x);
    work.z = at(buffers, plan->forward.z);
    work.m = at(buffers, plan->forward.m);
    work.n = at(buffers, plan->forward.n);
    gdelta_hopper_maps maps = {.has_o = 0};
    gdelta_mapped tensors[kMaps];
    find_mapped(&call->shape, &call->in, "o", &call->o, tensors);
    maps.has_o = call->o.data != NULL && call->o.dtype == call->in.q.dtype &&
                 gdelta_tensor_map_fits(&call->shape, &tensors[kMapOutput], NULL, 0);
    bool entered;
    gdelta_status status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    status = encode_maps(&call->shape, tensors, maps.has_o ? kMaps : kInputMaps,
                         (gdelta_tensor_map *[]){&maps.q, &maps.k, &maps.v, &maps.o});
    if (status == GDELTA_OK) status = LAUNCH_HOPPER(gdelta_launch_hopper_forward, call, &work, &maps, stream);
    gdelta_device_leave(entered);
    return status;
}

static gdelta_status run_hopper_backward(const gdelta_plan *plan, const gdelta_backward_call *call,
                                         const gdelta_buffers *buffers, gdelta_stream stream) {
    const gdelta_workspace_table *table = &plan->backward;
    gdelta_hopper_backward_work work = {
        .chunk = chunk_work(&call->shape, table, buffers),
        .s = at(buffers, table->s),
        .ds = at(buffers, table->ds),
        .w = at(buffers, table->w),
        .y = at(buffers, table->y),
        .multiprocessors = plan->multiprocessors,
    };
    work.chunk.choice = plan->backward_choice;
    work.chunk.x = at(buffers, table->x);
    work.chunk.z = at(buffers, table->z);
    work.chunk.r = at(buffers, table->r);
    work.chunk.p = at(buffers, table->p);
    work.chunk.l = at(buffers, table->l);
    work.chunk.m = at(buffers, table->m);
    work.chunk.n = at(buffers, table->n);
    if (call->da_log.data || call->ddt_bias.data) work.parameters = at(buffers, table->parameters);
    gdelta_hopper_backward_maps maps = {0};
    gdelta_mapped tensors[kMaps];
    find_mapped(&call->shape, &call->in, "d_o", &call->d_o, tensors);
    bool entered;
    gdelta_status status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    status = encode_maps(&call->shape, tensors, call->d_o.data ? kMaps : kInputMaps,
                         (gdelta_tensor_map *[]){&maps.q, &maps.k, &maps.v, &maps.d_o});
    if (status == GDELTA_OK) status = LAUNCH_HOPPER(gdelta_launch_hopper_backward, call, &work, &maps, stream);
    gdelta_device_leave(entered);
    return status;
}

/* ---- Operations ---- */

/* The rest of a sentence about a call that an engine named by the caller cannot run. */
static gdelta_status refuse_hopper(const char *why) {
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED, "engine is hopper (2), but %s", why);
}

gdelta_status gdelta_run_forward(const gdelta_plan *plan, const gdelta_forward_call *call,
                                 const gdelta_buffers *buffers, gdelta_stream stream) {
    gdelta_status status = check_buffer("workspace", buffers->workspace, buffers->workspace_bytes, plan->forward.bytes);
    bool saves = plan->saved_bytes > 0 && buffers->saved;
    if (status == GDELTA_OK && buffers->saved) {
        status = check_buffer("saved", buffers->saved, buffers->saved_bytes, plan->saved_bytes);
    }
    if (status != GDELTA_OK) return status;
    /* What is saved is what the recurrent backward reads. Without rows there is nothing to map: states are handed on,
     * which the engines do to the bit alike. */
    if (plan->forward_engine != GDELTA_ENGINE_HOPPER || saves || call->shape.rows == 0) {
        return run_recurrent(plan, call, buffers, stream);
    }
    char why[256];
    if (hopper_forward_fits(call, why, sizeof why)) return run_hopper_forward(plan, call, buffers, stream);
    if (plan->problem.engine == GDELTA_ENGINE_AUTO) return run_recurrent(plan, call, buffers, stream);
    return refuse_hopper(why);
}

gdelta_status gdelta_run_step(const gdelta_plan *plan, const gdelta_draft_call *call, const gdelta_buffers *buffers,
                              gdelta_stream stream) {
    gdelta_status status = check_buffer("workspace", buffers->workspace, buffers->workspace_bytes, plan->step.bytes);
    if (status != GDELTA_OK) return status;
    bool plain = !call->token_states.data && !call->record.u.data && !call->parents.data;
    if (plain) return run_recurrent(plan, &call->step, buffers, stream);
    bool entered;
    status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    status = LAUNCH_RECURRENT(gdelta_launch_recurrent_draft, call, stream);
    gdelta_device_leave(entered);
    return status;
}

gdelta_status gdelta_run_commit(const gdelta_plan *plan, const gdelta_commit_call *call, const gdelta_buffers *buffers,
                                gdelta_stream stream) {
    gdelta_status status = check_buffer("workspace", buffers->workspace, buffers->workspace_bytes, plan->step.bytes);
    bool entered;
    if (status == GDELTA_OK) status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    status = LAUNCH_RECURRENT(gdelta_launch_recurrent_commit, call, stream);
    gdelta_device_leave(entered);
    return status;
}

static gdelta_status run_recurrent_backward(const gdelta_plan *plan, const gdelta_backward_call *call,
                                            const gdelta_buffers *buffers, gdelta_stream stream) {
    const gdelta_workspace_table *table = &plan->backward;
    gdelta_recurrent_work work = {
        .checkpoints = plan->saved_bytes ? buffers->saved : at(buffers, table->checkpoints),
        .dq = at(buffers, table->dq),
        .dk = at(buffers, table->dk),
        .ddecay = at(buffers, table->ddecay),
        .dbeta = at(buffers, table->dbeta),
    };
    if (call->shape.packed) work.malformed = at(buffers, table->malformed);
    if (call->shape.heads_v < call->shape.heads_o) work.dv = at(buffers, table->dv);

    bool entered;
    gdelta_status status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    if (plan->saved_bytes == 0) {
        /* The states that forward did not save: forward again, of the states alone. */
        gdelta_forward_call states = {.shape = call->shape, .in = call->in};
        status = LAUNCH_RECURRENT(gdelta_launch_recurrent_forward, &states, &work, stream);
    }
    if (status == GDELTA_OK) status = LAUNCH_RECURRENT(gdelta_launch_recurrent_backward, call, &work, stream);
    gdelta_device_leave(entered);
    return status;
}

/* ---- Slices of a backward ---- */

/* One of `count`. Interleaved groups lie side by side, so that a slice's heads do. Tiled ones it takes from every
 * count-th head: output head i + count h reads (i + count h) mod Hx = i + count (h mod (Hx / count)), which is head h
 * of the slice reading head h mod (Hx / count). */
typedef struct slice {
    int32_t index, count;
    bool tiled;
} slice;

/* Of a tensor of `heads` whose heads are `stride` elements apart. */
static void slice_heads(slice s, int32_t heads, void **data, int64_t *stride, gdelta_dtype dtype) {
    if (*data == NULL) return;
    int64_t first = s.tiled ? s.index : (int64_t)s.index * (heads / s.count);
    *data = (char *)*data + first * *stride * (int64_t)gdelta_dtype_size(dtype);
    if (s.tiled) *stride *= s.count;
}

static void slice_view(slice s, int32_t heads, gdelta_view *view) {
    slice_heads(s, heads, &view->data, &view->head, view->dtype);
}

static void slice_states(slice s, int32_t heads, gdelta_state_view *view) {
    slice_heads(s, heads, &view->data, &view->head, view->dtype);
}

/* The call of a slice: views start at its heads; all else is the whole call's, tables and sequences too. */
static gdelta_backward_call slice_call(const gdelta_plan *plan, const gdelta_backward_call *call, int32_t index) {
    gdelta_backward_call part = *call;
    if (plan->slices == 1) return part;
    const gdelta_shape *shape = &call->shape;
    slice s = {index, plan->slices, shape->head_map == GDELTA_HEADS_TILED};
    part.shape = plan->slice;
    slice_view(s, shape->heads_q, &part.in.q);
    slice_view(s, shape->heads_q, &part.dq);
    slice_view(s, shape->heads_k, &part.in.k);
    slice_view(s, shape->heads_k, &part.dk);
    slice_view(s, shape->heads_v, &part.in.v);
    slice_view(s, shape->heads_v, &part.dv);
    gdelta_view *of_output[] = {&part.in.g, &part.in.beta, &part.in.a_log, &part.in.dt_bias, &part.d_o,
                                &part.dg,   &part.dbeta,   &part.da_log,   &part.ddt_bias};
    for (size_t i = 0; i < sizeof of_output / sizeof *of_output; ++i) slice_view(s, shape->heads_o, of_output[i]);
    slice_states(s, shape->heads_o, &part.in.initial);
    slice_states(s, shape->heads_o, &part.d_final);
    slice_states(s, shape->heads_o, &part.d_initial);
    return part;
}

/* Slices are aligned where the whole is, but a tiled one's strides are longer: all have the same. */
static bool slices_fit(const gdelta_plan *plan, const gdelta_backward_call *call, char *why, size_t size) {
    gdelta_backward_call first = slice_call(plan, call, 0);
    return hopper_backward_fits(call, why, size) && hopper_backward_fits(&first, why, size);
}

gdelta_status gdelta_run_backward(const gdelta_plan *plan, const gdelta_backward_call *call,
                                  const gdelta_buffers *buffers, gdelta_stream stream) {
    gdelta_status status =
        check_buffer("workspace", buffers->workspace, buffers->workspace_bytes, plan->backward.bytes);
    if (status == GDELTA_OK) status = check_buffer("saved", buffers->saved, buffers->saved_bytes, plan->saved_bytes);
    if (status != GDELTA_OK) return status;
    bool hopper = plan->backward_engine == GDELTA_ENGINE_HOPPER && call->shape.rows > 0; /* as in gdelta_run_forward */
    char why[256];
    if (hopper && !slices_fit(plan, call, why, sizeof why)) {
        if (plan->problem.engine != GDELTA_ENGINE_AUTO) return refuse_hopper(why);
        hopper = false;
    }
    /* A slice's kernels wait for the former's, in the stream or by grid_wait, before they write to the workspace. */
    for (int32_t i = 0; i < plan->slices && status == GDELTA_OK; ++i) {
        gdelta_backward_call part = slice_call(plan, call, i);
        status = hopper ? run_hopper_backward(plan, &part, buffers, stream)
                        : run_recurrent_backward(plan, &part, buffers, stream);
    }
    return status;
}
