/* The only host file that speaks to the CUDA runtime. Built without CUDA, every function here answers UNSUPPORTED. */
#ifndef GDELTA_DEVICE_H
#define GDELTA_DEVICE_H

#include <stdbool.h>

#include "kernels/args.h"

/* Compute capability (10 * major + minor) and multiprocessors of the current device; false without one. */
bool gdelta_device_query(int32_t *compute_capability, int32_t *multiprocessors);

/* Makes the stream's device current, also while the stream is captured, and says its compute capability. */
gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, bool *entered);
/* What was current before is so again. */
void gdelta_device_leave(bool entered);

/* A map of a tensor of five axes of 16-bit elements, innermost first and contiguous: the driver's function, on the
 * current device. Boxes are `box` elements, their rows of 128 bytes swizzled; what lies outside the extents reads as 0.
 * byte_stride: of the axes but the first. */
gdelta_status gdelta_device_encode_map(gdelta_tensor_map *map, const char *name, const gdelta_view *view,
                                       const uint64_t extent[5], const uint64_t byte_stride[4], const uint32_t box[5]);

/* A launcher's error code as a status with a sentence; clears the runtime's last error. */
gdelta_status gdelta_device_status(int error, const char *what);

#endif /* GDELTA_DEVICE_H */
