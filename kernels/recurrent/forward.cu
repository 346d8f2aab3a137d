// Token recurrence, forward and step: any K, V <= 256, any dtypes and strides, fp32 arithmetic on CUDA cores.
//
//   with the state S of before the token:   u = beta (v - e S^T k),   S <- e S + k u^T,   e = exp(g)
//                                            o = scale (e S^T q + u <k, q>)
//
// so that S^T k and S^T q are one pass over S and the update is a second: 4 instructions an element and token.
//
// Grid: x = (sequence, output head, tile of 64 columns of V), the tile fastest. Block: up to 4 warps of 16 columns.
// Each warp owns its columns of S in registers (tile.cuh) from the first token to the last; warps share k, q and the
// gates. A warp finishes a reduction over K by shuffles alone, so blocks meet only once in 8 rows.
//
// Shared memory, two buffers of kForwardStage rows in fp32: q and k (normalised, zero-padded to Width), v
// (zero-padded), and e, beta, <k, q>. While buffer b is worked on, warp w loads rows w, w + warps, ... of the next into
// registers one at a time and stores them to the other: loads fly while tokens are computed. Sequences that fit the two
// buffers (every step) are staged at once instead, by a kernel of fewer registers (Short).
#include "kernels/recurrent/tile.cuh"
#include "kernels/rule/gate.cuh"
#include "kernels/rule/norm.cuh"

namespace gdelta {

template <int Width>
struct ForwardStage {
    float q[kForwardStage][Width];
    float k[kForwardStage][Width];
    float v[kForwardStage][kForwardColumns];
    float decay[kForwardStage], beta[kForwardStage], kq[kForwardStage];
};

// One row in registers on its way to shared memory.
template <int Width>
struct ForwardRow {
    Row<Width / 32> q, k;
    Row<kForwardColumns / 32> v;
    Gates gates;
};

template <int Width>
struct Forward {
    static constexpr int kColumns = kForwardLaneColumns;
    const gdelta_forward_call &call;
    const Job &at;
    int head, first_column;

    __device__ __forceinline__ void load(int64_t t, ForwardRow<Width> &row) const {
        const gdelta_shape &shape = call.shape;
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32;
        row.q.load(in.q.data, in.q.dtype, at.q + t * in.q.token, shape.dim_k, lane);
        row.k.load(in.k.data, in.k.dtype, at.k + t * in.k.token, shape.dim_k, lane);
        row.v.load(in.v.data, in.v.dtype, at.v + t * in.v.token + first_column, shape.dim_v - first_column, lane);
        row.gates.load(in, at.g + t * in.g.token, at.beta + t * in.beta.token);
    }

    __device__ __forceinline__ void store(const ForwardRow<Width> &row, ForwardStage<Width> &stage, int r) const {
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32;
        float q[Width / 32], k[Width / 32], v[kForwardColumns / 32];
        row.q.values(in.q.dtype, q);
        row.k.values(in.k.dtype, k);
        row.v.values(in.v.dtype, v);
        float norm_q = row_norm(call.shape, q), norm_k = row_norm(call.shape, k), kq = 0.0f;
#pragma unroll
        for (int i = 0; i < Width / 32; ++i) {
            kq = fmaf(k[i] * norm_k, q[i] * norm_q, kq);
            stage.q[r][lane + 32 * i] = q[i] * norm_q;
            stage.k[r][lane + 32 * i] = k[i] * norm_k;
        }
#pragma unroll
        for (int i = 0; i < kForwardColumns / 32; ++i) stage.v[r][lane + 32 * i] = v[i];
        kq = sum_lanes<31>(kq);
        if (lane == 0) {
            stage.decay[r] = row.gates.decay(call.shape, in, at.gate);
            stage.beta[r] = row.gates.beta_value(call.shape, in);
            stage.kq[r] = kq;
        }
    }

    // The first four lanes along K write one column each: 16 columns side by side in one instruction.
    __device__ __forceinline__ void write(TilePlace p, int64_t t, const float (&o)[kColumns]) const {
        static_assert(kColumns == 4, "one column to each of four lanes");
        float mine = p.lane_k & 2 ? (p.lane_k & 1 ? o[3] : o[2]) : (p.lane_k & 1 ? o[1] : o[0]);
        int column = p.column + p.lane_k;
        if (p.lane_k >= kColumns || column >= call.shape.dim_v) return;
        const gdelta_view &view = call.o;
        store_element(view.data, view.dtype, at.o + t * view.token + column, mine);
    }

    // One token: S and o. Every lane along K ends with the sums of its columns.
    __device__ __forceinline__ void token(Tile<Width, kColumns> &s, TilePlace p, const ForwardStage<Width> &stage,
                                          int r, int64_t t) const {
        float sk[kColumns] = {}, sq[kColumns] = {}, v[kColumns], u[kColumns];
        load_columns(stage.v[r], p, first_column, v);
        float e = stage.decay[r], beta = stage.beta[r], kq = stage.kq[r];
#pragma unroll
        for (int i = 0; i < s.kGroups; ++i) {
            float k[4], q[4];
            load_four(stage.k[r], i, p, k);
            load_four(stage.q[r], i, p, q);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    sk[c] = fmaf(s.x[i][j][c], k[j], sk[c]);
                    sq[c] = fmaf(s.x[i][j][c], q[j], sq[c]);
                }
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            sk[c] = sum_lanes<28>(sk[c]);
            u[c] = beta * fmaf(-e, sk[c], v[c]);
        }
#pragma unroll
        for (int i = 0; i < s.kGroups; ++i) {
            float k[4];
            load_four(stage.k[r], i, p, k);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) s.x[i][j][c] = fmaf(k[j], u[c], e * s.x[i][j][c]);
        }
        float o[kColumns], scale = static_cast<float>(call.shape.scale);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) o[c] = scale * fmaf(e, sum_lanes<28>(sq[c]), u[c] * kq);
        if (call.o.data) write(p, t, o);
    }
};

// Whole sequences. While a stage is worked on, the next is fetched.
template <int Width>
__device__ __forceinline__ void run_long(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s, TilePlace p,
                                         ForwardStage<Width> (&stages)[2], const gdelta_recurrent_work &work) {
    const gdelta_shape &shape = f.call.shape;
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int64_t length = f.at.sequence.length;
    ForwardRow<Width> row;
#pragma unroll 1
    for (int r = warp; r < kForwardStage && r < length; r += warps) {
        f.load(r, row);
        f.store(row, stages[0], r);
    }
    gdelta_state_view checkpoints = {};
    checkpoints.dtype = GDELTA_DTYPE_FP32;
    for (int64_t start = 0; start < length; start += kForwardStage) {
        __syncthreads();  // this stage is full, and all have left the other
        const ForwardStage<Width> &now = stages[start / kForwardStage % 2];
        ForwardStage<Width> &next = stages[(start / kForwardStage + 1) % 2];
        if (work.checkpoints && start > 0 && start % kRecurrentSegment == 0) {
            checkpoints.data = checkpoint_at(work, shape, f.at.sequence, start, f.head);
            store_state(s, p, checkpoints, 0, shape.dim_k, shape.dim_v);
        }
        int r = 0;
#pragma unroll 1
        for (int ahead = warp; r < kForwardStage; ahead += warps) {
            int64_t t = start + kForwardStage + ahead;
            bool fetch = ahead < kForwardStage && t < length;
            if (fetch) f.load(t, row);
#pragma unroll 1
            for (int end = r + warps; r < end && r < kForwardStage; ++r) {
                if (start + r < length) f.token(s, p, now, r, start + r);
            }
            if (fetch) f.store(row, next, ahead);
        }
    }
}

// At most two stages of tokens: all rows at once, no prefetch, and so registers for one block an SM more.
template <int Width>
__device__ __forceinline__ void run_short(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s,
                                          TilePlace p, ForwardStage<Width> (&stages)[2]) {
    int warps = blockDim.x / 32, length = static_cast<int>(f.at.sequence.length);
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < length; r += warps) {
        ForwardRow<Width> row;
        f.load(r, row);
        f.store(row, stages[r / kForwardStage], r % kForwardStage);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < length; ++r) f.token(s, p, stages[r / kForwardStage], r % kForwardStage, r);
}

template <int Width, bool Short>
__global__ void __launch_bounds__(2 * kForwardColumns, Width <= 128 ? (Short ? 4 : 3) : 1)
    recurrent_forward(const __grid_constant__ gdelta_forward_call call,
                      const __grid_constant__ gdelta_recurrent_work work) {
    __shared__ __align__(16) ForwardStage<Width> stages[2];
    __shared__ Job at;
    const gdelta_shape &shape = call.shape;
    if (is_malformed(work)) return;

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
    const gdelta_shape &shape = call.shape;
    int columns = shape.dim_v < kForwardColumns ? shape.dim_v : kForwardColumns;
    int warp_columns = kRecurrentLanesV * kForwardLaneColumns;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(shape.sequences * shape.heads_o * gdelta_forward_tiles(shape.dim_v));
    config.blockDim = static_cast<unsigned>((columns + warp_columns - 1) / warp_columns * 32);
    config.stream = stream;
    bool is_short = shape.tokens <= 2 * kForwardStage;
    return cudaLaunchKernelEx(&config, is_short ? recurrent_forward<Width, true> : recurrent_forward<Width, false>,
                              call, work);
}

}  // namespace gdelta

int gdelta_launch_recurrent_forward(const gdelta_forward_call *call, const gdelta_recurrent_work *work,
                                    gdelta_stream stream) {
    int error = gdelta::launch_check(call->shape, call->in, *work, stream);
    if (error != cudaSuccess) return error;
    int32_t width = gdelta_recurrent_width(call->shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled) return gdelta::launch_forward<compiled>(*call, *work, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}
