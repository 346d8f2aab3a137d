// Hopper backward, second kernel, after prepare: the two recurrences along the chunks of a sequence, the states forward
// and their gradients in reverse. Neither needs the other, so both run in one launch, a block each.
//
//   X_j = exp(G_last - G_j) (t^T r_k K)_j                          [64, K]    t, p, l and the row table: prepare.cu
//   States, S being the state before the chunk:
//     W = V - e r_k (K S),   S' = exp(G_last) S + (beta X)^T W
//     w = N W,   N_ij = [i = j] - exp(G_i - G_j) (l t)_ij beta_j   [64, V]    u = beta w is what the tokens write
//   Gradients, dS' being the gradient of the state after the chunk:
//     y = X dS' + Z^T dO,   Z_ij = exp(G_i - G_j) (p t)_ij, j <= i [64, V]    the gradient of u; dV = beta y
//     dS = exp(G_last) dS' + (scale e r_q Q)^T dO - (beta e r_k K)^T y
//
// S, w, dS' and y of every chunk go to the workspace, in 16 bits and in the order of shared memory, for gradients.cu.
// w and not u: the gradient of beta is <y, w>, and u / beta would not do.
//
// Grid: x = (sequence, output head, tile of 64 Halves columns of V, direction), the direction fastest. Block:
// warpgroups
//
//   helper        K t, and l or p --> X, and N or Z
//   output        stores what the chains hand over; in the states' direction also N W --> w
//   chain 0 ..    S^T or dS^T of 64 columns of V each, fp32 in registers
//
// as in scan.cu, whose pipeline this is: K, V or dO, t and rows come in by bulk copies, each ring refilled by a thread
// of the last warpgroup that reads it. In reverse the first chunk is the ragged one: K and Q, which are summed over
// tokens there, lose the rows of others before the roles start.
//
// Shared memory at K = V = 128 with two halves, KB, states / gradients: K 48 / 48, Q - / 32, V or dO 32 / 32, t 16 /
// 16, N or Z 16 / 16, X 16 / 16, S or dS' 32 / 32, W or y 16 / 16, w 16 / -.
//
// Precision: states, sums, row table in fp32; all operands rounded once to T. fp16 keeps S, W, w and dS' 16 times
// smaller, X 16 times larger (Range in chunk.cuh); y and Z are what they are.
#include "kernels/hopper/backward.cuh"
#include "kernels/hopper/launch.cuh"
#include "kernels/ptx/bulk.cuh"

namespace gdelta {

constexpr int kWarps = 4;  // of a warpgroup

template <int PanelsK, int Halves, bool Reverse>
struct __align__(1024) ChainShared {
    static constexpr int kStagesK = 3, kStagesV = 2, kStagesT = 2, kStagesZ = 2, kStagesQ = 2, kStagesR = 2;
    static constexpr int kStagesX = Halves == 2 ? 1 : 2;
    static constexpr int kExtra = Reverse ? kStagesQ * PanelsK : Halves;

    unsigned char k[kStagesK][PanelsK * kPanelBytes];
    unsigned char v[kStagesV][Halves * kPanelBytes];  // V, or dO
    unsigned char t[kStagesT][kPanelBytes];
    unsigned char z[kStagesZ][kPanelBytes];  // l or p, then N or Z in its place
    unsigned char x[kStagesX][PanelsK * kPanelBytes];
    unsigned char s[Halves][PanelsK * kPanelBytes];  // rows of V, 64 of K a panel
    unsigned char w[Halves * kPanelBytes];           // W: rows of V, 64 tokens. y: rows are tokens
    unsigned char extra[kExtra * kPanelBytes];       // gradients: Q, its stages; states: w on its way out
    float rows[kStagesR][kHopperRowFloats];
    uint64_t k_full[kStagesK], k_empty[kStagesK], q_full[kStagesQ], q_empty[kStagesQ];
    uint64_t v_full[kStagesV][Halves], v_empty[kStagesV][Halves];
    uint64_t t_full[kStagesT], r_full[kStagesR], r_empty[kStagesR], z_loaded[kStagesZ], z_full[kStagesZ],
        z_empty[kStagesZ];
    uint64_t x_full[kStagesX], x_empty[kStagesX], s_full[1], s_empty[1], w_full[1], w_empty[1];
    Sequence sequence;
    int head, head_q, head_k, head_v, first_panel;  // first_panel: of V
    int64_t number;                                 // of the first chunk
    int tail;                                       // rows of the last chunk
};

// What every role of a block knows. `i` counts steps, chunk_of(i) is the chunk; rings turn with the steps.
template <typename T, int PanelsK, int Halves, bool Reverse>
struct Chain {
    using Shared = ChainShared<PanelsK, Halves, Reverse>;
    const gdelta_backward_call &call;
    const gdelta_hopper_backward_work &work;
    const gdelta_hopper_backward_maps &maps;
    Shared &shared;
    int chunks;

    __device__ __forceinline__ int chunk_of(int i) const {
        return Reverse ? chunks - 1 - i : i;
    }
    __device__ __forceinline__ int token(int i) const {
        return static_cast<int>(shared.sequence.begin) + chunk_of(i) * kChunk;
    }
    // Rows of others follow those of the sequence in the chunk. (In other layouts the copy engine brings zeros.)
    __device__ __forceinline__ bool ragged(int i) const {
        return chunk_of(i) + 1 == chunks && shared.tail < kChunk && call.shape.packed;
    }
    __device__ __forceinline__ int64_t chunk_head(int i) const {
        return (shared.number + chunk_of(i)) * call.shape.heads_o + shared.head;
    }
    // One thread. The slot must be free.
    __device__ __forceinline__ void load_k(int i, int slot) const {
        uint32_t barrier = shared_address(&shared.k_full[slot]);
        mbarrier_arrive_expect(barrier, PanelsK * kPanelBytes);
        load_panels(maps.k, shared_address(shared.k[slot]), barrier, i, shared.head_k, 0, PanelsK);
    }
    __device__ __forceinline__ void load_q(int i) const {
        int slot = ring_slot<Shared::kStagesQ>(i);
        uint32_t barrier = shared_address(&shared.q_full[slot]);
        mbarrier_arrive_expect(barrier, PanelsK * kPanelBytes);
        load_panels(maps.q, tile_q(slot), barrier, i, shared.head_q, 0, PanelsK);
    }
    __device__ __forceinline__ void load_v(int i, int half) const {
        int slot = ring_slot<Shared::kStagesV>(i);
        uint32_t barrier = shared_address(&shared.v_full[slot][half]);
        mbarrier_arrive_expect(barrier, kPanelBytes);
        load_panels(Reverse ? maps.d_o : maps.v, shared_address(shared.v[slot]) + half * kPanelBytes, barrier, i,
                    Reverse ? shared.head : shared.head_v, shared.first_panel + half, 1);
    }
    __device__ __forceinline__ void load_t(int i) const {
        load_tile(work.chunk.t, chunk_head(i), shared.t[ring_slot<Shared::kStagesT>(i)],
                  shared.t_full[ring_slot<Shared::kStagesT>(i)]);
    }
    __device__ __forceinline__ void load_z(int i) const {
        load_tile(Reverse ? work.chunk.p : work.chunk.l,
                  (shared.number + chunk_of(i)) * call.shape.heads_q + shared.head_q,
                  shared.z[ring_slot<Shared::kStagesZ>(i)], shared.z_loaded[ring_slot<Shared::kStagesZ>(i)]);
    }
    __device__ __forceinline__ void load_rows(int i) const {
        int slot = ring_slot<Shared::kStagesR>(i);
        uint32_t barrier = shared_address(&shared.r_full[slot]);
        mbarrier_arrive_expect(barrier, sizeof shared.rows[0]);
        bulk_load(shared_address(shared.rows[slot]), work.chunk.rows + chunk_head(i) * kHopperRowFloats,
                  sizeof shared.rows[0], barrier);
    }
    static __device__ __forceinline__ void load_tile(const void *tiles, int64_t at, unsigned char (&to)[kPanelBytes],
                                                     uint64_t &full) {
        uint32_t barrier = shared_address(&full);
        mbarrier_arrive_expect(barrier, kPanelBytes);
        bulk_load(shared_address(to), static_cast<const char *>(tiles) + at * kHopperTileBytes, kPanelBytes, barrier);
    }
    __device__ __forceinline__ void load_panels(const gdelta_tensor_map &map, uint32_t to, uint32_t barrier, int i,
                                                int of_head, int first, int count) const {
        for (int panel = 0; panel < count; ++panel) {
            bulk_load_tensor(to + panel * kPanelBytes, &map, barrier, token(i), of_head,
                             static_cast<int>(shared.sequence.batch), first + panel);
        }
    }
    __device__ __forceinline__ uint32_t tile_q(int slot) const {
        return shared_address(shared.extra) + slot * PanelsK * kPanelBytes;
    }
    // Where 64 columns of V of a chunk are in `s` or `ds`, and in `w` or `y`.
    __device__ __forceinline__ unsigned char *state_out(void *states, int i, int half) const {
        int64_t at = chunk_head(i) * (call.shape.dim_v / 64) + shared.first_panel + half;
        return static_cast<unsigned char *>(states) + at * PanelsK * kPanelBytes;
    }
    __device__ __forceinline__ unsigned char *values_out(void *values, int i, int half) const {
        int64_t at = chunk_head(i) * (call.shape.dim_v / 64) + shared.first_panel + half;
        return static_cast<unsigned char *>(values) + at * kPanelBytes;
    }

    __device__ __forceinline__ void load_first() const;
    __device__ __forceinline__ void helper() const;
    __device__ __forceinline__ void load_keys(Lane p, uint32_t panel, const float *table, int i,
                                              uint32_t (&a)[16]) const;
    __device__ __forceinline__ void output() const;
    __device__ __forceinline__ void copy() const;
    __device__ __forceinline__ void states(int half) const;
    __device__ __forceinline__ void gradients(int half) const;
    __device__ __forceinline__ void refill(int i, Position<Shared::kStagesK> k, int half) const;
};

// One thread: what the rings hold at first.
template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::load_first() const {
    for (int i = 0; i < Shared::kStagesK && i < chunks; ++i) load_k(i, i);
    for (int i = 0; i < 2 && i < chunks; ++i) {
        if (Reverse) load_q(i);
        load_rows(i);
        load_t(i);
        load_z(i);
        for (int half = 0; half < Halves && (!Reverse || call.d_o.data); ++half) load_v(i, half);
    }
}

// ---- Helper: X, and N or Z ----

// The transpose of r_k K, 64 of its columns, as fp16 operand; tokens past the end are 0 whatever K holds there.
template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::load_keys(Lane p, uint32_t panel,
                                                                              const float *table, int i,
                                                                              uint32_t (&a)[16]) const {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        uint32_t(&f)[4] = reinterpret_cast<uint32_t(&)[4]>(a[4 * s]);
        ldmatrix_x4_trans(block_at_trans(panel, p, s), f);
        if (!Reverse && ragged(i)) mask_tokens(f, 16 * s + p.column, shared.tail);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float2 norm = *reinterpret_cast<const float2 *>(&table[kRowNorm + 16 * s + r / 2 * 8 + p.column]);
            float2 x = unpack<T>(f[r]);
            f[r] = pack<__half>(norm.x * x.x, norm.y * x.y);
        }
    }
}

template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::helper() const {
    enum { kBarrier = 1, kFlight = Halves == 2 ? 1 : 2 };  // products in flight, as registers allow
    Position<Shared::kStagesK> k;
    for (int i = 0; i < chunks; ++i) {
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
        int slot_t = ring_slot<Shared::kStagesT>(i), slot_z = ring_slot<Shared::kStagesZ>(i),
            slot_x = ring_slot<Shared::kStagesX>(i), slot_r = ring_slot<Shared::kStagesR>(i);
        uint32_t tile_k = shared_address(shared.k[k.slot]), tile_t = shared_address(shared.t[slot_t]),
                 tile_z = shared_address(shared.z[slot_z]), tile_x = shared_address(shared.x[slot_x]);
        const float *table = shared.rows[slot_r];
        wait(shared.k_full[k.slot], k.parity);
        wait(shared.t_full[slot_t], ring_parity<Shared::kStagesT>(i));
        wait(shared.r_full[slot_r], ring_parity<Shared::kStagesR>(i));
        // Products 0 ..: X^T = (r_k K)^T t, 64 columns of K each, whose fp16 operand is made in registers; the last:
        // l t or p t.
        float acc[kFlight][32];
        uint32_t a[kFlight][16];
        auto multiply = [&](int product) {
            float(&d)[32] = acc[product % kFlight];
            uint32_t(&k_t)[16] = a[product % kFlight];
            if (product < PanelsK) {
                load_keys(p, tile_k + product * kPanelBytes, table, i, k_t);
                wgmma_hold(k_t);
            } else {
                wait(shared.z_loaded[slot_z], ring_parity<Shared::kStagesZ>(i));
            }
            wgmma_hold(d);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                uint64_t t_step = panel_mn_major(tile_t) + step * kStepMN;
                if (product < PanelsK) {
                    wgmma<__half, kMajorMN>(d, k_t + 4 * step, t_step, step > 0);
                } else {
                    wgmma<__half, kMajorK, kMajorMN>(d, panel_k_major(tile_z) + step * kStepK, t_step, step > 0);
                }
            }
            wgmma_commit();
        };
        multiply(0);
#pragma unroll
        for (int product = 0; product < PanelsK; ++product) {
            if (kFlight == 2) multiply(product + 1);
            float(&d)[32] = acc[product % kFlight];
            wgmma_wait<kFlight - 1>();
            wgmma_hold(d);
            if (product == 0) wait(shared.x_empty[slot_x], ring_parity<Shared::kStagesX>(i) ^ 1);
            float last = table[kRowLog + kChunk - 1] + Range<T>::kLogUp;
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                float2 factor[2];
#pragma unroll
                for (int right = 0; right < 2; ++right) {
                    int column = 16 * s + 8 * right + p.column;
                    float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + column]);
                    factor[right] = make_float2(exp2_fast(last - log.x), exp2_fast(last - log.y));
                    if (!Reverse) {
                        float2 beta = beta_pair<T>(table, column);
                        factor[right].x *= beta.x, factor[right].y *= beta.y;
                    }
                }
                const float *y = &d[8 * s];
                stmatrix_x4_trans(
                    block_at_trans(tile_x + product * kPanelBytes, p, s),
                    pack<T>(factor[0].x * y[0], factor[0].y * y[1]), pack<T>(factor[0].x * y[2], factor[0].y * y[3]),
                    pack<T>(factor[1].x * y[4], factor[1].y * y[5]), pack<T>(factor[1].x * y[6], factor[1].y * y[7]));
            }
            if (kFlight == 1) multiply(product + 1);
        }
        publish(shared.x_full[slot_x]);
        release(shared.k_empty[k.slot]);

        float(&d)[32] = acc[PanelsK % kFlight];
        float upper = table[kRowLog + p.row], lower = table[kRowLog + p.row + 8];
        wgmma_wait<0>();
        wgmma_hold(d);
        named_barrier(kBarrier, 128);  // all warps have read t and what z held
        if (p.warp + p.lane == 0 && i + Shared::kStagesT < chunks) load_t(i + Shared::kStagesT);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            uint32_t f[4] = {};
            if (s <= p.warp) {
#pragma unroll
                for (int right = 0; right < 2; ++right) {
                    int column = 16 * s + 8 * right + p.column;
                    float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + column]);
                    float y[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float row_log = e < 2 ? upper : lower, column_log = e & 1 ? log.y : log.x;
                        y[e] = exp2_fast(row_log - column_log) * d[8 * s + 4 * right + e];
                    }
                    if (!Reverse) {
                        float2 beta = beta_pair<T>(table, column);
                        y[0] *= -beta.x, y[1] *= -beta.y, y[2] *= -beta.x, y[3] *= -beta.y;
                    }
                    // N has ones on the diagonal, where Z has a value of its own.
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        int at = column + e % 2 - p.row - e / 2 * 8;  // right of the diagonal
                        y[e] = at > 0 ? 0.0f : !Reverse && at == 0 ? 1.0f : y[e];
                    }
                    f[2 * right] = pack<T>(y[0], y[1]);
                    f[2 * right + 1] = pack<T>(y[2], y[3]);
                }
            }
            stmatrix_x4(block_at(tile_z, p, s), f[0], f[1], f[2], f[3]);
        }
        publish(shared.z_full[slot_z]);
        release(shared.r_empty[slot_r]);
        k.next();
    }
}

// ---- Output ----

// The states' direction: S as it is, w = N W.
template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::output() const {
    enum { kBarrier = 2 };
    const Lane p = lane_of_warpgroup();
    bool leader = threadIdx.x % 128 == 0;
    uint32_t tile_o = shared_address(shared.extra), tile_w = shared_address(shared.w);
    for (int i = 0; i < chunks; ++i) {
        int slot_z = ring_slot<Shared::kStagesZ>(i);
        uint32_t tile_z = shared_address(shared.z[slot_z]);
        if (leader) {
            acquire(shared.s_full[0], i & 1);
            for (int half = 0; half < Halves; ++half) {
                bulk_store(state_out(work.s, i, half), shared_address(shared.s[half]), PanelsK * kPanelBytes);
            }
            bulk_commit();
        }
        __syncwarp();
        float o[32 * Halves];
        wait(shared.z_full[slot_z], ring_parity<Shared::kStagesZ>(i));
        acquire(shared.w_full[0], i & 1);
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorK, kMajorK>(o, panel_k_major(tile_z) + step * kStepK, panel_k_major(tile_w) + step * kStepK,
                                       step > 0);
        }
        wgmma_commit();
        if (leader) {
            bulk_wait_read<0>();  // S and the last w have left their places
            mbarrier_arrive(shared_address(&shared.s_empty[0]));
        }
        __syncwarp();
        wgmma_wait<0>();
        wgmma_hold(o);
        release(shared.w_empty[0]);
        named_barrier(kBarrier, 128);
        if (leader && i + Shared::kStagesZ < chunks) load_z(i + Shared::kStagesZ);
#pragma unroll
        for (int b = 0; b < 4 * Halves; ++b) {
            stmatrix_x4(block_at(tile_o + b / 4 * kPanelBytes, p, b % 4), pack<T>(o[8 * b], o[8 * b + 1]),
                        pack<T>(o[8 * b + 2], o[8 * b + 3]), pack<T>(o[8 * b + 4], o[8 * b + 5]),
                        pack<T>(o[8 * b + 6], o[8 * b + 7]));
        }
        fence_async_shared();
        named_barrier(kBarrier, 128);
        if (leader) {
            bulk_store(values_out(work.w, i, 0), tile_o, Halves * kPanelBytes);
            bulk_commit();
        }
    }
    if (leader) bulk_wait<0>();
}

// The gradients' direction, one thread: dS' and y as they are.
template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::copy() const {
    for (int i = 0; i < chunks; ++i) {
        wait(shared.s_full[0], i & 1);
        for (int half = 0; half < Halves; ++half) {
            bulk_store(state_out(work.ds, i, half), shared_address(shared.s[half]), PanelsK * kPanelBytes);
        }
        bulk_commit();
        wait(shared.w_full[0], i & 1);
        bulk_store(values_out(work.y, i, 0), shared_address(shared.w), Halves * kPanelBytes);
        bulk_commit();
        bulk_wait_read<1>();
        mbarrier_arrive(shared_address(&shared.s_empty[0]));
        bulk_wait_read<0>();
        mbarrier_arrive(shared_address(&shared.w_empty[0]));
    }
    bulk_wait<0>();
}

// ---- Chains ----

// `offset` -1: zeros.
template <int PanelsK>
__device__ __forceinline__ void load_state(const gdelta_state_view &view, int64_t offset, int dim_v, int column,
                                           float (&s)[32 * PanelsK]) {
    if (offset < 0) {
#pragma unroll
        for (int i = 0; i < 32 * PanelsK; ++i) s[i] = 0.0f;
        return;
    }
    with_dtype(view.dtype, [&](auto *type) {
        const auto *from = static_cast<decltype(type)>(view.data) + offset;
        for_state<PanelsK>(view, dim_v, column, [&](int i, int at) { s[i] = to_float(from[at]); });
    });
}

// The chains are the last to read K, V or dO, rows, and in reverse Q and Z; a warp each fetches those of later chunks.
template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::refill(int i, Position<Shared::kStagesK> k,
                                                                           int half) const {
    int warp = threadIdx.x / 32 % 4, later = i + 2;
    if (threadIdx.x % 32 == 0) {
        if (warp == 0 && later < chunks && (!Reverse || call.d_o.data)) {
            wait(shared.v_empty[ring_slot<Shared::kStagesV>(i)][half], ring_parity<Shared::kStagesV>(i));
            load_v(later, half);
        } else if (warp == 1 && half == 0 && i + Shared::kStagesK < chunks) {
            wait(shared.k_empty[k.slot], k.parity);
            load_k(i + Shared::kStagesK, k.slot);
        } else if (warp == 2 && half == 0 && later < chunks) {
            wait(shared.r_empty[ring_slot<Shared::kStagesR>(i)], ring_parity<Shared::kStagesR>(i));
            load_rows(later);
        } else if (Reverse && warp == 3 && half == 0 && later < chunks) {
            wait(shared.z_empty[ring_slot<Shared::kStagesZ>(i)], ring_parity<Shared::kStagesZ>(i));
            load_z(later);
            wait(shared.q_empty[ring_slot<Shared::kStagesQ>(i)], ring_parity<Shared::kStagesQ>(i));
            load_q(later);
        }
    }
    __syncwarp();
}

template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::states(int half) const {
    float s[32 * PanelsK];
    uint32_t a[16 * PanelsK];
    load_state<PanelsK>(call.in.initial, shared.sequence.initial, call.shape.dim_v, (shared.first_panel + half) * 64,
                        s);
    pack_state<T>(s, a);

    Position<Shared::kStagesK> k;
    uint32_t tile_s = shared_address(shared.s[half]), tile_w = shared_address(shared.w) + half * kPanelBytes;
    for (int i = 0; i < chunks; ++i) {
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
        int slot_v = ring_slot<Shared::kStagesV>(i), slot_x = ring_slot<Shared::kStagesX>(i),
            slot_r = ring_slot<Shared::kStagesR>(i);
        uint32_t tile_k = shared_address(shared.k[k.slot]), tile_x = shared_address(shared.x[slot_x]),
                 tile_v = shared_address(shared.v[slot_v]) + half * kPanelBytes;
        const float *table = shared.rows[slot_r];

        // U^T = S^T K^T. In its shadow: S for `output`, its decay, V.
        float u[32];
        wait(shared.k_full[k.slot], k.parity);
        wgmma_hold(u);
        wgmma_hold(a);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            wgmma<T, kMajorK>(u, a + 4 * step, panel_k_major(tile_k + step / 4 * kPanelBytes) + step % 4 * kStepK,
                              step > 0);
        }
        wgmma_commit();
        wait(shared.s_empty[0], i & 1 ^ 1);
        put_blocks(tile_s, p, a);
        release(shared.s_full[0]);
        wait(shared.r_full[slot_r], ring_parity<Shared::kStagesR>(i));
        float decay = table[kRowDecay];
#pragma unroll
        for (int e = 0; e < 32 * PanelsK; ++e) s[e] *= decay;
        uint32_t wv[16];
        wait(shared.v_full[slot_v][half], ring_parity<Shared::kStagesV>(i));
        get_blocks_trans(tile_v, p, wv);
        release(shared.v_empty[slot_v][half]);
        wgmma_wait<0>();
        wgmma_hold(u);
        release(shared.k_empty[k.slot]);

        // W = V - e r_k U; columns of tokens past the end are 0 whatever V and K held there.
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + 8 * j + p.column]);
            float2 norm = *reinterpret_cast<const float2 *>(&table[kRowNorm + 8 * j + p.column]);
            float2 upper = unpack<T>(wv[2 * j]), lower = unpack<T>(wv[2 * j + 1]);
            norm.x *= exp2_fast(log.x), norm.y *= exp2_fast(log.y);
            wv[2 * j] = pack<T>(fmaf(-norm.x, u[4 * j], Range<T>::kDown * upper.x),
                                fmaf(-norm.y, u[4 * j + 1], Range<T>::kDown * upper.y));
            wv[2 * j + 1] = pack<T>(fmaf(-norm.x, u[4 * j + 2], Range<T>::kDown * lower.x),
                                    fmaf(-norm.y, u[4 * j + 3], Range<T>::kDown * lower.y));
        }
        if (ragged(i)) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                mask_tokens(reinterpret_cast<uint32_t(&)[4]>(wv[4 * b]), 16 * b + p.column, shared.tail);
            }
        }
        release(shared.r_empty[slot_r]);

        // S' = decay S + X^T W. In its shadow: W for `output`.
        wait(shared.x_full[slot_x], ring_parity<Shared::kStagesX>(i));
        wgmma_hold(s);
        wgmma_hold(wv);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, wv + 4 * step, panel_mn_major(tile_x) + step * kStepMN, true);
        }
        wgmma_commit();
        wait(shared.w_empty[0], i & 1 ^ 1);
        put_blocks(tile_w, p, wv);
        release(shared.w_full[0]);
        refill(i, k, half);
        wgmma_wait<0>();
        wgmma_hold(s);
        release(shared.x_empty[slot_x]);
        pack_state<T>(s, a);
        k.next();
    }
}

template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse>::gradients(int half) const {
    const Lane p = lane_of_warpgroup();
    int64_t n = block_sequence(call.shape, call.shape.dim_v / (64 * Halves));
    int column = (shared.first_panel + half) * 64;
    float s[32 * PanelsK];
    uint32_t a[16 * PanelsK], d[16] = {};
    load_state<PanelsK>(call.d_final, call.d_final.data ? n * call.d_final.slot + shared.head * call.d_final.head : -1,
                        call.shape.dim_v, column, s);
    pack_state<T>(s, a);

    Position<Shared::kStagesK> k;
    uint32_t tile_s = shared_address(shared.s[half]), tile_y = shared_address(shared.w) + half * kPanelBytes;
    for (int i = 0; i < chunks; ++i) {
        int slot_v = ring_slot<Shared::kStagesV>(i), slot_x = ring_slot<Shared::kStagesX>(i),
            slot_r = ring_slot<Shared::kStagesR>(i), slot_z = ring_slot<Shared::kStagesZ>(i),
            slot_q = ring_slot<Shared::kStagesQ>(i);
        uint32_t panel_z = shared_address(shared.z[slot_z]), panel_x = shared_address(shared.x[slot_x]);
        uint32_t panel_v = shared_address(shared.v[slot_v]) + half * kPanelBytes;
        const float *table = shared.rows[slot_r];

        if (call.d_o.data) {
            wait(shared.v_full[slot_v][half], ring_parity<Shared::kStagesV>(i));
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                uint32_t(&f)[4] = reinterpret_cast<uint32_t(&)[4]>(d[4 * b]);
                ldmatrix_x4_trans(block_at_trans(panel_v, p, b), f);
                if (ragged(i)) mask_tokens(f, 16 * b + p.column, shared.tail);
            }
            release(shared.v_empty[slot_v][half]);
        }

        // y^T = dO^T Z + dS'^T X^T. In its shadow: dS' for `copy`, its decay, and the part of dS that comes from dO.
        float y[32];
        wait(shared.x_full[slot_x], ring_parity<Shared::kStagesX>(i));
        wait(shared.z_full[slot_z], ring_parity<Shared::kStagesZ>(i));
        wgmma_hold(y);
        wgmma_hold(a);
        wgmma_hold(d);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(y, d + 4 * step, panel_mn_major(panel_z) + step * kStepMN, step > 0);
        }
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            wgmma<T, kMajorK>(y, a + 4 * step, panel_k_major(panel_x + step / 4 * kPanelBytes) + step % 4 * kStepK,
                              true);
        }
        wgmma_commit();
        wait(shared.s_empty[0], i & 1 ^ 1);
        put_blocks(tile_s, p, a);
        publish(shared.s_full[0]);
        wait(shared.r_full[slot_r], ring_parity<Shared::kStagesR>(i));
        float decay = table[kRowDecay];
#pragma unroll
        for (int e = 0; e < 32 * PanelsK; ++e) s[e] *= decay;
        uint32_t scaled[16];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 factor = *reinterpret_cast<const float2 *>(&table[kRowOutput + 8 * j + p.column]);
            factor.x *= Range<T>::kDown, factor.y *= Range<T>::kDown;
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                float2 x = unpack<T>(d[2 * j + lower]);
                scaled[2 * j + lower] = pack<T>(factor.x * x.x, factor.y * x.y);
            }
        }
        wait(shared.q_full[slot_q], ring_parity<Shared::kStagesQ>(i));
        wgmma_hold(s);
        wgmma_hold(scaled);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, scaled + 4 * step, panel_mn_major(tile_q(slot_q)) + step * kStepMN, true);
        }
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(y);
        release(shared.x_empty[slot_x]);
        release(shared.z_empty[slot_z]);

        // dS += -(beta e r_k y)^T K. In its shadow: y for `copy`.
        uint32_t dw[16], y_out[16];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float4 gates = reinterpret_cast<const float4 *>(table + kRowGates)[4 * j + p.lane % 4];
            dw[2 * j] = pack<T>(-gates.z * y[4 * j], -gates.w * y[4 * j + 1]);
            dw[2 * j + 1] = pack<T>(-gates.z * y[4 * j + 2], -gates.w * y[4 * j + 3]);
            y_out[2 * j] = pack<T>(y[4 * j], y[4 * j + 1]);
            y_out[2 * j + 1] = pack<T>(y[4 * j + 2], y[4 * j + 3]);
        }
        release(shared.r_empty[slot_r]);
        uint32_t tile_k = shared_address(shared.k[k.slot]);
        wait(shared.k_full[k.slot], k.parity);
        wgmma_hold(dw);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, dw + 4 * step, panel_mn_major(tile_k) + step * kStepMN, true);
        }
        wgmma_commit();
        wait(shared.w_empty[0], i & 1 ^ 1);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            stmatrix_x4_trans(block_at_trans(tile_y, p, b), y_out[4 * b], y_out[4 * b + 1], y_out[4 * b + 2],
                              y_out[4 * b + 3]);
        }
        publish(shared.w_full[0]);
        wgmma_wait<0>();
        wgmma_hold(s);
        release(shared.k_empty[k.slot]);
        release(shared.q_empty[slot_q]);
        pack_state<T>(s, a);
        refill(i, k, half);
        k.next();
    }
    if (!call.d_initial.data) return;
    const gdelta_state_view &view = call.d_initial;
    bool none = call.in.has_initial && !call.in.has_initial[n];
    with_dtype(view.dtype, [&](auto *type) {
        auto *to = static_cast<decltype(type)>(view.data) + n * view.slot + shared.head * view.head;
        for_state<PanelsK>(view, call.shape.dim_v, column,
                           [&](int i, int at) { from_float(none ? 0.0f : s[i], to + at); });
    });
}

// ---- The block ----

// A skipped sequence has zero gradients.
template <int Halves>
__device__ __forceinline__ void clear_d_initial(const gdelta_backward_call &call, int64_t n, int head,
                                                int first_panel) {
    const gdelta_state_view &view = call.d_initial;
    const gdelta_shape &shape = call.shape;
    if (!view.data) return;
    bool vk = view.order == GDELTA_STATE_VK;
    for (int i = threadIdx.x; i < shape.dim_k * 64 * Halves; i += blockDim.x) {
        int v = first_panel * 64 + i % (64 * Halves), k = i / (64 * Halves);
        int64_t at = vk ? static_cast<int64_t>(v) * shape.dim_k + k : static_cast<int64_t>(k) * shape.dim_v + v;
        store_element(view.data, view.dtype, n * view.slot + head * view.head + at, 0.0f);
    }
}

template <typename T, int PanelsK, int Halves, bool Reverse>
__device__ __forceinline__ void run_chain(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                          const gdelta_hopper_backward_maps &maps, unsigned char *shared_bytes) {
    using Shared = ChainShared<PanelsK, Halves, Reverse>;
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    const gdelta_shape &shape = call.shape;
    unsigned tiles = static_cast<unsigned>(shape.dim_v / (64 * Halves));
    int64_t n = block_sequence(shape, static_cast<int>(tiles));
    int head = static_cast<int>(blockIdx.x / 2 / tiles % static_cast<unsigned>(shape.heads_o));
    int first_panel = static_cast<int>(blockIdx.x / 2 % tiles) * Halves;
    if (threadIdx.x == 0) {
        bool reporter = !Reverse && head == 0 && first_panel == 0;
        shared.sequence = find_sequence(shape, call.in, gdelta_state_view{}, n, head, reporter);
        shared.head = head;
        shared.head_q = head_of(shape, head, shape.heads_q);
        shared.head_k = head_of(shape, head, shape.heads_k);
        shared.head_v = head_of(shape, head, shape.heads_v);
        shared.first_panel = first_panel;
        int rest = static_cast<int>(shared.sequence.length % kChunk);
        shared.tail = rest ? rest : kChunk;
        shared.number = chunk_number(shape, n, shared.sequence.begin, 0);
        auto init = [](auto &barriers, uint32_t count) {
            for (uint64_t &barrier : barriers) mbarrier_init(shared_address(&barrier), count);
        };
        init(shared.k_full, 1), init(shared.k_empty, kWarps * (1 + Halves));
        init(shared.q_full, 1), init(shared.q_empty, kWarps * Halves);
        for (auto &halves : shared.v_full) init(halves, 1);
        for (auto &halves : shared.v_empty) init(halves, kWarps);
        init(shared.t_full, 1), init(shared.r_full, 1), init(shared.r_empty, kWarps * (1 + Halves));
        init(shared.z_loaded, 1), init(shared.z_full, kWarps), init(shared.z_empty, kWarps * Halves);
        init(shared.x_full, kWarps), init(shared.x_empty, kWarps * Halves);
        init(shared.s_full, kWarps * Halves), init(shared.s_empty, 1);
        init(shared.w_full, kWarps * Halves), init(shared.w_empty, Reverse ? 1 : kWarps);
        fence_barrier_init();
    }
    __syncthreads();
    const Sequence &sequence = shared.sequence;
    if (sequence.skip) {
        if (Reverse) clear_d_initial<Halves>(call, n, head, first_panel);
        return;
    }
    int chunks = static_cast<int>((sequence.length + kChunk - 1) / kChunk);
    Chain<T, PanelsK, Halves, Reverse> chain = {call, work, maps, shared, chunks};
    if (threadIdx.x == 0) chain.load_first();
    if (Reverse && chunks > 0 && chain.ragged(0)) {
        mbarrier_wait(shared_address(&shared.k_full[0]), 0);
        mbarrier_wait(shared_address(&shared.q_full[0]), 0);
        clear_rows(shared_address(shared.k[0]), PanelsK, shared.tail, threadIdx.x, blockDim.x);
        clear_rows(chain.tile_q(0), PanelsK, shared.tail, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    // 512 threads have 128 registers each at launch: 512 = 80 + 96 + 2 * 168 = 72 + 40 + 2 * 200. 384 have 168, of
    // which the gradients need more: 504 = 144 + 120 + 240.
    constexpr int kHelper = Halves == 2 ? 80 : 144, kOutput = Halves == 2 ? (Reverse ? 40 : 96) : 120,
                  kChain = Halves == 2 ? (Reverse ? 192 : 168) : 240;
    int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);  // uniform, and known to be
    if (role == 0) {
        registers_decrease<kHelper>();
        chain.helper();
    } else if (role == 1) {
        registers_decrease<kOutput>();
        if (!Reverse) {
            chain.output();
        } else if (threadIdx.x % 128 == 0) {
            chain.copy();
        }
    } else {
        registers_increase<kChain>();
        if (Reverse) {
            chain.gradients(role - 2);
        } else {
            chain.states(role - 2);
        }
    }
}

template <typename T, int PanelsK, int Halves>
__global__ void __launch_bounds__(128 * (2 + Halves), 1)
    hopper_chains(const __grid_constant__ gdelta_backward_call call,
                  const __grid_constant__ gdelta_hopper_backward_work work,
                  const __grid_constant__ gdelta_hopper_backward_maps maps) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    if (is_malformed(work.chunk.malformed)) return;
    if (blockIdx.x % 2) {
        run_chain<T, PanelsK, Halves, true>(call, work, maps, shared_bytes);
    } else {
        run_chain<T, PanelsK, Halves, false>(call, work, maps, shared_bytes);
    }
}

template <typename T, int PanelsK, int Halves>
static cudaError_t launch_chains(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                 const gdelta_hopper_backward_maps &maps, gdelta_stream stream) {
    constexpr size_t kStates = sizeof(ChainShared<PanelsK, Halves, false>),
                     kGradients = sizeof(ChainShared<PanelsK, Halves, true>),
                     kBytes = kStates > kGradients ? kStates : kGradients;
    static_assert(kBytes <= 232448, "227 KB a block");
    const gdelta_shape &shape = call.shape;
    int64_t blocks = 2 * shape.sequences * shape.heads_o * (shape.dim_v / (64 * Halves));
    return launch(hopper_chains<T, PanelsK, Halves>, blocks, 128 * (2 + Halves), kBytes, stream, call, work, maps);
}

cudaError_t launch_hopper_chains(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                 const gdelta_hopper_backward_maps &maps, gdelta_stream stream) {
    return with_instance(call.shape, call.in, [&](auto *type, auto panels) {
        using T = std::remove_pointer_t<decltype(type)>;
        return call.shape.dim_v / 64 / work.chunk.choice.split_v == 2
                   ? launch_chains<T, panels, 2>(call, work, maps, stream)
                   : launch_chains<T, panels, 1>(call, work, maps, stream);
    });
}

}  // namespace gdelta
