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
__device__ __forceinline__ void replay(Tile<Width, kForwardLaneColumns> &s, TilePlace p, const StagedRow<Width> *rows,
                                       int first_column, TokenSet tokens) {
#pragma unroll 1
    for (; tokens; tokens &= tokens - 1) {
        const StagedRow<Width> &row = rows[__ffs(static_cast<int>(tokens)) - 1];
        float u[kForwardLaneColumns];
        load_columns(row.v, p, first_column, u);
        update_tile(s, p, row.k, u, row.decay);
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
    __device__ __forceinline__ void record_keys(const StagedRow<Width> *rows, int length) const {
        const gdelta_shape &shape = call.step.shape;
        int lane = threadIdx.x % 32;
        if (first_column != 0) return;
        bool has_key = reads_first(shape, head, shape.heads_k);
        for (int t = threadIdx.x / 32; t < length; t += blockDim.x / 32) {
            if (lane == 0) *record_row(call.record.decay, sequence, t, head) = rows[t].decay;
            float *k = record_row(call.record.k, sequence, t, head_of(shape, head, shape.heads_k));
            for (int i = lane; has_key && i < shape.dim_k; i += 32) k[i] = rows[t].k[i];
        }
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
    recurrent_draft(const __grid_constant__ gdelta_draft_call call, unsigned tiles) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto *rows = reinterpret_cast<StagedRow<Width> *>(shared);
    __shared__ TokenSet paths[2 * kForwardStage];
    __shared__ Job at;
    const gdelta_forward_call &step = call.step;
    const gdelta_shape &shape = step.shape;
    wait_for_grids();
    BlockPlace block = block_place(shape, tiles);
    Job early;
    Forward<Width> f = {step, at, block.head, block.first_column};
    find_rows(shape, step.in, find_sequence(shape, step.in, step.final, block.n, f.head, block.reporter), f.head,
              early);
    early.o = first_of(step.o, early.sequence, f.head);
    if (threadIdx.x == 0) at = early;
    Draft<Width> draft = {call, at.sequence, f.head, f.first_column};
    int length = static_cast<int>(shape.tokens), thread = static_cast<int>(threadIdx.x);
    bool reporter = f.head == 0 && f.first_column == 0;
    bool broken = call.parents.data && thread < length && !early.sequence.skip &&
                  !find_path(shape, step.in, call.parents, block.n, thread, reporter, &paths[thread]);
    bool skip = __syncthreads_or(broken) || early.sequence.skip;

    TilePlace p = tile_place<f.kColumns>(f.first_column);
    if (skip) {
        for (int t = 0; t < length; ++t) f.write_o(p, t, 0.0f);
        return;
    }
    Tile<Width, kForwardLaneColumns> s;
    f.stage_rows(early, rows, length, [&] { load_initial(s, p, step.in, shape, early.sequence.initial); });
    __syncthreads();
    if (call.record.u.data) draft.record_keys(rows, length);
#pragma unroll 1
    for (int t = 0; t < length; ++t) {
        StagedRow<Width> &row = rows[t];
        if (call.parents.data && t > 0) {
            TokenSet before = paths[t] & ~(1u << t);
            if (before != paths[t - 1]) {
                load_initial(s, p, step.in, shape, at.sequence.initial);
                replay(s, p, rows, f.first_column, before);
            }
        }
        float u = f.token(s, p, row, t);
        if (call.parents.data) {
            __syncwarp();  // all lanes have read v, of which a warp reads only its own columns
            if (p.lane_k < kForwardLaneColumns) row.v[p.column - f.first_column + p.lane_k] = u;
            __syncwarp();
        }
        if (call.record.u.data) {
            const gdelta_view &view = call.record.u;
            f.write(view, first_of(view, at.sequence, f.head) + t * view.token, p, u);
        }
        if (call.token_states.data) draft.keep_state(s, p, t, block.reporter);
    }
    if (at.sequence.final >= 0) store_state(s, p, step.final, at.sequence.final, shape.dim_k, shape.dim_v);
}

// A row of `count` numbers, zero from there on to `size`.
__device__ __forceinline__ void stage_row(float *to, const float *from, int count, int size) {
    for (int i = static_cast<int>(threadIdx.x % 32); i < size; i += 32) to[i] = i < count ? from[i] : 0.0f;
}

template <int Width>
__global__ void __launch_bounds__(2 * kForwardColumns, Width <= 128 ? 4 : 1)
    recurrent_commit(const __grid_constant__ gdelta_commit_call call, unsigned tiles) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto *rows = reinterpret_cast<StagedRow<Width> *>(shared);
    __shared__ Sequence sequence;
    __shared__ TokenSet path;
    const gdelta_shape &shape = call.shape;
    wait_for_grids();
    BlockPlace block = block_place(shape, tiles);
    int head = block.head, first_column = block.first_column;
    if (threadIdx.x == 0) {
        bool reporter = block.reporter;
        int64_t n = block.n;
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
        StagedRow<Width> &row = rows[t];
        stage_row(row.k, record_row(call.record.k, sequence, t, head_k), shape.dim_k, Width);
        stage_row(row.v, record_row(call.record.u, sequence, t, head) + first_column, shape.dim_v - first_column,
                  kForwardColumns);
        if (threadIdx.x % 32 == 0) row.decay = *record_row(call.record.decay, sequence, t, head);
    }
    __syncthreads();
    replay(s, p, rows, first_column, path);
    store_state(s, p, call.final, sequence.final, shape.dim_k, shape.dim_v);
}

template <int Width, typename Call>
static int launch(void (*kernel)(Call, unsigned), const gdelta_shape &shape, const Call &call, gdelta_stream stream) {
    size_t bytes = static_cast<size_t>(shape.tokens) * sizeof(StagedRow<Width>);
    Launch launch(shape, warps_of(shape, kForwardColumns), bytes, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, call, launch.tiles);
}

}  // namespace gdelta

int gdelta_launch_recurrent_draft(const gdelta_draft_call *call, gdelta_stream stream) {
    int32_t width = gdelta_recurrent_width(call->step.shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled)    \
        return gdelta::launch<compiled>(gdelta::recurrent_draft<compiled>, call->step.shape, *call, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}

int gdelta_launch_recurrent_commit(const gdelta_commit_call *call, gdelta_stream stream) {
    int32_t width = gdelta_recurrent_width(call->shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled)    \
        return gdelta::launch<compiled>(gdelta::recurrent_commit<compiled>, call->shape, *call, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}
