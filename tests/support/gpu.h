/* The GPU side of the tests: memory with canaries, streams, graphs. Any CUDA error that is not looked for prints its
 * words and ends the process; in a build without CUDA so does any call but the first two. */
#ifndef GDELTA_TESTS_GPU_H
#define GDELTA_TESTS_GPU_H

#include <gdelta/gdelta.h>
#include <stdbool.h>
#include <stddef.h>

/* NULL where a GPU is; else why there is none. */
const char *gpu_missing(void);

/* Goes on only where a GPU is, and one of this compute capability if that is not 0. Else prints "GPU SKIPPED: <test>
 * (<why>)" and ends the test as skipped; where there is no GPU at all, as failed if the environment has
 * GDELTA_REQUIRE_GPU=1. */
void gpu_require(const char *test, int capability);

/* Device memory. Between pads of the byte 0xff, which is NaN in every float type, if `pad` is not 0. */
typedef struct gpu_buffer {
    void *data;
    size_t bytes, pad;
} gpu_buffer;

/* The contents start as 0xff too. data is aligned to 256 bytes; pad is a multiple of 256. */
gpu_buffer gpu_buffer_create(size_t bytes, size_t pad);
/* True if both pads are as they were; else prints the first byte that is not, under `name`. */
bool gpu_buffer_intact(const gpu_buffer *buffer, const char *name);
void gpu_buffer_destroy(gpu_buffer *buffer);

/* Fills the buffer with repetitions of a pattern in host memory: copies on the device, so that tens of GiB take a
 * moment.
 */
void gpu_buffer_tile(gpu_buffer *buffer, const void *pattern, size_t period);
/* Device memory that is free now. */
size_t gpu_free_bytes(void);

/* Synchronous copies. */
void gpu_upload(void *device, const void *host, size_t bytes);
void gpu_download(void *host, const void *device, size_t bytes);

/* A stream that does not wait for the default stream. */
gdelta_stream gpu_stream_create(void);
/* Waits, and looks at the last error: a launch that failed or an error that sticks ends the process. */
void gpu_stream_finish(gdelta_stream stream);
void gpu_stream_destroy(gdelta_stream stream);

/* Capture in the strict mode: any call that would synchronise or allocate, by any thread, is an error. */
typedef struct gpu_graph gpu_graph;
void gpu_capture_begin(gdelta_stream stream);
gpu_graph *gpu_capture_end(gdelta_stream stream);
void gpu_graph_launch(gpu_graph *graph, gdelta_stream stream);
void gpu_graph_destroy(gpu_graph *graph);

/* 10 * major + minor of the current device. */
int gpu_capability(void);

int gpu_device_count(void);
int gpu_current_device(void);
void gpu_use_device(int device);

#endif /* GDELTA_TESTS_GPU_H */
