/* One case: tensors of random numbers (never zeros), a plan, a captured call, and a slice of it held against the CPU
 * reference. In-kernel L2 norm, log gate and beta in fp32, initial and final states; backward starts from what an
 * untimed forward saved. */
#include "measure.h"

#include <gdelta/reference.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "host/convert.h"
#include "host/layout.h"

/* ---- Random tensors ---- */

typedef enum kind { kNormal, kBeta, kState, kGate } kind;

static double uniform(uint64_t *seed) {
    uint64_t x = *seed += 0x9e3779b97f4a7c15u; /* splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return ((double)((x ^ x >> 31) >> 11) + 0.5) * 0x1p-53;
}

static double normal(uint64_t *seed) {
    double radius = sqrt(-2 * log(uniform(seed)));
    return radius * cos(6.283185307179586 * uniform(seed));
}

static double draw(kind what, bench_gate gate, uint64_t *seed) {
    switch (what) {
        case kNormal:
            return normal(seed);
        case kBeta:
            return 1 / (1 + exp(-normal(seed)));
        case kState:
            return 0.1 * normal(seed);
        default:
            break;
    }
    switch (gate) {
        case kGateZero:
            return 0;
        case kGateWeak:
            return -1e-3 * uniform(seed);
        case kGateMild: /* logsigmoid / 16, FlashQLA's benchmark */
            return -log1p(exp(-normal(seed))) / 16;
        default:
            return -(1 + 15 * uniform(seed)) * log1p(exp(normal(seed)));
    }
}

enum { kBlock = 1 << 20 };

/* Random numbers of this kind and type, drawn once and kept: the host draws them slower than a GPU eats them. */
static const char *random_block(gdelta_dtype dtype, kind what, bench_gate gate, uint64_t *seed) {
    static void *made[kGate + 1][GDELTA_DTYPE_FP32 + 1]; /* one gate a run */
    void **block = &made[what][dtype];
    if (*block == NULL) {
        *block = place_alloc(kHost, kBlock * gdelta_dtype_size(dtype));
        for (int64_t i = 0; i < kBlock; ++i) gdelta_store(*block, dtype, i, draw(what, gate, seed));
    }
    return *block;
}

/* Fills a tensor with pieces of a random block, cut at random places, so that neither two tensors nor two rows are
 * alike. The seed goes on from tensor to tensor: the same options give the same numbers. */
static void fill(bench_place place, void *data, int64_t count, gdelta_dtype dtype, kind what, bench_gate gate) {
    static uint64_t seed = 2026;
    const char *block = random_block(dtype, what, gate, &seed);
    int64_t size = (int64_t)gdelta_dtype_size(dtype);
    for (int64_t done = 0, piece; done < count; done += piece) {
        piece = count - done < kBlock / 2 ? count - done : kBlock / 2;
        int64_t start = (int64_t)(uniform(&seed) * (double)(kBlock - piece));
        place_copy(place, (char *)data + done * size, kHost, block + start * size, (size_t)(piece * size));
    }
}

/* ---- A case's tensors ---- */

/* The token tensors and states by role; outputs after d_o. */
typedef enum role { Q, K, V, G, BETA, STATE, D_O, D_FINAL, O, FINAL, DQ, DK, DV, DG, DBETA, D_INITIAL, ROLES } role;

static const char *const role_name[ROLES] = {"q", "k",   "v",  "g",  "beta", "S0", "do",    "dS_T",
                                             "o", "S_T", "dq", "dk", "dv",   "dg", "dbeta", "dS0"};

typedef struct extent {
    int64_t heads, dim;
    bool by_token; /* else by sequence */
} extent;

static extent role_extent(const bench_case *c, int r) {
    int32_t heads_o = case_heads_o(c);
    switch (r) {
        case Q:
        case DQ:
            return (extent){c->hq, c->k, true};
        case K:
        case DK:
            return (extent){case_heads_k(c), c->k, true};
        case V:
        case DV:
            return (extent){c->hv, c->v, true};
        case O:
        case D_O:
            return (extent){heads_o, c->v, true};
        case G:
        case BETA:
        case DG:
        case DBETA:
            return (extent){heads_o, 1, true};
        default:
            return (extent){heads_o, (int64_t)c->k * c->v, false};
    }
}

static gdelta_dtype role_dtype(const bench_case *c, int r) {
    extent e = role_extent(c, r);
    if (!e.by_token) return c->state_dtype;
    return e.dim == 1 ? GDELTA_DTYPE_FP32 : c->dtype;
}

static bool role_used(const bench_case *c, int r) {
    switch (c->operation) {
        case GDELTA_OPERATION_FORWARD:
            return r <= STATE || r == O || r == FINAL;
        case GDELTA_OPERATION_BACKWARD:
            return r < O || r >= DQ;
        default: /* the state is in place */
            return r <= STATE || r == O;
    }
}

static int64_t role_count(const bench_case *c, int r) {
    extent e = role_extent(c, r);
    return (e.by_token ? case_rows(c) : c->sequences) * e.heads * e.dim;
}

/* A call with everything it points to. */
typedef struct job {
    const bench_case *c;
    bench_place place;
    gdelta_problem problem;
    void *data[ROLES];
    int64_t stride[ROLES][4]; /* zeros: contiguous */
    gdelta_dtype dtype[ROLES];
    void *cu_seqlens;
    void *checkpoints;
    void *slots; /* of a step's sequences in their pool, as engines have them: sequence n is in slot n */
    gdelta_plan *plan;
    void *workspace, *saved;
    size_t workspace_bytes, saved_bytes;
} job;

static void *take(const job *j, int r) {
    return place_alloc(j->place, (size_t)role_count(j->c, r) * gdelta_dtype_size(j->dtype[r]));
}

static gdelta_tensor tensor(const job *j, int r) {
    gdelta_tensor t = {.data = j->data[r], .dtype = j->dtype[r]};
    memcpy(t.stride, j->stride[r], sizeof t.stride);
    return t;
}

static gdelta_state state(const job *j, int r) {
    return (gdelta_state){.data = j->data[r], .dtype = j->dtype[r]};
}

static gdelta_state pool(const job *j) {
    gdelta_state s = state(j, STATE);
    s.slots = (gdelta_index){.data = j->slots};
    s.slot_count = j->c->sequences;
    return s;
}

/* What every operation reads. */
#define INPUTS(j) .q = tensor(j, Q), .k = tensor(j, K), .v = tensor(j, V), .g = tensor(j, G), .beta = tensor(j, BETA)

static gdelta_forward_args forward_args(const job *j) {
    gdelta_state checkpoints = {.data = j->checkpoints};
    return (gdelta_forward_args){
        .struct_size = sizeof(gdelta_forward_args),
        INPUTS(j),
        .o = tensor(j, O),
        .initial_state = state(j, STATE),
        .final_state = state(j, FINAL),
        .cu_seqlens = {.data = j->cu_seqlens},
        .checkpoints = checkpoints,
        .checkpoint_interval = j->checkpoints ? j->c->checkpoint_interval : 0,
        .saved = j->saved,
        .saved_bytes = j->saved_bytes,
    };
}

static gdelta_status call(void *context, gdelta_stream stream) {
    const job *j = context;
    bool on_cpu = j->place == kHost;
    if (j->c->operation == GDELTA_OPERATION_BACKWARD) {
        gdelta_backward_args args = {
            .struct_size = sizeof args,
            INPUTS(j),
            .initial_state = state(j, STATE),
            .cu_seqlens = {.data = j->cu_seqlens},
            .d_o = tensor(j, D_O),
            .d_final_state = tensor(j, D_FINAL),
            .dq = tensor(j, DQ),
            .dk = tensor(j, DK),
            .dv = tensor(j, DV),
            .dg = tensor(j, DG),
            .dbeta = tensor(j, DBETA),
            .d_initial_state = tensor(j, D_INITIAL),
            .saved = j->saved,
            .saved_bytes = j->saved_bytes,
        };
        if (on_cpu) return gdelta_reference_backward(&j->problem, &args);
        return gdelta_backward(j->plan, &args, j->workspace, j->workspace_bytes, stream);
    }
    if (j->c->operation == GDELTA_OPERATION_STEP) {
        gdelta_step_args args = {
            .struct_size = sizeof args,
            INPUTS(j),
            .o = tensor(j, O),
            .state = pool(j),
            .output_state = state(j, FINAL),
        };
        if (on_cpu) return gdelta_reference_step(&j->problem, &args);
        return gdelta_step(j->plan, &args, j->workspace, j->workspace_bytes, stream);
    }
    gdelta_forward_args args = forward_args(j);
    if (on_cpu) return gdelta_reference_forward(&j->problem, &args);
    return gdelta_forward(j->plan, &args, j->workspace, j->workspace_bytes, stream);
}

static gdelta_problem problem_of(const bench_case *c) {
    gdelta_problem p = {
        .struct_size = sizeof p,
        .flags = c->small_workspace ? GDELTA_FLAG_SMALL_WORKSPACE : 0,
        .engine = c->engine,
        .heads_q = c->hq,
        .heads_k = case_heads_k(c),
        .heads_v = c->hv,
        .dim_k = c->k,
        .dim_v = c->v,
        .dtype = c->dtype,
        .state_dtype = c->state_dtype,
        .state_order = c->state_order,
        .l2norm = GDELTA_L2NORM_ADD_EPS,
        .save_mode = c->operation == GDELTA_OPERATION_BACKWARD ? GDELTA_SAVE_STATES : GDELTA_SAVE_COMPACT,
    };
    if (case_is_packed(c)) {
        p.layout = GDELTA_LAYOUT_THD;
        p.sequences = c->sequences;
        p.total_tokens = case_rows(c);
    } else {
        p.batch = c->sequences;
        p.tokens = c->length[0];
    }
    return p;
}

static bool refused(const char *what) {
    fprintf(stderr, "gdelta-bench: %s: %s\n", what, gdelta_last_error());
    return false;
}

static bool make_plan(job *j) {
    if (j->place == kHost) return true;
    if (gdelta_plan_create(&j->problem, &j->plan) != GDELTA_OK) return refused("plan");
    if (gdelta_plan_workspace_size(j->plan, j->c->operation, &j->workspace_bytes) != GDELTA_OK) return refused("plan");
    j->workspace = place_alloc(kDevice, j->workspace_bytes);
    return true;
}

static gdelta_status save(void *context, gdelta_stream stream) {
    const job *j = context;
    gdelta_forward_args args = forward_args(j);
    size_t bytes;
    gdelta_status status = gdelta_plan_workspace_size(j->plan, GDELTA_OPERATION_FORWARD, &bytes);
    if (status != GDELTA_OK) return status;
    void *workspace = place_alloc(kDevice, bytes);
    status = gdelta_forward(j->plan, &args, workspace, bytes, stream);
    place_free(kDevice, workspace); /* cudaFree waits for the work */
    return status;
}

/* Runs the forward that a backward on the GPU starts from. */
static bool make_saved(job *j) {
    double ignored;
    if (j->place == kHost || j->c->operation != GDELTA_OPERATION_BACKWARD) return true;
    if (gdelta_plan_saved_size(j->plan, &j->saved_bytes) != GDELTA_OK) return refused("plan");
    if (j->saved_bytes == 0) return true;
    /* forward wants an output of its own */
    j->dtype[FINAL] = role_dtype(j->c, FINAL);
    j->data[FINAL] = take(j, FINAL);
    j->saved = place_alloc(kDevice, j->saved_bytes);
    return device_run(save, j, &ignored) || refused("forward");
}

static job empty_job(const bench_case *c, bench_place place) {
    return (job){.c = c, .place = place, .problem = problem_of(c)};
}

static void make_cu_seqlens(job *j) {
    if (!case_is_packed(j->c)) return;
    int32_t table[kMaxSequences + 1] = {0};
    for (int n = 0; n < j->c->sequences; ++n) table[n + 1] = table[n] + (int32_t)j->c->length[n];
    size_t bytes = sizeof *table * (size_t)(j->c->sequences + 1);
    j->cu_seqlens = place_alloc(j->place, bytes);
    place_copy(j->place, j->cu_seqlens, kHost, table, bytes);
}

static void make_checkpoints(job *j) {
    size_t state = (size_t)role_count(j->c, FINAL) / (size_t)j->c->sequences * gdelta_dtype_size(j->c->state_dtype);
    size_t bytes = (size_t)case_checkpoints(j->c) * state;
    if (bytes) j->checkpoints = place_alloc(j->place, bytes);
}

static void make_slots(job *j) {
    if (j->c->operation != GDELTA_OPERATION_STEP) return;
    size_t bytes = sizeof(int32_t) * (size_t)j->c->sequences;
    int32_t *table = place_alloc(kHost, bytes);
    for (int32_t n = 0; n < j->c->sequences; ++n) table[n] = n;
    j->slots = place_alloc(j->place, bytes);
    place_copy(j->place, j->slots, kHost, table, bytes);
    place_free(kHost, table);
}

/* Plan, workspace and slots may be another job's, for jobs that run one after another. */
static bool make_tensors(job *j) {
    static const kind kinds[] = {kNormal, kNormal, kNormal, kGate, kBeta, kState, kNormal, kState};
    const bench_case *c = j->c;
    for (int r = 0; r < ROLES; ++r) {
        if (!role_used(c, r)) continue;
        j->dtype[r] = role_dtype(c, r);
        j->data[r] = take(j, r);
        if (r < O) fill(j->place, j->data[r], role_count(c, r), j->dtype[r], kinds[r], c->gate);
    }
    make_cu_seqlens(j);
    make_checkpoints(j);
    return make_saved(j);
}

static void free_tensors(job *j) {
    for (int r = 0; r < ROLES; ++r) {
        if (j->data[r]) place_free(j->place, j->data[r]);
    }
    if (j->cu_seqlens) place_free(j->place, j->cu_seqlens);
    if (j->checkpoints) place_free(j->place, j->checkpoints);
    if (j->saved) place_free(j->place, j->saved);
}

static void free_job(job *j) {
    free_tensors(j);
    if (j->slots) place_free(j->place, j->slots);
    if (j->workspace) place_free(j->place, j->workspace);
    gdelta_plan_destroy(j->plan);
}

/* ---- Check ---- */

/* Worst relative L2 error over sequences and heads of a tensor of `c`. NaN counts as infinite. */
static double worst_error(const bench_case *c, int r, const void *got, gdelta_dtype dtype, const double *want) {
    extent e = role_extent(c, r);
    double worst = 0;
    int64_t start = 0;
    for (int n = 0; n < c->sequences; ++n) {
        int64_t rows = e.by_token ? c->length[n] : 1;
        for (int64_t h = 0; h < e.heads; ++h) {
            double error = 0, norm = 0;
            for (int64_t t = 0; t < rows; ++t)
                for (int64_t d = 0; d < e.dim; ++d) {
                    int64_t i = ((start + t) * e.heads + h) * e.dim + d;
                    double difference = gdelta_load(got, dtype, i) - want[i];
                    error += difference * difference;
                    norm += want[i] * want[i];
                }
            double relative = sqrt(error / (norm > 0 ? norm : 1));
            if (!(relative <= worst)) worst = isnan(relative) ? (double)INFINITY : relative;
        }
        start += rows;
    }
    return worst;
}

/* Some leading tokens of some sequences of a case, themselves a case. */
typedef struct slice {
    bench_case c;
    int sequence[2]; /* of the whole */
} slice;

static slice slice_of(const bench_case *whole) {
    enum { kTokens = 130 }; /* two chunks of 64 and a tail */
    bool is_step = whole->operation == GDELTA_OPERATION_STEP;
    slice s = {.c = *whole};
    s.c.sequences = 0;
    for (int n = 0; n < whole->sequences; ++n) { /* the first and the last that are not empty */
        int64_t tokens = whole->length[is_step ? 0 : n];
        if (tokens == 0) continue;
        int at = s.c.sequences == 2 ? 1 : s.c.sequences++;
        s.sequence[at] = n;
        s.c.length[at] = tokens < kTokens ? tokens : kTokens;
    }
    return s;
}

/* The slice's part of a contiguous tensor of the whole job, on the host. */
static void *gather(const job *j, int r, const slice *s) {
    extent e = role_extent(j->c, r);
    size_t row = (size_t)(e.heads * e.dim) * gdelta_dtype_size(j->dtype[r]);
    bool is_step = j->c->operation == GDELTA_OPERATION_STEP;
    char *host = place_alloc(kHost, (size_t)role_count(&s->c, r) * gdelta_dtype_size(j->dtype[r])), *to = host;
    for (int i = 0; i < s->c.sequences; ++i) {
        int64_t first = s->sequence[i], rows = 1;
        if (e.by_token) {
            rows = s->c.length[is_step ? 0 : i];
            first = is_step ? first * rows : 0;
            for (int n = 0; !is_step && n < s->sequence[i]; ++n) first += j->c->length[n];
        }
        place_copy(kHost, to, j->place, (char *)j->data[r] + (size_t)first * row, (size_t)rows * row);
        to += (size_t)rows * row;
    }
    return host;
}

/* Relative L2 errors that are still rounding: fp32 throughout, and with 16-bit tensors. */
static double tolerance(const bench_case *c, int r) {
    bool fp32 = c->dtype == GDELTA_DTYPE_FP32 && c->state_dtype == GDELTA_DTYPE_FP32;
    if (r == DG || r == DBETA) return fp32 ? 1e-4 : c->gate == kGateStrong ? 2e-2 : 1e-2;
    if (r == O || r == FINAL) return fp32 ? 1e-5 : 5e-3;
    return fp32 ? 1e-5 : 8e-3;
}

static void add_error(bench_result *result, const slice *s, const char *name, int r, const void *got,
                      gdelta_dtype dtype, const double *want) {
    double error = worst_error(&s->c, r, got, dtype, want);
    result->error[result->errors++] = (bench_error){name, error, tolerance(&s->c, r)};
}

/* The rule is causal: the first tokens of a sequence are a problem of their own. The engine runs those of the first and
 * the last sequence again, on the timed call's very inputs and in its types, the reference in fp64; what forward wrote
 * in the timed call for these tokens is compared as well. Gradients are those of the short problem. */
static bool check_slice(const job *timed, bench_result *result) {
    slice s = slice_of(timed->c);
    bool is_step = s.c.operation == GDELTA_OPERATION_STEP;
    job engine = empty_job(&s.c, kDevice), reference = empty_job(&s.c, kHost);
    if (!make_plan(&engine)) return false;
    make_cu_seqlens(&engine);
    make_cu_seqlens(&reference);
    make_slots(&engine);
    make_slots(&reference);
    for (int r = 0; r < ROLES; ++r) {
        if (!role_used(&s.c, r) && !(is_step && r == FINAL)) continue;
        if (r < O) {
            engine.dtype[r] = reference.dtype[r] = timed->dtype[r];
            reference.data[r] = gather(timed, r, &s);
            engine.data[r] = take(&engine, r);
            place_copy(kDevice, engine.data[r], kHost, reference.data[r],
                       (size_t)role_count(&s.c, r) * gdelta_dtype_size(timed->dtype[r]));
        } else {
            reference.dtype[r] = GDELTA_DTYPE_FP64;
            reference.data[r] = take(&reference, r);
            if (is_step && r == FINAL) continue; /* the engine writes in place */
            engine.dtype[r] = timed->dtype[r];
            engine.data[r] = take(&engine, r);
        }
    }
    double ignored;
    bool done = make_saved(&engine) && device_run(call, &engine, &ignored) && call(&reference, NULL) == GDELTA_OK;
    for (int r = O; done && r < ROLES; ++r) {
        if (reference.data[r] == NULL) continue;
        int from = is_step && r == FINAL ? STATE : r;
        size_t bytes = (size_t)role_count(&s.c, r) * gdelta_dtype_size(engine.dtype[from]);
        void *got = place_alloc(kHost, bytes);
        place_copy(kHost, got, kDevice, engine.data[from], bytes);
        add_error(result, &s, role_name[r], r, got, engine.dtype[from], reference.data[r]);
        place_free(kHost, got);
        if (r == O && !is_step) {
            got = gather(timed, r, &s);
            add_error(result, &s, "o as timed", r, got, timed->dtype[r], reference.data[r]);
            place_free(kHost, got);
        }
    }
    result->checked_tokens = case_rows(&s.c);
    free_job(&engine);
    free_job(&reference);
    return done || refused("check");
}

/* ---- The case ---- */

const char *measure_no_gpu(void) {
    return device_missing();
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int count) {
    qsort(times, (size_t)count, sizeof *times, by_value);
    return times[count / 2];
}

void measure_machine(bool on_cpu, bench_machine *machine) {
    *machine = (bench_machine){.name = "CPU"};
    if (on_cpu) return;
    enum { kRepeats = 31 };
    double times[kRepeats];
    device_name(machine->name, sizeof machine->name);
    machine->copy_bytes_per_second = device_copy_rate();
    machine->empty_kernel = device_empty_time();
    device_time(NULL, NULL, 0, kRepeats, times);
    machine->event_overhead = median(times, kRepeats);
}

enum { kMaxCalls = 256 };

static size_t job_bytes(const bench_case *c) {
    size_t bytes = 0;
    for (int r = 0; r < ROLES; ++r) {
        if (role_used(c, r)) bytes += (size_t)role_count(c, r) * gdelta_dtype_size(role_dtype(c, r));
    }
    return bytes;
}

/* A call of a few microseconds is lost between two events: then a graph holds many calls, each with tensors of its own,
 * together larger than any L2. */
static int count_calls(const bench_case *c, double once_us) {
    enum { kShort = 60, kLeast = 20 };
    static const size_t pool = (size_t)256 << 20;
    size_t calls = (pool - 1) / job_bytes(c) + 1;
    return once_us > kShort ? 1 : calls < kLeast ? kLeast : calls > kMaxCalls ? kMaxCalls : (int)calls;
}

static int fit_repeats(int asked, double each_us) {
    double fit = 1e6 / each_us;
    return asked ? asked : fit < 5 ? 5 : fit > 50 ? 50 : (int)fit;
}

/* The bytes that a step has to move, where it moves them, and nothing besides. */
static gdelta_status copy_states(void *context, gdelta_stream stream) {
    const job *j = context;
    size_t bytes = (size_t)role_count(j->c, STATE) * gdelta_dtype_size(j->dtype[STATE]);
    device_copy(j->data[STATE], j->data[STATE], bytes, stream);
    return GDELTA_OK;
}

/* The first of `jobs` is made; makes others like it, times all in one graph. */
static bool time_calls(job *jobs, int asked, bench_result *result, double *times) {
    double again;
    if (!device_run(call, &jobs[0], &again)) return false;
    int made = 1;
    result->calls = count_calls(jobs[0].c, again);
    result->repeats = fit_repeats(asked, result->calls * again + 100);
    void *contexts[kMaxCalls] = {&jobs[0]};
    bool done = true;
    for (; done && made < result->calls; ++made) {
        job *j = &jobs[made];
        *j = empty_job(jobs[0].c, jobs[0].place);
        j->plan = jobs[0].plan;
        j->workspace = jobs[0].workspace;
        j->workspace_bytes = jobs[0].workspace_bytes;
        j->slots = jobs[0].slots;
        done = make_tensors(j);
        contexts[made] = j;
    }
    if (done && jobs[0].c->operation == GDELTA_OPERATION_STEP) {
        done = device_time(copy_states, contexts, result->calls, result->repeats, times);
        result->copy = median(times, result->repeats);
    }
    if (done) done = device_time(call, contexts, result->calls, result->repeats, times);
    while (made > 1) free_tensors(&jobs[--made]);
    return done;
}

bool measure_case(const bench_case *c, int asked, bool check, bench_result *result) {
    static double times[kMaxRepeats];
    static job jobs[kMaxCalls];
    job *j = &jobs[0];
    *result = (bench_result){.plan = "reference: fp64 on the CPU", .calls = 1};
    *j = empty_job(c, c->on_cpu ? kHost : kDevice);
    if (!make_plan(j)) return false;
    if (j->plan) gdelta_plan_describe(j->plan, result->plan, sizeof result->plan);
    make_slots(j);
    bool done = make_tensors(j);
    if (done && c->on_cpu) {
        result->repeats = asked ? asked : 1;
        for (int i = 0; done && i < result->repeats; ++i) done = host_time(call, j, &times[i]);
        result->first = times[0];
    } else if (done) {
        done = device_run(call, j, &result->first);
        if (done && check) done = check_slice(j, result);
        if (done && c->operation == GDELTA_OPERATION_STEP) done = device_enqueue_time(call, j, &result->host);
        if (done) done = time_calls(jobs, asked, result, times);
    }
    if (done) {
        int repeats = result->repeats;
        result->median = median(times, repeats);
        result->p10 = times[repeats / 10];
        result->p90 = times[repeats - 1 - repeats / 10];
    }
    free_job(j);
    return done || refused("call");
}
