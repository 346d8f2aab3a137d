// Token recurrence, forward and step: any K, V <= 256, any dtypes and strides, fp32 arithmetic on CUDA cores.
// forward.cuh has the equations and one token.
//
// Grid: x = (sequence, output head, tile of 64 columns of V), the tile fastest. Block: up to 4 warps of 16 columns.
// Each warp owns its columns of S in registers (tile.cuh) from the first token to the last; warps share k, q and the
// gates. A warp finishes a reduction over K by shuffles alone, so blocks meet only once in 8 rows.
//
// Shared memory, two buffers of kForwardStage rows in fp32: q and k (normalised, zero-padded to Width), v
// (zero-padded), and e, beta, <k, q>. While buffer b is worked on, warp w loads rows w, w + warps, ... of the next into
// registers one at a time and stores them to the other: loads fly while tokens are computed. Sequences that fit the two
// buffers (every step) are staged at once instead, by a kernel of fewer registers (Short).
#include "kernels/recurrent/forward.cuh"

namespace gdelta {

// The state after `tokens` tokens, a positive multiple of kRecurrentSegment, for backward and for the caller.
template <int Width>
__device__ __forceinline__ void keep_state(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s,
                                           TilePlace p, int64_t tokens, const gdelta_recurrent_work &work) {
    const gdelta_shape &shape = f.call.shape;
    if (work.checkpoints && tokens < f.at.sequence.length) {
        gdelta_state_view view = {};
        view.dtype = GDELTA_DTYPE_FP32;
        view.data = checkpoint_at(work, shape, f.at.sequence, tokens, f.head);
        store_state(s, p, view, 0, shape.dim_k, shape.dim_v);
    }
    const gdelta_state_view &wanted = f.call.checkpoints;
    if (!wanted.data || tokens % f.call.checkpoint_interval != 0) return;
    int64_t number = checkpoint_number(shape, f.at.sequence, tokens, f.call.checkpoint_interval);
    bool reporter = f.head == 0 && f.first_column == 0 && threadIdx.x == 0;
    int64_t entry = slot_of(f.call.in, wanted, number, GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE, reporter);
    if (entry < 0) return;
    store_state(s, p, wanted, entry * wanted.slot + f.head * wanted.head, shape.dim_k, shape.dim_v);
}

// Whole sequences. While a stage is worked on, the next is fetched.
template <int Width>
__device__ __forceinline__ void run_long(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s, TilePlace p,
                                         ForwardStage<Width> (&stages)[2], const gdelta_recurrent_work &work) {
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int64_t length = f.at.sequence.length;
    ForwardRow<Width> row;
#pragma unroll 1
    for (int r = warp; r < kForwardStage && r < length; r += warps) {
        f.load(r, row);
        f.store(row, stages[0], r);
    }
    for (int64_t start = 0; start <= length; start += kForwardStage) {  // once more where the last stage is full
        __syncthreads();  // this stage is full, and all have left the other
        const ForwardStage<Width> &now = stages[start / kForwardStage % 2];
        ForwardStage<Width> &next = stages[(start / kForwardStage + 1) % 2];
        if (start > 0 && start % kRecurrentSegment == 0) keep_state(f, s, p, start, work);
        int r = 0;
#pragma unroll 1
        for (int ahead = warp; r < kForwardStage; ahead += warps) {
            int64_t t = start + kForwardStage + ahead;
            bool fetch = ahead < kForwardStage && t < length;
            if (fetch) f.load(t, row);
#pragma unroll 1
            for (int end = r + warps; r < end && r < kForwardStage; ++r) {
                float u[f.kColumns];
                if (start + r < length) f.token(s, p, now, r, start + r, u);
            }
            if (fetch) f.store(row, next, ahead);
        }
    }
}

// At most two stages of tokens: all rows at once, no prefetch, and so registers for one block an SM more.
template <int Width>
__device__ __forceinline__ void run_short(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s,
                                          TilePlace p, ForwardStage<Width> (&stages)[2]) {
    int length = static_cast<int>(f.at.sequence.length);
    f.stage_all(stages, length);
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < length; ++r) {
        float u[f.kColumns];
        f.token(s, p, stages[r / kForwardStage], r % kForwardStage, r, u);
    }
}

template <int Width, bool Short>
__global__ void __launch_bounds__(2 * kForwardColumns, Width <= 128 ? (Short ? 4 : 3) : 1)
    recurrent_forward(const __grid_constant__ gdelta_forward_call call,
                      const __grid_constant__ gdelta_recurrent_work work) {
    __shared__ __align__(16) ForwardStage<Width> stages[2];
    __shared__ Job at;
    const gdelta_shape &shape = call.shape;
    if (is_malformed(work.malformed)) return;

    unsigned tiles = static_cast<unsigned>(gdelta_forward_tiles(shape.dim_v)), block = blockIdx.x / tiles;
    Forward<Width> f = {call, at};
    f.first_column = static_cast<int>(blockIdx.x % tiles) * kForwardColumns;
    f.head = static_cast<int>(block % static_cast<unsigned>(shape.heads_o));
    if (threadIdx.x == 0) {
        bool reporter = f.head == 0 && f.first_column == 0;
        int64_t n = block / static_cast<unsigned>(shape.heads_o);
        find_job(shape, call.in, find_sequence(shape, call.in, call.final, n, f.head, reporter), f.head, at);
        at.o = first_of(call.o, at.sequence, f.head);
    }
    __syncthreads();

    TilePlace p = tile_place<f.kColumns>(f.first_column);
    if (at.sequence.skip) {
        float zeros[f.kColumns] = {};
        for (int64_t t = 0; call.o.data && t < at.sequence.length; ++t) f.write(p, t, zeros);
        return;
    }
    Tile<Width, Forward<Width>::kColumns> s;
    if (at.sequence.initial >= 0) {
        load_state(s, p, call.in.initial, at.sequence.initial, shape.dim_k, shape.dim_v);
    } else {
        clear_tile(s);
    }
    if (Short) {
        run_short(f, s, p, stages);
    } else {
        run_long(f, s, p, stages, work);
    }
    if (f.at.sequence.final >= 0) store_state(s, p, call.final, f.at.sequence.final, shape.dim_k, shape.dim_v);
}

template <int Width>
static cudaError_t launch_forward(const gdelta_forward_call &call, const gdelta_recurrent_work &work,
                                  gdelta_stream stream) {
    cudaLaunchConfig_t config = forward_config(call.shape, stream);
    bool is_short = call.shape.tokens <= 2 * kForwardStage;
    return cudaLaunchKernelEx(&config, is_short ? recurrent_forward<Width, true> : recurrent_forward<Width, false>,
                              call, work);
}

}  // namespace gdelta

int gdelta_launch_recurrent_forward(const gdelta_forward_call *call, const gdelta_recurrent_work *work,
                                    gdelta_stream stream) {
    int error = gdelta::launch_check(call->shape, call->in, work->malformed, stream);
    if (error != cudaSuccess) return error;
    int32_t width = gdelta_recurrent_width(call->shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled) return gdelta::launch_forward<compiled>(*call, *work, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}
