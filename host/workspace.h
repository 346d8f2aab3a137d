/* The one table of what lies where in workspace and saved buffers. Pure arithmetic. */
#ifndef GDELTA_WORKSPACE_H
#define GDELTA_WORKSPACE_H

#include <stdbool.h>

#include "kernels/args.h"

enum { kWorkspaceAlignment = 256 };

/* Byte offsets; a part of size 0 has the offset of the part after it. */
typedef struct gdelta_workspace_table {
    size_t malformed;
    size_t checkpoints, dq, dk, dv, ddecay, dbeta; /* recurrent backward */
    size_t rows, x, z, m, n;                       /* hopper */
    size_t r, p, l, s, ds, w, y, parameters;       /* hopper backward, with those */
    size_t bytes;
} gdelta_workspace_table;

/* Of the recurrent engine, for forward and step. */
void gdelta_workspace_forward(const gdelta_shape *shape, gdelta_workspace_table *table);
/* Holds what gdelta_workspace_forward asks for too, at the same place: a call may fall back to that engine. */
void gdelta_workspace_hopper_forward(const gdelta_shape *shape, int64_t summaries, gdelta_workspace_table *table);
/* Segments whose summaries have room, of all sequences and output heads together. Never less for a larger problem. */
int64_t gdelta_summary_room(const gdelta_shape *shape, int32_t multiprocessors);
/* Of the recurrent engine. `own_checkpoints`: backward makes the states itself, for forward saved none. */
void gdelta_workspace_backward(const gdelta_shape *shape, bool own_checkpoints, gdelta_workspace_table *table);
/* Adds the hopper engine's needs to a table of the recurrent engine's, in the same bytes: a call uses one or the other.
 * All but `malformed`, which both have. */
void gdelta_workspace_hopper_backward(const gdelta_shape *shape, int64_t summaries, gdelta_workspace_table *table);

/* Into how many slices GDELTA_FLAG_SMALL_WORKSPACE cuts a backward's heads: the fewest, each of as many key heads,
 * whose workspace is at most twice the 16-bit states of all; where no number is enough, one key head each. Follows from
 * heads, K, V and gate alone, so that sizes never shrink. */
int32_t gdelta_workspace_slices(const gdelta_shape *shape);
/* The shape of a slice. */
gdelta_shape gdelta_slice_shape(const gdelta_shape *shape, int32_t slices);
/* All segments that a slice's rows may have: with this room for summaries at most, its workspace follows its rows. */
int64_t gdelta_slice_segments(const gdelta_shape *slice);

/* Bytes of the states that forward leaves every 64 tokens. */
size_t gdelta_checkpoint_bytes(const gdelta_shape *shape);

#endif /* GDELTA_WORKSPACE_H */
