// Barriers and fences of shared memory (PTX ISA, "Parallel Synchronization and Communication Instructions": mbarrier,
// barrier, fence; setmaxnreg under "Miscellaneous Instructions"). All of them order memory, hence the clobbers.
#pragma once

#include <cstdint>

namespace gdelta {

// The address of a shared variable in the shared window.
__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// mbarrier.init: `count` arrivals complete a phase. Then fence_barrier_init and a block-wide barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns once the phase of this parity is complete. try_wait sleeps for a time that the hardware chooses.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// bar.sync: `threads` threads, whole warps, meet at barrier `id` (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for all warps of a one-dimensional block, from different places of the code, which __syncthreads does not
// promise. The count is read here, for the compiler would keep it in a register throughout.
__device__ __forceinline__ void block_barrier(int id) {
    asm volatile(
        "{\n"
        ".reg .u32 threads;\n"
        "mov.u32 threads, %%ntid.x;\n"
        "bar.sync %0, threads;\n"
        "}" ::"r"(id)
        : "memory");
}

// Ordinary writes to shared memory come before later reads by tensor cores and bulk copies. Each writing thread fences,
// then arrives at a barrier.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A warpgroup gives registers back or takes them; `Count` is a multiple of 8. The sum must fit what the launch got.
template <int Count>
__device__ __forceinline__ void registers_decrease() {
    static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void registers_increase() {
    static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace gdelta
