// Hopper forward, first kernel: what the chunks need before any state is known.
//
//   A = strictly_lower(beta_i k_i.k_j),  t = (I + A)^-1,  p = scale lower(q_i.k_j)     with q, k normalised
//   row table (chunk.cuh): beta, exp of the sums of gates, norm factors.
//
// Tiles t and p are fp16: its three bits more than bf16's take the error of alike keys from 9e-3 to 3e-3. No normalised
// row is rounded here: the norm factors r multiply fp32 sums.
//
// Grid: x = (chunk, query head), the head fastest. Block: one warpgroup; it takes the output heads of its query head in
// turn. K K^T and Q K^T are made once a block. Products of 16-bit operands in fp32; the inverse as rule/inverse.cuh
// says.
//
// Shared memory: K and Q tiles, which the inverse's scratch and p take over when the products are done; two t tiles,
// one being written while the copy engine stores the other.
#include "kernels/hopper/chunk.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/rule/inverse.cuh"

namespace gdelta {

template <int PanelsK>
struct __align__(1024) PrepareShared {
    struct Later {
        InverseScratch scratch;
        __align__(1024) unsigned char p[kPanelBytes], l[kPanelBytes];
    };
    union {
        unsigned char kq[2][PanelsK * kPanelBytes];
        Later later;
    };
    __align__(1024) unsigned char t[2][kPanelBytes];
    float beta[4][kChunk];
    float norm_k[kChunk], norm_q[kChunk];
    uint64_t loaded;
    Chunk chunk;
};

// The norm factor of a row in shared memory.
template <typename T, int PanelsK>
__device__ __forceinline__ float tile_row_norm(const gdelta_shape &shape, uint32_t tile, int row) {
    if (shape.l2norm == GDELTA_L2NORM_NONE) return 1.0f;
    float sum[4] = {};
#pragma unroll
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

// One warp: the row table of one output head. Lane l has tokens 2 l and 2 l + 1; tokens past the end have beta 0 and
// decay 1.
template <typename T>
__device__ __forceinline__ void make_rows(const gdelta_shape &shape, const gdelta_inputs &in, const Chunk &chunk,
                                          int head, const float *norm_k, const float *norm_q, float *beta,
                                          float *rows) {
    int lane = threadIdx.x % 32;
    GateParameters parameters = load_gate_parameters(in, head);
    float g[2] = {0.0f, 0.0f}, b[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int64_t token = chunk.begin + 2 * lane + i;
        if (2 * lane + i >= chunk.rows) continue;
        Gates gates;
        gates.load(in, offset_of(in.g, chunk.batch, token, head), offset_of(in.beta, chunk.batch, token, head));
        g[i] = gates.log2_decay(shape, in, parameters);
        b[i] = gates.beta_value(shape, in);
    }
    float sum = g[0] + g[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float before = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += before;
    }
    float last = __shfl_sync(0xffffffffu, sum, 31), log[2] = {sum - g[1], sum};
    float e[2] = {exp2_fast(log[0]), exp2_fast(log[1])};
    float2 rk = reinterpret_cast<const float2 *>(norm_k)[lane], rq = reinterpret_cast<const float2 *>(norm_q)[lane];
    float scale = static_cast<float>(shape.scale) * Range<T>::kUp;
    reinterpret_cast<float2 *>(beta)[lane] = make_float2(b[0], b[1]);
    reinterpret_cast<float4 *>(rows + kRowGates)[lane] =
        make_float4(Range<T>::kDown * b[0], Range<T>::kDown * b[1], b[0] * e[0] * rk.x, b[1] * e[1] * rk.y);
    reinterpret_cast<float2 *>(rows + kRowOutput)[lane] = make_float2(scale * e[0] * rq.x, scale * e[1] * rq.y);
    reinterpret_cast<float2 *>(rows + kRowNorm)[lane] = rk;
    reinterpret_cast<float2 *>(rows + kRowLog)[lane] = make_float2(log[0], log[1]);
    if (lane == 0) reinterpret_cast<float4 *>(rows + kRowDecay)[0] = make_float4(exp2_fast(last), 0.0f, 0.0f, 0.0f);
}

template <typename T, int PanelsK>
__global__ void __launch_bounds__(128, 4)
    hopper_prepare(const __grid_constant__ gdelta_shape shape, const __grid_constant__ gdelta_inputs in,
                   const __grid_constant__ gdelta_hopper_work work, const __grid_constant__ gdelta_tensor_map map_k,
                   const __grid_constant__ gdelta_tensor_map map_q) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    PrepareShared<PanelsK> &shared = *reinterpret_cast<PrepareShared<PanelsK> *>(shared_bytes);
    constexpr uint32_t kTile = PanelsK * kPanelBytes;
    if (is_malformed(work.malformed)) return;

    int64_t number = blockIdx.x / static_cast<unsigned>(shape.heads_q);
    int head_q = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.heads_q));
    int group = shape.heads_o / shape.heads_q;
    uint32_t tile_k = shared_address(shared.kq[0]), tile_q = shared_address(shared.kq[1]);
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
    for (int i = threadIdx.x; i < 2 * static_cast<int>(kPanelBytes) / 16; i += 128) {
        reinterpret_cast<uint4 *>(shared.t)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    const Chunk chunk = shared.chunk;
    if (!chunk.rows) return;
    mbarrier_wait(loaded, 0);
    if (shape.packed && chunk.rows < kChunk) {
        clear_rows(tile_k, 2 * PanelsK, chunk.rows, threadIdx.x, 128);
        __syncthreads();
    }

    Lane p = lane_of_warpgroup();
    float kk[32], qk[32];
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
    __syncthreads();  // norms are there, and the tiles are free

    uint32_t tile_p = shared_address(shared.later.p), tile_l = shared_address(shared.later.l);
    {
        float scale = static_cast<float>(shape.scale);
        float upper = shared.norm_q[p.row] * scale, lower = shared.norm_q[p.row + 8] * scale;
        float rk_upper = shared.norm_k[p.row], rk_lower = shared.norm_k[p.row + 8];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int column = 16 * s + i / 4 * 8 + p.column + i % 2, row = p.row + i / 2 % 2 * 8;
                float rk = shared.norm_k[column];
                y[i] = column <= row ? rk * qk[8 * s + i] : 0.0f;
                kk[8 * s + i] *= (i & 2 ? rk_lower : rk_upper) * rk;
            }
            uint32_t f[4];
            pack_square(y, upper, lower, f);
            stmatrix_x4(block_at(tile_p, p, s), f[0], f[1], f[2], f[3]);
            if (work.l) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    int column = 16 * s + i / 4 * 8 + p.column + i % 2, row = p.row + i / 2 % 2 * 8;
                    y[i] = column < row ? kk[8 * s + i] : 0.0f;
                }
                pack_square(y, 1.0f, 1.0f, f);
                stmatrix_x4(block_at(tile_l, p, s), f[0], f[1], f[2], f[3]);
            }
        }
    }
    fence_async_shared();

    unsigned char *t_out = static_cast<unsigned char *>(work.t) + number * shape.heads_o * kHopperTileBytes;
#pragma unroll 1
    for (int i = 0; i < group; ++i) {
        if (i % 4 == 0) {
            if (i + p.warp < group) {
                int head = head_in_group(shape, head_q, i + p.warp);
                make_rows<T>(shape, in, chunk, head, shared.norm_k, shared.norm_q, shared.beta[p.warp],
                             work.rows + (number * shape.heads_o + head) * kHopperRowFloats);
            }
            __syncthreads();  // betas are there; so is p
            if (i == 0 && threadIdx.x == 0) {
                bulk_store(static_cast<unsigned char *>(work.p) + (number * shape.heads_q + head_q) * kHopperTileBytes,
                           tile_p, kPanelBytes);
                if (work.l) {
                    bulk_store(
                        static_cast<unsigned char *>(work.l) + (number * shape.heads_q + head_q) * kHopperTileBytes,
                        tile_l, kPanelBytes);
                }
                bulk_commit();
            }
        }
        uint32_t tile_t = shared_address(shared.t[i % 2]);
        invert_lower(kk, shared.beta[i % 4], shared.later.scratch, tile_t, 1, [&] {
            if (threadIdx.x == 0) bulk_wait_read<0>();  // the other tile may be written again
        });
        if (threadIdx.x == 0) {
            bulk_store(t_out + head_in_group(shape, head_q, i) * kHopperTileBytes, tile_t, kPanelBytes);
            bulk_commit();
        }
    }
    if (threadIdx.x == 0) bulk_wait<0>();
}

template <typename T, int PanelsK>
static cudaError_t launch_prepare(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                                  const gdelta_hopper_maps &maps, gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    int64_t chunks = gdelta_chunk_capacity(shape.sequences, shape.tokens, shape.rows, shape.packed);
    if (chunks == 0) return cudaSuccess;
    auto kernel = hopper_prepare<T, PanelsK>;
    int bytes = sizeof(PrepareShared<PanelsK>);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(chunks * shape.heads_q);
    config.blockDim = 128;
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, shape, call.in, work, maps.k, maps.q);
}

int launch_hopper_prepare(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                          const gdelta_hopper_maps &maps, gdelta_stream stream) {
    bool fp16 = call.in.q.dtype == GDELTA_DTYPE_FP16;
    if (call.shape.dim_k == 128) {
        return fp16 ? launch_prepare<__half, 2>(call, work, maps, stream)
                    : launch_prepare<__nv_bfloat16, 2>(call, work, maps, stream);
    }
    return fp16 ? launch_prepare<__half, 1>(call, work, maps, stream)
                : launch_prepare<__nv_bfloat16, 1>(call, work, maps, stream);
}

}  // namespace gdelta
