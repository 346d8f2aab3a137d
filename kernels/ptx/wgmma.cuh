// wgmma: matrix products of a warpgroup, asynchronous (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions";
// sm_90a). D, 64 x N of fp32, is in registers: lane l of warp w holds rows 16 w + l / 4 and + 8; d[4 j + 0, 1] are
// columns 8 j + 2 (l % 4) and the next of the upper row, d[4 j + 2, 3] of the lower. A is 64 x 16, in registers like
// two column pairs of D, or in shared memory; B is 16 x N in shared memory. Shared operands are named by descriptors
// (tile/panel.cuh).
//
// Between issue and wait the registers belong to the tensor cores. The compiler does not know: wgmma_fence before the
// first product orders earlier writes, wgmma_hold ties the values to the places before issue and after wait.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gdelta {

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the newest `Pending` groups are complete.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <int N>
__device__ __forceinline__ void wgmma_hold(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void wgmma_hold(uint32_t (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

enum Major { kMajorK = 0, kMajorMN = 1 };

#define GDELTA_D64                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GDELTA_OUT64(d)                                                                                         \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define GDELTA_D128                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define GDELTA_OUT128(d)                                                                                        \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// D (+)= A B, m64n64k16, A in registers. Without `accumulate` D starts from 0.
template <typename T, Major B>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t *a, uint64_t b, bool accumulate) {
#define GDELTA_WGMMA(type)                                                          \
    asm volatile(                                                                   \
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                   \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" GDELTA_D64 \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}\n"                            \
        : GDELTA_OUT64(d)                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int(B)))
    if constexpr (std::is_same_v<T, __half>) {
        GDELTA_WGMMA("f16");
    } else {
        GDELTA_WGMMA("bf16");
    }
#undef GDELTA_WGMMA
}

// The same with A in shared memory.
template <typename T, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
#define GDELTA_WGMMA(type)                                                          \
    asm volatile(                                                                   \
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                   \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" GDELTA_D64 \
        "}, %32, %33, p, 1, 1, %35, %36;}\n"                                        \
        : GDELTA_OUT64(d)                                                           \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int(A)), "n"(int(B)))
    if constexpr (std::is_same_v<T, __half>) {
        GDELTA_WGMMA("f16");
    } else {
        GDELTA_WGMMA("bf16");
    }
#undef GDELTA_WGMMA
}

// D (+)= A B, m64n128k16, A in registers. Without `accumulate` D starts from 0.
template <typename T, Major B>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t *a, uint64_t b, bool accumulate) {
#define GDELTA_WGMMA(type)                                                            \
    asm volatile(                                                                     \
        "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"                                     \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" GDELTA_D128 \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}\n"                              \
        : GDELTA_OUT128(d)                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int(B)))
    if constexpr (std::is_same_v<T, __half>) {
        GDELTA_WGMMA("f16");
    } else {
        GDELTA_WGMMA("bf16");
    }
#undef GDELTA_WGMMA
}

// The same with A in shared memory.
template <typename T, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
#define GDELTA_WGMMA(type)                                                            \
    asm volatile(                                                                     \
        "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"                                     \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" GDELTA_D128 \
        "}, %64, %65, p, 1, 1, %67, %68;}\n"                                          \
        : GDELTA_OUT128(d)                                                            \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int(A)), "n"(int(B)))
    if constexpr (std::is_same_v<T, __half>) {
        GDELTA_WGMMA("f16");
    } else {
        GDELTA_WGMMA("bf16");
    }
#undef GDELTA_WGMMA
}

#undef GDELTA_D64
#undef GDELTA_OUT64
#undef GDELTA_D128
#undef GDELTA_OUT128

}  // namespace gdelta
