// Hopper backward, second kernel, after prepare: the two recurrences along the chunks of a sequence, the states forward
// and their gradients in reverse. Neither needs the other, so both run in one launch, a block each.
//
//   States, S being the state before the chunk (X, R, Z and the row table: prepare.cu):
//     W = V - e r_k (K S),   S' = exp(G_last) S + X^T (beta W),   w = R W      [64, V]    beta w is what tokens write
//   Gradients, dS' being the gradient of the state after the chunk:
//     y = X dS' + Z^T dO                                                       [64, V]    the gradient of beta w
//     dS = exp(G_last) dS' + (scale e r_q Q)^T dO - (beta e r_k K)^T y
//
// S, w, dS' and y of every chunk go to the workspace, in 16 bits and in the order of shared memory, for gradients.cu.
// w and not beta w: the gradient of beta is <y, w>, and a quotient by beta would not do.
//
// Grid: x = (sequence, output head, segment, tile of 64 Halves columns of V, direction), the direction fastest. Block:
// warpgroups
//
//   loader        a thread a ring feeds the others
//   output        states: stores S, makes and stores w. gradients: one thread stores dS' and y
//   chain 0 ..    S^T or dS^T of 64 columns of V each, fp32 in registers
//
// as in scan.cu, whose chain this is. In reverse the first chunk is the ragged one: of its K and Q, which are summed
// over tokens there, `output` clears the rows of others before the chains read them.
//
// Segments as in scan.cu, in both directions. A chunk takes S to S' = A S + .. and dS' to dS = A^T dS' + .. with the
// same A = exp(G_last) - X^T (beta e r_k K): so a segment that takes S to M S + N takes the gradient of the state after
// it to M^T dS' + N'. `hopper_chain_summary` makes N, N' and M, the chains alone, 64 columns a block; hopper_merge
// (scan.cu) S_p+1 = M_p S_p + N_p and, from the last segment on, dS_p = M_p^T dS_p+1 + N'_p, in fp32. A direction's
// turn is the number of a segment in its order, the last segment's is 0 in reverse.
//
// Shared memory at K = V = 128 with two halves, KB, states / gradients: K 32 / 32, Q - / 32, V or dO 32 / 32, X 32 /
// 32, R or Z 16 / 16, S or dS' 32 / 32, W or y 16 / 16, w 16 / -.
//
// Precision: states, sums, row table in fp32; all operands rounded once to T. fp16 keeps S, W, w and dS' 16 times
// smaller, X 16 times larger (Range in chunk.cuh); y, R and Z are what they are.
#include "kernels/hopper/backward.cuh"
#include "kernels/hopper/launch.cuh"
#include "kernels/ptx/bulk.cuh"

namespace gdelta {

// What leaves.
template <int PanelsK, int Halves, bool Summary>
struct __align__(1024) ChainOutput {
    unsigned char s[Halves][PanelsK * kPanelBytes];  // rows of V, 64 of K a panel
    unsigned char w[Halves * kPanelBytes];           // W: rows of V. y: rows are tokens
};
template <int PanelsK, int Halves>
struct ChainOutput<PanelsK, Halves, true> {};

// Rings of two places. What is read at the same time comes together.
template <int PanelsK, int Halves, bool Reverse, bool Summary>
struct __align__(1024) ChainShared {
    // Two blocks a multiprocessor make summaries: there Z, free half a step before it is needed, and K, needed half a
    // step after it is free, have one place.
    static constexpr int kPlaces = Reverse && Summary ? 1 : 2;

    unsigned char k[kPlaces][PanelsK * kPanelBytes];
    unsigned char v[2][Halves * kPanelBytes];  // V, or dO
    unsigned char x[2][PanelsK * kPanelBytes];
    unsigned char z[kPlaces][kPanelBytes];                                // R, or Z
    unsigned char extra[(Reverse ? 2 * PanelsK : Halves) * kPanelBytes];  // Q's ring; or w on its way out
    ChainOutput<PanelsK, Halves, Summary> out;
    __align__(16) float rows[2][kHopperRowFloats];
    // States: K, V, rows; X; R. Gradients: dO, rows; X, Z; K, Q. With one place for K it has its own.
    uint64_t first_full[2], first_empty[2], second_full[2], second_empty[2], third_full[2], third_empty[2], k_full[1];
    uint64_t s_full[1], s_empty[1], w_full[1], w_empty[1], cleared[1];
    Sequence sequence;
    int64_t n;
    int head, head_q, head_k, head_v, first_panel;  // first_panel: of V, or of the identity's columns (Summary)
    int turn, first_chunk;                          // of the segment
    int64_t number;                                 // of its first chunk
    int tail;                                       // rows of the sequence's last chunk
};

// What every role of a block knows. `i` counts steps, chunk_of(i) is the segment's chunk; rings turn with the steps.
template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
struct Chain {
    using Shared = ChainShared<PanelsK, Halves, Reverse, Summary>;
    const gdelta_backward_call &call;
    const gdelta_hopper_backward_work &work;
    const gdelta_hopper_backward_maps &maps;
    Shared &shared;
    int chunks;
    bool last;       // the segment ends the sequence
    bool has_value;  // columns of V, not of the identity

    __device__ __forceinline__ int chunk_of(int i) const {
        return Reverse ? chunks - 1 - i : i;
    }
    // Rows of others follow those of the sequence in the chunk. (In other layouts the copy engine brings zeros.)
    __device__ __forceinline__ bool ragged(int i) const {
        return last && chunk_of(i) + 1 == chunks && shared.tail < kChunk && call.shape.packed;
    }
    __device__ __forceinline__ int64_t chunk_head(int i) const {
        return (shared.number + chunk_of(i)) * call.shape.heads_o + shared.head;
    }
    __device__ __forceinline__ void load_panels(const gdelta_tensor_map &map, void *to, uint64_t &barrier, int i,
                                                int of_head, int first, int count) const {
        int token = static_cast<int>(shared.sequence.begin) + (shared.first_chunk + chunk_of(i)) * kChunk;
        for (int panel = 0; panel < count; ++panel) {
            bulk_load_tensor(shared_address(to) + panel * kPanelBytes, &map, shared_address(&barrier), token, of_head,
                             static_cast<int>(shared.sequence.batch), first + panel);
        }
    }
    static __device__ __forceinline__ void load_tile(void *to, const void *from, int64_t at, uint32_t bytes,
                                                     uint64_t &barrier) {
        bulk_load(shared_address(to), static_cast<const char *>(from) + at * bytes, bytes, shared_address(&barrier));
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
    __device__ __forceinline__ void store_states(void *states, int i) const {
        for (int half = 0; half < Halves; ++half) {
            bulk_store(state_out(states, i, half), shared_address(shared.out.s[half]), PanelsK * kPanelBytes);
        }
        bulk_commit();
    }

    __device__ __forceinline__ void loader() const;
    __device__ __forceinline__ void output() const;
    __device__ __forceinline__ void clear_others() const;
    __device__ __forceinline__ void copy() const;
    __device__ __forceinline__ float *summary(bool of_value, bool reverse, int turn) const;
    __device__ __forceinline__ void load_state(float (&s)[32 * PanelsK], int column) const;
    __device__ __forceinline__ void store_summary(const float (&s)[32 * PanelsK], int column) const;
    __device__ __forceinline__ void states(int half) const;
    __device__ __forceinline__ void gradients(int half) const;
};

// ---- Loader: a thread a ring ----

template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::loader() const {
    constexpr uint32_t kTileK = PanelsK * kPanelBytes, kTileV = Halves * kPanelBytes;
    bool has_v = Reverse ? call.d_o.data != nullptr : has_value;
    auto load_k = [&](int slot, uint64_t &barrier, int i) {
        load_panels(maps.k, shared.k[slot], barrier, i, shared.head_k, 0, PanelsK);
    };
    // The step before this one has read: what has one place is free, two steps before is feed's.
    auto wait_before = [&](uint64_t(&empty)[2], int i) {
        if (i > 0) wait(empty[ring_slot<2>(i - 1)], ring_parity<2>(i - 1));
    };
    if (threadIdx.x == 0) {
        uint32_t bytes = sizeof shared.rows[0] + (has_v ? kTileV : 0) + (Reverse ? 0 : kTileK);
        feed(chunks, shared.first_full, shared.first_empty, bytes, [&](int slot, uint64_t &barrier, int i) {
            if (!Reverse) load_k(slot, barrier, i);
            if (has_v) {
                load_panels(Reverse ? maps.d_o : maps.v, shared.v[slot], barrier, i,
                            Reverse ? shared.head : shared.head_v, shared.first_panel, Halves);
            }
            load_tile(shared.rows[slot], work.chunk.rows, chunk_head(i), sizeof shared.rows[0], barrier);
        });
    } else if (threadIdx.x == 32) {
        uint32_t bytes = kTileK + (Reverse ? kPanelBytes : 0);
        feed(chunks, shared.second_full, shared.second_empty, bytes, [&](int slot, uint64_t &barrier, int i) {
            load_tile(shared.x[slot], work.chunk.x, chunk_head(i), kTileK, barrier);
            if (!Reverse) return;
            if (Summary) wait_before(shared.second_empty, i);
            load_tile(shared.z[ring_slot<Shared::kPlaces>(i)], work.chunk.z, chunk_head(i), kPanelBytes, barrier);
        });
    } else if (threadIdx.x == 64 && !(Summary && !Reverse)) {
        uint32_t bytes = !Reverse ? kPanelBytes : Summary ? kTileK : 2 * kTileK;
        feed(chunks, shared.third_full, shared.third_empty, bytes, [&](int slot, uint64_t &barrier, int i) {
            if (Reverse) {
                load_panels(maps.q, shared.extra + slot * kTileK, barrier, i, shared.head_q, 0, PanelsK);
                if (!Summary) return load_k(slot, barrier, i);
                wait_before(shared.third_empty, i);
                mbarrier_arrive_expect(shared_address(&shared.k_full[0]), kTileK);
                load_k(0, shared.k_full[0], i);
            } else {
                load_tile(shared.z[slot], work.chunk.r, chunk_head(i), kPanelBytes, barrier);
            }
        });
    }
}

// ---- Output ----

// The states' direction: S as it is, w = R W.
template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::output() const {
    enum { kBarrier = 1 };
    const Lane p = lane_of_warpgroup();
    bool leader = threadIdx.x % 128 == 0;
    uint32_t tile_o = shared_address(shared.extra), tile_w = shared_address(shared.out.w);
    for (int i = 0; i < chunks; ++i) {
        int slot = ring_slot<2>(i);
        uint32_t tile_r = shared_address(shared.z[slot]);
        if (leader) {
            acquire(shared.s_full[0], i & 1);
            store_states(work.s, i);
        }
        __syncwarp();
        float o[32 * Halves];
        wait(shared.third_full[slot], ring_parity<2>(i));
        acquire(shared.w_full[0], i & 1);
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorK, kMajorK>(o, panel_k_major(tile_r) + step * kStepK, panel_k_major(tile_w) + step * kStepK,
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
        release(shared.third_empty[slot]);
        named_barrier(kBarrier, 128);
#pragma unroll
        for (int b = 0; b < 4 * Halves; ++b) {
            const float *x = &o[8 * b];
            stmatrix_x4(block_at(tile_o + b / 4 * kPanelBytes, p, b % 4), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                        pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
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

// The gradients' direction: K and Q of the ragged chunk lose the rows of others. A warpgroup calls it.
template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::clear_others() const {
    wait(shared.third_full[0], 0);
    if (Summary) wait(shared.k_full[0], 0);
    clear_rows(shared_address(shared.k[0]), PanelsK, shared.tail, threadIdx.x % 128, 128);
    clear_rows(tile_q(0), PanelsK, shared.tail, threadIdx.x % 128, 128);
}

// Then one thread stores dS' and y as they are.
template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::copy() const {
    if (chunks > 0 && ragged(0)) {
        clear_others();
        release(shared.cleared[0]);
    }
    if (threadIdx.x % 128) return;
    for (int i = 0; i < chunks; ++i) {
        acquire(shared.s_full[0], i & 1);
        store_states(work.ds, i);
        acquire(shared.w_full[0], i & 1);
        bulk_store(values_out(work.y, i, 0), shared_address(shared.out.w), Halves * kPanelBytes);
        bulk_commit();
        bulk_wait_read<1>();
        mbarrier_arrive(shared_address(&shared.s_empty[0]));
        bulk_wait_read<0>();
        mbarrier_arrive(shared_address(&shared.w_empty[0]));
    }
    bulk_wait<0>();
}

// ---- Chains ----

// Where a direction's N is, [V, K], or its M, [K, K]: as it is for the gradients, transposed for the states.
template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ float *Chain<T, PanelsK, Halves, Reverse, Summary>::summary(bool of_value, bool reverse,
                                                                                       int turn) const {
    const gdelta_shape &shape = call.shape;
    int64_t job = (shared.n + (reverse ? shape.sequences : 0)) * shape.heads_o + shared.head;
    int64_t at = job * (work.chunk.choice.segments - 1) + turn;
    return of_value ? work.chunk.n + at * shape.dim_v * shape.dim_k : work.chunk.m + at * shape.dim_k * shape.dim_k;
}

// Where the block's columns start. Not from merge's states where no chunk comes before, as in an empty sequence: M S +
// N is no copy (-0, infinities).
template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::load_state(float (&s)[32 * PanelsK],
                                                                                        int column) const {
    gdelta_state_view view = Reverse ? call.d_final : call.in.initial;
    int64_t offset = shared.sequence.initial;
    if (Reverse) offset = view.data ? shared.n * view.slot + shared.head * view.head : -1;
    if (Summary ? shared.turn > 0 : Reverse ? !last : shared.first_chunk > 0) {
        offset = Summary ? -1 : 0;
        view.order = GDELTA_STATE_VK;
        view.dtype = GDELTA_DTYPE_FP32;
        if (!Summary) view.data = summary(true, Reverse, shared.turn - 1);
    }
    load_columns<PanelsK>(view, offset, !has_value, call.shape.dim_v, column, [&](int i, float x) { s[i] = x; });
}

template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::store_summary(
    const float (&s)[32 * PanelsK], int column) const {
    gdelta_state_view view = {};
    auto store = [&](float *to, gdelta_state_order order) {
        view.order = order;
        for_state<PanelsK>(view, call.shape.dim_k, column, [&](int i, int at) { to[at] = s[i]; });
    };
    store(summary(has_value, Reverse, shared.turn), GDELTA_STATE_VK);
    if (!has_value) store(summary(false, true, work.chunk.choice.segments - 1 - shared.turn), GDELTA_STATE_KV);
}

template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::states(int half) const {
    float s[32 * PanelsK];
    uint32_t a[16 * PanelsK];
    int column = (shared.first_panel + half) * 64;
    load_state(s, column);
    pack_state<T>(s, a);

    for (int i = 0; i < chunks; ++i) {
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
        int slot = ring_slot<2>(i);
        uint32_t tile_k = shared_address(shared.k[slot]), tile_x = shared_address(shared.x[slot]),
                 tile_v = shared_address(shared.v[slot]) + half * kPanelBytes;
        const float *table = shared.rows[slot];

        // U^T = S^T K^T. In its shadow: S for `output`, its decay, V.
        float u[32];
        wait(shared.first_full[slot], ring_parity<2>(i));
        wgmma_hold(u);
        wgmma_hold(a);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            wgmma<T, kMajorK>(u, a + 4 * step, panel_k_major(tile_k + step / 4 * kPanelBytes) + step % 4 * kStepK,
                              step > 0);
        }
        wgmma_commit();
        if constexpr (!Summary) {
            wait(shared.s_empty[0], i & 1 ^ 1);
            put_blocks(shared_address(shared.out.s[half]), p, a);
            release(shared.s_full[0]);
        }
        float decay = table[kRowDecay];
#pragma unroll
        for (int e = 0; e < 32 * PanelsK; ++e) s[e] *= decay;
        uint32_t w[16], beta_w[16];
        get_blocks_trans(tile_v, p, w);
        wgmma_wait<0>();
        wgmma_hold(u);

        // W = V - e r_k U; columns of tokens past the end are 0 whatever V and K held there.
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + 8 * j + p.column]);
            float2 norm = *reinterpret_cast<const float2 *>(&table[kRowNorm + 8 * j + p.column]);
            float2 beta = beta_pair<T>(table, 8 * j + p.column);
            norm.x *= exp2_fast(log.x), norm.y *= exp2_fast(log.y);
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                float2 v = unpack<T>(w[2 * j + lower]);
                float x = fmaf(-norm.x, u[4 * j + 2 * lower], Range<T>::kDown * v.x),
                      y = fmaf(-norm.y, u[4 * j + 2 * lower + 1], Range<T>::kDown * v.y);
                w[2 * j + lower] = pack<T>(x, y);
                beta_w[2 * j + lower] = pack<T>(beta.x * x, beta.y * y);
            }
        }
        release(shared.first_empty[slot]);
        if (ragged(i)) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                mask_tokens(reinterpret_cast<uint32_t(&)[4]>(w[4 * b]), 16 * b + p.column, shared.tail);
                mask_tokens(reinterpret_cast<uint32_t(&)[4]>(beta_w[4 * b]), 16 * b + p.column, shared.tail);
            }
        }

        // S' = decay S + X^T (beta W). In its shadow: W for `output`.
        wait(shared.second_full[slot], ring_parity<2>(i));
        wgmma_hold(s);
        wgmma_hold(beta_w);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, beta_w + 4 * step, panel_mn_major(tile_x) + step * kStepMN, true);
        }
        wgmma_commit();
        if constexpr (!Summary) {
            wait(shared.w_empty[0], i & 1 ^ 1);
            put_blocks(shared_address(shared.out.w) + half * kPanelBytes, p, w);
            release(shared.w_full[0]);
        }
        wgmma_wait<0>();
        wgmma_hold(s);
        release(shared.second_empty[slot]);
        pack_state<T>(s, a);
    }
    if constexpr (Summary) store_summary(s, column);
}

template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void Chain<T, PanelsK, Halves, Reverse, Summary>::gradients(int half) const {
    const Lane p = lane_of_warpgroup();
    int column = (shared.first_panel + half) * 64;
    float s[32 * PanelsK];
    uint32_t a[16 * PanelsK], d[16] = {};
    load_state(s, column);
    pack_state<T>(s, a);

    if (chunks > 0 && ragged(0)) {
        if constexpr (Summary) {
            clear_others();
            named_barrier(1, 128);
        } else {
            wait(shared.cleared[0], 0);
        }
    }
    for (int i = 0; i < chunks; ++i) {
        int slot = ring_slot<2>(i), place = ring_slot<Shared::kPlaces>(i);
        uint32_t panel_z = shared_address(shared.z[place]), panel_x = shared_address(shared.x[slot]);
        uint32_t panel_v = shared_address(shared.v[slot]) + half * kPanelBytes;
        const float *table = shared.rows[slot];

        wait(shared.first_full[slot], ring_parity<2>(i));
        if (call.d_o.data) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                uint32_t(&f)[4] = reinterpret_cast<uint32_t(&)[4]>(d[4 * b]);
                ldmatrix_x4_trans(block_at_trans(panel_v, p, b), f);
                if (ragged(i)) mask_tokens(f, 16 * b + p.column, shared.tail);
            }
        }

        // y^T = dO^T Z + dS'^T X^T. In its shadow: dS' for `copy`, its decay, and the part of dS that comes from dO.
        float y[32];
        wait(shared.second_full[slot], ring_parity<2>(i));
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
        if constexpr (!Summary) {
            wait(shared.s_empty[0], i & 1 ^ 1);
            put_blocks(shared_address(shared.out.s[half]), p, a);
            release(shared.s_full[0]);
        }
        float decay = table[kRowDecay];
        wgmma_wait<1>();  // nothing to wait for; or ptxas waits for y before dS is scaled (C7517)
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
        wait(shared.third_full[slot], ring_parity<2>(i));
        wgmma_hold(s);
        wgmma_hold(scaled);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, scaled + 4 * step, panel_mn_major(tile_q(slot)) + step * kStepMN, true);
        }
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(y);
        release(shared.second_empty[slot]);

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
        release(shared.first_empty[slot]);
        uint32_t tile_k = shared_address(shared.k[place]);
        if constexpr (Summary) wait(shared.k_full[0], i & 1);
        wgmma_hold(dw);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, dw + 4 * step, panel_mn_major(tile_k) + step * kStepMN, true);
        }
        wgmma_commit();
        if constexpr (!Summary) {
            uint32_t tile_y = shared_address(shared.out.w) + half * kPanelBytes;
            wait(shared.w_empty[0], i & 1 ^ 1);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                stmatrix_x4_trans(block_at_trans(tile_y, p, b), y_out[4 * b], y_out[4 * b + 1], y_out[4 * b + 2],
                                  y_out[4 * b + 3]);
            }
            release(shared.w_full[0]);
        }
        wgmma_wait<0>();
        wgmma_hold(s);
        release(shared.third_empty[slot]);
        pack_state<T>(s, a);
    }
    if constexpr (Summary) return store_summary(s, column);
    if (!call.d_initial.data || shared.turn + 1 < work.chunk.choice.segments) return;
    const gdelta_state_view &view = call.d_initial;
    bool none = call.in.has_initial && !call.in.has_initial[shared.n];
    store_columns<PanelsK>(view, shared.n * view.slot + shared.head * view.head, call.shape.dim_v, column,
                           [&](int i) { return none ? 0.0f : s[i]; });
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

// Which part of a direction a block has.
struct ChainPart {
    unsigned job;           // sequence and output head
    int turn, first_panel;  // first_panel: of V, or of the identity's columns
};

__device__ __forceinline__ ChainPart find_part(unsigned block, int turns, int tiles, int tile_panels) {
    unsigned piece = block / static_cast<unsigned>(tiles);
    return {piece / static_cast<unsigned>(turns), static_cast<int>(piece % static_cast<unsigned>(turns)),
            static_cast<int>(block % static_cast<unsigned>(tiles)) * tile_panels};
}

template <typename T, int PanelsK, int Halves, bool Reverse, bool Summary>
__device__ __forceinline__ void run_chain(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                          const gdelta_hopper_backward_maps &maps, const ChainPart &part,
                                          bool has_value) {
    using Shared = ChainShared<PanelsK, Halves, Reverse, Summary>;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    const gdelta_shape &shape = call.shape;
    int segments = work.chunk.choice.segments, segment = Reverse ? segments - 1 - part.turn : part.turn;
    int head = static_cast<int>(part.job % static_cast<unsigned>(shape.heads_o));
    int64_t n = part.job / static_cast<unsigned>(shape.heads_o);
    if (threadIdx.x == 0) {
        bool reporter = !Reverse && !Summary && head == 0 && part.turn == 0 && part.first_panel == 0;
        shared.sequence = find_sequence(shape, call.in, gdelta_state_view{}, n, head, reporter);
        shared.n = n;
        shared.head = head;
        shared.head_q = head_of(shape, head, shape.heads_q);
        shared.head_k = head_of(shape, head, shape.heads_k);
        shared.head_v = head_of(shape, head, shape.heads_v);
        shared.first_panel = part.first_panel;
        shared.turn = part.turn;
        int64_t length = shared.sequence.length;
        int rest = static_cast<int>(length % kChunk);
        shared.tail = rest ? rest : kChunk;
        shared.first_chunk = static_cast<int>((length + kChunk - 1) / kChunk * segment / segments);
        shared.number = chunk_number(shape, n, shared.sequence.begin, shared.first_chunk);
        auto init = [](auto &barriers, uint32_t count) {
            for (uint64_t &barrier : barriers) mbarrier_init(shared_address(&barrier), count);
        };
        init(shared.first_full, 1), init(shared.first_empty, kWarpgroup * Halves);
        init(shared.second_full, 1), init(shared.second_empty, kWarpgroup * Halves);
        init(shared.third_full, 1), init(shared.third_empty, Reverse ? kWarpgroup * Halves : kWarpgroup);
        init(shared.k_full, 1);
        init(shared.s_full, kWarpgroup * Halves), init(shared.s_empty, 1);
        init(shared.w_full, kWarpgroup * Halves), init(shared.w_empty, Reverse ? 1 : kWarpgroup);
        init(shared.cleared, kWarpgroup);
        fence_barrier_init();
    }
    if (!has_value) clear_rows(shared_address(shared.v[0]), 2, 0, threadIdx.x, blockDim.x);
    __syncthreads();
    const Sequence &sequence = shared.sequence;
    if (sequence.skip) {
        if (Reverse && !Summary && segment == 0) clear_d_initial<Halves>(call, n, head, part.first_panel);
        return;
    }
    int64_t all = (sequence.length + kChunk - 1) / kChunk;
    int end = static_cast<int>(all * (segment + 1) / segments);
    Chain<T, PanelsK, Halves, Reverse, Summary> chain = {call,       work,     maps, shared, end - shared.first_chunk,
                                                         end == all, has_value};
    // 512 threads have 128 registers each at launch, 384 have 168, two blocks of 256 have 128.
    constexpr int kLoader = 40,
                  kOutput = Halves == 1 ? 120
                            : Reverse   ? 40
                                        : 96,
                  kChain = Summary       ? 216
                           : Halves == 1 ? 240
                           : Reverse     ? 208
                                         : 184;
    int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);  // uniform, and known to be
    if (role == 0) {
        registers_decrease<kLoader>();
        chain.loader();
        return;
    }
    if constexpr (!Summary) {
        if (role == 1) {
            registers_decrease<kOutput>();
            if constexpr (Reverse) {
                chain.copy();
            } else {
                chain.output();
            }
            return;
        }
    }
    registers_increase<kChain>();
    if constexpr (Reverse) {
        chain.gradients(role - (Summary ? 1 : 2));
    } else {
        chain.states(role - (Summary ? 1 : 2));
    }
}

template <typename T, int PanelsK, int Halves>
__global__ void __launch_bounds__(128 * (2 + Halves), 1)
    hopper_chains(const __grid_constant__ gdelta_backward_call call,
                  const __grid_constant__ gdelta_hopper_backward_work work,
                  const __grid_constant__ gdelta_hopper_backward_maps maps) {
    if (is_malformed(work.chunk.malformed)) return;
    ChainPart part = find_part(blockIdx.x / 2, work.chunk.choice.segments, call.shape.dim_v / (64 * Halves), Halves);
    if (blockIdx.x % 2) {
        run_chain<T, PanelsK, Halves, true, false>(call, work, maps, part, true);
    } else {
        run_chain<T, PanelsK, Halves, false, false>(call, work, maps, part, true);
    }
}

// ---- Segments ----

// Blocks of N, and as many of N'; then of M, which neither the first segment needs nor the last.
__host__ __device__ inline int64_t value_blocks(const gdelta_shape &shape, const gdelta_hopper_choice &choice) {
    return shape.sequences * shape.heads_o * (choice.segments - 1) * (shape.dim_v / 64);
}
__host__ __device__ inline int64_t key_blocks(const gdelta_shape &shape, const gdelta_hopper_choice &choice) {
    return shape.sequences * shape.heads_o * (choice.segments - 2) * (shape.dim_k / 64);
}

// Grid: x = (N' or N or M, sequence, output head, segment, tile of 64 columns of V or of the identity), the first
// slowest: so those of N', which take longest, share their multiprocessors with the others.
template <typename T, int PanelsK>
__global__ void __launch_bounds__(256, 2)
    hopper_chain_summary(const __grid_constant__ gdelta_backward_call call,
                         const __grid_constant__ gdelta_hopper_backward_work work,
                         const __grid_constant__ gdelta_hopper_backward_maps maps) {
    if (is_malformed(work.chunk.malformed)) return;
    int turns = work.chunk.choice.segments - 1, tiles = call.shape.dim_v / 64;
    unsigned values = static_cast<unsigned>(value_blocks(call.shape, work.chunk.choice)), block = blockIdx.x;
    if (block < values) {
        return run_chain<T, PanelsK, 1, true, true>(call, work, maps, find_part(block, turns, tiles, 1), true);
    }
    block -= values;
    bool has_value = block < values;
    ChainPart part = has_value ? find_part(block, turns, tiles, 1) : find_part(block - values, turns - 1, PanelsK, 1);
    if (!has_value) ++part.turn;
    run_chain<T, PanelsK, 1, false, true>(call, work, maps, part, has_value);
}

// ---- Launch ----

template <typename T, int PanelsK>
static cudaError_t launch_summaries(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                    const gdelta_hopper_backward_maps &maps, gdelta_stream stream) {
    constexpr size_t kStates = sizeof(ChainShared<PanelsK, 1, false, true>),
                     kGradients = sizeof(ChainShared<PanelsK, 1, true, true>),
                     kBytes = kStates > kGradients ? kStates : kGradients;
    static_assert(kBytes <= 228 * 1024 / 2 - 1024, "two blocks a multiprocessor");
    const gdelta_hopper_choice &choice = work.chunk.choice;
    int64_t blocks = 2 * value_blocks(call.shape, choice) + key_blocks(call.shape, choice);
    cudaError_t error = launch(hopper_chain_summary<T, PanelsK>, blocks, 256, kBytes, stream, call, work, maps);
    if (error != cudaSuccess) return error;
    return launch_hopper_merge(false, call.shape, work.chunk, 2 * call.shape.sequences * call.shape.heads_o, stream);
}

template <typename T, int PanelsK, int Halves>
static cudaError_t launch_chains(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                 const gdelta_hopper_backward_maps &maps, gdelta_stream stream) {
    constexpr size_t kStates = sizeof(ChainShared<PanelsK, Halves, false, false>),
                     kGradients = sizeof(ChainShared<PanelsK, Halves, true, false>),
                     kBytes = kStates > kGradients ? kStates : kGradients;
    static_assert(kBytes <= 232448, "227 KB a block");
    const gdelta_shape &shape = call.shape;
    int64_t jobs = shape.sequences * shape.heads_o * work.chunk.choice.segments;
    int64_t blocks = 2 * jobs * (shape.dim_v / (64 * Halves));
    return launch(hopper_chains<T, PanelsK, Halves>, blocks, 128 * (2 + Halves), kBytes, stream, call, work, maps);
}

cudaError_t launch_hopper_chains(const gdelta_backward_call &call, const gdelta_hopper_backward_work &work,
                                 const gdelta_hopper_backward_maps &maps, gdelta_stream stream) {
    return with_instance(call.shape, call.in, [&](auto *type, auto panels) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (work.chunk.choice.segments > 1) {
            cudaError_t error = launch_summaries<T, panels>(call, work, maps, stream);
            if (error != cudaSuccess) return error;
        }
        return call.shape.dim_v / 64 / work.chunk.choice.split_v == 2
                   ? launch_chains<T, panels, 2>(call, work, maps, stream)
                   : launch_chains<T, panels, 1>(call, work, maps, stream);
    });
}

}  // namespace gdelta
