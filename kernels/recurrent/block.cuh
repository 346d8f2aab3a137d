// A block's part of one head's state on its way between device memory and the lanes' registers (tile.cuh), through
// shared memory, where it needs no registers while it flies. Copies move whole rows, a line or more side by side,
// whatever the order of the state; lanes then take packs of 4 elements, 64 or 32 bytes of a row a warp.
//
// Shared memory: rows of 16-byte chunks as they lie in device memory. [K, V]: K rows of the block's columns, which all
// its warps copy together. [V, K]: a row for each column, which the warp that owns it copies alone. Lanes that take
// their packs at the same time stand 4 rows apart: there the places of chunks are exchanged, so that each lane finds
// banks of its own.
#pragma once

#include "kernels/recurrent/tile.cuh"

namespace gdelta {

template <int Width, typename T, bool Vk>
struct StateBlock {
    using Lanes = Tile<Width, kForwardLaneColumns>;
    static constexpr int kChunk = 16 / sizeof(T);      // elements
    static constexpr int kRowChunks = Width / kChunk;  // [V, K]
    // Chunks that the lanes of one access take in one row: 8 lanes of 16 bytes, 16 of 8.
    static constexpr int kSide = !Vk && sizeof(T) == 4 ? 4 : 2;

    unsigned char *shared;
    T *global;          // the first element of the block's part
    int pitch;          // elements from row to row there
    int rows, columns;  // that lie within the state from there on; columns: elements of a row
    int shift;          // log2 of the chunks of a row

    static __host__ __device__ constexpr int bytes(int threads) {
        return threads * (Width / 8) * kForwardLaneColumns * static_cast<int>(sizeof(T));
    }

    __device__ __forceinline__ StateBlock(unsigned char *shared, const gdelta_state_view &view, int64_t offset,
                                          int first_column, int dim_k, int dim_v)
        : shared(shared),
          global(static_cast<T *>(view.data) + offset + first_column * (Vk ? dim_k : 1)),
          pitch(Vk ? dim_k : dim_v),
          rows(Vk ? dim_v - first_column : dim_k),
          columns(Vk ? dim_k : dim_v - first_column),
          shift(log2_of(Vk ? kRowChunks : static_cast<int>(blockDim.x / 32) * kForwardWarpColumns / kChunk)) {
    }

    static __device__ __forceinline__ int log2_of(int power) {
        return __ffs(power) - 1;
    }

    __device__ __forceinline__ unsigned char *place(int row, int chunk) const {
        int exchange = (row / 4 * kSide % 8) & ((1 << shift) - 1);
        return shared + (((row << shift) + (chunk ^ exchange)) * 16);
    }

    // f(place, address, inside) for each chunk that this thread copies.
    template <typename F>
    __device__ __forceinline__ void for_chunks(F f) const {
        constexpr int kParts = Vk && kRowChunks > 32 ? kRowChunks / 32 : 1;  // of a row, for one warp
        constexpr int kStep = !Vk ? 32 / static_cast<int>(sizeof(T)) : kRowChunks > 32 ? 1 : 32 / kRowChunks;
        constexpr int kRows = Vk ? kForwardWarpColumns : Width;
        int thread = static_cast<int>(Vk ? threadIdx.x % 32 : threadIdx.x), chunk = thread & ((1 << shift) - 1);
        int row = (thread >> shift) + (Vk ? static_cast<int>(threadIdx.x / 32) * kForwardWarpColumns : 0);
        T *at = global + row * pitch + chunk * kChunk;
#pragma unroll
        for (int i = 0; i < kRows; i += kStep, at += kStep * pitch)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                int first = chunk + 32 * part;
                f(place(row + i, first), at + 32 * part * kChunk, row + i < rows && first * kChunk < columns);
            }
    }

    // f(i, j, c, pack) for each pack of this lane: element n is s.x[i][j + n][c] if Vk, else s.x[i][j][c + n].
    template <typename F>
    __device__ __forceinline__ void for_packs(TilePlace p, int first_column, F f) const {
        int column = p.column - first_column;
#pragma unroll
        for (int i = 0; i < Width / 32; ++i)
#pragma unroll
            for (int other = 0; other < 4; ++other) {
                int k = 32 * i + 4 * p.lane_k + (Vk ? 0 : other), v = column + (Vk ? other : 0);
                int row = Vk ? v : k, element = Vk ? k : v;
                auto *at = place(row, element / kChunk) + element % kChunk * sizeof(T);
                f(i, Vk ? 0 : other, Vk ? other : 0, *reinterpret_cast<Pack<T, 4> *>(at));
            }
    }

    // From device memory, all at once; the thread that has waited for its copies has only its own.
    __device__ __forceinline__ void fetch() const {
        for_chunks([](unsigned char *place, const T *from, bool inside) { copy_async(place, from, inside); });
    }

    __device__ __forceinline__ void take(TilePlace p, int first_column, Lanes &s) const {
        for_packs(p, first_column, [&](int i, int j, int c, const Pack<T, 4> &pack) {
#pragma unroll
            for (int n = 0; n < 4; ++n) s.x[i][j + (Vk ? n : 0)][c + (Vk ? 0 : n)] = to_float(pack.x[n]);
        });
    }

    // Back, by way of the same places: those that meet in a row have all put their packs there.
    __device__ __forceinline__ void store(TilePlace p, int first_column, const Lanes &s) const {
        for_packs(p, first_column, [&](int i, int j, int c, Pack<T, 4> &pack) {
#pragma unroll
            for (int n = 0; n < 4; ++n) from_float(s.x[i][j + (Vk ? n : 0)][c + (Vk ? 0 : n)], &pack.x[n]);
        });
        Vk ? __syncwarp() : __syncthreads();
        for_chunks([](const unsigned char *place, T *to, bool inside) {
            if (inside) st_global(to, *reinterpret_cast<const uint4 *>(place));
        });
    }
};

}  // namespace gdelta
