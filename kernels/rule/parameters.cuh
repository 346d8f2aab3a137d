// The gradients of the parameters of a fused gate: sums over the tokens, in a fixed order.
#pragma once

#include "kernels/args.h"
#include "kernels/config.h"

namespace gdelta {

// A block of kGateThreads: the gradients of A_log and dt_bias of one output head from each thread's parts.
__device__ __forceinline__ void store_parameters(const gdelta_backward_call &call, int head, double a_log,
                                                 double dt_bias, double (&sums)[2][kGateThreads]) {
    sums[0][threadIdx.x] = a_log;
    sums[1][threadIdx.x] = dt_bias;
    for (int half = kGateThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half) {
            sums[0][threadIdx.x] += sums[0][threadIdx.x + half];
            sums[1][threadIdx.x] += sums[1][threadIdx.x + half];
        }
    }
    if (threadIdx.x != 0) return;
    const gdelta_view *out[2] = {&call.da_log, &call.ddt_bias};
    for (int i = 0; i < 2; ++i) {
        if (!out[i]->data) continue;
        float *at = static_cast<float *>(out[i]->data) + head * out[i]->head;
        *at = static_cast<float>(sums[i][0] + (call.accumulate_parameters ? *at : 0.0f));
    }
}

}  // namespace gdelta
