#include "host/device.h"

#include "host/status.h"

#ifdef GDELTA_HAVE_CUDA

#include <cuda_runtime_api.h>

static cudaError_t capability(int device, int32_t *compute_capability) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    *compute_capability = 10 * major + minor;
    return error;
}

bool gdelta_device_query(int32_t *compute_capability, int32_t *multiprocessors) {
    int device = 0, count = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = capability(device, compute_capability);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    *multiprocessors = count;
    if (error != cudaSuccess) cudaGetLastError(); /* no device is no error of the caller's */
    return error == cudaSuccess;
}

gdelta_status gdelta_device_status(int error, const char *what) {
    if (error == cudaSuccess) return GDELTA_OK;
    cudaGetLastError();
    return gdelta_fail(GDELTA_ERROR_CUDA, "%s: CUDA error %d, %s", what, error, cudaGetErrorString((cudaError_t)error));
}

gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, int *previous_device) {
    int device = 0;
    cudaError_t error = cudaGetDevice(previous_device);
    if (error != cudaSuccess) return gdelta_device_status(error, "cudaGetDevice");
    error = cudaStreamGetDevice(stream, &device);
    if (error != cudaSuccess) return gdelta_device_status(error, "cudaStreamGetDevice");
    error = capability(device, compute_capability);
    if (error == cudaSuccess && device != *previous_device) error = cudaSetDevice(device);
    return gdelta_device_status(error, "cudaSetDevice");
}

void gdelta_device_leave(int previous_device) {
    int device = previous_device;
    if (cudaGetDevice(&device) == cudaSuccess && device != previous_device) cudaSetDevice(previous_device);
}

#else

bool gdelta_device_query(int32_t *compute_capability, int32_t *multiprocessors) {
    *compute_capability = *multiprocessors = 0;
    return false;
}

gdelta_status gdelta_device_status(int error, const char *what) {
    return error ? gdelta_fail(GDELTA_ERROR_CUDA, "%s: error %d", what, error) : GDELTA_OK;
}

gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, int *previous_device) {
    (void)stream;
    *compute_capability = *previous_device = 0;
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                       "this libgdelta was built without CUDA; only the CPU reference of reference.h runs");
}

void gdelta_device_leave(int previous_device) {
    (void)previous_device;
}

#endif
