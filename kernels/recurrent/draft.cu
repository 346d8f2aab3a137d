// Drafts of at most 16 tokens a sequence: a step that leaves the state after every token, or the record of what each
// does to the state, or follows a tree; and the commit, which replays the accepted tokens of a record.
//
// Grid, block and registers as in forward.cu. All rows are staged at once. What a token has done is known by its k, u
// and decay, which stay in shared memory (u takes the place of v): so a token of a tree that does not continue the one
// before it starts again from the initial state, and replays the way from the root. That is what a commit does with k,
// u and decay from memory, and so all three come to the same bits.
#include "kernels/recurrent/forward.cuh"

namespace gdelta {

// Tokens of a staged draft in their order; their u stand in v's place.
template <int Width>
__device__ __forceinline__ void replay(Tile<Width, kForwardLaneColumns> &s, TilePlace p,
                                       const ForwardStage<Width> (&stages)[2], int first_column, TokenSet tokens) {
#pragma unroll 1
    for (; tokens; tokens &= tokens - 1) {
        int t = __ffs(static_cast<int>(tokens)) - 1, r = t % kForwardStage;
        const ForwardStage<Width> &stage = stages[t / kForwardStage];
        float u[kForwardLaneColumns];
        load_columns(stage.v[r], p, first_column, u);
        update_tile(s, p, stage.k[r], u, stage.decay[r]);
    }
}

template <int Width>
__device__ __forceinline__ void load_initial(Tile<Width, kForwardLaneColumns> &s, TilePlace p, const gdelta_inputs &in,
                                             const gdelta_shape &shape, int64_t initial) {
    if (initial >= 0) {
        load_state(s, p, in.initial, initial, shape.dim_k, shape.dim_v);
    } else {
        clear_tile(s);
    }
}

__device__ __forceinline__ float *record_row(const gdelta_view &view, const Sequence &sequence, int t, int head) {
    return static_cast<float *>(view.data) + first_of(view, sequence, head) + t * view.token;
}

template <int Width>
struct Draft {
    const gdelta_draft_call &call;
    const Sequence &sequence;
    int head, first_column;

    // k by the first block of those that read it, decay by the first of the head.
    __device__ __forceinline__ void record_keys(const ForwardStage<Width> (&stages)[2], int length) const {
        const gdelta_shape &shape = call.step.shape;
        int lane = threadIdx.x % 32;
        if (first_column != 0) return;
        bool has_key = reads_first(shape, head, shape.heads_k);
        for (int t = threadIdx.x / 32; t < length; t += blockDim.x / 32) {
            const ForwardStage<Width> &stage = stages[t / kForwardStage];
            if (lane == 0) *record_row(call.record.decay, sequence, t, head) = stage.decay[t % kForwardStage];
            float *k = record_row(call.record.k, sequence, t, head_of(shape, head, shape.heads_k));
            for (int i = lane; has_key && i < shape.dim_k; i += 32) k[i] = stage.k[t % kForwardStage][i];
        }
    }

    __device__ __forceinline__ void record_u(TilePlace p, int t, const float (&u)[kForwardLaneColumns]) const {
        const gdelta_view &view = call.record.u;
        write_columns(view, first_of(view, sequence, head) + t * view.token, p, call.step.shape.dim_v, u);
    }

    __device__ __forceinline__ void keep_state(Tile<Width, kForwardLaneColumns> &s, TilePlace p, int t,
                                               bool reporter) const {
        const gdelta_shape &shape = call.step.shape;
        const gdelta_state_view &view = call.token_states;
        int64_t number = sequence.batch * shape.tokens + t;
        int64_t entry = slot_of(call.step.in, view, number, GDELTA_DEVICE_TOKEN_SLOT_RANGE, reporter);
        if (entry < 0) return;
        store_state(s, p, view, entry * view.slot + head * view.head, shape.dim_k, shape.dim_v);
    }
};

template <int Width>
__global__ void __launch_bounds__(2 * kForwardColumns, Width <= 128 ? 3 : 1)
    recurrent_draft(const __grid_constant__ gdelta_draft_call call) {
    __shared__ __align__(16) ForwardStage<Width> stages[2];
    __shared__ Job at;
    __shared__ TokenSet paths[2 * kForwardStage];
    const gdelta_forward_call &step = call.step;
    const gdelta_shape &shape = step.shape;
    unsigned tiles = static_cast<unsigned>(gdelta_forward_tiles(shape.dim_v)), block = blockIdx.x / tiles;
    Forward<Width> f = {step, at};
    f.first_column = static_cast<int>(blockIdx.x % tiles) * kForwardColumns;
    f.head = static_cast<int>(block % static_cast<unsigned>(shape.heads_o));
    Draft<Width> draft = {call, at.sequence, f.head, f.first_column};
    bool reporter = f.head == 0 && f.first_column == 0;
    int64_t n = block / static_cast<unsigned>(shape.heads_o);
    int length = static_cast<int>(shape.tokens), thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        find_job(shape, step.in, find_sequence(shape, step.in, step.final, n, f.head, reporter), f.head, at);
        at.o = first_of(step.o, at.sequence, f.head);
    }
    __syncthreads();
    bool broken = call.parents.data && thread < length && !at.sequence.skip &&
                  !find_path(shape, step.in, call.parents, n, thread, reporter, &paths[thread]);
    bool skip = __syncthreads_or(broken) || at.sequence.skip;

    TilePlace p = tile_place<f.kColumns>(f.first_column);
    if (skip) {
        float zeros[f.kColumns] = {};
        for (int t = 0; step.o.data && t < length; ++t) f.write(p, t, zeros);
        return;
    }
    Tile<Width, kForwardLaneColumns> s;
    load_initial(s, p, step.in, shape, at.sequence.initial);
    f.stage_all(stages, length);
    __syncthreads();
    if (call.record.u.data) draft.record_keys(stages, length);
#pragma unroll 1
    for (int t = 0; t < length; ++t) {
        ForwardStage<Width> &stage = stages[t / kForwardStage];
        int r = t % kForwardStage;
        if (call.parents.data && t > 0) {
            TokenSet before = paths[t] & ~(1u << t);
            if (before != paths[t - 1]) {
                load_initial(s, p, step.in, shape, at.sequence.initial);
                replay(s, p, stages, f.first_column, before);
            }
        }
        float u[f.kColumns];
        f.token(s, p, stage, r, t, u);
        if (call.parents.data) {
            __syncwarp();  // all lanes have read v, of which a warp reads only its own columns
            if (p.lane_k == 0) store_columns(stage.v[r], p, f.first_column, u);
            __syncwarp();
        }
        if (call.record.u.data) draft.record_u(p, t, u);
        if (call.token_states.data) draft.keep_state(s, p, t, reporter && thread == 0);
    }
    if (at.sequence.final >= 0) store_state(s, p, step.final, at.sequence.final, shape.dim_k, shape.dim_v);
}

// A row of `count` numbers, zero from there on to `size`.
__device__ __forceinline__ void stage_row(float *to, const float *from, int count, int size) {
    for (int i = static_cast<int>(threadIdx.x % 32); i < size; i += 32) to[i] = i < count ? from[i] : 0.0f;
}

template <int Width>
__global__ void __launch_bounds__(2 * kForwardColumns, Width <= 128 ? 4 : 1)
    recurrent_commit(const __grid_constant__ gdelta_commit_call call) {
    __shared__ __align__(16) ForwardStage<Width> stages[2];
    __shared__ Sequence sequence;
    __shared__ TokenSet path;
    const gdelta_shape &shape = call.shape;
    unsigned tiles = static_cast<unsigned>(gdelta_forward_tiles(shape.dim_v)), block = blockIdx.x / tiles;
    int first_column = static_cast<int>(blockIdx.x % tiles) * kForwardColumns;
    int head = static_cast<int>(block % static_cast<unsigned>(shape.heads_o));
    if (threadIdx.x == 0) {
        bool reporter = head == 0 && first_column == 0;
        int64_t n = block / static_cast<unsigned>(shape.heads_o);
        sequence = find_sequence(shape, call.in, call.final, n, head, reporter);
        int64_t accepted = sequence.skip ? 0 : load_index(call.accepted, n);
        if (accepted < 0 || accepted > shape.tokens) {
            if (reporter) report(call.in, GDELTA_DEVICE_ACCEPTED_RANGE, n);
            sequence.skip = true;
        } else if (!find_path(shape, call.in, call.parents, n, static_cast<int>(accepted) - 1, reporter, &path)) {
            sequence.skip = true;
        }
    }
    __syncthreads();
    bool stays = call.final.data == call.in.initial.data && sequence.final == sequence.initial;
    if (sequence.skip || (stays && path == 0)) return;

    TilePlace p = tile_place<kForwardLaneColumns>(first_column);
    Tile<Width, kForwardLaneColumns> s;
    load_initial(s, p, call.in, shape, sequence.initial);
    int head_k = head_of(shape, head, shape.heads_k);
    for (int t = threadIdx.x / 32; t < shape.tokens; t += blockDim.x / 32) {
        if (!(path >> t & 1)) continue;
        ForwardStage<Width> &stage = stages[t / kForwardStage];
        int r = t % kForwardStage;
        stage_row(stage.k[r], record_row(call.record.k, sequence, t, head_k), shape.dim_k, Width);
        stage_row(stage.v[r], record_row(call.record.u, sequence, t, head) + first_column, shape.dim_v - first_column,
                  kForwardColumns);
        if (threadIdx.x % 32 == 0) stage.decay[r] = *record_row(call.record.decay, sequence, t, head);
    }
    __syncthreads();
    replay(s, p, stages, first_column, path);
    store_state(s, p, call.final, sequence.final, shape.dim_k, shape.dim_v);
}

template <typename Call>
static int launch(void (*kernel)(Call), const gdelta_shape &shape, const Call &call, gdelta_stream stream) {
    cudaLaunchConfig_t config = forward_config(shape, stream);
    return cudaLaunchKernelEx(&config, kernel, call);
}

}  // namespace gdelta

int gdelta_launch_recurrent_draft(const gdelta_draft_call *call, gdelta_stream stream) {
    int32_t width = gdelta_recurrent_width(call->step.shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled) return gdelta::launch(gdelta::recurrent_draft<compiled>, call->step.shape, *call, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}

int gdelta_launch_recurrent_commit(const gdelta_commit_call *call, gdelta_stream stream) {
    int32_t width = gdelta_recurrent_width(call->shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled) return gdelta::launch(gdelta::recurrent_commit<compiled>, call->shape, *call, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}
