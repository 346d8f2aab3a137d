// The state in registers. A warp holds K = Width rows of 4 * Columns columns of V: lane = 4 * lane_k + lane_v holds the
// rows 32 i + 4 lane_k + j (j < 4) and the columns Columns * lane_v + c of its warp. Rows of 4 let k and q come from
// shared memory as 16-byte loads, and make a reduction over lane_v end with one row a lane (sum_columns).
#pragma once

#include <type_traits>

#include "kernels/config.h"
#include "kernels/launch.h"
#include "kernels/ptx/store.cuh"
#include "kernels/rule/sequence.cuh"

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

// One store of the whole pack.
template <typename T, int N>
__device__ __forceinline__ void store_pack(Pack<T, N> *at, const Pack<T, N> &pack) {
    using Word = std::conditional_t<sizeof pack == 16, uint4, uint2>;
    if constexpr (sizeof pack == sizeof(Word)) {
        Word word;
        memcpy(&word, &pack, sizeof word);
        st_global(at, word);
    } else {
        *at = pack;
    }
}

template <int Width, int Columns>
__device__ __forceinline__ void clear_tile(Tile<Width, Columns> &s) {
#pragma unroll
    for (int i = 0; i < s.kGroups; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < Columns; ++c) s.x[i][j][c] = 0.0f;
}

// One head's state in memory as a lane sees it: [K, V], or [V, K] if Vk. N elements lie side by side, in packs: all
// columns of a row, or 4 rows of a column, where the address allows, else single elements (N = 1).
template <bool Vk, int N, int Width, int Columns, typename T>
struct LanePacks {
    static constexpr int kRows = Vk && N > 1 ? 1 : 4, kColumns = Vk || N == 1 ? Columns : 1;
    T *at;               // this lane's first element
    int step_k, step_v;  // elements
    int rows, columns;   // that lie within K x V from there on

    // Of the head's state at element `offset` of the view.
    static __device__ __forceinline__ LanePacks of(TilePlace p, const gdelta_state_view &view, int64_t offset,
                                                   int dim_k, int dim_v) {
        bool vk = N > 1 ? Vk : view.order == GDELTA_STATE_VK;
        int step_k = vk ? 1 : dim_v, step_v = vk ? dim_k : 1;
        T *at = static_cast<T *>(view.data) + offset + 4 * p.lane_k * step_k + p.column * step_v;
        return {at, step_k, step_v, dim_k - 4 * p.lane_k, dim_v - p.column};
    }

    // `at` walks over the rows: offsets kept for all of them at once spill.
    __device__ __forceinline__ void skip_rows(int count) {
        at += count * step_k;
        rows -= count;
    }
    __device__ __forceinline__ bool inside(int c) const {
        return rows > 0 && c < columns;
    }
    __device__ __forceinline__ auto *pack(int c) const {
        return reinterpret_cast<Pack<T, N> *>(at + c * step_v);
    }
    static __device__ __forceinline__ float &element(Tile<Width, Columns> &s, int i, int j, int c, int n) {
        return Vk ? s.x[i][j + n][c] : s.x[i][j][c + n];
    }
    // Calls f(i, j, c) for each pack, from the first row on.
    template <typename F>
    __device__ __forceinline__ void for_packs(F f) {
#pragma unroll
        for (int i = 0; i < Width / 32; ++i, skip_rows(32 - kRows))
#pragma unroll
            for (int j = 0; j < kRows; ++j, skip_rows(1))
#pragma unroll
                for (int c = 0; c < kColumns; ++c) f(i, j, c);
    }

    // First all loads, then all conversions: else each group of rows waits for its own memory latency. (Measured on an
    // H200, step B = 128, HV = 64: the waits were 37% of all samples.)
    __device__ __forceinline__ void load(Tile<Width, Columns> &s) {
        Pack<T, N> packs[Width / 32][kRows][kColumns];
        for_packs([&](int i, int j, int c) {
            packs[i][j][c] = {};
            if (inside(c)) packs[i][j][c] = *pack(c);
        });
#pragma unroll
        for (int i = 0; i < Width / 32; ++i)
#pragma unroll
            for (int j = 0; j < kRows; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c)
#pragma unroll
                    for (int n = 0; n < N; ++n) element(s, i, j, c, n) = to_float(packs[i][j][c].x[n]);
    }

    __device__ __forceinline__ void store(Tile<Width, Columns> &s) {
        for_packs([&](int i, int j, int c) {
            Pack<T, N> out;
#pragma unroll
            for (int n = 0; n < N; ++n) from_float(element(s, i, j, c, n), &out.x[n]);
            if (inside(c)) store_pack(pack(c), out);
        });
    }
};

// Calls f with packs of what this state's type, order and alignment make possible.
template <int Width, int Columns, typename F>
__device__ __forceinline__ void with_packs(TilePlace p, const gdelta_state_view &view, int64_t offset, int dim_k,
                                           int dim_v, F f) {
    with_dtype(view.dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        bool vk = view.order == GDELTA_STATE_VK;
        int run = vk ? 4 : Columns;
        uintptr_t state = reinterpret_cast<uintptr_t>(static_cast<T *>(view.data) + offset);
        if ((vk ? dim_k : dim_v) % run != 0 || state % (run * sizeof(T)) != 0) {
            f(LanePacks<false, 1, Width, Columns, T>::of(p, view, offset, dim_k, dim_v));
        } else if (vk) {
            f(LanePacks<true, 4, Width, Columns, T>::of(p, view, offset, dim_k, dim_v));
        } else {
            f(LanePacks<false, Columns, Width, Columns, T>::of(p, view, offset, dim_k, dim_v));
        }
    });
}

// Outside K x V a load gives 0 and a store writes nothing.
template <int Width, int Columns>
__device__ __forceinline__ void load_state(Tile<Width, Columns> &s, TilePlace p, const gdelta_state_view &view,
                                           int64_t offset, int dim_k, int dim_v) {
    with_packs<Width, Columns>(p, view, offset, dim_k, dim_v, [&](auto packs) { packs.load(s); });
}

template <int Width, int Columns>
__device__ __forceinline__ void store_state(Tile<Width, Columns> &s, TilePlace p, const gdelta_state_view &view,
                                            int64_t offset, int dim_k, int dim_v) {
    with_packs<Width, Columns>(p, view, offset, dim_k, dim_v, [&](auto packs) { packs.store(s); });
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

// 8 numbers summed over the 8 lanes along K: lane_k gets number lane_k. 7 shuffles; each sum takes the lanes in the
// order of sum_lanes<28>.
__device__ __forceinline__ float sum_rows(const float (&x)[8], TilePlace p) {
    bool high = p.lane_k & 4, middle = p.lane_k & 2, odd = p.lane_k & 1;
    float a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        a[i] = (high ? x[4 + i] : x[i]) + __shfl_xor_sync(0xffffffffu, high ? x[i] : x[4 + i], 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        b[i] = (middle ? a[2 + i] : a[i]) + __shfl_xor_sync(0xffffffffu, middle ? a[i] : a[2 + i], 8);
    }
    return (odd ? b[1] : b[0]) + __shfl_xor_sync(0xffffffffu, odd ? b[0] : b[1], 4);
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
