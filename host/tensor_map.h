/* Token tensors as the copy engine (TMA) sees them: whether it can, and the maps that the hopper engine takes. */
#ifndef GDELTA_TENSOR_MAP_H
#define GDELTA_TENSOR_MAP_H

#include <stdbool.h>

#include "kernels/args.h"

/* One tensor of a call. */
typedef struct gdelta_mapped {
    const char *name; /* for sentences */
    const gdelta_view *view;
    int32_t heads, dim; /* dim: a multiple of 64 */
} gdelta_mapped;

/* Can the copy engine take the tensor: elements of 16 bits, base and strides of whole 16 bytes? If not, `why` gets the
 * sentence; NULL and 0: none is wanted. */
bool gdelta_tensor_map_fits(const gdelta_shape *shape, const gdelta_mapped *tensor, char *why, size_t size);

/* Makes the map of a tensor that fits and has rows, on the current device. Axes, innermost first: 64 elements, tokens,
 * dim / 64, heads, batch; boxes of 64 elements of 64 tokens, all of dim, one head. */
gdelta_status gdelta_tensor_map_encode(const gdelta_shape *shape, const gdelta_mapped *tensor, gdelta_tensor_map *map);

#endif /* GDELTA_TENSOR_MAP_H */
