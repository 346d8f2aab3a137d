// What times are held against: a copy, 16 bytes a thread and access, as many blocks as there is work; and a kernel that
// does nothing.
#include <gdelta/gdelta.h>

constexpr int kUnroll = 4;

// `out` may be `in`.
static __global__ void copy_blocks(uint4 *out, const uint4 *in, size_t count) {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x * kUnroll + threadIdx.x;
    uint4 x[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        if (first + i * blockDim.x < count) x[i] = in[first + i * blockDim.x];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        if (first + i * blockDim.x < count) out[first + i * blockDim.x] = x[i];
    }
}

static __global__ void do_nothing() {
}

extern "C" int bench_launch_empty(gdelta_stream stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, do_nothing);
}

// `bytes` is a multiple of 16. Begins early, as a step does (forward.cuh, Launch); blocks of 8 KB where there is little
// to copy, for all multiprocessors to have some. Returns the runtime's error code.
extern "C" int bench_launch_copy(void *out, const void *in, size_t bytes, gdelta_stream stream) {
    size_t count = bytes / sizeof(uint4), threads = bytes < (64 << 20) ? 128 : 512, block = threads * kUnroll;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(count / block + 1);
    config.blockDim = static_cast<unsigned>(threads);
    config.stream = stream;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (major >= 9) config.attrs = &early, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, copy_blocks, static_cast<uint4 *>(out), static_cast<const uint4 *>(in), count);
}
