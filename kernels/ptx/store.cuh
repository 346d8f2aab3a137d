// st.global: one store of 8 or 16 bytes (PTX ISA, "Data Movement and Conversion Instructions: st, ld"). The address is
// aligned to the size. The compiler splits vector stores that stand under a predicate into stores of single words, four
// times the transactions; an instruction written out stays whole. It writes memory, hence the clobber.
#pragma once

#include <cstdint>

namespace gdelta {

__device__ __forceinline__ void st_global(void *at, uint2 x) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(at)), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void st_global(void *at, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

// st.shared, by an address in the shared window.
__device__ __forceinline__ void st_shared(uint32_t at, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t at, uint2 x) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t at, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ uint4 ld_shared(uint32_t at) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

// cp.async: 16 bytes of device memory to shared memory without a register; zeros where there is nothing to read. Both
// addresses are aligned to 16. A thread that has waited sees its own copies.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool inside) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        "l"(__cvta_generic_to_global(global)), "r"(inside ? 16 : 0)
        : "memory");
}

// A group: what the thread has begun since the last one. Returns when all but the `Left` youngest have arrived.
__device__ __forceinline__ void end_copy_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Left>
__device__ __forceinline__ void wait_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

}  // namespace gdelta
