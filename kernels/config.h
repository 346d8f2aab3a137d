/* Tile numbers: each has its home and its reason here. C11 and CUDA: the plan and the kernels read the same ones. */
#ifndef GDELTA_CONFIG_H
#define GDELTA_CONFIG_H

#include <stdint.h>

#ifdef __CUDACC__
#define GDELTA_INLINE static inline __host__ __device__
#else
#define GDELTA_INLINE static inline
#endif

/* ---- Recurrent engine ---- */

/* The compiled widths: K is padded with zeros to the next. This list is both what is compiled and what is supported. */
#define GDELTA_RECURRENT_WIDTHS(X) X(64) X(128) X(256)

enum {
    kRecurrentMaxDim = 256,

    /* Tokens between two states that forward leaves for backward. */
    kRecurrentSegment = 64,

    /* Tokens that backward replays from one stashed state: the replay costs (window - 1) / 2 steps a token, the way to
     * the window's start (segment - window) / 2 / window. 8 is the minimum of the sum for a segment of 64. */
    kRecurrentWindow = 8,

    /* Lanes of a warp along V; the other 8 are along K. A lane holds K / 8 x 4 elements of the state, 64 registers at
     * K = 128. */
    kRecurrentLanesV = 4,

    /* Forward and step: a block has 64 columns of V, so that V = 128 gives two blocks a head; 4 columns a lane. */
    kForwardLaneColumns = 4,
    kForwardWarpColumns = kRecurrentLanesV * kForwardLaneColumns,
    kForwardColumns = 64,
    /* Rows of q, k, v staged in shared memory at a time, two buffers. */
    kForwardStage = 8,
    /* With fewer heads in all, a step's blocks have half the columns: 32 heads then fill 128 multiprocessors. */
    kStepManyHeads = 64,
    /* From so many heads on, a block of one token has 256 bytes of each row of a [K, V] state instead of 128: device
     * memory then gives more, but so few blocks fit that fewer heads fill them badly. H200, fp32, V = 128, us at 512,
     * 1024, 2048, 4096, 8192 heads: 128 bytes 20.5, 37.7, 74.2, 140.9, 275; 256 bytes 23.5, 41.5, 73.8, 138.9, 270. */
    kDecodeWideHeads = 2048,
    /* Of a step's block, bytes: what every architecture from sm_80 on has. Only K > 128 with many tokens needs more. */
    kStepMostShared = 96 * 1024,
    /* And besides what it asks for: its jobs, and 1 KB that the system keeps. */
    kStepOtherShared = 2 * 1024,
    /* Places for states in a step's block: one is worked on while the next is fetched. */
    kStepPlaces = 2,
    kStepJobs = kStepPlaces + 2, /* known pieces: those in places, the one after them, and one that is being left */
    kStepServers = 2,

    /* Backward: at most 8 warps. Two register tiles, S and dS. */
    kBackwardWarps = 8,

    kRowWarps = 8, /* warps of a block of the row reduction */
    kGateThreads = 512,
    kCheckThreads = 1024
};

/* Columns of V that a lane of backward holds: two tiles of K / 8 rows must fit 128 registers. */
#define GDELTA_BACKWARD_LANE_COLUMNS(width) ((width) <= 128 ? 4 : 2)

/* The compiled width that holds dim_k; 0 if none does. */
GDELTA_INLINE int32_t gdelta_recurrent_width(int32_t dim_k) {
#define GDELTA_CASE(width) \
    if (dim_k <= width) return width;
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return 0;
}

/* Columns of V that one block of backward covers. */
GDELTA_INLINE int32_t gdelta_backward_columns(int32_t width) {
    return kBackwardWarps * kRecurrentLanesV * GDELTA_BACKWARD_LANE_COLUMNS(width);
}

/* Blocks along V. */
GDELTA_INLINE int32_t gdelta_forward_tiles(int32_t dim_v) {
    return (dim_v + kForwardColumns - 1) / kForwardColumns;
}

GDELTA_INLINE int32_t gdelta_backward_tiles(int32_t dim_k, int32_t dim_v) {
    int32_t columns = gdelta_backward_columns(gdelta_recurrent_width(dim_k));
    return (dim_v + columns - 1) / columns;
}

/* ---- Hopper engine ---- */

/* The compiled K, and likewise V: what is compiled and what is supported. */
#define GDELTA_HOPPER_DIMS(X) X(64) X(128)

enum {
    kChunk = 64, /* tokens */

    /* The longest sequence for which AUTO prefers the recurrent engine. One chunk, to be measured. */
    kHopperMinTokens = 64,
    /* Likewise of backward. 16/32, recurrent and hopper, us: 64 x 4: 366 and 438; 64 x 8: 604 and 441; 1 x 4: 55
     * and 45.
     */
    kHopperBackwardMinTokens = 8,

    /* Two numbers a token, and one a chunk padded to 16 bytes; in backward six. */
    kHopperForwardRowFloats = 2 * kChunk + 4,
    kHopperRowFloats = 6 * kChunk + 4,
    kHopperTileBytes = kChunk * kChunk * 2,
    kHopperSquareBytes = 16 * 16 * 2,
    kHopperLowerBytes = 10 * kHopperSquareBytes, /* a lower triangular tile in squares, those above left out */
    /* Chunks and query heads up to which forward's kernels overlap (programmatic launch). 2/8, 1 x 2048, 64 of them: 51
     * us without, 44 with; 16/64, 1 x 8192, 2048 of them: 255 and 262; 16/32, 1 x 32768: 739 and 829. */
    kHopperEarlyBlocks = 128,

    kHopperPrepareHeads = 8, /* output heads of one block of prepare */

    /* Segments of a sequence at most, and chunks of one at least: so summaries stay below 12 KiB a token at 48 heads.
     */
    kHopperMostSegments = 32,
    kHopperSegmentChunks = 8,

    /* What a chunk takes, nanoseconds on an H200 (bench/NOTES.md): in a block of scan that has 128 columns of V, or 64;
     * in a block of summary, alone on its multiprocessor or one of two. Then a segment in merge, and the two kernels'
     * launches. The plan weighs them, no more: 16/32, 1 x 32768 predicts 552 us for two segments and 563 for one;
     * measured 557 and 590. */
    kHopperChunkNs2 = 1900,
    kHopperChunkNs1 = 1100,
    kHopperSummaryNs1 = 1050,
    kHopperSummaryNs2 = 1300,
    kHopperMergeNs = 3500,
    kHopperSegmentsNs = 6000,

    /* Of backward, likewise: in a block of chains; in one of hopper_chain_summary, for which these are estimates (2/4,
     * 1 x 32768 in 12 segments, two a multiprocessor: 1870). And what memory brings and takes: at 16/32, 1 x 32768
     * chains move 229 KB a chunk and head in 55.6 ns. */
    kHopperChainNs2 = 1970,
    kHopperChainNs1 = 1290,
    kHopperChainSummaryNs1 = 1200,
    kHopperChainSummaryNs2 = 1500,
    kHopperBytesPerNs = 4120
};

GDELTA_INLINE int gdelta_is_hopper_dim(int32_t dim) {
#define GDELTA_CASE(compiled) \
    if (dim == compiled) return 1;
    GDELTA_HOPPER_DIMS(GDELTA_CASE)
#undef GDELTA_CASE
    return 0;
}

/* Chunks of all sequences. Packed: chunk c of the sequence of rows [begin, end), the n-th, is number
 * begin / 64 + n + c, so that no table of sums is needed; numbers between sequences stay unused. */
GDELTA_INLINE int64_t gdelta_chunk_capacity(int64_t sequences, int64_t tokens, int64_t rows, int32_t packed) {
    return packed ? rows / kChunk + sequences : sequences * ((tokens + kChunk - 1) / kChunk);
}

#endif /* GDELTA_CONFIG_H */
