// What the kernels of the Hopper backward share: reads of the row table.
#pragma once

#include "kernels/hopper/ring.cuh"

namespace gdelta {

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

}  // namespace gdelta
