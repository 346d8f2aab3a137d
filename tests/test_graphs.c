/* CUDA graphs, streams, devices. Every test is a process of its own, so what it captures is the first call in it;
 * strict capture makes an error of any synchronisation and any allocation. */
#include <pthread.h>
#include <stdio.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"

static const gdelta_operation training[] = {GDELTA_OPERATION_FORWARD, GDELTA_OPERATION_BACKWARD};

/* Captures one call on x; the arena may then be uploaded and the graph launched as often as one likes. */
static gpu_graph *capture(device_instance *d, const instance *x, const test_engine *engine, gdelta_operation operation,
                          gdelta_stream stream) {
    cr_assert(device_create(d, x, engine, operation));
    gpu_capture_begin(stream);
    gdelta_status status = device_enqueue(d, x, stream);
    gpu_graph *graph = gpu_capture_end(stream);
    cr_assert_eq(status, GDELTA_OK, "%s", gdelta_last_error());
    return graph;
}

/* Replays the graph on the contents of x, whose arena has the same shape as the captured one's, and compares with an
 * eager run. */
static void replay(gpu_graph *graph, device_instance *d, instance *x, const test_engine *engine, gdelta_stream stream) {
    instance eager;
    instance_create(&eager, &x->c);
    cr_assert(instance_run(&eager, engine, d->operation));
    device_upload(d, x);
    gpu_graph_launch(graph, stream);
    gpu_stream_finish(stream);
    role_set outputs = instance_outputs(x, d->operation);
    cr_expect(device_download(d, x) && instance_untouched(x, outputs));
    cr_expect(compare_bits(x, &eager, outputs));
    instance_destroy(&eager);
}

/* ---- Replays with other tables ---- */

enum { kCapacity = 4096 };

static test_case packed_case(int sequences) {
    return (test_case){.layout = GDELTA_LAYOUT_THD,
                       .sequences = sequences,
                       .capacity = kCapacity,
                       .heads_q = 1,
                       .heads_v = 2,
                       .dim_k = 64,
                       .dim_v = 64,
                       .l2norm = GDELTA_L2NORM_ADD_EPS};
}

/* Eight sequences or three; the first content is what is captured. */
static void replay_lengths(const test_engine *engine, gdelta_operation operation, int sequences,
                           const int64_t lengths[][8], int contents, int64_t checkpoint_interval) {
    test_case c = packed_case(sequences);
    c.checkpoint_interval = checkpoint_interval;
    if (!engine_runs(engine, &c, operation)) cr_skip_test("the engine %s has none", engine->name);
    gdelta_stream stream = gpu_stream_create();
    device_instance d;
    gpu_graph *graph = NULL;
    for (int i = 0; i < contents; ++i) {
        for (int n = 0; n < sequences; ++n) c.lengths[n] = lengths[i][n];
        instance x;
        instance_create(&x, &c);
        if (graph == NULL) graph = capture(&d, &x, engine, operation, stream);
        replay(graph, &d, &x, engine, stream);
        instance_destroy(&x);
    }
    gpu_graph_destroy(graph);
    device_destroy(&d);
    gpu_stream_destroy(stream);
}

GPU_ENGINE_TEST(graphs, replay_with_other_lengths, 5) {
    static const int64_t eight[][8] = {{512, 512, 512, 512, 512, 512, 512, 512},
                                       {1, 1, 3998, 0, 0, 96, 0, 0},
                                       {0, 0, 0, 0, 0, 0, 0, 4096},
                                       {0, 0, 0, 0, 0, 0, 0, 0}};
    static const int64_t three[][8] = {{0, 0, 4096}, {1, 1, 3998}, {4096, 0, 0}};
    int64_t interval = part == 4 ? 128 : 0;
    if (part / 2)
        replay_lengths(engine, training[part % 2], 3, three, 3, interval);
    else
        replay_lengths(engine, training[part % 2], 8, eight, 4, interval);
}

/* A decode batch whose slots and flags change from replay to replay. */
GPU_ENGINE_TEST(graphs, replay_with_other_slots, 2) {
    enum { kBatch = 8, kSlots = 19 };
    static const int64_t slots[][kBatch] = {{18, 17, 16, 15, 14, 13, 12, 11},
                                            {3, -1, 0, -1, 5, -1, -1, 7},
                                            {-1, -1, -1, -1, -1, -1, -1, -1},
                                            {0, 1, 2, 3, 4, 5, 6, 7}};
    static const uint64_t recycled[] = {1, 0x15, 0xff, 1 << 7};
    gdelta_stream stream = gpu_stream_create();
    device_instance d;
    gpu_graph *graph = NULL;
    for (int i = 0; i < 4; ++i) {
        test_case c = {.sequences = kBatch,
                       .lengths = {part ? 4 : 1},
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 128,
                       .dim_v = 128,
                       .state_dtype = part ? GDELTA_DTYPE_BF16 : GDELTA_DTYPE_FP32,
                       .l2norm = GDELTA_L2NORM_ADD_EPS,
                       .slot_count = kSlots,
                       .in_place = true,
                       .recycled = recycled[i]};
        for (int n = 0; n < kBatch; ++n) c.initial_slots[n] = c.final_slots[n] = slots[i][n];
        instance x;
        instance_create(&x, &c);
        gdelta_operation operation = RUNS(&c, STEP) ? GDELTA_OPERATION_STEP : GDELTA_OPERATION_FORWARD;
        if (graph == NULL) graph = capture(&d, &x, engine, operation, stream);
        replay(graph, &d, &x, engine, stream);
        instance_destroy(&x);
    }
    gpu_graph_destroy(graph);
    device_destroy(&d);
    gpu_stream_destroy(stream);
}

/* ---- Streams ---- */

static test_case dense_case(int64_t tokens) {
    return (test_case){.sequences = 2,
                       .lengths = {tokens},
                       .heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 128,
                       .dim_v = 128,
                       .l2norm = GDELTA_L2NORM_ADD_EPS};
}

/* Calls on two streams at once, each with its own workspace: forward and backward of different shapes, a prefill and
 * decode steps; or two forwards where the engine has nothing else. */
GPU_ENGINE_TEST(graphs, two_streams_at_once, 2) {
    instance x[2], eager[2];
    device_instance d[2];
    gdelta_stream stream[2];
    gdelta_operation operations[2];
    for (int i = 0; i < 2; ++i) {
        const gdelta_operation wanted[] = {GDELTA_OPERATION_FORWARD,
                                           part ? GDELTA_OPERATION_STEP : GDELTA_OPERATION_BACKWARD};
        test_case c = dense_case(i == 0 ? 1000 : part ? 4 : 700);
        if (part && i) c.sequences = 40, c.token_states = c.record = true;
        operations[i] = engine_runs(engine, &c, wanted[i]) ? wanted[i] : GDELTA_OPERATION_FORWARD;
        instance_create(&x[i], &c);
        instance_create(&eager[i], &c);
        cr_assert(instance_run(&eager[i], engine, operations[i]));
        cr_assert(device_create(&d[i], &x[i], engine, operations[i]));
        device_upload(&d[i], &x[i]);
        stream[i] = gpu_stream_create();
    }
    for (int round = 0; round < 5; ++round) {
        for (int i = 0; i < 2; ++i) {
            cr_assert_eq(device_enqueue(&d[i], &x[i], stream[i]), GDELTA_OK, "%s", gdelta_last_error());
        }
    }
    for (int i = 0; i < 2; ++i) {
        gpu_stream_finish(stream[i]);
        role_set outputs = instance_outputs(&x[i], operations[i]);
        cr_expect(device_download(&d[i], &x[i]) && instance_untouched(&x[i], outputs));
        cr_expect(compare_bits(&x[i], &eager[i], outputs));
        device_destroy(&d[i]);
        gpu_stream_destroy(stream[i]);
        instance_destroy(&x[i]);
        instance_destroy(&eager[i]);
    }
}

/* ---- Errors ---- */

/* Calls that are refused launch nothing, leave no CUDA error behind, and do not end a capture. */
GPU_ENGINE_TEST(graphs, a_refused_call_harms_nothing, 2) {
    test_case c = dense_case(65);
    instance x;
    instance_create(&x, &c);
    device_instance d;
    cr_assert(device_create(&d, &x, engine, GDELTA_OPERATION_FORWARD));
    device_upload(&d, &x);
    gdelta_stream stream = gpu_stream_create();
    bool captured = part;
    if (captured) gpu_capture_begin(stream);

    gdelta_forward_args args = instance_forward_args(&x, d.arena.data);
    args.q.data = NULL;
    cr_expect_eq(gdelta_forward(d.plan, &args, d.workspace.data, d.workspace.bytes, stream),
                 GDELTA_ERROR_INVALID_ARGUMENT);
    args = instance_forward_args(&x, d.arena.data);
    args.v.stride[0] = args.v.stride[1] = args.v.stride[2] = args.v.stride[3] = 2;
    cr_expect_eq(gdelta_forward(d.plan, &args, d.workspace.data, d.workspace.bytes, stream),
                 GDELTA_ERROR_INVALID_ARGUMENT);
    gdelta_problem problem = case_problem(&c);
    problem.tokens = -1;
    gdelta_plan *plan;
    cr_expect_eq(gdelta_plan_create(&problem, &plan), GDELTA_ERROR_INVALID_ARGUMENT);
    problem = case_problem(&c);
    problem.dim_k = 100000;
    cr_expect_eq(gdelta_plan_create(&problem, &plan), GDELTA_ERROR_UNSUPPORTED);

    if (!captured) {
        gpu_stream_finish(stream);
        cr_expect(device_download(&d, &x) && instance_untouched(&x, 0));
    }
    cr_expect_eq(device_enqueue(&d, &x, stream), GDELTA_OK, "%s", gdelta_last_error());
    if (captured) {
        gpu_graph *graph = gpu_capture_end(stream);
        replay(graph, &d, &x, engine, stream);
        gpu_graph_destroy(graph);
    }
    gpu_stream_finish(stream);
    cr_expect(device_download(&d, &x) && instance_untouched(&x, instance_outputs(&x, GDELTA_OPERATION_FORWARD)));
    cr_expect(check_instance(&x, engine, kTraining));
    device_destroy(&d);
    gpu_stream_destroy(stream);
    instance_destroy(&x);
}

/* ---- Devices ---- */

/* The thread's device stays what it was; with two GPUs, also where it is not the stream's. */
GPU_ENGINE_TEST(graphs, the_current_device_stays, 1) {
    int there = gpu_device_count() > 1 ? 1 : 0;
    for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_STEP; ++operation) {
        test_case c = dense_case(9);
        if (!engine_runs(engine, &c, operation)) continue;
        instance x, eager;
        instance_create(&x, &c);
        instance_create(&eager, &c);
        gpu_use_device(there);
        device_instance d;
        cr_assert(device_create(&d, &x, engine, operation));
        device_upload(&d, &x);
        gdelta_stream stream = gpu_stream_create();
        gpu_use_device(0);
        cr_expect_eq(device_enqueue(&d, &x, stream), GDELTA_OK, "%s", gdelta_last_error());
        cr_expect_eq(gpu_current_device(), 0);
        cr_assert(instance_run(&eager, engine, operation));
        gpu_use_device(there);
        gpu_stream_finish(stream);
        role_set outputs = instance_outputs(&x, operation);
        cr_expect(device_download(&d, &x) && instance_untouched(&x, outputs));
        cr_expect(compare_bits(&x, &eager, outputs));
        device_destroy(&d);
        gpu_stream_destroy(stream);
        gpu_use_device(0);
        instance_destroy(&x);
        instance_destroy(&eager);
    }
}

typedef struct thread_call {
    device_instance d;
    instance x;
    gdelta_status status;
    char sentence[256];
} thread_call;

static void *call_on_default_stream(void *data) {
    thread_call *call = data;
    call->status = device_enqueue(&call->d, &call->x, NULL);
    snprintf(call->sentence, sizeof call->sentence, "%s", gdelta_last_error());
    return NULL;
}

/* A framework's backward may run on a thread of its own, whose first CUDA call is ours: it has no context yet, and the
 * default stream brings none. */
GPU_ENGINE_TEST(graphs, the_first_call_of_a_thread, 1) {
    for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_STEP; ++operation) {
        test_case c = dense_case(9);
        if (!engine_runs(engine, &c, operation)) continue;
        thread_call call;
        instance eager;
        pthread_t thread;
        instance_create(&call.x, &c);
        instance_create(&eager, &c);
        cr_assert(device_create(&call.d, &call.x, engine, operation));
        device_upload(&call.d, &call.x);
        cr_assert_eq(pthread_create(&thread, NULL, call_on_default_stream, &call), 0);
        cr_assert_eq(pthread_join(thread, NULL), 0);
        cr_assert_eq(call.status, GDELTA_OK, "%s", call.sentence);
        gpu_stream_finish(NULL);
        cr_assert(instance_run(&eager, engine, operation));
        role_set outputs = instance_outputs(&call.x, operation);
        cr_expect(device_download(&call.d, &call.x) && instance_untouched(&call.x, outputs));
        cr_expect(compare_bits(&call.x, &eager, outputs));
        device_destroy(&call.d);
        instance_destroy(&call.x);
        instance_destroy(&eager);
    }
}
