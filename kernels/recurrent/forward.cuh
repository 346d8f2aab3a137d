// What forward, step and draft share: rows of q, k, v on their way from memory to shared memory, and one token.
//
//   with the state S of before the token:   u = beta (v - e S^T k),   S <- e S + k u^T,   e = exp(g)
//                                            o = scale (e S^T q + u <k, q>)
//
// so that S^T k and S^T q are one pass over S and the update is a second: 4 instructions an element and token. Every
// multiplication that could be fused into an addition is written so, for the bits of a state must not depend on the
// kernel that makes it.
#pragma once

#include "kernels/recurrent/tile.cuh"
#include "kernels/rule/gate.cuh"
#include "kernels/rule/norm.cuh"

namespace gdelta {

// Rows staged in shared memory in fp32: q and k normalised and zero-padded to Width, v zero-padded.
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

// S <- e S + k u^T
template <int Width, int Columns>
__device__ __forceinline__ void update_tile(Tile<Width, Columns> &s, TilePlace p, const float *row_k,
                                            const float (&u)[Columns], float e) {
#pragma unroll
    for (int i = 0; i < s.kGroups; ++i) {
        float k[4];
        load_four(row_k, i, p, k);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < Columns; ++c) s.x[i][j][c] = fmaf(k[j], u[c], e * s.x[i][j][c]);
    }
}

// A row over V from element `offset` on. The first four lanes along K write one column each: 16 columns side by side in
// one instruction.
__device__ __forceinline__ void write_columns(const gdelta_view &view, int64_t offset, TilePlace p, int dim_v,
                                              const float (&x)[4]) {
    static_assert(kForwardLaneColumns == 4, "one column to each of four lanes");
    float mine = p.lane_k & 2 ? (p.lane_k & 1 ? x[3] : x[2]) : (p.lane_k & 1 ? x[1] : x[0]);
    int column = p.column + p.lane_k;
    if (p.lane_k >= kForwardLaneColumns || column >= dim_v) return;
    store_element(view.data, view.dtype, offset + column, mine);
}

// A kernel of 4 warps of 16 columns, or of fewer where V is smaller: one block to each sequence, output head and tile.
inline cudaLaunchConfig_t forward_config(const gdelta_shape &shape, gdelta_stream stream) {
    int columns = shape.dim_v < kForwardColumns ? shape.dim_v : kForwardColumns;
    int warp_columns = kRecurrentLanesV * kForwardLaneColumns;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(shape.sequences * shape.heads_o * gdelta_forward_tiles(shape.dim_v));
    config.blockDim = static_cast<unsigned>((columns + warp_columns - 1) / warp_columns * 32);
    config.stream = stream;
    return config;
}

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

    // All rows, of at most two stages.
    __device__ __forceinline__ void stage_all(ForwardStage<Width> (&stages)[2], int length) const {
        int warps = blockDim.x / 32;
#pragma unroll 1
        for (int r = threadIdx.x / 32; r < length; r += warps) {
            ForwardRow<Width> row;
            load(r, row);
            store(row, stages[r / kForwardStage], r % kForwardStage);
        }
    }

    __device__ __forceinline__ void write(TilePlace p, int64_t t, const float (&o)[kColumns]) const {
        write_columns(call.o, at.o + t * call.o.token, p, call.shape.dim_v, o);
    }

    // One token: S, u and o. Every lane along K ends with the sums of its columns.
    __device__ __forceinline__ void token(Tile<Width, kColumns> &s, TilePlace p, const ForwardStage<Width> &stage,
                                          int r, int64_t t, float (&u)[kColumns]) const {
        float sk[kColumns] = {}, sq[kColumns] = {}, v[kColumns];
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
        update_tile(s, p, stage.k[r], u, e);
        float o[kColumns], scale = static_cast<float>(call.shape.scale);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) o[c] = scale * fmaf(e, sum_lanes<28>(sq[c]), u[c] * kq);
        if (call.o.data) write(p, t, o);
    }
};

}  // namespace gdelta
