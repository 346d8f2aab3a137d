/* What a call leaves behind for the next: nothing. Every operation captured as the first call of its process; two host
 * threads; refused calls before good ones; and the same calls in another order, after others, against fresh processes.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, pthread_barrier_t */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

/* ---- Calls of every kind ---- */

enum { kVariants = 10 };

typedef struct variant {
    const char *name;
    test_case c;
    gdelta_operation operation;
} variant;

/* Each operation with all that it can leave, and other shapes and types of it. */
static variant make_variant(int i) {
    static const char *const names[kVariants] = {"forward",
                                                 "backward",
                                                 "step",
                                                 "draft of a pool",
                                                 "tree of drafts",
                                                 "commit",
                                                 "forward with checkpoints",
                                                 "packed forward",
                                                 "saved backward",
                                                 "forward of fp16"};
    variant v = {.name = names[i],
                 .operation = i == 1 || i == 8 ? GDELTA_OPERATION_BACKWARD : GDELTA_OPERATION_FORWARD};
    test_case c = two_head_case(i == 9 ? 700 : 130);
    c.seed = (uint64_t)i;
    if (i >= 2 && i <= 5) {
        v.operation = i == 5 ? GDELTA_OPERATION_COMMIT : GDELTA_OPERATION_STEP;
        c.sequences = 5;
        c.lengths[0] = i == 2 ? 1 : 6;
    }
    if (i == 2) case_use_slots(&c, kSlotsSame, 1), c.in_place = true;
    if (i == 3) case_use_one_pool(&c);
    if (i == 4 || i == 5) c.record = c.keep_state = true;
    if (i == 4) c.tree = c.token_states = true;
    if (i == 5) c.accepted[0] = c.accepted[3] = 4, c.accepted[1] = 6;
    if (i == 6) c.checkpoint_interval = 64;
    if (i == 7) {
        c.layout = GDELTA_LAYOUT_THD;
        c.sequences = 4;
        c.lengths[0] = 0, c.lengths[1] = 300, c.lengths[2] = 1, c.lengths[3] = 64;
        c.gate = GDELTA_GATE_SOFTPLUS;
        c.dim_k = 64;
    }
    if (i == 8) c.save_mode = GDELTA_SAVE_STATES, c.gate = GDELTA_GATE_SOFTPLUS, c.heads_v = 3;
    if (i == 9) c.dtype = GDELTA_DTYPE_FP16, c.sequences = 2;
    v.c = c;
    return v;
}

static instance make_call(const variant *v) {
    instance x = make_instance(&v->c);
    for (role r = kRecordK; v->operation == GDELTA_OPERATION_COMMIT && r <= kRecordDecay; ++r) {
        FOR_ELEMENTS(&x, r, n, row, head, column)
        instance_put(&x, r, n, row, head, column, 0.1 * fill_normal(fill_key(9, r, n, row, head, column)));
    }
    return x;
}

/* ---- Capture ---- */

GPU_ENGINE_TEST(history, the_first_call_may_be_captured, kVariants) {
    variant v = make_variant(part);
    if (!engine_runs(engine, &v.c, v.operation)) cr_skip_test("the engine %s has none", engine->name);
    instance x = make_call(&v), eager = make_call(&v);
    device_instance d;
    cr_assert(device_create(&d, &x, engine, v.operation));
    gdelta_stream stream = gpu_stream_create();
    gpu_capture_begin(stream);
    gdelta_status status = device_enqueue(&d, &x, stream);
    gpu_graph *graph = gpu_capture_end(stream);
    cr_assert_eq(status, GDELTA_OK, "%s: %s", v.name, gdelta_last_error());
    cr_assert(instance_run(&eager, engine, v.operation));
    role_set outputs = instance_outputs(&x, v.operation);
    for (int replay = 0; replay < 3; ++replay) {
        device_upload(&d, &x);
        gpu_graph_launch(graph, stream);
        gpu_stream_finish(stream);
        cr_expect(device_download(&d, &x) && instance_untouched(&x, outputs), "%s, replay %d", v.name, replay);
        cr_expect(compare_bits(&x, &eager, outputs), "%s, replay %d", v.name, replay);
    }
    gpu_graph_destroy(graph);
    gpu_stream_destroy(stream);
    device_destroy(&d);
    instance_destroy(&x);
    instance_destroy(&eager);
}

/* ---- Threads ---- */

enum { kThreads = 2, kRounds = 200, kEach = 3 };

typedef struct worker {
    const test_engine *engine;
    pthread_barrier_t *barrier;
    int first, count, failures;
    variant v[kEach];
    instance x[kEach];
    device_instance d[kEach];
    gdelta_stream stream;
} worker;

/* Rounds of calls in an order of the thread's own; the barrier lets both begin a round at once, in step or not. */
static void *work(void *argument) {
    worker *w = argument;
    for (int round = 0; round < kRounds; ++round) {
        pthread_barrier_wait(w->barrier);
        for (int i = 0; i < w->count; ++i) {
            uint64_t key = fill_key(1, w->first, round, i, 0, 0);
            int which = (int)(key % (uint64_t)w->count);
            if (key >> 32 & 1) sched_yield();
            w->failures += device_enqueue(&w->d[which], &w->x[which], w->stream) != GDELTA_OK;
        }
    }
    return NULL;
}

/* No variant in place: calls are repeated on the same memory. */
GPU_ENGINE_TEST(history, two_threads_with_two_streams, 1) {
    static const int chosen[kThreads][kEach] = {{0, 4, 7}, {9, 1, 6}};
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, kThreads);
    worker workers[kThreads];
    pthread_t threads[kThreads];
    for (int t = 0; t < kThreads; ++t) {
        workers[t] = (worker){.engine = engine, .barrier = &barrier, .first = t, .stream = gpu_stream_create()};
        for (int i = 0; i < kEach; ++i) {
            variant v = make_variant(chosen[t][i]);
            if (!engine_runs(engine, &v.c, v.operation)) continue;
            int n = workers[t].count++;
            workers[t].v[n] = v;
            workers[t].x[n] = make_call(&v);
            cr_assert(device_create(&workers[t].d[n], &workers[t].x[n], engine, v.operation));
            device_upload(&workers[t].d[n], &workers[t].x[n]);
        }
        cr_assert_gt(workers[t].count, 0);
    }
    for (int t = 0; t < kThreads; ++t) cr_assert_eq(pthread_create(&threads[t], NULL, work, &workers[t]), 0);
    for (int t = 0; t < kThreads; ++t) pthread_join(threads[t], NULL);
    for (int t = 0; t < kThreads; ++t) {
        worker *w = &workers[t];
        gpu_stream_finish(w->stream);
        cr_expect_eq(w->failures, 0);
        for (int i = 0; i < w->count; ++i) {
            role_set outputs = instance_outputs(&w->x[i], w->v[i].operation);
            instance eager = make_call(&w->v[i]);
            cr_assert(instance_run(&eager, engine, w->v[i].operation));
            bool ran = device_download(&w->d[i], &w->x[i]);
            bool chosen_once = memcmp(w->x[i].after, w->x[i].before, w->x[i].bytes) != 0;
            cr_expect(ran && chosen_once && instance_untouched(&w->x[i], outputs), "%s", w->v[i].name);
            cr_expect(compare_bits(&w->x[i], &eager, outputs), "%s", w->v[i].name);
            device_destroy(&w->d[i]);
            instance_destroy(&w->x[i]);
            instance_destroy(&eager);
        }
        gpu_stream_destroy(w->stream);
    }
    pthread_barrier_destroy(&barrier);
}

/* ---- Refused calls ---- */

/* A workspace that is too small, no input, a table without memory: then the good call. */
GPU_ENGINE_TEST(history, a_refused_call_of_any_kind_harms_nothing, kVariants) {
    variant v = make_variant(part);
    if (!engine_runs(engine, &v.c, v.operation)) cr_skip_test("the engine %s has none", engine->name);
    instance x = make_call(&v), eager = make_call(&v);
    cr_assert(instance_run(&eager, engine, v.operation));
    device_instance d;
    cr_assert(device_create(&d, &x, engine, v.operation));
    device_upload(&d, &x);
    gdelta_stream stream = gpu_stream_create();
    static const role broken[] = {kQ, kV, kInitial, kRecordU, kAccepted, kO};
    role_set used = ROLE(kQ) | ROLE(kV) | ROLE(kInitial); /* what the operation looks at */
    if (v.operation != GDELTA_OPERATION_BACKWARD) used |= ROLE(kO) | ROLE(kRecordU);
    if (v.operation == GDELTA_OPERATION_COMMIT) used = ROLE(kInitial) | ROLE(kRecordU) | ROLE(kAccepted);
    int refused = 0, tried = 0;
    for (size_t i = 0; i < sizeof broken / sizeof *broken; ++i) {
        if (!x.tensor[broken[i]].present || !(used & ROLE(broken[i]))) continue;
        ++tried;
        size_t offset = x.tensor[broken[i]].offset;
        x.tensor[broken[i]].offset += 1; /* an address that no element may have */
        refused += device_enqueue(&d, &x, stream) == GDELTA_ERROR_INVALID_ARGUMENT;
        x.tensor[broken[i]].offset = offset;
    }
    cr_expect_gt(tried, 1, "%s", v.name);
    cr_expect_eq(refused, tried, "%s", v.name);
    gpu_stream_finish(stream);
    cr_expect(v.c.save_mode || (device_download(&d, &x) && instance_untouched(&x, 0)), "%s", v.name);
    cr_assert_eq(device_enqueue(&d, &x, stream), GDELTA_OK, "%s: %s", v.name, gdelta_last_error());
    gpu_stream_finish(stream);
    role_set outputs = instance_outputs(&x, v.operation);
    cr_expect(device_download(&d, &x) && instance_untouched(&x, outputs) && compare_bits(&x, &eager, outputs), "%s",
              v.name);
    gpu_stream_destroy(stream);
    device_destroy(&d);
    instance_destroy(&x);
    instance_destroy(&eager);
}

/* ---- Order ---- */

static uint64_t digest(const char *bytes, size_t count) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; ++i) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return hash;
}

/* 0: the call failed or is not the engine's. */
static uint64_t run_variant(int i, const test_engine *engine) {
    variant v = make_variant(i);
    if (!engine_runs(engine, &v.c, v.operation)) return 0;
    instance x = make_call(&v);
    uint64_t hash = instance_run(&x, engine, v.operation) ? digest(x.after, x.bytes) : 0;
    instance_destroy(&x);
    return hash;
}

/* Each call in a process of its own, forked before this one has met CUDA; then all in this process, in other orders. */
Test(history, order_changes_no_bits) {
    enum { kOrders = 3, kCalls = kVariants * (kEngines - 1) };
    uint64_t *alone = mmap(NULL, kCalls * sizeof *alone, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(alone, MAP_FAILED);
    for (int i = 0; i < kCalls; ++i) {
        pid_t child = fork();
        if (child == 0) {
            const test_engine *engine = &test_engines[kReference + 1 + i % (kEngines - 1)];
            bool runs = !gpu_missing() && (!engine->capability || engine->capability == gpu_capability());
            if (runs) alone[i] = run_variant(i / (kEngines - 1), engine);
            _exit(0);
        }
        int status;
        cr_assert(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    gpu_require("history/order_changes_no_bits", 0);
    int compared = 0;
    for (int order = 0; order < kOrders; ++order) {
        for (int step = 0; step < kCalls; ++step) {
            static const int strides[kOrders] = {1, 7, 13}; /* of no common factor with the number of calls */
            int i = (step * strides[order] + order) % kCalls;
            if (alone[i] == 0) continue;
            uint64_t here = run_variant(i / (kEngines - 1), &test_engines[kReference + 1 + i % (kEngines - 1)]);
            cr_expect_eq(here, alone[i], "order %d, call %d", order, i);
            ++compared;
        }
    }
    cr_expect_geq(compared, kOrders * kVariants, "%d calls", compared);
    munmap(alone, kCalls * sizeof *alone);
}
