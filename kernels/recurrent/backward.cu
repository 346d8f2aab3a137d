// The adjoint of the token recurrence, fp32 on CUDA cores. With P the state before a token, dS the gradient of the
// state after it that comes from later tokens, w = v - e P^T k and u = beta w:
//
//   dS += scale q do^T                     du = dS^T k,   dv = beta du,   dbeta = <du, w>
//   dq  = scale (e P do + k <u, do>)       dk = dS u - e P dv
//   dS -= k dv^T,   de = <dS, P>,   dS <- e dS
//
// de is the gradient of the decay exp(g): no division by e or beta anywhere, so decays of 0 and betas of 0 are exact.
//
// P is needed in reverse order. Forward leaves it every 64 tokens (a segment). For each segment, last first:
//   A  run the recurrence through the segment and keep w, not the states (shared memory);
//   B  for each window of 8 tokens, last first: replay P from the segment's start to the window's with the kept w
//   (rank-1
//      updates alone), stash it; then for each token of the window, last first: replay P from the stash, apply the
//      above.
// Replays cost 28 / 8 + 3.5 = 7 steps of 2 instructions an element and token, the adjoint 8, A and forward 4 each.
//
// Grid: x = (sequence, output head, tile of V), the tile fastest. Block: up to 8 warps; a warp owns 16 columns (8 at
// Width 256) of S and dS in registers (tile.cuh). dq, dk, de and dbeta sum over V: over the lanes by shuffles, over the
// warps in shared memory in a fixed order (one barrier a token, two buffers), over tiles and heads of a group by
// reduce.cu.
#include "kernels/recurrent/reduce.cuh"
#include "kernels/recurrent/tile.cuh"
#include "kernels/rule/gate.cuh"
#include "kernels/rule/norm.cuh"

namespace gdelta {

template <int Width>
struct Backward {
    static constexpr int kColumns = GDELTA_BACKWARD_LANE_COLUMNS(Width);
    static constexpr int kBlockColumns = kBackwardWarps * kRecurrentLanesV * kColumns;
    static constexpr int kGroups = Width / 32;
    static constexpr int kThreads = 32 * kBackwardWarps;
    using State = Tile<Width, kColumns>;

    // 94, 153, 187 KiB at Width 64, 128, 256: one block an SM, which its registers force anyway.
    struct Shared {
        float4 stash[kGroups * kColumns][kThreads];     // P at the window's start, each thread its own elements
        float k[kRecurrentSegment][Width];              // normalised
        float w[kRecurrentSegment][kBlockColumns];      // v, then w
        float q[kRecurrentWindow][Width];               // normalised
        float d_o[kRecurrentWindow][kBlockColumns];     //
        float parts[2][kBackwardWarps][2 * Width + 2];  // dq, dk, de, dbeta of each warp
        float decay[kRecurrentSegment], beta[kRecurrentSegment];
        Job at;
    };

    const gdelta_backward_call &call;
    const gdelta_recurrent_work &work;
    Shared &shared;
    TilePlace place;
    int64_t n;
    int head, tile, first_column;

    // k, v and gates of the segment's rows. Warps take rows in turn, kBatch at a time to have many loads in flight.
    __device__ __forceinline__ void load_segment(int64_t start, int count) const {
        constexpr int kBatch = Width <= 128 ? 4 : 1;
        const gdelta_shape &shape = call.shape;
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32, warps = blockDim.x / 32;
        for (int first = threadIdx.x / 32; first < count; first += kBatch * warps) {
            Row<kGroups> k_row[kBatch];
            Row<kBlockColumns / 32> v_row[kBatch];
            Gates gates[kBatch];
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                int64_t t = start + first + n * warps;
                if (first + n * warps >= count) continue;
                k_row[n].load(in.k.data, in.k.dtype, shared.at.k + t * in.k.token, shape.dim_k, lane);
                v_row[n].load(in.v.data, in.v.dtype, shared.at.v + t * in.v.token + first_column,
                              shape.dim_v - first_column, lane);
                gates[n].load(in, shared.at.g + t * in.g.token, shared.at.beta + t * in.beta.token);
            }
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                int r = first + n * warps;
                if (r >= count) continue;
                float k[kGroups], v[kBlockColumns / 32];
                k_row[n].values(in.k.dtype, k);
                v_row[n].values(in.v.dtype, v);
                float norm = row_norm(shape, k);
#pragma unroll
                for (int i = 0; i < kGroups; ++i) shared.k[r][lane + 32 * i] = k[i] * norm;
#pragma unroll
                for (int i = 0; i < kBlockColumns / 32; ++i) shared.w[r][lane + 32 * i] = v[i];
                if (lane == 0) {
                    shared.decay[r] = gates[n].decay(shape, in, shared.at.gate);
                    shared.beta[r] = gates[n].beta_value(shape, in);
                }
            }
        }
    }

    // q and do of the window's rows.
    __device__ __forceinline__ void load_window(int64_t start, int count) const {
        const gdelta_shape &shape = call.shape;
        const gdelta_inputs &in = call.in;
        int lane = threadIdx.x % 32, warps = blockDim.x / 32;
        for (int r = threadIdx.x / 32; r < count; r += warps) {
            int64_t t = start + r;
            Row<kGroups> q_row;
            Row<kBlockColumns / 32> d_o_row = {};
            float q[kGroups], d_o[kBlockColumns / 32];
            q_row.load(in.q.data, in.q.dtype, shared.at.q + t * in.q.token, shape.dim_k, lane);
            if (call.d_o.data) {
                d_o_row.load(call.d_o.data, call.d_o.dtype, shared.at.o + t * call.d_o.token + first_column,
                             shape.dim_v - first_column, lane);
            }
            q_row.values(in.q.dtype, q);
            d_o_row.values(call.d_o.dtype, d_o);
            float norm = row_norm(shape, q);
#pragma unroll
            for (int i = 0; i < kGroups; ++i) shared.q[r][lane + 32 * i] = q[i] * norm;
#pragma unroll
            for (int i = 0; i < kBlockColumns / 32; ++i) shared.d_o[r][lane + 32 * i] = d_o[i];
        }
    }

    __device__ __forceinline__ void load_segment_state(State &p, int64_t start) const {
        const gdelta_shape &shape = call.shape;
        clear_tile(p);
        if (start > 0) {
            gdelta_state_view view = {};
            view.data = checkpoint_at(work, shape, shared.at.sequence, start, head);
            view.dtype = GDELTA_DTYPE_FP32;
            load_state(p, place, view, 0, shape.dim_k, shape.dim_v);
        } else if (shared.at.sequence.initial >= 0) {
            load_state(p, place, call.in.initial, shared.at.sequence.initial, shape.dim_k, shape.dim_v);
        }
    }

    __device__ __forceinline__ void stash(const State &p) const {
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                shared.stash[i * kColumns + c][threadIdx.x] =
                    make_float4(p.x[i][0][c], p.x[i][1][c], p.x[i][2][c], p.x[i][3][c]);
            }
    }

    __device__ __forceinline__ void unstash(State &p) const {
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                float4 x = shared.stash[i * kColumns + c][threadIdx.x];
                p.x[i][0][c] = x.x, p.x[i][1][c] = x.y, p.x[i][2][c] = x.z, p.x[i][3][c] = x.w;
            }
    }

    // P <- e P + k u^T.
    __device__ __forceinline__ void update(State &p, int r, const float (&u)[kColumns]) const {
        float e = shared.decay[r];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            float k[4];
            load_four(shared.k[r], i, place, k);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) p.x[i][j][c] = fmaf(k[j], u[c], e * p.x[i][j][c]);
        }
    }

    // P over rows [from, to) of the segment, with the w that step A kept.
    __device__ __forceinline__ void replay(State &p, int from, int to) const {
#pragma unroll 1
        for (int r = from; r < to; ++r) {
            float u[kColumns];
            load_columns(shared.w[r], place, first_column, u);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) u[c] *= shared.beta[r];
            update(p, r, u);
        }
    }

    // Step A on one row: w into the place of v.
    __device__ __forceinline__ void recur(State &p, int r) const {
        float sk[kColumns] = {}, u[kColumns];
        load_columns(shared.w[r], place, first_column, u);
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            float k[4];
            load_four(shared.k[r], i, place, k);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) sk[c] = fmaf(p.x[i][j][c], k[j], sk[c]);
        }
        __syncwarp();  // every lane has read v
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            float w = fmaf(-shared.decay[r], sum_lanes<28>(sk[c]), u[c]);
            u[c] = w * shared.beta[r];
            if (place.lane_k == c) shared.w[r][place.column - first_column + c] = w;
        }
        __syncwarp();
        update(p, r, u);
    }

    // The adjoint of one row; P is the state before it. `x` is the row in the window.
    __device__ __forceinline__ void adjoint(const State &p, State &ds, int64_t start, int r, int x) const {
        float w[kColumns], u[kColumns], d_o[kColumns], du[kColumns] = {}, dv[kColumns];
        float scale = static_cast<float>(call.shape.scale), e = shared.decay[r], beta = shared.beta[r];
        load_columns(shared.w[r], place, first_column, w);
        load_columns(shared.d_o[x], place, first_column, d_o);
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            float k[4], q[4];
            load_four(shared.k[r], i, place, k);
            load_four(shared.q[x], i, place, q);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    ds.x[i][j][c] = fmaf(scale * q[j], d_o[c], ds.x[i][j][c]);
                    du[c] = fmaf(ds.x[i][j][c], k[j], du[c]);
                }
        }
        float d_beta = 0.0f, d_decay = 0.0f, u_do = 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            du[c] = sum_lanes<28>(du[c]);
            dv[c] = beta * du[c];
            u[c] = beta * w[c];
            d_beta = fmaf(du[c], w[c], d_beta);
            u_do = fmaf(u[c], d_o[c], u_do);
        }
        write_dv(start + r, dv);

        int lane = threadIdx.x % 32;
        float *parts = shared.parts[r % 2][threadIdx.x / 32];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            float k[4], dq[4], dk[4];
            load_four(shared.k[r], i, place, k);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float p_do = 0.0f, p_dv = 0.0f, ds_u = 0.0f;
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    p_do = fmaf(p.x[i][j][c], d_o[c], p_do);
                    p_dv = fmaf(p.x[i][j][c], dv[c], p_dv);
                    ds_u = fmaf(ds.x[i][j][c], u[c], ds_u);
                    float d = fmaf(-k[j], dv[c], ds.x[i][j][c]);
                    d_decay = fmaf(d, p.x[i][j][c], d_decay);
                    ds.x[i][j][c] = e * d;
                }
                dq[j] = scale * fmaf(e, p_do, k[j] * u_do);
                dk[j] = fmaf(-e, p_dv, ds_u);
            }
            parts[32 * i + lane] = sum_columns(dq, place);
            parts[Width + 32 * i + lane] = sum_columns(dk, place);
        }
        d_decay = sum_lanes<31>(d_decay);
        d_beta = sum_lanes<3>(d_beta);
        if (lane == 0) {
            parts[2 * Width] = d_decay;
            parts[2 * Width + 1] = d_beta;
        }
        __syncthreads();
        sum_parts(start + r, r % 2);
    }

    __device__ __forceinline__ void write_dv(int64_t t, const float (&dv)[kColumns]) const {
        const gdelta_view &view = call.dv;
        if (!view.data) return;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            int column = place.column + c;
            if (place.lane_k != c || column >= call.shape.dim_v) continue;
            if (work.dv) {
                work.dv[((shared.at.sequence.row + t) * call.shape.heads_o + head) * call.shape.dim_v + column] = dv[c];
            } else {
                store_element(view.data, view.dtype, shared.at.dv + t * view.token + column, dv[c]);
            }
        }
    }

    // Element i of dq | dk | de, dbeta of a token, to the workspace.
    __device__ __forceinline__ void write_part(int64_t t, int i, float x) const {
        const gdelta_shape &shape = call.shape;
        int64_t row = shared.at.sequence.row + t;
        int tiles = gdelta_backward_tiles(shape.dim_k, shape.dim_v);
        if (i >= 2 * Width) {
            float *scalars = i == 2 * Width ? work.ddecay : work.dbeta;
            scalars[(static_cast<int64_t>(head) * tiles + tile) * shape.rows + row] = x;
        } else if (i % Width < shape.dim_k) {
            float *rows = i < Width ? work.dq : work.dk;
            rows[((row * shape.heads_o + head) * tiles + tile) * shape.dim_k + i % Width] = x;
        }
    }

    // The warps' parts in the order of the warps.
    __device__ __forceinline__ void sum_parts(int64_t t, int buffer) const {
        int warps = blockDim.x / 32;
        for (int i = threadIdx.x; i < 2 * Width + 2; i += blockDim.x) {
            float x = 0.0f;
            for (int warp = 0; warp < warps; ++warp) x += shared.parts[buffer][warp][i];
            write_part(t, i, x);
        }
    }

    __device__ __forceinline__ void run_segment(State &ds, int64_t start) const {
        int64_t left = shared.at.sequence.length - start;
        int count = left < kRecurrentSegment ? static_cast<int>(left) : kRecurrentSegment;
        int last = (count - 1) / kRecurrentWindow * kRecurrentWindow;
        State p;
        __syncthreads();
        load_segment(start, count);
        __syncthreads();
        load_segment_state(p, start);
#pragma unroll 1
        for (int r = 0; r < count; ++r) {
            if (r == last) stash(p);
            recur(p, r);
        }
#pragma unroll 1
        for (int first = last; first >= 0; first -= kRecurrentWindow) {
            int end = first + kRecurrentWindow < count ? first + kRecurrentWindow : count;
            if (first != last) {
                load_segment_state(p, start);
                replay(p, 0, first);
                stash(p);
            }
            __syncthreads();
            load_window(start + first, end - first);
            __syncthreads();
#pragma unroll 1
            for (int r = end - 1; r >= first; --r) {
                unstash(p);
                replay(p, first, r);
                adjoint(p, ds, start, r, r - first);
            }
        }
    }

    __device__ __forceinline__ void write_zeros() const {
        float zeros[kColumns] = {};
        for (int64_t t = 0; t < shared.at.sequence.length; ++t) {
            write_dv(t, zeros);
            for (int i = threadIdx.x; i < 2 * Width + 2; i += blockDim.x) write_part(t, i, 0.0f);
        }
    }

    __device__ __forceinline__ int64_t by_sequence(const gdelta_state_view &view) const {
        return n * view.slot + head * view.head;
    }

    __device__ __forceinline__ void run() const {
        const gdelta_shape &shape = call.shape;
        State ds;
        clear_tile(ds);
        if (shared.at.sequence.skip) {
            write_zeros();
        } else {
            if (call.d_final.data) {
                load_state(ds, place, call.d_final, by_sequence(call.d_final), shape.dim_k, shape.dim_v);
            }
            int64_t segments = (shared.at.sequence.length + kRecurrentSegment - 1) / kRecurrentSegment;
            for (int64_t segment = segments - 1; segment >= 0; --segment) run_segment(ds, segment * kRecurrentSegment);
        }
        if (!call.d_initial.data) return;
        if (call.in.has_initial && !call.in.has_initial[n]) clear_tile(ds);
        store_state(ds, place, call.d_initial, by_sequence(call.d_initial), shape.dim_k, shape.dim_v);
    }
};

template <int Width>
__global__ void __launch_bounds__(Backward<Width>::kThreads, 1)
    recurrent_backward(const __grid_constant__ gdelta_backward_call call,
                       const __grid_constant__ gdelta_recurrent_work work) {
    extern __shared__ __align__(16) char memory[];
    const gdelta_shape &shape = call.shape;
    if (is_malformed(work.malformed)) return;
    int tiles = gdelta_backward_tiles(shape.dim_k, shape.dim_v);
    unsigned block = blockIdx.x / static_cast<unsigned>(tiles);
    Backward<Width> b = {call, work, *reinterpret_cast<typename Backward<Width>::Shared *>(memory)};
    b.tile = static_cast<int>(blockIdx.x % static_cast<unsigned>(tiles));
    b.first_column = b.tile * b.kBlockColumns;
    b.head = static_cast<int>(block % static_cast<unsigned>(shape.heads_o));
    b.n = block / static_cast<unsigned>(shape.heads_o);
    b.place = tile_place<b.kColumns>(b.first_column);
    if (threadIdx.x == 0) {
        Job &at = b.shared.at;
        bool reporter = b.head == 0 && b.tile == 0;
        find_job(shape, call.in, find_sequence(shape, call.in, gdelta_state_view{}, b.n, b.head, reporter), b.head, at);
        at.o = first_of(call.d_o, at.sequence, b.head);
        at.dv = first_of(call.dv, at.sequence, b.head);
    }
    __syncthreads();
    b.run();
}

template <int Width>
static cudaError_t launch_backward(const gdelta_backward_call &call, const gdelta_recurrent_work &work,
                                   gdelta_stream stream) {
    using Kernel = Backward<Width>;
    const gdelta_shape &shape = call.shape;
    int columns = shape.dim_v < Kernel::kBlockColumns ? shape.dim_v : Kernel::kBlockColumns;
    int warp_columns = kRecurrentLanesV * Kernel::kColumns;
    cudaLaunchConfig_t config = {};
    config.gridDim =
        static_cast<unsigned>(shape.sequences * shape.heads_o * gdelta_backward_tiles(shape.dim_k, shape.dim_v));
    config.blockDim = static_cast<unsigned>((columns + warp_columns - 1) / warp_columns * 32);
    config.dynamicSmemBytes = sizeof(typename Kernel::Shared);
    config.stream = stream;
    cudaError_t error = cudaFuncSetAttribute(recurrent_backward<Width>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(config.dynamicSmemBytes));
    if (error != cudaSuccess) return error;
    return cudaLaunchKernelEx(&config, recurrent_backward<Width>, call, work);
}

static cudaError_t launch_backward(const gdelta_backward_call &call, const gdelta_recurrent_work &work,
                                   gdelta_stream stream) {
    int32_t width = gdelta_recurrent_width(call.shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled) return launch_backward<compiled>(call, work, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}

}  // namespace gdelta

int gdelta_launch_recurrent_backward(const gdelta_backward_call *call, const gdelta_recurrent_work *work,
                                     gdelta_stream stream) {
    int error = gdelta::launch_check(call->shape, call->in, work->malformed, stream);
    if (error == cudaSuccess) error = gdelta::launch_backward(*call, *work, stream);
    if (error == cudaSuccess) error = gdelta::launch_reduce(*call, *work, stream);
    return error;
}
