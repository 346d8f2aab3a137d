#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static void *host_alloc(size_t bytes) {
    void *data = aligned_alloc(256, (bytes + 256) / 256 * 256);
    if (data == NULL) {
        fprintf(stderr, "gdelta-bench: no host memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(data, 0xff, bytes);
    return data;
}

bool host_time(device_call call, void *context, double *microseconds) {
    double start = now();
    gdelta_status status = call(context, NULL);
    *microseconds = now() - start;
    return status == GDELTA_OK;
}

#ifdef GDELTA_HAVE_CUDA

#include <cuda_runtime_api.h>

/* copy.cu: the runtime's own copy of device memory within a graph reaches only two thirds of what a kernel does. */
int bench_launch_copy(void *out, const void *in, size_t bytes, gdelta_stream stream);
int bench_launch_empty(gdelta_stream stream);

enum { kFlushBytes = 256 << 20 }; /* several times the 60 MB of L2 of an H200 */

static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "gdelta-bench: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}
#define CHECK(call) check(call, #call)

const char *device_missing(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    return count ? NULL : "no CUDA device";
}

void device_name(char *text, size_t size) {
    struct cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    snprintf(text, size, "%s", properties.name);
}

void *place_alloc(bench_place place, size_t bytes) {
    void *data = NULL;
    if (place == kHost) return host_alloc(bytes);
    if (bytes == 0) bytes = 256;
    CHECK(cudaMalloc(&data, bytes));
    CHECK(cudaMemset(data, 0xff, bytes));
    return data;
}

void place_free(bench_place place, void *data) {
    if (place == kHost)
        free(data);
    else
        CHECK(cudaFree(data));
}

void place_copy(bench_place to, void *out, bench_place from, const void *in, size_t bytes) {
    if (to == kHost && from == kHost)
        memcpy(out, in, bytes);
    else
        CHECK(cudaMemcpy(out, in, bytes, cudaMemcpyDefault));
}

/* The stream does not wait for the default one, on which copies within the device may still be under way. */
static gdelta_stream stream_create(void) {
    cudaStream_t stream;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

bool device_run(device_call call, void *context, double *microseconds) {
    gdelta_stream stream = stream_create();
    double start = now();
    gdelta_status status = call(context, stream);
    CHECK(cudaStreamSynchronize(stream));
    *microseconds = now() - start;
    CHECK(cudaStreamDestroy(stream));
    return status == GDELTA_OK;
}

bool device_time(device_call call, void *const *contexts, int count, int repeats, double *microseconds) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaEvent_t start, end;
    void *flush = place_alloc(kDevice, kFlushBytes);
    gdelta_stream stream = stream_create();
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemsetAsync(flush, 0x5a, kFlushBytes, stream));
    CHECK(cudaEventRecordWithFlags(start, stream, cudaEventRecordExternal));
    gdelta_status status = GDELTA_OK;
    for (int i = 0; status == GDELTA_OK && i < count; ++i) status = call(contexts[i], stream);
    CHECK(cudaEventRecordWithFlags(end, stream, cudaEventRecordExternal));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = -1; status == GDELTA_OK && i < repeats; ++i) {
        float milliseconds;
        CHECK(cudaGraphLaunch(replay, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaEventElapsedTime(&milliseconds, start, end));
        if (i >= 0) microseconds[i] = 1e3 * milliseconds / (count ? count : 1);
    }
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaStreamDestroy(stream));
    place_free(kDevice, flush);
    return status == GDELTA_OK;
}

bool device_enqueue_time(device_call call, void *context, double *microseconds) {
    enum { kCalls = 100 }; /* less than a stream's queue holds */
    gdelta_stream stream = stream_create();
    gdelta_status status = call(context, stream);
    CHECK(cudaStreamSynchronize(stream));
    double start = now();
    for (int i = 0; status == GDELTA_OK && i < kCalls; ++i) status = call(context, stream);
    *microseconds = (now() - start) / kCalls;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    return status == GDELTA_OK;
}

static gdelta_status nothing(void *context, gdelta_stream stream) {
    (void)context;
    CHECK(bench_launch_empty(stream));
    return GDELTA_OK;
}

typedef struct copy_job {
    void *out;
    const void *in;
    size_t bytes;
} copy_job;

void device_copy(void *out, const void *in, size_t bytes, gdelta_stream stream) {
    CHECK(bench_launch_copy(out, in, bytes, stream));
}

static gdelta_status copy(void *context, gdelta_stream stream) {
    const copy_job *job = context;
    device_copy(job->out, job->in, job->bytes, stream);
    return GDELTA_OK;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double device_empty_time(void) {
    enum { kCalls = 256, kRepeats = 11 };
    double times[kRepeats];
    void *contexts[kCalls] = {NULL};
    device_time(nothing, contexts, kCalls, kRepeats, times);
    qsort(times, kRepeats, sizeof *times, by_value);
    return times[kRepeats / 2];
}

double device_copy_rate(void) {
    enum { kBytes = 1 << 30, kRepeats = 11 };
    double times[kRepeats];
    void *in = place_alloc(kDevice, kBytes), *out = place_alloc(kDevice, kBytes);
    CHECK(cudaMemset(in, 0x3c, kBytes));
    copy_job job = {out, in, kBytes};
    device_time(copy, (void *[]){&job}, 1, kRepeats, times);
    place_free(kDevice, in);
    place_free(kDevice, out);
    qsort(times, kRepeats, sizeof *times, by_value);
    return 2.0 * kBytes / (times[kRepeats / 2] * 1e-6);
}

#else

static void no_cuda(void) {
    fprintf(stderr, "gdelta-bench: built without CUDA\n");
    exit(1);
}

const char *device_missing(void) {
    return "gdelta-bench was built without CUDA";
}

void device_name(char *text, size_t size) {
    (void)text, (void)size;
    no_cuda();
}

void *place_alloc(bench_place place, size_t bytes) {
    if (place == kDevice) no_cuda();
    return host_alloc(bytes);
}

void place_free(bench_place place, void *data) {
    if (place == kDevice) no_cuda();
    free(data);
}

void place_copy(bench_place to, void *out, bench_place from, const void *in, size_t bytes) {
    if (to == kDevice || from == kDevice) no_cuda();
    memcpy(out, in, bytes);
}

bool device_run(device_call call, void *context, double *microseconds) {
    (void)call, (void)context, (void)microseconds;
    no_cuda();
    return false;
}

bool device_time(device_call call, void *const *contexts, int count, int repeats, double *microseconds) {
    (void)contexts, (void)count, (void)repeats;
    return device_run(call, NULL, microseconds);
}

bool device_enqueue_time(device_call call, void *context, double *microseconds) {
    return device_run(call, context, microseconds);
}

double device_empty_time(void) {
    no_cuda();
    return 0;
}

double device_copy_rate(void) {
    no_cuda();
    return 0;
}

void device_copy(void *out, const void *in, size_t bytes, gdelta_stream stream) {
    (void)out, (void)in, (void)bytes, (void)stream;
    no_cuda();
}

#endif
