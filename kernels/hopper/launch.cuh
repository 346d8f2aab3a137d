// How this engine's kernels start: the instance of a type and K, its dynamic shared memory, the launch. Host code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/config.h"
#include "kernels/launch.h"

namespace gdelta {

// f(tag of q's type, panels of K as a constant): what GDELTA_HOPPER_DIMS says of K.
template <typename F>
cudaError_t with_instance(const gdelta_shape &shape, const gdelta_inputs &in, F f) {
    auto with_panels = [&](auto *type) {
        return shape.dim_k == 128 ? f(type, std::integral_constant<int, 2>{})
                                  : f(type, std::integral_constant<int, 1>{});
    };
    return in.q.dtype == GDELTA_DTYPE_FP16 ? with_panels(static_cast<__half *>(nullptr))
                                           : with_panels(static_cast<__nv_bfloat16 *>(nullptr));
}

// `bytes` of dynamic shared memory. With `early` the kernel may start while the one before it in the stream runs, once
// all blocks of that one have called grid_release or ended; until its grid_wait (ptx/grid.cuh) it reads nothing that
// the kernels before it make, and writes nothing.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_as(bool early, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t bytes,
                      gdelta_stream stream, const Arguments &...arguments) {
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(blocks);
    config.blockDim = static_cast<unsigned>(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Whether forward's kernels overlap: only where prepare leaves multiprocessors idle. Else the next kernel's waiting
// blocks take the places of the one before.
inline bool starts_early(const gdelta_forward_call &call) {
    const gdelta_shape &shape = call.shape;
    return gdelta_chunk_capacity(shape.sequences, shape.tokens, shape.rows, shape.packed) * shape.heads_q <=
           kHopperEarlyBlocks;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t bytes, gdelta_stream stream,
                   const Arguments &...arguments) {
    return launch_as(false, kernel, blocks, threads, bytes, stream, arguments...);
}

// X, Z and rows; for backward (work.l is there) the other tiles too. Uses maps.k and maps.q.
cudaError_t launch_hopper_prepare(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                                  const gdelta_hopper_maps &maps, gdelta_stream stream);
// From the summaries of each job's segments, in work.m and work.n, the state after each: in the place of N. A job is a
// sequence and output head; in backward one of each direction.
cudaError_t launch_hopper_merge(bool early, const gdelta_shape &shape, const gdelta_hopper_work &work, int64_t jobs,
                                gdelta_stream stream);
cudaError_t launch_hopper_chains(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                 const gdelta_hopper_backward_maps &maps, gdelta_stream stream);

}  // namespace gdelta
