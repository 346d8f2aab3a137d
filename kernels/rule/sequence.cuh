// Which rows and states one sequence has, read from tables on the device. Whatever a table holds, nothing outside the
// tensors is addressed.
#pragma once

#include "kernels/args.h"
#include "kernels/rule/gate.cuh"

namespace gdelta {

struct Sequence {
    int64_t batch;    // index of the batch axis
    int64_t begin;    // first token on the token axis
    int64_t row;      // first token row of all: where parts in the workspace start
    int64_t length;   // tokens
    bool skip;        // a slot is -1, or out of range: output rows are 0 and no state is touched
    int64_t initial;  // element offset of this head's initial state, -1: zeros
    int64_t final;    // of its final state
};

__device__ __forceinline__ void report(const gdelta_inputs &in, int rule, int64_t index) {
    if (!in.device_status) return;
    unsigned long long word = (static_cast<unsigned long long>(rule) << 32) | static_cast<uint32_t>(index);
    atomicCAS(reinterpret_cast<unsigned long long *>(in.device_status), 0ull, word);
}

__device__ __forceinline__ int64_t load_slot(const gdelta_state_view &state, int64_t n) {
    return state.slots.data ? load_index(state.slots, n) : n;
}

// The entry of the pool, or -1 to skip.
__device__ __forceinline__ int64_t check_slot(const gdelta_inputs &in, const gdelta_state_view &state, int64_t slot,
                                              int64_t n, int rule, bool reporter) {
    if (!state.slots.data || (slot >= -1 && slot < state.slot_count)) return slot;
    if (reporter) report(in, rule, n);
    return -1;
}

__device__ __forceinline__ int64_t slot_of(const gdelta_inputs &in, const gdelta_state_view &state, int64_t n, int rule,
                                           bool reporter) {
    return check_slot(in, state, load_slot(state, n), n, rule, reporter);
}

// Its rows; of its states nothing yet.
__device__ __forceinline__ Sequence find_tokens(const gdelta_shape &shape, const gdelta_inputs &in, int64_t n) {
    Sequence s = {};
    if (shape.packed) {
        s.begin = s.row = load_index(in.cu_seqlens, n);
        s.length = load_index(in.cu_seqlens, n + 1) - s.begin;
    } else {
        s.batch = n;
        s.row = n * shape.tokens;
        s.length = shape.tokens;
    }
    return s;
}

// What the tables say of the initial state, on its way from memory, where nothing may wait for it yet.
struct InitialEntry {
    int64_t slot;
    bool given;

    __device__ __forceinline__ void load(const gdelta_inputs &in, int64_t n) {
        if (!in.initial.data) return;
        slot = load_slot(in.initial, n);
        given = !in.has_initial || in.has_initial[n];
    }
};

// Its states. `final.data` may be NULL. One thread of the grid reports each bad slot.
__device__ __forceinline__ void find_states(const gdelta_inputs &in, const gdelta_state_view &final, int64_t n,
                                            int head, bool reporter, const InitialEntry &entry, Sequence &s) {
    s.initial = s.final = -1;
    int64_t slot = -1;
    if (in.initial.data) {
        slot = check_slot(in, in.initial, entry.slot, n, GDELTA_DEVICE_INITIAL_SLOT_RANGE, reporter);
        s.skip = slot < 0;
        if (entry.given) s.initial = slot * in.initial.slot + head * in.initial.head;
    }
    if (final.data) {
        const gdelta_table &table = in.initial.slots;  // in place: the same numbers, looked up once
        bool in_place = final.data == in.initial.data && final.slots.data == table.data &&
                        final.slots.is_int64 == table.is_int64 && final.slot_count == in.initial.slot_count;
        if (!in_place) slot = slot_of(in, final, n, GDELTA_DEVICE_FINAL_SLOT_RANGE, reporter);
        s.skip = s.skip || slot < 0;
        s.final = slot * final.slot + head * final.head;
    }
}

__device__ __forceinline__ Sequence find_sequence(const gdelta_shape &shape, const gdelta_inputs &in,
                                                  const gdelta_state_view &final, int64_t n, int head, bool reporter) {
    Sequence s = find_tokens(shape, in, n);
    InitialEntry entry;
    entry.load(in, n);
    find_states(in, final, n, head, reporter, entry, s);
    return s;
}

// The number of the state after `tokens` tokens, a positive multiple of the interval; gdelta.h says why no other has
// it.
__device__ __forceinline__ int64_t checkpoint_number(const gdelta_shape &shape, const Sequence &s, int64_t tokens,
                                                     int64_t interval) {
    int64_t first = shape.packed ? s.begin / interval : s.batch * (shape.tokens / interval);
    return first + tokens / interval - 1;
}

// A set of tokens of a draft, at most 16: the way from the root to one of them.
using TokenSet = uint32_t;

// The tokens that token `last` of sequence n continues, and itself; {} for -1. Without a table each continues the one
// before it. False if an entry on the way is no earlier token, nor -1.
__device__ __forceinline__ bool find_path(const gdelta_shape &shape, const gdelta_inputs &in,
                                          const gdelta_table &parents, int64_t n, int last, bool reporter,
                                          TokenSet *path) {
    *path = 0;
    for (int t = last; t >= 0;) {
        *path |= 1u << t;
        int64_t parent = parents.data ? load_index(parents, n * shape.tokens + t) : t - 1;
        if (parent < -1 || parent >= t) {
            if (reporter) report(in, GDELTA_DEVICE_PARENT_RANGE, n * shape.tokens + t);
            return false;
        }
        t = static_cast<int>(parent);
    }
    return true;
}

// The head of a tensor of `heads` heads that output head `head` reads.
__device__ __forceinline__ int head_of(const gdelta_shape &shape, int head, int heads) {
    if (heads == shape.heads_o) return head;
    return shape.head_map == GDELTA_HEADS_TILED ? head % heads : head / (shape.heads_o / heads);  // heads divides
}

// Whether no output head before this one reads the same of `heads` heads.
__device__ __forceinline__ bool reads_first(const gdelta_shape &shape, int head, int heads) {
    return shape.head_map == GDELTA_HEADS_TILED ? head < heads : head % (shape.heads_o / heads) == 0;
}

__device__ __forceinline__ int64_t first_of(const gdelta_view &view, const Sequence &s, int head) {
    return offset_of(view, s.batch, s.begin, head);
}

// What a block knows of its sequence and output head. One thread finds it out; it stays in shared memory: 64-bit
// offsets in registers, used once in many tokens, made the register tiles spill.
struct Job {
    Sequence sequence;
    int64_t q, k, v, g, beta;  // element offsets of the first token, at the heads that the output head reads
    int64_t o;                 // of o, or of its gradient
    int64_t dv;
    GateParameters gate;
};

__device__ __forceinline__ void find_rows(const gdelta_shape &shape, const gdelta_inputs &in, const Sequence &s,
                                          int head, Job &job) {
    int shared = head_of(shape, head, shape.heads_k);  // by query and key, or by key and value: divisions once
    job.sequence = s;
    job.q = first_of(in.q, s, shape.heads_q == shape.heads_k ? shared : head);
    job.k = first_of(in.k, s, shared);
    job.v = first_of(in.v, s, shape.heads_v == shape.heads_k ? shared : head);
    job.g = first_of(in.g, s, head);
    job.beta = first_of(in.beta, s, head);
}

__device__ __forceinline__ void find_job(const gdelta_shape &shape, const gdelta_inputs &in, const Sequence &s,
                                         int head, Job &job) {
    find_rows(shape, in, s, head, job);
    job.gate = load_gate_parameters(in, head);
}

// Enqueues the check of cu_seqlens, which leaves its verdict in *malformed; nothing if `malformed` is NULL, for then
// there is no table.
int launch_check(const gdelta_shape &shape, const gdelta_inputs &in, int32_t *malformed, gdelta_stream stream);

// True if nothing may be written.
__device__ __forceinline__ bool is_malformed(const int32_t *malformed) {
    return malformed && *malformed;
}

}  // namespace gdelta
