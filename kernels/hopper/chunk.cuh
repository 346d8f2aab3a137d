// What prepare and scan share: where a chunk lies, and the table of numbers that prepare leaves for each of its tokens.
#pragma once

#include "kernels/config.h"
#include "kernels/launch.h"
#include "kernels/rule/sequence.cuh"
#include "kernels/tile/panel.cuh"

namespace gdelta {

// fp16 operands hold at most 65504: copies of the state and of W are kept 16 times smaller, X and Z 16 times larger.
template <typename T>
struct Range {
    static constexpr float kDown = 1.0f, kUp = 1.0f, kLogUp = 0.0f;
};
template <>
struct Range<__half> {
    static constexpr float kDown = 1.0f / 16, kUp = 16.0f, kLogUp = 4.0f;
};

// The row table of one chunk and output head, in forward. r are norm factors, e = exp(G), G the sum of log gates from
// the chunk's first token on. X and Z have beta in them.
enum ForwardTable {
    kForwardKey = 0,      // e r_k. 64 floats
    kForwardDecay = 64,   // one float: exp(G_last)
    kForwardOutput = 68,  // scale e r_q
    kForwardFloats = 132
};

// In backward, kHopperRowFloats floats.
enum RowTable {
    kRowGates = 0,     // for each pair of tokens: beta, beta, beta e r_k, beta e r_k. 128 floats
    kRowDecay = 128,   // one float: exp(G_last)
    kRowOutput = 132,  // scale e r_q
    kRowNorm = 196,    // r_k
    kRowLog = 260,     // log2 e
    kRowNormQ = 324    // r_q
};

static_assert(static_cast<int>(kForwardFloats) == kHopperForwardRowFloats, "");

// Z in memory: its squares of 16 x 16 on and below the diagonal, column by column; as the tensor cores read them,
// squares_k_major of tile/panel.cuh.
__device__ __forceinline__ constexpr int lower_column(int j) {
    return kHopperSquareBytes * (j * (9 - j) / 2);
}

// Chunk number of the c-th chunk of a sequence.
__device__ __forceinline__ int64_t chunk_number(const gdelta_shape &shape, int64_t n, int64_t begin, int64_t c) {
    return shape.packed ? begin / kChunk + n + c : n * ((shape.tokens + kChunk - 1) / kChunk) + c;
}

// The i-th output head that reads query head `head_q`, and the key head that they read.
__device__ __forceinline__ int head_in_group(const gdelta_shape &shape, int head_q, int i) {
    int group = shape.heads_o / shape.heads_q;
    return shape.head_map == GDELTA_HEADS_TILED ? head_q + i * shape.heads_q : head_q * group + i;
}

__device__ __forceinline__ int key_head(const gdelta_shape &shape, int head_q) {
    return shape.heads_q == shape.heads_k ? head_q : head_of(shape, head_q, shape.heads_k);
}

struct Chunk {
    int64_t batch, begin;  // first token on the token axis
    int rows;              // 1 .. 64; 0: the number is not in use
};

// One warp; every lane gets the answer.
__device__ __forceinline__ Chunk find_chunk(const gdelta_shape &shape, const gdelta_inputs &in, int64_t number) {
    int64_t n, c, begin = 0, length = shape.tokens;
    if (!shape.packed) {
        unsigned chunks = static_cast<unsigned>((shape.tokens + kChunk - 1) / kChunk);  // all of them fit in 32 bits
        n = static_cast<unsigned>(number) / chunks;
        c = static_cast<unsigned>(number) % chunks;
    } else {
        // The last sequence whose first number is not above: each round tries 32 of those in question.
        int64_t low = 0, high = shape.sequences;
        int lane = threadIdx.x % 32;
        while (high - low > 1) {
            int64_t step = (high - low + 31) / 32, probe = low + lane * step;
            bool below = probe < high && load_index(in.cu_seqlens, probe) / kChunk + probe <= number;
            low += (__popc(__ballot_sync(0xffffffffu, below)) - 1) * step;
            high = low + step < high ? low + step : high;
        }
        n = low;
        begin = load_index(in.cu_seqlens, n);
        length = load_index(in.cu_seqlens, n + 1) - begin;
        c = number - (begin / kChunk + n);
    }
    Chunk chunk = {shape.packed ? 0 : n, begin + c * kChunk, 0};
    int64_t left = length - c * kChunk;
    if (c >= 0 && left > 0) chunk.rows = left < kChunk ? static_cast<int>(left) : kChunk;
    return chunk;
}

// Rows from `rows` on of a tile of 64-row panels become zeros: what a bulk copy brought there belongs to others. All
// `threads` threads call it, and meet at a barrier afterwards.
__device__ __forceinline__ void clear_rows(uint32_t tile, int panels, int rows, int thread, int threads) {
    int pieces = (kChunk - rows) * 8;
    for (int i = thread; i < panels * pieces; i += threads) {
        int panel = i / pieces, piece = i % pieces;
        st_shared(tile + panel * kPanelBytes + (rows * 8 + piece) * 16, make_uint4(0, 0, 0, 0));
    }
    fence_async_shared();
}

}  // namespace gdelta
