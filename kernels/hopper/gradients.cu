// Hopper backward, third kernel, after chains: all gradients of a chunk, from the state S before it, the gradient dS'
// of the state after it, and w and y of its tokens (chains.cu). No chunk waits for another.
//
// Per output head, with k, q normalised, e = exp(G), Gamma_ij = exp(G_i - G_j):
//
//   D1 = dO S^T   D2 = y S^T   D3 = w dS'^T                        [64, K]
//   E1 = dO w^T   E2 = y w^T                                       [64, 64]
//   A1_ij = scale Gamma_ij beta_j E1_ij,  j <= i                   gradient of q_i.k_j
//   A2_ij = -Gamma_ij beta_i beta_j E2_ij,  j < i                  gradient of k_i.k_j
//   dbeta_i = E2_ii,   dv = beta y
//   dq0 = scale e D1,   dk0 = -e beta D2,   dk1_j = exp(G_last - G_j) beta_j D3_j
//   M_ij = A1_ij q_i.k_j + A2_ij k_i.k_j,  j < i
//   dg_i = sum over i' >= i of (q.dq0 + k.dk0 + rowsum M - colsum M)_i' + sum over j < i of k_j.dk1_j
//          + exp(G_last) <dS', S>
//
// and summed over the output heads that share a key head,
//
//   dq = dq0 + A1 k,   dk = dk0 + dk1 + A1^T q + (A2 + A2^T) k,    then through the norm.
//
// The diagonal of M would add and subtract the same number, so it is left out: under strong gates the rest is far
// smaller. Row and column sums of one M cancel but for rounding in fp32, so the gate before the first token gets 0
// where S is 0.
//
// Persistent blocks; a job is a chunk and a key head, whose output heads are taken in turn. Where query heads are
// grouped, every output head has a query head of its own, which is begun and ended with it. All sums stay in the
// registers of one thread, in a fixed order. Block: warpgroups
//
//   queries   E1, D1, dq, A1 for `keys`      keys    E2, D2, D3, dk
//   values    dv, <dS', S>                   fourth  three loading warps: rows, dO, w; y, S, dS'; p, l, q, k; and
//                                                    `gates`: dg, dbeta
//
// Memory sets the pace (150 to 170 KB a chunk and output head, 8700 cycles at the rate of a copy; tensor cores 2560),
// so no role waits for another but for room, and what has no second buffer is needed late: a head begins with E1 and
// E2, whose operands were loaded a head ahead, while S, dS' and, in a new job, q and k are on their way. Jobs are found
// ahead of all by a loading warp; `gates` loads g and beta before the sums that it waits for are there.
//
// Shared memory at K = V = 128, KB: q, k 32; p, l 16; S, dS' 64; dO, w, y two stages 96; A1 or A2 8; rows and sums,
// two stages, 9.
// q and k serve the products and the dot products of rows; p = scale lower(q k^T) and l = strictly_lower(k k^T) are
// prepare's.
//
// Precision: fp32 but for the operands; A1 r_k, A1 r_q, A2 r_k are rounded once to T, with the norm factor of the raw
// row that they meet.
#include "kernels/hopper/backward.cuh"
#include "kernels/hopper/launch.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/rule/parameters.cuh"

namespace gdelta {

constexpr int kWarps = 4;  // of a warpgroup

// A chunk and a key head. Registers have no room for it.
struct GradientJob {
    int64_t number;
    Chunk chunk;
    int head_k, members;  // output heads of the key head
    bool skip;
};

template <int PanelsK, int PanelsV>
struct __align__(1024) GradientShared {
    static constexpr int kStages = 2;  // of dO, w, y, rows, sums
    static constexpr int kJobs = 4;    // found, and not yet done by all

    unsigned char k[PanelsK * kPanelBytes], q[PanelsK * kPanelBytes];
    unsigned char p[kPanelBytes], l[kPanelBytes];
    unsigned char s[PanelsV][PanelsK * kPanelBytes], ds[PanelsV][PanelsK * kPanelBytes];  // rows of V, 64 of K a panel
    unsigned char d_o[kStages][PanelsV * kPanelBytes], w[kStages][PanelsV * kPanelBytes],
        y[kStages][PanelsV * kPanelBytes];
    unsigned char a[kPanelBytes];  // A1, or A2 at the end of a job: read transposed
    float rows[kStages][kHopperRowFloats];
    struct Sums {                                                         // of one output head
        float row_q[kChunk], row_k[kChunk], write[kChunk], beta[kChunk];  // write: k.dk1
        float column_q[kWarps][kChunk], column_k[kWarps][kChunk];
        float decay[kWarps];  // parts of exp(G_last) <dS', S>
    } sums[kStages];
    GradientJob jobs[kJobs];
    uint64_t job_full[kJobs], job_empty[kJobs];
    uint64_t k_full[1], k_clear[1], k_empty[1], q_full[1], q_empty[1], p_full[1], p_empty[1], l_full[1], l_empty[1];
    uint64_t s_full[1], s_empty[1], ds_full[1], ds_empty[1], a_full[1], a_empty[1];
    uint64_t o_full[kStages], o_empty[kStages], w_full[kStages], w_empty[kStages], y_full[kStages], y_empty[kStages];
    uint64_t r_full[kStages], r_empty[kStages], sums_full[kStages], sums_empty[kStages];
};

// The i-th output head that reads key head `head_k`.
__device__ __forceinline__ int head_of_keys(const gdelta_shape &shape, int head_k, int i) {
    int group = shape.heads_o / shape.heads_k;
    return shape.head_map == GDELTA_HEADS_TILED ? head_k + i * shape.heads_k : head_k * group + i;
}

// One warp. Whether the sequence of the chunk is skipped, for its initial slot is -1 or out of range.
__device__ __forceinline__ bool is_skipped(const gdelta_shape &shape, const gdelta_inputs &in, const Chunk &chunk) {
    if (!in.initial.data || !in.initial.slots.data) return false;
    int64_t n = chunk.batch;
    if (shape.packed) {  // the last sequence that begins at or before the chunk, which is not empty
        int64_t high = shape.sequences;
        for (n = 0; high - n > 1;) {
            int64_t middle = n + (high - n) / 2;
            (load_index(in.cu_seqlens, middle) <= chunk.begin ? n : high) = middle;
        }
    }
    return slot_of(in, in.initial, n, 0, false) < 0;
}

// Sum over the four lanes that share a row of D.
__device__ __forceinline__ float sum_row(float x) {
    return sum_lanes<3>(x);
}

// Sums of columns over the rows of a warp. The lane's c[2 j], c[2 j + 1] are columns 8 j + p.column and the next. In
// each round a lane gives half of its columns to the lane whose index differs in one bit; at the end it has c[0], c[1],
// for the j that it returns.
template <int Half = 8>
__device__ __forceinline__ int sum_columns(float (&c)[16]) {
    constexpr int kBit = 2 * Half;
    bool upper = threadIdx.x & kBit;
#pragma unroll
    for (int i = 0; i < Half; ++i) {
        float give = upper ? c[i] : c[i + Half], keep = upper ? c[i + Half] : c[i];
        c[i] = keep + __shfl_xor_sync(0xffffffffu, give, kBit);
    }
    int j = upper ? Half / 2 : 0;
    if constexpr (Half > 2) j += sum_columns<Half / 2>(c);
    return j;
}

// Addresses that follow from it are not kept for a later use.
__device__ __forceinline__ Lane lane_anew() {
    return lane_of_warpgroup(opaque(threadIdx.x));
}

// The lane's elements of block b (16 columns) of a tile of raw rows, in the order of D.
template <typename T>
__device__ __forceinline__ void load_block(uint32_t tile, Lane p, int b, float (&x)[8]) {
    uint32_t f[4];
    ldmatrix_x4(block_at(tile + b / 4 * kPanelBytes, p, b % 4), f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = unpack<T>(f[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

struct RowPair {
    float upper, lower;
};

// Adds the lane's parts of the dot products of its two rows of the panel at `tile` with those of D.
template <typename T>
__device__ __forceinline__ void dot_rows(uint32_t tile, const float *d, RowPair &dots) {
    const Lane p = lane_anew();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        float x[8];
        load_block<T>(tile, p, b, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float &sum = i & 2 ? dots.lower : dots.upper;
            sum = fmaf(x[i], d[8 * b + i], sum);
        }
    }
}

// sum += factor d, and to `dots` the parts of the dot products of the rows at `tile` with those of d.
template <typename T>
__device__ __forceinline__ void add_product(uint32_t tile, const float (&d)[32], RowPair factor, float *sum,
                                            RowPair &dots) {
    const Lane p = lane_anew();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        float x[8];
        load_block<T>(tile, p, b, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float &dot = i & 2 ? dots.lower : dots.upper, &total = sum[8 * b + i];
            dot = fmaf(x[i], d[8 * b + i], dot);
            total = fmaf(i & 2 ? factor.lower : factor.upper, d[8 * b + i], total);
        }
    }
}

// What to keep of a pair of elements of a diagonal 16 x 16 block, of its two halves on the diagonal: all but those on
// it.
__device__ __forceinline__ uint32_t off_diagonal(Lane p) {
    int row = p.lane / 4;
    return row == p.column ? 0xffff0000u : row == p.column + 1 ? 0x0000ffffu : ~0u;
}

// Norm factors of the lane's two rows.
template <typename T, int Panels>
__device__ __forceinline__ RowPair row_norms(const gdelta_shape &shape, uint32_t tile) {
    if (shape.l2norm == GDELTA_L2NORM_NONE) return {1.0f, 1.0f};
    const Lane p = lane_anew();
    RowPair sums = {0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < 4 * Panels; ++b) {
        float x[8];
        load_block<T>(tile, p, b, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float &sum = i & 2 ? sums.lower : sums.upper;
            sum = fmaf(x[i], x[i], sum);
        }
    }
    float eps = static_cast<float>(shape.l2norm_eps);
    auto factor = [&](float sum) {
        sum = shape.l2norm == GDELTA_L2NORM_ADD_EPS ? sum + eps : fmaxf(sum, eps);
        return __frcp_rn(__fsqrt_rn(sum));
    };
    return {factor(sum_row(sums.upper)), factor(sum_row(sums.lower))};
}

// Eight neighbours of a row.
template <typename T>
__device__ __forceinline__ void store_eight(T *to, const uint4 &x) {
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) return st_global(to, x);
    const T *from = reinterpret_cast<const T *>(&x);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = from[i];
}
template <typename T>
__device__ __forceinline__ void store_eight(T *to, const float (&x)[8]) {
    if constexpr (sizeof(T) == 2) {
        store_eight(to, make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])));
    } else if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        reinterpret_cast<float4 *>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
        reinterpret_cast<float4 *>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = x[i];
    }
}

// Four lanes have x[0 .. 3] each; lane l gets x[l] of all of them.
__device__ __forceinline__ void transpose_lanes(uint32_t (&x)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
            (upper ? x[i] : x[i + bit]) = other;
        }
    }
}

// The gradient of raw rows from that of normalised ones, and out: dx = r (dy - y <y, dy>), but r dy where the floor
// holds r constant.
template <typename T, int Panels>
__device__ __forceinline__ void finish_rows(const gdelta_shape &shape, const gdelta_view &out, const Chunk &chunk,
                                            int head, uint32_t tile, RowPair norm, float (&d)[32 * Panels]) {
    if (!out.data) return;
    const Lane p = lane_anew();
    if (shape.l2norm != GDELTA_L2NORM_NONE) {
        RowPair dots = {0.0f, 0.0f};
#pragma unroll
        for (int panel = 0; panel < Panels; ++panel) {
            dot_rows<T>(tile + panel * kPanelBytes, d + 32 * panel, dots);
        }
        float floor = shape.l2norm == GDELTA_L2NORM_MAX_EPS
                          ? __frcp_rn(__fsqrt_rn(static_cast<float>(shape.l2norm_eps)))
                          : INFINITY;
        auto along = [&](float r, float dot) { return r >= floor ? 0.0f : r * (r * dot); };
        float upper = along(norm.upper, sum_row(dots.upper)), lower = along(norm.lower, sum_row(dots.lower));
#pragma unroll
        for (int b = 0; b < 4 * Panels; ++b) {
            float x[8];
            load_block<T>(tile, p, b, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float &dx = d[8 * b + i];
                dx = (i & 2 ? norm.lower : norm.upper) * fmaf(-(i & 2 ? lower : upper), x[i], dx);
            }
        }
    }
    with_dtype(out.dtype, [&](auto *type) {
        using Out = std::remove_pointer_t<decltype(type)>;
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int row = p.row + 8 * lower;
            Out *to = static_cast<Out *>(out.data) + offset_of(out, chunk.batch, chunk.begin + row, head);
            if constexpr (sizeof(Out) == 2) {
#pragma unroll
                for (int j = 0; j < 8 * Panels; j += 4) {  // the four lanes of a row: eight columns each
                    uint32_t x[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float *pair = &d[4 * (j + i) + 2 * lower];
                        x[i] = pack<Out>(pair[0], pair[1]);
                    }
                    transpose_lanes(x);
                    if (row < chunk.rows) store_eight(to + 8 * j + 4 * p.column, make_uint4(x[0], x[1], x[2], x[3]));
                }
            } else if (row < chunk.rows) {
                bool paired = reinterpret_cast<uintptr_t>(to) % 8 == 0;
#pragma unroll
                for (int j = 0; j < 8 * Panels; ++j) {
                    float x = d[4 * j + 2 * lower], y = d[4 * j + 2 * lower + 1], *at = to + 8 * j + p.column;
                    if (paired) {
                        *reinterpret_cast<float2 *>(at) = make_float2(x, y);
                    } else {
                        at[0] = x, at[1] = y;
                    }
                }
            }
        }
    });
}

// One warpgroup: zeros.
__device__ __forceinline__ void clear_out(const gdelta_view &out, const Chunk &chunk, int head, int dim) {
    if (!out.data) return;
    for (int i = threadIdx.x % 128; i < chunk.rows * dim; i += 128) {
        store_element(out.data, out.dtype, offset_of(out, chunk.batch, chunk.begin + i / dim, head) + i % dim, 0.0f);
    }
}

template <typename T, int PanelsK, int PanelsV>
struct Gradients {
    using Shared = GradientShared<PanelsK, PanelsV>;
    static constexpr uint32_t kState = PanelsK * kPanelBytes;  // of 64 columns of V
    enum { kBarrierQueries = 1, kBarrierKeys };

    const gdelta_backward_call &call;
    const gdelta_hopper_backward_work &work;
    const gdelta_hopper_backward_maps &maps;
    Shared &shared;
    int64_t chunks;

    using Job = GradientJob;

    // f(job) for each job of the block whose number is in use, unused(job) for the others. All roles see the same jobs.
    template <typename F, typename G>
    __device__ __forceinline__ void for_jobs(F f, G unused) const {
        for (int n = 0; job_at(n) < jobs(); ++n) {
            int slot = ring_slot<Shared::kJobs>(n);
            wait(shared.job_full[slot], ring_parity<Shared::kJobs>(n));
            const Job &job = shared.jobs[slot];
            if (job.chunk.rows) {
                f(job);
            } else {
                unused(job);
            }
            release(shared.job_empty[slot]);
        }
    }
    template <typename F>
    __device__ __forceinline__ void for_jobs(F f) const {
        for_jobs(f, [](const Job &) {});
    }
    __device__ __forceinline__ int jobs() const {
        return static_cast<int>(chunks * call.shape.heads_k);
    }
    __device__ __forceinline__ int job_at(int n) const {
        return static_cast<int>(blockIdx.x + n * gridDim.x);
    }
    // One warp, for all.
    __device__ __forceinline__ void find_job(int n) const {
        if (job_at(n) >= jobs()) return;
        const gdelta_shape &shape = call.shape;
        int slot = ring_slot<Shared::kJobs>(n);
        int64_t number = job_at(n) / shape.heads_k;
        Chunk chunk = find_chunk(shape, call.in, number);
        bool skip = chunk.rows && is_skipped(shape, call.in, chunk);
        wait(shared.job_empty[slot], ring_parity<Shared::kJobs>(n) ^ 1);
        if (threadIdx.x % 32 == 0) {
            shared.jobs[slot] = {number, chunk, job_at(n) % shape.heads_k, shape.heads_o / shape.heads_k, skip};
        }
        release(shared.job_full[slot]);
    }
    __device__ __forceinline__ bool own_queries() const {
        return call.shape.heads_q != call.shape.heads_k;
    }
    // What follows the sequence in the chunk's tiles is others'.
    __device__ __forceinline__ bool ragged(const Job &job) const {
        return call.shape.packed && job.chunk.rows < kChunk;
    }
    // Turns of the tiles of query heads before output head i and job j, as the block counts them.
    __device__ __forceinline__ int turn_q(int i, int j) const {
        return own_queries() ? i : j;
    }

    // d = x S^T, x being rows of tokens: 64 columns, those of the panel of S's that `state` is the first part of.
    static __device__ __forceinline__ void multiply_state(float (&d)[32], uint32_t x, uint32_t state) {
        wgmma_hold(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsV; ++step) {
            wgmma<T, kMajorK, kMajorMN>(d, panel_k_major(x + step / 4 * kPanelBytes) + step % 4 * kStepK,
                                        panel_mn_major(state + step / 4 * kState) + step % 4 * kStepMN, step > 0);
        }
        wgmma_commit();
    }
    // d = x w^T.
    static __device__ __forceinline__ void multiply_rows(float (&d)[32], uint32_t x, uint32_t w) {
        wgmma_hold(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsV; ++step) {
            wgmma<T, kMajorK, kMajorK>(d, panel_k_major(x + step / 4 * kPanelBytes) + step % 4 * kStepK,
                                       panel_k_major(w + step / 4 * kPanelBytes) + step % 4 * kStepK, step > 0);
        }
        wgmma_commit();
    }
    // What a head adds for pairs of tokens j <= i, or j < i: x = exp(G_i - G_j) factor_i beta_j e_ij to `a`; and, but
    // for the diagonal, x times the pair's product at `tile` to `row`, and its sums along the lane's rows as `columns`.
    template <bool Strictly>
    static __device__ __forceinline__ void add_pairs(const float (&e)[32], uint32_t tile, const float *table,
                                                     RowPair factor, float (&a)[32], float (&columns)[16],
                                                     RowPair &row) {
        const Lane p = lane_anew();
        float log_upper = table[kRowLog + p.row], log_lower = table[kRowLog + p.row + 8];
        uint32_t strictly = off_diagonal(p);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            uint32_t f[4];
            ldmatrix_x4(block_at(tile, p, b), f);
            if (!Strictly) {  // else the tile has zeros there
                uint32_t kept = b == p.warp ? strictly : ~0u;
                f[0] &= kept, f[3] &= kept;
            }
#pragma unroll
            for (int right = 0; right < 2; ++right) {
                int column = 16 * b + 8 * right + p.column;
                float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + column]);
                float2 beta = beta_pair<T>(table, column);
                float2 at_upper = unpack<__half>(f[2 * right]), at_lower = unpack<__half>(f[2 * right + 1]);
                float parts[2] = {0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    bool is_lower = i & 2, odd = i & 1;
                    int above = column + odd - p.row - 8 * is_lower;  // the diagonal
                    float x = exp2_fast((is_lower ? log_lower : log_upper) - (odd ? log.y : log.x)) *
                              ((is_lower ? factor.lower : factor.upper) * (odd ? beta.y : beta.x)) *
                              e[8 * b + 4 * right + i];
                    x = above < 0 || (!Strictly && above == 0) ? x : 0.0f;
                    a[8 * b + 4 * right + i] += x;
                    x *= is_lower ? (odd ? at_lower.y : at_lower.x) : (odd ? at_upper.y : at_upper.x);
                    parts[odd] += x;
                    (is_lower ? row.lower : row.upper) += x;
                }
                columns[4 * b + 2 * right] = parts[0], columns[4 * b + 2 * right + 1] = parts[1];
            }
        }
    }
    // A lane's a times row factors, or column factors in the row table, as operand of T.
    static __device__ __forceinline__ void pack_rows(const float (&a)[32], RowPair factor, uint32_t (&f)[16]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float x = i & 1 ? factor.lower : factor.upper;
            f[i] = pack<T>(x * a[2 * i], x * a[2 * i + 1]);
        }
    }
    static __device__ __forceinline__ void pack_columns(const float (&a)[32], Lane p, float scale, const float *factors,
                                                        uint32_t (&f)[16]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 x = *reinterpret_cast<const float2 *>(&factors[8 * j + p.column]);
            x.x *= scale, x.y *= scale;
            f[2 * j] = pack<T>(x.x * a[4 * j], x.y * a[4 * j + 1]);
            f[2 * j + 1] = pack<T>(x.x * a[4 * j + 2], x.y * a[4 * j + 3]);
        }
    }

    __device__ __forceinline__ void load(int warp) const;
    __device__ __forceinline__ void queries() const;
    __device__ __forceinline__ void keys() const;
    __device__ __forceinline__ void values() const;
    __device__ __forceinline__ void gates() const;
    struct Values {
        const unsigned char *y;
        const float *table;
    };
    template <typename F>
    __device__ __forceinline__ void write_values(const Job &job, int head_v, int count, F from) const;
    __device__ __forceinline__ void finish_gates(const Job &job, int head, int i) const;
};

// ---- Loader: three warps, one thread of each loads ----

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::load(int warp) const {
    const gdelta_shape &shape = call.shape;
    bool leader = threadIdx.x % 32 == 0;
    auto expect = [&](uint64_t &full, uint32_t bytes) {
        uint32_t barrier = shared_address(&full);
        mbarrier_arrive_expect(barrier, bytes);
        return barrier;
    };
    auto load_tile = [&](unsigned char *to, const void *from, int64_t at, uint32_t bytes, uint64_t &full) {
        bulk_load(shared_address(to), static_cast<const unsigned char *>(from) + at * bytes, bytes,
                  expect(full, bytes));
    };
    auto load_panels = [&](unsigned char *to, const gdelta_tensor_map &map, int panels, const Job &job, int head,
                           uint64_t &full) {
        uint32_t barrier = expect(full, panels * kPanelBytes);
        for (int panel = 0; panel < panels; ++panel) {
            bulk_load_tensor(shared_address(to) + panel * kPanelBytes, &map, barrier, static_cast<int>(job.chunk.begin),
                             head, static_cast<int>(job.chunk.batch), panel);
        }
    };
    int i = 0, j = 0, n = 0;
    if (warp == 2) find_job(n);
    for_jobs(
        [&](const Job &job) {
            if (warp == 2) find_job(++n);
            if (job.skip) return;
            for (int member = 0; leader && member < job.members; ++member, ++i) {
                int head = head_of_keys(shape, job.head_k, member), slot = ring_slot<Shared::kStages>(i);
                uint32_t parity = ring_parity<Shared::kStages>(i) ^ 1;
                int64_t at = job.number * shape.heads_o + head;
                if (warp == 0) {
                    wait(shared.r_empty[slot], parity);
                    bulk_load(shared_address(shared.rows[slot]), work.chunk.rows + at * kHopperRowFloats,
                              sizeof shared.rows[0], expect(shared.r_full[slot], sizeof shared.rows[0]));
                    if (call.d_o.data) {
                        wait(shared.o_empty[slot], parity);
                        load_panels(shared.d_o[slot], maps.d_o, PanelsV, job, head, shared.o_full[slot]);
                    }
                    wait(shared.w_empty[slot], parity);
                    load_tile(shared.w[slot], work.w, at, PanelsV * kPanelBytes, shared.w_full[slot]);
                } else if (warp == 1) {
                    wait(shared.y_empty[slot], parity);
                    load_tile(shared.y[slot], work.y, at, PanelsV * kPanelBytes, shared.y_full[slot]);
                    wait(shared.s_empty[0], i & 1 ^ 1);
                    load_tile(shared.s[0], work.s, at, PanelsV * kState, shared.s_full[0]);
                    wait(shared.ds_empty[0], i & 1 ^ 1);
                    load_tile(shared.ds[0], work.ds, at, PanelsV * kState, shared.ds_full[0]);
                } else if (member == 0 || own_queries()) {
                    int head_q = head_of(shape, head, shape.heads_q);
                    int64_t square = job.number * shape.heads_q + head_q;
                    uint32_t parity_q = turn_q(i, j) & 1 ^ 1, parity_k = j & 1 ^ 1;
                    wait(shared.p_empty[0], parity_q);
                    load_tile(shared.p, work.chunk.p, square, kPanelBytes, shared.p_full[0]);
                    if (member == 0) {
                        wait(shared.l_empty[0], parity_k);
                        load_tile(shared.l, work.chunk.l, square, kPanelBytes, shared.l_full[0]);
                    }
                    wait(shared.q_empty[0], parity_q);
                    load_panels(shared.q, maps.q, PanelsK, job, head_q, shared.q_full[0]);
                    if (member == 0) {
                        wait(shared.k_empty[0], parity_k);
                        load_panels(shared.k, maps.k, PanelsK, job, job.head_k, shared.k_full[0]);
                    }
                }
            }
            __syncwarp();
            ++j;
        },
        [&](const Job &) {
            if (warp == 2) find_job(++n);
        });
}

// ---- Queries: dq, A1 ----

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::queries() const {
    const gdelta_shape &shape = call.shape;
    constexpr float kUp = Range<T>::kUp;
    float scale = static_cast<float>(shape.scale);
    uint32_t tile_q = shared_address(shared.q), tile_k = shared_address(shared.k), tile_s = shared_address(shared.s[0]);
    int i = 0, j = 0;
    for_jobs([&](const Job &job) {
        if (job.skip) {
            for (int member = 0; member < (own_queries() ? job.members : 1); ++member) {
                int head = head_of_keys(shape, job.head_k, member);
                clear_out(call.dq, job.chunk, head_of(shape, head, shape.heads_q), shape.dim_k);
            }
            return;
        }
        float dq[32 * PanelsK], a[32];
        for (int member = 0; member < job.members; ++member, ++i) {
            const Lane p = lane_anew();
            bool begins = member == 0 || own_queries(), ends = member + 1 == job.members || own_queries();
            int slot = ring_slot<Shared::kStages>(i);
            uint32_t parity = ring_parity<Shared::kStages>(i);
            uint32_t tile_o = shared_address(shared.d_o[slot]), tile_w = shared_address(shared.w[slot]);
            const float *table = shared.rows[slot];
            typename Shared::Sums &sums = shared.sums[slot];
            if (begins) {
#pragma unroll
                for (int e = 0; e < 32 * PanelsK; ++e) dq[e] = 0.0f;
#pragma unroll
                for (int e = 0; e < 32; ++e) a[e] = 0.0f;
            }
            if (call.d_o.data) {
                wait(shared.o_full[slot], parity);
                if (ragged(job)) {
                    clear_rows(tile_o, PanelsV, job.chunk.rows, threadIdx.x, 128);
                    named_barrier(kBarrierQueries, 128);
                }
            }

            RowPair row = {0.0f, 0.0f};
            {
                wait(shared.w_full[slot], parity);
                float e1[32], columns[16];
                multiply_rows(e1, tile_o, tile_w);
                wait(shared.r_full[slot], parity);
                wait(shared.p_full[0], turn_q(i, j) & 1);
                wgmma_wait<0>();
                wgmma_hold(e1);
                release(shared.w_empty[slot]);
                add_pairs<false>(e1, shared_address(shared.p), table, {kUp, kUp}, a, columns, row);
                int of = sum_columns(columns);
                wait(shared.sums_empty[slot], parity ^ 1);
                *reinterpret_cast<float2 *>(&sums.column_q[p.warp][8 * of + p.column]) =
                    make_float2(columns[0], columns[1]);
            }
            if (ends) release(shared.p_empty[0]);

            if (begins) {
                wait(shared.q_full[0], turn_q(i, j) & 1);
                if (ragged(job)) {  // `keys` reads it after a_full
                    clear_rows(tile_q, PanelsK, job.chunk.rows, threadIdx.x, 128);
                    named_barrier(kBarrierQueries, 128);
                }
            }
            wait(shared.s_full[0], i & 1);
            {
                const Lane p = lane_anew();
                float d[PanelsK][32];
#pragma unroll
                for (int panel = 0; panel < PanelsK; ++panel) {
                    multiply_state(d[panel], tile_o, tile_s + panel * kPanelBytes);
                }
                float upper = scale * kUp * exp2_fast(table[kRowLog + p.row]),
                      lower = scale * kUp * exp2_fast(table[kRowLog + p.row + 8]);
                RowPair dots = {0.0f, 0.0f};
#pragma unroll
                for (int panel = 0; panel < PanelsK; ++panel) {
                    if (panel + 1 < PanelsK) {
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                    wgmma_hold(d[panel]);
                    if (panel + 1 == PanelsK) {
                        release(shared.s_empty[0]);
                        release(shared.o_empty[slot]);
                    }
                    add_product<T>(tile_q + panel * kPanelBytes, d[panel], {upper, lower}, dq + 32 * panel, dots);
                }
                row.upper = fmaf(table[kRowOutput + p.row], sum_row(dots.upper), sum_row(row.upper));
                row.lower = fmaf(table[kRowOutput + p.row + 8], sum_row(dots.lower), sum_row(row.lower));
            }
            if (p.lane % 4 == 0) {
                sums.row_q[p.row] = row.upper;
                sums.row_q[p.row + 8] = row.lower;
            }
            release(shared.sums_full[slot]);

            if (!ends) {
                release(shared.r_empty[slot]);
                continue;
            }
            // A1 r_q for `keys`, then dq += (A1 r_k) K.
            RowPair norm = row_norms<T, PanelsK>(shape, tile_q);
            uint32_t f[16];
            pack_rows(a, {scale * norm.upper, scale * norm.lower}, f);
            wait(shared.a_empty[0], turn_q(i, j) & 1 ^ 1);
            put_blocks(shared_address(shared.a), p, f);
            publish(shared.a_full[0]);
            pack_columns(a, p, scale, table + kRowNorm, f);
            release(shared.r_empty[slot]);
            wait(shared.k_clear[0], j & 1);
            wgmma_hold(dq);
            wgmma_hold(f);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorMN>(dq, f + 4 * step, panel_mn_major(tile_k) + step * kStepMN, true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(dq);
            if (member + 1 == job.members) release(shared.k_empty[0]);
            int head = head_of_keys(shape, job.head_k, member);
            finish_rows<T, PanelsK>(shape, call.dq, job.chunk, head_of(shape, head, shape.heads_q), tile_q, norm, dq);
            release(shared.q_empty[0]);
        }
        ++j;
    });
}

// ---- Keys: dk, A2 ----

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::keys() const {
    const gdelta_shape &shape = call.shape;
    constexpr float kUp = Range<T>::kUp;
    uint32_t tile_q = shared_address(shared.q), tile_k = shared_address(shared.k), tile_a = shared_address(shared.a);
    int i = 0, j = 0;
    for_jobs([&](const Job &job) {
        if (job.skip) {
            clear_out(call.dk, job.chunk, job.head_k, shape.dim_k);
            return;
        }
        float dk[32 * PanelsK], a[32];
#pragma unroll
        for (int e = 0; e < 32 * PanelsK; ++e) dk[e] = 0.0f;
#pragma unroll
        for (int e = 0; e < 32; ++e) a[e] = 0.0f;
        for (int member = 0; member < job.members; ++member, ++i) {
            const Lane p = lane_anew();
            bool last = member + 1 == job.members, ends = last || own_queries();
            int slot = ring_slot<Shared::kStages>(i);
            uint32_t parity = ring_parity<Shared::kStages>(i);
            uint32_t tile_y = shared_address(shared.y[slot]), tile_w = shared_address(shared.w[slot]);
            const float *table = shared.rows[slot];
            typename Shared::Sums &sums = shared.sums[slot];

            RowPair row = {0.0f, 0.0f};
            {
                wait(shared.y_full[slot], parity);
                wait(shared.w_full[slot], parity);
                float e2[32], columns[16];
                multiply_rows(e2, tile_y, tile_w);
                wait(shared.r_full[slot], parity);
                wait(shared.l_full[0], j & 1);
                RowPair factor = {-kUp * beta_at<T>(table, p.row), -kUp * beta_at<T>(table, p.row + 8)};
                wgmma_wait<0>();
                wgmma_hold(e2);
                RowPair diagonal = {0.0f, 0.0f};
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    if (b != p.warp) continue;
                    bool odd = p.lane / 4 & 1;
                    diagonal.upper = odd ? e2[8 * b + 1] : e2[8 * b];
                    diagonal.lower = odd ? e2[8 * b + 7] : e2[8 * b + 6];
                }
                add_pairs<true>(e2, shared_address(shared.l), table, factor, a, columns, row);
                int of = sum_columns(columns);
                wait(shared.sums_empty[slot], parity ^ 1);
                *reinterpret_cast<float2 *>(&sums.column_k[p.warp][8 * of + p.column]) =
                    make_float2(columns[0], columns[1]);
                if (p.lane % 4 == p.lane / 8) {
                    sums.beta[p.row] = kUp * diagonal.upper;
                    sums.beta[p.row + 8] = kUp * diagonal.lower;
                }
            }
            if (last) release(shared.l_empty[0]);

            if (member == 0) {
                wait(shared.k_full[0], j & 1);
                if (ragged(job)) {
                    clear_rows(tile_k, PanelsK, job.chunk.rows, threadIdx.x % 128, 128);
                    named_barrier(kBarrierKeys, 128);
                }
                release(shared.k_clear[0]);
            }
            {
                // D2 by panels, then D3; the next is under way while one is added.
                float d[2][32];
                auto multiply = [&](int n) {
                    bool second = n >= PanelsK;
                    if (n == 0) wait(shared.s_full[0], i & 1);
                    if (n == PanelsK) wait(shared.ds_full[0], i & 1);
                    multiply_state(d[n % 2], second ? tile_w : tile_y,
                                   shared_address(second ? shared.ds[0] : shared.s[0]) + n % PanelsK * kPanelBytes);
                };
                multiply(0);
                multiply(1);
                RowPair factor, dots = {0.0f, 0.0f};
#pragma unroll
                for (int n = 0; n < 2 * PanelsK; ++n) {
                    bool second = n >= PanelsK;
                    if (n % PanelsK == 0) {
                        float end = second ? table[kRowLog + kChunk - 1] : 0.0f, sign = second ? -1.0f : 1.0f;
                        float up = second ? kUp * kUp : -kUp;
                        factor.upper =
                            up * exp2_fast(fmaf(sign, table[kRowLog + p.row], end)) * beta_at<T>(table, p.row);
                        factor.lower =
                            up * exp2_fast(fmaf(sign, table[kRowLog + p.row + 8], end)) * beta_at<T>(table, p.row + 8);
                    }
                    if (n + 1 < 2 * PanelsK) {
                        wgmma_wait<1>();
                    } else {
                        wgmma_wait<0>();
                    }
                    wgmma_hold(d[n % 2]);
                    if (n + 1 == PanelsK) {
                        release(shared.s_empty[0]);
                        release(shared.y_empty[slot]);
                    }
                    if (n + 1 == 2 * PanelsK) {
                        release(shared.ds_empty[0]);
                        release(shared.w_empty[slot]);
                    }
                    add_product<T>(tile_k + n % PanelsK * kPanelBytes, d[n % 2], factor, dk + n % PanelsK * 32, dots);
                    if (n + 2 < 2 * PanelsK) multiply(n + 2);
                    if (n % PanelsK == PanelsK - 1) {
                        dots.upper = factor.upper * table[kRowNorm + p.row] * sum_row(dots.upper);
                        dots.lower = factor.lower * table[kRowNorm + p.row + 8] * sum_row(dots.lower);
                        if (!second) {
                            row = {sum_row(row.upper) + dots.upper, sum_row(row.lower) + dots.lower};
                            dots = {0.0f, 0.0f};
                        }
                    }
                }
                if (p.lane % 4 == 0) {
                    sums.row_k[p.row] = row.upper;
                    sums.row_k[p.row + 8] = row.lower;
                    sums.write[p.row] = dots.upper;
                    sums.write[p.row + 8] = dots.lower;
                }
            }
            release(shared.sums_full[slot]);

            RowPair norm = {table[kRowNorm + p.row], table[kRowNorm + p.row + 8]};
            if (!ends) {
                release(shared.r_empty[slot]);
                continue;
            }

            // dk += (A1 r_q)^T Q.
            wait(shared.q_full[0], turn_q(i, j) & 1);
            wait(shared.a_full[0], turn_q(i, j) & 1);
            wgmma_hold(dk);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorMN, kMajorMN>(dk, panel_mn_major(tile_a) + step * kStepMN,
                                             panel_mn_major(tile_q) + step * kStepMN, true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(dk);
            release(shared.q_empty[0]);
            if (!last) {
                release(shared.r_empty[slot]);
                release(shared.a_empty[0]);
                continue;
            }
            // dk += (A2 r_k) K + (A2 r_k)^T K, the factor on columns and on rows.
            uint32_t f_rows[16], f[16];
            pack_rows(a, norm, f_rows);
            pack_columns(a, p, 1.0f, table + kRowNorm, f);
            release(shared.r_empty[slot]);
            named_barrier(kBarrierKeys, 128);  // all warps have read A1
            put_blocks(tile_a, p, f_rows);
            fence_async_shared();
            named_barrier(kBarrierKeys, 128);
            wgmma_hold(dk);
            wgmma_hold(f);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorMN>(dk, f + 4 * step, panel_mn_major(tile_k) + step * kStepMN, true);
                wgmma<T, kMajorMN, kMajorMN>(dk, panel_mn_major(tile_a) + step * kStepMN,
                                             panel_mn_major(tile_k) + step * kStepMN, true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(dk);
            release(shared.a_empty[0]);
            finish_rows<T, PanelsK>(shape, call.dk, job.chunk, job.head_k, tile_k, norm, dk);
            release(shared.k_empty[0]);
        }
        ++j;
    });
}

// ---- Gates: dg, dbeta. One warp, lane l has tokens 2 l and 2 l + 1 ----

// Output head i of the block.
template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::finish_gates(const Job &job, int head, int i) const {
    const gdelta_shape &shape = call.shape;
    const gdelta_inputs &in = call.in;
    int lane = threadIdx.x % 32, slot = ring_slot<Shared::kStages>(i);
    float g[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};  // before the wait, which hides their way here
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        int64_t token = job.chunk.begin + 2 * lane + x;
        if (2 * lane + x >= job.chunk.rows) continue;
        if (in.g.data) g[x] = load_element(in.g.data, in.g.dtype, offset_of(in.g, job.chunk.batch, token, head));
        if (call.dbeta.data) {
            beta[x] = load_element(in.beta.data, in.beta.dtype, offset_of(in.beta, job.chunk.batch, token, head));
        }
    }
    GateParameters gate = load_gate_parameters(in, head);

    wait(shared.sums_full[slot], ring_parity<Shared::kStages>(i));
    const typename Shared::Sums &sums = shared.sums[slot];
    float d_log[2], d_beta[2], write[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        int at = 2 * lane + x;
        float column = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) column += sums.column_q[warp][at] + sums.column_k[warp][at];
        d_log[x] = sums.row_q[at] + sums.row_k[at] - column;
        write[x] = sums.write[at];
        d_beta[x] = sums.beta[at];
    }
    float decay = (sums.decay[0] + sums.decay[1]) + (sums.decay[2] + sums.decay[3]);
    release(shared.sums_empty[slot]);
    float later = d_log[0] + d_log[1], earlier = write[0] + write[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float from_later = __shfl_down_sync(0xffffffffu, later, distance),
              from_earlier = __shfl_up_sync(0xffffffffu, earlier, distance);
        if (lane + distance < 32) later += from_later;
        if (lane >= distance) earlier += from_earlier;
    }
    // `later`: from token 2 l on; `earlier`: up to token 2 l + 1.
    float exclusive = __shfl_up_sync(0xffffffffu, earlier, 1), following = __shfl_down_sync(0xffffffffu, later, 1);
    if (lane == 0) exclusive = 0.0f;
    if (lane == 31) following = 0.0f;
    float d[2] = {later + exclusive + decay, following + d_log[1] + exclusive + write[0] + decay};

    double a_log = 0, dt_bias = 0;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        int64_t token = job.chunk.begin + 2 * lane + x;
        if (2 * lane + x >= job.chunk.rows) continue;
        if (in.g.data) {
            float held = g[x], dx = d[x];
            // What the row table takes as a decay of exactly 0: no roundings of the sums in its gradient.
            if (shape.gate == GDELTA_GATE_LOG && log2_decay_of(GDELTA_GATE_LOG, held, gate) <= -128.0f) dx = 0.0f;
            if (shape.gate == GDELTA_GATE_LINEAR) dx = held > 0.0f ? dx / held : 0.0f;
            if (shape.gate == GDELTA_GATE_SOFTPLUS) {
                // g = -a softplus(z), z = x + bias: dg/dx = -a sigmoid(z), dg/dA_log = g.
                float z = held + gate.bias;
                a_log += static_cast<double>(dx) * (-gate.a * softplus(z));
                dx *= -gate.a * sigmoid(z);
                dt_bias += dx;
            }
            if (call.dg.data) {
                store_element(call.dg.data, call.dg.dtype, offset_of(call.dg, job.chunk.batch, token, head), dx);
            }
        }
        if (call.dbeta.data) {
            store_element(call.dbeta.data, call.dbeta.dtype, offset_of(call.dbeta, job.chunk.batch, token, head),
                          d_beta[x] * beta_slope(shape.beta, beta[x]));
        }
    }
    if (!work.parameters) return;
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
        a_log += __shfl_xor_sync(0xffffffffu, a_log, bit);
        dt_bias += __shfl_xor_sync(0xffffffffu, dt_bias, bit);
    }
    if (lane == 0) {
        double *to = work.parameters + 2 * (head * chunks + job.number);
        to[0] = a_log, to[1] = dt_bias;
    }
}

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::gates() const {
    int lane = threadIdx.x % 32, i = 0;
    auto clear_parameters = [&](const Job &job, int head) {
        if (work.parameters && lane < 2) work.parameters[2 * (head * chunks + job.number) + lane] = 0.0;
    };
    auto for_heads = [&](const Job &job, auto f) {
        for (int member = 0; member < job.members; ++member) f(head_of_keys(call.shape, job.head_k, member));
    };
    for_jobs(
        [&](const Job &job) {
            for_heads(job, [&](int head) {
                if (!job.skip) return finish_gates(job, head, i++);
                for (int at = lane; at < job.chunk.rows; at += 32) {
                    auto clear = [&](const gdelta_view &out) {
                        if (!out.data) return;
                        store_element(out.data, out.dtype, offset_of(out, job.chunk.batch, job.chunk.begin + at, head),
                                      0.0f);
                    };
                    clear(call.dg);
                    clear(call.dbeta);
                }
                clear_parameters(job, head);
            });
        },
        [&](const Job &job) { for_heads(job, [&](int head) { clear_parameters(job, head); }); });
}

// ---- Values: dv, <dS', S> ----

// dv = sum of beta y over `count` output heads, in their order; from(m) says where those of head m are.
template <typename T, int PanelsK, int PanelsV>
template <typename F>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::write_values(const Job &job, int head_v, int count,
                                                                             F from) const {
    constexpr int kPieces = 8 * PanelsV;  // 16 bytes each, of a row
    if (!call.dv.data) return;
#pragma unroll 2
    for (int at = threadIdx.x % 128; at < job.chunk.rows * kPieces; at += 128) {
        int row = at / kPieces, piece = at % kPieces;
        float dv[8] = {};
        for (int m = 0; m < count; ++m) {
            Values values = from(m);
            uint4 x =
                *reinterpret_cast<const uint4 *>(values.y + piece / 8 * kPanelBytes + panel_offset(row, piece % 8));
            uint32_t xs[4] = {x.x, x.y, x.z, x.w};
            float beta = beta_at<T>(values.table, row);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                float2 pair = unpack<T>(xs[e / 2]);
                dv[e] = fmaf(beta, e % 2 ? pair.y : pair.x, dv[e]);
            }
        }
        with_dtype(call.dv.dtype, [&](auto *type) {
            store_eight(static_cast<decltype(type)>(call.dv.data) +
                            offset_of(call.dv, job.chunk.batch, job.chunk.begin + row, head_v) + 8 * piece,
                        dv);
        });
    }
}

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::values() const {
    const gdelta_shape &shape = call.shape;
    int thread = threadIdx.x % 128, i = 0;
    bool own_values = shape.heads_v == shape.heads_o;
    for_jobs([&](const Job &job) {
        for (int member = 0; member < job.members; ++member) {
            int head = head_of_keys(shape, job.head_k, member), head_v = head_of(shape, head, shape.heads_v);
            if (job.skip) {
                clear_out(call.dv, job.chunk, head_v, shape.dim_v);
                continue;
            }
            int slot = ring_slot<Shared::kStages>(i);
            uint32_t parity = ring_parity<Shared::kStages>(i);
            const float *table = shared.rows[slot];
            wait(shared.r_full[slot], parity);
            wait(shared.y_full[slot], parity);
            float last = table[kRowDecay];
            if (own_values) {
                write_values(job, head_v, 1, [&](int) { return Values{shared.y[slot], table}; });
            } else if (member + 1 == job.members) {
                write_values(job, head_v, job.members, [&](int m) {
                    int64_t from = job.number * shape.heads_o + head_of_keys(shape, job.head_k, m);
                    return Values{static_cast<const unsigned char *>(work.y) + from * PanelsV * kPanelBytes,
                                  work.chunk.rows + from * kHopperRowFloats};
                });
            }
            release(shared.y_empty[slot]);
            release(shared.r_empty[slot]);

            wait(shared.s_full[0], i & 1);
            wait(shared.ds_full[0], i & 1);
            float dots[4] = {};
#pragma unroll 2
            for (int piece = thread; piece < static_cast<int>(PanelsV * kState / 16); piece += 128) {
                uint4 x = ld_shared(shared_address(shared.s[0]) + 16 * piece),
                      y = ld_shared(shared_address(shared.ds[0]) + 16 * piece);
                uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float2 u = unpack<T>(xs[e]), v = unpack<T>(ys[e]);
                    dots[e] = fmaf(u.x, v.x, fmaf(u.y, v.y, dots[e]));
                }
            }
            release(shared.s_empty[0]);
            release(shared.ds_empty[0]);
            float dot = sum_lanes<31>((dots[0] + dots[1]) + (dots[2] + dots[3]));
            wait(shared.sums_empty[slot], parity ^ 1);
            if (thread % 32 == 0) {
                shared.sums[slot].decay[thread / 32] = Range<T>::kUp * Range<T>::kUp * last * dot;
            }
            release(shared.sums_full[slot]);
            ++i;
        }
    });
}

template <typename T, int PanelsK, int PanelsV>
__global__ void __launch_bounds__(512, 1)
    hopper_gradients(const __grid_constant__ gdelta_backward_call call,
                     const __grid_constant__ gdelta_hopper_backward_work work,
                     const __grid_constant__ gdelta_hopper_backward_maps maps, int64_t chunks) {
    using Shared = GradientShared<PanelsK, PanelsV>;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    if (is_malformed(work.chunk.malformed)) return;
    if (threadIdx.x == 0) {
        auto init = [](auto &barriers, uint32_t count) {
            for (uint64_t &barrier : barriers) mbarrier_init(shared_address(&barrier), count);
        };
        init(shared.job_full, kWarp), init(shared.job_empty, 4 * kWarpgroup);
        init(shared.k_full, 1), init(shared.k_clear, kWarpgroup), init(shared.k_empty, 2 * kWarpgroup);
        init(shared.q_full, 1), init(shared.q_empty, 2 * kWarpgroup);
        init(shared.p_full, 1), init(shared.p_empty, kWarpgroup);
        init(shared.l_full, 1), init(shared.l_empty, kWarpgroup);
        init(shared.s_full, 1), init(shared.s_empty, 3 * kWarpgroup);
        init(shared.ds_full, 1), init(shared.ds_empty, 2 * kWarpgroup);
        init(shared.o_full, 1), init(shared.o_empty, kWarpgroup);
        init(shared.w_full, 1), init(shared.w_empty, 2 * kWarpgroup);
        init(shared.y_full, 1), init(shared.y_empty, 2 * kWarpgroup);
        init(shared.r_full, 1), init(shared.r_empty, 3 * kWarpgroup);
        init(shared.a_full, kWarpgroup), init(shared.a_empty, kWarpgroup);
        init(shared.sums_full, 3 * kWarpgroup), init(shared.sums_empty, kWarp);
        fence_barrier_init();
    }
    if (!call.d_o.data) {  // is 0
        for (int i = threadIdx.x; i < static_cast<int>(sizeof shared.d_o) / 16; i += 512) {
            reinterpret_cast<uint4 *>(shared.d_o)[i] = make_uint4(0, 0, 0, 0);
        }
        fence_async_shared();
    }
    __syncthreads();
    Gradients<T, PanelsK, PanelsV> gradients = {call, work, maps, shared, chunks};
    // 128 registers each at launch: 512 = 2 * 200 + 2 * 56.
    int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
    if (warp < 4) {
        registers_increase<208>();
        gradients.queries();
    } else if (warp < 8) {
        registers_increase<208>();
        gradients.keys();
    } else if (warp < 12) {
        registers_decrease<48>();
        gradients.values();
    } else {
        registers_decrease<48>();
        if (warp < 15) {
            gradients.load(warp - 12);
        } else {
            gradients.gates();
        }
    }
}

// One block an output head: its parts of the gradients of A_log and dt_bias.
__global__ void __launch_bounds__(kGateThreads)
    hopper_sum_parameters(const __grid_constant__ gdelta_backward_call call,
                          const __grid_constant__ gdelta_hopper_backward_work work, int64_t chunks) {
    __shared__ double sums[2][kGateThreads];
    if (is_malformed(work.chunk.malformed)) return;
    int head = blockIdx.x;
    double sum[2] = {0, 0};
    for (int64_t i = threadIdx.x; i < chunks; i += kGateThreads) {
        sum[0] += work.parameters[2 * (head * chunks + i)];
        sum[1] += work.parameters[2 * (head * chunks + i) + 1];
    }
    store_parameters(call, head, sum[0], sum[1], sums);
}

template <typename T, int PanelsK, int PanelsV>
static cudaError_t launch_gradients(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                    const gdelta_hopper_backward_maps &maps, gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    constexpr size_t kBytes = sizeof(GradientShared<PanelsK, PanelsV>);
    static_assert(kBytes <= 232448, "227 KB a block");
    int64_t chunks = gdelta_chunk_capacity(shape.sequences, shape.tokens, shape.rows, shape.packed);
    int64_t jobs = chunks * shape.heads_k;
    cudaError_t error = cudaSuccess;
    if (jobs > 0) {
        error = launch(hopper_gradients<T, PanelsK, PanelsV>, jobs < work.multiprocessors ? jobs : work.multiprocessors,
                       512, kBytes, stream, call, work, maps, chunks);
    }
    if (error != cudaSuccess || !work.parameters) return error;
    return launch(hopper_sum_parameters, shape.heads_o, kGateThreads, 0, stream, call, work, chunks);
}

}  // namespace gdelta

int gdelta_launch_hopper_backward(const gdelta_backward_call *call, const gdelta_hopper_backward_work *work,
                                  const gdelta_hopper_backward_maps *maps, gdelta_stream stream) {
    using namespace gdelta;
    gdelta_forward_call forward = {};
    forward.shape = call->shape;
    forward.in = call->in;
    gdelta_hopper_maps forward_maps = {maps->q, maps->k, {}, {}, 0};
    cudaError_t error = static_cast<cudaError_t>(launch_check(call->shape, call->in, work->chunk.malformed, stream));
    if (error == cudaSuccess) error = launch_hopper_prepare(forward, work->chunk, forward_maps, stream);
    if (error == cudaSuccess) error = launch_hopper_chains(*call, *work, *maps, stream);
    if (error != cudaSuccess) return error;
    return with_instance(call->shape, call->in, [&](auto *type, auto panels) {
        using T = std::remove_pointer_t<decltype(type)>;
        return call->shape.dim_v == 128 ? launch_gradients<T, panels, 2>(*call, *work, *maps, stream)
                                        : launch_gradients<T, panels, 1>(*call, *work, *maps, stream);
    });
}
