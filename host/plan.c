#include "host/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "host/device.h"
#include "host/layout.h"
#include "host/status.h"
#include "host/validate.h"
#include "kernels/config.h"

#ifdef GDELTA_HAVE_CUDA
static const int32_t compiled_archs[] = {GDELTA_COMPILED_ARCHS};
#endif

/* Machine code of compute capability x.y runs on x.z for z >= y. */
static gdelta_status check_compiled(int32_t compute_capability) {
#ifdef GDELTA_HAVE_CUDA
    char list[128] = "";
    size_t length = 0;
    for (size_t i = 0; i < sizeof compiled_archs / sizeof *compiled_archs; ++i) {
        int32_t arch = compiled_archs[i];
        if (compute_capability / 10 == arch / 10 && compute_capability >= arch) return GDELTA_OK;
        length += (size_t)snprintf(list + length, length < sizeof list ? sizeof list - length : 0, " %" PRId32, arch);
        if (length >= sizeof list) length = sizeof list - 1;
    }
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED, "compute_capability is %" PRId32 "; this libgdelta was compiled for%s",
                       compute_capability, list);
#else
    (void)compute_capability;
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                       "this libgdelta was built without CUDA; only the CPU reference of reference.h runs");
#endif
}

static gdelta_status check_recurrent(const gdelta_shape *shape) {
    if (shape->dim_k > kRecurrentMaxDim || shape->dim_v > kRecurrentMaxDim) {
        return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                           "dim_k, dim_v are %" PRId32 ", %" PRId32 "; at most %d is supported", shape->dim_k,
                           shape->dim_v, kRecurrentMaxDim);
    }
    int64_t forward = gdelta_forward_tiles(shape->dim_v), backward = gdelta_backward_tiles(shape->dim_k, shape->dim_v);
    int64_t blocks = shape->sequences * shape->heads_o * (forward > backward ? forward : backward);
    if (blocks > INT32_MAX) {
        return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                           "%" PRId64 " sequences of %" PRId32 " heads need %" PRId64
                           " blocks; a CUDA grid has at most 2^31 - 1",
                           shape->sequences, shape->heads_o, blocks);
    }
    return GDELTA_OK;
}

static gdelta_status choose_engine(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_engine *engine) {
    if (problem->engine == GDELTA_ENGINE_HOPPER) {
        return gdelta_fail(GDELTA_ERROR_UNSUPPORTED, "engine is hopper (2); it is not in this version");
    }
    *engine = GDELTA_ENGINE_RECURRENT;
    return check_recurrent(shape);
}

gdelta_status gdelta_supported(const gdelta_problem *problem, gdelta_operation operation, int32_t compute_capability,
                               const char **reason) {
    gdelta_shape shape;
    gdelta_engine engine;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_DEVICE, &shape);
    if (status == GDELTA_OK) status = gdelta_validate_operation(problem, &shape, operation);
    if (status == GDELTA_OK) status = choose_engine(problem, &shape, &engine);
    if (status == GDELTA_OK) status = check_compiled(compute_capability);
    if (reason) *reason = status == GDELTA_OK ? "" : gdelta_last_error();
    return status;
}

gdelta_status gdelta_plan_create(const gdelta_problem *problem, gdelta_plan **plan) {
    if (plan == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
    *plan = NULL;
    gdelta_shape shape;
    gdelta_engine engine;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_DEVICE, &shape);
    if (status == GDELTA_OK) status = choose_engine(problem, &shape, &engine);
    if (status != GDELTA_OK) return status;

    int32_t compute_capability = problem->compute_capability, multiprocessors = problem->multiprocessors;
    if (compute_capability == 0 || multiprocessors == 0) {
        int32_t here, count;
        if (!gdelta_device_query(&here, &count)) here = 90, count = 132;
        if (compute_capability == 0) compute_capability = here;
        if (multiprocessors == 0) multiprocessors = count;
    }

    gdelta_plan *made = calloc(1, sizeof *made);
    if (made == NULL) return gdelta_fail(GDELTA_ERROR_OUT_OF_MEMORY, "no host memory for a plan");
    made->problem = *problem;
    made->shape = shape;
    made->engine = engine;
    made->compute_capability = compute_capability;
    made->multiprocessors = multiprocessors;
    bool saves = problem->save_mode == GDELTA_SAVE_STATES;
    gdelta_workspace_forward(&shape, &made->forward);
    gdelta_workspace_backward(&shape, !saves, &made->backward);
    made->saved_bytes = saves ? gdelta_checkpoint_bytes(&shape) : 0;
    *plan = made;
    return GDELTA_OK;
}

void gdelta_plan_destroy(gdelta_plan *plan) {
    free(plan);
}

size_t gdelta_plan_describe(const gdelta_plan *plan, char *text, size_t size) {
    if (plan == NULL) {
        if (size) *text = '\0';
        return 0;
    }
    const gdelta_problem *p = &plan->problem;
    const gdelta_shape *s = &plan->shape;
    static const char *const layouts[] = {"BSHD", "SBHD", "BHSD", "THD"};
    int length =
        snprintf(text, size,
                 "recurrent: %s N=%" PRId64 " T=%" PRId64 " rows=%" PRId64 " heads=%" PRId32 "/%" PRId32 "/%" PRId32
                 " K=%" PRId32 " V=%" PRId32 " %s, sm_%" PRId32 " x %" PRId32 ", width %" PRId32 ", blocks %" PRId64
                 " forward, %" PRId64 " backward; workspace %zu forward, %zu backward, saved %zu bytes",
                 layouts[p->layout], s->sequences, s->tokens, s->rows, s->heads_q, s->heads_k, s->heads_v, s->dim_k,
                 s->dim_v, gdelta_dtype_name(p->dtype == GDELTA_DTYPE_DEFAULT ? GDELTA_DTYPE_BF16 : p->dtype),
                 plan->compute_capability, plan->multiprocessors, gdelta_recurrent_width(s->dim_k),
                 s->sequences * s->heads_o * gdelta_forward_tiles(s->dim_v),
                 s->sequences * s->heads_o * gdelta_backward_tiles(s->dim_k, s->dim_v), plan->forward.bytes,
                 plan->backward.bytes, plan->saved_bytes);
    return length < 0 ? 0 : (size_t)length;
}

gdelta_status gdelta_plan_workspace_size(const gdelta_plan *plan, gdelta_operation operation, size_t *bytes) {
    if (plan == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
    if (bytes == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    gdelta_status status = gdelta_validate_operation(&plan->problem, &plan->shape, operation);
    if (status != GDELTA_OK) return status;
    *bytes = operation == GDELTA_OPERATION_BACKWARD ? plan->backward.bytes : plan->forward.bytes;
    return GDELTA_OK;
}

gdelta_status gdelta_plan_saved_size(const gdelta_plan *plan, size_t *bytes) {
    if (plan == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
    if (bytes == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    *bytes = plan->saved_bytes;
    return GDELTA_OK;
}
