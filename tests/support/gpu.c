#include "gpu.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void gpu_require(const char *test, int capability) {
    const char *why = gpu_missing(), *required = getenv("GDELTA_REQUIRE_GPU");
    if (why && required && strcmp(required, "1") == 0) {
        cr_assert_fail("%s: GDELTA_REQUIRE_GPU is 1, but %s", test, why);
    }
    if (why == NULL && (capability == 0 || capability == gpu_capability())) return;
    if (why == NULL) why = "another compute capability is needed";
    fprintf(stderr, "GPU SKIPPED: %s (%s)\n", test, why);
    cr_skip_test("%s", why);
}

#ifdef GDELTA_HAVE_CUDA

#include <cuda_runtime_api.h>

enum { kPoison = 0xff };

#define CHECK(call) check(call, #call, __LINE__)

static void check(cudaError_t error, const char *call, int line) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "gpu.c:%d: %s: %s (%s)\n", line, call, cudaGetErrorName(error), cudaGetErrorString(error));
    exit(1);
}

const char *gpu_missing(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    return count > 0 ? NULL : "no CUDA device";
}

gpu_buffer gpu_buffer_create(size_t bytes, size_t pad) {
    gpu_buffer buffer = {.bytes = bytes, .pad = pad};
    char *start;
    CHECK(cudaMalloc((void **)&start, bytes + 2 * pad + 1));
    CHECK(cudaMemset(start, kPoison, bytes + 2 * pad));
    buffer.data = start + pad;
    return buffer;
}

static bool pad_intact(const char *device, size_t pad, const char *name, const char *side) {
    unsigned char *bytes = malloc(pad + 1);
    gpu_download(bytes, device, pad);
    size_t i = 0;
    while (i < pad && bytes[i] == kPoison) ++i;
    free(bytes);
    if (i < pad) fprintf(stderr, "%s: byte %zu of the pad %s it was overwritten\n", name, i, side);
    return i == pad;
}

bool gpu_buffer_intact(const gpu_buffer *buffer, const char *name) {
    const char *data = buffer->data;
    bool before = pad_intact(data - buffer->pad, buffer->pad, name, "before");
    return pad_intact(data + buffer->bytes, buffer->pad, name, "after") && before;
}

void gpu_buffer_destroy(gpu_buffer *buffer) {
    if (buffer->data) CHECK(cudaFree((char *)buffer->data - buffer->pad));
    *buffer = (gpu_buffer){.data = NULL};
}

void gpu_buffer_tile(gpu_buffer *buffer, const void *pattern, size_t period) {
    size_t done = period < buffer->bytes ? period : buffer->bytes;
    gpu_upload(buffer->data, pattern, done);
    while (done < buffer->bytes) {
        size_t next = done < buffer->bytes - done ? done : buffer->bytes - done;
        CHECK(cudaMemcpy((char *)buffer->data + done, buffer->data, next, cudaMemcpyDeviceToDevice));
        done += next;
    }
    CHECK(cudaDeviceSynchronize());
}

size_t gpu_free_bytes(void) {
    size_t available, total;
    CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

void gpu_upload(void *device, const void *host, size_t bytes) {
    CHECK(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
}

void gpu_download(void *host, const void *device, size_t bytes) {
    CHECK(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}

gdelta_stream gpu_stream_create(void) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

void gpu_stream_finish(gdelta_stream stream) {
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGetLastError());
}

void gpu_stream_destroy(gdelta_stream stream) {
    CHECK(cudaStreamDestroy(stream));
}

struct gpu_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

void gpu_capture_begin(gdelta_stream stream) {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
}

gpu_graph *gpu_capture_end(gdelta_stream stream) {
    gpu_graph *graph = calloc(1, sizeof *graph);
    CHECK(cudaStreamEndCapture(stream, &graph->graph));
    CHECK(cudaGraphInstantiate(&graph->exec, graph->graph, 0));
    return graph;
}

void gpu_graph_launch(gpu_graph *graph, gdelta_stream stream) {
    CHECK(cudaGraphLaunch(graph->exec, stream));
}

void gpu_graph_destroy(gpu_graph *graph) {
    CHECK(cudaGraphExecDestroy(graph->exec));
    CHECK(cudaGraphDestroy(graph->graph));
    free(graph);
}

int gpu_capability(void) {
    int device, major, minor;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return 10 * major + minor;
}

int gpu_device_count(void) {
    int count;
    CHECK(cudaGetDeviceCount(&count));
    return count;
}

int gpu_current_device(void) {
    int device;
    CHECK(cudaGetDevice(&device));
    return device;
}

void gpu_use_device(int device) {
    CHECK(cudaSetDevice(device));
}

#else /* without CUDA */

const char *gpu_missing(void) {
    return "built without CUDA";
}

#define WITHOUT_CUDA(...)                                                 \
    __VA_ARGS__ {                                                         \
        fprintf(stderr, "%s called in a build without CUDA\n", __func__); \
        exit(1);                                                          \
    }

#pragma GCC diagnostic ignored "-Wunused-parameter"
WITHOUT_CUDA(gpu_buffer gpu_buffer_create(size_t bytes, size_t pad))
WITHOUT_CUDA(bool gpu_buffer_intact(const gpu_buffer *buffer, const char *name))
WITHOUT_CUDA(void gpu_buffer_destroy(gpu_buffer *buffer))
WITHOUT_CUDA(void gpu_buffer_tile(gpu_buffer *buffer, const void *pattern, size_t period))
WITHOUT_CUDA(size_t gpu_free_bytes(void))
WITHOUT_CUDA(void gpu_upload(void *device, const void *host, size_t bytes))
WITHOUT_CUDA(void gpu_download(void *host, const void *device, size_t bytes))
WITHOUT_CUDA(gdelta_stream gpu_stream_create(void))
WITHOUT_CUDA(void gpu_stream_finish(gdelta_stream stream))
WITHOUT_CUDA(void gpu_stream_destroy(gdelta_stream stream))
WITHOUT_CUDA(void gpu_capture_begin(gdelta_stream stream))
WITHOUT_CUDA(gpu_graph *gpu_capture_end(gdelta_stream stream))
WITHOUT_CUDA(void gpu_graph_launch(gpu_graph *graph, gdelta_stream stream))
WITHOUT_CUDA(void gpu_graph_destroy(gpu_graph *graph))
WITHOUT_CUDA(int gpu_capability(void))
WITHOUT_CUDA(int gpu_device_count(void))
WITHOUT_CUDA(int gpu_current_device(void))
WITHOUT_CUDA(void gpu_use_device(int device))

#endif
