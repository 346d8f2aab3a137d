// A block's part of one head's state on its way between device memory and the lanes' registers (tile.cuh), through
// shared memory, where it needs no registers while it flies. Copies move whole rows, a line or more side by side,
// whatever the order of the state; lanes then take packs of 4 elements, 64 or 32 bytes of a row a warp.
//
// Shared memory: rows of 16-byte chunks as they lie in device memory. [K, V]: K rows of the block's columns, which all
// its warps copy together. [V, K]: a row for each column, which the warp that owns it copies alone. Lanes that take
// their packs at the same time stand 4 rows apart: there the places of chunks within 128 bytes are exchanged, so that
// each lane finds banks of its own. Rows have one length whatever the block's width, and the exchange repeats, so that
// a lane's places differ by constants.
#pragma once

#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/number.cuh"
#include "kernels/recurrent/tile.cuh"

namespace gdelta {

constexpr int kStateBarrier = 1, kTurnBarrier = 2;  // of the warps that hold a state; of all

// Columns of V of the widest block.
template <int Width>
constexpr int kBlockColumns = Width <= 128 ? kForwardColumns : kForwardColumns / 2;

// Four numbers side by side in shared memory, one access: of single elements the compiler makes one each.
template <typename T>
struct Four {
    static __device__ __forceinline__ void load(const unsigned char *at, float (&x)[4]) {
        uint2 word = *reinterpret_cast<const uint2 *>(at);
        float2 low = unpack<T>(word.x), high = unpack<T>(word.y);
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
    static __device__ __forceinline__ void store(unsigned char *at, const float (&x)[4]) {
        *reinterpret_cast<uint2 *>(at) = make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]));
    }
};

template <>
struct Four<float> {
    static __device__ __forceinline__ void load(const unsigned char *at, float (&x)[4]) {
        float4 word = *reinterpret_cast<const float4 *>(at);
        x[0] = word.x, x[1] = word.y, x[2] = word.z, x[3] = word.w;
    }
    static __device__ __forceinline__ void store(unsigned char *at, const float (&x)[4]) {
        *reinterpret_cast<float4 *>(at) = make_float4(x[0], x[1], x[2], x[3]);
    }
};

// Columns: of V, of the widest block.
template <int Width, typename T, bool Vk, int Columns = kBlockColumns<Width>>
struct StateBlock {
    using Lanes = Tile<Width, kForwardLaneColumns>;
    static constexpr int kChunk = 16 / sizeof(T);  // elements
    static constexpr int kRowChunks = (Vk ? Width : Columns) / kChunk;
    static constexpr int kRow = 16 * kRowChunks;  // bytes
    static constexpr int kBytes = Width * Columns * sizeof(T);
    static constexpr int kCopied = Vk ? 32 / (kRowChunks < 32 ? kRowChunks : 32) : 2 * kChunk;  // rows at a time
    // Chunks that the lanes of one access take in one row: 8 lanes of 16 bytes, 16 of 8.
    static constexpr int kSide = !Vk && sizeof(T) == 4 ? 4 : 2;

    unsigned char *shared;
    int warps;
    T *global;          // the first element of the block's part
    int pitch;          // elements from row to row there
    int rows, columns;  // that lie within the state from there on; columns: elements of a row

    __device__ __forceinline__ StateBlock(unsigned char *shared, int warps, const gdelta_state_view &view,
                                          int64_t offset, int first_column, int dim_k, int dim_v)
        : shared(shared),
          warps(warps),
          global(static_cast<T *>(view.data) + offset + first_column * (Vk ? dim_k : 1)),
          pitch(Vk ? dim_k : dim_v),
          rows(Vk ? dim_v - first_column : dim_k),
          columns(Vk ? dim_k : dim_v - first_column) {
    }

    static constexpr int kExchanged = kRowChunks < 8 ? kRowChunks : 8;

    __device__ __forceinline__ unsigned char *place(int row, int chunk) const {
        return shared + row * kRow + (chunk ^ row / 4 * kSide % kExchanged) * 16;
    }

    // f(place, address, inside) for each chunk that this thread copies.
    template <typename F>
    __device__ __forceinline__ void for_chunks(F f) const {
        constexpr int kParts = kRowChunks > 32 ? kRowChunks / 32 : 1;  // of a row of [V, K], for one warp
        constexpr bool kAlike = kCopied % 4 == 0 && kCopied / 4 * kSide % kExchanged == 0;
        constexpr int kRows = Vk ? kForwardWarpColumns : Width;
        int shift = __ffs(Vk ? (kRowChunks < 32 ? kRowChunks : 32) : warps * (kForwardWarpColumns / kChunk)) - 1;
        int thread = static_cast<int>(Vk ? threadIdx.x % 32 : threadIdx.x), chunk = thread & ((1 << shift) - 1);
        int row = (thread >> shift) + (Vk ? static_cast<int>(threadIdx.x / 32) * kForwardWarpColumns : 0);
        unsigned char *to = place(row, chunk);
        T *at = global + row * pitch + chunk * kChunk;
#pragma unroll
        for (int i = 0; i < kRows; i += kCopied, at += kCopied * pitch)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                bool inside = row + i < rows && (chunk + 32 * part) * kChunk < columns;
                f((kAlike ? to + i * kRow : place(row + i, chunk)) + 512 * part, at + 32 * part * kChunk, inside);
            }
    }

    // f(i, j, c, place) for each pack of this lane: element n is s.x[i][j + n][c] if Vk, else s.x[i][j][c + n].
    template <typename F>
    __device__ __forceinline__ void for_packs(TilePlace p, int first_column, F f) const {
        constexpr int kTurn =
            Vk ? 128 / (32 * static_cast<int>(sizeof(T))) : 1;  // groups of rows side by side in 128 bytes
        int column = p.column - first_column, row = 4 * p.lane_k;
        unsigned char *base[kTurn];
#pragma unroll
        for (int i = 0; i < kTurn; ++i) {
            int element = Vk ? row + 32 * i : column;
            base[i] = place(Vk ? column : row, element / kChunk) + element % kChunk * sizeof(T);
        }
#pragma unroll
        for (int i = 0; i < Width / 32; ++i)
#pragma unroll
            for (int other = 0; other < 4; ++other) {
                auto *at = base[i % kTurn] + other * kRow + (Vk ? i / kTurn * 128 : 32 * i * kRow);
                f(i, Vk ? 0 : other, Vk ? other : 0, at);
            }
    }

    // From device memory, all at once; zeros if there is no state. The thread that has waited for its copies has only
    // its own.
    __device__ __forceinline__ void fetch(bool there) const {
        for_chunks(
            [there](unsigned char *place, const T *from, bool inside) { copy_async(place, from, there && inside); });
    }

    __device__ __forceinline__ void take(TilePlace p, int first_column, Lanes &s) const {
        for_packs(p, first_column, [&](int i, int j, int c, const unsigned char *place) {
            float x[4];
            Four<T>::load(place, x);
#pragma unroll
            for (int n = 0; n < 4; ++n) s.x[i][j + (Vk ? n : 0)][c + (Vk ? 0 : n)] = x[n];
        });
    }

    // Back, by way of the same places: those that meet in a row have all put their packs there. Afterwards this thread
    // may fetch into them again, stored or not: the others have taken theirs.
    __device__ __forceinline__ void store(TilePlace p, int first_column, const Lanes &s, bool wanted) const {
        for_packs(p, first_column, [&](int i, int j, int c, unsigned char *place) {
            float x[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = s.x[i][j + (Vk ? n : 0)][c + (Vk ? 0 : n)];
            Four<T>::store(place, x);
        });
        write(wanted);
    }

    // What stands in the places.
    __device__ __forceinline__ void write(bool wanted) const {
        Vk ? __syncwarp() : named_barrier(kStateBarrier, 32 * warps);
        for_chunks([wanted](const unsigned char *place, T *to, bool inside) {
            if (wanted && inside) st_global(to, *reinterpret_cast<const uint4 *>(place));
        });
    }
};

}  // namespace gdelta
