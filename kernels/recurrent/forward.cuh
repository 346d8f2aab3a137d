// What forward, step and draft share: rows of q, k, v on their way from memory to shared memory, and one token.
//
//   with the state S of before the token:   u = beta (v - e S^T k),   S <- e S + k u^T,   e = exp(g)
//                                            o = scale (e S^T q + u <k, q>)
//
// so that S^T k and S^T q are one pass over S and the update is a second: 4 instructions an element and token. Every
// multiplication that could be fused into an addition is written so, for the bits of a state must not depend on the
// kernel that makes it.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/number.cuh"
#include "kernels/recurrent/tile.cuh"
#include "kernels/rule/gate.cuh"
#include "kernels/rule/norm.cuh"

namespace gdelta {

// A row staged in shared memory in fp32: q and k normalised and zero-padded to Width, v zero-padded. Columns: of V, of
// the widest block.
template <int Width, int Columns = kForwardColumns>
struct alignas(16) StagedRow {
    float q[Width], k[Width], v[Columns];
    float decay, beta, kq;
};

// One row in registers on its way to shared memory.
template <int Width, int Columns = kForwardColumns>
struct ForwardRow {
    Row<Width / 32> q, k;
    Row<Columns / 32> v;
    Gates gates;
};

// S <- e S + k u^T
template <int Width, int Columns>
__device__ __forceinline__ void update_tile(Tile<Width, Columns> &s, TilePlace p, const float *row_k,
                                            const float (&u)[Columns], float e) {
#pragma unroll
    for (int i = 0; i < s.kGroups; ++i) {
        float k[4];
        load_four(row_k, i, p, k);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < Columns; ++c) s.x[i][j][c] = fmaf(k[j], u[c], e * s.x[i][j][c]);
    }
}

template <int Width, int Columns = kForwardColumns>
struct Forward {
    static constexpr int kColumns = kForwardLaneColumns;
    using Staged = StagedRow<Width, Columns>;
    using Fetched = ForwardRow<Width, Columns>;
    const gdelta_forward_call &call;
    const Job &at;
    int head, first_column;

    __device__ __forceinline__ void load(const Job &job, int64_t t, Fetched &row) const {
        const gdelta_shape &shape = call.shape;
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32;
        auto load_as = [&](auto *type) {
            using Bits = const std::remove_pointer_t<decltype(type)>;
            row.q.load_as(static_cast<Bits *>(in.q.data) + job.q + t * in.q.token, shape.dim_k, lane);
            row.k.load_as(static_cast<Bits *>(in.k.data) + job.k + t * in.k.token, shape.dim_k, lane);
            row.v.load_as(static_cast<Bits *>(in.v.data) + job.v + t * in.v.token + first_column,
                          shape.dim_v - first_column, lane);
        };
        if (in.q.dtype == GDELTA_DTYPE_FP32) {  // q, k and v have one type
            load_as(static_cast<uint32_t *>(nullptr));
        } else {
            load_as(static_cast<uint16_t *>(nullptr));
        }
        row.gates.load(in, job.g + t * in.g.token, job.beta + t * in.beta.token);
    }

    __device__ __forceinline__ void store(const Fetched &row, Staged &staged, GateParameters gate) const {
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32;
        float q[Width / 32], k[Width / 32], v[Columns / 32];
        row.q.values(in.q.dtype, q);
        row.k.values(in.q.dtype, k);
        row.v.values(in.q.dtype, v);
        // Three sums side by side, then both norms at once, q's on the even lanes.
        float sum_q = square_sum(q), sum_k = square_sum(k), kq = 0.0f;
#pragma unroll
        for (int i = 0; i < Width / 32; ++i) kq = fmaf(k[i], q[i], kq);
        sum_q = sum_lanes<31>(sum_q), sum_k = sum_lanes<31>(sum_k), kq = sum_lanes<31>(kq);
        float norm = norm_of(call.shape, lane % 2 ? sum_k : sum_q);
        float norm_q = __shfl_sync(0xffffffffu, norm, 0), norm_k = __shfl_sync(0xffffffffu, norm, 1);
#pragma unroll
        for (int i = 0; i < Width / 32; ++i) {
            staged.q[lane + 32 * i] = q[i] * norm_q;
            staged.k[lane + 32 * i] = k[i] * norm_k;
        }
#pragma unroll
        for (int i = 0; i < Columns / 32; ++i) staged.v[lane + 32 * i] = v[i];
        float decay = row.gates.decay(call.shape, in, gate), beta = row.gates.beta_value(call.shape, in);
        if (lane == 0) {
            staged.decay = decay;
            staged.beta = beta;
            staged.kq =
                norm > 0.0f && norm_k > 0.0f ? kq * norm_q * norm_k : 0.0f;  // a norm of 0: its square overflowed
        }
    }

    // All rows of at most 2 * kForwardStage, by all warps of the block; a barrier must follow. Loads first, by `early`,
    // what this thread found out itself; `between` runs while they are on their way.
    template <typename F>
    __device__ __forceinline__ void stage_rows(const Job &early, Staged *rows, int length, F between) const {
        constexpr int kAhead = Width <= 128 ? 2 : 1;
        int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
        Fetched ahead[kAhead];
        GateBits gate;
        gate.load(call.in, head);
#pragma unroll 1
        for (int first = warp; first < length || first == warp; first += kAhead * warps) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (first + i * warps < length) load(early, first + i * warps, ahead[i]);
            }
            if (first == warp) between();
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                int t = first + i * warps;
                if (t < length) store(ahead[i], rows[t], gate.parameters(call.in));
            }
        }
    }

    // A row over V from element `offset` on: each lane has the number of its own column, lane_k % 4. 16 columns side by
    // side in one instruction, by the lanes that end with S^T q.
    __device__ __forceinline__ void write(const gdelta_view &view, int64_t offset, TilePlace p, float x) const {
        int column = p.column + p.lane_k % kColumns;
        if (p.lane_k < kColumns || column >= call.shape.dim_v) return;
        store_element(view.data, view.dtype, offset + column, x);
    }

    __device__ __forceinline__ void write_o(TilePlace p, int64_t t, float x) const {
        if (call.o.data) write(call.o, at.o + t * call.o.token, p, x);
    }

    // One token: S and o. Returns u of the lane's own column.
    __device__ __forceinline__ float token(Tile<Width, kColumns> &s, TilePlace p, const Staged &row, int64_t t) const {
        float sums[2 * kColumns] = {}, *sk = sums, *sq = sums + kColumns;
#pragma unroll
        for (int i = 0; i < s.kGroups; ++i) {
            float k[4], q[4];
            load_four(row.k, i, p, k);
            load_four(row.q, i, p, q);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    sk[c] = fmaf(s.x[i][j][c], k[j], sk[c]);
                    sq[c] = fmaf(s.x[i][j][c], q[j], sq[c]);
                }
        }
        float o, u[kColumns], mine = finish(row, p, sums, u, o);
        update_tile(s, p, row.k, u, row.decay);
        write_o(p, t, o);
        return mine;
    }

    // From this lane's parts of S^T k and S^T q: u of its columns, o of its own. Returns u of its own column.
    __device__ __forceinline__ float finish(const Staged &row, TilePlace p, const float (&sums)[2 * kColumns],
                                            float (&u)[kColumns], float &o) const {
        float v = row.v[p.column - first_column + p.lane_k % kColumns];
        float e = row.decay, beta = row.beta, kq = row.kq, scale = static_cast<float>(call.shape.scale);
        float sum = sum_rows(sums, p);  // lanes below 16 get S^T k, the others S^T q
        float mine = beta * fmaf(-e, sum, v);
        int lane_v = opaque(p.lane_v);  // else the loop over the tokens keeps a register for each lane
#pragma unroll
        for (int c = 0; c < kColumns; ++c) u[c] = __shfl_sync(0xffffffffu, mine, kRecurrentLanesV * c + lane_v);
        mine = __shfl_sync(0xffffffffu, mine, threadIdx.x % 16);
        o = scale * fmaf(e, sum, mine * kq);
        return mine;
    }
};

template <int Width, int Columns>
__device__ __forceinline__ void load_initial(Tile<Width, Columns> &s, TilePlace p, const gdelta_inputs &in,
                                             const gdelta_shape &shape, int64_t initial) {
    if (initial >= 0) {
        load_state(s, p, in.initial, initial, shape.dim_k, shape.dim_v);
    } else {
        clear_tile(s);
    }
}

// One piece of work: a tile of V of one output head of sequence n.
struct BlockPlace {
    int64_t n;
    int head, first_column;
    bool reporter;  // where what is wrong with the sequence's tables is reported
};

// One division before the sequence is known, for its slot is what the state waits for.
__device__ __forceinline__ BlockPlace place_of(const gdelta_shape &shape, unsigned piece, unsigned tiles, int columns) {
    unsigned heads = static_cast<unsigned>(shape.heads_o), n = piece / (heads * tiles);
    unsigned rest = piece - n * (heads * tiles), head = rest / tiles, tile = rest - head * tiles;
    return {n, static_cast<int>(head), static_cast<int>(tile) * columns, rest == 0};
}

// Where each block has one piece, and a warp to every 16 columns of it; one thread reports.
__device__ __forceinline__ BlockPlace block_place(const gdelta_shape &shape, unsigned tiles) {
    int columns = static_cast<int>(blockDim.x / 32) * kForwardWarpColumns;
    BlockPlace place = place_of(shape, blockIdx.x, tiles, columns);
    place.reporter = place.reporter && threadIdx.x == 0;
    return place;
}

// Warps, a power of two, of a block that has at most `columns` columns of V.
inline int warps_of(const gdelta_shape &shape, int columns) {
    if (columns > shape.dim_v) columns = shape.dim_v;
    int warps = 1;
    while (warps * kForwardWarpColumns < columns) warps *= 2;
    return warps;
}

// One block to each sequence, output head and tile of V, with those warps.
// The launch may begin before the grid in front of it in the stream has ended (programmatic dependent launch, sm_90):
// its kernel begins with wait_for_grids, and what a launch takes is hidden.
struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    unsigned tiles;

    int device = 0, major;

    Launch(const gdelta_shape &shape, int warps, size_t shared_bytes, gdelta_stream stream) {
        int columns = warps * kForwardWarpColumns;
        tiles = static_cast<unsigned>((shape.dim_v + columns - 1) / columns);
        config.gridDim = static_cast<unsigned>(shape.sequences * shape.heads_o) * tiles;
        config.blockDim = static_cast<unsigned>(32 * warps);
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream;
        cudaGetDevice(&device);
        major = attribute_of(cudaDevAttrComputeCapabilityMajor);
        if (major < 9) return;
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }

    int attribute_of(cudaDeviceAttr what) const {
        int value = 0;
        cudaDeviceGetAttribute(&value, what, device);
        return value;
    }
};

// All blocks wait, those without work too: that this grid has ended must mean that those before it have. The next grid
// may begin at once, for it waits likewise.
__device__ __forceinline__ void wait_for_grids() {
    grid_wait();
    grid_release();
}

}  // namespace gdelta
