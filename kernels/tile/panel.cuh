// Panels: 64 elements of 16 bits wide, 128 bytes a row, any number of rows; what bulk tensor copies with the 128-byte
// swizzle make and wgmma reads. The eight 16-byte pieces of row r stand at places piece ^ (r % 8). Panels start at
// multiples of 1024 bytes. A tile wider than 64 is several panels one after the other.
#pragma once

#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/matrix.cuh"
#include "kernels/ptx/number.cuh"
#include "kernels/ptx/store.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace gdelta {

constexpr uint32_t kPanelBytes = 64 * 128;  // of 64 rows

// Offset of piece `piece` (16 bytes) of row `row`.
__device__ __forceinline__ uint32_t panel_offset(int row, int piece) {
    return static_cast<uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
}

// ---- Descriptors: an operand of wgmma, 16 deep in k. PTX ISA, "Matrix Descriptor Format": address / 16 in bits 0-13,
// leading-dimension offset / 16 from bit 16, stride offset / 16 from bit 32 (1024 bytes: eight rows), 128-byte swizzle
// 1 at bit 62. ----

// K-major: rows are M or N, 64 k a panel. Step `k16` (0-3) within the panel.
__device__ __forceinline__ uint64_t panel_k_major(uint32_t shared) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (shared >> 4 & 0x3fff);
}
constexpr uint64_t kStepK = 2;  // 16 elements along a row

// MN-major: rows are k, 64 of M or N a panel; the next 64 are `next` bytes on.
__device__ __forceinline__ uint64_t panel_mn_major(uint32_t shared, uint32_t next = kPanelBytes) {
    return 1ull << 62 | 64ull << 32 | static_cast<uint64_t>(next >> 4) << 16 | (shared >> 4 & 0x3fff);
}
constexpr uint64_t kStepMN = 128;  // 16 rows

// K-major without a swizzle: 16 columns of the tile after the other, in each the squares of 16 x 16 from top to bottom,
// four 8 x 8 matrices each, of 128 bytes, rows first. This one is of 16 columns.
__device__ __forceinline__ uint64_t squares_k_major(uint32_t shared) {
    return 16ull << 32 | 8ull << 16 | (shared >> 4 & 0x3fff);
}

// ---- Fragments: a warp's 16 rows of D ----

// A warp's place in a 64-row tile.
struct Lane {
    int warp, lane;
    int row;     // 16 warp + lane / 4; the other row is 8 below
    int column;  // 2 (lane % 4), within 8 columns
};

__device__ __forceinline__ Lane lane_of_warpgroup(int thread = threadIdx.x) {
    int t = thread % 128, lane = t % 32, warp = t / 32;
    return {warp, lane, 16 * warp + lane / 4, 2 * (lane % 4)};
}

// Where a lane points ldmatrix and stmatrix in the panel at `tile` for the 16 x 16 block of columns 16 s of its warp's
// rows: matrices 0, 1 are rows 0-7 and 8-15 of its left half, 2, 3 of its right. Piece 2 s + h of a row is at
// (h ^ row % 8) ^ 2 s: all blocks come from one address.
__device__ __forceinline__ uint32_t block_at(uint32_t tile, Lane p, int s) {
    return (tile + panel_offset(16 * p.warp + (p.lane & 15), p.lane >> 4)) ^ static_cast<uint32_t>(32 * s);
}

// Same place for ldmatrix.trans, to read the transpose of the panel: rows are then the panel's columns. The lane's 16
// rows are columns 16 warp ..., the block's columns rows 16 s ... of the panel.
__device__ __forceinline__ uint32_t block_at_trans(uint32_t tile, Lane p, int s) {
    return tile + panel_offset((p.lane & 7) + 8 * (p.lane >> 4), 2 * p.warp + (p.lane >> 3 & 1)) + 2048 * s;
}

}  // namespace gdelta
