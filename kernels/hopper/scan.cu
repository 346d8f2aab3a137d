// Hopper forward, second kernel: along the chunks of a sequence, from what prepare left.
//
//   W = V - e r_k (K S)                                [64, V]
//   S' = exp(G_last) S + X^T W,   O = scale e r_q (Q S) + Z W
//
// S to S' is two dependent products, K S and X^T W; all else is done by others beside that chain.
//
// Grid: x = (sequence, output head, segment, tile of 64 Halves columns of V), the tile fastest. Block: warpgroups
//
//   loader        a thread a ring feeds the chains and `output`
//   output        Q S, Z W --> O; two, chunk by chunk, if there is one half
//   chain 0 ..    S^T of 64 columns of V each, fp32 in registers: K S, W, S'; hands 16-bit S and W to `output`
//
//   copy engine --K, V, X, rows--> chains --S, W--> output --O--> copy engine
//   copy engine --Q, Z-------------------------------> output
//
// The chain holds S transposed, [V, K], so that S and W are operands from registers: W^T = D fragments of (K S)^T. A
// full barrier counts bytes or four warps of the writer, an empty barrier the warps of all readers.
//
// Segments, where one block a sequence and head would leave multiprocessors idle: with zeros, or the caller's state
// before the first one, at its start a segment ends in N, and from the identity with V = 0 in M. `hopper_summary` makes
// them, the chain alone; `hopper_merge` S_p+1 = M_p S_p + N_p in fp32; then each segment runs from its S_p as if it
// were a sequence. Exact: no gate is cut.
//
// Precision: S, sums, row table in fp32; S, W rounded once to T as operands (Range in chunk.cuh keeps fp16 finite).
#include "kernels/hopper/launch.cuh"
#include "kernels/hopper/ring.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/grid.cuh"

namespace gdelta {

// One half of V leaves room for two warpgroups that take turns at O: each needs longer than the chain.
template <int Halves>
constexpr int kOutputs = Halves == 1 ? 2 : 1;

// Every tensor has a ring of two places. What is read at the same time comes together: K, V and the row table until W
// is made, X after it; Q and its factors, then Z.
template <int PanelsK, int Halves>
struct __align__(1024) ScanKeys {
    unsigned char k[PanelsK * kPanelBytes], v[Halves * kPanelBytes];
};

// What is only in the full scan.
template <int PanelsK, int Halves, bool Summary>
struct __align__(1024) OutputShared {
    // One place each for S and W is all that fits for two halves of V.
    static constexpr int kStagesS = kOutputs<Halves>;

    unsigned char q[2][PanelsK * kPanelBytes];
    unsigned char z[2][4][4 * kHopperSquareBytes];  // 16 columns at a time; squares above the diagonal stay 0
    unsigned char s[kStagesS][PanelsK][Halves * kPanelBytes];  // rows of V, 64 of K a panel
    unsigned char w[kStagesS][Halves * kPanelBytes];           // rows of V, 64 tokens
    unsigned char o[kStagesS][Halves * kPanelBytes];
    __align__(16) float factor[2][kChunk];
    uint64_t q_full[2], q_empty[2], z_full[2], z_empty[2];
    uint64_t s_full[kStagesS], s_empty[kStagesS], w_full[kStagesS], w_empty[kStagesS];
};
template <int PanelsK, int Halves>
struct OutputShared<PanelsK, Halves, true> {};

template <int PanelsK, int Halves, bool Summary>
struct __align__(1024) ScanShared {
    ScanKeys<PanelsK, Halves> keys[2];
    unsigned char x[2][PanelsK * kPanelBytes];
    OutputShared<PanelsK, Halves, Summary> output;
    __align__(16) float rows[2][kForwardOutput];
    uint64_t k_full[2], k_empty[2], x_full[2], x_empty[2];
    Sequence sequence;
    int head, head_q, head_k, head_v, segment;
    int first_panel;        // of V; from V's width on it is of the identity's columns (Summary)
    int first_chunk, tail;  // tail: rows of the sequence's last chunk
    int64_t number;         // of the first chunk
    int64_t checkpoint;     // number of the segment's first one (Keep)
};

// Blocks along V, and of a sequence and head. A summary has a tile for each 64 columns of V, then of the identity; the
// last segment needs none.
__host__ __device__ inline int scan_tiles(const gdelta_shape &shape, int halves, bool summary) {
    return summary ? (shape.dim_v + shape.dim_k) / 64 : shape.dim_v / (64 * halves);
}
__host__ __device__ inline int segment_blocks(const gdelta_shape &shape, const gdelta_hopper_choice &choice, int halves,
                                              bool summary) {
    return (choice.segments - summary) * scan_tiles(shape, halves, summary);
}

// Registers a thread: 512 over four warpgroups, or over two blocks of two.
constexpr int kLoaderRegisters = 40, kChainRegisters1 = 240, kOutputRegisters1 = 112, kChainRegisters2 = 168,
              kOutputRegisters2 = 136, kSummaryRegisters = 216;

// What every role of a block knows. c counts the chunks of the block's segment.
template <typename T, int PanelsK, int Halves, bool Summary>
struct Scan {
    using Shared = ScanShared<PanelsK, Halves, Summary>;
    using Output = OutputShared<PanelsK, Halves, Summary>;
    const gdelta_forward_call &call;
    const gdelta_hopper_work &work;
    const gdelta_hopper_maps &maps;
    Shared &shared;
    int chunks;
    bool last;       // the segment ends the sequence
    bool has_value;  // columns of V, not of the identity

    __device__ __forceinline__ int token(int c) const {
        return static_cast<int>(shared.sequence.begin) + (shared.first_chunk + c) * kChunk;
    }
    // Rows of others follow those of the sequence in chunk c. (In other layouts the copy engine brings zeros.)
    __device__ __forceinline__ bool ragged(int c) const {
        return last && c + 1 == chunks && shared.tail < kChunk && call.shape.packed;
    }
    __device__ __forceinline__ int64_t chunk_head(int c) const {
        return (shared.number + c) * call.shape.heads_o + shared.head;
    }
    __device__ __forceinline__ void load_panels(const gdelta_tensor_map &map, void *to, uint64_t &barrier, int c,
                                                int of_head, int first, int count) const {
        for (int i = 0; i < count; ++i) {
            bulk_load_tensor(shared_address(to) + i * kPanelBytes, &map, shared_address(&barrier), token(c), of_head,
                             static_cast<int>(shared.sequence.batch), first + i);
        }
    }
    static __device__ __forceinline__ void load(void *to, const void *from, uint32_t bytes, uint64_t &barrier) {
        bulk_load(shared_address(to), from, bytes, shared_address(&barrier));
    }

    __device__ __forceinline__ void loader() const;
    __device__ __forceinline__ void output(int turn) const;
    template <bool Keep>
    __device__ __forceinline__ void chain(int half) const;
    __device__ __forceinline__ void load_state(float (&s)[PanelsK][32], int column) const;
    __device__ __forceinline__ void store_state(const float (&s)[PanelsK][32], int column) const;
    __device__ __forceinline__ void keep_state(const float (&s)[PanelsK][32], int column, int64_t number) const;
    __device__ __forceinline__ void put_state(const float (&s)[PanelsK][32], int column, const gdelta_state_view &view,
                                              int64_t offset) const;
    __device__ __forceinline__ float *summary(bool of_value, int segment) const;
    __device__ __forceinline__ void store_rows(const float (&o)[32 * Halves], int c) const;
};

// ---- Loader: a thread a ring ----

template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::loader() const {
    if (threadIdx.x == 0) {
        uint32_t bytes = sizeof shared.keys[0].k + sizeof shared.rows[0] + (has_value ? sizeof shared.keys[0].v : 0);
        feed(chunks, shared.k_full, shared.k_empty, bytes, [&](int slot, uint64_t &barrier, int c) {
            ScanKeys<PanelsK, Halves> &keys = shared.keys[slot];
            load_panels(maps.k, keys.k, barrier, c, shared.head_k, 0, PanelsK);
            if (has_value) load_panels(maps.v, keys.v, barrier, c, shared.head_v, shared.first_panel, Halves);
            load(shared.rows[slot], work.rows + chunk_head(c) * kHopperForwardRowFloats, sizeof shared.rows[0],
                 barrier);
        });
    } else if (threadIdx.x == 32) {
        feed(chunks, shared.x_full, shared.x_empty, sizeof shared.x[0], [&](int slot, uint64_t &barrier, int c) {
            const char *from = static_cast<const char *>(work.x) + chunk_head(c) * sizeof shared.x[0];
            load(shared.x[slot], from, sizeof shared.x[0], barrier);
        });
    }
    if constexpr (!Summary) {
        Output &out = shared.output;
        if (threadIdx.x == 64) {
            uint32_t bytes = sizeof out.q[0] + sizeof out.factor[0];
            feed(chunks, out.q_full, out.q_empty, bytes, [&](int slot, uint64_t &barrier, int c) {
                load_panels(maps.q, out.q[slot], barrier, c, shared.head_q, 0, PanelsK);
                load(out.factor[slot], work.rows + chunk_head(c) * kHopperForwardRowFloats + kForwardOutput,
                     sizeof out.factor[0], barrier);
            });
        } else if (threadIdx.x == 96) {
            feed(chunks, out.z_full, out.z_empty, kHopperLowerBytes, [&](int slot, uint64_t &barrier, int c) {
                const char *from = static_cast<const char *>(work.z) + chunk_head(c) * kHopperLowerBytes;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    load(out.z[slot][j] + j * kHopperSquareBytes, from + lower_column(j), (4 - j) * kHopperSquareBytes,
                         barrier);
                }
            });
        }
    }
}

// ---- Output: O ----

// Straight to memory: rows past the end are others', or o is of another type or not aligned.
template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::store_rows(const float (&o)[32 * Halves],
                                                                              int c) const {
    const Lane p = lane_of_warpgroup();
    const gdelta_view &view = call.o;
    int count = last && c + 1 == chunks ? shared.tail : kChunk;
    with_dtype(view.dtype, [&](auto *type) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int row = p.row + 8 * lower;
            if (row >= count) continue;
            int64_t first = first_of(view, shared.sequence, shared.head) +
                            (static_cast<int64_t>(shared.first_chunk + c) * kChunk + row) * view.token;
            auto *to = static_cast<decltype(type)>(view.data) + first + shared.first_panel * 64 + p.column;
#pragma unroll
            for (int j = 0; j < 8 * Halves; ++j) {
                from_float(o[4 * j + 2 * lower], to + 8 * j);
                from_float(o[4 * j + 2 * lower + 1], to + 8 * j + 1);
            }
        }
    });
}

// One warpgroup has the next chunk's Q S under way while O leaves; two take turns.
template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::output(int turn) const {
    constexpr int kStagesS = Output::kStagesS;
    const Lane p = lane_of_warpgroup();
    bool leader = threadIdx.x % 128 == 0;
    Output &out = shared.output;
    float o[32 * Halves], upper, lower;
    uint32_t rounded[16 * Halves];
    auto start = [&](int c) {  // O = Q S
        int slot = ring_slot<2>(c), slot_s = ring_slot<kStagesS>(c);
        uint32_t tile_q = shared_address(out.q[slot]), tile_s = shared_address(out.s[slot_s]);
        wait(out.q_full[slot], ring_parity<2>(c));
        upper = out.factor[slot][p.row], lower = out.factor[slot][p.row + 8];
        acquire(out.s_full[slot_s], ring_parity<kStagesS>(c));
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            wgmma<T, kMajorK, kMajorK>(o, panel_k_major(tile_q + step / 4 * kPanelBytes) + step % 4 * kStepK,
                                       panel_k_major(tile_s + step / 4 * Halves * kPanelBytes) + step % 4 * kStepK,
                                       step > 0);
        }
        wgmma_commit();
    };
    auto finish = [&](int c) {  // O = scale e r_q O + Z W
        int slot = ring_slot<2>(c), slot_s = ring_slot<kStagesS>(c);
        uint32_t tile_z = shared_address(out.z[slot]), tile_w = shared_address(out.w[slot_s]);
        wgmma_wait<0>();
        wgmma_hold(o);
        release(out.s_empty[slot_s]);
        release(out.q_empty[slot]);
#pragma unroll
        for (int i = 0; i < 32 * Halves; ++i) o[i] *= i & 2 ? lower : upper;
        wait(out.z_full[slot], ring_parity<2>(c));
        acquire(out.w_full[slot_s], ring_parity<kStagesS>(c));
        wgmma_hold(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<T, kMajorK, kMajorK>(o, squares_k_major(tile_z + step * sizeof out.z[0][0]),
                                       panel_k_major(tile_w) + step * kStepK, true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
        release(out.w_empty[slot_s]);
        release(out.z_empty[slot]);
        if (!maps.has_o || ragged(c)) {
            if (call.o.data) store_rows(o, c);
        }
#pragma unroll
        for (int i = 0; i < 16 * Halves; ++i) rounded[i] = pack<T>(o[2 * i], o[2 * i + 1]);
    };
    auto store = [&](int c) {
        if (!maps.has_o || ragged(c)) return;
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
        uint32_t tile_o = shared_address(out.o[turn]);
        if (leader) bulk_wait_read<0>();  // the last O has left its tile
        named_barrier(1 + turn, 128);
        put_blocks(tile_o, p, rounded);
        fence_async_shared();
        named_barrier(1 + turn, 128);
        if (leader) {
            for (int i = 0; i < Halves; ++i) {
                bulk_store_tensor(&maps.o, tile_o + i * kPanelBytes, token(c), shared.head,
                                  static_cast<int>(shared.sequence.batch), shared.first_panel + i);
            }
            bulk_commit();
        }
    };
    if constexpr (kOutputs<Halves> == 2) {
        for (int c = turn; c < chunks; c += 2) {
            start(c);
            finish(c);
            store(c);
        }
    } else if (chunks > 0) {
        start(0);
        for (int c = 0; c + 1 < chunks; ++c) {
            finish(c);
            start(c + 1);
            store(c);
        }
        finish(chunks - 1);
        store(chunks - 1);
    }
    if (leader) bulk_wait<0>();
}

// ---- Chain: S ----

// A segment's N, [V, K], or M transposed, [K, K].
template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ float *Scan<T, PanelsK, Halves, Summary>::summary(bool of_value, int segment) const {
    int64_t job = blockIdx.x / static_cast<unsigned>(segment_blocks(call.shape, work.choice, Halves, Summary));
    int64_t at = job * (work.choice.segments - 1) + segment;
    return of_value ? work.n + at * call.shape.dim_v * call.shape.dim_k
                    : work.m + at * call.shape.dim_k * call.shape.dim_k;
}

// Where the block's columns of S start.
template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::load_state(float (&s)[PanelsK][32],
                                                                              int column) const {
    gdelta_state_view view = call.in.initial;
    int64_t offset = shared.sequence.initial;
    bool identity = Summary && !has_value;
    // A summary's segments start from zeros after the first one; the others from the caller's state where no chunk is
    // before them, as in empty sequences: M S + N is no copy (-0, infinities).
    if (Summary ? shared.segment > 0 : shared.first_chunk > 0) {
        offset = Summary ? -1 : 0;
        view.order = GDELTA_STATE_VK;
        view.dtype = GDELTA_DTYPE_FP32;
        if (!Summary) view.data = summary(true, shared.segment - 1);
    }
    load_columns<PanelsK>(view, offset, identity, call.shape.dim_v, column,
                          [&](int i, float x) { s[i / 32][i % 32] = x; });
}

template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::store_state(const float (&s)[PanelsK][32],
                                                                               int column) const {
    gdelta_state_view view = call.final;
    int64_t offset = shared.sequence.final;
    if (Summary) {
        offset = 0;
        view.order = GDELTA_STATE_VK;
        view.dtype = GDELTA_DTYPE_FP32;
        view.data = summary(has_value, shared.segment);
    } else if (!last || offset < 0) {
        return;
    }
    put_state(s, column, view, offset);
}

// The checkpoint of this number.
template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::keep_state(const float (&s)[PanelsK][32], int column,
                                                                              int64_t number) const {
    const gdelta_state_view &view = call.checkpoints;
    bool reporter = shared.head == 0 && column == 0 && threadIdx.x % 128 == 0;
    int64_t entry = slot_of(call.in, view, number, GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE, reporter);
    if (entry >= 0) put_state(s, column, view, entry * view.slot + shared.head * view.head);
}

template <typename T, int PanelsK, int Halves, bool Summary>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::put_state(const float (&s)[PanelsK][32], int column,
                                                                             const gdelta_state_view &view,
                                                                             int64_t offset) const {
    store_columns<PanelsK>(view, offset, call.shape.dim_v, column, [&](int i) { return s[i / 32][i % 32]; });
}

// Panel by panel of K, so that the tensor cores go on while a panel of S is made an operand: X^T W of the last panels
// and K S of the first ones are under way together.
template <typename T, int PanelsK, int Halves, bool Summary>
template <bool Keep>
__device__ __forceinline__ void Scan<T, PanelsK, Halves, Summary>::chain(int half) const {
    constexpr int kStagesS = kOutputs<Halves>;
    constexpr float kDown = Range<T>::kDown;
    constexpr bool kEarly = Halves == 1 && !Summary;  // registers for V and its factors before U is there
    Output &out = shared.output;
    int column = (shared.first_panel + half) * 64 - (has_value ? 0 : call.shape.dim_v);
    float s[PanelsK][32], u[32], value[32];
    float2 key[8];
    uint32_t a[PanelsK][16], w[16];
    load_state(s, column);
    auto unpack_value = [&](int c) {
        const float2 *keys = reinterpret_cast<const float2 *>(shared.rows[ring_slot<2>(c)] + kForwardKey);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            key[j] = keys[4 * j + threadIdx.x % 4];
            float2 upper = unpack<T>(w[2 * j]), lower = unpack<T>(w[2 * j + 1]);
            value[4 * j] = kDown * upper.x, value[4 * j + 1] = kDown * upper.y;
            value[4 * j + 2] = kDown * lower.x, value[4 * j + 3] = kDown * lower.y;
        }
        if constexpr (kEarly) wgmma_hold(value);
    };
    // U^T = S^T K^T. In its shadow: S for `output`, its decay, V.
    auto start = [&](int c) {
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));  // addresses made anew: they do not fit
        int slot = ring_slot<2>(c), slot_s = ring_slot<kStagesS>(c);
        uint32_t tile_k = shared_address(shared.keys[slot].k);
        uint32_t tile_v = shared_address(shared.keys[slot].v) + half * kPanelBytes;
        wait(shared.k_full[slot], ring_parity<2>(c));
        float decay = shared.rows[slot][kForwardDecay];
        bool decays = __any_sync(0xffffffffu, decay != 1.0f);
        if constexpr (!Summary) wait(out.s_empty[slot_s], ring_parity<kStagesS>(c) ^ 1);
#pragma unroll
        for (int i = 0; i < PanelsK; ++i) {
            // Of two halves nothing is under way here: the wait tells the compiler (C7517 without it).
            if (Halves == 1 || i == 0) wgmma_wait<Halves == 1 ? PanelsK - 1 : 0>();
            wgmma_hold(s[i]);
            if (i + 1 == PanelsK && c > 0) release(shared.x_empty[slot ^ 1]);
            pack_state<T>(s[i], a[i]);
            wgmma_hold(u);
            wgmma_hold(a[i]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorK>(u, a[i] + 4 * step, panel_k_major(tile_k + i * kPanelBytes) + step * kStepK,
                                  i + step > 0);
            }
            wgmma_commit();
            if (decays) {  // a branch: else the compiler puts this behind W, where all wait for it
#pragma unroll
                for (int j = 0; j < 32; ++j) s[i][j] *= decay;
            }
            if constexpr (!Summary) {
                put_blocks(shared_address(out.s[slot_s][i]) + half * kPanelBytes, p, a[i]);
            }
        }
        if constexpr (!Summary) release(out.s_full[slot_s]);
        get_blocks_trans(tile_v, p, w);
        if constexpr (kEarly) unpack_value(c);
    };
    // W = V - e r_k U; S' = decay S + X^T W. In its shadow: W for `output`.
    auto finish = [&](int c) {
        const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
        int slot = ring_slot<2>(c), slot_s = ring_slot<kStagesS>(c);
        uint32_t tile_x = shared_address(shared.x[slot]);
        wgmma_wait<0>();
        wgmma_hold(u);
        if constexpr (!kEarly) unpack_value(c);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float2 k = key[i / 2];
            w[i] = pack<T>(fmaf(-k.x, u[2 * i], value[2 * i]), fmaf(-k.y, u[2 * i + 1], value[2 * i + 1]));
        }
        release(shared.k_empty[slot]);
        if (ragged(c)) {  // tokens past the end: 0 whatever V and K held there
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                mask_tokens(reinterpret_cast<uint32_t(&)[4]>(w[4 * b]), 16 * b + p.column, shared.tail);
            }
        }
        wait(shared.x_full[slot], ring_parity<2>(c));
        wgmma_hold(w);
#pragma unroll
        for (int i = 0; i < PanelsK; ++i) {
            wgmma_hold(s[i]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma<T, kMajorMN>(s[i], w + 4 * step, panel_mn_major(tile_x + i * kPanelBytes) + step * kStepMN, true);
            }
            wgmma_commit();
        }
        if constexpr (!Summary) {
            wait(out.w_empty[slot_s], ring_parity<kStagesS>(c) ^ 1);
            put_blocks(shared_address(out.w[slot_s]) + half * kPanelBytes, p, w);
            release(out.w_full[slot_s]);
        }
    };
    auto wait_all = [&] {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < PanelsK; ++i) wgmma_hold(s[i]);
    };
    if (Keep || Halves == 2) {  // checkpoints of a whole S; of two halves, registers for one product at a time
        int every = static_cast<int>(call.checkpoint_interval / kChunk);
        int left = Keep ? every - shared.first_chunk % every : 0;  // chunks to the next checkpoint
        int64_t number = Keep ? shared.checkpoint : 0;
        for (int c = 0; c < chunks; ++c) {
            start(c);
            finish(c);
            wait_all();
            if (!Keep || --left > 0) continue;
            if (!last || c + 1 < chunks || shared.tail == kChunk) keep_state(s, column, number++);
            left = every;
        }
    } else if (chunks > 0) {
        start(0);
        for (int c = 0; c + 1 < chunks; ++c) {
            finish(c);
            start(c + 1);
        }
        finish(chunks - 1);
        wait_all();
    }
    store_state(s, column);
}

// ---- The block ----

template <typename T, int PanelsK, int Halves, bool Summary, bool Keep>
__device__ __forceinline__ void run_scan(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                                         const gdelta_hopper_maps &maps) {
    using Shared = ScanShared<PanelsK, Halves, Summary>;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    const gdelta_shape &shape = call.shape;
    grid_release();
    if (is_malformed(work.malformed)) return;  // prepare has waited for that

    unsigned blocks = static_cast<unsigned>(segment_blocks(shape, work.choice, Halves, Summary));
    unsigned job = blockIdx.x / blocks, tiles = static_cast<unsigned>(scan_tiles(shape, Halves, Summary));
    int segment = static_cast<int>(blockIdx.x % blocks / tiles);
    int first_panel = static_cast<int>(blockIdx.x % tiles) * Halves;
    int head = static_cast<int>(job % static_cast<unsigned>(shape.heads_o));
    int64_t n = job / static_cast<unsigned>(shape.heads_o);
    bool has_value = !Summary || first_panel * 64 < shape.dim_v;
    if (Summary && segment == 0 && !has_value) return;  // the first starts from the caller's state: N is all
    if (threadIdx.x == 0) {
        bool reporter = !Summary && head == 0 && segment == 0 && first_panel == 0;
        shared.sequence = find_sequence(shape, call.in, call.final, n, head, reporter);
        shared.head = head;
        shared.head_q = head_of(shape, head, shape.heads_q);
        shared.head_k = head_of(shape, head, shape.heads_k);
        shared.head_v = head_of(shape, head, shape.heads_v);
        shared.segment = segment;
        shared.first_panel = first_panel;
        int64_t length = shared.sequence.length;
        int rest = static_cast<int>(length % kChunk);
        shared.tail = rest ? rest : kChunk;
        shared.first_chunk = static_cast<int>((length + kChunk - 1) / kChunk * segment / work.choice.segments);
        shared.number = chunk_number(shape, n, shared.sequence.begin, shared.first_chunk);
        if constexpr (Keep) {
            int64_t tokens = static_cast<int64_t>(shared.first_chunk) * kChunk + call.checkpoint_interval;
            shared.checkpoint = checkpoint_number(shape, shared.sequence, tokens, call.checkpoint_interval);
        }
        auto init = [](auto &barriers, uint32_t count) {
            for (uint64_t &barrier : barriers) mbarrier_init(shared_address(&barrier), count);
        };
        init(shared.k_full, 1), init(shared.k_empty, kWarpgroup * Halves);
        init(shared.x_full, 1), init(shared.x_empty, kWarpgroup * Halves);
        if constexpr (!Summary) {
            auto &out = shared.output;
            init(out.q_full, 1), init(out.q_empty, kWarpgroup);
            init(out.z_full, 1), init(out.z_empty, kWarpgroup);
            init(out.s_full, kWarpgroup * Halves), init(out.s_empty, kWarpgroup);
            init(out.w_full, kWarpgroup * Halves), init(out.w_empty, kWarpgroup);
        }
        fence_barrier_init();
    }
    for (int i = threadIdx.x; !has_value && i < 2 * static_cast<int>(kPanelBytes) / 16; i += blockDim.x) {
        constexpr int kPieces = kPanelBytes / 16;
        st_shared(shared_address(shared.keys[i / kPieces].v) + i % kPieces * 16, make_uint4(0, 0, 0, 0));
    }
    if constexpr (!Summary) {
        constexpr int kPieces = sizeof shared.output.z / 16;
        for (int i = threadIdx.x; i < kPieces; i += blockDim.x) {
            st_shared(shared_address(shared.output.z) + 16 * i, make_uint4(0, 0, 0, 0));
        }
    }
    fence_async_shared();
    __syncthreads();
    grid_wait();
    const Sequence &sequence = shared.sequence;
    int64_t all = (sequence.length + kChunk - 1) / kChunk;
    int end = static_cast<int>(all * (segment + 1) / work.choice.segments);
    if (sequence.skip) {
        if (Summary || !call.o.data) return;
        int columns = 64 * Halves;
        int64_t to = static_cast<int64_t>(end) * kChunk;
        if (to > sequence.length) to = sequence.length;
        to -= static_cast<int64_t>(shared.first_chunk) * kChunk;
        int64_t first = first_of(call.o, sequence, head) +
                        static_cast<int64_t>(shared.first_chunk) * kChunk * call.o.token + first_panel * 64;
        for (int64_t i = threadIdx.x; i < to * columns; i += blockDim.x) {
            store_element(call.o.data, call.o.dtype, first + i / columns * call.o.token + i % columns, 0.0f);
        }
        return;
    }
    Scan<T, PanelsK, Halves, Summary> scan = {
        call, work, maps, shared, end - shared.first_chunk, segment + 1 == work.choice.segments, has_value};
    int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);  // uniform, and known to be
    if (role == 0) {
        registers_decrease<kLoaderRegisters>();
        scan.loader();
    } else if constexpr (Summary) {
        registers_increase<kSummaryRegisters>();
        scan.template chain<false>(0);
    } else if (role <= kOutputs<Halves>) {
        Halves == 1 ? registers_decrease<kOutputRegisters1>() : registers_increase<kOutputRegisters2>();
        scan.output(role - 1);
    } else {
        Halves == 1 ? registers_increase<kChainRegisters1>() : registers_increase<kChainRegisters2>();
        scan.template chain<Keep>(role - 1 - kOutputs<Halves>);
    }
}

// With Keep, a call that has checkpoints: a store in the loop of all calls costs those without 8%, measured.
template <typename T, int PanelsK, int Halves, bool Keep>
__global__ void __launch_bounds__(512, 1)
    hopper_scan(const __grid_constant__ gdelta_forward_call call, const __grid_constant__ gdelta_hopper_work work,
                const __grid_constant__ gdelta_hopper_maps maps) {
    run_scan<T, PanelsK, Halves, false, Keep>(call, work, maps);
}

// ---- Segments ----

template <typename T, int PanelsK>
__global__ void __launch_bounds__(256, 2)
    hopper_summary(const __grid_constant__ gdelta_forward_call call, const __grid_constant__ gdelta_hopper_work work,
                   const __grid_constant__ gdelta_hopper_maps maps) {
    run_scan<T, PanelsK, 1, true, false>(call, work, maps);
}

template <int K>
struct MergeShared {
    static constexpr int kRows = 16;
    __align__(128) float m[2][K][K];
    float state[kRows][K];
    uint64_t full[2];
};

// S_p+1 = M_p S_p + N_p, in the place of N. Grid: x = (job, 16 rows of V). Block: a thread makes 4 rows of 2 columns.
template <int K>
__global__ void __launch_bounds__(2 * K)
    hopper_merge(const __grid_constant__ gdelta_shape shape, const __grid_constant__ gdelta_hopper_work work) {
    using Shared = MergeShared<K>;
    constexpr int kRows = 4;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    grid_release();
    if (is_malformed(work.malformed)) return;
    unsigned tiles = static_cast<unsigned>(shape.dim_v / Shared::kRows);
    int64_t job = blockIdx.x / tiles, step = static_cast<int64_t>(shape.dim_v) * K;
    int column = threadIdx.x % (K / 2) * 2, row = threadIdx.x / (K / 2) * kRows, count = work.choice.segments - 1;
    float *n = work.n + job * count * step + (blockIdx.x % tiles * Shared::kRows + row) * K + column;
    const float *m = work.m + job * count * K * K;
    auto load = [&](int p) {
        uint32_t barrier = shared_address(&shared.full[p % 2]);
        mbarrier_arrive_expect(barrier, sizeof shared.m[0]);
        bulk_load(shared_address(shared.m[p % 2]), m + static_cast<int64_t>(p) * K * K, sizeof shared.m[0], barrier);
    };
    if (threadIdx.x == 0) {
        for (uint64_t &barrier : shared.full) mbarrier_init(shared_address(&barrier), 1);
        fence_barrier_init();
    }
    __syncthreads();
    grid_wait();
    if (threadIdx.x == 0) {
        for (int p = 1; p < 3 && p < count; ++p) load(p);
    }
    float2 s[kRows], next[kRows], ahead[kRows];
    auto get = [&](float2(&to)[kRows], const float *from) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) to[i] = *reinterpret_cast<const float2 *>(from + i * K);
    };
    get(s, n);
    if (count > 1) get(ahead, n + step);
    for (int p = 1; p < count; ++p) {
        n += step;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            next[i] = ahead[i];
            *reinterpret_cast<float2 *>(&shared.state[row + i][column]) = s[i];
        }
        if (p + 1 < count) get(ahead, n + step);
        __syncthreads();
        mbarrier_wait(shared_address(&shared.full[p % 2]), (p - 1) / 2 & 1);
#pragma unroll 4
        for (int j = 0; j < K; j += 4) {
            float2 x[4];
#pragma unroll
            for (int d = 0; d < 4; ++d) x[d] = *reinterpret_cast<const float2 *>(&shared.m[p % 2][j + d][column]);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                float4 four = *reinterpret_cast<const float4 *>(&shared.state[row + i][j]);
                float y[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    next[i].x = fmaf(y[d], x[d].x, next[i].x), next[i].y = fmaf(y[d], x[d].y, next[i].y);
                }
            }
        }
        __syncthreads();
        if (threadIdx.x == 0 && p + 2 < count) load(p + 2);
#pragma unroll
        for (int i = 0; i < kRows; ++i) *reinterpret_cast<float2 *>(n + i * K) = s[i] = next[i];
    }
}

// ---- Launch ----

cudaError_t launch_hopper_merge(bool early, const gdelta_shape &shape, const gdelta_hopper_work &work, int64_t jobs,
                                gdelta_stream stream) {
    auto launch_merge = [&](auto k) {
        using Shared = MergeShared<k>;
        return launch_as(early, hopper_merge<k>, jobs * (shape.dim_v / Shared::kRows), 2 * k, sizeof(Shared), stream,
                         shape, work);
    };
    return shape.dim_k == 128 ? launch_merge(std::integral_constant<int, 128>{})
                              : launch_merge(std::integral_constant<int, 64>{});
}

template <typename T, int PanelsK>
static cudaError_t launch_segments(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                                   const gdelta_hopper_maps &maps, gdelta_stream stream) {
    using Shared = ScanShared<PanelsK, 1, true>;
    static_assert(sizeof(Shared) <= 228 * 1024 / 2 - 1024, "two blocks a multiprocessor");
    int64_t jobs = call.shape.sequences * call.shape.heads_o;
    cudaError_t error = launch_as(starts_early(call), hopper_summary<T, PanelsK>,
                                  jobs * segment_blocks(call.shape, work.choice, 1, true), 256, sizeof(Shared), stream,
                                  call, work, maps);
    if (error != cudaSuccess) return error;
    return launch_hopper_merge(starts_early(call), call.shape, work, jobs, stream);
}

template <typename T, int PanelsK, int Halves, bool Keep>
static cudaError_t launch_scan(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                               const gdelta_hopper_maps &maps, gdelta_stream stream) {
    using Shared = ScanShared<PanelsK, Halves, false>;
    static_assert(sizeof(Shared) <= 232448, "227 KB a block");
    int64_t jobs = call.shape.sequences * call.shape.heads_o;
    return launch_as(starts_early(call), hopper_scan<T, PanelsK, Halves, Keep>,
                     jobs * segment_blocks(call.shape, work.choice, Halves, false), 512, sizeof(Shared), stream, call,
                     work, maps);
}

}  // namespace gdelta

int gdelta_launch_hopper_forward(const gdelta_forward_call *call, const gdelta_hopper_work *work,
                                 const gdelta_hopper_maps *maps, gdelta_stream stream) {
    using namespace gdelta;
    cudaError_t error = static_cast<cudaError_t>(launch_check(call->shape, call->in, work->malformed, stream));
    if (error == cudaSuccess) error = launch_hopper_prepare(*call, *work, *maps, stream);
    if (error != cudaSuccess) return error;
    return with_instance(call->shape, call->in, [&](auto *type, auto panels) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (work->choice.segments > 1) {
            cudaError_t error = launch_segments<T, panels>(*call, *work, *maps, stream);
            if (error != cudaSuccess) return error;
        }
        bool keep = call->checkpoints.data && call->checkpoint_interval <= call->shape.tokens;
        if (call->shape.dim_v / 64 / work->choice.split_v == 2) {
            return keep ? launch_scan<T, panels, 2, true>(*call, *work, *maps, stream)
                        : launch_scan<T, panels, 2, false>(*call, *work, *maps, stream);
        }
        return keep ? launch_scan<T, panels, 1, true>(*call, *work, *maps, stream)
                    : launch_scan<T, panels, 1, false>(*call, *work, *maps, stream);
    });
}
