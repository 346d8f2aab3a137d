/* The only host file that speaks to the CUDA runtime. Built without CUDA, every function here answers UNSUPPORTED. */
#ifndef GDELTA_DEVICE_H
#define GDELTA_DEVICE_H

#include <stdbool.h>

#include "gdelta/gdelta.h"

/* Compute capability (10 * major + minor) and multiprocessors of the current device; false without one. */
bool gdelta_device_query(int32_t *compute_capability, int32_t *multiprocessors);

/* Makes the stream's device current, also while the stream is captured, and says its compute capability. */
gdelta_status gdelta_device_enter(gdelta_stream stream, int32_t *compute_capability, bool *entered);
/* What was current before is so again. */
void gdelta_device_leave(bool entered);

/* A launcher's error code as a status with a sentence; clears the runtime's last error. */
gdelta_status gdelta_device_status(int error, const char *what);

#endif /* GDELTA_DEVICE_H */
