#include "host/device.h"

#include "host/status.h"

#ifdef GDELTA_HAVE_CUDA

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

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

/* The runtime may not be asked for a stream's device during a capture; the driver may be asked for its context. And
 * only the driver encodes tensor maps. Found by name, so that the library loads where there is no driver. */
static struct {
    CUresult (*get_context)(CUcontext *);
    CUresult (*stream_get_context)(CUstream, CUcontext *);
    CUresult (*push_context)(CUcontext);
    CUresult (*pop_context)(CUcontext *);
    CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                             const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    cudaError_t error;
} driver;

static void find_driver(void) {
    const struct {
        const char *name;
        unsigned version; /* that the signature above is of: later ones have other arguments */
        void **function;
    } wanted[] = {{"cuCtxGetCurrent", 4000, (void **)&driver.get_context},
                  {"cuStreamGetCtx", 9020, (void **)&driver.stream_get_context},
                  {"cuCtxPushCurrent", 4000, (void **)&driver.push_context},
                  {"cuCtxPopCurrent", 4000, (void **)&driver.pop_context},
                  {"cuTensorMapEncodeTiled", 12000, (void **)&driver.encode_tiled}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted && driver.error == cudaSuccess; ++i) {
        enum cudaDriverEntryPointQueryResult found;
        driver.error = cudaGetDriverEntryPointByVersion(wanted[i].name, wanted[i].function, wanted[i].version,
                                                        cudaEnableDefault, &found);
        if (driver.error == cudaSuccess && found != cudaDriverEntryPointSuccess) {
            driver.error = cudaErrorInsufficientDriver;
        }
    }
}

static gdelta_status need_driver(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_driver);
    return gdelta_device_status(driver.error, "cudaGetDriverEntryPointByVersion");
}

/* A thread that has not yet used the runtime has no context; to encode a map the driver needs one. */
static cudaError_t need_context(void) {
    CUcontext context = NULL;
    int device;
    if (driver.get_context(&context) == CUDA_SUCCESS && context != NULL) return cudaSuccess;
    cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaSetDevice(device) : error;
}

gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, bool *entered) {
    *entered = false;
    gdelta_status status = need_driver();
    if (status != GDELTA_OK) return status;
    bool own_context = stream != NULL && stream != cudaStreamLegacy && stream != cudaStreamPerThread;
    if (own_context) {
        CUcontext context;
        CUresult result = driver.stream_get_context(stream, &context);
        if (result == CUDA_SUCCESS) result = driver.push_context(context);
        if (result != CUDA_SUCCESS) {
            return gdelta_fail(GDELTA_ERROR_CUDA, "stream is %p; the driver finds no device for it: error %d",
                               (void *)stream, (int)result);
        }
        *entered = true;
    } else { /* the stream is the current device's */
        status = gdelta_device_status(need_context(), "cudaSetDevice");
        if (status != GDELTA_OK) return status;
    }
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = capability(device, compute_capability);
    if (error != cudaSuccess) gdelta_device_leave(*entered);
    return gdelta_device_status(error, "cudaGetDevice");
}

void gdelta_device_leave(bool entered) {
    CUcontext context;
    if (entered) driver.pop_context(&context);
}

gdelta_status gdelta_device_encode_map(gdelta_tensor_map *map, const char *name, const gdelta_view *view,
                                       const uint64_t extent[5], const uint64_t byte_stride[4], const uint32_t box[5]) {
    _Static_assert(sizeof *map == sizeof(CUtensorMap), "a gdelta_tensor_map is a CUtensorMap");
    static const cuuint32_t dense[5] = {1, 1, 1, 1, 1};
    gdelta_status status = need_driver();
    if (status != GDELTA_OK) return status;
    cuuint64_t extents[5], strides[4]; /* of the driver's own 64-bit type */
    for (int i = 0; i < 5; ++i) extents[i] = extent[i];
    for (int i = 0; i < 4; ++i) strides[i] = byte_stride[i];
    CUresult result = driver.encode_tiled(
        (CUtensorMap *)map,
        view->dtype == GDELTA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
        view->data, extents, strides, box, dense, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return GDELTA_OK;
    return gdelta_fail(GDELTA_ERROR_CUDA, "%s: the driver makes no tensor map of it: error %d", name, (int)result);
}

#else

bool gdelta_device_query(int32_t *compute_capability, int32_t *multiprocessors) {
    *compute_capability = *multiprocessors = 0;
    return false;
}

gdelta_status gdelta_device_status(int error, const char *what) {
    return error ? gdelta_fail(GDELTA_ERROR_CUDA, "%s: error %d", what, error) : GDELTA_OK;
}

gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, bool *entered) {
    (void)stream;
    *compute_capability = 0;
    *entered = false;
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED,
                       "this libgdelta was built without CUDA; only the CPU reference of reference.h runs");
}

void gdelta_device_leave(bool entered) {
    (void)entered;
}

gdelta_status gdelta_device_encode_map(gdelta_tensor_map *map, const char *name, const gdelta_view *view,
                                       const uint64_t extent[5], const uint64_t byte_stride[4], const uint32_t box[5]) {
    (void)map, (void)view, (void)extent, (void)byte_stride, (void)box;
    return gdelta_fail(GDELTA_ERROR_UNSUPPORTED, "%s: this libgdelta was built without CUDA and makes no tensor maps",
                       name);
}

#endif
