// Hopper forward, second kernel: along the chunks of a sequence, from the tiles that prepare left.
//
//   X_j = exp(G_last - G_j) (t^T r_k K)_j              [64, K]     t, p and the row table: prepare.cu
//   Z_ij = exp(G_i - G_j) (p t)_ij,  j <= i            [64, 64]
//   W = beta (V - e r_k (K S))                         [64, V]
//   S' = exp(G_last) S + X^T W,   O = scale e r_q (Q S) + Z W
//
// S to S' is two dependent products, K S and X^T W; all else is done by others beside that chain.
//
// Grid: x = (sequence, output head, tile of 64 Halves columns of V), the tile fastest. Block: warpgroups
//
//   X, Z helper   K t p --> X, Z; two warpgroups if there is one half, so that both are off the chain's path
//   output        Q S, Z W --> O
//   chain 0 ..    S^T of 64 columns of V each, fp32 in registers: K S, W, S'; hands bf16 S and W to `output`
//
//   copy engine: K, t, p, rows --> helper --X--> chains --S, W--> output --O--> copy engine
//                                         --Z-------------------> output
//
// The chain holds S transposed, [V, K], so that S and W are operands from registers: W^T = D fragments of (K S)^T. Each
// ring of shared memory is refilled by a thread of the last warpgroup that reads it. A full barrier counts bytes or
// four warps of the writer, an empty barrier the warps of all readers.
//
// Precision: S, sums, row table in fp32; S, W, X, Z rounded once to T as operands (Range in chunk.cuh keeps fp16
// finite).
#include "kernels/hopper/chunk.cuh"
#include "kernels/ptx/bulk.cuh"

namespace gdelta {

constexpr int kWarps = 4;  // of a warpgroup

template <int PanelsK, int Halves>
struct __align__(1024) ScanShared {
    static constexpr int kStagesK = 3, kStagesV = 2, kStagesQ = 2, kStagesT = 2, kStagesZ = 2;
    // One each is all that fits for two halves of V; X waits in registers of the helper until its place is free.
    static constexpr int kStagesX = Halves == 2 ? 1 : 2, kStagesS = Halves == 2 ? 1 : 2, kStagesW = kStagesS;
    static constexpr int kStagesR = 2;

    unsigned char k[kStagesK][PanelsK * kPanelBytes];
    unsigned char q[kStagesQ][PanelsK * kPanelBytes];
    unsigned char v[kStagesV][Halves * kPanelBytes];
    unsigned char t[kStagesT][kPanelBytes];
    unsigned char z[kStagesZ][kPanelBytes];  // p, then Z in its place
    unsigned char x[kStagesX][PanelsK * kPanelBytes];
    unsigned char s[kStagesS][PanelsK][Halves * kPanelBytes];  // rows of V, 64 of K a panel
    unsigned char w[kStagesW][Halves * kPanelBytes];           // rows of V, 64 tokens
    unsigned char o[Halves * kPanelBytes];
    float rows[kStagesR][kHopperRowFloats];
    uint64_t k_full[kStagesK], k_empty[kStagesK], q_full[kStagesQ], v_full[kStagesV][Halves], v_empty[kStagesV][Halves];
    uint64_t t_full[kStagesT], t_empty[kStagesT], r_full[kStagesR], r_empty[kStagesR], p_full[kStagesZ],
        z_full[kStagesZ];
    uint64_t x_full[kStagesX], x_empty[kStagesX], s_full[kStagesS], s_empty[kStagesS], w_full[kStagesW],
        w_empty[kStagesW];
    Sequence sequence;
    int head, head_q, head_k, head_v, first_panel;  // first_panel: of V
    int64_t number;                                 // of the first chunk
    int tail;                                       // rows of the last chunk
};

// Where chunk c is in a ring: its slot, and the parity of the slot's phase. Rings of two powers follow from c alone,
// which saves their registers; the ring of K keeps a position.
template <int Stages>
__device__ __forceinline__ int slot_of(int c) {
    static_assert((Stages & (Stages - 1)) == 0, "");
    return c % Stages;
}
template <int Stages>
__device__ __forceinline__ uint32_t parity_of(int c) {
    return c / Stages & 1;
}

template <int Stages>
struct Position {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == Stages) slot = 0, parity ^= 1;
    }
};

// Elements of a transposed block whose token is not below `count` become 0, be they NaN. `token`: of the lane's first.
__device__ __forceinline__ void mask_tokens(uint32_t (&f)[4], int token, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = token + i / 2 * 8;
        f[i] &= (at < count ? 0xffffu : 0u) | (at + 1 < count ? 0xffff0000u : 0u);
    }
}

// What every role of a block knows.
template <typename T, int PanelsK, int Halves>
struct Scan {
    using Shared = ScanShared<PanelsK, Halves>;
    const gdelta_forward_call &call;
    const gdelta_hopper_work &work;
    const gdelta_hopper_maps &maps;
    Shared &shared;
    int chunks;

    __device__ __forceinline__ int token(int c) const {
        return static_cast<int>(shared.sequence.begin) + c * kChunk;
    }
    // Rows of others follow those of the sequence in chunk c. (In other layouts the copy engine brings zeros.)
    __device__ __forceinline__ bool ragged(int c) const {
        return c + 1 == chunks && shared.tail < kChunk && call.shape.packed;
    }
    // One thread. The slot must be free.
    __device__ __forceinline__ void load_k(int c, int slot) const {
        uint32_t barrier = shared_address(&shared.k_full[slot]);
        mbarrier_arrive_expect(barrier, PanelsK * kPanelBytes);
        load_panels(maps.k, shared_address(shared.k[slot]), barrier, c, shared.head_k, 0, PanelsK);
    }
    __device__ __forceinline__ void load_q(int c, int slot) const {
        uint32_t barrier = shared_address(&shared.q_full[slot]);
        mbarrier_arrive_expect(barrier, PanelsK * kPanelBytes);
        load_panels(maps.q, shared_address(shared.q[slot]), barrier, c, shared.head_q, 0, PanelsK);
    }
    __device__ __forceinline__ void load_v(int c, int slot, int half) const {
        uint32_t barrier = shared_address(&shared.v_full[slot][half]);
        mbarrier_arrive_expect(barrier, kPanelBytes);
        load_panels(maps.v, shared_address(shared.v[slot]) + half * kPanelBytes, barrier, c, shared.head_v,
                    shared.first_panel + half, 1);
    }
    __device__ __forceinline__ void load_t(int c, int slot) const {
        uint32_t barrier = shared_address(&shared.t_full[slot]);
        mbarrier_arrive_expect(barrier, kPanelBytes);
        bulk_load(shared_address(shared.t[slot]), static_cast<const char *>(work.t) + chunk_head(c) * kHopperTileBytes,
                  kPanelBytes, barrier);
    }
    __device__ __forceinline__ void load_rows(int c, int slot) const {
        uint32_t barrier = shared_address(&shared.r_full[slot]);
        mbarrier_arrive_expect(barrier, sizeof shared.rows[0]);
        bulk_load(shared_address(shared.rows[slot]), work.rows + chunk_head(c) * kHopperRowFloats,
                  sizeof shared.rows[0], barrier);
    }
    __device__ __forceinline__ int64_t chunk_head(int c) const {
        return (shared.number + c) * call.shape.heads_o + shared.head;
    }
    __device__ __forceinline__ void load_p(int c, int slot) const {
        uint32_t barrier = shared_address(&shared.p_full[slot]);
        int64_t at = (shared.number + c) * call.shape.heads_q + shared.head_q;
        mbarrier_arrive_expect(barrier, kPanelBytes);
        bulk_load(shared_address(shared.z[slot]), static_cast<const char *>(work.p) + at * kHopperTileBytes,
                  kPanelBytes, barrier);
    }
    __device__ __forceinline__ void load_panels(const gdelta_tensor_map &map, uint32_t to, uint32_t barrier, int c,
                                                int of_head, int first, int count) const {
        for (int i = 0; i < count; ++i) {
            bulk_load_tensor(to + i * kPanelBytes, &map, barrier, token(c), of_head,
                             static_cast<int>(shared.sequence.batch), first + i);
        }
    }

    // What this warp wrote to shared memory is ready for tensor cores and bulk copies; `barrier` counts warps.
    static __device__ __forceinline__ void publish(uint64_t &barrier) {
        fence_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
    }
    // This warp has read, and what it read may be overwritten.
    static __device__ __forceinline__ void release(uint64_t &barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
    }
    // Waits for what another warpgroup wrote, and readies it for this one's tensor cores: the fence of `publish` on the
    // reader's side, for a writer that has no time for it.
    static __device__ __forceinline__ void acquire(uint64_t &barrier, uint32_t parity) {
        wait(barrier, parity);
        fence_async_shared();
    }
    static __device__ __forceinline__ void wait(uint64_t &barrier, uint32_t parity) {
        mbarrier_wait(shared_address(&barrier), parity);
    }

    __device__ __forceinline__ void helper(bool x, bool z) const;
    __device__ __forceinline__ void make_x(Lane p, int c, Position<Shared::kStagesK> k) const;
    __device__ __forceinline__ void make_z(Lane p, int c) const;
    __device__ __forceinline__ void load_keys(Lane p, uint32_t panel, const float *table, int c,
                                              uint32_t (&a)[16]) const;
    __device__ __forceinline__ void output() const;
    __device__ __forceinline__ void chain(int half) const;
    __device__ __forceinline__ void refill(int c, Position<Shared::kStagesK> k, int half) const;
    __device__ __forceinline__ void store_rows(const float (&o)[32 * Halves], int c) const;
};

// ---- Helper: X and Z ----

// The transpose of r_k K, 64 of its columns, as fp16 operand; tokens past the end are 0 whatever K holds there.
template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::load_keys(Lane p, uint32_t panel, const float *table, int c,
                                                                    uint32_t (&a)[16]) const {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        uint32_t(&f)[4] = reinterpret_cast<uint32_t(&)[4]>(a[4 * s]);
        ldmatrix_x4_trans(block_at_trans(panel, p, s), f);
        if (ragged(c)) mask_tokens(f, 16 * s + p.column, shared.tail);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 norm = *reinterpret_cast<const float2 *>(&table[kRowNorm + 16 * s + i / 2 * 8 + p.column]);
            float2 x = unpack<T>(f[i]);
            f[i] = pack<__half>(norm.x * x.x, norm.y * x.y);
        }
    }
}

// X^T = (r_k K)^T t, 64 columns of K a product.
template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::make_x(Lane p, int c, Position<Shared::kStagesK> k) const {
    constexpr int kFlight = Halves == 2 ? 1 : PanelsK;  // products in flight, as registers allow
    uint32_t tile_k = shared_address(shared.k[k.slot]), tile_t = shared_address(shared.t[slot_of<Shared::kStagesT>(c)]);
    uint32_t tile_x = shared_address(shared.x[slot_of<Shared::kStagesX>(c)]);
    const float *table = shared.rows[slot_of<Shared::kStagesR>(c)];
    float acc[kFlight][32];
    uint32_t keys[kFlight][16];
    auto multiply = [&](int panel) {
        load_keys(p, tile_k + panel * kPanelBytes, table, c, keys[panel % kFlight]);
        wgmma_hold(keys[panel % kFlight]);
        wgmma_hold(acc[panel % kFlight]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<__half, kMajorMN>(acc[panel % kFlight], keys[panel % kFlight] + 4 * step,
                                    panel_mn_major(tile_t) + step * kStepMN, step > 0);
        }
        wgmma_commit();
    };
    wait(shared.r_full[slot_of<Shared::kStagesR>(c)], parity_of<Shared::kStagesR>(c));
    wait(shared.k_full[k.slot], k.parity);
    wait(shared.t_full[slot_of<Shared::kStagesT>(c)], parity_of<Shared::kStagesT>(c));
#pragma unroll
    for (int i = 0; i < kFlight; ++i) multiply(i);
    // exp(G_last - G) of the lane's tokens: in the products' shadow, where there are registers for it.
    float decay[16], last = table[kRowLog + kChunk - 1] + Range<T>::kLogUp;
    auto make_decay = [&](int s) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + 16 * s + 4 * i + p.column]);
            decay[4 * s + i] = exp2_fast(last - log.x), decay[4 * s + i + 1] = exp2_fast(last - log.y);
        }
    };
#pragma unroll
    for (int s = 0; Halves == 1 && s < 4; ++s) make_decay(s);
    wait(shared.x_empty[slot_of<Shared::kStagesX>(c)], parity_of<Shared::kStagesX>(c) ^ 1);
#pragma unroll
    for (int i = 0; i < PanelsK; ++i) {
        if (i >= kFlight) multiply(i);
        if (i + 1 < kFlight) {
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        wgmma_hold(acc[i % kFlight]);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if (Halves == 2) make_decay(s);
            const float *y = &acc[i % kFlight][8 * s], *e = &decay[4 * s];
            stmatrix_x4_trans(block_at_trans(tile_x + i * kPanelBytes, p, s), pack<T>(e[0] * y[0], e[1] * y[1]),
                              pack<T>(e[0] * y[2], e[1] * y[3]), pack<T>(e[2] * y[4], e[3] * y[5]),
                              pack<T>(e[2] * y[6], e[3] * y[7]));
        }
    }
    publish(shared.x_full[slot_of<Shared::kStagesX>(c)]);
    release(shared.k_empty[k.slot]);
    release(shared.t_empty[slot_of<Shared::kStagesT>(c)]);
    release(shared.r_empty[slot_of<Shared::kStagesR>(c)]);
}

// Z = p t, in the place of p; then t of a later chunk may come.
template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::make_z(Lane p, int c) const {
    enum { kBarrier = 1 };
    int slot_t = slot_of<Shared::kStagesT>(c), slot_z = slot_of<Shared::kStagesZ>(c);
    uint32_t tile_t = shared_address(shared.t[slot_t]), tile_z = shared_address(shared.z[slot_z]);
    const float *table = shared.rows[slot_of<Shared::kStagesR>(c)];
    float acc[32];
    wait(shared.t_full[slot_t], parity_of<Shared::kStagesT>(c));
    wait(shared.p_full[slot_z], parity_of<Shared::kStagesZ>(c));
    wgmma_hold(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma<__half, kMajorK, kMajorMN>(acc, panel_k_major(tile_z) + step * kStepK,
                                         panel_mn_major(tile_t) + step * kStepMN, step > 0);
    }
    wgmma_commit();
    wait(shared.r_full[slot_of<Shared::kStagesR>(c)], parity_of<Shared::kStagesR>(c));
    float decay[32];
    float upper = table[kRowLog + p.row] + Range<T>::kLogUp, lower = table[kRowLog + p.row + 8] + Range<T>::kLogUp;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        int column = 8 * j + p.column;
        float2 log = *reinterpret_cast<const float2 *>(&table[kRowLog + column]);
        decay[4 * j] = column <= p.row ? exp2_fast(upper - log.x) : 0.0f;
        decay[4 * j + 1] = column + 1 <= p.row ? exp2_fast(upper - log.y) : 0.0f;
        decay[4 * j + 2] = column <= p.row + 8 ? exp2_fast(lower - log.x) : 0.0f;
        decay[4 * j + 3] = column + 1 <= p.row + 8 ? exp2_fast(lower - log.y) : 0.0f;
    }
    wgmma_wait<0>();
    wgmma_hold(acc);
    release(shared.t_empty[slot_t]);
    release(shared.r_empty[slot_of<Shared::kStagesR>(c)]);
    named_barrier(kBarrier, 128);  // all warps have read p
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const float *y = &acc[8 * s], *e = &decay[8 * s];
        stmatrix_x4(block_at(tile_z, p, s), pack<T>(e[0] * y[0], e[1] * y[1]), pack<T>(e[2] * y[2], e[3] * y[3]),
                    pack<T>(e[4] * y[4], e[5] * y[5]), pack<T>(e[6] * y[6], e[7] * y[7]));
    }
    publish(shared.z_full[slot_z]);
    if (p.warp == 0 && p.lane == 0 && c + Shared::kStagesT < chunks) {
        wait(shared.t_empty[slot_t], parity_of<Shared::kStagesT>(c));
        load_t(c + Shared::kStagesT, slot_t);
    }
    __syncwarp();
}

template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::helper(bool x, bool z) const {
    Position<Shared::kStagesK> k;
    if (z && threadIdx.x % 128 == 0) {
        for (int c = 0; c < Shared::kStagesT && c < chunks; ++c) load_t(c, c);
    }
    for (int c = 0; c < chunks; ++c) {
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
        if (x) make_x(p, c, k);
        if (z) make_z(p, c);
        k.next();
    }
}

// ---- Output: O ----

// Straight to memory: rows past the end are others', or o is of another type or not aligned.
template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::store_rows(const float (&o)[32 * Halves], int c) const {
    const Lane p = lane_of_warpgroup();
    const gdelta_view &view = call.o;
    int count = c + 1 == chunks ? shared.tail : kChunk;
    with_dtype(view.dtype, [&](auto *type) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int row = p.row + 8 * lower;
            if (row >= count) continue;
            int64_t first =
                first_of(view, shared.sequence, shared.head) + (static_cast<int64_t>(c) * kChunk + row) * view.token;
            auto *to = static_cast<decltype(type)>(view.data) + first + shared.first_panel * 64 + p.column;
#pragma unroll
            for (int j = 0; j < 8 * Halves; ++j) {
                from_float(o[4 * j + 2 * lower], to + 8 * j);
                from_float(o[4 * j + 2 * lower + 1], to + 8 * j + 1);
            }
        }
    });
}

template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::output() const {
    enum { kBarrier = 2 };
    const Lane p = lane_of_warpgroup();
    bool leader = threadIdx.x % 128 == 0;
    if (leader) {
        for (int c = 0; c < 2 && c < chunks; ++c) {
            load_q(c, c);
            load_p(c, c);
        }
    }
    uint32_t tile_o = shared_address(shared.o);
    for (int c = 0; c < chunks; ++c) {
        uint32_t tile_q = shared_address(shared.q[slot_of<Shared::kStagesQ>(c)]),
                 tile_z = shared_address(shared.z[slot_of<Shared::kStagesZ>(c)]);
        uint32_t tile_s = shared_address(shared.s[slot_of<Shared::kStagesS>(c)]),
                 tile_w = shared_address(shared.w[slot_of<Shared::kStagesW>(c)]);
        float o[32 * Halves];
        wait(shared.q_full[slot_of<Shared::kStagesQ>(c)], parity_of<Shared::kStagesQ>(c));
        wait(shared.r_full[slot_of<Shared::kStagesR>(c)], parity_of<Shared::kStagesR>(c));
        float upper = shared.rows[slot_of<Shared::kStagesR>(c)][kRowOutput + p.row],
              lower = shared.rows[slot_of<Shared::kStagesR>(c)][kRowOutput + p.row + 8];
        release(shared.r_empty[slot_of<Shared::kStagesR>(c)]);
        acquire(shared.s_full[slot_of<Shared::kStagesS>(c)], parity_of<Shared::kStagesS>(c));
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            wgmma<T, kMajorK, kMajorK>(o, panel_k_major(tile_q + step / 4 * kPanelBytes) + step % 4 * kStepK,
                                       panel_k_major(tile_s + step / 4 * Halves * kPanelBytes) + step % 4 * kStepK,
                                       step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
        release(shared.s_empty[slot_of<Shared::kStagesS>(c)]);
#pragma unroll
        for (int i = 0; i < 32 * Halves; ++i) o[i] *= i & 2 ? lower : upper;
        wait(shared.z_full[slot_of<Shared::kStagesZ>(c)], parity_of<Shared::kStagesZ>(c));
        acquire(shared.w_full[slot_of<Shared::kStagesW>(c)], parity_of<Shared::kStagesW>(c));
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorK, kMajorK>(o, panel_k_major(tile_z) + step * kStepK, panel_k_major(tile_w) + step * kStepK,
                                       true);
        }
        wgmma_commit();
        if (leader) bulk_wait_read<0>();  // the last O has left its tile
        wgmma_wait<0>();
        wgmma_hold(o);
        release(shared.w_empty[slot_of<Shared::kStagesW>(c)]);
        named_barrier(kBarrier, 128);
        if (leader && c + 2 < chunks) {
            load_q(c + 2, slot_of<Shared::kStagesQ>(c));
            load_p(c + 2, slot_of<Shared::kStagesZ>(c));
        }
        bool direct = !maps.has_o || (ragged(c));
        if (direct) {
            if (call.o.data) store_rows(o, c);
        } else {
#pragma unroll
            for (int b = 0; b < 4 * Halves; ++b) {
                stmatrix_x4(block_at(tile_o + b / 4 * kPanelBytes, p, b % 4), pack<T>(o[8 * b], o[8 * b + 1]),
                            pack<T>(o[8 * b + 2], o[8 * b + 3]), pack<T>(o[8 * b + 4], o[8 * b + 5]),
                            pack<T>(o[8 * b + 6], o[8 * b + 7]));
            }
            fence_async_shared();
            named_barrier(kBarrier, 128);
            if (leader) {
                for (int i = 0; i < Halves; ++i) {
                    bulk_store_tensor(&maps.o, tile_o + i * kPanelBytes, token(c), shared.head,
                                      static_cast<int>(shared.sequence.batch), shared.first_panel + i);
                }
                bulk_commit();
            }
        }
    }
    if (leader) bulk_wait<0>();
}

// ---- Chain: S ----

// f(i, offset): element i of a lane's fragment of S^T and its offset in the state's memory.
template <int PanelsK, typename F>
__device__ __forceinline__ void for_state(const gdelta_state_view &view, int dim_v, int column, F f) {
    const Lane p = lane_of_warpgroup();
    constexpr int kDim = 64 * PanelsK;
    int along_k = view.order == GDELTA_STATE_VK ? 1 : dim_v, along_v = view.order == GDELTA_STATE_VK ? kDim : 1;
#pragma unroll
    for (int i = 0; i < 32 * PanelsK; ++i) {
        int k = i / 4 * 8 + p.column + i % 2, v = column + p.row + 8 * (i / 2 % 2);
        f(i, k * along_k + v * along_v);
    }
}

// The chain is the last to read V, K and rows of chunk c; a warp each of the first half fetches those of later chunks.
template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::refill(int c, Position<Shared::kStagesK> k, int half) const {
    int warp = threadIdx.x / 32 % 4;
    if (threadIdx.x % 32 == 0) {
        if (warp == 0 && c + Shared::kStagesV < chunks) {
            wait(shared.v_empty[slot_of<Shared::kStagesV>(c)][half], parity_of<Shared::kStagesV>(c));
            load_v(c + Shared::kStagesV, slot_of<Shared::kStagesV>(c), half);
        } else if (warp == 1 && half == 0 && c + Shared::kStagesK < chunks) {
            wait(shared.k_empty[k.slot], k.parity);
            load_k(c + Shared::kStagesK, k.slot);
        } else if (warp == 2 && half == 0 && c + Shared::kStagesR < chunks) {
            wait(shared.r_empty[slot_of<Shared::kStagesR>(c)], parity_of<Shared::kStagesR>(c));
            load_rows(c + Shared::kStagesR, slot_of<Shared::kStagesR>(c));
        }
    }
    __syncwarp();
}

template <typename T, int PanelsK, int Halves>
__device__ __forceinline__ void Scan<T, PanelsK, Halves>::chain(int half) const {
    const Lane p = lane_of_warpgroup();
    bool leader = threadIdx.x % 128 == 0;
    int column = (shared.first_panel + half) * 64;
    float s[32 * PanelsK];
    uint32_t a[16 * PanelsK];
    if (leader) {
        for (int c = 0; c < Shared::kStagesV && c < chunks; ++c) load_v(c, c, half);
        for (int c = 0; half == 0 && c < Shared::kStagesK && c < chunks; ++c) load_k(c, c);
        for (int c = 0; half == 0 && c < Shared::kStagesR && c < chunks; ++c) load_rows(c, c);
    }
    if (shared.sequence.initial >= 0) {
        const gdelta_state_view &view = call.in.initial;
        with_dtype(view.dtype, [&](auto *type) {
            const auto *from = static_cast<decltype(type)>(view.data) + shared.sequence.initial;
            for_state<PanelsK>(view, call.shape.dim_v, column, [&](int i, int at) { s[i] = to_float(from[at]); });
        });
    } else {
#pragma unroll
        for (int i = 0; i < 32 * PanelsK; ++i) s[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 16 * PanelsK; ++i) {
        a[i] = pack<T>(Range<T>::kDown * s[2 * i], Range<T>::kDown * s[2 * i + 1]);
    }

    Position<Shared::kStagesK> k;
    for (int c = 0; c < chunks; ++c) {
        uint32_t tile_k = shared_address(shared.k[k.slot]),
                 tile_x = shared_address(shared.x[slot_of<Shared::kStagesX>(c)]);
        uint32_t tile_v = shared_address(shared.v[slot_of<Shared::kStagesV>(c)]) + half * kPanelBytes;
        uint32_t tile_s = shared_address(shared.s[slot_of<Shared::kStagesS>(c)]) + half * kPanelBytes;
        uint32_t tile_w = shared_address(shared.w[slot_of<Shared::kStagesW>(c)]) + half * kPanelBytes;
        const float *table = shared.rows[slot_of<Shared::kStagesR>(c)];

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
        wait(shared.s_empty[slot_of<Shared::kStagesS>(c)], parity_of<Shared::kStagesS>(c) ^ 1);
#pragma unroll
        for (int b = 0; b < 4 * PanelsK; ++b) {
            stmatrix_x4(block_at(tile_s + b / 4 * Halves * kPanelBytes, p, b % 4), a[4 * b], a[4 * b + 1], a[4 * b + 2],
                        a[4 * b + 3]);
        }
        release(shared.s_full[slot_of<Shared::kStagesS>(c)]);
        wait(shared.r_full[slot_of<Shared::kStagesR>(c)], parity_of<Shared::kStagesR>(c));
        float decay = table[kRowDecay];
#pragma unroll
        for (int i = 0; i < 32 * PanelsK; ++i) s[i] *= decay;
        uint32_t wv[16];
        wait(shared.v_full[slot_of<Shared::kStagesV>(c)][half], parity_of<Shared::kStagesV>(c));
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            ldmatrix_x4_trans(block_at_trans(tile_v, p, b), reinterpret_cast<uint32_t(&)[4]>(wv[4 * b]));
        }
        release(shared.v_empty[slot_of<Shared::kStagesV>(c)][half]);
        wgmma_wait<0>();
        wgmma_hold(u);
        release(shared.k_empty[k.slot]);

        // W = beta V - beta e r_k U; columns of tokens past the end are 0 whatever V and K held there.
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float4 gates = reinterpret_cast<const float4 *>(table + kRowGates)[4 * j + p.lane % 4];
            float2 upper = unpack<T>(wv[2 * j]), lower = unpack<T>(wv[2 * j + 1]);
            wv[2 * j] =
                pack<T>(fmaf(-gates.z, u[4 * j], gates.x * upper.x), fmaf(-gates.w, u[4 * j + 1], gates.y * upper.y));
            wv[2 * j + 1] = pack<T>(fmaf(-gates.z, u[4 * j + 2], gates.x * lower.x),
                                    fmaf(-gates.w, u[4 * j + 3], gates.y * lower.y));
        }
        if (ragged(c)) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                mask_tokens(reinterpret_cast<uint32_t(&)[4]>(wv[4 * b]), 16 * b + p.column, shared.tail);
            }
        }
        release(shared.r_empty[slot_of<Shared::kStagesR>(c)]);

        // S' = decay S + X^T W. In its shadow: W for `output`.
        wait(shared.x_full[slot_of<Shared::kStagesX>(c)], parity_of<Shared::kStagesX>(c));
        wgmma_hold(s);
        wgmma_hold(wv);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorMN>(s, wv + 4 * step, panel_mn_major(tile_x) + step * kStepMN, true);
        }
        wgmma_commit();
        wait(shared.w_empty[slot_of<Shared::kStagesW>(c)], parity_of<Shared::kStagesW>(c) ^ 1);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            stmatrix_x4(block_at(tile_w, p, b), wv[4 * b], wv[4 * b + 1], wv[4 * b + 2], wv[4 * b + 3]);
        }
        release(shared.w_full[slot_of<Shared::kStagesW>(c)]);
        refill(c, k, half);
        wgmma_wait<0>();
        wgmma_hold(s);
        release(shared.x_empty[slot_of<Shared::kStagesX>(c)]);
#pragma unroll
        for (int i = 0; i < 16 * PanelsK; ++i) {
            a[i] = pack<T>(Range<T>::kDown * s[2 * i], Range<T>::kDown * s[2 * i + 1]);
        }
        k.next();
    }
    if (shared.sequence.final >= 0) {
        const gdelta_state_view &view = call.final;
        with_dtype(view.dtype, [&](auto *type) {
            auto *to = static_cast<decltype(type)>(view.data) + shared.sequence.final;
            for_state<PanelsK>(view, call.shape.dim_v, column, [&](int i, int at) { from_float(s[i], to + at); });
        });
    }
}

// ---- The block ----

template <typename T, int PanelsK, int Halves>
__global__ void __launch_bounds__(512, 1)
    hopper_scan(const __grid_constant__ gdelta_forward_call call, const __grid_constant__ gdelta_hopper_work work,
                const __grid_constant__ gdelta_hopper_maps maps) {
    using Shared = ScanShared<PanelsK, Halves>;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    const gdelta_shape &shape = call.shape;
    if (is_malformed(work.malformed)) return;

    unsigned tiles = static_cast<unsigned>(shape.dim_v / (64 * Halves)), block = blockIdx.x / tiles;
    int head = static_cast<int>(block % static_cast<unsigned>(shape.heads_o));
    int64_t n = block / static_cast<unsigned>(shape.heads_o);
    int first_panel = static_cast<int>(blockIdx.x % tiles) * Halves;
    if (threadIdx.x == 0) {
        shared.sequence = find_sequence(shape, call.in, call.final, n, head, head == 0 && first_panel == 0);
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
        init(shared.q_full, 1);
        for (auto &halves : shared.v_full) init(halves, 1);
        for (auto &halves : shared.v_empty) init(halves, kWarps);
        init(shared.t_full, 1), init(shared.t_empty, 2 * kWarps);
        init(shared.r_full, 1), init(shared.r_empty, kWarps * (3 + Halves));
        init(shared.p_full, 1), init(shared.z_full, kWarps);
        init(shared.x_full, kWarps), init(shared.x_empty, kWarps * Halves);
        init(shared.s_full, kWarps * Halves), init(shared.s_empty, kWarps);
        init(shared.w_full, kWarps * Halves), init(shared.w_empty, kWarps);
        fence_barrier_init();
    }
    __syncthreads();
    const Sequence &sequence = shared.sequence;
    if (sequence.skip) {
        if (!call.o.data) return;
        int columns = 64 * Halves;
        for (int64_t i = threadIdx.x; i < sequence.length * columns; i += blockDim.x) {
            store_element(
                call.o.data, call.o.dtype,
                first_of(call.o, sequence, head) + i / columns * call.o.token + first_panel * 64 + i % columns, 0.0f);
        }
        return;
    }
    int chunks = static_cast<int>((sequence.length + kChunk - 1) / kChunk);
    Scan<T, PanelsK, Halves> scan = {call, work, maps, shared, chunks};
    // 512 threads have 128 registers each at launch.
    int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);  // uniform, and known to be
    if constexpr (Halves == 1) {
        if (role == 0) {
            registers_increase<152>();
            scan.helper(true, false);
        } else if (role == 1) {
            registers_decrease<88>();
            scan.helper(false, true);
        } else if (role == 2) {
            registers_decrease<80>();
            scan.output();
        } else {
            registers_increase<192>();
            scan.chain(0);
        }
    } else {
        if (role == 0) {
            registers_decrease<80>();
            scan.helper(true, true);
        } else if (role == 1) {
            registers_decrease<96>();
            scan.output();
        } else {
            registers_increase<168>();
            scan.chain(role - 2);
        }
    }
}

template <typename T, int PanelsK, int Halves>
static cudaError_t launch_scan(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                               const gdelta_hopper_maps &maps, gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    auto kernel = hopper_scan<T, PanelsK, Halves>;
    int bytes = sizeof(ScanShared<PanelsK, Halves>);
    static_assert(sizeof(ScanShared<PanelsK, Halves>) <= 232448, "227 KB a block");
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(shape.sequences * shape.heads_o * (shape.dim_v / (64 * Halves)));
    config.blockDim = 512;
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, call, work, maps);
}

template <typename T, int PanelsK>
static cudaError_t choose_scan(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                               const gdelta_hopper_maps &maps, gdelta_stream stream) {
    return call.shape.dim_v / 64 / work.choice.split_v == 2 ? launch_scan<T, PanelsK, 2>(call, work, maps, stream)
                                                            : launch_scan<T, PanelsK, 1>(call, work, maps, stream);
}

int launch_hopper_prepare(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                          const gdelta_hopper_maps &maps, gdelta_stream stream);

}  // namespace gdelta

int gdelta_launch_hopper_forward(const gdelta_forward_call *call, const gdelta_hopper_work *work,
                                 const gdelta_hopper_maps *maps, gdelta_stream stream) {
    int error = gdelta::launch_check(call->shape, call->in, work->malformed, stream);
    if (error == cudaSuccess) error = gdelta::launch_hopper_prepare(*call, *work, *maps, stream);
    if (error != cudaSuccess) return error;
    bool fp16 = call->in.q.dtype == GDELTA_DTYPE_FP16;
    if (call->shape.dim_k == 128) {
        return fp16 ? gdelta::choose_scan<__half, 2>(*call, *work, *maps, stream)
                    : gdelta::choose_scan<__nv_bfloat16, 2>(*call, *work, *maps, stream);
    }
    return fp16 ? gdelta::choose_scan<__half, 1>(*call, *work, *maps, stream)
                : gdelta::choose_scan<__nv_bfloat16, 1>(*call, *work, *maps, stream);
}
