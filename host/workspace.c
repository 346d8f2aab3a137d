#include "host/workspace.h"

#include "kernels/config.h"

/* Sizes cannot overflow: gdelta_validate_problem bounds rows * heads * dim by 2^53. */

static size_t take(size_t *bytes, size_t size) {
    size_t offset = *bytes;
    *bytes += (size + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return offset;
}

static size_t malformed_bytes(const gdelta_shape *shape) {
    return shape->packed ? sizeof(int32_t) : 0;
}

size_t gdelta_checkpoint_bytes(const gdelta_shape *shape) {
    /* floor((length - 1) / 64) states of the sequence of rows [begin, end) fit in floor(end / 64) - floor(begin / 64).
     */
    size_t states = (size_t)(shape->rows / kRecurrentSegment) * (size_t)shape->heads_o;
    return states * (size_t)shape->dim_k * (size_t)shape->dim_v * sizeof(float);
}

void gdelta_workspace_forward(const gdelta_shape *shape, gdelta_workspace_table *table) {
    *table = (gdelta_workspace_table){0};
    table->malformed = take(&table->bytes, malformed_bytes(shape));
}

static size_t chunk_count(const gdelta_shape *shape) {
    return (size_t)gdelta_chunk_capacity(shape->sequences, shape->tokens, shape->rows, shape->packed);
}

static size_t rows_bytes(const gdelta_shape *shape, size_t floats) {
    return chunk_count(shape) * (size_t)shape->heads_o * floats * sizeof(float);
}

int64_t gdelta_summary_room(const gdelta_shape *shape, int32_t multiprocessors) {
    int64_t jobs = shape->sequences * shape->heads_o, most = 2 * (int64_t)multiprocessors;
    int64_t segments = shape->tokens / (kChunk * kHopperSegmentChunks);
    if (segments > kHopperMostSegments) segments = kHopperMostSegments;
    if (segments <= 1 || jobs == 0) return 0;
    return segments - 1 < most / jobs ? jobs * (segments - 1) : most;
}

static void take_summaries(const gdelta_shape *shape, int64_t count, gdelta_workspace_table *table) {
    table->m = take(&table->bytes, (size_t)count * (size_t)shape->dim_k * (size_t)shape->dim_k * sizeof(float));
    table->n = take(&table->bytes, (size_t)count * (size_t)shape->dim_k * (size_t)shape->dim_v * sizeof(float));
}

void gdelta_workspace_hopper_forward(const gdelta_shape *shape, int64_t summaries, gdelta_workspace_table *table) {
    size_t chunk_heads = chunk_count(shape) * (size_t)shape->heads_o;
    gdelta_workspace_forward(shape, table);
    table->rows = take(&table->bytes, rows_bytes(shape, kHopperForwardRowFloats));
    table->x = take(&table->bytes, chunk_heads * (size_t)(shape->dim_k / kChunk) * kHopperTileBytes);
    table->z = take(&table->bytes, chunk_heads * kHopperLowerBytes);
    take_summaries(shape, summaries, table);
}

void gdelta_workspace_backward(const gdelta_shape *shape, bool own_checkpoints, gdelta_workspace_table *table) {
    size_t heads_rows = (size_t)shape->rows * (size_t)shape->heads_o;
    size_t tiles = (size_t)gdelta_backward_tiles(shape->dim_k, shape->dim_v);
    *table = (gdelta_workspace_table){0};
    table->malformed = take(&table->bytes, malformed_bytes(shape));
    table->checkpoints = take(&table->bytes, own_checkpoints ? gdelta_checkpoint_bytes(shape) : 0);
    table->dq = take(&table->bytes, heads_rows * tiles * (size_t)shape->dim_k * sizeof(float));
    table->dk = take(&table->bytes, heads_rows * tiles * (size_t)shape->dim_k * sizeof(float));
    bool shared_values = shape->heads_v < shape->heads_o;
    table->dv = take(&table->bytes, shared_values ? heads_rows * (size_t)shape->dim_v * sizeof(float) : 0);
    table->ddecay = take(&table->bytes, heads_rows * tiles * sizeof(float));
    table->dbeta = take(&table->bytes, heads_rows * tiles * sizeof(float));
}

void gdelta_workspace_hopper_backward(const gdelta_shape *shape, int64_t summaries, gdelta_workspace_table *table) {
    enum { kElementBytes = 2 };
    size_t chunk_heads = chunk_count(shape) * (size_t)shape->heads_o, recurrent = table->bytes;
    size_t state = (size_t)shape->dim_k * (size_t)shape->dim_v * kElementBytes;
    size_t values = kChunk * (size_t)shape->dim_v * kElementBytes;
    table->bytes = table->malformed;
    take(&table->bytes, malformed_bytes(shape));
    table->rows = take(&table->bytes, rows_bytes(shape, kHopperRowFloats));
    table->x = take(&table->bytes, chunk_heads * (size_t)(shape->dim_k / kChunk) * kHopperTileBytes);
    table->z = take(&table->bytes, chunk_heads * kHopperTileBytes);
    table->r = take(&table->bytes, chunk_heads * kHopperTileBytes);
    table->p = take(&table->bytes, chunk_count(shape) * (size_t)shape->heads_q * kHopperTileBytes);
    table->l = take(&table->bytes, chunk_count(shape) * (size_t)shape->heads_q * kHopperTileBytes);
    table->s = take(&table->bytes, chunk_heads * state);
    table->ds = take(&table->bytes, chunk_heads * state);
    table->w = take(&table->bytes, chunk_heads * values);
    table->y = take(&table->bytes, chunk_heads * values);
    bool parameters = shape->gate == GDELTA_GATE_SOFTPLUS;
    table->parameters = take(&table->bytes, parameters ? chunk_heads * 2 * sizeof(double) : 0);
    take_summaries(shape, 2 * summaries, table);
    if (table->bytes < recurrent) table->bytes = recurrent;
}

/* ---- Slices ---- */

gdelta_shape gdelta_slice_shape(const gdelta_shape *shape, int32_t slices) {
    gdelta_shape slice = *shape;
    slice.heads_q /= slices;
    slice.heads_k /= slices;
    slice.heads_v /= slices;
    slice.heads_o /= slices;
    return slice;
}

int64_t gdelta_slice_segments(const gdelta_shape *slice) {
    return slice->rows / (kChunk * kHopperSegmentChunks) * slice->heads_o;
}

int32_t gdelta_workspace_slices(const gdelta_shape *shape) {
    enum { kTokens = 1 << 16, kElementBytes = 2 }; /* a text so long that alignment counts for nothing */
    gdelta_shape text = *shape;
    text.packed = 0;
    text.sequences = 1;
    text.tokens = text.rows = kTokens;
    size_t state = (size_t)shape->dim_k * (size_t)shape->dim_v * kElementBytes;
    size_t most = 2 * chunk_count(&text) * (size_t)shape->heads_o * state;
    bool hopper = gdelta_is_hopper_dim(shape->dim_k) && gdelta_is_hopper_dim(shape->dim_v);
    for (int32_t slices = 1; slices < shape->heads_k; ++slices) {
        if (shape->heads_k % slices != 0) continue;
        gdelta_shape slice = gdelta_slice_shape(&text, slices);
        gdelta_workspace_table table;
        gdelta_workspace_backward(&slice, true, &table);
        if (hopper) gdelta_workspace_hopper_backward(&slice, gdelta_slice_segments(&slice), &table);
        if (table.bytes <= most) return slices;
    }
    return shape->heads_k;
}
