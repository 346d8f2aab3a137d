/* The one table of what lies where in workspace and saved buffers. Pure arithmetic. */
#ifndef GDELTA_WORKSPACE_H
#define GDELTA_WORKSPACE_H

#include <stdbool.h>

#include "kernels/args.h"

enum { kWorkspaceAlignment = 256 };

/* Byte offsets; a part of size 0 has the offset of the part after it. */
typedef struct gdelta_workspace_table {
    size_t malformed, checkpoints, dq, dk, dv, ddecay, dbeta;
    size_t bytes;
} gdelta_workspace_table;

void gdelta_workspace_forward(const gdelta_shape *shape, gdelta_workspace_table *table);
/* `own_checkpoints`: backward makes the states itself, for forward saved none. */
void gdelta_workspace_backward(const gdelta_shape *shape, bool own_checkpoints, gdelta_workspace_table *table);

/* Bytes of the states that forward leaves every 64 tokens. */
size_t gdelta_checkpoint_bytes(const gdelta_shape *shape);

#endif /* GDELTA_WORKSPACE_H */
