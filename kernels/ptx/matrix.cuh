// 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers, and the warp's own matrix product
// (PTX ISA, "Warp Level Matrix Instructions": ldmatrix, stmatrix, mma). Lane l gives the address of a row of 16 bytes:
// lanes 0-7 those of matrix 0, and so on. A lane holds elements (l / 4, 2 (l % 4)) and the next of each matrix.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gdelta {

__device__ __forceinline__ void ldmatrix_x4(uint32_t shared, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// Each matrix arrives transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t shared, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// Each matrix is stored transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// A matrix of 8 x 8, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// d += a b: a 16 x 16 and b 16 x 8 of T, d 16 x 8 of fp32. b is column-major: b0 holds rows 0-7.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define GDELTA_MMA(type)                                       \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
        "{%0, %1, %2, %3};"                                    \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<T, __half>) {
        GDELTA_MMA("f16");
    } else {
        GDELTA_MMA("bf16");
    }
#undef GDELTA_MMA
}

// The same with a 16 x 8 and b 8 x 8.
template <typename T>
__device__ __forceinline__ void mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#define GDELTA_MMA(type)                                           \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type      \
        ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
        : "r"(a0), "r"(a1), "r"(b))
    if constexpr (std::is_same_v<T, __half>) {
        GDELTA_MMA("f16");
    } else {
        GDELTA_MMA("bf16");
    }
#undef GDELTA_MMA
}

}  // namespace gdelta
