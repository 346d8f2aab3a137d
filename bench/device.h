/* The few words of the CUDA runtime that the bench needs. A failure ends the program with the runtime's words. Without
 * CUDA only place kHost works. */
#ifndef GDELTA_BENCH_DEVICE_H
#define GDELTA_BENCH_DEVICE_H

#include <gdelta/gdelta.h>
#include <stdbool.h>

typedef enum bench_place { kHost, kDevice } bench_place;

const char *device_missing(void);
void device_name(char *text, size_t size);

/* Filled with bytes 0xff, NaN in every float type: what a kernel forgets to write is seen. */
void *place_alloc(bench_place place, size_t bytes);
void place_free(bench_place place, void *data);
/* Between host memory and a place, or within one; synchronous. */
void place_copy(bench_place to, void *out, bench_place from, const void *in, size_t bytes);

/* Runs `call` on a stream; returns its status. */
typedef gdelta_status (*device_call)(void *context, gdelta_stream stream);

/* Microseconds of a call, `repeats` times, from a captured graph: flush L2, event, one call for each of `count`
 * contexts, event; divided by count. A first run is not counted. With count 0: the events alone. False if the library
 * refused. */
bool device_time(device_call call, void *const *contexts, int count, int repeats, double *microseconds);
/* One run outside a graph, waited for; microseconds by the host's clock. */
bool device_run(device_call call, void *context, double *microseconds);
/* Microseconds of the host's clock that a call takes to enqueue its work. */
bool device_enqueue_time(device_call call, void *context, double *microseconds);
/* Microseconds of an empty kernel, by device_time, one of many in a graph. */
double device_empty_time(void);
/* The same as device_run on the CPU. */
bool host_time(device_call call, void *context, double *microseconds);
/* Bytes read and written a second by a large copy within the device, cold. */
double device_copy_rate(void);
/* Enqueues such a copy of a multiple of 16 bytes; `out` may be `in`. */
void device_copy(void *out, const void *in, size_t bytes, gdelta_stream stream);

#endif /* GDELTA_BENCH_DEVICE_H */
