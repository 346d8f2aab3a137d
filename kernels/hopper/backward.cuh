// What the kernels of the Hopper backward share: rings of shared memory, hand-over between warpgroups, reads of the row
// table.
#pragma once

#include "kernels/hopper/chunk.cuh"

namespace gdelta {

// Where turn i of a ring is: its slot, and the parity of the slot's phase. Rings of two powers follow from i alone,
// which saves their registers.
template <int Stages>
__device__ __forceinline__ int ring_slot(int i) {
    static_assert((Stages & (Stages - 1)) == 0, "");
    return i % Stages;
}
template <int Stages>
__device__ __forceinline__ uint32_t ring_parity(int i) {
    return i / Stages & 1;
}

template <int Stages>
struct Position {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == Stages) slot = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void wait(uint64_t &barrier, uint32_t parity) {
    mbarrier_wait(shared_address(&barrier), parity);
}
// What this warp wrote to shared memory is ready for tensor cores and bulk copies; `barrier` counts warps.
__device__ __forceinline__ void publish(uint64_t &barrier) {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}
// This warp has read, and what it read may be overwritten; or it wrote, and the reader fences (acquire).
__device__ __forceinline__ void release(uint64_t &barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}
__device__ __forceinline__ void acquire(uint64_t &barrier, uint32_t parity) {
    wait(barrier, parity);
    fence_async_shared();
}

// Elements of a transposed block whose token is not below `count` become 0, be they NaN. `token`: of the lane's first.
__device__ __forceinline__ void mask_tokens(uint32_t (&f)[4], int token, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = token + i / 2 * 8;
        f[i] &= (at < count ? 0xffffu : 0u) | (at + 1 < count ? 0xffff0000u : 0u);
    }
}

// beta of an even token and the next, and of one token.
template <typename T>
__device__ __forceinline__ float2 beta_pair(const float *table, int token) {
    float2 beta = *reinterpret_cast<const float2 *>(&table[kRowGates + 2 * token]);
    return make_float2(Range<T>::kUp * beta.x, Range<T>::kUp * beta.y);
}
template <typename T>
__device__ __forceinline__ float beta_at(const float *table, int token) {
    return Range<T>::kUp * table[kRowGates + token / 2 * 4 + token % 2];
}

// The sequence of a block of hopper_chains.
__device__ __forceinline__ int64_t block_sequence(const gdelta_shape &shape, int tiles) {
    return blockIdx.x / 2 / static_cast<unsigned>(tiles * shape.heads_o);
}

}  // namespace gdelta
