/* What an inference engine does with a pool of states: requests come and go, share calls in ever other company, wait,
 * are cut into pieces, and take the slots of those before them, which are full of NaN. Each must read the same as if it
 * were alone and in one piece. */
#include <stdlib.h>
#include <string.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/fill.h"

/* ---- Requests ---- */

typedef struct request {
    int64_t length, done; /* tokens */
    int64_t slot;         /* in the pool; -1: not started yet */
    instance alone;       /* its forward, from zeros */
} request;

static const role inputs[] = {kQ, kK, kV, kG, kBeta};
enum { kInputs = sizeof inputs / sizeof *inputs };

static test_case serving_case(const test_engine *engine) {
    return (test_case){.heads_q = 2,
                       .heads_v = 4,
                       .dim_k = 64,
                       .dim_v = 128,
                       .state_dtype = engine->exact_state,
                       .out_dtype = engine->cut == 1 ? GDELTA_DTYPE_DEFAULT : GDELTA_DTYPE_FP32,
                       .l2norm = GDELTA_L2NORM_ADD_EPS};
}

static void make_alone(instance *alone, const test_case *base, int id, int64_t length, const test_engine *engine) {
    test_case c = *base;
    c.layout = GDELTA_LAYOUT_BSHD;
    c.sequences = 1;
    c.first_sequence = id;
    c.lengths[0] = length;
    c.slot_count = 0;
    c.recycled = 0;
    c.in_place = c.record = c.keep_state = false;
    c.absent = ROLE(kInitial);
    instance_create(alone, &c);
    RUN(alone, FORWARD);
}

static request make_request(const test_case *base, int id, int64_t length, const test_engine *engine) {
    request r = {.length = length, .slot = -1};
    make_alone(&r.alone, base, id, length, engine);
    return r;
}

/* Row `row` of sequence n of x becomes token t of the request; NaN without a request. */
static void put_token(instance *x, int64_t n, int64_t row, const request *r, int64_t t) {
    for (int i = 0; i < kInputs; ++i) {
        for (int64_t head = 0; head < instance_heads(x, inputs[i]); ++head) {
            for (int64_t column = 0; column < instance_columns(x, inputs[i]); ++column) {
                double value = r ? instance_get(&r->alone, inputs[i], 0, t, head, column) : (double)__builtin_nan("");
                instance_put(x, inputs[i], n, row, head, column, value);
            }
        }
    }
}

/* Sequence n of x goes on with a request, or, without one, is a padded row. */
static void put_request(instance *x, int n, const request *r) {
    x->c.initial_slots[n] = x->c.final_slots[n] = r ? r->slot : -1;
    instance_set_entry(x, kInitialSlots, n, x->c.initial_slots[n]);
    instance_set_entry(x, kFinalSlots, n, x->c.final_slots[n]);
    instance_set_entry(x, kHasInitial, n, r && r->done > 0);
    for (int64_t row = 0; row < case_length(&x->c, n); ++row) put_token(x, n, row, r, r ? r->done + row : 0);
}

static bool same_output(const instance *x, int n, const request *r, const test_engine *engine) {
    int64_t rows = case_length(&x->c, n);
    slice got = {x, kO, n, 0, rows}, want = {&r->alone, kO, 0, r->done, rows};
    if (engine->cut == 1) return compare_slice_bits(got, want);
    /* Two results within the tolerance of the truth are within twice of one another. */
    return compare_slices(got, want, 2 * compare_tolerance(engine, kO, x->tensor[kO].dtype));
}

static bool all_zero(const instance *x, int sequence) {
    int64_t nonzero = 0;
    FOR_ELEMENTS(x, kO, n, row, head, column) {
        nonzero += n == sequence && !(instance_get(x, kO, n, row, head, column) == 0);
    }
    return nonzero == 0;
}

/* A free slot of `slots`, not always the same. */
static int64_t free_slot(const request *requests, int count, int64_t slots, uint64_t key) {
    int64_t slot = (int64_t)(key % (uint64_t)slots);
    for (int i = 0; i < count; ++i) {
        bool busy = requests[i].slot == slot && requests[i].done < requests[i].length;
        if (busy) slot = (slot + 1) % slots, i = -1;
    }
    return slot;
}

static char *pool_of(instance *x, char *arena) {
    return arena + x->tensor[kInitial].offset;
}

static size_t pool_bytes(const instance *x) {
    return (size_t)(x->tensor[kInitial].stride[0] * x->c.slot_count) * x->tensor[kInitial].bytes;
}

/* ---- Prefill and decode in one call ---- */

/* Packed calls of pieces of any length, one token too, until all requests are done. */
ENGINE_TEST(serving, prefill_and_decode_in_one_call, 2) {
    enum { kRequests = 6, kSlots = 9 };
    static const int64_t lengths[kRequests] = {200, 90, 33, 260, 1, 130}, pieces[] = {1, 1, 1, 2, 6, 63, 64, 65, 100};
    test_case base = serving_case(engine);
    if (part) base.state_order = GDELTA_STATE_VK, base.slot_padding = 24;
    request requests[kRequests];
    for (int i = 0; i < kRequests; ++i) requests[i] = make_request(&base, i, lengths[i], engine);
    char *pool = NULL;
    int left = kRequests, mixed = 0;
    for (uint64_t call = 0; left > 0; ++call) {
        test_case c = base;
        c.layout = GDELTA_LAYOUT_THD;
        c.slot_count = kSlots;
        c.in_place = true;
        int live[kRequests];
        int64_t shortest = 1000, longest = 0;
        for (int i = 0; i < kRequests; ++i) {
            request *r = &requests[i];
            uint64_t key = fill_key(3, part, i, (int64_t)call, 0, 0);
            if (r->done == r->length || key % 4 == 0) continue;
            if (r->slot < 0) r->slot = free_slot(requests, kRequests, kSlots, key >> 8);
            int n = c.sequences++;
            int64_t tokens = pieces[(key >> 32) % (sizeof pieces / sizeof *pieces)];
            c.lengths[n] = tokens < r->length - r->done ? tokens : r->length - r->done;
            c.initial_slots[n] = c.final_slots[n] = r->slot;
            if (c.lengths[n] < shortest) shortest = c.lengths[n];
            if (c.lengths[n] > longest) longest = c.lengths[n];
            live[n] = i;
        }
        if (c.sequences == 0) continue;
        mixed += shortest == 1 && longest > 1;
        c.lengths[c.sequences++] = 3; /* a row of nobody */
        c.recycled = 1;               /* there are flags; put_request sets them */
        c.initial_slots[c.sequences - 1] = c.final_slots[c.sequences - 1] = -1;
        instance x = make_instance(&c);
        for (int n = 0; n < c.sequences; ++n) put_request(&x, n, n < c.sequences - 1 ? &requests[live[n]] : NULL);
        if (pool == NULL) {
            pool = malloc(pool_bytes(&x));
            memset(pool, 0xff, pool_bytes(&x));
        }
        memcpy(pool_of(&x, x.before), pool, pool_bytes(&x));
        RUN(&x, FORWARD);
        memcpy(pool, pool_of(&x, x.after), pool_bytes(&x));
        cr_expect(all_zero(&x, c.sequences - 1));
        for (int n = 0; n < c.sequences - 1; ++n) {
            request *r = &requests[live[n]];
            cr_expect(same_output(&x, n, r, engine), "request %d, token %d", live[n], (int)r->done);
            r->done += c.lengths[n];
            if (r->done < r->length) continue;
            slice got = {&x, kFinal, n, 0, 0}, want = {&r->alone, kFinal, 0, 0, 0};
            double tolerance = 2 * compare_tolerance(engine, kFinal, x.tensor[kFinal].dtype);
            cr_expect(engine->cut == 1 ? compare_slice_bits(got, want) : compare_slices(got, want, tolerance));
            --left;
        }
        instance_destroy(&x);
    }
    cr_expect_gt(mixed, 3, "no call had prefill and decode rows");
    for (int i = 0; i < kRequests; ++i) instance_destroy(&requests[i].alone);
    free(pool);
}

/* ---- Graphs ---- */

enum { kRows = 8, kPool = 19, kStreams = 24 };

/* A batch of decode rows on the device: everything but the pool of states is uploaded for each replay. */
typedef struct batch {
    instance x;
    device_instance d;
    gpu_graph *graph;
    gdelta_stream stream;
    request requests[kStreams];
} batch;

static test_case batch_case(const test_engine *engine, int tokens, int part) {
    test_case c = serving_case(engine);
    c.sequences = kRows;
    c.lengths[0] = tokens;
    c.slot_count = kPool;
    for (int n = 0; n < kRows; ++n) c.initial_slots[n] = c.final_slots[n] = n;
    c.in_place = true;
    c.recycled = 1; /* there are flags */
    if (part) c.state_order = GDELTA_STATE_VK, c.slot_padding = 40, c.index64 = true;
    return c;
}

/* Captures a step, and with a record the commit after it. */
static void batch_create(batch *b, const test_case *c, const test_engine *engine) {
    instance_create(&b->x, c);
    memset(pool_of(&b->x, b->x.before), 0xff, pool_bytes(&b->x));
    cr_assert(device_create(&b->d, &b->x, engine, GDELTA_OPERATION_STEP));
    device_upload(&b->d, &b->x);
    b->stream = gpu_stream_create();
    gpu_capture_begin(b->stream);
    gdelta_status status = device_enqueue(&b->d, &b->x, b->stream);
    if (status == GDELTA_OK && c->record) {
        b->d.operation = GDELTA_OPERATION_COMMIT;
        status = device_enqueue(&b->d, &b->x, b->stream);
    }
    b->graph = gpu_capture_end(b->stream);
    cr_assert_eq(status, GDELTA_OK, "%s", gdelta_last_error());
}

static void batch_replay(batch *b) {
    instance *x = &b->x;
    size_t pool = x->tensor[kInitial].offset, rest = pool + pool_bytes(x);
    char *arena = b->d.arena.data;
    gpu_upload(arena, x->before, pool);
    gpu_upload(arena + rest, x->before + rest, x->bytes - rest);
    gpu_graph_launch(b->graph, b->stream);
    gpu_stream_finish(b->stream);
    cr_expect(device_download(&b->d, x) &&
              instance_untouched(x, ROLE(kO) | ROLE(kFinal) | (x->c.record ? RECORD_ROLES : 0)));
    memcpy(x->before + pool, x->after + pool, rest - pool);
}

/* A slot that is free again is full of NaN. */
static void batch_free_slot(batch *b, int64_t slot) {
    instance *x = &b->x;
    size_t bytes =
        (size_t)x->tensor[kInitial].stride[2] * (size_t)instance_heads(x, kInitial) * x->tensor[kInitial].bytes;
    size_t offset =
        x->tensor[kInitial].offset + (size_t)(slot * x->tensor[kInitial].stride[0]) * x->tensor[kInitial].bytes;
    memset(x->before + offset, 0xff, bytes);
    gpu_upload((char *)b->d.arena.data + offset, x->before + offset, bytes);
}

static void batch_destroy(batch *b, int requests) {
    for (int i = 0; i < requests; ++i) instance_destroy(&b->requests[i].alone);
    gpu_graph_destroy(b->graph);
    gpu_stream_destroy(b->stream);
    device_destroy(&b->d);
    instance_destroy(&b->x);
}

/* Puts up to `most` of the requests that are not done into random rows; rows[n] is the request of row n, or -1. */
static void schedule(batch *b, int requests, int most, int step, int rows[kRows]) {
    int live = 0;
    for (int n = 0; n < kRows; ++n) rows[n] = -1;
    for (int i = 0; i < requests && live < most; ++i) {
        request *r = &b->requests[i];
        uint64_t key = fill_key(5, step, i, 0, 0, 0);
        if (r->done >= r->length || key % 8 == 0) continue;
        if (r->slot < 0) r->slot = free_slot(b->requests, requests, kPool, key >> 8);
        int n = (int)((key >> 32) % kRows);
        while (rows[n] >= 0) n = (n + 1) % kRows;
        rows[n] = i;
        ++live;
    }
    for (int n = 0; n < kRows; ++n) put_request(&b->x, n, rows[n] < 0 ? NULL : &b->requests[rows[n]]);
}

/* One graph, a hundred steps: rows, slots, flags and the number of live rows change from one to the next. */
GPU_ENGINE_TEST(serving, decode_under_graph_replay, 2) {
    enum { kSteps = 100 };
    test_case c = batch_case(engine, 1, part);
    NEEDS(&c, STEP);
    batch b;
    for (int i = 0; i < kStreams; ++i) {
        b.requests[i] = make_request(&c, i, 1 + (int64_t)(fill_key(9, i, 0, 0, 0, 0) % 40), engine);
    }
    batch_create(&b, &c, engine);
    int finished = 0;
    for (int step = 0; step < kSteps; ++step) {
        int rows[kRows];
        schedule(&b, kStreams, (int)(fill_key(6, step, 0, 0, 0, 0) % (kRows + 1)), step, rows);
        batch_replay(&b);
        for (int n = 0; n < kRows; ++n) {
            if (rows[n] < 0) {
                cr_expect(all_zero(&b.x, n), "step %d, row %d of nobody", step, n);
                continue;
            }
            request *r = &b.requests[rows[n]];
            cr_expect(same_output(&b.x, n, r, engine), "step %d, request %d, token %d", step, rows[n], (int)r->done);
            if (++r->done < r->length) continue;
            cr_expect(compare_slice_bits((slice){&b.x, kFinal, n, 0, 0}, (slice){&r->alone, kFinal, 0, 0, 0}));
            batch_free_slot(&b, r->slot);
            ++finished;
        }
    }
    cr_expect_gt(finished, 8, "too few requests came to their end");
    batch_destroy(&b, kStreams);
}

/* One graph of a verification and its commit, sixty rounds: counts, rows and slots change on the device. Rejected
 * tokens come again in the next round: one that had left a trace would be there twice. */
GPU_ENGINE_TEST(serving, verify_and_commit_under_graph_replay, 2) {
    enum { kRounds = 60, kTokens = 4, kDrafted = 10, kLength = 150 };
    test_case c = batch_case(engine, kTokens, part);
    c.keep_state = c.record = true;
    NEEDS(&c, COMMIT);
    batch b;
    for (int i = 0; i < kDrafted; ++i) {
        b.requests[i] = make_request(&c, i, kLength, engine);
        b.requests[i].length -= kTokens - 1; /* a draft never runs over the end */
    }
    batch_create(&b, &c, engine);
    for (int round = 0; round < kRounds; ++round) {
        int rows[kRows];
        int64_t accepted[kRows];
        schedule(&b, kDrafted, kRows - round % 3, round, rows);
        for (int n = 0; n < kRows; ++n) {
            accepted[n] = (int64_t)(fill_key(8, round, n, 0, 0, 0) % (kTokens + 1));
            instance_set_entry(&b.x, kAccepted, n, accepted[n]);
        }
        batch_replay(&b);
        for (int n = 0; n < kRows; ++n) {
            if (rows[n] < 0) continue;
            request *r = &b.requests[rows[n]];
            cr_expect(same_output(&b.x, n, r, engine), "round %d, request %d, token %d", round, rows[n], (int)r->done);
            r->done += accepted[n];
            if (round < kRounds - 8 || r->done == 0) continue;
            instance prefix;
            make_alone(&prefix, &c, rows[n], r->done, engine);
            cr_expect(compare_slice_bits((slice){&b.x, kFinal, n, 0, 0}, (slice){&prefix, kFinal, 0, 0, 0}));
            instance_destroy(&prefix);
        }
    }
    batch_destroy(&b, kDrafted);
}
