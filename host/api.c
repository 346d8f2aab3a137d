/* The public entry points: check, then run. */
#include "host/run.h"
#include "host/status.h"
#include "host/validate.h"

int32_t gdelta_version(void) {
    return GDELTA_VERSION_MAJOR * 10000 + GDELTA_VERSION_MINOR * 100 + GDELTA_VERSION_PATCH;
}

static gdelta_status check_plan(const gdelta_plan *plan) {
    return plan ? GDELTA_OK : gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
}

gdelta_status gdelta_forward(const gdelta_plan *plan, const gdelta_forward_args *args, void *workspace, size_t bytes,
                             gdelta_stream stream) {
    gdelta_forward_call call;
    gdelta_status status = check_plan(plan);
    if (status == GDELTA_OK) {
        status = gdelta_validate_forward(&plan->problem, &plan->shape, GDELTA_PLACE_DEVICE, args, &call);
    }
    if (status != GDELTA_OK) return status;
    gdelta_buffers buffers = {workspace, bytes, args->saved, args->saved_bytes};
    return gdelta_run_forward(plan, &call, &buffers, stream);
}

gdelta_status gdelta_backward(const gdelta_plan *plan, const gdelta_backward_args *args, void *workspace, size_t bytes,
                              gdelta_stream stream) {
    gdelta_backward_call call;
    gdelta_status status = check_plan(plan);
    if (status == GDELTA_OK) {
        status = gdelta_validate_backward(&plan->problem, &plan->shape, GDELTA_PLACE_DEVICE, args, &call);
    }
    if (status != GDELTA_OK) return status;
    gdelta_buffers buffers = {workspace, bytes, (void *)args->saved, args->saved_bytes};
    return gdelta_run_backward(plan, &call, &buffers, stream);
}

gdelta_status gdelta_step(const gdelta_plan *plan, const gdelta_step_args *args, void *workspace, size_t bytes,
                          gdelta_stream stream) {
    gdelta_draft_call call;
    gdelta_status status = check_plan(plan);
    if (status == GDELTA_OK) {
        status = gdelta_validate_step(&plan->problem, &plan->shape, GDELTA_PLACE_DEVICE, args, &call);
    }
    if (status != GDELTA_OK) return status;
    gdelta_buffers buffers = {.workspace = workspace, .workspace_bytes = bytes};
    return gdelta_run_step(plan, &call, &buffers, stream);
}

gdelta_status gdelta_commit(const gdelta_plan *plan, const gdelta_commit_args *args, void *workspace, size_t bytes,
                            gdelta_stream stream) {
    gdelta_commit_call call;
    gdelta_status status = check_plan(plan);
    if (status == GDELTA_OK) {
        status = gdelta_validate_commit(&plan->problem, &plan->shape, GDELTA_PLACE_DEVICE, args, &call);
    }
    if (status != GDELTA_OK) return status;
    gdelta_buffers buffers = {.workspace = workspace, .workspace_bytes = bytes};
    return gdelta_run_commit(plan, &call, &buffers, stream);
}
