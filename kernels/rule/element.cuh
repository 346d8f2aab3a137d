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

__device__ __forceinline__ void store_element(void *data, gdelta_dtype dtype, int64_t i, float x) {
    with_dtype(dtype, [&](auto *type) { from_float(x, static_cast<decltype(type)>(data) + i); });
}

// An element as it stands in memory. Loads give bits and turn into numbers where they are used, so that no load waits
// for the one before it.
__device__ __forceinline__ uint32_t load_bits(const void *data, gdelta_dtype dtype, int64_t i) {
    return dtype == GDELTA_DTYPE_FP32 ? static_cast<const uint32_t *>(data)[i] : static_cast<const uint16_t *>(data)[i];
}

__device__ __forceinline__ float bits_to_float(uint32_t bits, gdelta_dtype dtype) {
    if (dtype == GDELTA_DTYPE_BF16) return __uint_as_float(bits << 16);
    if (dtype == GDELTA_DTYPE_FP16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    return __uint_as_float(bits);
}

__device__ __forceinline__ float load_element(const void *data, gdelta_dtype dtype, int64_t i) {
    return bits_to_float(load_bits(data, dtype, i), dtype);
}

// The elements lane + 32 i of a row of `count`, zero from there on.
template <int N>
struct Row {
    uint32_t bits[N];

    __device__ __forceinline__ void load(const void *data, gdelta_dtype dtype, int64_t offset, int count, int lane) {
        if (dtype == GDELTA_DTYPE_FP32) {
            load_as(static_cast<const uint32_t *>(data) + offset, count, lane);
        } else {
            load_as(static_cast<const uint16_t *>(data) + offset, count, lane);
        }
    }

    template <typename T>
    __device__ __forceinline__ void load_as(const T *row, int count, int lane) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            bits[i] = 0;
            if (lane + 32 * i < count) bits[i] = row[lane + 32 * i];
        }
    }

    // One branch for all.
    __device__ __forceinline__ void values(gdelta_dtype dtype, float (&x)[N]) const {
        int shift = dtype == GDELTA_DTYPE_BF16 ? 16 : 0;
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = __uint_as_float(bits[i] << shift);
        if (dtype != GDELTA_DTYPE_FP16) return;
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = bits_to_float(bits[i], GDELTA_DTYPE_FP16);
    }
};

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
