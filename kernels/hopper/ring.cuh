// What warpgroups that pass tiles on to each other share: rings of shared memory, hand-over by barriers, rows past the
// end, a state's fragments in memory.
#pragma once

#include "kernels/hopper/chunk.cuh"

namespace gdelta {

// Where turn i of a ring is: its slot, and the parity of the slot's phase. Sizes are powers of two, so that both
// follow from i alone, which saves their registers.
template <int Stages>
__device__ __forceinline__ int ring_slot(int i) {
    static_assert((Stages & (Stages - 1)) == 0, "");
    return i % Stages;
}
template <int Stages>
__device__ __forceinline__ uint32_t ring_parity(int i) {
    return i / Stages & 1;
}

__device__ __forceinline__ void wait(uint64_t &barrier, uint32_t parity) {
    mbarrier_wait(shared_address(&barrier), parity);
}
// Arrivals of a warp and of a warpgroup at a barrier. After __syncwarp one lane speaks for its warp; racecheck takes
// that to order the one lane's accesses alone, so every lane arrives for it.
#ifdef GDELTA_RACECHECK
constexpr uint32_t kWarp = 32, kWarpgroup = 4 * kWarp;
#else
constexpr uint32_t kWarp = 1, kWarpgroup = 4 * kWarp;
#endif
// This warp has read, and what it read may be overwritten; or it wrote, and the reader fences (acquire).
__device__ __forceinline__ void release(uint64_t &barrier) {
    __syncwarp();
    if (threadIdx.x % (32 / kWarp) == 0) mbarrier_arrive(shared_address(&barrier));
}
// What this warp wrote to shared memory is ready for tensor cores and bulk copies.
__device__ __forceinline__ void publish(uint64_t &barrier) {
    fence_async_shared();
    release(barrier);
}
__device__ __forceinline__ void acquire(uint64_t &barrier, uint32_t parity) {
    wait(barrier, parity);
    fence_async_shared();
}

// One thread: keeps a ring of two places full, `count` turns. bring(slot, barrier, turn) starts copies of `bytes`.
template <typename F>
__device__ __forceinline__ void feed(int count, uint64_t (&full)[2], uint64_t (&empty)[2], uint32_t bytes, F bring) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        int slot = ring_slot<2>(i);
        wait(empty[slot], ring_parity<2>(i) ^ 1);
        mbarrier_arrive_expect(shared_address(&full[slot]), bytes);
        bring(slot, full[slot], i);
    }
}

// Elements of a transposed block whose token is not below `count` become 0, be they NaN. `token`: of the lane's first.
__device__ __forceinline__ void mask_tokens(uint32_t (&f)[4], int token, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = token + i / 2 * 8;
        f[i] &= (at < count ? 0xffffu : 0u) | (at + 1 < count ? 0xffff0000u : 0u);
    }
}

// f(i, offset): element i of a lane's fragment of S^T and its offset in the state's memory.
template <int PanelsK, typename F>
__device__ __forceinline__ void for_state(const gdelta_state_view &view, int dim_v, int column, F f) {
    const Lane p = lane_of_warpgroup();
    constexpr int kDim = 64 * PanelsK;
    int along_k = view.order == GDELTA_STATE_VK ? 1 : dim_v, along_v = view.order == GDELTA_STATE_VK ? kDim : 1;
#pragma unroll
    for (int i = 0; i < 32 * PanelsK; ++i) {
        int k = i / 4 * 8 + p.column + i % 2, v = column + p.row + 8 * (i / 2 % 2);
        f(i, k * along_k + v * along_v);
    }
}

// put(i, x): a lane's elements of S^T from memory; without an offset zeros, or the identity's.
template <int PanelsK, typename F>
__device__ __forceinline__ void load_columns(const gdelta_state_view &view, int64_t offset, bool identity, int dim_v,
                                             int column, F put) {
    if (identity || offset < 0) {
        const Lane p = lane_of_warpgroup();
#pragma unroll
        for (int i = 0; i < 32 * PanelsK; ++i) {
            int k = i / 4 * 8 + p.column + i % 2, v = column + p.row + 8 * (i / 2 % 2);
            put(i, identity && k == v ? 1.0f : 0.0f);
        }
        return;
    }
    with_dtype(view.dtype, [&](auto *type) {
        const auto *from = static_cast<decltype(type)>(view.data) + offset;
        for_state<PanelsK>(view, dim_v, column, [&](int i, int at) { put(i, to_float(from[at])); });
    });
}

// And to memory, get(i).
template <int PanelsK, typename F>
__device__ __forceinline__ void store_columns(const gdelta_state_view &view, int64_t offset, int dim_v, int column,
                                              F get) {
    with_dtype(view.dtype, [&](auto *type) {
        auto *to = static_cast<decltype(type)>(view.data) + offset;
        for_state<PanelsK>(view, dim_v, column, [&](int i, int at) { from_float(get(i), to + at); });
    });
}

// S as operand.
template <typename T, int N>
__device__ __forceinline__ void pack_state(const float (&s)[2 * N], uint32_t (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = pack<T>(Range<T>::kDown * s[2 * i], Range<T>::kDown * s[2 * i + 1]);
}

// Fragments of a warp's 16 rows, in blocks of 16 columns, to the panels from `tile` on, `next` bytes apart.
template <int N>
__device__ __forceinline__ void put_blocks(uint32_t tile, Lane p, const uint32_t (&f)[N], uint32_t next = kPanelBytes) {
#pragma unroll
    for (int b = 0; b < N / 4; ++b) {
        stmatrix_x4(block_at(tile + b / 4 * next, p, b % 4), f[4 * b], f[4 * b + 1], f[4 * b + 2], f[4 * b + 3]);
    }
}

// Those of a panel's transpose.
__device__ __forceinline__ void get_blocks_trans(uint32_t panel, Lane p, uint32_t (&f)[16]) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        ldmatrix_x4_trans(block_at_trans(panel, p, b), reinterpret_cast<uint32_t(&)[4]>(f[4 * b]));
    }
}

}  // namespace gdelta
