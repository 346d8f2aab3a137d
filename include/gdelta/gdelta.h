/* gdelta: the gated delta rule (Gated DeltaNet) on CUDA GPUs, behind a C API.
 *
 * For every sequence and output head, the state S is a K x V matrix. For each token t:
 *
 *     S   <- exp(g_t) S                   decay first; g is a natural logarithm, g <= 0
 *     u_t  = beta_t (v_t - S^T k_t)       what is missing under key k_t
 *     S   <- S + k_t u_t^T                write
 *     o_t  = scale * S^T q_t              read: the current token counts
 *
 * The shortest useful program (q, k, v, g, beta, o are device pointers to contiguous tensors):
 *
 *     gdelta_problem problem = {.struct_size = sizeof problem,
 *                               .batch = 4, .tokens = 8192,
 *                               .heads_q = 16, .heads_k = 16, .heads_v = 32,
 *                               .dim_k = 128, .dim_v = 128,
 *                               .l2norm = GDELTA_L2NORM_ADD_EPS};
 *     gdelta_plan *plan;
 *     if (gdelta_plan_create(&problem, &plan) != GDELTA_OK) puts(gdelta_last_error());
 *     size_t bytes;
 *     gdelta_plan_workspace_size(plan, GDELTA_OPERATION_FORWARD, &bytes);    // cudaMalloc this much
 *
 *     gdelta_forward_args args = {.struct_size = sizeof args,
 *                                 .q = {.data = q}, .k = {.data = k}, .v = {.data = v},
 *                                 .g = {.data = g}, .beta = {.data = beta}, .o = {.data = o}};
 *     gdelta_forward(plan, &args, workspace, bytes, stream);
 *     gdelta_plan_destroy(plan);
 *
 * How to read this file: 1 status, 2 the words of a problem, 3 tensors, 4 plans, 5 forward, 6 backward, 7 step
 * and commit. reference.h holds the same four operations on the CPU.
 *
 * What holds everywhere:
 *   - Zero means default. Start every struct from zeros, set struct_size, then set what you need.
 *   - A call enqueues on the stream and returns: no allocation, no synchronisation, no read-back, no printing, no
 *     environment variable. Every call may be captured in a CUDA graph, the first one too. A graph bakes in the
 *     arguments: pointers, strides, sizes. What device tables hold (cu_seqlens, slots, flags) is read at each replay.
 *   - You own all device memory; gdelta never allocates any. Sizes come from the plan.
 *   - The stream's device is used; your thread's current device is afterwards what it was.
 *   - On an error nothing is launched and nothing is written, and gdelta_last_error() holds one sentence that names the
 *     argument, its value and the rule. Nothing that you pass is silently ignored.
 *   - Numbers in device memory are taken as they are, a gate above 0 or a NaN too; but tables are checked there, see
 *     GDELTA_DEVICE_*.
 *   - The same call gives the same bits. No float is ever added atomically.
 *   - Any number of threads may use one plan at once, each call with a workspace of its own.
 */
#ifndef GDELTA_GDELTA_H
#define GDELTA_GDELTA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) || defined(__clang__)
#define GDELTA_API __attribute__((visibility("default")))
#else
#define GDELTA_API
#endif

#define GDELTA_VERSION_MAJOR 0
#define GDELTA_VERSION_MINOR 1
#define GDELTA_VERSION_PATCH 0

/* ---- 1. Status -------------------------------------------------------------------------------------------------- */

/* Every enumeration is a fixed int32_t with named constants, so that its width is the same in every language. */
typedef int32_t gdelta_status;
enum {
    GDELTA_OK = 0,
    GDELTA_ERROR_INVALID_ARGUMENT = 10,    /* a rule of this file is broken; the sentence says which */
    GDELTA_ERROR_UNSUPPORTED = 20,         /* legal, but this build or this GPU cannot do it */
    GDELTA_ERROR_WORKSPACE_TOO_SMALL = 30, /* workspace or saved buffer smaller than the plan says */
    GDELTA_ERROR_OUT_OF_MEMORY = 40,       /* host memory, in plan_create and the reference only */
    GDELTA_ERROR_CUDA = 50                 /* the CUDA runtime refused; the sentence holds its words */
};

/* The constant's name, "GDELTA_OK" for 0; "unknown status" for a number that is none. Never NULL. */
GDELTA_API const char *gdelta_status_string(gdelta_status status);

/* The sentence of this thread's last failed call; "" if none failed yet. Valid until this thread's next failure. */
GDELTA_API const char *gdelta_last_error(void);

/* MAJOR * 10000 + MINOR * 100 + PATCH of the library that is linked, to compare with the header's macros. */
GDELTA_API int32_t gdelta_version(void);

/* ---- 2. The words of a problem ---------------------------------------------------------------------------------- */

typedef int32_t gdelta_dtype;
enum {
    GDELTA_DTYPE_DEFAULT = 0, /* what the field's comment says */
    GDELTA_DTYPE_BF16 = 1,
    GDELTA_DTYPE_FP16 = 2,
    GDELTA_DTYPE_FP32 = 3,
    GDELTA_DTYPE_FP64 = 4, /* the CPU reference only */
    GDELTA_DTYPE_INT32 = 5,
    GDELTA_DTYPE_INT64 = 6
};

/* The order in memory of a token tensor whose strides are left zero. B sequences of T tokens, H heads, D elements. */
typedef int32_t gdelta_layout;
enum {
    GDELTA_LAYOUT_BSHD = 0, /* [B, T, H, D] */
    GDELTA_LAYOUT_SBHD = 1, /* [T, B, H, D] */
    GDELTA_LAYOUT_BHSD = 2, /* [B, H, T, D] */
    GDELTA_LAYOUT_THD = 3   /* [total_tokens, H, D]: sequences packed one after another, cut by cu_seqlens */
};

/* Normalisation of each q and k row x, before scale and inside the kernel, sums in fp32. */
typedef int32_t gdelta_l2norm;
enum {
    GDELTA_L2NORM_NONE = 0,
    GDELTA_L2NORM_ADD_EPS = 1, /* x * rsqrt(sum(x^2) + eps): Qwen3-Next, FLA. A zero row stays zero */
    GDELTA_L2NORM_MAX_EPS = 2  /* x * rsqrt(max(sum(x^2), eps)): cuDNN, ggml */
};

/* What the tensor g holds. */
typedef int32_t gdelta_gate;
enum {
    GDELTA_GATE_LOG = 0,     /* g_t itself, a natural logarithm, <= 0; -inf is a decay of exactly 0 */
    GDELTA_GATE_LINEAR = 1,  /* exp(g_t), the decay in [0, 1], as FlashInfer takes it; 0 is exact */
    GDELTA_GATE_SOFTPLUS = 2 /* a_t of g_t = -exp(A_log) * softplus(a_t + dt_bias); softplus(x) = x above 20 */
};

/* What the tensor beta holds. beta in 0..2 is legal. */
typedef int32_t gdelta_beta;
enum {
    GDELTA_BETA_VALUE = 0,      /* beta_t itself */
    GDELTA_BETA_SIGMOID = 1,    /* b_t of beta_t = sigmoid(b_t) */
    GDELTA_BETA_TWO_SIGMOID = 2 /* b_t of beta_t = 2 sigmoid(b_t): negative eigenvalues */
};

/* Which head of x in {q, k, v}, that has Hx heads, output head h of HO reads. */
typedef int32_t gdelta_head_map;
enum {
    GDELTA_HEADS_INTERLEAVED = 0, /* floor(h * Hx / HO): repeat_interleave, what the models use */
    GDELTA_HEADS_TILED = 1        /* h mod Hx: ggml */
};

/* The order in memory of one head's state. */
typedef int32_t gdelta_state_order;
enum {
    GDELTA_STATE_KV = 0, /* [K, V], V innermost */
    GDELTA_STATE_VK = 1  /* [V, K], K innermost */
};

/* Which kernels run. AUTO takes the fastest that supports the problem, for each operation; a named one is used or the
 * plan fails, and an operation that it lacks is UNSUPPORTED.
 *
 * AUTO runs a forward on the recurrent engine instead of the hopper engine where the copy engine (TMA) cannot take q, k
 * or v: it needs 16-bit elements, data aligned to 16 bytes, strides that are multiples of 8 elements below 2^39 and
 * axes below 2^31, and HOPPER by name refuses others; and where it saves states for a recurrent backward.
 *
 * AUTO runs a backward of bf16 on the hopper engine, of shorter sequences than a forward, where the copy engine can
 * take d_o too. Fp16, whose adjoints below 1e-7 are lost there, and GDELTA_GATE_LINEAR go to the recurrent engine
 * unless HOPPER is named, which refuses dg of a linear gate: a decay next to 0 has a gradient that it cannot tell from
 * its roundings. The hopper engine's results of a sequence and head are exact to 5e-3 of their length, gradients to
 * 8e-3, dg and dbeta to 1e-2, to 2e-2 where gates are strong; or, where sums cancel, by chance or because keys are
 * alike, to that part of the root of the sum of the squares of the products that are summed.
 *
 * Three limits of the hopper engine lie in the numbers, which no call looks at; RECURRENT by name has none of them.
 * Keys must be of about unit length, as l2norm makes them: much longer ones overflow its fp16 inverse, and results are
 * inf or NaN. So do states above 1e6 in fp16. And with beta near 2 and no decay nothing is ever forgotten and roundings
 * add up: after 4096 tokens the state is 2.7e-2 off in bf16, less than 1e-2 in fp16. */
typedef int32_t gdelta_engine;
enum {
    GDELTA_ENGINE_AUTO = 0,
    GDELTA_ENGINE_RECURRENT = 1, /* token by token on CUDA cores, fp32 arithmetic: any K, V <= 256, sm_80 and later */
    GDELTA_ENGINE_HOPPER = 2 /* chunked, tensor cores, sm_90a: forward and backward of bf16 and fp16, K and V each 64
                                or 128 */
};

/* What forward leaves in `saved` for backward. The hopper engine's backward makes all that it needs from the inputs,
 * faster than it could load it: 0 bytes in both modes, as with GDELTA_FLAG_SMALL_WORKSPACE. The recurrent engine
 * (gdelta_plan_describe says which it is): */
typedef int32_t gdelta_save_mode;
enum {
    GDELTA_SAVE_COMPACT = 0, /* 0 bytes; backward recomputes */
    GDELTA_SAVE_STATES = 1   /* the state after every 64 tokens, fp32; backward is faster */
};

typedef int32_t gdelta_operation;
enum {
    GDELTA_OPERATION_FORWARD = 0,
    GDELTA_OPERATION_BACKWARD = 1,
    GDELTA_OPERATION_STEP = 2,
    GDELTA_OPERATION_COMMIT = 3
};

/* gdelta_problem.flags */
enum {
    /* A sequence's bits depend on nothing else in the batch, nor those of forward and step on where a longer text was
     * cut at multiples of 64. */
    GDELTA_FLAG_BATCH_INVARIANT = 1,

    /* A backward takes its heads in slices, one after another in the same workspace: as many key heads each, with the
     * query and value heads that share them, and as few slices as bring the workspace down to twice the 16-bit states
     * of every 64 tokens and output head, but for some KB of alignment. At K = V = 128 that is 1 KB a token and output
     * head, instead of 2.2 KB or, with room for the segments of a long text, up to 2.6 KB. 16 key heads make 4 slices
     * there, of 0.5 to 0.7 KB a token and head of all. Less than 3 key heads, 4 where one of K and V is 64, 6 where
     * both are, are too few, as some are for K and V that only the recurrent engine takes: then a slice is one key
     * head. Costs speed where the heads of a slice do not fill the GPU. Gradients have the bits that they have without,
     * but where texts are cut into segments, for the plan cuts for a slice. Forward saves nothing for backward,
     * whatever save_mode says. */
    GDELTA_FLAG_SMALL_WORKSPACE = 2
};

/* Everything that fixes shapes and arithmetic; no pointers.
 *
 * Heads: HQ, HK, HV query, key and value heads. There are HO = max(HQ, HV) output heads; output, gate, beta and state
 * have HO of them. Legal: HQ = HK dividing HV (grouped value heads, what the models use), and HK = HV dividing HQ
 * (query groups, one state per query head). The gradient of a shared head is the sum over its group.
 *
 * Sizes: B and N below 2^31 - 1, heads, K and V at most 2^20, every tensor below 2^63 bytes.
 * A CUDA grid has at most 2^31 - 1 blocks, else UNSUPPORTED: sequences times HO times ceil(V / 64), and on the hopper
 * engine chunks of 64 tokens times HO. */
typedef struct gdelta_problem {
    uint32_t struct_size; /* sizeof(gdelta_problem) */
    uint32_t flags;       /* GDELTA_FLAG_*, or 0 */

    gdelta_layout layout; /* default BSHD */
    gdelta_engine engine; /* default AUTO */

    int64_t batch;        /* B, number of sequences; must be 0 with THD */
    int64_t tokens;       /* T, tokens of each sequence. With THD: the longest sequence, or 0 if not known */
    int64_t sequences;    /* THD: N, number of sequences, at least 1. Else 0 */
    int64_t total_tokens; /* THD: rows in the packed tensors, a capacity: cu_seqlens[N] may be less. Else 0 */

    int32_t heads_q, heads_k, heads_v; /* HQ, HK, HV */
    int32_t dim_k, dim_v;              /* K, V: elements of a key (and query) row and of a value (and output) row */

    gdelta_dtype dtype;       /* q, k, v, o and their gradients: bf16 (default), fp16, fp32 */
    gdelta_dtype gate_dtype;  /* g, dg: fp32 (default), bf16, fp16 */
    gdelta_dtype beta_dtype;  /* beta, dbeta: fp32 (default), bf16, fp16 */
    gdelta_dtype state_dtype; /* states in memory: fp32 (default), bf16, fp16. In registers they are always fp32 */

    double scale;      /* on the output; used only with has_scale = 1, for 0 is a legal scale */
    int32_t has_scale; /* 0: scale is K^-1/2 and the field above must be 0 */

    gdelta_l2norm l2norm;
    double l2norm_eps; /* 0: 1e-6. Must be 0 without l2norm */

    gdelta_gate gate;
    gdelta_beta beta;
    gdelta_head_map head_map;
    gdelta_state_order state_order;
    gdelta_save_mode save_mode;

    int32_t compute_capability; /* 10 * major + minor of the GPU to plan for, and calls on others are UNSUPPORTED;
                                   0: the current device's, or 90 without one */
    int32_t multiprocessors;    /* of that GPU; 0: the current device's, or 132 without one */
    int32_t reserved[8];        /* 0 */
} gdelta_problem;

/* ---- 3. Tensors ------------------------------------------------------------------------------------------------- */

/* A token tensor: q, k, v, o, g, beta and their gradients.
 *
 * Strides are in elements and always in the order [batch, token, head, element], whatever the layout. All four zero: a
 * contiguous tensor of the problem's layout. Else all four count: free strides, so that q, k and v may be column slices
 * of one fused projection, or g and beta interleaved views. The innermost stride must be 1 for rows of more than one
 * element (g and beta have none: 0 or 1). With THD the batch stride must be 0. Strides are positive for axes longer
 * than 1, and no two elements of an output may share an address. data is aligned to its element. An output has memory
 * of its own: the same data twice is refused, tensors that overlap otherwise are not noticed. */
typedef struct gdelta_tensor {
    void *data;         /* NULL: absent, where that is allowed; the other fields then do not matter */
    gdelta_dtype dtype; /* default: the problem's dtype for this role */
    int32_t reserved;   /* 0 */
    int64_t stride[4];  /* elements: batch, token, head, innermost */
} gdelta_tensor;

/* A table of integers on the device, with an optional copy on the host.
 * The device's contents count; the host copy serves to find mistakes before the launch. */
typedef struct gdelta_index {
    const void *data;   /* device memory; NULL: absent */
    const void *host;   /* the same numbers in host memory, or NULL. Read during the call only */
    gdelta_dtype dtype; /* INT32 (default) or INT64, both tables */
    int32_t reserved;   /* 0 */
} gdelta_index;

/* States: [slots, HO, K, V], or [slots, HO, V, K] with GDELTA_STATE_VK.
 *
 * Without slots, sequence n uses entry n. With slots it uses entry slots[n] of a pool of slot_count entries, and
 * slots[n] = -1 skips the sequence: its output rows are 0 and no state of it is read or written. A slot outside
 * -1..slot_count-1 skips too, and is reported in device_status. Two sequences must not write one slot, nor one write
 * what another reads; a sequence may write the slot that it read (in place: same data, dtype and strides). A slot that
 * is out of range in either table skips the sequence in both. Strides in elements: [slot, head, row, element]; all
 * zero: contiguous. Slot and head strides are free, one head's matrix is contiguous. Padding between slots is never
 * touched. */
typedef struct gdelta_state {
    void *data;         /* NULL: absent */
    gdelta_dtype dtype; /* default: the problem's state_dtype */
    int32_t reserved;   /* 0 */
    int64_t stride[4];
    gdelta_index slots; /* [N], or absent */
    int64_t slot_count; /* entries in the pool; needed with slots, else 0 */
} gdelta_state;

/* What a device table did wrong: a word in device memory that you clear to 0 and read when you like. The first mistake
 * since then is kept: the rule in the upper 32 bits, the index in the table in the lower 32. Where a table is malformed
 * no address outside your tensors is touched. */
enum {
    GDELTA_DEVICE_OK = 0,
    GDELTA_DEVICE_CU_SEQLENS_START = 1,      /* cu_seqlens[0] is not 0: the call writes nothing */
    GDELTA_DEVICE_CU_SEQLENS_ORDER = 2,      /* cu_seqlens[index] < cu_seqlens[index - 1]: the call writes nothing */
    GDELTA_DEVICE_CU_SEQLENS_END = 3,        /* cu_seqlens[index] > total_tokens: the call writes nothing */
    GDELTA_DEVICE_CU_SEQLENS_LENGTH = 4,     /* sequence index - 1 is longer than problem.tokens: writes nothing */
    GDELTA_DEVICE_INITIAL_SLOT_RANGE = 5,    /* initial state slots[index] out of range: that sequence is skipped */
    GDELTA_DEVICE_FINAL_SLOT_RANGE = 6,      /* final state slots[index] out of range: that sequence is skipped */
    GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE = 7, /* checkpoints slots[index] out of range: that state is not stored */
    GDELTA_DEVICE_TOKEN_SLOT_RANGE = 8,      /* token_states slots[index] out of range: that state is not stored */
    GDELTA_DEVICE_PARENT_RANGE = 9,          /* parents[index] is no earlier token, nor -1: that sequence is skipped */
    GDELTA_DEVICE_ACCEPTED_RANGE = 10        /* accepted[index] is not 0..T: that sequence is skipped */
};

/* The sentence for a device status word, "no error" for 0. Never NULL. Valid until this thread's next call of it. */
GDELTA_API const char *gdelta_device_status_string(uint64_t word);

/* ---- 4. Plans --------------------------------------------------------------------------------------------------- */

/* A plan is what the library decided about a problem: engine, tiles, sizes. Pure data: immutable, no device memory,
 * shareable between threads, made without a GPU if need be. */
typedef struct gdelta_plan gdelta_plan;

/* The CUDA runtime's cudaStream_t and the driver's CUstream are this type. NULL is the legacy default stream. */
typedef struct CUstream_st *gdelta_stream;

/* Can this build run `operation` of `problem` on a GPU of `compute_capability` (90 for sm_90)? Needs no GPU.
 * GDELTA_OK; INVALID_ARGUMENT if the problem breaks a rule; UNSUPPORTED otherwise, with *reason (may be NULL) pointing
 * to the sentence, which is gdelta_last_error()'s. On GDELTA_OK *reason is "". */
GDELTA_API gdelta_status gdelta_supported(const gdelta_problem *problem, gdelta_operation operation,
                                          int32_t compute_capability, const char **reason);

/* Makes a plan for forward, backward and step of a problem. Host arithmetic only, once per shape.
 * INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY; *plan is then NULL. */
GDELTA_API gdelta_status gdelta_plan_create(const gdelta_problem *problem, gdelta_plan **plan);

/* Frees a plan; NULL does nothing. Work already enqueued with it goes on. */
GDELTA_API void gdelta_plan_destroy(gdelta_plan *plan);

/* Writes one line about the plan, always NUL-terminated, cut to `size` bytes. Returns the length of the whole line, as
 * snprintf does; 0 for a NULL plan. */
GDELTA_API size_t gdelta_plan_describe(const gdelta_plan *plan, char *text, size_t size);

/* Bytes of scratch that one call of `operation` needs; may be 0. Exact, no hidden allocation besides; it never shrinks
 * when batch, tokens, sequences or total_tokens grow, as long as chunks of 64 tokens times output heads stay below
 * 2^31, where AUTO leaves the hopper engine. At K = V = 128 forward takes next to nothing on the recurrent engine and
 * about 0.4 KB a token and output head on the hopper engine, backward about 2.2 KB on either;
 * GDELTA_FLAG_SMALL_WORKSPACE makes that 1 KB at most, where heads can be sliced. The hopper engine counts whole
 * chunks, B * ceil(T / 64) or, with THD, total_tokens / 64 + N: a sequence of few tokens takes what 64 take. The buffer
 * must be aligned to 256 bytes; its contents need no initialisation and do not outlive the call. INVALID_ARGUMENT;
 * UNSUPPORTED where the operation is. */
GDELTA_API gdelta_status gdelta_plan_workspace_size(const gdelta_plan *plan, gdelta_operation operation, size_t *bytes);

/* Bytes that forward leaves for backward, for the problem's save_mode; may be 0, and is with the hopper engine. Aligned
 * to 256 bytes. */
GDELTA_API gdelta_status gdelta_plan_saved_size(const gdelta_plan *plan, size_t *bytes);

/* ---- 5. Forward: whole sequences -------------------------------------------------------------------------------- */

typedef struct gdelta_forward_args {
    uint32_t struct_size; /* sizeof(gdelta_forward_args) */
    uint32_t reserved;    /* 0 */

    gdelta_tensor q;    /* [B, T, HQ, K] */
    gdelta_tensor k;    /* [B, T, HK, K] */
    gdelta_tensor v;    /* [B, T, HV, V] */
    gdelta_tensor g;    /* [B, T, HO]: what problem.gate says; absent: no decay */
    gdelta_tensor beta; /* [B, T, HO]: what problem.beta says; absent: 1 */

    gdelta_tensor a_log;   /* [HO], fp32 (default), bf16 or fp16: GDELTA_GATE_SOFTPLUS needs it, others refuse it */
    gdelta_tensor dt_bias; /* [HO], likewise, optional: absent is 0. Only the head stride counts, default 1 */

    gdelta_tensor o; /* out [B, T, HO, V], problem.dtype or fp32; absent: only the state is wanted */

    gdelta_state initial_state;       /* [N, HO, K, V] in; absent: zeros */
    gdelta_state final_state;         /* [N, HO, K, V] out; absent: not wanted. May be initial_state's memory */
    const uint8_t *has_initial_state; /* device, [N]: 0 starts that sequence from zeros without reading its slot.
                                         NULL: all have one. Needs initial_state */

    gdelta_index cu_seqlens; /* THD: [N + 1], from 0, nondecreasing, at most total_tokens. Rows past the last sequence
                                are neither read nor written. Else absent */

    /* The state after every checkpoint_interval tokens of each sequence, counted from its start, also after the last
     * token where that is a multiple: floor(length / interval) of them, each equal to the final state of a call that
     * ends there. Bit for bit on the recurrent engine, and on the hopper engine with GDELTA_FLAG_BATCH_INVARIANT, where
     * text resumed from one has the bits of the whole; without it, to within rounding, for how a text is cut into
     * segments depends on its length. Checkpoint j of sequence n has the number n * floor(T / interval) + j; with THD,
     * where lengths differ, floor(cu_seqlens[n] / interval) + j, which no other has. Without slots that is its entry of
     * [numbers, HO, K, V], numbers = B * floor(T / interval) or floor(total_tokens / interval). With slots its entry is
     * slots[number], and -1 does not store it; no two may take one slot. Memory of its own, or the pool of initial
     * or final states with the same dtype and strides, where all have slots. In that of the initial states the hopper
     * engine cuts no text into segments, as in place. */
    gdelta_state checkpoints;
    int64_t checkpoint_interval; /* a multiple of 64; 0 without checkpoints */

    void *saved;        /* gdelta_plan_saved_size bytes for a later backward; NULL: inference */
    size_t saved_bytes; /* 0 if NULL */

    uint64_t *device_status; /* device, optional: see GDELTA_DEVICE_* */
} gdelta_forward_args;

/* Runs whole sequences: prefill, training forward. N = B, or problem.sequences with THD. Empty sequences hand their
 * initial state on, bit for bit. `bytes` is the size of `workspace`, which may be NULL if the plan asks for 0.
 * INVALID_ARGUMENT, UNSUPPORTED, WORKSPACE_TOO_SMALL, CUDA. */
GDELTA_API gdelta_status gdelta_forward(const gdelta_plan *plan, const gdelta_forward_args *args, void *workspace,
                                        size_t bytes, gdelta_stream stream);

/* ---- 6. Backward ------------------------------------------------------------------------------------------------ */

/* Gradients are written, not added, but for those of the gate's parameters under this flag. */
enum {
    GDELTA_BACKWARD_ACCUMULATE_PARAMETERS = 1 /* da_log += and ddt_bias += instead of = */
};

typedef struct gdelta_backward_args {
    uint32_t struct_size; /* sizeof(gdelta_backward_args) */
    uint32_t flags;       /* GDELTA_BACKWARD_*, or 0 */

    gdelta_tensor q, k, v, g, beta, a_log, dt_bias; /* as given to forward */
    gdelta_state initial_state;                     /* as given to forward; a skipped sequence has zero gradients. One
                                                       that forward skipped for its final slot alone has no saved
                                                       states: its gradients are undefined */
    const uint8_t *has_initial_state;
    gdelta_index cu_seqlens;

    gdelta_tensor d_o;           /* in [B, T, HO, V], problem.dtype or fp32; absent: 0. ("do" is a word of C) */
    gdelta_tensor d_final_state; /* in [N, HO, K, V], strides [sequence, head, row, 1]; absent: 0. Default type and
                                    order: the problem's state_dtype and state_order */

    /* Outputs; every one may be absent. */
    gdelta_tensor dq; /* [B, T, HQ, K], problem.dtype or fp32, through the norm; sums over a group in fp32 */
    gdelta_tensor dk; /* [B, T, HK, K], likewise */
    gdelta_tensor dv; /* [B, T, HV, V], likewise */
    gdelta_tensor dg; /* [B, T, HO], gate_dtype or fp32: gradient of what g holds (log gate, decay or a_t). Needs g */
    gdelta_tensor dbeta;           /* [B, T, HO], beta_dtype or fp32: gradient of what beta holds. Needs beta */
    gdelta_tensor da_log;          /* [HO] fp32; needs a_log */
    gdelta_tensor ddt_bias;        /* [HO] fp32; needs dt_bias */
    gdelta_tensor d_initial_state; /* [N, HO, K, V], strides [sequence, head, row, 1]; by sequence, never by slot.
                                      0 where has_initial_state is 0 */

    const void *saved; /* what a forward of the same inputs left; needed where gdelta_plan_saved_size is not 0 */
    size_t saved_bytes;

    uint64_t *device_status;
} gdelta_backward_args;

/* Gradients of gdelta_forward. At least one of d_o and d_final_state, and one output, must be there. With THD, rows
 * past the last sequence are neither read nor written. The same statuses as gdelta_forward. */
GDELTA_API gdelta_status gdelta_backward(const gdelta_plan *plan, const gdelta_backward_args *args, void *workspace,
                                         size_t bytes, gdelta_stream stream);

/* ---- 7. Step: decode, and verification of drafts ---------------------------------------------------------------- */

enum {
    GDELTA_STEP_KEEP_STATE = 1 /* read the state, do not write it: drafts whose fate is not known yet */
};

/* What draft tokens do to the state, so that a commit can replay those that were accepted: S <- decay S + k u^T. All
 * three or none, fp32. At K = V = 128 it takes 1/64 of the memory of a state a token. Rows of skipped sequences are not
 * written. */
typedef struct gdelta_record {
    gdelta_tensor k;     /* [B, T, HK, K], normalised as problem.l2norm says */
    gdelta_tensor u;     /* [B, T, HO, V] */
    gdelta_tensor decay; /* [B, T, HO], exp(g) */
} gdelta_record;

typedef struct gdelta_step_args {
    uint32_t struct_size; /* sizeof(gdelta_step_args) */
    uint32_t flags;       /* GDELTA_STEP_*, or 0 */

    gdelta_tensor q, k, v, g, beta, a_log, dt_bias; /* as in forward, 1 <= T <= 16, any dense layout */
    gdelta_tensor o;                                /* out [B, T, HO, V]; absent: only the state is wanted */

    gdelta_state state;               /* in and, unless output_state is there, out. Needed */
    gdelta_state output_state;        /* optional: written instead of `state` */
    const uint8_t *has_initial_state; /* device, [B], optional: 0 starts from zeros without reading the slot */

    /* Verification of drafts, all optional. What follows a token starts from its state in registers: states are rounded
     * to their type in memory only where they are stored. */

    /* Out: the state after token t of sequence n, entry n * T + t of [B * T, HO, K, V]. With slots its entry is
     * slots[n * T + t], and -1 does not store it. Memory of its own, or the pool of `state` or output_state with the
     * same dtype and strides, where both have slots; there, a token of a tree must not take the slot that its sequence
     * starts from. */
    gdelta_state token_states;

    gdelta_record record; /* out: for gdelta_commit */

    /* [B, T], tree drafts: token t continues token parents[n * T + t], one of 0..t-1 of its sequence, or the state
     * before the draft if that is -1. o, token_states and record are those of a step of the tokens from the root to t
     * alone, bit for bit. Needs GDELTA_STEP_KEEP_STATE, for no token of a tree is the last. */
    gdelta_index parents;

    uint64_t *device_status;
} gdelta_step_args;

/* Runs T new tokens of each of B sequences on states that live in a pool, in place by default. A packed decode batch
 * [B * T, H, D] is BSHD. The same statuses as gdelta_forward. */
GDELTA_API gdelta_status gdelta_step(const gdelta_plan *plan, const gdelta_step_args *args, void *workspace,
                                     size_t bytes, gdelta_stream stream);

typedef struct gdelta_commit_args {
    uint32_t struct_size;             /* sizeof(gdelta_commit_args) */
    uint32_t flags;                   /* 0 */
    gdelta_record record;             /* as a step left it. Needed */
    gdelta_index accepted;            /* [B], 0..T: how many draft tokens to keep. Needed */
    gdelta_index parents;             /* as given to that step: then 1 + the last token to keep, which brings those that
                                         it continues, or 0 */
    gdelta_state state;               /* as given to that step; in and, unless output_state is there, out. Needed */
    gdelta_state output_state;        /* optional: written instead of `state` */
    const uint8_t *has_initial_state; /* as given to that step */
    uint64_t *device_status;
} gdelta_commit_args;

/* Replays the accepted tokens of a recorded draft into the states. The result is, bit for bit, the state that a step of
 * these tokens alone leaves; with fp32 states that is also what steps of one token each leave. 0 accepted: the state as
 * it was, or zeros where has_initial_state is 0. A count outside 0..T skips the sequence, whose states are not touched,
 * and is reported in device_status. The plan is that of the step. The same statuses as gdelta_forward. */
GDELTA_API gdelta_status gdelta_commit(const gdelta_plan *plan, const gdelta_commit_args *args, void *workspace,
                                       size_t bytes, gdelta_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* GDELTA_GDELTA_H */
