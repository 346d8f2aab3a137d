/* Strides: the defaults of each layout, and whether given ones make sense. Elements throughout. */
#ifndef GDELTA_LAYOUT_H
#define GDELTA_LAYOUT_H

#include <stdbool.h>

#include "gdelta/gdelta.h"

/* Bytes of an element; 0 for a value that is no dtype. */
size_t gdelta_dtype_size(gdelta_dtype dtype);
/* "bf16", for sentences; "unknown" for a value that is no dtype. */
const char *gdelta_dtype_name(gdelta_dtype dtype);

/* Fills the strides of a contiguous token tensor, order [batch, token, head, element]. */
void gdelta_layout_strides(gdelta_layout layout, const int64_t extent[4], int64_t stride[4]);

/* The distance from the first to the last element; false if it or its bytes pass 2^62. */
bool gdelta_layout_span(const int64_t extent[4], const int64_t stride[4], int64_t *span);

/* True if no two elements can share an address: sorted by stride, each axis steps over all that lies within it. (There
 * are stranger layouts without collisions; no framework makes them.) */
bool gdelta_layout_distinct(const int64_t extent[4], const int64_t stride[4]);

#endif /* GDELTA_LAYOUT_H */
