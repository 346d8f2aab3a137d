// The check of cu_seqlens on the device: starts at 0, nondecreasing, at most total_tokens, no sequence too long. One
// block looks at every entry, so that a broken table stops all blocks of the launches after it; the first broken entry
// is reported.
#include "kernels/config.h"
#include "kernels/rule/sequence.cuh"

namespace gdelta {

__global__ void __launch_bounds__(kCheckThreads)
    check_tables(const __grid_constant__ gdelta_shape shape, const __grid_constant__ gdelta_inputs in,
                 int32_t *malformed) {
    __shared__ unsigned long long first;  // index << 8 | rule of the first broken entry
    if (threadIdx.x == 0) first = ~0ull;
    __syncthreads();
    for (int64_t i = threadIdx.x; i <= shape.sequences; i += kCheckThreads) {
        int64_t here = load_index(in.cu_seqlens, i), before = i ? load_index(in.cu_seqlens, i - 1) : 0;
        int rule = GDELTA_DEVICE_OK;
        if (i == 0 && here != 0) {
            rule = GDELTA_DEVICE_CU_SEQLENS_START;
        } else if (here < before) {
            rule = GDELTA_DEVICE_CU_SEQLENS_ORDER;
        } else if (here > shape.rows) {
            rule = GDELTA_DEVICE_CU_SEQLENS_END;
        } else if (here - before > shape.tokens) {
            rule = GDELTA_DEVICE_CU_SEQLENS_LENGTH;
        }
        if (rule) atomicMin(&first, static_cast<unsigned long long>(i) << 8 | static_cast<unsigned>(rule));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *malformed = first != ~0ull;
        if (first != ~0ull) report(in, static_cast<int>(first & 255), static_cast<int64_t>(first >> 8));
    }
}

int launch_check(const gdelta_shape &shape, const gdelta_inputs &in, int32_t *malformed, gdelta_stream stream) {
    if (!malformed) return cudaSuccess;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = kCheckThreads;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, check_tables, shape, in, malformed);
}

}  // namespace gdelta
