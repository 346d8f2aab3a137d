/* A test case as data, and everything that happens to it.
 *
 * A test_case says what is to be computed. An instance is that case in memory: all its tensors and tables in one block,
 * the arena, each between pads. Every byte that no tensor owns is poison: pads, gaps between strided rows, padding
 * between slots, rows past the last sequence, states that must not be read, and at first the outputs too. Poison is NaN
 * in every float type, so what reads it shows, and after a call the arena must be unchanged but for the elements that
 * the call had to write. An engine on the GPU works on a copy of the arena; the reference on one in host memory. Pads
 * have 1 MiB where a GPU is, so that an address that is off by some states still lies in one; 64 KiB where only the
 * reference runs: wider ones take a third longer and show no more, for its accesses are held to the byte by the fuzzer.
 *
 * Elements have logical coordinates (sequence, row, head, element), whatever the layout, packing, slots and order: row
 * is the token in its sequence, or the row of K in a state. Their values depend on nothing else. */
#ifndef GDELTA_TESTS_CASE_H
#define GDELTA_TESTS_CASE_H

#include <gdelta/gdelta.h>
#include <stdbool.h>
#include <stddef.h>

#include "gpu.h"

/* ---- Roles: what a tensor or table of a call is ---- */

typedef enum role {
    kQ,
    kK,
    kV,
    kG,
    kBeta,
    kALog,
    kDtBias,
    kInitial,
    kDO,
    kDFinal,
    kCuSeqlens,
    kInitialSlots,
    kFinalSlots,
    kHasInitial,
    kStatus,
    kTokenSlots,
    kCheckpointSlots,
    kParents,
    kAccepted,
    kO,
    kFinal,
    kTokenStates,
    kRecordK,
    kRecordU,
    kRecordDecay,
    kCheckpoints,
    kDQ,
    kDK,
    kDV,
    kDG,
    kDBeta,
    kDALog,
    kDDtBias,
    kDInitial,
    kRoles
} role;

const char *role_name(role role);

/* A set of roles. */
typedef uint64_t role_set;
#define ROLE(role) (UINT64_C(1) << (role))
#define RECORD_ROLES (ROLE(kRecordK) | ROLE(kRecordU) | ROLE(kRecordDecay))

/* ---- The case ---- */

enum { kMaxSequences = 64 };

typedef enum gate_strength {
    kGateWeak,    /* log gates -0.1 .. 0 */
    kGateZero,    /* 0: a decay of exactly 1; a fused gate within 1e-86 of it */
    kGateMild,    /* -1 .. 0 */
    kGateStrong,  /* -rate softplus(normal), rate 1 .. 16, each head its own */
    kGateExtreme, /* -50 .. -1e4 and below */
    kGateResets   /* weak, but one token in eight has -inf (a fused gate: far below -1e3) */
} gate_strength;

typedef enum key_style {
    kKeysRandom,     /* normal where the kernel normalises, else of length 1 */
    kKeysCorrelated, /* the same, but nine tenths of each is common to the head */
    kKeysShort       /* lengths around 0.7 */
} key_style;

/* Zero means the plainest choice everywhere. */
typedef struct test_case {
    gdelta_layout layout;
    int sequences;
    int64_t lengths[kMaxSequences]; /* THD; the other layouts have lengths[0] tokens in every sequence */
    int64_t capacity, longest;      /* THD: total_tokens, 0 for the sum of the lengths; and problem.tokens */
    int32_t heads_q, heads_v;       /* HK is the smaller */
    int32_t dim_k, dim_v;

    gdelta_dtype dtype, gate_dtype, beta_dtype, state_dtype; /* the problem's */
    gdelta_dtype parameter_dtype;                            /* a_log and dt_bias */
    gdelta_dtype out_dtype;   /* o and gradients: fp32 or fp64 instead of the problem's */
    gdelta_dtype final_dtype; /* the final state, if not state_dtype */

    gdelta_gate gate;
    gdelta_beta beta;
    gdelta_l2norm l2norm;
    gdelta_head_map head_map;
    gdelta_state_order state_order;
    gdelta_save_mode save_mode; /* with kSaveStates backward gets what forward saved */
    gdelta_engine engine;
    double eps, scale;
    bool has_scale;

    gate_strength strength;
    key_style keys;
    double beta_max; /* plain beta lies in 0 .. beta_max; 0 stands for 1 */
    role_set absent; /* roles that are left out, of those that the rest of the case allows */

    int gap;    /* elements between rows, heads, ... of every tensor; if odd, tensors start off by an element too */
    bool fused; /* q, k, v are column slices of one tensor, and dq, dk, dv of another */
    bool interleaved; /* g and beta are every other element of one tensor */

    bool batch_invariant; /* GDELTA_FLAG_BATCH_INVARIANT */
    bool small_workspace; /* GDELTA_FLAG_SMALL_WORKSPACE */

    int64_t slot_count; /* states in pools of so many entries; 0: no slots */
    int64_t initial_slots[kMaxSequences], final_slots[kMaxSequences];
    int64_t slot_padding; /* elements between the slots */
    uint64_t recycled;  /* bit n: sequence n has no initial state, has_initial_state says so, and its slot is poison */
    bool fp16_backward; /* the hopper engine's backward too if dtype is fp16: its adjoints may not underflow there */
    bool in_place;      /* the final states are in the initial states' memory */
    bool keep_state;    /* GDELTA_STEP_KEEP_STATE */
    bool token_states;  /* a step keeps the state after each token */
    bool record;        /* a step leaves a record, and a commit keeps so many of its tokens: */
    int64_t accepted[kMaxSequences];
    bool tree;                   /* tokens continue others than the one before them; with keep_state */
    int64_t checkpoint_interval; /* forward keeps the state after every so many tokens; 0: none */
    bool several_slots; /* token states and checkpoints are in pools, in falling order; of a sequence's several states
                           the last has no slot */
    bool one_pool;      /* with several_slots: they are in the pool of the initial states, which has room */
    bool accumulate;    /* GDELTA_BACKWARD_ACCUMULATE_PARAMETERS, where there are some; they start from numbers */
    bool index64;       /* tables are int64 */
    bool host_tables;   /* tables have host copies */

    uint16_t poison; /* 0: 0xffff, which is NaN. 0x7e96 is about 1e38 in bf16 and fp32, and NaN in fp16 */

    uint64_t seed;
    int64_t first_sequence, first_token; /* the case is a cut out of a larger one, whose numbers it takes */
} test_case;

enum slot_style { kSlotsSame, kSlotsDistinct };
/* One sequence with K = V = 128, a query head and two value heads, the norm, and results in fp32. */
test_case two_head_case(int64_t tokens);

/* Gives the case slots: initial ones from the top, final ones the same, or distinct ones from the bottom; with some
 * entries to spare. Sequences whose bit is set in `skipped` get -1. */
void case_use_slots(test_case *c, enum slot_style style, uint64_t skipped);

/* Gives the case slots, in place, and token states in the same pool, or checkpoints if it has an interval. */
void case_use_one_pool(test_case *c);

/* What token t of a tree continues. */
int64_t case_parent(const test_case *c, int64_t sequence, int64_t t);

/* The case in one line. Valid until the next call. */
const char *case_line(const test_case *c);

gdelta_problem case_problem(const test_case *c);
int32_t case_heads_o(const test_case *c);
int64_t case_length(const test_case *c, int sequence);

/* ---- The instance ---- */

typedef struct instance_tensor {
    bool present;
    gdelta_dtype dtype;     /* of a table: DEFAULT, `bytes` says how to read it */
    size_t bytes;           /* of an element */
    size_t offset;          /* of the first element, in the arena */
    int64_t stride[4];      /* elements: sequence, row, head, element */
    bool default_strides;   /* the call gets zeros */
    int64_t columns, count; /* columns: elements of a row. count: entries of a table */
} instance_tensor;

typedef struct instance {
    test_case c;
    int64_t start[kMaxSequences]; /* THD: first row of each sequence */
    instance_tensor tensor[kRoles];
    size_t bytes;
    char *before; /* the arena as a call finds it; tests may change it */
    char *after;  /* as the last call left it */
} instance;

void instance_create(instance *x, const test_case *c);
void instance_destroy(instance *x);

/* Logical extents of a role. A sequence that is skipped has no rows in a state or record. Of several states of a
 * sequence, the rows of state i are rows i K to i K + K - 1. */
int64_t instance_sequences(const instance *x, role role);
int64_t instance_rows(const instance *x, role role, int64_t sequence);
int64_t instance_heads(const instance *x, role role);
int64_t instance_columns(const instance *x, role role);

/* Where an element is in the arena, in bytes. */
size_t instance_offset(const instance *x, role role, int64_t n, int64_t row, int64_t head, int64_t column);
/* An element: what the call is given of an input, what the last call left of an output. */
const void *instance_at(const instance *x, role role, int64_t n, int64_t row, int64_t head, int64_t column);
double instance_get(const instance *x, role role, int64_t n, int64_t row, int64_t head, int64_t column);
/* Changes an input. */
void instance_put(instance *x, role role, int64_t n, int64_t row, int64_t head, int64_t column, double value);
/* Changes all elements of an input. */
void instance_put_all(instance *x, role role, double value);
void instance_set_entry(instance *x, role table, int64_t entry, int64_t value);

/* Every logical element of x's tensor of a role, in variables of these names. */
#define FOR_ELEMENTS(x, role, n, row, head, column)                        \
    for (int64_t n = 0; n < instance_sequences(x, role); ++n)              \
        for (int64_t row = 0; row < instance_rows(x, role, n); ++row)      \
            for (int64_t head = 0; head < instance_heads(x, role); ++head) \
                for (int64_t column = 0; column < instance_columns(x, role); ++column)

/* x, whose call is a commit, takes the record that a step left in y. */
void instance_copy_record(instance *x, const instance *y);
/* Input `to` of x takes the values of `from` of y, input or output; sequence by sequence. */
void instance_copy(instance *x, role to, const instance *y, role from);

/* The same problem and input values in the plainest form, for the reference: contiguous, [K, V], fp64 out. */
void instance_create_plain(instance *plain, const instance *x);

/* ---- Calls ---- */

typedef struct test_engine {
    const char *name;
    gdelta_engine engine;
    bool on_gpu;
    int32_t capability;       /* the only compute capability that it runs on; 0: any */
    gdelta_dtype exact_state; /* the type that holds its states without rounding */
    int cut;                  /* a text that is cut after a multiple of so many tokens keeps its bits */
} test_engine;

/* Every engine is tested; a later one is added here, in engine_runs and in compare.c's table of tolerances. */
enum { kReference, kRecurrent, kHopper, kEngines };
extern const test_engine test_engines[kEngines];

/* Whether the engine is to run the operation of this case. What it is not to run, tests leave out; all else must work.
 */
bool engine_runs(const test_engine *engine, const test_case *c, gdelta_operation operation);

/* Into how many segments the engine's plan cuts each sequence, as the plan's line says; 1 if it has none, 0 if there is
 * no plan. */
int engine_segments(const test_engine *engine, const test_case *c, gdelta_operation operation);

/* What an operation on x writes. */
role_set instance_outputs(const instance *x, gdelta_operation operation);

/* The arguments of a call on x whose arena is at `arena`, in host or device memory. */
gdelta_forward_args instance_forward_args(const instance *x, char *arena);
gdelta_backward_args instance_backward_args(const instance *x, char *arena);
gdelta_step_args instance_step_args(const instance *x, char *arena);
gdelta_commit_args instance_commit_args(const instance *x, char *arena);

/* An instance's arena on the GPU, with a plan and the buffers for one operation. */
typedef struct device_instance {
    gdelta_operation operation;
    gdelta_plan *plan;
    gpu_buffer arena, workspace, saved, forward_workspace;
} device_instance;

/* False, with the sentence printed, if there is no plan. */
bool device_create(device_instance *d, const instance *x, const test_engine *engine, gdelta_operation operation);
void device_destroy(device_instance *d);
void device_upload(device_instance *d, const instance *x);
/* With kSaveStates a backward enqueues the forward before it. */
gdelta_status device_enqueue(device_instance *d, const instance *x, gdelta_stream stream);
/* Fills x->after; false if a canary died. */
bool device_download(device_instance *d, instance *x);

/* True if the call wrote no byte of the arena but elements of `outputs`; else prints the first such byte. */
bool instance_untouched(const instance *x, role_set outputs);

/* Runs an operation into x->after: on the GPU twice, to compare the bits. False, with the reason printed, if the call
 * fails or writes what it must not. */
bool instance_run(instance *x, const test_engine *engine, gdelta_operation operation);

#endif /* GDELTA_TESTS_CASE_H */
