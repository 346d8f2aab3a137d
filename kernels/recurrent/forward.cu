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
// recurrent_step: at most 16 tokens (every step), so that what counts is the state, 128 KB a head in fp32 read and
// written, and how soon its loads are on their way. All threads find out where their block's state is and ask for all
// of it (block.cuh); the rows of q, k, v and the gates follow, and only then does anything wait. Dynamic shared memory:
// the state, then T rows.
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

template <int Width>
constexpr int kStepBlocks = Width == 64    ? 5
                            : Width == 128 ? 4
                                           : 1;  // an SM

// T and Vk: type and order of all states there are. They lie in whole chunks of 16 bytes.
template <int Width, typename T, bool Vk>
__global__ void __launch_bounds__(2 * kForwardColumns, kStepBlocks<Width>)
    recurrent_step(const __grid_constant__ gdelta_forward_call call, const int32_t *malformed, unsigned tiles) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Job at;
    const gdelta_shape &shape = call.shape;
    wait_for_grids();
    if (is_malformed(malformed)) return;

    BlockPlace block = block_place(shape, tiles);
    Job early;
    Forward<Width> f = {call, at, block.head, block.first_column};
    Sequence sequence = find_sequence(shape, call.in, call.final, block.n, f.head, block.reporter);
    using State = StateBlock<Width, T, Vk>;
    bool has_initial = !sequence.skip && sequence.initial >= 0;
    State initial(shared, call.in.initial, sequence.initial, f.first_column, shape.dim_k, shape.dim_v);
    if (has_initial) initial.fetch();
    int length = static_cast<int>(sequence.length), warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0 || warp < length) find_rows(shape, call.in, sequence, f.head, early);
    if (threadIdx.x == 0) {
        at = early;
        at.o = first_of(call.o, sequence, f.head);
    }

    TilePlace p = tile_place<f.kColumns>(f.first_column);
    if (sequence.skip) {
        __syncthreads();
        for (int t = 0; t < length; ++t) f.write_o(p, t, 0.0f);
        return;
    }
    auto *rows = reinterpret_cast<StagedRow<Width> *>(shared + State::bytes(blockDim.x));
    f.stage_rows(early, rows, length, [] {});
    wait_copies();
    __syncthreads();
    Tile<Width, f.kColumns> s;
    if (has_initial) {
        initial.take(p, f.first_column, s);
    } else {
        clear_tile(s);
    }
#pragma unroll 1
    for (int t = 0; t < length; ++t) f.token(s, p, rows[t], t);
    if (at.sequence.final < 0) return;
    p.lane_k = opaque(p.lane_k), p.column = opaque(p.column);  // else the tokens' loop keeps these addresses: spills
    State(shared, call.final, at.sequence.final, f.first_column, shape.dim_k, shape.dim_v).store(p, f.first_column, s);
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
    Launch launch(call.shape, kForwardColumns, 0, stream);
    return cudaLaunchKernelEx(&launch.config, recurrent_forward<Width>, call, work, launch.tiles);
}

template <int Width, typename T>
static cudaError_t launch_step(const gdelta_forward_call &call, const gdelta_recurrent_work &work,
                               gdelta_stream stream) {
    const gdelta_shape &shape = call.shape;
    int columns = shape.sequences * shape.heads_o < kStepManyHeads ? kForwardColumns / 2 : kForwardColumns;
    Launch launch(shape, columns, static_cast<size_t>(shape.tokens) * sizeof(StagedRow<Width>), stream);
    bool vk = (call.in.initial.data ? call.in.initial : call.final).order == GDELTA_STATE_VK;
    auto *kernel = vk ? recurrent_step<Width, T, true> : recurrent_step<Width, T, false>;
    size_t &bytes = launch.config.dynamicSmemBytes;
    bytes += StateBlock<Width, T, false>::bytes(launch.config.blockDim.x);
    if (bytes > kStepMostShared || !has_chunks<T>(call.in.initial, shape) || !has_chunks<T>(call.final, shape)) {
        return launch_long<Width>(call, work, stream);
    }
    if (bytes > 48 * 1024) {  // what a kernel has without being asked
        cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
        if (error != cudaSuccess) return error;
    }
    return cudaLaunchKernelEx(&launch.config, kernel, call, work.malformed, launch.tiles);
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
