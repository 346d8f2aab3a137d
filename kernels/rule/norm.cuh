// L2 norm of q and k rows: y = r x with r = rsqrt(sum(x^2) + eps), or rsqrt(max(sum(x^2), eps)).
// Backward: dx = r (dy - y <y, dy>), but dx = r dy where the floor holds r constant.
#pragma once

#include "kernels/rule/element.cuh"

namespace gdelta {

// Correctly rounded operations, so that no arch differs.
__device__ __forceinline__ float norm_of(const gdelta_shape &shape, float sum) {
    if (shape.l2norm == GDELTA_L2NORM_NONE) return 1.0f;
    float eps = static_cast<float>(shape.l2norm_eps);
    sum = shape.l2norm == GDELTA_L2NORM_ADD_EPS ? sum + eps : fmaxf(sum, eps);
    return __frcp_rn(__fsqrt_rn(sum));
}

template <int N>
__device__ __forceinline__ float square_sum(const float (&x)[N]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(x[i], x[i], sum);
    return sum;
}

// One warp, one row: x[i] holds element lane + 32 i.
template <int N>
__device__ __forceinline__ float row_norm(const gdelta_shape &shape, const float (&x)[N]) {
    if (shape.l2norm == GDELTA_L2NORM_NONE) return 1.0f;
    return norm_of(shape, sum_lanes<31>(square_sum(x)));
}

// dy becomes dx; r is the row's norm factor.
template <int N>
__device__ __forceinline__ void row_norm_backward(const gdelta_shape &shape, const float (&x)[N], float r,
                                                  float (&dy)[N]) {
    if (shape.l2norm == GDELTA_L2NORM_NONE) return;
    float dot = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        dot = fmaf(r * x[i], dy[i], dot);
        sum = fmaf(x[i], x[i], sum);
    }
    dot = sum_lanes<31>(dot);
    sum = sum_lanes<31>(sum);
    if (shape.l2norm == GDELTA_L2NORM_MAX_EPS && sum <= static_cast<float>(shape.l2norm_eps)) dot = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) dy[i] = r * (dy[i] - r * x[i] * dot);
}

}  // namespace gdelta
