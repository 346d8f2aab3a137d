// Token recurrence, forward and step: any K, V <= 256, any dtypes and strides, fp32 arithmetic on CUDA cores.
// forward.cuh has the equations and one token.
//
// Grid: x = (sequence, output head, tile of 64 columns of V), the tile fastest. Each warp owns its columns of S in
// registers (tile.cuh) from the first token to the last; warps share k, q and the gates. A warp finishes a reduction
// over K by shuffles alone, so blocks meet only once in 8 rows.
//
// recurrent_forward: whole sequences, 16 columns a warp. Shared memory: two buffers of kForwardStage rows in fp32.
// While one is worked on, warp w loads rows w, w + warps, ... of the next into registers one at a time and stores them
// to the other: loads fly while tokens are computed.
//
// recurrent_decode: one token, so that what counts is the state, 128 KB a head in fp32 read and written, and how soon
// the first loads are on their way. Many small blocks, one piece each, hide each other's waits: copies to shared
// memory, where the state stays; one pass over it for S^T k and S^T q, one for the update, in place; whole rows back.
// The lanes and their order of sums are those of a register tile, and so are the bits.
//
// recurrent_step: 2 to 16 tokens, whose state is worth its registers. Loads should never pause: as many blocks as fit
// take turns at the pieces (sequence, output head, tile of V). Block: warps
//
//   servers      ahead of the others: where the states of the next pieces are; stage the rows of q, k, v and the gates
//   state 0 ..   16 columns of V each: copy the next piece's state to shared memory, take this one's to registers, the
//                tokens, and back through shared memory (block.cuh)
//
// All meet once a turn, each in its own code, at which this piece's rows and state are there and the next one's state
// is on its way.
#include "kernels/recurrent/block.cuh"
#include "kernels/recurrent/forward.cuh"

namespace gdelta {

// The state after `tokens` tokens, a positive multiple of kRecurrentSegment, for backward and for the caller.
template <int Width>
__device__ __forceinline__ void keep_state(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s,
                                           TilePlace p, int64_t tokens, const gdelta_recurrent_work &work) {
    const gdelta_shape &shape = f.call.shape;
    if (work.checkpoints && tokens < f.at.sequence.length) {
        gdelta_state_view view = {};
        view.dtype = GDELTA_DTYPE_FP32;
        view.data = checkpoint_at(work, shape, f.at.sequence, tokens, f.head);
        store_state(s, p, view, 0, shape.dim_k, shape.dim_v);
    }
    const gdelta_state_view &wanted = f.call.checkpoints;
    if (!wanted.data || tokens % f.call.checkpoint_interval != 0) return;
    int64_t number = checkpoint_number(shape, f.at.sequence, tokens, f.call.checkpoint_interval);
    bool reporter = f.head == 0 && f.first_column == 0 && threadIdx.x == 0;
    int64_t entry = slot_of(f.call.in, wanted, number, GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE, reporter);
    if (entry < 0) return;
    store_state(s, p, wanted, entry * wanted.slot + f.head * wanted.head, shape.dim_k, shape.dim_v);
}

// Whole sequences. While a stage is worked on, the next is fetched.
template <int Width>
__device__ __forceinline__ void run_long(const Forward<Width> &f, Tile<Width, Forward<Width>::kColumns> &s, TilePlace p,
                                         StagedRow<Width> (&rows)[2 * kForwardStage],
                                         const gdelta_recurrent_work &work) {
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int64_t length = f.at.sequence.length;
    ForwardRow<Width> row;
#pragma unroll 1
    for (int r = warp; r < kForwardStage && r < length; r += warps) {
        f.load(f.at, r, row);
        f.store(row, rows[r], f.at.gate);
    }
    for (int64_t start = 0; start <= length; start += kForwardStage) {  // once more where the last stage is full
        __syncthreads();  // this stage is full, and all have left the other
        const StagedRow<Width> *now = rows + start % (2 * kForwardStage);
        StagedRow<Width> *next = rows + (start + kForwardStage) % (2 * kForwardStage);
        if (start > 0 && start % kRecurrentSegment == 0) keep_state(f, s, p, start, work);
        int r = 0;
#pragma unroll 1
        for (int ahead = warp; r < kForwardStage; ahead += warps) {
            int64_t t = start + kForwardStage + ahead;
            bool fetch = ahead < kForwardStage && t < length;
            if (fetch) f.load(f.at, t, row);
#pragma unroll 1
            for (int end = r + warps; r < end && r < kForwardStage; ++r) {
                if (start + r < length) f.token(s, p, now[r], start + r);
            }
            if (fetch) f.store(row, next[ahead], f.at.gate);
        }
    }
}

template <int Width>
__global__ void __launch_bounds__(2 * kForwardColumns, Width <= 128 ? 3 : 1)
    recurrent_forward(const __grid_constant__ gdelta_forward_call call,
                      const __grid_constant__ gdelta_recurrent_work work, unsigned tiles) {
    __shared__ StagedRow<Width> rows[2 * kForwardStage];
    __shared__ Job at;
    const gdelta_shape &shape = call.shape;
    wait_for_grids();
    if (is_malformed(work.malformed)) return;

    BlockPlace block = block_place(shape, tiles);
    Forward<Width> f = {call, at, block.head, block.first_column};
    if (threadIdx.x == 0) {
        Sequence sequence = find_sequence(shape, call.in, call.final, block.n, f.head, block.reporter);
        find_job(shape, call.in, sequence, f.head, at);
        at.o = first_of(call.o, at.sequence, f.head);
    }
    __syncthreads();

    TilePlace p = tile_place<f.kColumns>(f.first_column);
    if (at.sequence.skip) {
        for (int64_t t = 0; t < at.sequence.length; ++t) f.write_o(p, t, 0.0f);
        return;
    }
    Tile<Width, Forward<Width>::kColumns> s;
    load_initial(s, p, call.in, shape, at.sequence.initial);
    run_long(f, s, p, rows, work);
    if (f.at.sequence.final >= 0) store_state(s, p, call.final, f.at.sequence.final, shape.dim_k, shape.dim_v);
}

// ---- At most 16 tokens ----

// A piece of work as all warps of its block know it: the sequence, and where o lies, are all that `at` has.
struct StepJob {
    Job at;
    int head, first_column;
};

// Shared memory: kStepPlaces states, T rows of this turn and of the next.
template <int Width, typename T>
struct StepPlan {
    int warps, tokens;
    unsigned pieces, tiles;

    __host__ __device__ int columns() const {
        return warps * kForwardWarpColumns;
    }
    static constexpr int kStateBytes = StateBlock<Width, T, false>::kBytes;
    __host__ __device__ int row_bytes() const {
        return tokens * static_cast<int>(sizeof(StagedRow<Width>));
    }
    __host__ __device__ int bytes() const {
        return kStepPlaces * kStateBytes + 2 * row_bytes();
    }
};

// Of a step, an SM. Three blocks of six warps leave a warp 96 registers at K = 128, which is enough on sm_90 alone.
template <int Width>
__host__ __device__ constexpr int step_blocks(bool sm_90) {
    return Width == 64 ? 4 + sm_90 : Width == 128 ? 2 + sm_90 : 1;
}
#ifdef __CUDA_ARCH__
constexpr bool kSm90 = __CUDA_ARCH__ == 900;
#else
constexpr bool kSm90 = false;
#endif

// Of a step's piece: its sequence, and where it lies.
template <int Width, typename T>
__device__ __forceinline__ void find_piece(const gdelta_forward_call &call, const StepPlan<Width, T> &plan,
                                           unsigned piece, bool reporter, StepJob &job) {
    BlockPlace place = place_of(call.shape, piece, plan.tiles, plan.columns());
    job.at.sequence = find_sequence(call.shape, call.in, call.final, place.n, place.head, place.reporter && reporter);
    job.head = place.head;
    job.first_column = place.first_column;
}

// A server: stages rows `server`, `server` + kStepServers, ... of pieces blockIdx.x + turn * gridDim.x; the next row is
// always on its way. The last one finds out the pieces, kStepPlaces + 1 turns ahead, but the first, which all do.
template <int Width, typename T>
__device__ __forceinline__ void serve_step(const gdelta_forward_call &call, const StepPlan<Width, T> &plan, int server,
                                           const StepJob &first, StepJob (&jobs)[kStepJobs], unsigned char *rows) {
    constexpr unsigned kAhead = kStepPlaces + 1;
    const gdelta_shape &shape = call.shape;
    unsigned lane = threadIdx.x % 32, turn = 0;
    Job at;
    ForwardRow<Width> row;
    GateBits gate;
    auto find = [&](unsigned piece, StepJob &job) {
        if (piece < plan.pieces) find_piece(call, plan, piece, true, job);
    };
    auto begin = [&](const StepJob &job, StepJob &shared_job) {
        find_rows(shape, call.in, job.at.sequence, job.head, at);
        if (server == 0 && lane == 0) shared_job.at.o = first_of(call.o, job.at.sequence, job.head);
        Forward<Width> f = {call, job.at, job.head, job.first_column};
        gate.load(call.in, job.head);
        if (!job.at.sequence.skip && server < job.at.sequence.length) f.load(at, server, row);
    };
    if (server == 0 && lane == 0) jobs[0] = first;
    if (server == kStepServers - 1 && lane > 0 && lane <= kStepPlaces) find(blockIdx.x + lane * gridDim.x, jobs[lane]);
    begin(first, jobs[0]);
    block_barrier(kTurnBarrier);
#pragma unroll 1
    for (unsigned piece = blockIdx.x; piece < plan.pieces; piece += gridDim.x, ++turn) {
        const StepJob &job = jobs[turn % kStepJobs];
        Forward<Width> f = {call, job.at, job.head, job.first_column};
        int length = job.at.sequence.skip ? 0 : static_cast<int>(job.at.sequence.length);
        auto *staged = reinterpret_cast<StagedRow<Width> *>(rows + turn % 2 * plan.row_bytes());
        GateParameters parameters = gate.parameters(call.in);
#pragma unroll 1
        for (int t = server; t < length; t += kStepServers) {
            ForwardRow<Width> now = row;
            if (t + kStepServers < length) f.load(at, t + kStepServers, row);
            f.store(now, staged[t], parameters);
        }
        StepJob &next = jobs[(turn + 1) % kStepJobs];
        if (piece + gridDim.x < plan.pieces) begin(next, next);
        block_barrier(kTurnBarrier);
        if (server == kStepServers - 1 && lane == 0)
            find(piece + kAhead * gridDim.x, jobs[(turn + kAhead) % kStepJobs]);
    }
}

// T and Vk: type and order of all states there are. They lie in whole chunks of 16 bytes.
template <int Width, typename T, bool Vk>
__global__ void __launch_bounds__(2 * kForwardColumns + 32 * kStepServers, step_blocks<Width>(kSm90))
    recurrent_step(const __grid_constant__ gdelta_forward_call call, const int32_t *malformed,
                   const __grid_constant__ StepPlan<Width, T> plan) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ StepJob jobs[kStepJobs];
    const gdelta_shape &shape = call.shape;
    wait_for_grids();
    if (is_malformed(malformed)) return;
    unsigned char *states = shared, *rows = shared + kStepPlaces * plan.kStateBytes;
    StepJob first;
    find_piece(call, plan, blockIdx.x, threadIdx.x == 0, first);
    int server = static_cast<int>(threadIdx.x / 32) - plan.warps;
    if (server >= 0) return serve_step(call, plan, server, first, jobs, rows);

    auto state = [&](unsigned turn, const gdelta_state_view &view, int64_t offset, int first_column) {
        return StateBlock<Width, T, Vk>(states + turn % kStepPlaces * plan.kStateBytes, plan.warps, view, offset,
                                        first_column, shape.dim_k, shape.dim_v);
    };
    auto fetch = [&](unsigned turn, unsigned piece, const StepJob &job) {
        const Sequence &sequence = job.at.sequence;
        if (piece < plan.pieces && !sequence.skip && sequence.initial >= 0) {
            state(turn, call.in.initial, sequence.initial, job.first_column).fetch(true);
        }
        end_copy_group();
    };
    constexpr unsigned kAhead = kStepPlaces - 1;
    fetch(0, blockIdx.x, first);
    block_barrier(kTurnBarrier);
#pragma unroll
    for (unsigned i = 1; i < kAhead; ++i) fetch(i, blockIdx.x + i * gridDim.x, jobs[i]);
    unsigned turn = 0;
#pragma unroll 1
    for (unsigned piece = blockIdx.x; piece < plan.pieces; piece += gridDim.x, ++turn) {
        fetch(turn + kAhead, piece + kAhead * gridDim.x, jobs[(turn + kAhead) % kStepJobs]);
        wait_copy_groups<kAhead>();
        block_barrier(kTurnBarrier);  // this turn's state and rows are here, and the job after the next
        const StepJob &job = jobs[turn % kStepJobs];
        const Sequence &sequence = job.at.sequence;
        Forward<Width> f = {call, job.at, job.head, job.first_column};
        TilePlace p = tile_place<f.kColumns>(f.first_column);
        int length = static_cast<int>(sequence.length);
        if (sequence.skip) {
            for (int t = 0; t < length; ++t) f.write_o(p, t, 0.0f);
            continue;
        }
        Tile<Width, f.kColumns> s;
        if (sequence.initial >= 0) {
            state(turn, call.in.initial, sequence.initial, f.first_column).take(p, f.first_column, s);
        } else {
            clear_tile(s);
        }
        auto *now = reinterpret_cast<const StagedRow<Width> *>(rows + turn % 2 * plan.row_bytes());
#pragma unroll 1
        for (int t = 0; t < length; ++t) f.token(s, p, now[t], t);
        p.lane_k = opaque(p.lane_k), p.column = opaque(p.column);  // else the tokens' loop keeps these addresses
        state(turn, call.final, sequence.final, f.first_column).store(p, f.first_column, s, sequence.final >= 0);
    }
}

// ---- One token ----

// RowBytes: of a row of a [K, V] state, the block's columns at most.
template <int Width, typename T, bool Vk, int RowBytes>
struct Decode {
    static constexpr int kColumns = RowBytes / sizeof(T), kWarps = kColumns / kForwardWarpColumns;
    // Blocks that a multiprocessor's shared memory holds at K = 128; of 16-bit states what 64 registers a thread allow,
    // or 48. Elsewhere than on sm_90 that spills: 85 registers and more.
    static constexpr int kNarrow = sizeof(T) == 4 ? (kSm90 ? 12 : 8) : (kSm90 ? 8 : 6);
    static constexpr int kWide = sizeof(T) == 4 ? (kSm90 ? 6 : 4) : (kSm90 ? 5 : 3);
    static constexpr int kBlocks = RowBytes == 128 ? kNarrow : kWide;
    using State = StateBlock<Width, T, Vk, kColumns>;
    using Row = Forward<Width, kColumns>;
};

template <int Width, typename T, bool Vk, int RowBytes, typename D = Decode<Width, T, Vk, RowBytes>>
__global__ void __launch_bounds__(32 * D::kWarps, Width <= 128 ? D::kBlocks : 1)
    recurrent_decode(const __grid_constant__ gdelta_forward_call call, const int32_t *malformed, unsigned tiles) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ typename D::Row::Staged row;
    const gdelta_shape &shape = call.shape;
    wait_for_grids();
    if (is_malformed(malformed)) return;
    BlockPlace block = block_place(shape, tiles);
    Job at;
    typename D::Row f = {call, at, block.head, block.first_column};
    typename D::Row::Fetched fetched;
    InitialEntry entry;
    GateBits gate;
    entry.load(call.in, block.n);
    at.sequence = find_tokens(shape, call.in, block.n);
    bool there = at.sequence.length > 0, stages = there && threadIdx.x < 32;
    if (stages) {
        find_rows(shape, call.in, at.sequence, f.head, at);
        gate.load(call.in, f.head);
        f.load(at, 0, fetched);
    }
    find_states(call.in, call.final, block.n, f.head, block.reporter, entry, at.sequence);
    auto state_of = [&](const gdelta_state_view &view, int64_t offset) {
        return typename D::State(shared, static_cast<int>(blockDim.x / 32), view, offset, f.first_column, shape.dim_k,
                                 shape.dim_v);
    };
    bool given = !at.sequence.skip && at.sequence.initial >= 0;
    state_of(call.in.initial, given ? at.sequence.initial : 0).fetch(given);
    end_copy_group();
    if (stages) f.store(fetched, row, gate.parameters(call.in));
    at.o = first_of(call.o, at.sequence, f.head);
    wait_copy_groups<0>();
    __syncthreads();
    TilePlace p = tile_place<f.kColumns>(f.first_column);
    if (at.sequence.skip) {
        if (there) f.write_o(p, 0, 0.0f);
        return;
    }
    typename D::State state = state_of(call.final, at.sequence.final);
    if (there) {
        float sums[2 * f.kColumns] = {}, *sk = sums, *sq = sums + f.kColumns, u[f.kColumns], o, k[4], q[4];
        float x[4];
        state.for_packs(p, f.first_column, [&](int i, int j, int c, const unsigned char *place) {
            load_four(row.k, i, p, k);
            load_four(row.q, i, p, q);
            Four<T>::load(place, x);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                int column = Vk ? c : n, of_four = Vk ? n : j;
                sk[column] = fmaf(x[n], k[of_four], sk[column]);
                sq[column] = fmaf(x[n], q[of_four], sq[column]);
            }
        });
        f.finish(row, p, sums, u, o);
        f.write_o(p, 0, o);
        state.for_packs(p, f.first_column, [&](int i, int j, int c, unsigned char *place) {
            load_four(row.k, i, p, k);
            Four<T>::load(place, x);
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = fmaf(k[Vk ? n : j], u[Vk ? c : n], row.decay * x[n]);
            Four<T>::store(place, x);
        });
    }
    state.write(at.sequence.final >= 0);
}

// Whether the state lies in whole chunks of 16 bytes.
template <typename T>
static bool has_chunks(const gdelta_state_view &view, const gdelta_shape &shape) {
    constexpr int kChunk = 16 / sizeof(T);
    int64_t row = view.order == GDELTA_STATE_VK ? shape.dim_k : shape.dim_v;
    bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    return !view.data || (aligned && row % kChunk == 0 && view.slot % kChunk == 0 && view.head % kChunk == 0);
}

template <int Width>
static cudaError_t launch_long(const gdelta_forward_call &call, const gdelta_recurrent_work &work,
                               gdelta_stream stream) {
    Launch launch(call.shape, warps_of(call.shape, kForwardColumns), 0, stream);
    return cudaLaunchKernelEx(&launch.config, recurrent_forward<Width>, call, work, launch.tiles);
}

template <typename Kernel>
static cudaError_t allow_shared(Kernel *kernel, int bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;  // what a kernel has without being asked
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int Width, typename T, bool Vk, int RowBytes>
static cudaError_t launch_decode(const gdelta_forward_call &call, const gdelta_recurrent_work &work, bool few,
                                 gdelta_stream stream) {
    using D = Decode<Width, T, Vk, RowBytes>;
    Launch launch(call.shape, warps_of(call.shape, D::kColumns / (few ? 2 : 1)), D::State::kBytes, stream);
    auto *kernel = recurrent_decode<Width, T, Vk, RowBytes>;
    cudaError_t error = allow_shared(kernel, D::State::kBytes);
    if (error != cudaSuccess) return error;
    return cudaLaunchKernelEx(&launch.config, kernel, call, work.malformed, launch.tiles);
}

template <int Width, typename T>
static cudaError_t launch_step(const gdelta_forward_call &call, const gdelta_recurrent_work &work,
                               gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    bool few = shape.sequences * shape.heads_o < kStepManyHeads;
    int columns = few ? kForwardColumns / 2 : kBlockColumns<Width>;
    StepPlan<Width, T> plan = {warps_of(shape, columns), static_cast<int>(shape.tokens), 0, 0};
    if (plan.bytes() > kStepMostShared || !has_chunks<T>(call.in.initial, shape) || !has_chunks<T>(call.final, shape)) {
        return launch_long<Width>(call, work, stream);
    }
    bool vk = (call.in.initial.data ? call.in.initial : call.final).order == GDELTA_STATE_VK;
    int64_t heads = shape.sequences * shape.heads_o;
    if (shape.tokens == 1 && heads <= INT32_MAX / (kRecurrentMaxDim / kForwardWarpColumns)) {
        bool wide = heads >= kDecodeWideHeads && shape.dim_v * sizeof(T) >= 256;
        return vk     ? launch_decode<Width, T, true, 128>(call, work, few, stream)
               : wide ? launch_decode<Width, T, false, 256>(call, work, few, stream)
                      : launch_decode<Width, T, false, 128>(call, work, few, stream);
    }
    Launch launch(shape, plan.warps, static_cast<size_t>(plan.bytes()), stream);
    plan.pieces = launch.config.gridDim.x;
    plan.tiles = launch.tiles;
    // As many blocks as are at work at once.
    int room = launch.attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (plan.bytes() + kStepOtherShared);
    int blocks = step_blocks<Width>(launch.major == 9);
    if (room < blocks) blocks = room < 1 ? 1 : room;
    auto most = static_cast<unsigned>(blocks * launch.attribute_of(cudaDevAttrMultiProcessorCount));
    if (launch.config.gridDim.x > most) launch.config.gridDim.x = most;
    launch.config.blockDim.x += 32 * kStepServers;
    auto *kernel = vk ? recurrent_step<Width, T, true> : recurrent_step<Width, T, false>;
    cudaError_t error = allow_shared(kernel, plan.bytes());
    if (error != cudaSuccess) return error;
    return cudaLaunchKernelEx(&launch.config, kernel, call, work.malformed, plan);
}

template <int Width>
static cudaError_t launch_forward(const gdelta_forward_call &call, const gdelta_recurrent_work &work,
                                  gdelta_stream stream) {
    const gdelta_state_view &initial = call.in.initial, &final = call.final;
    gdelta_dtype dtype = initial.data ? initial.dtype : final.data ? final.dtype : GDELTA_DTYPE_FP32;
    bool one_type = !final.data || final.dtype == dtype;
    if (call.shape.tokens > 2 * kForwardStage || !one_type) return launch_long<Width>(call, work, stream);
    if (dtype == GDELTA_DTYPE_BF16) return launch_step<Width, __nv_bfloat16>(call, work, stream);
    if (dtype == GDELTA_DTYPE_FP16) return launch_step<Width, __half>(call, work, stream);
    return launch_step<Width, float>(call, work, stream);
}

}  // namespace gdelta

int gdelta_launch_recurrent_forward(const gdelta_forward_call *call, const gdelta_recurrent_work *work,
                                    gdelta_stream stream) {
    int error = gdelta::launch_check(call->shape, call->in, work->malformed, stream);
    if (error != cudaSuccess) return error;
    int32_t width = gdelta_recurrent_width(call->shape.dim_k);
#define GDELTA_CASE(compiled) \
    if (width == compiled) return gdelta::launch_forward<compiled>(*call, *work, stream);
    GDELTA_RECURRENT_WIDTHS(GDELTA_CASE)
#undef GDELTA_CASE
    return cudaErrorInvalidValue;
}
