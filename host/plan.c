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

static gdelta_dtype io_dtype(const gdelta_problem *problem) {
    return problem->dtype == GDELTA_DTYPE_DEFAULT ? GDELTA_DTYPE_BF16 : problem->dtype;
}

/* Can the hopper engine run forward and backward on such a GPU? If not, `why` gets the rest of a sentence; NULL and 0:
 * none is wanted. */
static bool hopper_fits(const gdelta_problem *problem, const gdelta_shape *shape, int32_t compute_capability, char *why,
                        size_t size) {
#ifndef GDELTA_HAVE_HOPPER
    (void)problem, (void)shape, (void)compute_capability;
    snprintf(why, size, "this libgdelta was compiled without sm_90a");
    return false;
#else
    if (compute_capability != 90) {
        snprintf(why, size, "compute_capability is %" PRId32 "; it must be 90", compute_capability);
        return false;
    }
    gdelta_dtype dtype = io_dtype(problem);
    if (dtype != GDELTA_DTYPE_BF16 && dtype != GDELTA_DTYPE_FP16) {
        snprintf(why, size, "dtype is %s; it must be bf16 or fp16", gdelta_dtype_name(dtype));
        return false;
    }
    if (!gdelta_is_hopper_dim(shape->dim_k) || !gdelta_is_hopper_dim(shape->dim_v)) {
#define GDELTA_CASE(dim) " " #dim
        snprintf(why, size,
                 "dim_k, dim_v are %" PRId32 ", %" PRId32 "; each must be one of" GDELTA_HOPPER_DIMS(GDELTA_CASE),
                 shape->dim_k, shape->dim_v);
#undef GDELTA_CASE
        return false;
    }
    int64_t chunks = gdelta_chunk_capacity(shape->sequences, shape->tokens, shape->rows, shape->packed);
    int64_t most = chunks > 2 * shape->sequences ? chunks : 2 * shape->sequences; /* split_v is at most 2 */
    if (most * shape->heads_o > INT32_MAX) {
        snprintf(why, size,
                 "%" PRId64 " chunks of %" PRId32 " heads need too many blocks; a CUDA grid has at most 2^31 - 1", most,
                 shape->heads_o);
        return false;
    }
    return true;
#endif
}

/* Of forward and backward. */
typedef struct engines {
    gdelta_engine forward, backward;
} engines;

static gdelta_status choose_engines(const gdelta_problem *problem, const gdelta_shape *shape,
                                    int32_t compute_capability, engines *engines) {
    if (problem->engine == GDELTA_ENGINE_HOPPER) {
        char why[256];
        engines->forward = engines->backward = GDELTA_ENGINE_HOPPER;
        if (hopper_fits(problem, shape, compute_capability, why, sizeof why)) return GDELTA_OK;
        return gdelta_fail(GDELTA_ERROR_UNSUPPORTED, "engine is hopper (2), but %s", why);
    }
    /* Which engine runs must not follow the length where a text may be cut, for its bits follow the engine. */
    bool any_length = problem->flags & GDELTA_FLAG_BATCH_INVARIANT;
    bool hopper = problem->engine == GDELTA_ENGINE_AUTO && hopper_fits(problem, shape, compute_capability, NULL, 0);
    bool forward = hopper && (any_length || shape->tokens > kHopperMinTokens);
    bool backward = hopper && (any_length || shape->tokens > kHopperBackwardMinTokens);
    /* In backward fp16 adjoints underflow, and a linear gate's gradient next to 0 is lost in roundings (gdelta.h). */
    backward = backward && io_dtype(problem) == GDELTA_DTYPE_BF16 && shape->gate != GDELTA_GATE_LINEAR;
    engines->forward = forward ? GDELTA_ENGINE_HOPPER : GDELTA_ENGINE_RECURRENT;
    engines->backward = backward ? GDELTA_ENGINE_HOPPER : GDELTA_ENGINE_RECURRENT;
    return check_recurrent(shape); /* it has step, and the calls that the other engine cannot take */
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- Blocks along V and segments, by the times of config.h ---- */

/* Nanoseconds of what is along the chunks. */
typedef int64_t prediction(const gdelta_shape *shape, int64_t places, gdelta_hopper_choice choice);

/* Two blocks a multiprocessor, unless each has one for itself. */
static int64_t predict_summaries(int64_t blocks, int64_t places, int64_t chunks, int32_t alone_ns, int32_t paired_ns) {
    return blocks <= places ? chunks * alone_ns : ceil_div(blocks, 2 * places) * chunks * paired_ns;
}

/* And the two kernels' launches. */
static int64_t predict_merge(int32_t segments) {
    return kHopperSegmentsNs + (segments - 1) * kHopperMergeNs;
}

static int64_t predict_forward(const gdelta_shape *shape, int64_t places, gdelta_hopper_choice choice) {
    int64_t jobs = shape->sequences * shape->heads_o;
    int64_t length = ceil_div(ceil_div(shape->tokens, kChunk), choice.segments);
    int32_t chunk_ns = shape->dim_v / kChunk / choice.split_v == 2 ? kHopperChunkNs2 : kHopperChunkNs1;
    int64_t ns = ceil_div(jobs * choice.segments * choice.split_v, places) * length * chunk_ns;
    if (choice.segments == 1) return ns;
    int64_t blocks = jobs * (choice.segments - 1) * ((shape->dim_v + shape->dim_k) / kChunk);
    ns += predict_summaries(blocks, places, length, kHopperSummaryNs1, kHopperSummaryNs2);
    return ns + predict_merge(choice.segments);
}

/* Both directions at once, each with blocks of its own; or device memory's time, if that is longer. Read of a chunk and
 * output head: K, V and X, R; dO, Q, K and X, Z. Written: two states, w and y. A summary reads all but R. */
static int64_t predict_backward(const gdelta_shape *shape, int64_t places, gdelta_hopper_choice choice) {
    enum { kElementBytes = 2 };
    int64_t jobs = shape->sequences * shape->heads_o, k = shape->dim_k, v = shape->dim_v;
    int64_t chunks = gdelta_chunk_capacity(shape->sequences, shape->tokens, shape->rows, shape->packed);
    int64_t length = ceil_div(ceil_div(shape->tokens, kChunk), choice.segments);
    int64_t summary_bytes = kElementBytes * kChunk * (5 * k + 2 * v + kChunk);
    int64_t bytes = summary_bytes + kElementBytes * (kChunk * (2 * v + kChunk) + 2 * k * v);
    int32_t chunk_ns = v / kChunk / choice.split_v == 2 ? kHopperChainNs2 : kHopperChainNs1;
    int64_t ns = larger(ceil_div(2 * jobs * choice.segments * choice.split_v, places) * length * chunk_ns,
                        chunks * shape->heads_o * bytes / kHopperBytesPerNs);
    if (choice.segments == 1) return ns;
    int64_t blocks = jobs * ((choice.segments - 1) * 2 * v + (choice.segments - 2) * k) / kChunk;
    ns += larger(predict_summaries(blocks, places, length, kHopperChainSummaryNs1, kHopperChainSummaryNs2),
                 chunks * shape->heads_o * summary_bytes / kHopperBytesPerNs);
    return ns + predict_merge(choice.segments);
}

/* Whichever is fastest. Segments change bits, so that a plan that promises batch invariance has none. */
static gdelta_hopper_choice choose_blocks(const gdelta_shape *shape, int64_t places, int64_t summaries,
                                          prediction *predict) {
    gdelta_hopper_choice best = {.split_v = 1, .segments = 1}, choice = best;
    int64_t jobs = shape->sequences * shape->heads_o, most = jobs ? 1 + summaries / jobs : 1, least = INT64_MAX;
    for (choice.segments = 1; choice.segments <= most; ++choice.segments) {
        for (choice.split_v = 1; choice.split_v <= shape->dim_v / kChunk; choice.split_v *= 2) {
            int64_t ns = predict(shape, places, choice);
            if (ns < least) least = ns, best = choice;
        }
    }
    return best;
}

gdelta_status gdelta_supported(const gdelta_problem *problem, gdelta_operation operation, int32_t compute_capability,
                               const char **reason) {
    gdelta_shape shape;
    engines engines;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_DEVICE, &shape);
    if (status == GDELTA_OK) status = gdelta_validate_operation(problem, &shape, operation);
    if (status == GDELTA_OK) status = choose_engines(problem, &shape, compute_capability, &engines);
    if (status == GDELTA_OK) status = check_compiled(compute_capability);
    if (reason) *reason = status == GDELTA_OK ? "" : gdelta_last_error();
    return status;
}

gdelta_status gdelta_plan_create(const gdelta_problem *problem, gdelta_plan **plan) {
    if (plan == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
    *plan = NULL;
    gdelta_shape shape;
    engines engines;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_DEVICE, &shape);
    if (status != GDELTA_OK) return status;

    int32_t compute_capability = problem->compute_capability, multiprocessors = problem->multiprocessors;
    if (compute_capability == 0 || multiprocessors == 0) {
        int32_t here, count;
        if (!gdelta_device_query(&here, &count)) here = 90, count = 132;
        if (compute_capability == 0) compute_capability = here;
        if (multiprocessors == 0) multiprocessors = count;
    }
    status = choose_engines(problem, &shape, compute_capability, &engines);
    if (status != GDELTA_OK) return status;

    gdelta_plan *made = calloc(1, sizeof *made);
    if (made == NULL) return gdelta_fail(GDELTA_ERROR_OUT_OF_MEMORY, "no host memory for a plan");
    made->problem = *problem;
    made->shape = shape;
    made->forward_engine = engines.forward;
    made->backward_engine = engines.backward;
    made->compute_capability = compute_capability;
    made->multiprocessors = multiprocessors;
    made->choice = made->backward_choice = (gdelta_hopper_choice){.split_v = 1, .segments = 1};
    bool invariant = problem->flags & GDELTA_FLAG_BATCH_INVARIANT;
    int64_t summaries = invariant ? 0 : gdelta_summary_room(&shape, multiprocessors);
    /* The hopper engine's backward needs nothing saved. A call of AUTO that it cannot take makes its own states, and so
     * do slices: what is saved has all heads side by side. */
    bool small = problem->flags & GDELTA_FLAG_SMALL_WORKSPACE;
    bool saves = problem->save_mode == GDELTA_SAVE_STATES && engines.backward == GDELTA_ENGINE_RECURRENT && !small;
    gdelta_workspace_forward(&shape, &made->step);
    made->forward = made->step;
    if (engines.forward == GDELTA_ENGINE_HOPPER) {
        if (!invariant) made->choice = choose_blocks(&shape, multiprocessors, summaries, predict_forward);
        gdelta_workspace_hopper_forward(&shape, summaries, &made->forward);
    }
    made->slices = small ? gdelta_workspace_slices(&shape) : 1;
    made->slice = gdelta_slice_shape(&shape, made->slices);
    if (problem->engine != GDELTA_ENGINE_HOPPER) gdelta_workspace_backward(&made->slice, !saves, &made->backward);
    if (engines.backward == GDELTA_ENGINE_HOPPER) {
        int64_t room = invariant ? 0 : gdelta_summary_room(&made->slice, multiprocessors);
        if (small) room = smaller(room, gdelta_slice_segments(&made->slice));
        made->backward_choice = choose_blocks(&made->slice, multiprocessors, room, predict_backward);
        gdelta_workspace_hopper_backward(&made->slice, room, &made->backward);
    }
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
    bool hopper = plan->forward_engine == GDELTA_ENGINE_HOPPER;
    bool hopper_backward = plan->backward_engine == GDELTA_ENGINE_HOPPER;
    int64_t jobs = s->sequences * s->heads_o, slice_jobs = s->sequences * plan->slice.heads_o;
    int64_t forward = jobs * (hopper ? plan->choice.split_v * plan->choice.segments : gdelta_forward_tiles(s->dim_v));
    /* Of the kernel that walks along the tokens, in one slice; hopper: one block up, one down. */
    int64_t backward =
        slice_jobs * (hopper_backward ? 2 * plan->backward_choice.split_v * plan->backward_choice.segments
                                      : gdelta_backward_tiles(s->dim_k, s->dim_v));
    char tiles[40], backward_tiles[40] = "recurrent", slices[24] = "";
    if (hopper) {
        snprintf(tiles, sizeof tiles, "split_v %" PRId32 ", segments %" PRId32, plan->choice.split_v,
                 plan->choice.segments);
    } else {
        snprintf(tiles, sizeof tiles, "width %" PRId32, gdelta_recurrent_width(s->dim_k));
    }
    if (hopper_backward) {
        snprintf(backward_tiles, sizeof backward_tiles, "hopper: split_v %" PRId32 ", segments %" PRId32,
                 plan->backward_choice.split_v, plan->backward_choice.segments);
    }
    if (p->flags & GDELTA_FLAG_SMALL_WORKSPACE) snprintf(slices, sizeof slices, ", slices %" PRId32, plan->slices);
    int length = snprintf(text, size,
                          "%s: %s N=%" PRId64 " T=%" PRId64 " rows=%" PRId64 " heads=%" PRId32 "/%" PRId32 "/%" PRId32
                          " K=%" PRId32 " V=%" PRId32 " %s, sm_%" PRId32 " x %" PRId32 ", %s, blocks %" PRId64
                          " forward, %" PRId64 " backward (%s%s); workspace %zu forward, %zu backward, saved %zu bytes",
                          hopper ? "hopper" : "recurrent", layouts[p->layout], s->sequences, s->tokens, s->rows,
                          s->heads_q, s->heads_k, s->heads_v, s->dim_k, s->dim_v, gdelta_dtype_name(io_dtype(p)),
                          plan->compute_capability, plan->multiprocessors, tiles, forward, backward, backward_tiles,
                          slices, plan->forward.bytes, plan->backward.bytes, plan->saved_bytes);
    return length < 0 ? 0 : (size_t)length;
}

gdelta_status gdelta_plan_workspace_size(const gdelta_plan *plan, gdelta_operation operation, size_t *bytes) {
    if (plan == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
    if (bytes == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    gdelta_status status = gdelta_validate_operation(&plan->problem, &plan->shape, operation);
    if (status != GDELTA_OK) return status;
    const gdelta_workspace_table *tables[] = {[GDELTA_OPERATION_FORWARD] = &plan->forward,
                                              [GDELTA_OPERATION_BACKWARD] = &plan->backward,
                                              [GDELTA_OPERATION_STEP] = &plan->step,
                                              [GDELTA_OPERATION_COMMIT] = &plan->step};
    *bytes = tables[operation]->bytes;
    return GDELTA_OK;
}

gdelta_status gdelta_plan_saved_size(const gdelta_plan *plan, size_t *bytes) {
    if (plan == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "plan is NULL");
    if (bytes == NULL) return gdelta_fail(GDELTA_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    *bytes = plan->saved_bytes;
    return GDELTA_OK;
}
