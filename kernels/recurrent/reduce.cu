// Sums backward's parts in a fixed order, so that the same call gives the same bits.
//
// reduce_rows: one warp a row and head of q, k or v. Sums over the output heads that share the head and over the tiles
// of V, then goes through the norm, and writes the row once. reduce_gates: one block an output head walks over all
// rows: dg and dbeta through what g and beta hold, and the sums for A_log and dt_bias, kept in double.
#include "kernels/recurrent/reduce.cuh"

#include "kernels/config.h"
#include "kernels/rule/gate.cuh"
#include "kernels/rule/norm.cuh"
#include "kernels/rule/parameters.cuh"
#include "kernels/rule/sequence.cuh"

namespace gdelta {

// Rows that belong to a sequence.
__device__ __forceinline__ int64_t live_rows(const gdelta_shape &shape, const gdelta_inputs &in) {
    return shape.packed ? load_index(in.cu_seqlens, shape.sequences) : shape.rows;
}

struct RowParts {
    const float *parts;  // [rows, heads_o, tiles, dim]
    int tiles, dim, heads;
    gdelta_view raw;  // the normalised tensor, data NULL: no norm
    gdelta_view out;
};

template <int Width>
__global__ void __launch_bounds__(32 * kRowWarps)
    reduce_rows(const __grid_constant__ gdelta_shape shape, const __grid_constant__ gdelta_inputs in,
                const __grid_constant__ RowParts x, const int32_t *malformed) {
    constexpr int kCount = Width / 32;
    if (is_malformed(malformed)) return;
    int lane = threadIdx.x % 32;
    int64_t jobs = live_rows(shape, in) * x.heads, stride = static_cast<int64_t>(gridDim.x) * kRowWarps;
    int group = shape.heads_o / x.heads;
    bool tiled = shape.head_map == GDELTA_HEADS_TILED;
    for (int64_t job = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32; job < jobs; job += stride) {
        int64_t row = job / x.heads;
        int head = static_cast<int>(job % x.heads);
        float sum[kCount] = {};
        for (int member = 0; member < group; ++member) {
            int from = tiled ? head + member * x.heads : head * group + member;
            const float *part = x.parts + (row * shape.heads_o + from) * x.tiles * x.dim;
            for (int tile = 0; tile < x.tiles; ++tile, part += x.dim) {
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    int d = lane + 32 * i;
                    if (d < x.dim) sum[i] += part[d];
                }
            }
        }
        int64_t batch = shape.packed ? 0 : row / shape.tokens, token = shape.packed ? row : row % shape.tokens;
        if (x.raw.data) {
            Row<kCount> row_bits;
            float raw[kCount];
            row_bits.load(x.raw.data, x.raw.dtype, offset_of(x.raw, batch, token, head), x.dim, lane);
            row_bits.values(x.raw.dtype, raw);
            row_norm_backward(shape, raw, row_norm(shape, raw), sum);
        }
        int64_t offset = offset_of(x.out, batch, token, head);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            int d = lane + 32 * i;
            if (d < x.dim) store_element(x.out.data, x.out.dtype, offset + d, sum[i]);
        }
    }
}

__global__ void __launch_bounds__(kGateThreads) reduce_gates(const __grid_constant__ gdelta_backward_call call,
                                                             const __grid_constant__ gdelta_recurrent_work work) {
    __shared__ double sums[2][kGateThreads];
    const gdelta_shape &shape = call.shape;
    const gdelta_inputs &in = call.in;
    if (is_malformed(work.malformed)) return;
    int head = blockIdx.x, tiles = gdelta_backward_tiles(shape.dim_k, shape.dim_v);
    GateParameters gate = load_gate_parameters(in, head);
    double a_log = 0, dt_bias = 0;
    int64_t rows = live_rows(shape, in);
    for (int64_t row = threadIdx.x; row < rows; row += kGateThreads) {
        int64_t batch = shape.packed ? 0 : row / shape.tokens, token = shape.packed ? row : row % shape.tokens;
        float d_decay = 0.0f, d_beta = 0.0f;
        for (int tile = 0; tile < tiles; ++tile) {
            int64_t at = (static_cast<int64_t>(head) * tiles + tile) * shape.rows + row;
            d_decay += work.ddecay[at];
            d_beta += work.dbeta[at];
        }
        if (in.g.data) {
            float x = load_element(in.g.data, in.g.dtype, offset_of(in.g, batch, token, head));
            float dx = d_decay;
            if (shape.gate != GDELTA_GATE_LINEAR) dx *= decay_of(shape.gate, x, gate);
            if (shape.gate == GDELTA_GATE_SOFTPLUS) {
                // g = -a softplus(z), z = x + bias: dg/dx = -a sigmoid(z), dg/dA_log = g.
                float z = x + gate.bias;
                a_log += static_cast<double>(dx) * (-gate.a * softplus(z));
                dx *= -gate.a * sigmoid(z);
                dt_bias += dx;
            }
            if (call.dg.data) store_element(call.dg.data, call.dg.dtype, offset_of(call.dg, batch, token, head), dx);
        }
        if (call.dbeta.data) {
            float x = load_element(in.beta.data, in.beta.dtype, offset_of(in.beta, batch, token, head));
            store_element(call.dbeta.data, call.dbeta.dtype, offset_of(call.dbeta, batch, token, head),
                          d_beta * beta_slope(shape.beta, x));
        }
    }
    if (!call.da_log.data && !call.ddt_bias.data) return;
    store_parameters(call, head, a_log, dt_bias, sums);
}

static cudaError_t launch_rows(const gdelta_backward_call &call, const gdelta_recurrent_work &work, const RowParts &x,
                               gdelta_stream stream) {
    constexpr int64_t kMaxBlocks = 1 << 20;
    int64_t jobs = call.shape.rows * x.heads, blocks = (jobs + kRowWarps - 1) / kRowWarps;
    if (!x.out.data || blocks == 0) return cudaSuccess;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
    config.blockDim = 32 * kRowWarps;
    config.stream = stream;
    const int32_t *malformed = work.malformed;
#define GDELTA_CASE(width) \
    if (x.dim <= width) return cudaLaunchKernelEx(&config, reduce_rows<width>, call.shape, call.in, x, malformed);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}

int launch_reduce(const gdelta_backward_call &call, const gdelta_recurrent_work &work, gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    int tiles = gdelta_backward_tiles(shape.dim_k, shape.dim_v);
    bool norm = shape.l2norm != GDELTA_L2NORM_NONE;
    cudaError_t error = launch_rows(
        call, work, {work.dq, tiles, shape.dim_k, shape.heads_q, norm ? call.in.q : gdelta_view{}, call.dq}, stream);
    if (error == cudaSuccess) {
        error = launch_rows(call, work,
                            {work.dk, tiles, shape.dim_k, shape.heads_k, norm ? call.in.k : gdelta_view{}, call.dk},
                            stream);
    }
    if (error == cudaSuccess && work.dv) {
        error = launch_rows(call, work, {work.dv, 1, shape.dim_v, shape.heads_v, gdelta_view{}, call.dv}, stream);
    }
    bool gates = call.dg.data || call.dbeta.data || call.da_log.data || call.ddt_bias.data;
    if (error != cudaSuccess || !gates) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(shape.heads_o);
    config.blockDim = kGateThreads;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, reduce_gates, call, work);
}

}  // namespace gdelta
