// Hopper, first kernel: what the chunks need before any state is known. A = strictly_lower(beta_i k_i.k_j) and
// p = scale lower(q_i.k_j), q and k normalised; t = (I + A)^-1; G the sum of log gates from the chunk's first token on.
//
//   X_j = exp(G_last - G_j) (t^T k)_j                         [64, K]
//   Z_ij = exp(G_i - G_j) (p t)_ij, j <= i                    [64, 64]
//   row table (chunk.cuh): beta, exp of G, norm factors
//   and for backward, with l = strictly_lower(k_i.k_j):
//   R_ij = 1, i = j;  -exp(G_i - G_j) (l t)_ij beta_j, j < i  [64, 64]
//   p and l.
//
// R is the inverse of I + l beta, decayed, without a quotient by beta.
//
// Tiles t, p, l and the k of X are fp16: its three bits more than bf16's take the error of alike keys from
// 9e-3 to 3e-3. The norm factors r multiply fp32 sums; X, Z and R are rounded once, to the problem's type (Range in
// chunk.cuh keeps fp16 finite).
//
// Grid: x = (chunk, query head, eight of its output heads), the last fastest. Block: one warpgroup; it takes its output
// heads in turn. K K^T and Q K^T are made once a block. Products of 16-bit operands in fp32; the inverse as
// rule/inverse.cuh says.
#include "kernels/hopper/launch.cuh"
#include "kernels/hopper/ring.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/rule/inverse.cuh"

namespace gdelta {

template <int PanelsK>
struct __align__(1024) PrepareShared {
    unsigned char k[PanelsK * kPanelBytes];  // then fp16 and normalised
    unsigned char q[PanelsK * kPanelBytes];  // then X; backward: p before
    unsigned char t[kPanelBytes];            // then Z in its place
    InverseScratch scratch;                  // backward: l before, R after
    float beta[kHopperPrepareHeads][kChunk], log[kHopperPrepareHeads][kChunk];
    float norm_k[kChunk], norm_q[kChunk];
    uint64_t loaded;
    Chunk chunk;
};

// The norm factor of a row in shared memory.
template <typename T, int PanelsK>
__device__ __forceinline__ float tile_row_norm(const gdelta_shape &shape, uint32_t tile, int row) {
    if (shape.l2norm == GDELTA_L2NORM_NONE) return 1.0f;
    float sum[4] = {};
#pragma unroll 4  // all at once spill
    for (int piece = 0; piece < 8 * PanelsK; ++piece) {
        uint4 x = ld_shared(tile + piece / 8 * kPanelBytes + panel_offset(row, piece % 8));
        uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 pair = unpack<T>(words[i]);
            sum[i] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum[i]));
        }
    }
    float eps = static_cast<float>(shape.l2norm_eps), total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    total = shape.l2norm == GDELTA_L2NORM_ADD_EPS ? total + eps : fmaxf(total, eps);
    return __frcp_rn(__fsqrt_rn(total));
}

// One warp: beta and the sums of gates of one output head. Lane l has tokens 2 l and 2 l + 1; tokens past the end have
// beta 0 and decay 1.
__device__ __forceinline__ void make_gates(const gdelta_shape &shape, const gdelta_inputs &in, const Chunk &chunk,
                                           int head, float *beta, float *log_g) {
    int lane = threadIdx.x % 32;
    Gates gates[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // all loads before what waits for them
        int64_t token = chunk.begin + min(2 * lane + i, chunk.rows - 1);
        gates[i].load(in, offset_of(in.g, chunk.batch, token, head), offset_of(in.beta, chunk.batch, token, head));
    }
    GateParameters parameters = load_gate_parameters(in, head);
    float g[2] = {0.0f, 0.0f}, b[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (2 * lane + i >= chunk.rows) continue;
        g[i] = gates[i].log2_decay(shape, in, parameters);
        b[i] = gates[i].beta_value(shape, in);
    }
    float sum = g[0] + g[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float before = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += before;
    }
    reinterpret_cast<float2 *>(beta)[lane] = make_float2(b[0], b[1]);
    reinterpret_cast<float2 *>(log_g)[lane] = make_float2(sum - g[1], sum);
}

// The same warp, once the norm factors are there: the row table.
template <typename T>
__device__ __forceinline__ void make_rows(const gdelta_shape &shape, const float *norm_k, const float *norm_q,
                                          const float *beta, const float *log_g, float *rows) {
    int lane = threadIdx.x % 32;
    float2 b = reinterpret_cast<const float2 *>(beta)[lane], log = reinterpret_cast<const float2 *>(log_g)[lane];
    float2 rk = reinterpret_cast<const float2 *>(norm_k)[lane], rq = reinterpret_cast<const float2 *>(norm_q)[lane];
    float2 e = {exp2_fast(log.x), exp2_fast(log.y)};
    float scale = static_cast<float>(shape.scale) * Range<T>::kUp;
    reinterpret_cast<float4 *>(rows + kRowGates)[lane] =
        make_float4(Range<T>::kDown * b.x, Range<T>::kDown * b.y, b.x * e.x * rk.x, b.y * e.y * rk.y);
    reinterpret_cast<float2 *>(rows + kRowOutput)[lane] = make_float2(scale * e.x * rq.x, scale * e.y * rq.y);
    reinterpret_cast<float2 *>(rows + kRowNorm)[lane] = rk;
    reinterpret_cast<float2 *>(rows + kRowLog)[lane] = log;
    if (lane == 31) reinterpret_cast<float4 *>(rows + kRowDecay)[0] = make_float4(e.y, 0.0f, 0.0f, 0.0f);
}

// Half the threads a panel, or half a panel: the tile times the rows' factors, as fp16 in its place.
template <typename T, int PanelsK>
__device__ __forceinline__ void scale_rows(uint32_t tile, const float *factor) {
    int row = threadIdx.x % kChunk, first = threadIdx.x / kChunk * 4 * PanelsK;
    float f = factor[row];
#pragma unroll 2  // all at once spill
    for (int i = 0; i < 4 * PanelsK; ++i) {
        uint32_t at = tile + (first + i) / 8 * kPanelBytes + panel_offset(row, (first + i) % 8);
        uint4 x = ld_shared(at);
        uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 pair = unpack<T>(words[j]);
            words[j] = pack<__half>(f * pair.x, f * pair.y);
        }
        st_shared(at, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

enum { kPrepareBarrier = 1 };

// l as operand, from the fragments of K K^T.
__device__ __forceinline__ void strictly_lower(const float (&kk)[32], uint32_t (&l)[16]) {
    const Lane p = lane_of_warpgroup();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int column = 16 * s + i / 4 * 8 + p.column + i % 2, row = p.row + i / 2 % 2 * 8;
            y[i] = column < row ? kk[8 * s + i] : 0.0f;
        }
        pack_square(y, 1.0f, 1.0f, reinterpret_cast<uint32_t(&)[4]>(l[4 * s]));
    }
}

// A 64 x 64 tile: f(row, column, decay, x) of the fragments x, decay being exp(G_row - G_column + up); zeros above the
// diagonal, whose blocks of 16 x 16 are zero already.
template <typename T, typename F>
__device__ __forceinline__ void put_lower(uint32_t tile, const float (&x)[32], const float *log_g, float up, F f) {
    const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
    float upper = log_g[p.row] + up, lower = log_g[p.row + 8] + up;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        if (s > p.warp) continue;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = 16 * s + i / 2 * 8 + p.column, row = p.row + i % 2 * 8, at = 8 * s + 2 * i;
            float2 log = *reinterpret_cast<const float2 *>(&log_g[column]);
            float from = i % 2 ? lower : upper;
            float left = f(row, column, exp2_fast(from - log.x), x[at]),
                  right = f(row, column + 1, exp2_fast(from - log.y), x[at + 1]);
            words[i] = pack<T>(s < p.warp || column <= row ? left : 0.0f, s < p.warp || column < row ? right : 0.0f);
        }
        stmatrix_x4(block_at(tile, p, s), words[0], words[1], words[2], words[3]);
    }
}

// R of one output head into `tile`.
template <typename T>
__device__ __forceinline__ void make_r(const float (&kk)[32], const float *beta, const float *log_g, uint32_t tile_t,
                                       uint32_t tile) {
    uint32_t l[16];
    float acc[32];
    strictly_lower(kk, l);
    wgmma_hold(l);
    wgmma_hold(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma<__half, kMajorMN>(acc, l + 4 * step, panel_mn_major(tile_t) + step * kStepMN, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(acc);
    wgmma_hold(l);
    put_lower<T>(tile, acc, log_g, 0.0f, [&](int row, int column, float decay, float x) {
        return column == row ? 1.0f : -decay * x * beta[column];
    });
}

// X and Z of one output head, from t and the normalised K in shared memory and the fragments of p. X takes `tile_x`; Z,
// 2^up_z larger, the place of t.
template <typename T, int PanelsK>
__device__ __forceinline__ void make_xz(uint32_t (&p_rows)[16], const float *log_g, uint32_t tile_t, uint32_t tile_k,
                                        uint32_t tile_x, float up_z) {
    const Lane p = lane_of_warpgroup(opaque(threadIdx.x));
    // One product at a time, for registers: X by panels of K, then Z.
    float acc[32];
    auto multiply = [&](int panel) {
        float(&x)[32] = acc;
        wgmma_hold(x);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma<__half, kMajorMN, kMajorMN>(x, panel_mn_major(tile_t) + step * kStepMN,
                                              panel_mn_major(tile_k + panel * kPanelBytes) + step * kStepMN, step > 0);
        }
        wgmma_commit();
    };
    float last = log_g[kChunk - 1] + Range<T>::kLogUp;
    float e_upper = exp2_fast(last - log_g[p.row]), e_lower = exp2_fast(last - log_g[p.row + 8]);
    auto put = [&](const float(&x)[32], int panel) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const float *y = &x[8 * s];
            stmatrix_x4(block_at(tile_x + panel * kPanelBytes, p, s), pack<T>(e_upper * y[0], e_upper * y[1]),
                        pack<T>(e_lower * y[2], e_lower * y[3]), pack<T>(e_upper * y[4], e_upper * y[5]),
                        pack<T>(e_lower * y[6], e_lower * y[7]));
        }
    };
#pragma unroll 1
    for (int i = 0; i < PanelsK; ++i) {
        multiply(i);
        wgmma_wait<0>();
        wgmma_hold(acc);
        put(acc, i);
    }
    float(&z)[32] = acc;
    wgmma_hold(p_rows);
    wgmma_hold(z);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        wgmma<__half, kMajorMN>(z, p_rows + 4 * step, panel_mn_major(tile_t) + step * kStepMN, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(z);
    wgmma_hold(p_rows);
    named_barrier(kPrepareBarrier, 128);  // all warps have read t
    put_lower<T>(tile_t, z, log_g, up_z, [](int, int, float decay, float x) { return decay * x; });
    fence_async_shared();
    named_barrier(kPrepareBarrier, 128);
}

template <typename T, int PanelsK, bool Backward>
__global__ void __launch_bounds__(128, Backward ? 3 : 4)  // R takes registers
    hopper_prepare(const __grid_constant__ gdelta_shape shape, const __grid_constant__ gdelta_inputs in,
                   const __grid_constant__ gdelta_hopper_work work, const __grid_constant__ gdelta_tensor_map map_k,
                   const __grid_constant__ gdelta_tensor_map map_q) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    PrepareShared<PanelsK> &shared = *reinterpret_cast<PrepareShared<PanelsK> *>(shared_bytes);
    constexpr uint32_t kTile = PanelsK * kPanelBytes;
    if (is_malformed(work.malformed)) return;

    int group = shape.heads_o / shape.heads_q;
    unsigned batches = static_cast<unsigned>((group + kHopperPrepareHeads - 1) / kHopperPrepareHeads);
    unsigned block = blockIdx.x / batches, heads_q = static_cast<unsigned>(shape.heads_q);
    int64_t number = block / heads_q;
    int head_q = static_cast<int>(block % heads_q);
    int first = static_cast<int>(blockIdx.x % batches) * kHopperPrepareHeads;
    int count = min(group - first, static_cast<int>(kHopperPrepareHeads));
    uint32_t tile_k = shared_address(shared.k), tile_q = shared_address(shared.q), tile_t = shared_address(shared.t),
             tile_r = shared_address(shared.scratch.a);
    uint32_t loaded = shared_address(&shared.loaded);
    if (threadIdx.x < 32) {
        Chunk chunk = find_chunk(shape, in, number);
        if (threadIdx.x == 0) {
            shared.chunk = chunk;
            mbarrier_init(loaded, 1);
            fence_barrier_init();
            if (chunk.rows) {
                mbarrier_arrive_expect(loaded, 2 * kTile);
                int token = static_cast<int>(chunk.begin), batch = static_cast<int>(chunk.batch);
                for (int i = 0; i < PanelsK; ++i) {
                    bulk_load_tensor(tile_k + i * kPanelBytes, &map_k, loaded, token, key_head(shape, head_q), batch,
                                     i);
                    bulk_load_tensor(tile_q + i * kPanelBytes, &map_q, loaded, token, head_q, batch, i);
                }
            }
        }
    }
    for (int i = threadIdx.x; i < static_cast<int>(kPanelBytes) / 16; i += 128) {
        st_shared(tile_t + 16 * i, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
    const Chunk chunk = shared.chunk;
    if (!chunk.rows) return;
    int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int i = warp; i < count; i += 4) {
        make_gates(shape, in, chunk, head_in_group(shape, head_q, first + i), shared.beta[i], shared.log[i]);
    }
    mbarrier_wait(loaded, 0);
    if (shape.packed && chunk.rows < kChunk) {
        clear_rows(tile_k, PanelsK, chunk.rows, threadIdx.x, 128);
        clear_rows(tile_q, PanelsK, chunk.rows, threadIdx.x, 128);
        __syncthreads();
    }

    Lane p = lane_of_warpgroup();
    float kk[32];
    uint32_t p_rows[16];  // p, as fp16 operand
    {
        float qk[32];
        wgmma_hold(kk);
        wgmma_hold(qk);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            uint64_t k = panel_k_major(tile_k + step / 4 * kPanelBytes) + step % 4 * kStepK;
            wgmma<T, kMajorK, kMajorK>(kk, k, k, step > 0);
        }
#pragma unroll
        for (int step = 0; step < 4 * PanelsK; ++step) {
            uint64_t k = panel_k_major(tile_k + step / 4 * kPanelBytes) + step % 4 * kStepK;
            uint64_t q = panel_k_major(tile_q + step / 4 * kPanelBytes) + step % 4 * kStepK;
            wgmma<T, kMajorK, kMajorK>(qk, q, k, step > 0);
        }
        wgmma_commit();
        {
            int row = threadIdx.x % kChunk;
            bool is_q = threadIdx.x >= kChunk;
            float norm = tile_row_norm<T, PanelsK>(shape, is_q ? tile_q : tile_k, row);
            (is_q ? shared.norm_q : shared.norm_k)[row] = norm;
        }
        wgmma_wait<0>();
        wgmma_hold(kk);
        wgmma_hold(qk);
        __syncthreads();  // norms and gates are there, and the tiles have been read

        float scale = static_cast<float>(shape.scale);
        float upper = shared.norm_q[p.row] * scale, lower = shared.norm_q[p.row + 8] * scale;
        float rk_upper = shared.norm_k[p.row], rk_lower = shared.norm_k[p.row + 8];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            float y[8];
            uint32_t(&f)[4] = reinterpret_cast<uint32_t(&)[4]>(p_rows[4 * s]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int column = 16 * s + i / 4 * 8 + p.column + i % 2, row = p.row + i / 2 % 2 * 8;
                float rk = shared.norm_k[column];
                y[i] = column <= row ? rk * qk[8 * s + i] : 0.0f;
                kk[8 * s + i] *= (i & 2 ? rk_lower : rk_upper) * rk;
            }
            pack_square(y, upper, lower, f);
        }
    }
    if constexpr (Backward) {
        uint32_t l[16];
        strictly_lower(kk, l);
        put_blocks(tile_q, p, p_rows);
        put_blocks(tile_r, p, l);
    }
    scale_rows<T, PanelsK>(tile_k, shared.norm_k);
    fence_async_shared();

#pragma unroll 1
    for (int i = warp; i < count; i += 4) {
        int64_t at = number * shape.heads_o + head_in_group(shape, head_q, first + i);
        make_rows<T>(shape, shared.norm_k, shared.norm_q, shared.beta[i], shared.log[i],
                     work.rows + at * kHopperRowFloats);
    }
    if (Backward && first == 0) {
        __syncthreads();
        if (threadIdx.x == 0) {
            int64_t at = (number * shape.heads_q + head_q) * kHopperTileBytes;
            bulk_store(static_cast<unsigned char *>(work.p) + at, tile_q, kPanelBytes);
            bulk_store(static_cast<unsigned char *>(work.l) + at, tile_r, kPanelBytes);
            bulk_commit();
        }
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        auto wait_stored = [&] {  // what was stored from shared memory may be written again
            if (threadIdx.x == 0) bulk_wait_read<0>();
            named_barrier(kPrepareBarrier, 128);
        };
        if constexpr (Backward) wait_stored();  // R stands where the inverse begins
        invert_lower(kk, shared.beta[i], shared.scratch, tile_t, kPrepareBarrier, [&] {
            if constexpr (!Backward) wait_stored();
        });
        int64_t at = number * shape.heads_o + head_in_group(shape, head_q, first + i);
        if constexpr (Backward) make_r<T>(kk, shared.beta[i], shared.log[i], tile_t, tile_r);
        make_xz<T, PanelsK>(p_rows, shared.log[i], tile_t, tile_k, tile_q, Backward ? 0.0f : Range<T>::kLogUp);
        if (threadIdx.x == 0) {
            bulk_store(static_cast<unsigned char *>(work.z) + at * kHopperTileBytes, tile_t, kPanelBytes);
            bulk_store(static_cast<unsigned char *>(work.x) + at * kTile, tile_q, kTile);
            if (Backward) bulk_store(static_cast<unsigned char *>(work.r) + at * kHopperTileBytes, tile_r, kPanelBytes);
            bulk_commit();
        }
    }
    if (threadIdx.x == 0) bulk_wait<0>();
}

cudaError_t launch_hopper_prepare(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                                  const gdelta_hopper_maps &maps, gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    int64_t chunks = gdelta_chunk_capacity(shape.sequences, shape.tokens, shape.rows, shape.packed);
    if (chunks == 0) return cudaSuccess;
    int group = shape.heads_o / shape.heads_q, batches = (group + kHopperPrepareHeads - 1) / kHopperPrepareHeads;
    return with_instance(shape, call.in, [&](auto *type, auto panels) {
        using T = std::remove_pointer_t<decltype(type)>;
        constexpr size_t kBytes = sizeof(PrepareShared<panels>);
        static_assert(kBytes <= 228 * 1024 / 4 - 1024, "four blocks a multiprocessor");
        auto kernel = work.l ? hopper_prepare<T, panels, true> : hopper_prepare<T, panels, false>;
        return launch(kernel, chunks * shape.heads_q * batches, 128, kBytes, stream, shape, call.in, work, maps.k,
                      maps.q);
    });
}

}  // namespace gdelta
