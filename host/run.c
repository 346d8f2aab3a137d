#include "host/run.h"

#include <inttypes.h>

#include "host/device.h"
#include "host/status.h"
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

static void *at(const gdelta_buffers *buffers, size_t offset) {
    return (char *)buffers->workspace + offset;
}

#ifdef GDELTA_HAVE_CUDA
#define LAUNCH(launcher, call, work, stream) gdelta_device_status(launcher(call, work, stream), #launcher)
#else /* no kernels are linked, and gdelta_device_enter has refused */
#define LAUNCH(launcher, call, work, stream) ((void)(call), (void)(work), (void)(stream), GDELTA_OK)
#endif

gdelta_status gdelta_run_forward(const gdelta_plan *plan, const gdelta_forward_call *call,
                                 const gdelta_buffers *buffers, gdelta_stream stream) {
    gdelta_status status = check_buffer("workspace", buffers->workspace, buffers->workspace_bytes, plan->forward.bytes);
    if (status == GDELTA_OK && buffers->saved) {
        status = check_buffer("saved", buffers->saved, buffers->saved_bytes, plan->saved_bytes);
    }
    if (status != GDELTA_OK) return status;
    gdelta_recurrent_work work = {.checkpoints = plan->saved_bytes ? buffers->saved : NULL};
    if (call->shape.packed) work.malformed = at(buffers, plan->forward.malformed);

    bool entered;
    status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    status = LAUNCH(gdelta_launch_recurrent_forward, call, &work, stream);
    gdelta_device_leave(entered);
    return status;
}

gdelta_status gdelta_run_backward(const gdelta_plan *plan, const gdelta_backward_call *call,
                                  const gdelta_buffers *buffers, gdelta_stream stream) {
    const gdelta_workspace_table *table = &plan->backward;
    gdelta_status status = check_buffer("workspace", buffers->workspace, buffers->workspace_bytes, table->bytes);
    if (status == GDELTA_OK) status = check_buffer("saved", buffers->saved, buffers->saved_bytes, plan->saved_bytes);
    if (status != GDELTA_OK) return status;
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
    status = enter(plan, stream, &entered);
    if (status != GDELTA_OK) return status;
    if (plan->saved_bytes == 0) {
        /* The states that forward did not save: forward again, of the states alone. */
        gdelta_forward_call states = {.shape = call->shape, .in = call->in};
        status = LAUNCH(gdelta_launch_recurrent_forward, &states, &work, stream);
    }
    if (status == GDELTA_OK) status = LAUNCH(gdelta_launch_recurrent_backward, call, &work, stream);
    gdelta_device_leave(entered);
    return status;
}
