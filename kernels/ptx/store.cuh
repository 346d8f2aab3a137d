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

}  // namespace gdelta
