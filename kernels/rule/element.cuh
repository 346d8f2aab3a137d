// Elements in memory and numbers in registers. Tensors of the recurrent engine carry their dtype at run time: the
// branch is uniform and stands outside the loops. No alignment is assumed beyond the element's own.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/args.h"

namespace gdelta {

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__half x) {
    return __half2float(x);
}

__device__ __forceinline__ void from_float(float x, float *out) {
    *out = x;
}
__device__ __forceinline__ void from_float(float x, __nv_bfloat16 *out) {
    *out = __float2bfloat16_rn(x);
}
__device__ __forceinline__ void from_float(float x, __half *out) {
    *out = __float2half_rn(x);
}

// Calls f with a null pointer of the dtype's C++ type.
template <typename F>
__device__ __forceinline__ void with_dtype(gdelta_dtype dtype, F f) {
    if (dtype == GDELTA_DTYPE_BF16) {
        f(static_cast<__nv_bfloat16 *>(nullptr));
    } else if (dtype == GDELTA_DTYPE_FP16) {
        f(static_cast<__half *>(nullptr));
    } else {
        f(static_cast<float *>(nullptr));
    }
}

__device__ __forceinline__ float load_element(const void *data, gdelta_dtype dtype, int64_t i) {
    if (dtype == GDELTA_DTYPE_BF16) return to_float(static_cast<const __nv_bfloat16 *>(data)[i]);
    if (dtype == GDELTA_DTYPE_FP16) return to_float(static_cast<const __half *>(data)[i]);
    return static_cast<const float *>(data)[i];
}

__device__ __forceinline__ void store_element(void *data, gdelta_dtype dtype, int64_t i, float x) {
    with_dtype(dtype, [&](auto *type) { from_float(x, static_cast<decltype(type)>(data) + i); });
}

// x[i] = row[lane + 32 i], zero from `count` on.
template <int N>
__device__ __forceinline__ void load_row(const void *data, gdelta_dtype dtype, int64_t offset, int count, int lane,
                                         float (&x)[N]) {
    with_dtype(dtype, [&](auto *type) {
        auto *row = static_cast<decltype(type)>(const_cast<void *>(data)) + offset;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            int d = lane + 32 * i;
            x[i] = d < count ? to_float(row[d]) : 0.0f;
        }
    });
}

__device__ __forceinline__ int64_t load_index(const gdelta_table &table, int64_t i) {
    return table.is_int64 ? static_cast<const int64_t *>(table.data)[i] : static_cast<const int32_t *>(table.data)[i];
}

__device__ __forceinline__ int64_t offset_of(const gdelta_view &view, int64_t batch, int64_t token, int head) {
    return batch * view.batch + token * view.token + head * view.head;
}

// Sum over the lanes whose index differs in the bits of Mask; every one of them gets it.
template <int Mask>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
        if (Mask & bit) x += __shfl_xor_sync(0xffffffffu, x, bit);
    }
    return x;
}

}  // namespace gdelta
