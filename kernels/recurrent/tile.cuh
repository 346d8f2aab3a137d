// The state in registers. A warp holds K = Width rows of 4 * Columns columns of V: lane = 4 * lane_k + lane_v holds the
// rows 32 i + 4 lane_k + j (j < 4) and the columns Columns * lane_v + c of its warp. Rows of 4 let k and q come from
// shared memory as 16-byte loads, and make a reduction over lane_v end with one row a lane (sum_columns).
#pragma once

#include "kernels/config.h"
#include "kernels/recurrent/sequence.cuh"

namespace gdelta {

template <int Width, int Columns>
struct Tile {
    static constexpr int kGroups = Width / 32;
    float x[kGroups][4][Columns];
};

struct TilePlace {
    int lane_k, lane_v;
    int column;  // first column of V of this lane
};

template <int Columns>
__device__ __forceinline__ TilePlace tile_place(int first_column) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TilePlace p;
    p.lane_k = lane / kRecurrentLanesV;
    p.lane_v = lane % kRecurrentLanesV;
    p.column = first_column + (warp * kRecurrentLanesV + p.lane_v) * Columns;
    return p;
}

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
    T x[N];
};

template <int Width, int Columns>
__device__ __forceinline__ void clear_tile(Tile<Width, Columns> &s) {
#pragma unroll
    for (int i = 0; i < s.kGroups; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < Columns; ++c) s.x[i][j][c] = 0.0f;
}

// Moves N elements that lie side by side between memory and registers that lie `Step` apart.
template <bool Load, int N, int Step, typename T>
__device__ __forceinline__ void move_pack(float *x, T *at) {
    Pack<T, N> pack;
    if (Load) pack = *reinterpret_cast<Pack<T, N> *>(at);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (Load) x[n * Step] = to_float(pack.x[n]);
        if (!Load) from_float(x[n * Step], &pack.x[n]);
    }
    if (!Load) *reinterpret_cast<Pack<T, N> *>(at) = pack;
}

// Moves between a tile and one head's state at `state`: [K, V], or [V, K] if order says so. All columns (or 4 rows) at
// a time where the address allows, else one by one. Store: Load = false. Outside K x V a load leaves the tile as it is,
// a store writes nothing.
template <bool Load, int Width, int Columns, typename T>
__device__ __forceinline__ void move_tile(Tile<Width, Columns> &s, TilePlace p, T *state, gdelta_state_order order,
                                          int dim_k, int dim_v) {
    bool vk = order == GDELTA_STATE_VK;
    int step_k = vk ? 1 : dim_v, step_v = vk ? dim_k : 1;
    int run = vk ? 4 : Columns;
    bool wide = step_k * step_v % run == 0 && reinterpret_cast<uintptr_t>(state) % (run * sizeof(T)) == 0;
    T *at = state + 4 * p.lane_k * step_k + p.column * step_v;
    int rows = dim_k - 4 * p.lane_k, columns = dim_v - p.column;  // that this lane has
#pragma unroll
    for (int i = 0; i < s.kGroups; ++i, at += 32 * step_k, rows -= 32) {
        if (wide && !vk) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j < rows && columns > 0) move_pack<Load, Columns, 1>(s.x[i][j], at + j * step_k);
            }
        } else if (wide) {
#pragma unroll
            for (int c = 0; c < Columns; ++c) {
                if (rows > 0 && c < columns) move_pack<Load, 4, Columns>(&s.x[i][0][c], at + c * step_v);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < Columns; ++c) {
                    if (j < rows && c < columns) move_pack<Load, 1, 1>(&s.x[i][j][c], at + j * step_k + c * step_v);
                }
        }
    }
}

template <int Width, int Columns>
__device__ __forceinline__ void load_state(Tile<Width, Columns> &s, TilePlace p, const gdelta_state_view &view,
                                           int64_t offset, int dim_k, int dim_v) {
    with_dtype(view.dtype, [&](auto *type) {
        move_tile<true>(s, p, static_cast<decltype(type)>(view.data) + offset, view.order, dim_k, dim_v);
    });
}

template <int Width, int Columns>
__device__ __forceinline__ void store_state(Tile<Width, Columns> &s, TilePlace p, const gdelta_state_view &view,
                                            int64_t offset, int dim_k, int dim_v) {
    with_dtype(view.dtype, [&](auto *type) {
        move_tile<false>(s, p, static_cast<decltype(type)>(view.data) + offset, view.order, dim_k, dim_v);
    });
}

// Where the state after `tokens` tokens (a positive multiple of kRecurrentSegment) of a sequence stands. Sequences
// share the array by their first row: gdelta_checkpoint_bytes says why that fits.
__device__ __forceinline__ float *checkpoint_at(const gdelta_recurrent_work &work, const gdelta_shape &shape,
                                                const Sequence &sequence, int64_t tokens, int head) {
    int64_t index = sequence.row / kRecurrentSegment + tokens / kRecurrentSegment - 1;
    return work.checkpoints + (index * shape.heads_o + head) * shape.dim_k * shape.dim_v;
}

// 4 values of a row vector in shared memory: elements 32 i + 4 lane_k + j.
__device__ __forceinline__ void load_four(const float *row, int i, TilePlace p, float (&x)[4]) {
    float4 pack = *reinterpret_cast<const float4 *>(row + 32 * i + 4 * p.lane_k);
    x[0] = pack.x, x[1] = pack.y, x[2] = pack.z, x[3] = pack.w;
}

// This lane's columns of a vector over V in shared memory.
template <int Columns>
__device__ __forceinline__ void load_columns(const float *row, TilePlace p, int first_column, float (&x)[Columns]) {
    auto pack = *reinterpret_cast<const Pack<float, Columns> *>(row + p.column - first_column);
#pragma unroll
    for (int c = 0; c < Columns; ++c) x[c] = pack.x[c];
}

// 4 rows summed over the 4 lanes along V: lane_v gets row lane_v, so that lane 4 lane_k + lane_v holds element
// 32 i + lane of the group's vector. 3 shuffles.
__device__ __forceinline__ float sum_columns(const float (&x)[4], TilePlace p) {
    bool high = p.lane_v & 2, odd = p.lane_v & 1;
    float a = high ? x[2] : x[0], b = high ? x[3] : x[1];
    a += __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 2);
    b += __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 2);
    float mine = odd ? b : a;
    return mine + __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
}

}  // namespace gdelta
