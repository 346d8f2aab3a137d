// Bulk copies by the copy engine, TMA (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy":
// cp.async.bulk, cp.async.bulk.tensor). Loads complete on an mbarrier that expects their bytes; stores in bulk groups
// of the issuing thread.
#pragma once

#include <cstdint>

namespace gdelta {

// The box of a 5-D tensor map at (x, token, panel, head, batch); elements outside the tensor arrive as zeros.
__device__ __forceinline__ void bulk_load_tensor(uint32_t shared, const void *map, uint32_t barrier, int token,
                                                 int head, int batch, int panel = 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
        "%6}], [%7];" ::"r"(shared),
        "l"(map), "r"(0), "r"(token), "r"(panel), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

// Elements outside the tensor are not written.
__device__ __forceinline__ void bulk_store_tensor(const void *map, uint32_t shared, int token, int head, int batch,
                                                  int panel = 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
        "r"(0), "r"(token), "r"(panel), "r"(head), "r"(batch), "r"(shared)
        : "memory");
}

// Contiguous bytes, a multiple of 16 at multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void *global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the newest `Pending` groups of stores have read their shared memory.
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// ... have written global memory.
template <int Pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace gdelta
