/* Every rule of gdelta.h: one table of calls that break one rule each. A row must fail with its status and a sentence
 * that starts with the field and its value and names the rule; what the caller passed, the structs and all memory, must
 * be as it was. Rows run through the device functions, with addresses that nobody may touch, and through the CPU
 * reference, with memory that must not change. */
#define _POSIX_C_SOURCE 200809L /* pthread_barrier_t */
#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gdelta/reference.h>

#include "support/gpu.h"

/* ---- Good calls ---- */

/* B = 2, T = 64, HQ = HK = 2, HV = HO = 4, K = 8, V = 4; bf16 and fp32. */
typedef enum base {
    kProblem,       /* plan_create */
    kPackedProblem, /* plan_create, THD */
    kForward,
    kPacked, /* forward, THD of 128 rows, 2 sequences of at most 80 */
    kPooled, /* forward, states in pools of 5 slots, and a checkpoint of each sequence in another */
    kBackward,
    kFused, /* backward, softplus gate */
    kStep,  /* 4 tokens */
    kDraft, /* step, all that a draft can leave, and a tree; token states in a pool of 9 slots */
    kCommit /* of that draft */
} base;

enum { kTensorBytes = 1 << 16, kTensors = 48, kArenaBytes = kTensorBytes * kTensors, kPattern = 0x5a };

enum { kCuSeqlens, kInitialSlots, kFinalSlots, kCheckpointSlots, kTokenSlots, kParents, kAccepted, kTables };

typedef struct call {
    base from;
    bool host; /* through the reference */
    char *memory;
    int tensors;
    gdelta_problem problem;
    gdelta_forward_args forward;
    gdelta_backward_args backward;
    gdelta_step_args step;
    gdelta_commit_args commit;
    void *workspace;
    size_t missing_bytes; /* of the workspace */
    /* Contents of the tables, which get them in their own width. */
    int64_t cu_seqlens[3], initial_slots[2], final_slots[2], checkpoint_slots[2], token_slots[8], parents[8],
        accepted[2];
    int64_t tables[kTables][8];
} call;

static void *next(call *c) {
    cr_assert_lt(c->tensors, kTensors);
    return c->memory + (size_t)c->tensors++ * kTensorBytes;
}

static void set_index(call *c, gdelta_index *index, int table, bool wide) {
    index->data = c->host ? (void *)c->tables[table] : next(c);
    index->host = c->host ? NULL : c->tables[table];
    index->dtype = wide ? GDELTA_DTYPE_INT64 : GDELTA_DTYPE_DEFAULT;
}

static void write_table(int64_t *table, const int64_t *contents, int count, bool wide) {
    for (int i = 0; i < count; ++i) {
        int32_t narrow = (int32_t)contents[i];
        if (wide)
            table[i] = contents[i];
        else
            memcpy((char *)table + 4 * i, &narrow, sizeof narrow);
    }
}

static void write_tables(call *c, bool wide) {
    write_table(c->tables[kCuSeqlens], c->cu_seqlens, 3, wide);
    write_table(c->tables[kInitialSlots], c->initial_slots, 2, wide);
    write_table(c->tables[kFinalSlots], c->final_slots, 2, wide);
    write_table(c->tables[kCheckpointSlots], c->checkpoint_slots, 2, wide);
    write_table(c->tables[kTokenSlots], c->token_slots, 8, wide);
    write_table(c->tables[kParents], c->parents, 8, wide);
    write_table(c->tables[kAccepted], c->accepted, 2, wide);
}

/* `memory`: host memory of kArenaBytes, or an address for device pointers. */
static void make_call(call *c, base from, bool host, bool wide, char *memory) {
    memset(c, 0, sizeof *c);
    *c = (call){.from = from,
                .host = host,
                .memory = memory,
                .problem = {.struct_size = sizeof c->problem,
                            .batch = 2,
                            .tokens = from == kStep || from == kDraft || from == kCommit ? 4 : 64,
                            .heads_q = 2,
                            .heads_k = 2,
                            .heads_v = 4,
                            .dim_k = 8,
                            .dim_v = 4,
                            .compute_capability = 90,
                            .multiprocessors = 132},
                .cu_seqlens = {0, 60, 128},
                .initial_slots = {1, -1},
                .final_slots = {4, 0},
                .checkpoint_slots = {2, -1},
                .token_slots = {8, 7, 6, -1, 4, 3, 2, 1},
                .parents = {-1, 0, 0, 2, -1, -1, 1, 0},
                .accepted = {3, 0}};
    gdelta_problem *p = &c->problem;
    c->workspace = next(c);

    gdelta_forward_args *f = &c->forward;
    f->struct_size = sizeof *f;
    f->q.data = next(c), f->k.data = next(c), f->v.data = next(c), f->g.data = next(c), f->beta.data = next(c);
    f->o.data = next(c), f->initial_state.data = next(c), f->final_state.data = next(c);
    if (from == kPacked || from == kPackedProblem) {
        p->layout = GDELTA_LAYOUT_THD;
        p->batch = 0;
        p->sequences = 2;
        p->total_tokens = 128;
        p->tokens = 80;
        set_index(c, &f->cu_seqlens, kCuSeqlens, wide);
    }
    if (from == kPooled) {
        f->initial_state.slot_count = f->final_state.slot_count = 5;
        set_index(c, &f->initial_state.slots, kInitialSlots, wide);
        set_index(c, &f->final_state.slots, kFinalSlots, wide);
        f->checkpoints.data = next(c);
        f->checkpoints.slot_count = 5;
        f->checkpoint_interval = 64;
        set_index(c, &f->checkpoints.slots, kCheckpointSlots, wide);
    }

    gdelta_backward_args *b = &c->backward;
    *b = (gdelta_backward_args){.struct_size = sizeof *b,
                                .q = f->q,
                                .k = f->k,
                                .v = f->v,
                                .g = f->g,
                                .beta = f->beta,
                                .initial_state = f->initial_state};
    b->d_o.data = next(c), b->d_final_state.data = next(c);
    b->dq.data = next(c), b->dk.data = next(c), b->dv.data = next(c), b->dg.data = next(c), b->dbeta.data = next(c);
    b->d_initial_state.data = next(c);
    if (from == kFused) {
        p->gate = GDELTA_GATE_SOFTPLUS;
        b->a_log.data = next(c), b->dt_bias.data = next(c), b->da_log.data = next(c), b->ddt_bias.data = next(c);
    }

    gdelta_step_args *s = &c->step;
    *s = (gdelta_step_args){.struct_size = sizeof *s,
                            .q = f->q,
                            .k = f->k,
                            .v = f->v,
                            .g = f->g,
                            .beta = f->beta,
                            .o = f->o,
                            .state = f->initial_state};
    const gdelta_record record = {.k.data = next(c), .u.data = next(c), .decay.data = next(c)};
    if (from == kDraft) {
        s->flags = GDELTA_STEP_KEEP_STATE;
        s->token_states.data = next(c);
        s->token_states.slot_count = 9;
        set_index(c, &s->token_states.slots, kTokenSlots, wide);
        s->record = record;
        set_index(c, &s->parents, kParents, wide);
    }
    c->commit = (gdelta_commit_args){.struct_size = sizeof c->commit, .record = record, .state = s->state};
    set_index(c, &c->commit.accepted, kAccepted, wide);
    set_index(c, &c->commit.parents, kParents, wide);
}

static char *fake_memory(void) {
    return (char *)(uintptr_t)0x10000;
}

static gdelta_status run_reference(const call *c) {
    switch (c->from) {
        case kBackward:
        case kFused:
            return gdelta_reference_backward(&c->problem, &c->backward);
        case kStep:
        case kDraft:
            return gdelta_reference_step(&c->problem, &c->step);
        case kCommit:
            return gdelta_reference_commit(&c->problem, &c->commit);
        default:
            return gdelta_reference_forward(&c->problem, &c->forward);
    }
}

static gdelta_status run_plan(const call *c, const gdelta_plan *plan) {
    bool backward = c->from == kBackward || c->from == kFused;
    size_t bytes = 0;
    gdelta_status status =
        gdelta_plan_workspace_size(plan, backward ? GDELTA_OPERATION_BACKWARD : GDELTA_OPERATION_FORWARD, &bytes);
    cr_assert(status == GDELTA_OK || c->problem.engine == GDELTA_ENGINE_HOPPER); /* which has no step to size */
    bytes -= c->missing_bytes;
    if (backward) return gdelta_backward(plan, &c->backward, c->workspace, bytes, NULL);
    if (c->from == kStep || c->from == kDraft) return gdelta_step(plan, &c->step, c->workspace, bytes, NULL);
    if (c->from == kCommit) return gdelta_commit(plan, &c->commit, c->workspace, bytes, NULL);
    return gdelta_forward(plan, &c->forward, c->workspace, bytes, NULL);
}

static gdelta_status run_device(const call *c) {
    gdelta_plan *plan = NULL;
    cr_assert_eq(gdelta_plan_create(&c->problem, &plan), GDELTA_OK, "%s", gdelta_last_error());
    gdelta_status status = run_plan(c, plan);
    gdelta_plan_destroy(plan);
    return status;
}

/* ---- The table ---- */

typedef enum change_kind { kSet = 1, kReal, kAdd, kCopy } change_kind;

/* One assignment to a field of the call. */
typedef struct change {
    change_kind kind;
    const char *text;
    size_t offset, size;
    int64_t value; /* kSet, kAdd: the number; kCopy: offset of the field to copy */
    double real;
} change;

#define FIELD(field) offsetof(call, field), sizeof((call *)0)->field
#define SET(field, number) \
    { kSet, #field " = " #number, FIELD(field), (int64_t)(number), 0 }
#define REAL(field, number) \
    { kReal, #field " = " #number, FIELD(field), 0, number }
#define ADD(field, number) \
    { kAdd, #field " += " #number, FIELD(field), number, 0 }
#define COPY(field, from) \
    { kCopy, #field " = " #from, FIELD(field), offsetof(call, from), 0 }
#define STRIDES(field, s0, s1, s2, s3) \
    SET(field.stride[0], s0), SET(field.stride[1], s1), SET(field.stride[2], s2), SET(field.stride[3], s3)

#define NO_TABLE(field) SET(field.data, 0), SET(field.host, 0)

/* A call of 64 x 64 for the hopper engine by name. */
#define HOPPER SET(problem.engine, 2), SET(problem.dim_k, 64), SET(problem.dim_v, 64)

typedef enum place { kBoth, kDeviceOnly, kHostOnly } place;

typedef struct row {
    place place;
    base from;
    gdelta_status status;
    const char *words[3]; /* the sentence starts with the first and has the others */
    change changes[10];
} row;

enum {
    kInvalid = GDELTA_ERROR_INVALID_ARGUMENT,
    kUnsupported = GDELTA_ERROR_UNSUPPORTED,
    kTooSmall = GDELTA_ERROR_WORKSPACE_TOO_SMALL
};

#define WORDS(...) \
    { __VA_ARGS__ }
#define ROW(place, from, status, words, ...) \
    {                                        \
        place, from, status, words, {        \
            __VA_ARGS__                      \
        }                                    \
    }

/* A constant that is out of range on both sides. */
#define ENUM_ROWS(field, above, range)                                                                             \
    ROW(kBoth, kProblem, kInvalid, WORDS(#field " is " #above, "must be 0 to " range), SET(problem.field, above)), \
        ROW(kBoth, kProblem, kInvalid, WORDS(#field " is -1", "must be 0 to " range), SET(problem.field, -1))

#define RANGE_ROWS(from, field, below, above, rule)                                           \
    ROW(kBoth, from, kInvalid, WORDS(#field " is " #below, rule), SET(problem.field, below)), \
        ROW(kBoth, from, kInvalid, WORDS(#field " is " #above, rule), SET(problem.field, above))

#define PROBLEM_DTYPE_ROWS(field)                                                                                     \
    ROW(kBoth, kProblem, kInvalid, WORDS(#field " is 5 (int32)", "bf16, fp16 or fp32"), SET(problem.field, 5)),       \
        ROW(kBoth, kProblem, kInvalid, WORDS(#field " is 6 (int64)", "bf16, fp16 or fp32"), SET(problem.field, 6)),   \
        ROW(kBoth, kProblem, kInvalid, WORDS(#field " is 7 (unknown)", "bf16, fp16 or fp32"), SET(problem.field, 7)), \
        ROW(kBoth, kProblem, kInvalid, WORDS(#field " is 35 (unknown)", "bf16, fp16 or fp32"),                        \
            SET(problem.field, 35)),                                                                                  \
        ROW(kBoth, kProblem, kInvalid, WORDS(#field " is -1 (unknown)", "bf16, fp16 or fp32"),                        \
            SET(problem.field, -1)),                                                                                  \
        ROW(kDeviceOnly, kProblem, kUnsupported, WORDS(#field " is fp64", "only the CPU reference"),                  \
            SET(problem.field, 4))

#define RESERVED_ROW(i) \
    ROW(kBoth, kProblem, kInvalid, WORDS("problem.reserved[" #i "] is 1", "must be 0"), SET(problem.reserved[i], 1))

/* What tensors and states share. `wrong` is a float type that the role does not take. */
#define DATA_ROWS(from, args, field, wrong, wrong_name, right)                                                         \
    ROW(kBoth, from, kInvalid, WORDS(#field ".reserved is 7", "must be 0"), SET(args.field.reserved, 7)),              \
        ROW(kBoth, from, kInvalid, WORDS(#field ".data is ", "aligned to its"), ADD(args.field.data, 1)),              \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is 7 (unknown)", "must be " right), SET(args.field.dtype, 7)), \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is -1 (unknown)", "must be " right),                           \
            SET(args.field.dtype, -1)),                                                                                \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is 6 (int64)", "must be " right), SET(args.field.dtype, 6)),   \
        ROW(kDeviceOnly, from, kInvalid, WORDS(#field ".dtype is 4 (fp64)", "must be " right),                         \
            SET(args.field.dtype, 4)),                                                                                 \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is " #wrong " (" wrong_name ")", "must be " right),            \
            SET(args.field.dtype, wrong))

#define TENSOR_ROWS(from, args, field, wrong, wrong_name, right)                                      \
    DATA_ROWS(from, args, field, wrong, wrong_name, right),                                           \
        ROW(kBoth, from, kInvalid, WORDS(#field ".stride[3] is 2", "the innermost stride must be 1"), \
            SET(args.field.stride[3], 2))

#define STATE_ROWS(from, args, field)                                                                                 \
    DATA_ROWS(from, args, field, 5, "int32", "bf16 or fp16 or fp32"),                                                 \
        ROW(kBoth, from, kInvalid, WORDS(#field ".stride[2] is 5", "must be 4"), STRIDES(args.field, 128, 32, 5, 1)), \
        ROW(kBoth, from, kInvalid, WORDS(#field ".stride[3] is 2", "must be 1"), STRIDES(args.field, 128, 32, 4, 2)), \
        ROW(kBoth, from, kInvalid, WORDS(#field ".stride[0] is 0", "positive stride"),                                \
            STRIDES(args.field, 0, 32, 4, 1)),                                                                        \
        ROW(kBoth, from, kInvalid, WORDS(#field ".stride[1] is -32", "positive"), STRIDES(args.field, 128, -32, 4, 1))

#define SHARED_ADDRESSES_ROW(from, args, field, s0, s1, s2)                                                          \
    ROW(kBoth, from, kInvalid,                                                                                       \
        WORDS(#field ".stride is [" #s0 ", " #s1 ", " #s2 ", 1]", "elements of an output must not share addresses"), \
        STRIDES(args.field, s0, s1, s2, 1))

#define INDEX_ROWS(from, args, field)                                                                                  \
    ROW(kBoth, from, kInvalid, WORDS(#field ".reserved is 3", "must be 0"), SET(args.field.reserved, 3)),              \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is 3 (fp32)", "int32 or int64"), SET(args.field.dtype, 3)),    \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is 8 (unknown)", "int32 or int64"), SET(args.field.dtype, 8)), \
        ROW(kBoth, from, kInvalid, WORDS(#field ".dtype is -1 (unknown)", "int32 or int64"),                           \
            SET(args.field.dtype, -1)),                                                                                \
        ROW(kDeviceOnly, from, kInvalid, WORDS(#field ".host is given but " #field ".data is NULL"),                   \
            SET(args.field.data, 0)),                                                                                  \
        ROW(kBoth, from, kInvalid, WORDS(#field ".data is ", "aligned to its int"), ADD(args.field.data, 2)),          \
        ROW(kDeviceOnly, from, kInvalid, WORDS(#field ".host is ", "aligned to its int"), ADD(args.field.host, 2))

#define SLOTS_ROWS(from, args, state, contents, last, beyond)                                                       \
    INDEX_ROWS(from, args, state.slots),                                                                            \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slots[1] is -2", "-1 (skip) to " #last), SET(contents[1], -2)),   \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slots[0] is " #beyond, "-1 (skip) to " #last),                    \
            SET(contents[0], beyond)),                                                                              \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slot_count is 0", "1 to 2^62"), SET(args.state.slot_count, 0)),   \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slot_count is -1", "1 to 2^62"), SET(args.state.slot_count, -1)), \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slot_count is 9223372036854775807"),                              \
            SET(args.state.slot_count, INT64_MAX)),                                                                 \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slot_count is 3", "there are no slots"),                          \
            SET(args.state.slot_count, 3), NO_TABLE(args.state.slots)),                                             \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slots is given but " #state ".data is NULL"),                     \
            SET(args.state.data, 0)),                                                                               \
        ROW(kBoth, from, kInvalid, WORDS(#state ".slots is given but " #state ".data is NULL"),                     \
            SET(args.state.data, 0), SET(args.state.slots.data, 0), COPY(args.state.slots.host, args.q.data))

/* A state that is not where it may be: in the pool of another, but without slots, or with other strides or types. */
#define SHARED_POOL_ROWS(from, args, field, other)                                                            \
    ROW(kBoth, from, kInvalid, WORDS(#field ".data is also the initial or final state's", "both need slots"), \
        COPY(args.field.data, args.other.data), NO_TABLE(args.field.slots), SET(args.field.slot_count, 0)),   \
        ROW(kBoth, from, kInvalid, WORDS(#field ".data is also the initial or final state's", "same dtype"),  \
            COPY(args.field.data, args.other.data), SET(args.field.dtype, 1)),                                \
        ROW(kBoth, from, kInvalid, WORDS(#field ".data is also the initial or final state's", "strides"),     \
            COPY(args.field.data, args.other.data), STRIDES(args.field, 256, 32, 4, 1))

#define PARENT_ROW(from, at, parent, token)                                                             \
    ROW(kBoth, from, kInvalid, WORDS("parents[" #at "] is " #parent ";", "for token " #token, "or -1"), \
        SET(parents[at], parent))

/* An output that is also another tensor. */
#define ALIAS_ROW(from, args, field, other)                                             \
    ROW(kBoth, from, kInvalid, WORDS(#field ".data is ", "also ", "memory of its own"), \
        COPY(args.field.data, args.other.data))

static const row rows[] = {
    /* Problem */
    ROW(kBoth, kProblem, kInvalid, WORDS("problem.struct_size is 0", "gdelta_problem has"),
        SET(problem.struct_size, 0)),
    ROW(kBoth, kProblem, kInvalid, WORDS("problem.struct_size is ", "gdelta_problem has"), ADD(problem.struct_size, 8)),
    ROW(kBoth, kProblem, kInvalid,
        WORDS("problem.flags is 0x4", "only GDELTA_FLAG_BATCH_INVARIANT and GDELTA_FLAG_SMALL_WORKSPACE are"),
        SET(problem.flags, 4)),
    RESERVED_ROW(0),
    RESERVED_ROW(1),
    RESERVED_ROW(2),
    RESERVED_ROW(3),
    RESERVED_ROW(4),
    RESERVED_ROW(5),
    RESERVED_ROW(6),
    RESERVED_ROW(7),
    ENUM_ROWS(layout, 4, "3"),
    ENUM_ROWS(engine, 3, "2"),
    ENUM_ROWS(l2norm, 3, "2"),
    ENUM_ROWS(gate, 3, "2"),
    ENUM_ROWS(beta, 3, "2"),
    ENUM_ROWS(head_map, 2, "1"),
    ENUM_ROWS(state_order, 2, "1"),
    ENUM_ROWS(save_mode, 2, "1"),
    RANGE_ROWS(kProblem, batch, 0, 2147483647, "at least 1 and less than 2^31 - 1"),
    ROW(kBoth, kProblem, kInvalid, WORDS("tokens is -1", "must not be negative"), SET(problem.tokens, -1)),
    ROW(kBoth, kProblem, kInvalid, WORDS("sequences is 1", "for THD only"), SET(problem.sequences, 1)),
    ROW(kBoth, kProblem, kInvalid, WORDS("total_tokens is 5", "for THD only"), SET(problem.total_tokens, 5)),
    ROW(kBoth, kProblem, kInvalid, WORDS("batch (2) times tokens (9223372036854775807)", "2^63"),
        SET(problem.tokens, INT64_MAX)),
    ROW(kBoth, kPackedProblem, kInvalid, WORDS("batch is 1", "with THD it must be 0"), SET(problem.batch, 1)),
    RANGE_ROWS(kPackedProblem, sequences, 0, 2147483647, "at least 1 and less than 2^31 - 1"),
    ROW(kBoth, kPackedProblem, kInvalid, WORDS("total_tokens is -1", "must not be negative"),
        SET(problem.total_tokens, -1)),
    RANGE_ROWS(kPackedProblem, tokens, -1, 129, "0 (not known) to total_tokens (128)"),
    RANGE_ROWS(kProblem, heads_q, 0, 1048577, "1 to 1048576"),
    RANGE_ROWS(kProblem, heads_k, -1, 1048577, "1 to 1048576"),
    RANGE_ROWS(kProblem, heads_v, 0, 1048577, "1 to 1048576"),
    RANGE_ROWS(kProblem, dim_k, 0, 1048577, "1 to 1048576"),
    RANGE_ROWS(kProblem, dim_v, -3, 1048577, "1 to 1048576"),
    ROW(kBoth, kProblem, kInvalid, WORDS("heads_q, heads_k, heads_v are 2, 2, 3", "divides heads_v"),
        SET(problem.heads_v, 3)),
    ROW(kBoth, kProblem, kInvalid, WORDS("heads_q, heads_k, heads_v are 2, 1, 4", "divides heads_q"),
        SET(problem.heads_k, 1)),
    ROW(kBoth, kProblem, kInvalid, WORDS("heads_q, heads_k, heads_v are 6, 4, 4"), SET(problem.heads_q, 6),
        SET(problem.heads_k, 4)),
    ROW(kBoth, kProblem, kInvalid, WORDS("2305843009213693952 token rows and 2 sequences", "2^63 bytes"),
        SET(problem.tokens, INT64_C(1) << 60)),
    ROW(kBoth, kProblem, kInvalid, WORDS("2251799813685248 token rows and 2 sequences", "2^63 bytes"),
        SET(problem.tokens, INT64_C(1) << 50)),
    ROW(kBoth, kProblem, kInvalid,
        WORDS("0 token rows and 1048576 sequences of 4 heads of 1048576 x 1048576", "2^63 bytes"),
        SET(problem.batch, 1 << 20), SET(problem.tokens, 0), SET(problem.dim_k, 1 << 20), SET(problem.dim_v, 1 << 20)),
    ROW(kBoth, kProblem, kInvalid,
        WORDS("0 token rows and 16384 sequences of 4 heads of 1048576 x 1048576", "2^63 bytes"),
        SET(problem.batch, 1 << 14), SET(problem.tokens, 0), SET(problem.dim_k, 1 << 20), SET(problem.dim_v, 1 << 20)),
    PROBLEM_DTYPE_ROWS(dtype),
    PROBLEM_DTYPE_ROWS(gate_dtype),
    PROBLEM_DTYPE_ROWS(beta_dtype),
    PROBLEM_DTYPE_ROWS(state_dtype),
    RANGE_ROWS(kProblem, has_scale, -1, 2, "must be 0 or 1"),
    ROW(kBoth, kProblem, kInvalid, WORDS("scale is ", "nan", "must be finite"), SET(problem.has_scale, 1),
        REAL(problem.scale, NAN)),
    ROW(kBoth, kProblem, kInvalid, WORDS("scale is inf", "must be finite"), SET(problem.has_scale, 1),
        REAL(problem.scale, INFINITY)),
    ROW(kBoth, kProblem, kInvalid, WORDS("scale is 0.5 but has_scale is 0", "set has_scale to 1"),
        REAL(problem.scale, 0.5)),
    ROW(kBoth, kProblem, kInvalid, WORDS("l2norm_eps is ", "nan", "finite and not negative"), SET(problem.l2norm, 1),
        REAL(problem.l2norm_eps, NAN)),
    ROW(kBoth, kProblem, kInvalid, WORDS("l2norm_eps is inf", "finite and not negative"), SET(problem.l2norm, 1),
        REAL(problem.l2norm_eps, INFINITY)),
    ROW(kBoth, kProblem, kInvalid, WORDS("l2norm_eps is -0.25", "finite and not negative"), SET(problem.l2norm, 2),
        REAL(problem.l2norm_eps, -0.25)),
    ROW(kBoth, kProblem, kInvalid, WORDS("l2norm_eps is 0.25 but l2norm is NONE", "must be 0"),
        REAL(problem.l2norm_eps, 0.25)),
    RANGE_ROWS(kProblem, compute_capability, -1, 1000, "10 * major + minor"),
    RANGE_ROWS(kProblem, multiprocessors, -1, 65537, "0 to 65536"),
#ifdef GDELTA_HAVE_HOPPER
    ROW(kDeviceOnly, kProblem, kUnsupported, WORDS("engine is hopper (2), but dim_k, dim_v are 8, 4", "64 128"),
        SET(problem.engine, 2)),
    ROW(kDeviceOnly, kProblem, kUnsupported, WORDS("engine is hopper (2), but dtype is fp32", "bf16 or fp16"),
        SET(problem.engine, 2), SET(problem.dtype, 3)),
    ROW(kDeviceOnly, kForward, kUnsupported, WORDS("engine is hopper (2), but q.stride[1] is 260", "multiple of 8"),
        HOPPER, STRIDES(forward.q, 16640, 260, 64, 1)),
    ROW(kDeviceOnly, kForward, kUnsupported, WORDS("engine is hopper (2), but k.stride[2] is 68", "multiple of 8"),
        HOPPER, STRIDES(forward.k, 16640, 256, 68, 1)),
    ROW(kDeviceOnly, kForward, kUnsupported, WORDS("engine is hopper (2), but v.stride[0] is 16644", "multiple of 8"),
        HOPPER, STRIDES(forward.v, 16644, 256, 64, 1)),
    ROW(kDeviceOnly, kForward, kUnsupported, WORDS("engine is hopper (2), but v.stride[0] is 549755813888", "2^39"),
        HOPPER, STRIDES(forward.v, INT64_C(1) << 39, 256, 64, 1)),
    ROW(kDeviceOnly, kForward, kUnsupported, WORDS("engine is hopper (2), but q.data is 0x", "aligned to 16 bytes"),
        HOPPER, ADD(forward.q.data, 8)),
    ROW(kDeviceOnly, kBackward, kUnsupported, WORDS("engine is hopper (2), but q.stride[1] is 260", "multiple of 8"),
        HOPPER, STRIDES(backward.q, 16640, 260, 64, 1)),
    ROW(kDeviceOnly, kBackward, kUnsupported, WORDS("engine is hopper (2), but d_o.data is 0x", "aligned to 16 bytes"),
        HOPPER, ADD(backward.d_o.data, 8)),
    ROW(kDeviceOnly, kBackward, kUnsupported, WORDS("engine is hopper (2), but d_o.dtype is fp32", "bf16 and fp16"),
        HOPPER, SET(backward.d_o.dtype, 3)),
    ROW(kDeviceOnly, kBackward, kUnsupported, WORDS("engine is hopper (2), but dg.data is 0x", "gate is linear (1)"),
        HOPPER, SET(problem.gate, 1)),
    ROW(kDeviceOnly, kStep, kUnsupported, WORDS("engine is hopper (2)", "step is not in this version"), HOPPER),
    ROW(kDeviceOnly, kCommit, kUnsupported, WORDS("engine is hopper (2)", "commit is not in this version"), HOPPER),
#else
    ROW(kDeviceOnly, kProblem, kUnsupported, WORDS("engine is hopper (2), but", "compiled without sm_90a"),
        SET(problem.engine, 2)),
#endif
    ROW(kDeviceOnly, kProblem, kUnsupported, WORDS("dim_k, dim_v are 257, 4", "at most 256"), SET(problem.dim_k, 257)),
    ROW(kDeviceOnly, kProblem, kUnsupported, WORDS("dim_k, dim_v are 8, 257", "at most 256"), SET(problem.dim_v, 257)),
    ROW(kDeviceOnly, kProblem, kUnsupported, WORDS("536870912 sequences of 4 heads need 2147483648 blocks", "2^31 - 1"),
        SET(problem.batch, 1 << 29)),

    /* Forward */
    ROW(kBoth, kForward, kInvalid, WORDS("args.struct_size is 8", "gdelta_forward_args has"),
        SET(forward.struct_size, 8)),
    ROW(kBoth, kForward, kInvalid, WORDS("args.reserved is 1", "must be 0"), SET(forward.reserved, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("q.data is NULL", "needed"), SET(forward.q.data, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("k.data is NULL", "needed"), SET(forward.k.data, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("v.data is NULL", "needed"), SET(forward.v.data, 0)),
    TENSOR_ROWS(kForward, forward, q, 2, "fp16", "bf16"),
    TENSOR_ROWS(kForward, forward, k, 2, "fp16", "bf16"),
    TENSOR_ROWS(kForward, forward, v, 3, "fp32", "bf16"),
    TENSOR_ROWS(kForward, forward, g, 1, "bf16", "fp32"),
    TENSOR_ROWS(kForward, forward, beta, 1, "bf16", "fp32"),
    TENSOR_ROWS(kForward, forward, o, 2, "fp16", "bf16 or fp32"),
    ROW(kBoth, kForward, kInvalid, WORDS("q.dtype is 1 (bf16)", "must be fp16"), SET(problem.dtype, 2),
        SET(forward.q.dtype, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("g.dtype is 3 (fp32)", "must be bf16"), SET(problem.gate_dtype, 1),
        SET(forward.g.dtype, 3)),
    ROW(kBoth, kForward, kInvalid, WORDS("beta.dtype is 3 (fp32)", "must be fp16"), SET(problem.beta_dtype, 2),
        SET(forward.beta.dtype, 3)),
    ROW(kBoth, kForward, kInvalid, WORDS("q.stride[3] is 0", "innermost stride must be 1"),
        STRIDES(forward.q, 1024, 16, 8, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("q.stride[3] is -1", "innermost stride must be 1"),
        STRIDES(forward.q, 1024, 16, 8, -1)),
    ROW(kBoth, kForward, kInvalid, WORDS("q.stride[0] is 0", "axis of 2 elements needs a positive"),
        STRIDES(forward.q, 0, 16, 8, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("k.stride[1] is 0", "axis of 64 elements needs a positive"),
        STRIDES(forward.k, 1024, 0, 8, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("v.stride[2] is -4", "axis of 4 elements needs a positive"),
        STRIDES(forward.v, 1024, 16, -4, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("g.stride[0] is -256", "needs a positive stride"),
        STRIDES(forward.g, -256, 4, 1, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("q.stride is [1152921504606846976, 16, 8, 1]", "passes 2^63 bytes"),
        STRIDES(forward.q, INT64_C(1) << 60, 16, 8, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("k.stride is [1, 1152921504606846976, 8, 1]", "passes 2^63 bytes"),
        STRIDES(forward.k, 1, INT64_C(1) << 60, 8, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("v.stride is [9223372036854775807, 16, 4, 1]", "passes 2^63 bytes"),
        STRIDES(forward.v, INT64_MAX, 16, 4, 1)),
    SHARED_ADDRESSES_ROW(kForward, forward, o, 1024, 16, 2),
    SHARED_ADDRESSES_ROW(kForward, forward, o, 1023, 16, 4),
    SHARED_ADDRESSES_ROW(kForward, forward, o, 4, 4, 4),
    ALIAS_ROW(kForward, forward, o, q),
    ALIAS_ROW(kForward, forward, o, g),
    ALIAS_ROW(kForward, forward, o, initial_state),
    ALIAS_ROW(kForward, forward, final_state, beta),
    ALIAS_ROW(kForward, forward, final_state, o),
    ROW(kBoth, kForward, kInvalid, WORDS("g.data is NULL but gate is 1", "only a log gate"), SET(problem.gate, 1),
        SET(forward.g.data, 0)),
    ROW(kBoth, kFused, kInvalid, WORDS("g.data is NULL but gate is 2", "only a log gate"), SET(backward.g.data, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("beta.data is NULL but problem.beta is 1", "only a plain value"),
        SET(problem.beta, 1), SET(forward.beta.data, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("beta.data is NULL but problem.beta is 2", "only a plain value"),
        SET(problem.beta, 2), SET(forward.beta.data, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("a_log.data is NULL", "softplus gate needs it"), SET(problem.gate, 2)),
    ROW(kBoth, kForward, kInvalid, WORDS("a_log.data is given but gate is 0", "only a softplus gate"),
        COPY(forward.a_log.data, forward.g.data)),
    ROW(kBoth, kForward, kInvalid, WORDS("dt_bias.data is given but gate is 1", "only a softplus gate"),
        COPY(forward.dt_bias.data, forward.g.data), SET(problem.gate, 1)),
    TENSOR_ROWS(kFused, backward, a_log, 5, "int32", "bf16 or fp16 or fp32"),
    TENSOR_ROWS(kFused, backward, dt_bias, 5, "int32", "bf16 or fp16 or fp32"),
    STATE_ROWS(kForward, forward, initial_state),
    STATE_ROWS(kForward, forward, final_state),
    ROW(kBoth, kForward, kInvalid, WORDS("initial_state.stride[2] is 4", "must be 8"), SET(problem.state_order, 1),
        STRIDES(forward.initial_state, 128, 32, 4, 1)),
    SHARED_ADDRESSES_ROW(kForward, forward, final_state, 32, 32, 4),
    SHARED_ADDRESSES_ROW(kForward, forward, final_state, 128, 31, 4),
    ROW(kBoth, kForward, kInvalid, WORDS("has_initial_state is given but initial_state.data is NULL"),
        SET(forward.initial_state.data, 0), SET(forward.has_initial_state, 4096)),
    SLOTS_ROWS(kPooled, forward, initial_state, initial_slots, 4, 5),
    SLOTS_ROWS(kPooled, forward, final_state, final_slots, 4, 5),
    STATE_ROWS(kPooled, forward, checkpoints),
    SLOTS_ROWS(kPooled, forward, checkpoints, checkpoint_slots, 4, 5),
    SHARED_ADDRESSES_ROW(kPooled, forward, checkpoints, 32, 32, 4),
    ALIAS_ROW(kPooled, forward, checkpoints, o),
    ALIAS_ROW(kPooled, forward, checkpoints, v),
    SHARED_POOL_ROWS(kPooled, forward, checkpoints, initial_state),
    SHARED_POOL_ROWS(kPooled, forward, checkpoints, final_state),
    ROW(kBoth, kForward, kInvalid, WORDS("checkpoint_interval is 64 but checkpoints.data is NULL", "must be 0"),
        SET(forward.checkpoint_interval, 64)),
    ROW(kBoth, kPooled, kInvalid, WORDS("checkpoint_interval is 0;", "positive multiple of 64"),
        SET(forward.checkpoint_interval, 0)),
    ROW(kBoth, kPooled, kInvalid, WORDS("checkpoint_interval is -64;", "positive multiple of 64"),
        SET(forward.checkpoint_interval, -64)),
    ROW(kBoth, kPooled, kInvalid, WORDS("checkpoint_interval is 96;", "positive multiple of 64"),
        SET(forward.checkpoint_interval, 96)),
    INDEX_ROWS(kPacked, forward, cu_seqlens),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens.data is NULL", "THD needs cu_seqlens"),
        SET(forward.cu_seqlens.data, 0), SET(forward.cu_seqlens.host, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("cu_seqlens.data is ", "only THD"),
        COPY(forward.cu_seqlens.data, forward.q.data)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[0] is 1", "must be 0"), SET(cu_seqlens[0], 1)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[0] is -1", "must be 0"), SET(cu_seqlens[0], -1)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[1] is -4", "less than the entry before it (0)"),
        SET(cu_seqlens[1], -4)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[2] is 59", "less than the entry before it (60)"),
        SET(cu_seqlens[2], 59)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[2] is 129", "at most total_tokens (128)"), SET(cu_seqlens[2], 129)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[1] is 81", "a sequence of 81 tokens", "allows 80"),
        SET(cu_seqlens[1], 81)),
    ROW(kBoth, kPacked, kInvalid, WORDS("cu_seqlens[2] is 128", "a sequence of 88 tokens", "allows 80"),
        SET(cu_seqlens[1], 40)),
    ROW(kBoth, kPacked, kInvalid, WORDS("q.stride[0] is 1", "with THD the batch stride must be 0"),
        STRIDES(forward.q, 1, 16, 8, 1)),
    ROW(kBoth, kForward, kInvalid, WORDS("device_status is 0x4004", "aligned to 8 bytes"),
        SET(forward.device_status, 0x4004)),
    ROW(kBoth, kForward, kInvalid, WORDS("final_state.data is the initial state's", "dtype and strides"),
        SET(forward.final_state.dtype, 1), COPY(forward.final_state.data, forward.initial_state.data)),
    ROW(kBoth, kForward, kInvalid, WORDS("final_state.data is the initial state's", "dtype and strides"),
        STRIDES(forward.final_state, 256, 32, 4, 1), COPY(forward.final_state.data, forward.initial_state.data)),
    ROW(kBoth, kForward, kInvalid, WORDS("final_state.data is the initial state's", "dtype and strides"),
        STRIDES(forward.final_state, 512, 64, 4, 1), STRIDES(forward.initial_state, 512, 32, 4, 1),
        COPY(forward.final_state.data, forward.initial_state.data)),
    ROW(kBoth, kForward, kInvalid,
        WORDS("o.data, final_state.data, checkpoints.data and saved are NULL", "nothing to write"),
        SET(forward.o.data, 0), SET(forward.final_state.data, 0)),
    ROW(kBoth, kForward, kInvalid, WORDS("saved_bytes is 9 but saved is NULL"), SET(forward.saved_bytes, 9)),
    ROW(kHostOnly, kForward, kInvalid, WORDS("saved is 0x1000", "the CPU reference saves nothing"),
        SET(forward.saved, 4096), SET(forward.saved_bytes, 9)),
    ROW(kDeviceOnly, kPacked, kTooSmall, WORDS("workspace has 255 bytes", "the plan needs 256"), SET(missing_bytes, 1)),
    ROW(kDeviceOnly, kPacked, kInvalid, WORDS("workspace is NULL", "the plan needs 256"), SET(workspace, 0)),
    ROW(kDeviceOnly, kForward, kInvalid, WORDS("workspace is ", "aligned to 256 bytes"), ADD(workspace, 128)),
    ROW(kDeviceOnly, kForward, kTooSmall, WORDS("saved has 1023 bytes", "the plan needs 1024"),
        SET(problem.save_mode, 1), SET(forward.saved, 4096), SET(forward.saved_bytes, 1023)),
    ROW(kDeviceOnly, kForward, kInvalid, WORDS("saved is 0x1080", "aligned to 256 bytes"), SET(problem.save_mode, 1),
        SET(forward.saved, 4224), SET(forward.saved_bytes, 1024)),

    /* Backward */
    ROW(kBoth, kBackward, kInvalid, WORDS("args.struct_size is 9", "gdelta_backward_args has"),
        SET(backward.struct_size, 9)),
    ROW(kBoth, kBackward, kInvalid, WORDS("args.flags is 0x2", "only GDELTA_BACKWARD_ACCUMULATE_PARAMETERS"),
        SET(backward.flags, 2)),
    ROW(kBoth, kBackward, kInvalid, WORDS("v.data is NULL", "needed"), SET(backward.v.data, 0)),
    ROW(kBoth, kBackward, kInvalid, WORDS("d_o.data and d_final_state.data are NULL", "a gradient to start from"),
        SET(backward.d_o.data, 0), SET(backward.d_final_state.data, 0)),
    TENSOR_ROWS(kBackward, backward, d_o, 2, "fp16", "bf16 or fp32"),
    TENSOR_ROWS(kBackward, backward, dq, 2, "fp16", "bf16 or fp32"),
    TENSOR_ROWS(kBackward, backward, dk, 2, "fp16", "bf16 or fp32"),
    TENSOR_ROWS(kBackward, backward, dv, 2, "fp16", "bf16 or fp32"),
    TENSOR_ROWS(kBackward, backward, dg, 2, "fp16", "fp32"),
    TENSOR_ROWS(kBackward, backward, dbeta, 1, "bf16", "fp32"),
    TENSOR_ROWS(kFused, backward, da_log, 1, "bf16", "fp32"),
    TENSOR_ROWS(kFused, backward, ddt_bias, 2, "fp16", "fp32"),
    STATE_ROWS(kBackward, backward, d_final_state),
    STATE_ROWS(kBackward, backward, d_initial_state),
    ROW(kBoth, kBackward, kInvalid, WORDS("dg.dtype is 2 (fp16)", "must be bf16 or fp32"), SET(problem.gate_dtype, 1),
        SET(backward.dg.dtype, 2)),
    ROW(kBoth, kBackward, kInvalid, WORDS("dbeta.dtype is 1 (bf16)", "must be fp16 or fp32"),
        SET(problem.beta_dtype, 2), SET(backward.dbeta.dtype, 1)),
    SHARED_ADDRESSES_ROW(kBackward, backward, dq, 1024, 15, 8),
    SHARED_ADDRESSES_ROW(kBackward, backward, dk, 1024, 16, 7),
    SHARED_ADDRESSES_ROW(kBackward, backward, dv, 1024, 16, 3),
    SHARED_ADDRESSES_ROW(kBackward, backward, dg, 256, 2, 1),
    SHARED_ADDRESSES_ROW(kBackward, backward, dbeta, 4, 4, 1),
    SHARED_ADDRESSES_ROW(kBackward, backward, d_initial_state, 64, 32, 4),
    ROW(kBoth, kFused, kInvalid, WORDS("da_log.stride[2] is 0", "axis of 4 elements needs a positive"),
        STRIDES(backward.da_log, 0, 0, 0, 1)),
    ROW(kBoth, kFused, kInvalid, WORDS("ddt_bias.stride[2] is -1", "axis of 4 elements needs a positive"),
        STRIDES(backward.ddt_bias, 0, 0, -1, 1)),
    ALIAS_ROW(kBackward, backward, dq, q),
    ALIAS_ROW(kBackward, backward, dk, dq),
    ALIAS_ROW(kBackward, backward, dv, d_o),
    ALIAS_ROW(kBackward, backward, dg, g),
    ALIAS_ROW(kBackward, backward, dbeta, dg),
    ALIAS_ROW(kFused, backward, da_log, a_log),
    ALIAS_ROW(kFused, backward, ddt_bias, da_log),
    ALIAS_ROW(kBackward, backward, d_initial_state, d_final_state),
    ALIAS_ROW(kBackward, backward, d_initial_state, initial_state),
    ROW(kBoth, kBackward, kInvalid, WORDS("dg.data is given but g.data is NULL"), SET(backward.g.data, 0)),
    ROW(kBoth, kBackward, kInvalid, WORDS("dbeta.data is given but beta.data is NULL"), SET(backward.beta.data, 0)),
    ROW(kBoth, kFused, kInvalid, WORDS("da_log.data is given but a_log.data is NULL"), SET(problem.gate, 0),
        SET(backward.a_log.data, 0), SET(backward.dt_bias.data, 0)),
    ROW(kBoth, kFused, kInvalid, WORDS("ddt_bias.data is given but dt_bias.data is NULL"),
        SET(backward.dt_bias.data, 0)),
    ROW(kBoth, kBackward, kInvalid, WORDS("no gradient's data is given", "nothing to write"), SET(backward.dq.data, 0),
        SET(backward.dk.data, 0), SET(backward.dv.data, 0), SET(backward.dg.data, 0), SET(backward.dbeta.data, 0),
        SET(backward.d_initial_state.data, 0)),
    ROW(kBoth, kBackward, kInvalid,
        WORDS("args.flags has GDELTA_BACKWARD_ACCUMULATE_PARAMETERS", "da_log.data and ddt_bias.data are NULL"),
        SET(backward.flags, 1)),
    ROW(kBoth, kBackward, kInvalid, WORDS("saved_bytes is 3 but saved is NULL"), SET(backward.saved_bytes, 3)),
    ROW(kHostOnly, kBackward, kInvalid, WORDS("saved is 0x1000", "the CPU reference saves nothing"),
        SET(backward.saved, 4096)),
    ROW(kDeviceOnly, kBackward, kTooSmall, WORDS("workspace has 37887 bytes", "the plan needs 37888"),
        SET(missing_bytes, 1)),
    ROW(kDeviceOnly, kBackward, kInvalid, WORDS("workspace is NULL", "the plan needs 37888"), SET(workspace, 0)),
    ROW(kDeviceOnly, kBackward, kInvalid, WORDS("workspace is ", "aligned to 256 bytes"), ADD(workspace, 16)),
    ROW(kDeviceOnly, kBackward, kTooSmall, WORDS("saved has 0 bytes", "the plan needs 1024"),
        SET(problem.save_mode, 1)),
    ROW(kDeviceOnly, kBackward, kTooSmall, WORDS("saved has 1023 bytes", "needs 1024"), SET(problem.save_mode, 1),
        SET(backward.saved, 4096), SET(backward.saved_bytes, 1023)),
    ROW(kDeviceOnly, kBackward, kInvalid, WORDS("saved is 0x1008", "aligned to 256 bytes"), SET(problem.save_mode, 1),
        SET(backward.saved, 4104), SET(backward.saved_bytes, 1024)),

    /* Step and commit */
    ROW(kBoth, kStep, kInvalid, WORDS("args.struct_size is 0", "gdelta_step_args has"), SET(step.struct_size, 0)),
    ROW(kBoth, kStep, kInvalid, WORDS("tokens is 0", "a step takes 1 to 16 tokens"), SET(problem.tokens, 0)),
    ROW(kBoth, kStep, kInvalid, WORDS("tokens is 17", "a step takes 1 to 16 tokens"), SET(problem.tokens, 17)),
    ROW(kBoth, kStep, kUnsupported, WORDS("layout is THD", "a step takes dense layouts"), SET(problem.layout, 3),
        SET(problem.batch, 0), SET(problem.sequences, 2), SET(problem.total_tokens, 8)),
    ROW(kBoth, kStep, kInvalid, WORDS("args.flags is 0x2", "only GDELTA_STEP_KEEP_STATE"), SET(step.flags, 2)),
    ROW(kBoth, kStep, kInvalid, WORDS("q.data is NULL", "needed"), SET(step.q.data, 0)),
    ROW(kBoth, kStep, kInvalid, WORDS("o.dtype is 2 (fp16)", "must be bf16 or fp32"), SET(step.o.dtype, 2)),
    ROW(kBoth, kStep, kInvalid, WORDS("output_state.data is 0x100000 but", "GDELTA_STEP_KEEP_STATE"),
        SET(step.output_state.data, 0x100000), SET(step.flags, 1)),
    ROW(kBoth, kStep, kInvalid, WORDS("o.data is NULL", "GDELTA_STEP_KEEP_STATE", "nothing to write"),
        SET(step.o.data, 0), SET(step.flags, 1)),
    ROW(kBoth, kStep, kInvalid, WORDS("state.data is NULL", "a step needs a state"), SET(step.state.data, 0)),
    ROW(kBoth, kStep, kInvalid, WORDS("has_initial_state is given but state.data is NULL"), SET(step.state.data, 0),
        SET(step.has_initial_state, 4096)),
    STATE_ROWS(kStep, step, state),
    SHARED_ADDRESSES_ROW(kStep, step, state, 32, 32, 4),
    ALIAS_ROW(kStep, step, output_state, o),
    ALIAS_ROW(kStep, step, output_state, q),
    ALIAS_ROW(kStep, step, o, state),
    ALIAS_ROW(kStep, step, state, beta),
    ROW(kBoth, kForward, kInvalid, WORDS("final_state.data is ", "also beta.data", "memory of its own"),
        COPY(forward.initial_state.data, forward.beta.data), COPY(forward.final_state.data, forward.beta.data)),
    ROW(kBoth, kStep, kInvalid, WORDS("output_state.data is the initial state's", "dtype and strides"),
        STRIDES(step.output_state, 256, 32, 4, 1), COPY(step.output_state.data, step.state.data)),
    ROW(kBoth, kStep, kInvalid, WORDS("output_state.reserved is 4", "must be 0"), SET(step.output_state.reserved, 4),
        SET(step.output_state.data, 0x100000)),
    ROW(kBoth, kStep, kInvalid, WORDS("output_state.slot_count is 2", "no slots"), SET(step.output_state.slot_count, 2),
        SET(step.output_state.data, 0x100000)),
    ROW(kDeviceOnly, kStep, kInvalid, WORDS("workspace is ", "aligned to 256 bytes"), ADD(workspace, 128)),

    /* Drafts */
    STATE_ROWS(kDraft, step, token_states),
    SLOTS_ROWS(kDraft, step, token_states, token_slots, 8, 9),
    SHARED_ADDRESSES_ROW(kDraft, step, token_states, 32, 32, 4),
    ALIAS_ROW(kDraft, step, token_states, o),
    ALIAS_ROW(kDraft, step, token_states, k),
    SHARED_POOL_ROWS(kDraft, step, token_states, state),
    TENSOR_ROWS(kDraft, step, record.k, 1, "bf16", "fp32"),
    TENSOR_ROWS(kDraft, step, record.u, 1, "bf16", "fp32"),
    TENSOR_ROWS(kDraft, step, record.decay, 1, "bf16", "fp32"),
    SHARED_ADDRESSES_ROW(kDraft, step, record.k, 64, 16, 4),
    SHARED_ADDRESSES_ROW(kDraft, step, record.u, 64, 16, 2),
    SHARED_ADDRESSES_ROW(kDraft, step, record.decay, 16, 1, 1),
    ALIAS_ROW(kDraft, step, record.k, k),
    ALIAS_ROW(kDraft, step, record.u, o),
    ALIAS_ROW(kDraft, step, record.decay, record.u),
    ROW(kBoth, kDraft, kInvalid, WORDS("record.k.data is NULL", "k, u and decay"), SET(step.record.k.data, 0)),
    ROW(kBoth, kDraft, kInvalid, WORDS("record.u.data is NULL", "k, u and decay"), SET(step.record.u.data, 0)),
    ROW(kBoth, kDraft, kInvalid, WORDS("record.decay.data is NULL", "k, u and decay"), SET(step.record.decay.data, 0)),
    INDEX_ROWS(kDraft, step, parents),
    PARENT_ROW(kDraft, 0, 0, 0),
    PARENT_ROW(kDraft, 0, -2, 0),
    PARENT_ROW(kDraft, 5, 1, 1),
    PARENT_ROW(kDraft, 7, 3, 3),
    ROW(kBoth, kDraft, kInvalid, WORDS("parents.data is 0x", "lacks GDELTA_STEP_KEEP_STATE"), SET(step.flags, 0)),

    /* Commit */
    ROW(kBoth, kCommit, kInvalid, WORDS("args.struct_size is 1", "gdelta_commit_args has"), SET(commit.struct_size, 1)),
    ROW(kBoth, kCommit, kInvalid, WORDS("tokens is 0", "a step takes 1 to 16 tokens"), SET(problem.tokens, 0)),
    ROW(kBoth, kCommit, kInvalid, WORDS("tokens is 17", "a step takes 1 to 16 tokens"), SET(problem.tokens, 17)),
    ROW(kBoth, kCommit, kUnsupported, WORDS("layout is THD", "a step takes dense layouts"), SET(problem.layout, 3),
        SET(problem.batch, 0), SET(problem.sequences, 2), SET(problem.total_tokens, 8)),
    ROW(kBoth, kCommit, kInvalid, WORDS("args.flags is 0x1", "must be 0"), SET(commit.flags, 1)),
    TENSOR_ROWS(kCommit, commit, record.k, 1, "bf16", "fp32"),
    TENSOR_ROWS(kCommit, commit, record.u, 1, "bf16", "fp32"),
    TENSOR_ROWS(kCommit, commit, record.decay, 1, "bf16", "fp32"),
    ROW(kBoth, kCommit, kInvalid, WORDS("record.k.data is NULL", "k, u and decay"), SET(commit.record.k.data, 0),
        SET(commit.record.u.data, 0), SET(commit.record.decay.data, 0)),
    ROW(kBoth, kCommit, kInvalid, WORDS("record.decay.data is NULL", "k, u and decay"),
        SET(commit.record.decay.data, 0)),
    ROW(kBoth, kCommit, kInvalid, WORDS("accepted.data is NULL", "needs the counts"), NO_TABLE(commit.accepted)),
    INDEX_ROWS(kCommit, commit, accepted),
    ROW(kBoth, kCommit, kInvalid, WORDS("accepted[0] is -1;", "must be 0 to 4"), SET(accepted[0], -1)),
    ROW(kBoth, kCommit, kInvalid, WORDS("accepted[1] is 5;", "must be 0 to 4"), SET(accepted[1], 5)),
    INDEX_ROWS(kCommit, commit, parents),
    PARENT_ROW(kCommit, 4, 0, 0),
    PARENT_ROW(kCommit, 6, 2, 2),
    STATE_ROWS(kCommit, commit, state),
    SHARED_ADDRESSES_ROW(kCommit, commit, state, 32, 32, 4),
    ROW(kBoth, kCommit, kInvalid, WORDS("state.data is NULL", "a commit needs a state"), SET(commit.state.data, 0)),
    ROW(kBoth, kCommit, kInvalid, WORDS("has_initial_state is given but state.data is NULL"), SET(commit.state.data, 0),
        SET(commit.has_initial_state, 4096)),
    ROW(kBoth, kCommit, kInvalid, WORDS("device_status is 0x1004", "aligned to 8 bytes"),
        SET(commit.device_status, 0x1004)),
    ALIAS_ROW(kCommit, commit, output_state, record.u),
    ALIAS_ROW(kCommit, commit, state, record.k),
    ROW(kBoth, kCommit, kInvalid, WORDS("output_state.data is the initial state's", "dtype and strides"),
        STRIDES(commit.output_state, 256, 32, 4, 1), COPY(commit.output_state.data, commit.state.data)),
    ROW(kBoth, kCommit, kInvalid, WORDS("output_state.slot_count is 2", "no slots"),
        SET(commit.output_state.slot_count, 2), SET(commit.output_state.data, 0x100000)),
    ROW(kDeviceOnly, kCommit, kInvalid, WORDS("workspace is ", "aligned to 256 bytes"), ADD(workspace, 128)),
};

enum { kRows = sizeof rows / sizeof *rows };

/* ---- Rows ---- */

static void apply(call *c, const change *x) {
    char *field = (char *)c + x->offset;
    int64_t number = 0;
    switch (x->kind) {
        case kSet:
            memcpy(field, &x->value, x->size);
            break;
        case kReal:
            memcpy(field, &x->real, x->size);
            break;
        case kAdd:
            memcpy(&number, field, x->size);
            number += x->value;
            memcpy(field, &number, x->size);
            break;
        case kCopy:
            memcpy(field, (char *)c + x->value, x->size);
            break;
    }
}

static bool is_pattern(const char *memory) {
    return memory[0] == kPattern && memcmp(memory, memory + 1, kArenaBytes - 1) == 0;
}

/* What is wrong with the sentence; NULL if nothing. */
static const char *missing_word(const row *r, const call *c, const char *sentence) {
    static char pointer[40];
    if (strncmp(sentence, r->words[0], strlen(r->words[0])) != 0) return r->words[0];
    for (int i = 1; i < 3 && r->words[i]; ++i) {
        if (strstr(sentence, r->words[i]) == NULL) return r->words[i];
    }
    /* A sentence that goes on with a pointer has the one that the row put there. */
    const change *first = &r->changes[0];
    if (first->size == sizeof(void *) && (first->kind == kAdd || first->kind == kCopy) &&
        r->words[0][strlen(r->words[0]) - 1] == ' ') {
        void *value;
        memcpy(&value, (const char *)c + first->offset, sizeof value);
        snprintf(pointer, sizeof pointer, "%p", value);
        if (strstr(sentence, pointer) == NULL) return pointer;
    }
    return NULL;
}

static void row_name(const row *r, bool host, bool wide, char *name, size_t size) {
    size_t length = (size_t)snprintf(name, size, "row %d (%s%s): ", (int)(r - rows), host ? "reference" : "device",
                                     wide ? ", int64" : "");
    for (const change *x = r->changes; x->kind && length < size; ++x) {
        length += (size_t)snprintf(name + length, size - length, "%s; ", x->text);
    }
}

static gdelta_status run_create(call *c) {
    gdelta_plan *plan = (gdelta_plan *)c;
    gdelta_status status = gdelta_plan_create(&c->problem, &plan);
    cr_expect_null(plan, "a plan was made");
    return status;
}

static void check_row(const row *r, bool host, bool wide, char *memory) {
    static call c, before;
    char name[512];
    row_name(r, host, wide, name, sizeof name);
    make_call(&c, r->from, host, wide, host ? memory : fake_memory());
    for (const change *x = r->changes; x->kind; ++x) apply(&c, x);
    write_tables(&c, wide);
    memcpy(&before, &c, sizeof c);

    bool problem = r->from == kProblem || r->from == kPackedProblem;
    gdelta_status status = host ? run_reference(&c) : problem ? run_create(&c) : run_device(&c);
    const char *sentence = gdelta_last_error();
    cr_expect_eq(status, r->status, "%s\n    %s, '%s'", name, gdelta_status_string(status), sentence);
    const char *word = missing_word(r, &c, sentence);
    cr_expect_null(word, "%s\n    '%s' lacks '%s'", name, sentence, word);
    cr_expect_eq(memcmp(&before, &c, sizeof c), 0, "%s\n    what was passed has changed", name);
    if (host) cr_expect(is_pattern(memory), "%s\n    memory was written", name);
    if (problem && !host) {
        const char *reason = NULL;
        status = gdelta_supported(&c.problem, GDELTA_OPERATION_FORWARD, 90, &reason);
        cr_expect_eq(status, r->status, "%s\n    gdelta_supported: %s", name, gdelta_status_string(status));
        cr_expect_null(missing_word(r, &c, reason), "%s\n    gdelta_supported: '%s'", name, reason);
    }
}

static char *new_memory(int byte) {
    char *memory = aligned_alloc(256, kArenaBytes);
    cr_assert_not_null(memory);
    memset(memory, byte, kArenaBytes);
    return memory;
}

Test(validate, every_row) {
    char *memory = new_memory(kPattern);
    for (const row *r = rows; r < rows + kRows; ++r) {
        for (int host = 0; host < 2; ++host) {
            if (r->place == (host ? kDeviceOnly : kHostOnly)) continue;
            bool tables = r->from == kPacked || r->from == kPooled || r->from >= kDraft;
            for (int wide = 0; wide <= tables; ++wide) check_row(r, host, wide, memory);
        }
    }
    free(memory);
}

/* The calls that the rows break are good. */
Test(validate, unbroken_calls_pass) {
    static call c;
    char *memory = new_memory(0);
    for (int from = kProblem; from <= kCommit; ++from) {
        for (int wide = 0; wide < 2; ++wide) {
            make_call(&c, (base)from, true, wide, memory);
            write_tables(&c, wide);
            cr_expect_eq(run_reference(&c), GDELTA_OK, "base %d: %s", from, gdelta_last_error());
            if (gpu_missing() == NULL) continue; /* nobody may touch the addresses that follow */
            make_call(&c, (base)from, false, wide, fake_memory());
            write_tables(&c, wide);
            gdelta_status status = run_device(&c);
            cr_expect(status == GDELTA_ERROR_UNSUPPORTED || status == GDELTA_ERROR_CUDA, "base %d: %s, '%s'", from,
                      gdelta_status_string(status), gdelta_last_error());
        }
    }
    free(memory);
}

/* What the rules allow at their edges. */
Test(validate, edges_pass) {
    static const row good[] = {
        {.from = kForward, .changes = {SET(problem.tokens, 0), SET(forward.q.data, 0), SET(forward.o.data, 0)}},
        {.from = kForward, .changes = {COPY(forward.k.data, forward.q.data)}},
        {.from = kForward, .changes = {COPY(forward.final_state.data, forward.initial_state.data)}},
        {.from = kForward, .changes = {STRIDES(forward.g, 256, 1, 64, 0)}},
        {.from = kForward, .changes = {STRIDES(forward.q, 1, 1, 1, 1)}},
        {.from = kForward, .changes = {SET(problem.has_scale, 1), REAL(problem.scale, 0)}},
        {.from = kForward, .changes = {SET(problem.flags, 1), SET(forward.o.dtype, 3)}},
        {.from = kForward, .changes = {SET(forward.g.data, 0), SET(forward.beta.data, 0)}},
        {.from = kPacked, .changes = {SET(cu_seqlens[1], 0), SET(cu_seqlens[2], 80)}},
        {.from = kPacked, .changes = {SET(problem.tokens, 0), SET(cu_seqlens[1], 128)}},
        {.from = kPooled, .changes = {SET(initial_slots[0], -1), SET(final_slots[1], -1)}},
        {.from = kPooled, .changes = {COPY(forward.checkpoints.data, forward.final_state.data)}},
        {.from = kPooled, .changes = {SET(forward.o.data, 0), SET(forward.checkpoint_interval, 128)}},
        {.from = kPooled, .changes = {SET(problem.tokens, 0), SET(checkpoint_slots[0], 77)}},
        {.from = kFused, .changes = {SET(backward.flags, 1)}},
        {.from = kFused, .changes = {SET(backward.dt_bias.data, 0), SET(backward.ddt_bias.data, 0)}},
        {.from = kStep, .changes = {SET(problem.tokens, 16), SET(step.flags, 1)}},
        {.from = kStep, .changes = {SET(step.o.data, 0), SET(problem.tokens, 1)}},
        {.from = kDraft,
         .changes = {SET(step.o.data, 0), SET(step.token_states.data, 0), NO_TABLE(step.token_states.slots)}},
        {.from = kDraft, .changes = {SET(step.flags, 0), NO_TABLE(step.parents)}},
        {.from = kCommit, .changes = {SET(accepted[0], 0), SET(accepted[1], 4)}},
        {.from = kCommit, .changes = {NO_TABLE(commit.parents)}},
        {.from = kCommit, .changes = {COPY(commit.output_state.data, commit.state.data)}},
    };
    static call c;
    char *memory = new_memory(0);
    for (size_t i = 0; i < sizeof good / sizeof *good; ++i) {
        for (int host = gpu_missing() == NULL; host < 2; ++host) {
            make_call(&c, good[i].from, host, false, host ? memory : fake_memory());
            for (const change *x = good[i].changes; x->kind; ++x) apply(&c, x);
            write_tables(&c, false);
            gdelta_status status = host ? run_reference(&c) : run_device(&c);
            bool passed =
                host ? status == GDELTA_OK : status == GDELTA_ERROR_UNSUPPORTED || status == GDELTA_ERROR_CUDA;
            cr_expect(passed, "edge %zu: %s, '%s'", i, gdelta_status_string(status), gdelta_last_error());
        }
    }
    free(memory);
}

static void expect_failure(gdelta_status status, const char *sentence) {
    cr_expect_eq(status, GDELTA_ERROR_INVALID_ARGUMENT, "%s: %s", sentence, gdelta_status_string(status));
    cr_expect_str_eq(gdelta_last_error(), sentence);
}

Test(validate, null_structs) {
    static call c;
    make_call(&c, kStep, false, false, fake_memory());
    gdelta_plan *plan = (gdelta_plan *)&c;
    expect_failure(gdelta_plan_create(NULL, &plan), "problem is NULL");
    cr_expect_null(plan);
    expect_failure(gdelta_plan_create(&c.problem, NULL), "plan is NULL");
    expect_failure(gdelta_supported(NULL, GDELTA_OPERATION_FORWARD, 90, NULL), "problem is NULL");
    expect_failure(gdelta_forward(NULL, &c.forward, c.workspace, 0, NULL), "plan is NULL");
    expect_failure(gdelta_backward(NULL, &c.backward, c.workspace, 0, NULL), "plan is NULL");
    expect_failure(gdelta_step(NULL, &c.step, c.workspace, 0, NULL), "plan is NULL");
    expect_failure(gdelta_commit(NULL, &c.commit, c.workspace, 0, NULL), "plan is NULL");
    expect_failure(gdelta_reference_forward(NULL, &c.forward), "problem is NULL");
    expect_failure(gdelta_reference_backward(NULL, &c.backward), "problem is NULL");
    expect_failure(gdelta_reference_step(NULL, &c.step), "problem is NULL");
    expect_failure(gdelta_reference_commit(NULL, &c.commit), "problem is NULL");
    expect_failure(gdelta_reference_forward(&c.problem, NULL), "args is NULL");
    expect_failure(gdelta_reference_backward(&c.problem, NULL), "args is NULL");
    expect_failure(gdelta_reference_step(&c.problem, NULL), "args is NULL");
    expect_failure(gdelta_reference_commit(&c.problem, NULL), "args is NULL");

    cr_assert_eq(gdelta_plan_create(&c.problem, &plan), GDELTA_OK);
    expect_failure(gdelta_forward(plan, NULL, c.workspace, 0, NULL), "args is NULL");
    expect_failure(gdelta_backward(plan, NULL, c.workspace, 0, NULL), "args is NULL");
    expect_failure(gdelta_step(plan, NULL, c.workspace, 0, NULL), "args is NULL");
    expect_failure(gdelta_commit(plan, NULL, c.workspace, 0, NULL), "args is NULL");
    expect_failure(gdelta_plan_workspace_size(plan, GDELTA_OPERATION_FORWARD, NULL), "bytes is NULL");
    expect_failure(gdelta_plan_saved_size(plan, NULL), "bytes is NULL");
    gdelta_plan_destroy(plan);
    gdelta_plan_destroy(NULL);

    size_t bytes = 5;
    expect_failure(gdelta_plan_workspace_size(NULL, GDELTA_OPERATION_FORWARD, &bytes), "plan is NULL");
    expect_failure(gdelta_plan_saved_size(NULL, &bytes), "plan is NULL");
    cr_expect_eq(bytes, 5, "written on an error");
}

/* A plan for another GPU than the stream's is refused before anything is launched. */
Test(validate, plan_of_another_gpu) {
    gpu_require("plan_of_another_gpu", 0);
    static call c;
    make_call(&c, kForward, false, false, fake_memory());
    c.problem.compute_capability = 11;
    cr_expect_eq(run_device(&c), GDELTA_ERROR_UNSUPPORTED);
    cr_expect_not_null(strstr(gdelta_last_error(), "this plan was made for 11"), "'%s'", gdelta_last_error());
}

/* ---- Sentences ---- */

static void break_batch(int64_t batch) {
    static _Thread_local call c;
    make_call(&c, kProblem, false, false, fake_memory());
    c.problem.batch = batch;
    cr_expect_eq(run_create(&c), GDELTA_ERROR_INVALID_ARGUMENT);
}

typedef struct failing {
    int64_t batch;
    bool empty, kept;
    pthread_barrier_t *barrier;
} failing;

/* Fails in its own way, waits until the other thread has failed too, and still sees its own sentence. */
static void *fail_apart(void *argument) {
    failing *f = argument;
    char wanted[32];
    snprintf(wanted, sizeof wanted, "batch is %d;", (int)f->batch);
    f->empty = *gdelta_last_error() == '\0';
    pthread_barrier_wait(f->barrier);
    break_batch(f->batch);
    pthread_barrier_wait(f->barrier);
    f->kept = strncmp(gdelta_last_error(), wanted, strlen(wanted)) == 0;
    return NULL;
}

Test(sentences, each_thread_has_its_own) {
    pthread_barrier_t barrier;
    pthread_t threads[2];
    failing each[2] = {{.batch = -5, .barrier = &barrier}, {.batch = -6, .barrier = &barrier}};
    cr_expect_str_eq(gdelta_last_error(), "");
    break_batch(-7);
    pthread_barrier_init(&barrier, NULL, 2);
    for (int i = 0; i < 2; ++i) cr_assert_eq(pthread_create(&threads[i], NULL, fail_apart, &each[i]), 0);
    for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    for (int i = 0; i < 2; ++i) {
        cr_expect(each[i].empty, "thread %d starts with a sentence", i);
        cr_expect(each[i].kept, "thread %d has lost its sentence", i);
    }
    cr_expect_eq(strncmp(gdelta_last_error(), "batch is -7;", 12), 0, "'%s'", gdelta_last_error());
}

/* A failure leaves nothing behind but its sentence, which a success leaves alone. */
Test(sentences, a_good_call_after_a_bad_one) {
    static call c;
    char *memory = new_memory(0);
    make_call(&c, kForward, true, false, memory);
    c.forward.q.reserved = 1;
    cr_expect_eq(run_reference(&c), GDELTA_ERROR_INVALID_ARGUMENT);
    c.forward.q.reserved = 0;
    float *initial = c.forward.initial_state.data;
    initial[0] = 3;
    cr_expect_eq(run_reference(&c), GDELTA_OK);
    cr_expect_eq(((float *)c.forward.final_state.data)[0], 3);
    cr_expect_eq(strncmp(gdelta_last_error(), "q.reserved is 1;", 16), 0, "'%s'", gdelta_last_error());
    free(memory);
}

Test(sentences, status_names) {
    static const struct {
        gdelta_status status;
        const char *name;
    } names[] = {
        {GDELTA_OK, "GDELTA_OK"},
        {GDELTA_ERROR_INVALID_ARGUMENT, "GDELTA_ERROR_INVALID_ARGUMENT"},
        {GDELTA_ERROR_UNSUPPORTED, "GDELTA_ERROR_UNSUPPORTED"},
        {GDELTA_ERROR_WORKSPACE_TOO_SMALL, "GDELTA_ERROR_WORKSPACE_TOO_SMALL"},
        {GDELTA_ERROR_OUT_OF_MEMORY, "GDELTA_ERROR_OUT_OF_MEMORY"},
        {GDELTA_ERROR_CUDA, "GDELTA_ERROR_CUDA"},
        {1, "unknown status"},
        {-1, "unknown status"},
        {INT32_MAX, "unknown status"},
        {INT32_MIN, "unknown status"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
        cr_expect_str_eq(gdelta_status_string(names[i].status), names[i].name);
    }
}

static uint64_t device_word(uint64_t rule, uint32_t index) {
    return rule << 32 | index;
}

Test(sentences, device_words) {
    const struct {
        uint64_t word;
        const char *sentence;
    } sentences[] = {
        {GDELTA_DEVICE_OK, "no error"},
        {device_word(GDELTA_DEVICE_CU_SEQLENS_START, 0), "entry 0 of cu_seqlens must be 0"},
        {device_word(GDELTA_DEVICE_CU_SEQLENS_ORDER, 3), "entry 3 of cu_seqlens is less than the entry before it"},
        {device_word(GDELTA_DEVICE_CU_SEQLENS_END, 4), "entry 4 of cu_seqlens is greater than total_tokens"},
        {device_word(GDELTA_DEVICE_CU_SEQLENS_LENGTH, 5),
         "entry 5 of cu_seqlens ends a sequence longer than problem.tokens"},
        {device_word(GDELTA_DEVICE_INITIAL_SLOT_RANGE, UINT32_MAX),
         "entry 4294967295 of the initial state's slots is outside -1..slot_count-1"},
        {device_word(GDELTA_DEVICE_FINAL_SLOT_RANGE, 7),
         "entry 7 of the final state's slots is outside -1..slot_count-1"},
        {device_word(GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE, 1),
         "entry 1 of the checkpoints' slots is outside -1..slot_count-1"},
        {device_word(GDELTA_DEVICE_TOKEN_SLOT_RANGE, 2),
         "entry 2 of the token states' slots is outside -1..slot_count-1"},
        {device_word(GDELTA_DEVICE_PARENT_RANGE, 3), "entry 3 of parents is no earlier token, nor -1"},
        {device_word(GDELTA_DEVICE_ACCEPTED_RANGE, 4), "entry 4 of accepted is outside 0..T"},
        {device_word(0, 9), "0x0000000000000009 is not a device status word"},
        {device_word(11, 1), "0x0000000b00000001 is not a device status word"},
        {UINT64_MAX, "0xffffffffffffffff is not a device status word"},
    };
    for (size_t i = 0; i < sizeof sentences / sizeof *sentences; ++i) {
        cr_expect_str_eq(gdelta_device_status_string(sentences[i].word), sentences[i].sentence);
    }
}

Test(sentences, version) {
    cr_expect_eq(gdelta_version(), GDELTA_VERSION_MAJOR * 10000 + GDELTA_VERSION_MINOR * 100 + GDELTA_VERSION_PATCH);
}
