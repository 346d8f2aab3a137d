// Hopper, first kernel: what the chunks need before any state is known. A = strictly_lower(beta_i k_i.k_j) and
// p = scale lower(q_i.k_j), q and k normalised; t = (I + A)^-1; G the sum of log gates from the chunk's first token on.
//
//   X_j = exp(G_last - G_j) (t^T k)_j                         [64, K]; forward: times beta_j
//   Z_ij = exp(G_i - G_j) (p t)_ij, j <= i                    [64, 64]; forward: times beta_j, in squares (chunk.cuh)
//   row table (chunk.cuh): beta, exp of G, norm factors
//   and for backward, with l = strictly_lower(k_i.k_j):
//   R_ij = 1, i = j;  -exp(G_i - G_j) (l t)_ij beta_j, j < i  [64, 64]
//   p and l.
//
// R is the inverse of I + l beta, decayed, without a quotient by beta.
//
// Tiles t and p, and k where X is made, are fp16: its three bits more than bf16's take the error of alike keys from
// 9e-3 to 3e-3. The norm factors r multiply fp32 sums; X and Z are rounded once, to the problem's type (Range in
// chunk.cuh keeps fp16 finite).
//
// Grid: x = (chunk, query head, eight of its output heads), the last fastest. Block: four warps. Together they make
// what the heads share, K K^T, Q K^T and the normalised K, and leave it in shared memory as a warp's operands; then
// each takes heads of its own (two or four one head, and different rows of its results) and meets no other again: t
// stays in registers, transposed (rule/inverse.cuh), left operand of X = t^T k and right operand of p t.
#include "kernels/hopper/chunk.cuh"
#include "kernels/hopper/launch.cuh"
#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/rule/inverse.cuh"

namespace gdelta {

constexpr uint32_t kStripBytes = 16 * 128;  // 16 rows of a panel, what leaves at a time

// Left operands of all heads, transposed: blocks of 16 x 16 on and below the diagonal, the lane's elements.
using Operand = uint4[10][32];

struct ForwardOnly {};
struct BackwardOperand {
    Operand l;
};

template <int PanelsK, bool Backward>
struct __align__(1024) PrepareShared : std::conditional_t<Backward, BackwardOperand, ForwardOnly> {
    __align__(1024) unsigned char k[PanelsK * kPanelBytes];  // then fp16 and normalised
    union {
        unsigned char q[PanelsK * kPanelBytes];
        unsigned char strips[4][2][kStripBytes];  // of each warp
    };
    InverseInput kk;
    Operand p;
    float beta[kHopperPrepareHeads][kChunk], log[kHopperPrepareHeads][kChunk];
    float norm_k[kChunk], norm_q[kChunk];
    uint64_t loaded;
    Chunk chunk;
};

// The norm factors of a warp's 16 rows of a tile in shared memory: the diagonal of their products.
template <typename T, int PanelsK>
__device__ __forceinline__ void make_norms(const gdelta_shape &shape, uint32_t tile, float *norm) {
    const Lane p = lane_of_warpgroup();
    float upper[4] = {}, lower[4] = {};
#pragma unroll
    for (int s = 0; s < 4 * PanelsK; ++s) {
        uint32_t f[4];
        ldmatrix_x4(block_at(tile + s / 4 * kPanelBytes, p, s % 4), f);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            mma_k8<T>(upper, f[i], f[i + 1], f[i]);
            mma_k8<T>(lower, f[i], f[i + 1], f[i + 1]);
        }
    }
    if (p.lane / 8 != p.lane % 4) return;
    bool odd = p.lane & 4;
    float sum[2] = {odd ? upper[1] : upper[0], odd ? lower[3] : lower[2]}, eps = static_cast<float>(shape.l2norm_eps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float total = shape.l2norm == GDELTA_L2NORM_ADD_EPS ? sum[i] + eps : fmaxf(sum[i], eps);
        norm[p.row + 8 * i] = shape.l2norm == GDELTA_L2NORM_NONE ? 1.0f : rsqrtf(total);
    }
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
template <typename T, bool Backward>
__device__ __forceinline__ void make_rows(const gdelta_shape &shape, const float *norm_k, const float *norm_q,
                                          const float *beta, const float *log_g, float *rows) {
    int lane = threadIdx.x % 32;
    float2 b = reinterpret_cast<const float2 *>(beta)[lane], log = reinterpret_cast<const float2 *>(log_g)[lane];
    float2 rk = reinterpret_cast<const float2 *>(norm_k)[lane], rq = reinterpret_cast<const float2 *>(norm_q)[lane];
    float2 e = {exp2_fast(log.x), exp2_fast(log.y)};
    float scale = static_cast<float>(shape.scale) * Range<T>::kUp;
    float2 key = {e.x * rk.x, e.y * rk.y}, output = {scale * e.x * rq.x, scale * e.y * rq.y};
    float4 decay = {e.y, 0.0f, 0.0f, 0.0f};  // of lane 31
    if constexpr (Backward) {
        reinterpret_cast<float4 *>(rows + kRowGates)[lane] =
            make_float4(Range<T>::kDown * b.x, Range<T>::kDown * b.y, b.x * key.x, b.y * key.y);
        reinterpret_cast<float2 *>(rows + kRowOutput)[lane] = output;
        reinterpret_cast<float2 *>(rows + kRowNorm)[lane] = rk;
        reinterpret_cast<float2 *>(rows + kRowLog)[lane] = log;
        reinterpret_cast<float2 *>(rows + kRowNormQ)[lane] = rq;
        if (lane == 31) *reinterpret_cast<float4 *>(rows + kRowDecay) = decay;
    } else {
        reinterpret_cast<float2 *>(rows + kForwardKey)[lane] = key;
        reinterpret_cast<float2 *>(rows + kForwardOutput)[lane] = output;
        if (lane == 31) *reinterpret_cast<float4 *>(rows + kForwardDecay) = decay;
    }
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

// The way out of one warp: strips of 16 rows of a panel, two under way.
struct Outbox {
    uint32_t strips;
    int turn = 0;

    // Where the next strip may be written.
    __device__ __forceinline__ uint32_t next() {
        if (threadIdx.x % 32 == 0) bulk_wait_read<1>();
        __syncwarp();
        turn ^= kStripBytes;
        return strips + turn;
    }
    __device__ __forceinline__ void send(void *to, uint32_t strip, uint32_t bytes = kStripBytes) {
        fence_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            bulk_store(to, strip, bytes);
            bulk_commit();
        }
    }
};

// Block s of a strip, as fragments; or as those of its transpose.
__device__ __forceinline__ void put_block(uint32_t strip, int s, const Square &f) {
    int lane = threadIdx.x % 32;
    stmatrix_x4((strip + panel_offset(lane & 15, lane >> 4)) ^ static_cast<uint32_t>(32 * s), f[0], f[1], f[2], f[3]);
}
__device__ __forceinline__ void put_block_trans(uint32_t strip, int s, const Square &f) {
    int lane = threadIdx.x % 32;
    stmatrix_x4_trans((strip + panel_offset(lane & 15, lane >> 4)) ^ static_cast<uint32_t>(32 * s), f[0], f[2], f[1],
                      f[3]);
}

// Rows of X: strips `rows` of each panel. u = t^T, K normalised in shared memory.
template <typename T, int PanelsK, bool Backward>
__device__ __forceinline__ void make_x(const Square (&u)[10], const float *log_g, const float *beta, uint32_t tile_k,
                                       unsigned rows, Outbox &out, unsigned char *to) {
    int lane = threadIdx.x % 32;
    uint32_t block_k = tile_k + panel_offset(lane & 15, lane >> 4);
    float last = log_g[kChunk - 1] + Range<T>::kLogUp;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (!(rows >> j & 1)) continue;
        int row = 16 * j + lane / 4;
        float upper = exp2_fast(last - log_g[row]), lower = exp2_fast(last - log_g[row + 8]);
        if (!Backward) upper *= beta[row], lower *= beta[row + 8];
#pragma unroll 1
        for (int panel = 0; panel < PanelsK; ++panel) {
            float x[4][8] = {};
#pragma unroll
            for (int i = j; i < 4; ++i) {
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    uint32_t f[4];
                    ldmatrix_x4_trans((block_k ^ static_cast<uint32_t>(32 * s)) + panel * kPanelBytes + i * kStripBytes,
                                      f);
                    mma<__half>(reinterpret_cast<float(&)[4]>(x[s][0]), u[lower_block(i, j)], f[0], f[1]);
                    mma<__half>(reinterpret_cast<float(&)[4]>(x[s][4]), u[lower_block(i, j)], f[2], f[3]);
                }
            }
            uint32_t strip = out.next();
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const float(&y)[8] = x[s];
                Square f = {pack<T>(upper * y[0], upper * y[1]), pack<T>(lower * y[2], lower * y[3]),
                            pack<T>(upper * y[4], upper * y[5]), pack<T>(lower * y[6], lower * y[7])};
                put_block(strip, s, f);
            }
            out.send(to + panel * kPanelBytes + j * kStripBytes, strip);
        }
    }
}

// Columns of Z: squares from the diagonal down, made transposed, u p^T.
//
// Below the diagonal's squares exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j), m the last token of j's square: neither
// exceeds 1, and where one underflows so would the product.
template <typename T>
__device__ __forceinline__ void make_z(const Square (&u)[10], const float *log_g, const float *beta,
                                       const uint4 (*p)[32], unsigned columns, Outbox &out, unsigned char *to) {
    int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (!(columns >> j & 1)) continue;
        float z[4][8] = {};
#pragma unroll
        for (int i = j; i < 4; ++i) {
#pragma unroll
            for (int k = j; k <= i; ++k) {
                uint4 x = p[lower_block(i, k)][lane];
                mma<__half>(reinterpret_cast<float(&)[4]>(z[i][0]), u[lower_block(k, j)], x.x, x.y);
                mma<__half>(reinterpret_cast<float(&)[4]>(z[i][4]), u[lower_block(k, j)], x.z, x.w);
            }
        }
        float middle = log_g[16 * j + 15];
        float upper = log_g[16 * j + row] - Range<T>::kLogUp, lower = log_g[16 * j + 8 + row] - Range<T>::kLogUp;
        float beta_upper = beta[16 * j + row], beta_lower = beta[16 * j + 8 + row];
        float right_upper = beta_upper * exp2_fast(middle - upper),
              right_lower = beta_lower * exp2_fast(middle - lower);
        uint32_t strip = out.next();
#pragma unroll
        for (int i = j; i < 4; ++i) {
            float2 first = *reinterpret_cast<const float2 *>(&log_g[16 * i + column]);
            float2 second = *reinterpret_cast<const float2 *>(&log_g[16 * i + 8 + column]);
            float from[4] = {first.x, first.y, second.x, second.y};
            Square f = {};
            if (i > j) {
#pragma unroll
                for (int d = 0; d < 4; ++d) from[d] = exp2_fast(from[d] - middle);
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    float right = d % 2 ? right_lower : right_upper;
                    f[d] =
                        pack<T>(from[d / 2 * 2] * right * z[i][2 * d], from[d / 2 * 2 + 1] * right * z[i][2 * d + 1]);
                }
            } else {
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    if (d == 1) continue;  // above the diagonal
                    float log = d % 2 ? lower : upper, right = d % 2 ? beta_lower : beta_upper;
                    float a = exp2_fast(from[d / 2 * 2] - log) * right * z[i][2 * d];
                    float b = exp2_fast(from[d / 2 * 2 + 1] - log) * right * z[i][2 * d + 1];
                    f[d] = pack<T>(d == 2 || column >= row ? a : 0.0f, d == 2 || column + 1 >= row ? b : 0.0f);
                }
            }
            stmatrix_x4_trans(strip + (i - j) * kHopperSquareBytes + 16 * lane, f[0], f[1], f[2], f[3]);
        }
        out.send(to + lower_column(j), strip, (4 - j) * kHopperSquareBytes);
    }
}

// Rows of Z or R as a panel: strips `rows`, as make_z makes columns. R: columns times -beta, ones on the diagonal.
template <typename T, bool IsR>
__device__ __forceinline__ void make_tile(const Square (&u)[10], const float *log_g, const float *beta,
                                          const Operand &operand, unsigned rows, Outbox &out, unsigned char *to) {
    int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (!(rows >> i & 1)) continue;
        float z[4][8] = {};
#pragma unroll
        for (int k = 0; k <= i; ++k) {
            uint4 x = operand[lower_block(i, k)][lane];
#pragma unroll
            for (int j = 0; j <= k; ++j) {
                mma<__half>(reinterpret_cast<float(&)[4]>(z[j][0]), u[lower_block(k, j)], x.x, x.y);
                mma<__half>(reinterpret_cast<float(&)[4]>(z[j][4]), u[lower_block(k, j)], x.z, x.w);
            }
        }
        float2 first = *reinterpret_cast<const float2 *>(&log_g[16 * i + column]);
        float2 second = *reinterpret_cast<const float2 *>(&log_g[16 * i + 8 + column]);
        float from[4] = {first.x, first.y, second.x, second.y}, middle = i ? log_g[16 * i - 1] : 0.0f;
        uint32_t strip = out.next();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            Square f = {};
            if (j < i) {
                float right[2];
#pragma unroll
                for (int d = 0; d < 2; ++d) {
                    int at = 16 * j + row + 8 * d;
                    right[d] = exp2_fast(middle - log_g[at]) * (IsR ? -beta[at] : 1.0f);
                }
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    float a = exp2_fast(from[d / 2 * 2] - middle), b = exp2_fast(from[d / 2 * 2 + 1] - middle);
                    f[d] = pack<T>(a * right[d % 2] * z[j][2 * d], b * right[d % 2] * z[j][2 * d + 1]);
                }
            } else if (j == i) {
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    if (d == 1) continue;  // above the diagonal
                    float y[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        int at = row + d % 2 * 8, i_at = column + d / 2 * 8 + e;
                        float x = exp2_fast(from[d / 2 * 2 + e] - log_g[16 * j + at]) * z[j][2 * d + e];
                        if (IsR) x *= -beta[16 * j + at];
                        y[e] = i_at < at ? 0.0f : IsR && i_at == at ? 1.0f : x;
                    }
                    f[d] = pack<T>(y[0], y[1]);
                }
            }
            put_block_trans(strip, j, f);
        }
        out.send(to + i * kStripBytes, strip);
    }
}

template <typename T, int PanelsK, bool Backward>
__global__ void __launch_bounds__(128, Backward ? 3 : 4)
    hopper_prepare(const __grid_constant__ gdelta_shape shape, const __grid_constant__ gdelta_inputs in,
                   const __grid_constant__ gdelta_hopper_work work, const __grid_constant__ gdelta_tensor_map map_k,
                   const __grid_constant__ gdelta_tensor_map map_q) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    using Shared = PrepareShared<PanelsK, Backward>;
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    constexpr uint32_t kTile = PanelsK * kPanelBytes;
    grid_wait();  // for the check of cu_seqlens, so that whoever comes early after this kernel can trust it
    grid_release();
    if (is_malformed(work.malformed)) return;

    int group = shape.heads_o / shape.heads_q;
    unsigned batches = static_cast<unsigned>((group + kHopperPrepareHeads - 1) / kHopperPrepareHeads);
    unsigned block = blockIdx.x / batches, heads_q = static_cast<unsigned>(shape.heads_q);
    int64_t number = block / heads_q;
    int head_q = static_cast<int>(block % heads_q);
    int first = static_cast<int>(blockIdx.x % batches) * kHopperPrepareHeads;
    int count = min(group - first, static_cast<int>(kHopperPrepareHeads));
    uint32_t tile_k = shared_address(shared.k), tile_q = shared_address(shared.q);
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
    __syncthreads();
    const Chunk chunk = shared.chunk;
    if (!chunk.rows) return;
    int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and known to be
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

    Outbox out = {shared_address(shared.strips[warp])};
    {
        const Lane p = lane_of_warpgroup();
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
        make_norms<T, PanelsK>(shape, tile_k, shared.norm_k);
        make_norms<T, PanelsK>(shape, tile_q, shared.norm_q);
        wgmma_wait<0>();
        wgmma_hold(kk);
        wgmma_hold(qk);
        __syncthreads();  // norms and gates are there, and the tiles have been read

        float scale = static_cast<float>(shape.scale);
        float upper = shared.norm_q[p.row] * scale, lower = shared.norm_q[p.row + 8] * scale;
        float rk_upper = shared.norm_k[p.row], rk_lower = shared.norm_k[p.row + 8];
        uint32_t strip_p = 0, strip_l = 0;
        if (Backward && first == 0) strip_p = out.next(), strip_l = out.next();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            float y[8], l[8];
            Square f = {};
            if (s <= warp) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    int column = 16 * s + i / 4 * 8 + p.column + i % 2, row = p.row + i / 2 % 2 * 8;
                    float rk = shared.norm_k[column];
                    y[i] = s < warp || column <= row ? rk * qk[8 * s + i] : 0.0f;
                    l[i] = kk[8 * s + i] * ((i & 2 ? rk_lower : rk_upper) * rk);
                }
                pack_square(y, upper, lower, f);
                put_inverse_input(shared.kk, warp, s, l);
                shared.p[lower_block(warp, s)][p.lane] = make_uint4(f[0], f[2], f[1], f[3]);
            }
            if constexpr (Backward) {
                if (first == 0) put_block(strip_p, s, f);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    int column = 16 * s + i / 4 * 8 + p.column + i % 2, row = p.row + i / 2 % 2 * 8;
                    y[i] = column < row ? l[i] : 0.0f;
                }
                pack_square(y, f);
                if (first == 0) put_block(strip_l, s, f);
                if (s <= warp) shared.l[lower_block(warp, s)][p.lane] = make_uint4(f[0], f[2], f[1], f[3]);
            }
        }
        if (Backward && first == 0) {
            int64_t at = (number * shape.heads_q + head_q) * kHopperTileBytes + warp * kStripBytes;
            out.send(static_cast<unsigned char *>(work.p) + at, strip_p);
            out.send(static_cast<unsigned char *>(work.l) + at, strip_l);
        }
        scale_rows<T, PanelsK>(tile_k, shared.norm_k);
        __syncthreads();
    }

    int shift = count > 2 ? 0 : 3 - count, team = 1 << shift, member = warp & (team - 1);  // warps of one head
    // Strips of rows of a warp's own: the first ones have the longer sums, in X and in Z.
    unsigned rows = team == 1 ? 15 : team == 4 ? 1 << member : member ? 6 : 9;
#pragma unroll 1
    for (int i = warp >> shift; i < count; i += 4 >> shift) {
        int64_t at = number * shape.heads_o + head_in_group(shape, head_q, first + i);
        if (member == 0) {
            make_rows<T, Backward>(shape, shared.norm_k, shared.norm_q, shared.beta[i], shared.log[i],
                                   work.rows + at * (Backward ? kHopperRowFloats : kHopperForwardRowFloats));
        }
        Square u[10];
        uint32_t scratch = out.next();
        if (threadIdx.x % 32 == 0) bulk_wait_read<0>();  // scratch is not sent: the next strip is the last one that was
        __syncwarp();
        invert_lower(shared.kk, shared.beta[i], scratch, u);
        if constexpr (Backward) {
            int64_t to = at * kHopperTileBytes;
            make_tile<T, true>(u, shared.log[i], shared.beta[i], shared.l, rows, out,
                               static_cast<unsigned char *>(work.r) + to);
            make_tile<T, false>(u, shared.log[i], shared.beta[i], shared.p, rows, out,
                                static_cast<unsigned char *>(work.z) + to);
        } else {
            make_z<T>(u, shared.log[i], shared.beta[i], shared.p, team == 4 ? 8 >> member : rows, out,
                      static_cast<unsigned char *>(work.z) + at * kHopperLowerBytes);
        }
        make_x<T, PanelsK, Backward>(u, shared.log[i], shared.beta[i], tile_k, rows, out,
                                     static_cast<unsigned char *>(work.x) + at * kTile);
    }
    if (threadIdx.x % 32 == 0) bulk_wait<0>();
}

cudaError_t launch_hopper_prepare(const gdelta_forward_call &call, const gdelta_hopper_work &work,
                                  const gdelta_hopper_maps &maps, gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    int64_t chunks = gdelta_chunk_capacity(shape.sequences, shape.tokens, shape.rows, shape.packed);
    if (chunks == 0) return cudaSuccess;
    int group = shape.heads_o / shape.heads_q, batches = (group + kHopperPrepareHeads - 1) / kHopperPrepareHeads;
    return with_instance(shape, call.in, [&](auto *type, auto panels) {
        using T = std::remove_pointer_t<decltype(type)>;
        constexpr size_t kForward = sizeof(PrepareShared<panels, false>),
                         kBackward = sizeof(PrepareShared<panels, true>);
        static_assert(kForward <= 228 * 1024 / 4 - 1024 && kBackward <= 228 * 1024 / 3 - 1024,
                      "blocks a multiprocessor");
        auto kernel = work.l ? hopper_prepare<T, panels, true> : hopper_prepare<T, panels, false>;
        return launch_as(work.malformed && starts_early(call), kernel, chunks * shape.heads_q * batches, 128,
                         work.l ? kBackward : kForward, stream, shape, call.in, work, maps.k, maps.q);
    });
}

}  // namespace gdelta
