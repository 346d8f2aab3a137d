/* Tensors of more than 2^31 elements, more than 65,535 sequences times heads, texts of half a million tokens: where an
 * offset of 32 bits or an axis of a grid runs over. Needs an H200's memory; label `big`, so that others may leave it
 * out.
 *
 * No reference runs over all of it. A window of tokens does: whole sequences, or the last tokens of a text whose gate
 * forgets everything just before them, exp(-200) being 0 in fp32. Outputs in the window must be those of the window
 * alone. Inputs are made on the device: a random pattern, repeated, whose period is no divisor of 2^31. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

enum { kPeriod = 1000003, kPad = 1 << 20 };

/* A call whose tensors are contiguous, or have rows `stride` elements apart, in device memory. */
typedef struct big_call {
    test_case c; /* lengths[0] and sequences may be larger than any instance's */
    int64_t sequences, tokens, rows, stride;
    int64_t pool; /* slots of the pools that states are in; 0: sequence n has entry n */
    gpu_buffer tensor[kRoles], tables, workspace;
    gdelta_plan *plan;
} big_call;

static const role_set token_inputs = ROLE(kQ) | ROLE(kK) | ROLE(kV) | ROLE(kG) | ROLE(kBeta) | ROLE(kDO);
static const role_set token_outputs = ROLE(kO) | ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta);

static bool is_scalar(role r) {
    return r == kG || r == kBeta || r == kDG || r == kDBeta;
}

/* Elements of a token's row, all heads. */
static int64_t width(const big_call *b, role r) {
    int64_t heads = case_heads_o(&b->c), k = b->c.dim_k, v = b->c.dim_v;
    int64_t shared = b->c.heads_q < b->c.heads_v ? b->c.heads_q : b->c.heads_v;
    if (is_scalar(r)) return heads;
    if (r == kQ || r == kDQ) return b->c.heads_q * k;
    if (r == kK || r == kDK) return shared * k;
    return r == kV || r == kDV ? b->c.heads_v * v : heads * v;
}

static int64_t row_stride(const big_call *b, role r) {
    return b->stride && !is_scalar(r) ? b->stride : width(b, r);
}

static size_t element_bytes(role r) {
    return is_scalar(r) || r == kInitial || r == kFinal ? 4 : 2;
}

static void fill_tensor(gpu_buffer *buffer, role r) {
    size_t bytes = element_bytes(r);
    char *pattern = malloc(kPeriod * bytes);
    for (int64_t i = 0; i < kPeriod; ++i) {
        uint64_t key = fill_key(5, r, 0, 0, 0, i);
        double value = r == kG ? -0.1 * fill_uniform(key) : r == kBeta ? fill_uniform(key) : fill_normal(key);
        float single = (float)value;
        memcpy(pattern + (size_t)i * bytes, &single, 4 * (bytes == 4));
        if (bytes == 2) memcpy(pattern + 2 * i, (char *)&single + 2, 2); /* cut to bf16 */
    }
    gpu_buffer_tile(buffer, pattern, kPeriod * bytes);
    free(pattern);
}

static size_t state_bytes(const big_call *b) {
    return (size_t)case_heads_o(&b->c) * (size_t)b->c.dim_k * (size_t)b->c.dim_v * 4;
}

/* Of a pool: from the last slot down to the first. */
static int64_t entry(const big_call *b, int64_t n) {
    return b->pool ? (b->sequences - 1 - n) * (b->pool - 1) / (b->sequences - 1) : n;
}

static size_t tensor_bytes(const big_call *b, role r) {
    if (r == kInitial || r == kFinal) return state_bytes(b) * (size_t)(b->pool ? b->pool : b->sequences);
    return (size_t)(row_stride(b, r) * b->rows) * element_bytes(r);
}

static void make_tensors(big_call *b, role_set roles) {
    for (role r = 0; r < kRoles; ++r) {
        if (!(roles & ROLE(r))) continue;
        b->tensor[r] = gpu_buffer_create(tensor_bytes(b, r), kPad);
        if ((token_inputs | ROLE(kInitial)) & ROLE(r)) fill_tensor(&b->tensor[r], r);
    }
}

static gdelta_tensor tensor(const big_call *b, role r) {
    gdelta_tensor t = {.data = b->tensor[r].data};
    if (!b->stride || is_scalar(r)) return t;
    t.stride[1] = b->stride;
    t.stride[2] = r == kQ || r == kK || r == kDQ || r == kDK ? b->c.dim_k : b->c.dim_v;
    t.stride[3] = 1;
    return t;
}

static gdelta_problem problem_of(const big_call *b, const test_engine *engine) {
    gdelta_problem p = case_problem(&b->c);
    bool packed = b->c.layout == GDELTA_LAYOUT_THD;
    p.engine = engine->engine;
    p.batch = packed ? 0 : b->sequences;
    p.sequences = packed ? b->sequences : 0;
    p.total_tokens = packed ? b->rows : 0;
    p.tokens = b->tokens;
    return p;
}

/* Runs the operation; inputs and outputs are the tensors that are there. */
static void run_big(big_call *b, const test_engine *engine, gdelta_operation operation) {
    size_t bytes;
    gdelta_problem problem = problem_of(b, engine);
    cr_assert_eq(gdelta_plan_create(&problem, &b->plan), GDELTA_OK, "%s", gdelta_last_error());
    cr_assert_eq(gdelta_plan_workspace_size(b->plan, operation, &bytes), GDELTA_OK, "%s", gdelta_last_error());
    b->workspace = gpu_buffer_create(bytes, kPad);
    gdelta_index tables = {.data = b->tables.data}, lengths = {.data = b->pool ? NULL : b->tables.data};
    gdelta_state initial = {.data = b->tensor[kInitial].data}, final = {.data = b->tensor[kFinal].data};
    initial.slot_count = final.slot_count = b->pool;
    if (b->pool) initial.slots = tables, final.slots = final.data ? tables : final.slots;
    gdelta_tensor q = tensor(b, kQ), k = tensor(b, kK), v = tensor(b, kV), g = tensor(b, kG), beta = tensor(b, kBeta);
    gdelta_status status;
    if (operation == GDELTA_OPERATION_FORWARD) {
        gdelta_forward_args args = {.struct_size = sizeof args, .q = q, .k = k, .v = v, .g = g, .beta = beta};
        args.o = tensor(b, kO), args.initial_state = initial, args.final_state = final, args.cu_seqlens = lengths;
        status = gdelta_forward(b->plan, &args, b->workspace.data, bytes, NULL);
    } else if (operation == GDELTA_OPERATION_STEP) {
        gdelta_step_args args = {.struct_size = sizeof args, .q = q, .k = k, .v = v, .g = g, .beta = beta};
        args.o = tensor(b, kO), args.state = initial, args.output_state = final;
        status = gdelta_step(b->plan, &args, b->workspace.data, bytes, NULL);
    } else {
        gdelta_backward_args args = {.struct_size = sizeof args, .q = q, .k = k, .v = v, .g = g, .beta = beta};
        args.initial_state = initial, args.cu_seqlens = lengths, args.d_o = tensor(b, kDO);
        args.dq = tensor(b, kDQ), args.dk = tensor(b, kDK), args.dv = tensor(b, kDV);
        args.dg = tensor(b, kDG), args.dbeta = tensor(b, kDBeta);
        status = gdelta_backward(b->plan, &args, b->workspace.data, bytes, NULL);
    }
    cr_assert_eq(status, GDELTA_OK, "%s", gdelta_last_error());
    gpu_stream_finish(NULL);
    cr_expect(gpu_buffer_intact(&b->workspace, "workspace"));
    gpu_buffer_destroy(&b->workspace);
    gdelta_plan_destroy(b->plan);
    for (role r = 0; r < kRoles; ++r) {
        if (b->tensor[r].data) cr_expect(gpu_buffer_intact(&b->tensor[r], role_name(r)));
    }
}

static void destroy_big(big_call *b) {
    for (role r = 0; r < kRoles; ++r) gpu_buffer_destroy(&b->tensor[r]);
    gpu_buffer_destroy(&b->tables);
}

/* `tokens` rows from `row` on, of sequence n, against the reference of these alone. */
static void expect_window(const big_call *b, int64_t n, int64_t row, int64_t tokens, gdelta_operation operation,
                          const test_engine *engine) {
    test_case c = b->c;
    c.layout = GDELTA_LAYOUT_BSHD;
    c.sequences = 1;
    c.lengths[0] = tokens;
    c.longest = c.capacity = 0;
    c.absent = ROLE(kStatus) | ROLE(kDFinal) | ROLE(kDInitial);
    for (role r = kInitial; r <= kFinal; ++r) {
        if ((r == kInitial || r == kFinal) && !b->tensor[r].data) c.absent |= ROLE(r);
    }
    instance x = make_instance(&c), plain;
    for (role r = 0; r < kRoles; ++r) {
        if (!b->tensor[r].data || !x.tensor[r].present) continue;
        bool output = token_outputs & ROLE(r) || r == kFinal;
        char *to = (output ? x.after : x.before) + x.tensor[r].offset;
        const char *from = b->tensor[r].data;
        if (r == kInitial || r == kFinal) {
            gpu_download(to, from + (size_t)entry(b, n) * state_bytes(b), state_bytes(b));
            continue;
        }
        size_t bytes = (size_t)width(b, r) * element_bytes(r), step = (size_t)row_stride(b, r) * element_bytes(r);
        if (step == bytes) {
            gpu_download(to, from + (size_t)row * step, (size_t)tokens * bytes);
            continue;
        }
        for (int64_t t = 0; t < tokens; ++t)
            gpu_download(to + (size_t)t * bytes, from + (size_t)(row + t) * step, bytes);
    }
    instance_create_plain(&plain, &x);
    cr_assert(instance_run(&plain, &test_engines[kReference], operation));
    cr_expect(compare_instances(&x, &plain, instance_outputs(&plain, operation), engine), "sequence %d, row %d", (int)n,
              (int)row);
    instance_destroy(&plain);
    instance_destroy(&x);
}

/* Everything before this row is forgotten. */
static void forget_before(big_call *b, int64_t row) {
    float reset[128];
    int heads = case_heads_o(&b->c);
    for (int h = 0; h < heads; ++h) reset[h] = -200;
    gpu_upload((char *)b->tensor[kG].data + (size_t)(row * heads) * 4, reset, (size_t)heads * 4);
}

static big_call big(int64_t sequences, int64_t tokens, int heads_q, int heads_v, int k, int v) {
    big_call b = {.sequences = sequences, .tokens = tokens, .rows = sequences * tokens};
    b.c = (test_case){.sequences = 1,
                      .lengths = {1},
                      .heads_q = heads_q,
                      .heads_v = heads_v,
                      .dim_k = k,
                      .dim_v = v,
                      .l2norm = GDELTA_L2NORM_ADD_EPS};
    return b;
}

static void need_memory(double gib) {
    if ((double)gpu_free_bytes() > gib * 0x1p30) return;
    fprintf(stderr, "GPU SKIPPED: big (%.0f GiB of memory are needed)\n", gib);
    cr_skip_test("%.0f GiB of memory are needed", gib);
}

static const role_set forward_roles = ROLE(kQ) | ROLE(kK) | ROLE(kV) | ROLE(kG) | ROLE(kBeta) | ROLE(kO);
static const role_set backward_roles = ROLE(kQ) | ROLE(kK) | ROLE(kV) | ROLE(kG) | ROLE(kBeta) | ROLE(kDO) | ROLE(kDQ) |
                                       ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta);

static role_set roles_of(gdelta_operation operation) {
    return operation == GDELTA_OPERATION_BACKWARD ? backward_roles : forward_roles;
}

/* One text: q, k, v and o of 2^31 elements and more, and twice as many in the states of its chunks; then 64 heads. */
GPU_ENGINE_TEST(big, long_texts, 4) {
    need_memory(110);
    big_call b = part / 2 ? big(1, 131136, 16, 64, 128, 128) : big(1, 524352, 32, 32, 128, 128);
    gdelta_operation operation = part % 2 ? GDELTA_OPERATION_BACKWARD : GDELTA_OPERATION_FORWARD;
    if (!engine_runs(engine, &b.c, operation)) cr_skip_test("the engine %s has none", engine->name);
    make_tensors(&b, roles_of(operation));
    forget_before(&b, b.tokens - 128);
    run_big(&b, engine, operation);
    expect_window(&b, 0, b.tokens - 128, 128, operation, engine);
    if (operation == GDELTA_OPERATION_FORWARD) expect_window(&b, 0, 0, 128, operation, engine);
    destroy_big(&b);
}

/* Many sequences of nine chunks. */
GPU_ENGINE_TEST(big, batches, 2) {
    need_memory(100);
    big_call b = big(4096, 576, 8, 8, 128, 128);
    gdelta_operation operation = part ? GDELTA_OPERATION_BACKWARD : GDELTA_OPERATION_FORWARD;
    if (!engine_runs(engine, &b.c, operation)) cr_skip_test("the engine %s has none", engine->name);
    make_tensors(&b, roles_of(operation));
    run_big(&b, engine, operation);
    static const int64_t sequences[] = {0, 1023, 2047, 4095};
    for (int i = 0; i < 4; ++i) expect_window(&b, sequences[i], sequences[i] * 576, 576, operation, engine);
    destroy_big(&b);
}

/* More than 65,535 sequences times heads, of packed texts of 16 tokens. */
GPU_ENGINE_TEST(big, many_short_texts, 2) {
    enum { kSequences = 2100, kTokens = 16 };
    need_memory(20);
    big_call b = big(kSequences, kTokens, 32, 32, 64, 64);
    b.c.layout = GDELTA_LAYOUT_THD;
    gdelta_operation operation = part ? GDELTA_OPERATION_BACKWARD : GDELTA_OPERATION_FORWARD;
    if (!engine_runs(engine, &b.c, operation)) cr_skip_test("the engine %s has none", engine->name);
    make_tensors(&b, roles_of(operation) | ROLE(kInitial) | (part ? 0 : ROLE(kFinal)));
    int32_t ends[kSequences + 1];
    for (int n = 0; n <= kSequences; ++n) ends[n] = n * kTokens;
    b.tables = gpu_buffer_create(sizeof ends, kPad);
    gpu_upload(b.tables.data, ends, sizeof ends);
    run_big(&b, engine, operation);
    for (int64_t n = 0; n < kSequences; n += n < 2046 ? 33 : 1)
        expect_window(&b, n, n * kTokens, kTokens, operation, engine);
    destroy_big(&b);
}

/* As many rows of a decode batch, and states of more than 2^31 elements. */
GPU_ENGINE_TEST(big, decode_batches, 2) {
    need_memory(40);
    big_call b = part ? big(4200, 1, 16, 32, 128, 128) : big(66000, 1, 2, 2, 64, 64);
    if (!engine_runs(engine, &b.c, GDELTA_OPERATION_STEP)) cr_skip_test("the engine %s has none", engine->name);
    make_tensors(&b, forward_roles | ROLE(kInitial) | ROLE(kFinal));
    run_big(&b, engine, GDELTA_OPERATION_STEP);
    for (int64_t n = 0; n < b.sequences; n += b.sequences / 50 - 1) {
        expect_window(&b, n, n, 1, GDELTA_OPERATION_STEP, engine);
    }
    expect_window(&b, b.sequences - 1, b.sequences - 1, 1, GDELTA_OPERATION_STEP, engine);
    destroy_big(&b);
}

/* States in pools of more than 2^31 elements, of the last slots too. */
GPU_ENGINE_TEST(big, pools, 3) {
    enum { kSequences = 3, kSlots = 4200 };
    need_memory(40);
    const gdelta_operation operation = part == 2   ? GDELTA_OPERATION_STEP
                                       : part == 1 ? GDELTA_OPERATION_BACKWARD
                                                   : GDELTA_OPERATION_FORWARD;
    big_call b = big(kSequences, part == 2 ? 1 : 130, 16, 32, 128, 128);
    if (!engine_runs(engine, &b.c, operation)) cr_skip_test("the engine %s has none", engine->name);
    b.pool = kSlots;
    make_tensors(&b, roles_of(operation) | ROLE(kInitial) | (part == 1 ? 0 : ROLE(kFinal)));
    int32_t slots[kSequences];
    for (int n = 0; n < kSequences; ++n) slots[n] = (int32_t)entry(&b, n);
    b.tables = gpu_buffer_create(sizeof slots, kPad);
    gpu_upload(b.tables.data, slots, sizeof slots);
    run_big(&b, engine, operation);
    for (int64_t n = 0; n < kSequences; ++n) expect_window(&b, n, n * b.tokens, b.tokens, operation, engine);
    destroy_big(&b);
}

/* Rows far apart: few elements that span more than 2^31. */
GPU_ENGINE_TEST(big, strided_rows, 2) {
    need_memory(60);
    big_call b = big(1, 20000, 1, 2, 128, 128);
    b.c.layout = GDELTA_LAYOUT_THD;
    b.stride = 131072;
    gdelta_operation operation = part ? GDELTA_OPERATION_BACKWARD : GDELTA_OPERATION_FORWARD;
    if (!engine_runs(engine, &b.c, operation)) cr_skip_test("the engine %s has none", engine->name);
    make_tensors(&b, roles_of(operation));
    int32_t ends[2] = {0, 20000};
    b.tables = gpu_buffer_create(sizeof ends, kPad);
    gpu_upload(b.tables.data, ends, sizeof ends);
    forget_before(&b, b.tokens - 128);
    run_big(&b, engine, operation);
    expect_window(&b, 0, b.tokens - 128, 128, operation, engine);
    destroy_big(&b);
}
