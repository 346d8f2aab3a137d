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
// registers one at a time and stores them to the other: loads fly while tokens are computed.
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

// One raw row in registers on its way to shared memory.
template <int Width>
struct RawRow {
    float q[Width / 32], k[Width / 32], v[kForwardColumns / 32];
    float decay, beta;
};

template <int Width>
struct Forward {
    static constexpr int kColumns = kForwardLaneColumns;
    const gdelta_forward_call &call;
    Sequence sequence;
    int head, first_column;
    GateParameters gate;

    __device__ __forceinline__ void load(int64_t t, RawRow<Width> &row) const {
        const gdelta_shape &shape = call.shape;
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32;
        int64_t batch = sequence.batch, token = sequence.begin + t;
        load_row(in.q.data, in.q.dtype, offset_of(in.q, batch, token, head_of(shape, head, shape.heads_q)), shape.dim_k,
                 lane, row.q);
        load_row(in.k.data, in.k.dtype, offset_of(in.k, batch, token, head_of(shape, head, shape.heads_k)), shape.dim_k,
                 lane, row.k);
        load_row(in.v.data, in.v.dtype,
                 offset_of(in.v, batch, token, head_of(shape, head, shape.heads_v)) + first_column,
                 shape.dim_v - first_column, lane, row.v);
        row.decay = load_decay(shape, in, gate, batch, token, head);
        row.beta = load_beta(shape, in, batch, token, head);
    }

    __device__ __forceinline__ void store(const RawRow<Width> &row, ForwardStage<Width> &stage, int r) const {
        int lane = threadIdx.x % 32;
        float norm_q = row_norm(call.shape, row.q), norm_k = row_norm(call.shape, row.k), kq = 0.0f;
#pragma unroll
        for (int i = 0; i < Width / 32; ++i) {
            float q = row.q[i] * norm_q, k = row.k[i] * norm_k;
            kq = fmaf(k, q, kq);
            stage.q[r][lane + 32 * i] = q;
            stage.k[r][lane + 32 * i] = k;
        }
#pragma unroll
        for (int i = 0; i < kForwardColumns / 32; ++i) stage.v[r][lane + 32 * i] = row.v[i];
        kq = sum_lanes<31>(kq);
        if (lane == 0) {
            stage.decay[r] = row.decay;
            stage.beta[r] = row.beta;
            stage.kq[r] = kq;
        }
    }

    // One token: S and o. Every lane along K ends with the sums of its columns.
    __device__ __forceinline__ void token(Tile<Width, kColumns> &s, TilePlace p, const ForwardStage<Width> &stage,
                                          int r, float scale, float (&o)[kColumns]) const {
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
#pragma unroll
        for (int c = 0; c < kColumns; ++c) o[c] = scale * fmaf(e, sum_lanes<28>(sq[c]), u[c] * kq);
    }

    // The first four lanes along K write one column each: 16 columns side by side in one instruction.
    __device__ __forceinline__ void write(TilePlace p, int64_t t, const float (&o)[kColumns]) const {
        static_assert(kColumns == 4, "one column to each of four lanes");
        float mine = p.lane_k & 2 ? (p.lane_k & 1 ? o[3] : o[2]) : (p.lane_k & 1 ? o[1] : o[0]);
        int column = p.column + p.lane_k;
        if (p.lane_k >= kColumns || column >= call.shape.dim_v) return;
        const gdelta_view &view = call.o;
        store_element(view.data, view.dtype, offset_of(view, sequence.batch, sequence.begin + t, head) + column, mine);
    }
};

template <int Width>
__global__ void __launch_bounds__(2 * kForwardColumns)
    recurrent_forward(const __grid_constant__ gdelta_forward_call call,
                      const __grid_constant__ gdelta_recurrent_work work) {
    __shared__ __align__(16) ForwardStage<Width> stages[2];
    const gdelta_shape &shape = call.shape;
    if (is_malformed(work)) return;

    int tiles = gdelta_forward_tiles(shape.dim_v);
    int64_t block = blockIdx.x / tiles;
    Forward<Width> f = {call};
    f.first_column = static_cast<int>(blockIdx.x % tiles) * kForwardColumns;
    f.head = static_cast<int>(block % shape.heads_o);
    bool reporter = f.head == 0 && f.first_column == 0 && threadIdx.x == 0;
    f.sequence = find_sequence(shape, call.in, call.final, block / shape.heads_o, f.head, reporter);
    f.gate = load_gate_parameters(call.in, f.head);

    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    TilePlace p = tile_place<f.kColumns>(f.first_column);
    int64_t length = f.sequence.length;
    if (f.sequence.skip) {
        float zeros[f.kColumns] = {};
        for (int64_t t = 0; call.o.data && t < length; ++t) f.write(p, t, zeros);
        return;
    }

    Tile<Width, Forward<Width>::kColumns> s;
    clear_tile(s);
    if (f.sequence.initial >= 0) load_state(s, p, call.in.initial, f.sequence.initial, shape.dim_k, shape.dim_v);

    RawRow<Width> row;
    for (int r = warp; r < kForwardStage && r < length; r += warps) {
        f.load(r, row);
        f.store(row, stages[0], r);
    }
    float scale = static_cast<float>(shape.scale);
    gdelta_state_view checkpoints = {};
    for (int64_t start = 0; start < length; start += kForwardStage) {
        __syncthreads();  // this stage is full, and all have left the other
        const ForwardStage<Width> &now = stages[start / kForwardStage % 2];
        ForwardStage<Width> &next = stages[(start / kForwardStage + 1) % 2];
        if (work.checkpoints && start > 0 && start % kRecurrentSegment == 0) {
            checkpoints.data = checkpoint_at(work, shape, f.sequence, start, f.head);
            checkpoints.dtype = GDELTA_DTYPE_FP32;
            store_state(s, p, checkpoints, 0, shape.dim_k, shape.dim_v);
        }
        int r = 0;
        for (int ahead = warp; r < kForwardStage; ahead += warps) {
            int64_t t = start + kForwardStage + ahead;
            bool fetch = ahead < kForwardStage && t < length;
            if (fetch) f.load(t, row);
            for (int end = r + warps; r < end && r < kForwardStage; ++r) {
                if (start + r >= length) continue;
                float o[f.kColumns];
                f.token(s, p, now, r, scale, o);
                if (call.o.data) f.write(p, start + r, o);
            }
            if (fetch) f.store(row, next, ahead);
        }
    }
    if (f.sequence.final >= 0) store_state(s, p, call.final, f.sequence.final, shape.dim_k, shape.dim_v);
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
    return cudaLaunchKernelEx(&config, recurrent_forward<Width>, call, work);
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
