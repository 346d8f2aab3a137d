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
//   pairs         E1, E2, M; A1 and A2 for the others
//   fourth        three loading warps: rows, dO, w; y, S, dS'; p, l, q, k; and `gates`: dg, dbeta
//   products ..   64 of K each: D1, D2, D3, dq, dk, <dS', S>; dv
//
// Code that warps share is fetched once: what binds such roles, a warp a scheduler each, is the instruction cache. So
// the two warpgroups of products run the same code, and loops over E1, E2 and D2, D3 stay loops. Memory is next (150 to
// 170 KB a chunk and output head, 8700 cycles at the rate of a copy; tensor cores 2560). `pairs` works a head ahead,
// from operands that have two places, while products wait for S and dS', of which each has its own half. Jobs are found
// ahead of all by a loading warp; `gates` loads g and beta before the sums that it waits for are there.
//
// Shared memory at K = V = 128, KB: q, k 32; p, l 16; S, dS' 64; dO, w, y two stages 96; A1 8; rows and sums, two
// stages, 9.
// q and k serve the products and the dot products of rows; p = scale lower(q k^T) and l = strictly_lower(k k^T) are
// prepare's. Once `pairs` has read them for the last time, A1 and A2 take their places.
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
    unsigned char a[kPanelBytes];    // A1 r_q. A1 r_k is in p, (A2 + A2^T) r_k in l
    float dots[2][PanelsK][kChunk];  // <y, dy> of rows, on their way between products
    float rows[kStages][kHopperRowFloats];
    struct Sums {  // of one output head
        float row_m[kChunk], beta[kChunk];
        float row_q[PanelsK][kChunk], row_k[PanelsK][kChunk], write[PanelsK][kChunk];  // write: k.dk1
        float column[kWarps][kChunk];
        float decay[PanelsK][kWarps];  // parts of exp(G_last) <dS', S>
    } sums[kStages];
    GradientJob jobs[kJobs];
    uint64_t job_full[kJobs], job_empty[kJobs];
    uint64_t k_full[1], k_empty[1], q_full[1], q_empty[1], p_full[1], p_empty[1], l_full[1], l_empty[1];
    uint64_t s_full[PanelsK], s_empty[PanelsK], ds_full[PanelsK], ds_empty[PanelsK];
    uint64_t a_full[1], a_empty[1], a1_full[1], a2_full[1];  // a1: in p. a2: in l
    uint64_t o_full[kStages], o_clear[kStages], o_empty[kStages], w_full[kStages], w_empty[kStages], y_full[kStages],
        y_empty[kStages];
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

// f(e, is_lower, x): the lane's elements of the panel of raw rows at `tile`, in the order of D, and in which of its
// rows.
template <typename T, typename F>
__device__ __forceinline__ void for_elements(uint32_t tile, F f) {
    const Lane p = lane_anew();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        uint32_t words[4];
        ldmatrix_x4(block_at(tile, p, b), words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 pair = unpack<T>(words[i]);
            f(8 * b + 2 * i, i % 2 == 1, pair.x);
            f(8 * b + 2 * i + 1, i % 2 == 1, pair.y);
        }
    }
}

struct RowPair {
    float upper, lower;
};

// The tile of (A + A^T) r, A being strictly lower: fragments of A times r of its columns, and of its rows, which are
// those of the transpose's columns. A warp writes the blocks of its rows up to the diagonal, and their transposes.
__device__ __forceinline__ void put_symmetric(uint32_t tile, Lane p, const uint32_t (&columns)[16],
                                              const uint32_t (&rows)[16]) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const uint32_t *x = columns + 4 * b, *y = rows + 4 * b;
        if (b < p.warp) {
            stmatrix_x4(block_at(tile, p, b), x[0], x[1], x[2], x[3]);
            stmatrix_x4_trans(block_at(tile, {b, p.lane}, p.warp), y[0], y[2], y[1], y[3]);
        } else if (b == p.warp) {  // where one has elements the other has zeros
            stmatrix_x4(block_at(tile, p, b), x[0] | transpose_matrix(y[0]), x[1], transpose_matrix(y[1]),
                        x[3] | transpose_matrix(y[3]));
        }
    }
}

// Adds the lane's parts of the dot products of its two rows of the panel at `tile` with those of D.
template <typename T>
__device__ __forceinline__ void dot_rows(uint32_t tile, const float (&d)[32], RowPair &dots) {
    for_elements<T>(tile, [&](int e, bool is_lower, float x) {
        float &dot = is_lower ? dots.lower : dots.upper;
        dot = fmaf(x, d[e], dot);
    });
}

// sum += factor d, and to `dots` the parts of the dot products of the rows at `tile` with those of d.
template <typename T>
__device__ __forceinline__ void add_product(uint32_t tile, const float (&d)[32], RowPair factor, float (&sum)[32],
                                            RowPair &dots) {
    for_elements<T>(tile, [&](int e, bool is_lower, float x) {
        float &dot = is_lower ? dots.lower : dots.upper;
        dot = fmaf(x, d[e], dot);
        sum[e] = fmaf(is_lower ? factor.lower : factor.upper, d[e], sum[e]);
    });
}

// What to keep of a pair of elements of a diagonal 16 x 16 block, of its two halves on the diagonal: all but those on
// it.
__device__ __forceinline__ uint32_t off_diagonal(Lane p) {
    int row = p.lane / 4;
    return row == p.column ? 0xffff0000u : row == p.column + 1 ? 0x0000ffffu : ~0u;
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

// 64 columns of rows, out.
template <typename Out>
__device__ __forceinline__ void store_rows(const gdelta_view &view, const Chunk &chunk, int head, int column,
                                           const float (&d)[32]) {
    const Lane p = lane_anew();
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        int row = p.row + 8 * lower;
        Out *to = static_cast<Out *>(view.data) + offset_of(view, chunk.batch, chunk.begin + row, head) + column;
        if constexpr (sizeof(Out) == 2) {
#pragma unroll
            for (int j = 0; j < 8; j += 4) {  // the four lanes of a row: eight columns each
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
            for (int j = 0; j < 8; ++j) {
                float x = d[4 * j + 2 * lower], y = d[4 * j + 2 * lower + 1], *at = to + 8 * j + p.column;
                if (paired) {
                    *reinterpret_cast<float2 *>(at) = make_float2(x, y);
                } else {
                    at[0] = x, at[1] = y;
                }
            }
        }
    }
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
    static constexpr uint32_t kState = PanelsK * kPanelBytes;     // of 64 columns of V
    enum { kBarrierPairs = 1, kBarrierProducts, kBarrierPanel };  // the last: one a panel of K

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
    // What a head adds for pairs of tokens j <= i, or j < i (strictly): x = exp(G_i - G_j) factor_i beta_j e_ij to `a`;
    // and, but for the diagonal, x times the pair's product at `tile` to `row`, and its sums along the lane's rows to
    // `columns`.
    static __device__ __forceinline__ void add_pairs(const float (&e)[32], uint32_t tile, const float *table,
                                                     RowPair factor, bool strictly, float (&a)[32],
                                                     float (&columns)[16], RowPair &row) {
        const Lane p = lane_anew();
        float log_upper = table[kRowLog + p.row], log_lower = table[kRowLog + p.row + 8];
        int most = strictly ? p.row - 1 : p.row;  // j of the upper row
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            uint32_t f[4];
            ldmatrix_x4(block_at(tile, p, b), f);
            uint32_t kept = b == p.warp ? off_diagonal(p) : ~0u;
            f[0] &= kept, f[3] &= kept;
#pragma unroll
            for (int right = 0; right < 2; ++right) {
                int column = 16 * b + 8 * right + p.column;
                float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + column]);
                float2 beta = beta_pair<T>(table, column);
                float2 at_upper = unpack<__half>(f[2 * right]), at_lower = unpack<__half>(f[2 * right + 1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    bool is_lower = i & 2, odd = i & 1;
                    float x = exp2_fast((is_lower ? log_lower : log_upper) - (odd ? log.y : log.x)) *
                              ((is_lower ? factor.lower : factor.upper) * (odd ? beta.y : beta.x)) *
                              e[8 * b + 4 * right + i];
                    x = column + odd - 8 * is_lower <= most ? x : 0.0f;
                    a[8 * b + 4 * right + i] += x;
                    x *= is_lower ? (odd ? at_lower.y : at_lower.x) : (odd ? at_upper.y : at_upper.x);
                    columns[4 * b + 2 * right + odd] += x;
                    (is_lower ? row.lower : row.upper) += x;
                }
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
    __device__ __forceinline__ void pairs() const;
    __device__ __forceinline__ void products(int panel) const;
    __device__ __forceinline__ void gates() const;
    struct Values {
        const unsigned char *y;
        const float *table;
    };
    template <typename F>
    __device__ __forceinline__ void write_values(const Job &job, int head_v, int count, int panel, F from) const;
    __device__ __forceinline__ void write_values(const Job &job, int member, int slot, int panel) const;
    __device__ __forceinline__ float diagonals(int panel) const;
    __device__ __forceinline__ void finish_rows(const gdelta_view &out, const Job &job, int head, uint32_t tile,
                                                RowPair norm, int panel, int turn, float (&d)[32]) const;
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
    auto load_states = [&](unsigned char(&to)[PanelsV][kState], const void *from, int64_t at, int panel,
                           uint64_t &full) {  // 64 of K
        uint32_t barrier = expect(full, PanelsV * kPanelBytes);
        for (int v = 0; v < PanelsV; ++v) {
            bulk_load(shared_address(to[v]) + panel * kPanelBytes,
                      static_cast<const unsigned char *>(from) + (at * PanelsV + v) * kState + panel * kPanelBytes,
                      kPanelBytes, barrier);
        }
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
                    for (int panel = 0; panel < PanelsK; ++panel) {
                        wait(shared.s_empty[panel], i & 1 ^ 1);
                        load_states(shared.s, work.s, at, panel, shared.s_full[panel]);
                        wait(shared.ds_empty[panel], i & 1 ^ 1);
                        load_states(shared.ds, work.ds, at, panel, shared.ds_full[panel]);
                    }
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

// ---- Pairs: A1, A2, M ----

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::pairs() const {
    constexpr float kUp = Range<T>::kUp;
    float scale = static_cast<float>(call.shape.scale);
    int i = 0, j = 0;
    for_jobs([&](const Job &job) {
        if (job.skip) return;
        float a1[32], a2[32];
#pragma unroll
        for (int e = 0; e < 32; ++e) a2[e] = 0.0f;
        for (int member = 0; member < job.members; ++member, ++i) {
            const Lane p = lane_anew();
            bool begins = member == 0 || own_queries(), last = member + 1 == job.members, ends = last || own_queries();
            int slot = ring_slot<Shared::kStages>(i);
            uint32_t parity = ring_parity<Shared::kStages>(i);
            uint32_t tile_o = shared_address(shared.d_o[slot]), tile_w = shared_address(shared.w[slot]);
            const float *table = shared.rows[slot];
            typename Shared::Sums &sums = shared.sums[slot];
            if (begins) {
#pragma unroll
                for (int e = 0; e < 32; ++e) a1[e] = 0.0f;
            }
            if (call.d_o.data) {
                wait(shared.o_full[slot], parity);
                if (ragged(job)) {
                    clear_rows(tile_o, PanelsV, job.chunk.rows, threadIdx.x % 128, 128);
                    named_barrier(kBarrierPairs, 128);
                }
            }
            release(shared.o_clear[slot]);

            RowPair row = {0.0f, 0.0f}, diagonal = {0.0f, 0.0f};
            float columns[16] = {};
            wait(shared.w_full[slot], parity);
            wait(shared.r_full[slot], parity);
#pragma unroll 1
            for (int second = 0; second < 2; ++second) {  // E1, E2
                if (second) wait(shared.y_full[slot], parity);
                float e[32];
                multiply_rows(e, second ? shared_address(shared.y[slot]) : tile_o, tile_w);
                wait((second ? shared.l_full : shared.p_full)[0], (second ? j : turn_q(i, j)) & 1);
                RowPair factor = {kUp, kUp};
                if (second) factor = {-kUp * beta_at<T>(table, p.row), -kUp * beta_at<T>(table, p.row + 8)};
                wgmma_wait<0>();
                wgmma_hold(e);
                if (second) {
                    release(shared.w_empty[slot]);
                    release(shared.y_empty[slot]);
                } else {
                    release(shared.o_empty[slot]);
                }
#pragma unroll
                for (int b = 0; b < 4; ++b) {  // of E2, in the end
                    if (b != p.warp) continue;
                    bool odd = p.lane / 4 & 1;
                    diagonal.upper = odd ? e[8 * b + 1] : e[8 * b];
                    diagonal.lower = odd ? e[8 * b + 7] : e[8 * b + 6];
                }
                add_pairs(e, shared_address(second ? shared.l : shared.p), table, factor, second, a1, columns, row);
#pragma unroll
                for (int x = 0; x < 32; ++x) {  // A1 and A2 take turns, so that this stays a loop
                    float other = a2[x];
                    a2[x] = a1[x], a1[x] = other;
                }
            }
            int of = sum_columns(columns);
            row = {sum_row(row.upper), sum_row(row.lower)};
            wait(shared.sums_empty[slot], parity ^ 1);
            *reinterpret_cast<float2 *>(&sums.column[p.warp][8 * of + p.column]) = make_float2(columns[0], columns[1]);
            if (p.lane % 4 == 0) {
                sums.row_m[p.row] = row.upper;
                sums.row_m[p.row + 8] = row.lower;
            }
            if (p.lane % 4 == p.lane / 8) {
                sums.beta[p.row] = kUp * diagonal.upper;
                sums.beta[p.row + 8] = kUp * diagonal.lower;
            }
            release(shared.sums_full[slot]);
            if (!ends) {
                release(shared.r_empty[slot]);
                continue;
            }

            // A1 r_q; A1 r_k where p was, of which a warp has read the rows that it writes.
            uint32_t f[16];
            pack_rows(a1, {scale * table[kRowNormQ + p.row], scale * table[kRowNormQ + p.row + 8]}, f);
            wait(shared.a_empty[0], turn_q(i, j) & 1 ^ 1);
            put_blocks(shared_address(shared.a), p, f);
            publish(shared.a_full[0]);
            pack_columns(a1, p, scale, table + kRowNorm, f);
            put_blocks(shared_address(shared.p), p, f);
            publish(shared.a1_full[0]);
            if (!last) {
                release(shared.r_empty[slot]);
                continue;
            }
            uint32_t f_rows[16];
            pack_rows(a2, {table[kRowNorm + p.row], table[kRowNorm + p.row + 8]}, f_rows);
            pack_columns(a2, p, 1.0f, table + kRowNorm, f);
            release(shared.r_empty[slot]);
            named_barrier(kBarrierPairs, 128);  // all warps have read l
            put_symmetric(shared_address(shared.l), p, f, f_rows);
            publish(shared.a2_full[0]);
        }
        ++j;
    });
}

// ---- Products: dq, dk, <dS', S>, 64 of K a warpgroup; dv ----

// dv = sum of beta y over `count` output heads, in their order; from(m) says where those of head m are.
template <typename T, int PanelsK, int PanelsV>
template <typename F>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::write_values(const Job &job, int head_v, int count,
                                                                             int panel, F from) const {
    constexpr int kPieces = 8 * PanelsV;  // 16 bytes each, of a row
    if (!call.dv.data) return;
#pragma unroll 1
    for (int at = threadIdx.x % 128 + 128 * panel; at < job.chunk.rows * kPieces; at += 128 * PanelsK) {
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

// Of the output head in `slot`.
template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::write_values(const Job &job, int member, int slot,
                                                                             int panel) const {
    const gdelta_shape &shape = call.shape;
    int head_v = head_of(shape, head_of_keys(shape, job.head_k, member), shape.heads_v);
    bool own = shape.heads_v == shape.heads_o;
    if (!own && member + 1 < job.members) return;
    write_values(job, head_v, own ? 1 : job.members, panel, [&](int m) -> Values {
        if (own) return {shared.y[slot], shared.rows[slot]};
        int64_t from = job.number * shape.heads_o + head_of_keys(shape, job.head_k, m);
        return {static_cast<const unsigned char *>(work.y) + from * PanelsV * kPanelBytes,
                work.chunk.rows + from * kHopperRowFloats};
    });
}

// The warp's part of <dS', S>, from the diagonals of S dS'^T of 16 rows of V at a time.
template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ float Gradients<T, PanelsK, PanelsV>::diagonals(int panel) const {
    const Lane p = lane_anew();
    float upper[4] = {}, lower[4] = {};
    uint32_t at = panel * kPanelBytes;
#pragma unroll
    for (int v = 0; v < PanelsV; ++v) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            uint32_t x[4], y[4];
            ldmatrix_x4(block_at(shared_address(shared.s[v]) + at, p, b), x);
            ldmatrix_x4(block_at(shared_address(shared.ds[v]) + at, p, b), y);
            mma<T>(upper, x, y[0], y[2]);
            mma<T>(lower, x, y[1], y[3]);
        }
    }
    bool odd = p.lane & 4;
    float dot = (odd ? upper[1] : upper[0]) + (odd ? lower[3] : lower[2]);
    return sum_lanes<31>(p.lane % 4 == p.lane / 8 ? dot : 0.0f);
}

// The gradient of raw rows from that of normalised ones, and out: dx = r (dy - y <y, dy>), but r dy where the floor
// holds r constant.
template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::finish_rows(const gdelta_view &out, const Job &job,
                                                                            int head, uint32_t tile, RowPair norm,
                                                                            int panel, int turn, float (&d)[32]) const {
    const gdelta_shape &shape = call.shape;
    if (!out.data) return;
    if (shape.l2norm != GDELTA_L2NORM_NONE) {
        const Lane p = lane_anew();
        RowPair dots = {0.0f, 0.0f};
        dot_rows<T>(tile, d, dots);
        dots = {sum_row(dots.upper), sum_row(dots.lower)};
        if constexpr (PanelsK > 1) {
            auto &parts = shared.dots[turn & 1];
            if (p.lane % 4 == 0) parts[panel][p.row] = dots.upper, parts[panel][p.row + 8] = dots.lower;
            named_barrier(kBarrierProducts, 128 * PanelsK);
            dots = {parts[0][p.row] + parts[1][p.row], parts[0][p.row + 8] + parts[1][p.row + 8]};
        }
        float floor = shape.l2norm == GDELTA_L2NORM_MAX_EPS ? rsqrtf(static_cast<float>(shape.l2norm_eps)) : INFINITY;
        auto along = [&](float r, float dot) { return r >= floor ? 0.0f : r * (r * dot); };
        float upper = along(norm.upper, dots.upper), lower = along(norm.lower, dots.lower);
        for_elements<T>(tile, [&](int e, bool is_lower, float x) {
            d[e] = (is_lower ? norm.lower : norm.upper) * fmaf(-(is_lower ? lower : upper), x, d[e]);
        });
    }
    with_dtype(out.dtype, [&](auto *type) {
        store_rows<std::remove_pointer_t<decltype(type)>>(out, job.chunk, head, 64 * panel, d);
    });
}

template <typename T, int PanelsK, int PanelsV>
__device__ __forceinline__ void Gradients<T, PanelsK, PanelsV>::products(int panel) const {
    const gdelta_shape &shape = call.shape;
    constexpr float kUp = Range<T>::kUp;
    uint32_t at = panel * kPanelBytes, tile_q = shared_address(shared.q) + at, tile_k = shared_address(shared.k) + at;
    int i = 0, j = 0, turn = 0;
    // What follows the sequence in the chunk is cleared.
    auto clear = [&](const Job &job, uint32_t tile) {
        if (!ragged(job)) return;
        clear_rows(tile, 1, job.chunk.rows, threadIdx.x % 128, 128);
        named_barrier(kBarrierPanel + panel, 128);
    };
    for_jobs([&](const Job &job) {
        if (job.skip) {
            for (int member = 0; panel == 0 && member < job.members; ++member) {
                int head = head_of_keys(shape, job.head_k, member);
                clear_out(call.dv, job.chunk, head_of(shape, head, shape.heads_v), shape.dim_v);
                if (member == 0 || own_queries()) {
                    clear_out(call.dq, job.chunk, head_of(shape, head, shape.heads_q), shape.dim_k);
                }
                if (member == 0) clear_out(call.dk, job.chunk, job.head_k, shape.dim_k);
            }
            return;
        }
        float dq[32], dk[32];
#pragma unroll
        for (int e = 0; e < 32; ++e) dk[e] = 0.0f;
        for (int member = 0; member < job.members; ++member, ++i) {
            const Lane p = lane_anew();
            bool last = member + 1 == job.members, ends = last || own_queries();
            int slot = ring_slot<Shared::kStages>(i);
            uint32_t parity = ring_parity<Shared::kStages>(i), parity_q = turn_q(i, j) & 1;
            const float *table = shared.rows[slot];
            typename Shared::Sums &sums = shared.sums[slot];
            wait(shared.r_full[slot], parity);
            wait(shared.y_full[slot], parity);
            write_values(job, member, slot, panel);
            if (member == 0 || own_queries()) {
#pragma unroll
                for (int e = 0; e < 32; ++e) dq[e] = 0.0f;
                wait(shared.q_full[0], parity_q);
                clear(job, tile_q);
            }
            if (member == 0) {
                wait(shared.k_full[0], j & 1);
                clear(job, tile_k);
            }
            wait(shared.sums_empty[slot], parity ^ 1);

            // D1, and in its shadow <dS', S>.
            float d[32];
            wait(shared.o_clear[slot], parity);
            wait(shared.s_full[panel], i & 1);
            multiply_state(d, shared_address(shared.d_o[slot]), shared_address(shared.s[0]) + at);
            wait(shared.ds_full[panel], i & 1);
            float decay = kUp * kUp * table[kRowDecay] * diagonals(panel);
            if (p.lane == 0) sums.decay[panel][p.warp] = decay;
            float scale = static_cast<float>(shape.scale) * kUp;
            RowPair factor = {scale * exp2_fast(table[kRowLog + p.row]), scale * exp2_fast(table[kRowLog + p.row + 8])};
            RowPair dots = {0.0f, 0.0f};
            wgmma_wait<0>();
            wgmma_hold(d);
            release(shared.o_empty[slot]);
            add_product<T>(tile_q, d, factor, dq, dots);
            dots.upper = table[kRowOutput + p.row] * sum_row(dots.upper);
            dots.lower = table[kRowOutput + p.row + 8] * sum_row(dots.lower);
            if (p.lane % 4 == 0) sums.row_q[panel][p.row] = dots.upper, sums.row_q[panel][p.row + 8] = dots.lower;

#pragma unroll 1
            for (int second = 0; second < 2; ++second) {  // D2 = y S^T, D3 = w dS'^T
                if (second) wait(shared.w_full[slot], parity);
                multiply_state(d, shared_address(second ? shared.w[slot] : shared.y[slot]),
                               shared_address(second ? shared.ds[0] : shared.s[0]) + at);
                const Lane p = lane_anew();
                float end = second ? table[kRowLog + kChunk - 1] : 0.0f, sign = second ? -1.0f : 1.0f;
                float up = second ? kUp * kUp : -kUp;
                factor.upper = up * exp2_fast(fmaf(sign, table[kRowLog + p.row], end)) * beta_at<T>(table, p.row);
                factor.lower =
                    up * exp2_fast(fmaf(sign, table[kRowLog + p.row + 8], end)) * beta_at<T>(table, p.row + 8);
                dots = {0.0f, 0.0f};
                wgmma_wait<0>();
                wgmma_hold(d);
                release((second ? shared.ds_empty : shared.s_empty)[panel]);
                release((second ? shared.w_empty : shared.y_empty)[slot]);
                add_product<T>(tile_k, d, factor, dk, dots);
                dots.upper = factor.upper * table[kRowNorm + p.row] * sum_row(dots.upper);
                dots.lower = factor.lower * table[kRowNorm + p.row + 8] * sum_row(dots.lower);
                float *out = (second ? sums.write : sums.row_k)[panel];
                if (p.lane % 4 == 0) out[p.row] = dots.upper, out[p.row + 8] = dots.lower;
            }
            release(shared.sums_full[slot]);
            RowPair norm_q = {table[kRowNormQ + p.row], table[kRowNormQ + p.row + 8]};
            RowPair norm_k = {table[kRowNorm + p.row], table[kRowNorm + p.row + 8]};
            release(shared.r_empty[slot]);
            if (!ends) continue;

            // dq += (A1 r_k) K, dk += (A1 r_q)^T Q; at the job's end dk += (A2 + A2^T) r_k K.
            wait(shared.a_full[0], parity_q);
            wait(shared.a1_full[0], parity_q);
            wgmma_hold(dq);
            wgmma_hold(dk);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorK, kMajorMN>(dq, panel_k_major(shared_address(shared.p)) + step * kStepK,
                                            panel_mn_major(tile_k) + step * kStepMN, true);
            }
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorMN, kMajorMN>(dk, panel_mn_major(shared_address(shared.a)) + step * kStepMN,
                                             panel_mn_major(tile_q) + step * kStepMN, true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(dq);
            wgmma_hold(dk);
            release(shared.p_empty[0]);
            release(shared.a_empty[0]);
            int head = head_of_keys(shape, job.head_k, member);
            finish_rows(call.dq, job, head_of(shape, head, shape.heads_q), tile_q, norm_q, panel, turn++, dq);
            release(shared.q_empty[0]);
            if (!last) continue;
            wait(shared.a2_full[0], j & 1);
            wgmma_hold(dk);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorK, kMajorMN>(dk, panel_k_major(shared_address(shared.l)) + step * kStepK,
                                            panel_mn_major(tile_k) + step * kStepMN, true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(dk);
            release(shared.l_empty[0]);
            finish_rows(call.dk, job, job.head_k, tile_k, norm_k, panel, turn++, dk);
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
        for (int warp = 0; warp < kWarps; ++warp) column += sums.column[warp][at];
        d_log[x] = sums.row_m[at] - column;
        write[x] = 0.0f;
#pragma unroll
        for (int panel = 0; panel < PanelsK; ++panel) {
            d_log[x] += sums.row_q[panel][at] + sums.row_k[panel][at];
            write[x] += sums.write[panel][at];
        }
        d_beta[x] = sums.beta[at];
    }
    float decay = 0.0f;
#pragma unroll
    for (int part = 0; part < PanelsK * kWarps; ++part) decay += sums.decay[part / kWarps][part % kWarps];
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
        constexpr uint32_t kProducts = PanelsK * kWarpgroup, kAll = kProducts + kWarpgroup;  // kAll: with `pairs`
        init(shared.job_full, kWarp), init(shared.job_empty, kAll + kWarpgroup);
        init(shared.k_full, 1), init(shared.k_empty, kProducts);
        init(shared.q_full, 1), init(shared.q_empty, kProducts);
        init(shared.p_full, 1), init(shared.p_empty, kProducts), init(shared.a1_full, kWarpgroup);
        init(shared.l_full, 1), init(shared.l_empty, kProducts), init(shared.a2_full, kWarpgroup);
        init(shared.a_full, kWarpgroup), init(shared.a_empty, kProducts);
        init(shared.s_full, 1), init(shared.s_empty, kWarpgroup);
        init(shared.ds_full, 1), init(shared.ds_empty, kWarpgroup);
        init(shared.o_full, 1), init(shared.o_clear, kWarpgroup), init(shared.o_empty, kAll);
        init(shared.w_full, 1), init(shared.w_empty, kAll);
        init(shared.y_full, 1), init(shared.y_empty, kAll);
        init(shared.r_full, 1), init(shared.r_empty, kAll);
        init(shared.sums_full, kAll), init(shared.sums_empty, kWarp);
        fence_barrier_init();
    }
    if (!call.d_o.data) {  // is 0
        for (int i = threadIdx.x; i < static_cast<int>(sizeof shared.d_o) / 16; i += blockDim.x) {
            reinterpret_cast<uint4 *>(shared.d_o)[i] = make_uint4(0, 0, 0, 0);
        }
        fence_async_shared();
    }
    __syncthreads();
    Gradients<T, PanelsK, PanelsV> gradients = {call, work, maps, shared, chunks};
    // 128 registers each at launch: 512 = 176 + 48 + 2 * 144. With one half of K the last warpgroup has nothing to do.
    int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);  // uniform, and known to be
    if (role == 0) {
        registers_increase<176>();
        gradients.pairs();
    } else if (role == 1) {
        registers_decrease<48>();
        int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32 % 4), 0);
        if (warp < 3) {
            gradients.load(warp);
        } else {
            gradients.gates();
        }
    } else if (role - 2 < PanelsK) {
        registers_increase<144>();
        gradients.products(role - 2);
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
