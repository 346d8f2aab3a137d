/* The last error of each thread. */
#ifndef GDELTA_STATUS_H
#define GDELTA_STATUS_H

#include <gdelta/gdelta.h>

/* Stores the sentence as this thread's last error and returns `status`. */
gdelta_status gdelta_fail(gdelta_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif /* GDELTA_STATUS_H */
