// A kernel and the next one of the stream that may start before its end (PTX ISA, "Parallel Synchronization and
// Communication Instructions: griddepcontrol"). Without that launch attribute both do nothing,
// nor do they before sm_90.
#pragma once

namespace gdelta {

// The kernels before this one have ended and what they wrote is visible. The clobber: nothing is read earlier.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As far as this block is concerned, the next kernel may start.
__device__ __forceinline__ void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdelta
