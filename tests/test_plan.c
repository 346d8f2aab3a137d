/* Plans without a GPU: what is supported, the line that describes a plan, and the bytes that it asks for. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <gdelta/gdelta.h>

static gdelta_problem dense(int64_t batch, int64_t tokens) {
    return (gdelta_problem){.struct_size = sizeof(gdelta_problem),
                            .batch = batch,
                            .tokens = tokens,
                            .heads_q = 2,
                            .heads_k = 2,
                            .heads_v = 4,
                            .dim_k = 64,
                            .dim_v = 128,
                            .compute_capability = 90,
                            .multiprocessors = 132};
}

static gdelta_problem packed(int64_t sequences, int64_t total_tokens) {
    gdelta_problem problem = dense(0, 0);
    problem.layout = GDELTA_LAYOUT_THD;
    problem.sequences = sequences;
    problem.total_tokens = total_tokens;
    return problem;
}

static gdelta_plan *plan_of(const gdelta_problem *problem) {
    gdelta_plan *plan = NULL;
    cr_assert_eq(gdelta_plan_create(problem, &plan), GDELTA_OK, "%s", gdelta_last_error());
    cr_assert_not_null(plan);
    return plan;
}

typedef struct sizes {
    size_t forward, backward, saved;
} sizes;

static sizes sizes_of(const gdelta_problem *problem) {
    gdelta_plan *plan = plan_of(problem);
    sizes s;
    cr_assert_eq(gdelta_plan_workspace_size(plan, GDELTA_OPERATION_FORWARD, &s.forward), GDELTA_OK);
    cr_assert_eq(gdelta_plan_workspace_size(plan, GDELTA_OPERATION_BACKWARD, &s.backward), GDELTA_OK);
    cr_assert_eq(gdelta_plan_saved_size(plan, &s.saved), GDELTA_OK);
    gdelta_plan_destroy(plan);
    return s;
}

/* ---- Sizes ---- */

static size_t padded(size_t bytes) {
    return (bytes + 255) & ~(size_t)255;
}

/* Whether AUTO takes the hopper engine for forward: long sequences of tiles of 16-bit elements. */
static bool takes_hopper(const gdelta_problem *p) {
#ifdef GDELTA_HAVE_HOPPER
    bool tiles = (p->dim_k == 64 || p->dim_k == 128) && (p->dim_v == 64 || p->dim_v == 128);
    int64_t longest = p->tokens ? p->tokens : p->total_tokens;
    bool automatic = p->engine == GDELTA_ENGINE_AUTO && (longest > 64 || (p->flags & GDELTA_FLAG_BATCH_INVARIANT));
    return (automatic || p->engine == GDELTA_ENGINE_HOPPER) && tiles && p->dtype != GDELTA_DTYPE_FP32 &&
           p->compute_capability == 90;
#else
    (void)p;
    return false;
#endif
}

/* And for backward: of shorter ones too, but not of fp16 or a linear gate. */
static bool takes_hopper_backward(const gdelta_problem *p) {
    gdelta_problem named = *p;
    named.engine = GDELTA_ENGINE_HOPPER;
    if (p->engine != GDELTA_ENGINE_AUTO) return takes_hopper(p);
    int64_t longest = p->tokens ? p->tokens : p->total_tokens;
    return takes_hopper(&named) && p->dtype != GDELTA_DTYPE_FP16 && p->gate != GDELTA_GATE_LINEAR &&
           (longest > 8 || (p->flags & GDELTA_FLAG_BATCH_INVARIANT));
}

static size_t chunks_of(const gdelta_problem *p) {
    bool thd = p->layout == GDELTA_LAYOUT_THD;
    return (size_t)(thd ? p->total_tokens / 64 + p->sequences : p->batch * ((p->tokens + 63) / 64));
}

/* The row table: so many floats for each chunk of 64 tokens and output head. Packed sequences may all end within a
 * chunk. */
static size_t row_bytes(const gdelta_problem *p, size_t heads, size_t floats) {
    return padded(chunks_of(p) * heads * floats * 4);
}

/* Room for summaries of all but one segment of a sequence, 512 tokens at least and 32 segments at most, but no more
 * than two a multiprocessor in all. */
static size_t summaries_of(const gdelta_problem *p, size_t heads) {
    bool thd = p->layout == GDELTA_LAYOUT_THD;
    size_t longest = (size_t)(p->tokens ? p->tokens : p->total_tokens), segments = longest / 512;
    size_t jobs = (size_t)(thd ? p->sequences : p->batch) * heads, most = 2 * (size_t)p->multiprocessors;
    if (segments > 32) segments = 32;
    if (segments < 1 || (p->flags & GDELTA_FLAG_BATCH_INVARIANT)) segments = 1;
    return jobs * (segments - 1) < most ? jobs * (segments - 1) : most;
}

/* Hopper forward: for each chunk and output head 64 rows of K and a lower triangle of 64 x 64 in squares of 16 x 16, of
 * 16 bits; and the summaries, [K, K] and [K, V] of fp32. */
static size_t hopper_bytes(const gdelta_problem *p, size_t heads) {
    size_t chunk_heads = chunks_of(p) * heads, k = (size_t)p->dim_k, v = (size_t)p->dim_v;
    size_t summaries = summaries_of(p, heads);
    return row_bytes(p, heads, 132) + padded(chunk_heads * 64 * k * 2) + padded(chunk_heads * 5120) +
           padded(summaries * k * k * 4) + padded(summaries * k * v * 4);
}

/* Backward: the row table; for each output head 64 rows of K, two tiles of 64 x 64, two states and two sets of rows of
 * V of 16 bits, and of fused gates two doubles; for each query head two tiles; and twice forward's summaries. */
static size_t hopper_backward_bytes(const gdelta_problem *p, size_t heads) {
    size_t chunks = chunks_of(p), k = (size_t)p->dim_k, v = (size_t)p->dim_v, summaries = 2 * summaries_of(p, heads);
    return row_bytes(p, heads, 388) + padded(chunks * heads * 64 * k * 2) + 2 * padded(chunks * heads * 8192) +
           2 * padded(chunks * (size_t)p->heads_q * 8192) + 2 * padded(chunks * heads * k * v * 2) +
           2 * padded(chunks * heads * 64 * v * 2) +
           (p->gate == GDELTA_GATE_SOFTPLUS ? padded(chunks * heads * 16) : 0) + padded(summaries * k * k * 4) +
           padded(summaries * k * v * 4);
}

/* The recurrent engine's are the parts of kernels/launch.h, in fp32: states after every 64 rows, parts of dq and dk for
 * each tile of V, parts of dv where query heads share one, ddecay and dbeta for each tile. A tile of backward is 8
 * warps x 4 lanes x 4 columns of V, 2 columns where K passes 128. The word `malformed` comes with packed sequences.
 * Where AUTO takes the hopper engine for backward nothing is saved, and there is room for either engine. */
static sizes expected_sizes(const gdelta_problem *p) {
    bool thd = p->layout == GDELTA_LAYOUT_THD, saves = p->save_mode == GDELTA_SAVE_STATES && !takes_hopper_backward(p);
    size_t rows = (size_t)(thd ? p->total_tokens : p->batch * p->tokens);
    size_t heads = (size_t)(p->heads_q > p->heads_v ? p->heads_q : p->heads_v);
    size_t k = (size_t)p->dim_k, v = (size_t)p->dim_v;
    size_t columns = k <= 128 ? 128 : 64, tiles = (v + columns - 1) / columns;
    size_t malformed = thd ? 256 : 0, states = rows / 64 * heads * k * v * 4;
    sizes s = {.forward = malformed, .saved = saves ? states : 0};
    if (takes_hopper(p)) s.forward += hopper_bytes(p, heads);
    size_t recurrent = malformed + (saves ? 0 : padded(states)) + 2 * padded(rows * heads * tiles * k * 4) +
                       (p->heads_v < p->heads_q ? padded(rows * heads * v * 4) : 0) +
                       2 * padded(heads * tiles * rows * 4);
    size_t hopper = takes_hopper_backward(p) ? malformed + hopper_backward_bytes(p, heads) : 0;
    if (p->engine == GDELTA_ENGINE_HOPPER) recurrent = 0;
    s.backward = recurrent > hopper ? recurrent : hopper;
    return s;
}

Test(plan, sizes_are_the_sum_of_the_parts) {
    static const struct {
        int64_t batch, tokens;
        int32_t heads_q, heads_k, heads_v, dim_k, dim_v;
    } shapes[] = {
        {1, 1, 1, 1, 1, 1, 1},           {4, 8192, 16, 16, 32, 128, 128}, {3, 63, 2, 2, 4, 64, 65},
        {1, 64, 8, 2, 2, 96, 192},       {2, 65, 4, 4, 4, 129, 128},      {5, 257, 2, 2, 6, 256, 256},
        {7, 100, 6, 3, 3, 40, 129},      {1, 0, 2, 2, 2, 64, 64},         {131072, 1, 16, 16, 32, 128, 128},
        {1, 1 << 20, 4, 4, 8, 128, 256},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i) {
        for (int mode = 0; mode < 12; ++mode) {
            int64_t rows = shapes[i].batch * shapes[i].tokens;
            gdelta_problem p = mode & 1 ? packed(shapes[i].batch, rows) : dense(shapes[i].batch, shapes[i].tokens);
            p.save_mode = mode & 2 ? GDELTA_SAVE_STATES : GDELTA_SAVE_COMPACT;
            p.heads_q = shapes[i].heads_q, p.heads_k = shapes[i].heads_k, p.heads_v = shapes[i].heads_v;
            p.dim_k = shapes[i].dim_k, p.dim_v = shapes[i].dim_v;
            p.gate = mode / 4;
            sizes got = sizes_of(&p), want = expected_sizes(&p);
            cr_expect_eq(got.forward, want.forward, "shape %zu, mode %d: %zu not %zu", i, mode, got.forward,
                         want.forward);
            cr_expect_eq(got.backward, want.backward, "shape %zu, mode %d: %zu not %zu", i, mode, got.backward,
                         want.backward);
            cr_expect_eq(got.saved, want.saved, "shape %zu, mode %d: %zu not %zu", i, mode, got.saved, want.saved);
            cr_expect(got.forward % 256 == 0 && got.backward % 256 == 0, "shape %zu, mode %d", i, mode);
        }
    }
}

Test(plan, saved_states_spare_backward_their_workspace) {
    for (int thd = 0; thd < 2; ++thd) {
        gdelta_problem compact = thd ? packed(3, 1000) : dense(3, 640), states = compact;
        compact.gate = states.gate = GDELTA_GATE_LINEAR; /* whose backward is the recurrent engine's */
        states.save_mode = GDELTA_SAVE_STATES;
        sizes c = sizes_of(&compact), s = sizes_of(&states);
        cr_expect_eq(c.saved, 0);
        cr_expect_gt(s.saved, 0);
        cr_expect_eq(s.forward, c.forward);
        cr_expect_lt(s.backward, c.backward);
    }
}

/* The hopper engine's backward reads nothing that is saved. */
Test(plan, hopper_saves_nothing) {
    for (int engine = GDELTA_ENGINE_AUTO; engine <= GDELTA_ENGINE_HOPPER; engine += GDELTA_ENGINE_HOPPER) {
        gdelta_problem compact = dense(3, 640), states = compact;
        compact.engine = states.engine = takes_hopper(&compact) ? engine : GDELTA_ENGINE_AUTO;
        states.save_mode = GDELTA_SAVE_STATES;
        sizes c = sizes_of(&compact), s = sizes_of(&states);
        cr_expect_eq(s.saved == 0, takes_hopper_backward(&compact));
        if (takes_hopper_backward(&compact)) cr_expect_eq(s.backward, c.backward);
    }
}

/* A dense forward of the recurrent engine and a step need nothing; a packed forward needs one aligned word. */
Test(plan, recurrent_forward_needs_next_to_nothing) {
    gdelta_problem step = dense(131072, 4), thd = packed(5, 100000);
    thd.engine = GDELTA_ENGINE_RECURRENT;
    cr_expect_eq(sizes_of(&step).forward, 0);
    cr_expect_eq(sizes_of(&thd).forward, 256);
    gdelta_plan *plan = plan_of(&step);
    for (gdelta_operation operation = GDELTA_OPERATION_STEP; operation <= GDELTA_OPERATION_COMMIT; ++operation) {
        size_t bytes = 7;
        cr_expect_eq(gdelta_plan_workspace_size(plan, operation, &bytes), GDELTA_OK);
        cr_expect_eq(bytes, 0);
    }
    gdelta_plan_destroy(plan);
}

static void expect_growth(const gdelta_problem *smaller, const gdelta_problem *larger, const char *what,
                          int64_t value) {
    sizes a = sizes_of(smaller), b = sizes_of(larger);
    bool saved = takes_hopper_backward(larger) ? b.saved == 0 : a.saved <= b.saved;
    cr_expect(a.forward <= b.forward && a.backward <= b.backward && saved, "%s %lld", what, (long long)value);
}

/* Two problems that a test asks for in many modes. */
static void expect_growth_of(gdelta_problem smaller, gdelta_problem larger, int mode, const char *what, int64_t value) {
    smaller.save_mode = larger.save_mode = mode % 2;
    smaller.flags = larger.flags = (uint32_t)mode / 2;
    expect_growth(&smaller, &larger, what, value);
}

Test(plan, sizes_never_shrink) {
    for (int mode = 0; mode < 8; ++mode) {
        gdelta_problem a, b;
        for (int64_t n = 1; n < 600; ++n) {
            expect_growth_of(dense(n, 37), dense(n + 1, 37), mode, "batch", n);
            expect_growth_of(dense(3, n - 1), dense(3, n), mode, "tokens", n);
            expect_growth_of(packed(n, 300), packed(n + 1, 300), mode, "sequences", n);
            expect_growth_of(packed(4, n - 1), packed(4, n), mode, "total_tokens", n);
            a = packed(4, 600), b = packed(4, 600); /* 0, not known, counts as total_tokens */
            a.tokens = n, b.tokens = n + 1;
            expect_growth_of(a, b, mode, "longest sequence", n);
            b.tokens = 0;
            expect_growth_of(a, b, mode, "longest sequence not known", n);
            /* Lengths that may be cut into segments. */
            expect_growth_of(dense(3, 50 * n), dense(3, 50 * n + 50), mode, "more tokens", n);
            expect_growth_of(packed(n, 9000), packed(n + 1, 9000), mode, "more sequences", n);
            expect_growth_of(packed(7, 50 * n), packed(7, 50 * n + 50), mode, "more total_tokens", n);
        }
    }
}

/* ---- Describe ---- */

enum { kLine = 512 };

static size_t describe(const gdelta_problem *problem, char line[kLine]) {
    gdelta_plan *plan = plan_of(problem);
    size_t length = gdelta_plan_describe(plan, line, kLine);
    gdelta_plan_destroy(plan);
    return length;
}

Test(plan, describe_says_what_was_decided) {
    static const int32_t capabilities[] = {80, 90, 120};
    static const char *const layouts[] = {"BSHD", "SBHD", "BHSD", "THD"};
    static const char *const dtypes[] = {"bf16", "bf16", "fp16", "fp32"};
    char line[kLine], words[80];
    for (size_t i = 0; i < sizeof capabilities / sizeof *capabilities; ++i) {
        for (int layout = 0; layout < 4; ++layout) {
            gdelta_problem p = layout == GDELTA_LAYOUT_THD ? packed(3, 300) : dense(3, 100);
            p.layout = layout;
            p.dtype = layout;
            p.compute_capability = capabilities[i];
            p.multiprocessors = 77;
            size_t length = describe(&p, line);
            cr_expect_eq(length, strlen(line));
            cr_expect_null(strchr(line, '\n'), "one line: '%s'", line);
            snprintf(words, sizeof words, "%s: %s N=3 T=%d rows=300 heads=2/2/4 K=64 V=128 %s, sm_%d x 77",
                     takes_hopper(&p) ? "hopper" : "recurrent", layouts[layout],
                     layout == GDELTA_LAYOUT_THD ? 300 : 100, dtypes[layout], (int)capabilities[i]);
            cr_expect_eq(strncmp(line, words, strlen(words)), 0, "'%s' is not '%s...'", line, words);
            sizes s = expected_sizes(&p);
            snprintf(words, sizeof words, " backward (%s", takes_hopper_backward(&p) ? "hopper: " : "recurrent); ");
            cr_expect_not_null(strstr(line, words), "'%s' lacks '%s'", line, words);
            snprintf(words, sizeof words, "workspace %zu forward, %zu backward, saved %zu bytes", s.forward, s.backward,
                     s.saved);
            cr_expect_not_null(strstr(line, words), "'%s' lacks '%s'", line, words);
        }
    }
}

Test(plan, describe_cuts_like_snprintf) {
    gdelta_problem problem = dense(2, 64);
    gdelta_plan *plan = plan_of(&problem);
    char whole[kLine], part[kLine];
    size_t length = gdelta_plan_describe(plan, whole, sizeof whole);
    cr_assert(length > 40 && length < kLine);
    cr_expect_eq(gdelta_plan_describe(plan, NULL, 0), length);
    for (size_t size = 1; size <= length + 2; ++size) {
        memset(part, '#', sizeof part);
        size_t kept = size <= length ? size - 1 : length;
        cr_expect_eq(gdelta_plan_describe(plan, part, size), length);
        cr_expect_eq(strlen(part), kept, "%zu", size);
        cr_expect_eq(memcmp(part, whole, kept), 0, "%zu", size);
        cr_expect_eq(part[size], '#', "%zu bytes: written past", size);
    }
    gdelta_plan_destroy(plan);
    part[0] = 'x';
    cr_expect_eq(gdelta_plan_describe(NULL, part, 0), 0);
    cr_expect_eq(part[0], 'x');
    cr_expect_eq(gdelta_plan_describe(NULL, part, sizeof part), 0);
    cr_expect_eq(part[0], '\0');
}

/* Zero means default: naming the defaults changes nothing. */
Test(plan, zeros_are_the_defaults) {
    gdelta_problem zeros = dense(2, 8), named = zeros;
    named.layout = GDELTA_LAYOUT_BSHD;
    named.engine = GDELTA_ENGINE_RECURRENT;
    named.dtype = GDELTA_DTYPE_BF16;
    named.gate_dtype = named.beta_dtype = named.state_dtype = GDELTA_DTYPE_FP32;
    named.has_scale = 1;
    named.scale = 0.125; /* 64^-1/2 */
    char a[kLine], b[kLine];
    describe(&zeros, a);
    describe(&named, b);
    cr_expect_str_eq(a, b);
}

/* ---- GDELTA_FLAG_SMALL_WORKSPACE ---- */

/* Twice the 16-bit states of 64 tokens each. */
static size_t twice_states(const gdelta_problem *p) {
    size_t heads = (size_t)(p->heads_q > p->heads_v ? p->heads_q : p->heads_v);
    return 2 * chunks_of(p) * heads * (size_t)p->dim_k * (size_t)p->dim_v * 2;
}

static gdelta_problem part_of(gdelta_problem p, int32_t slices) {
    p.heads_q /= slices, p.heads_k /= slices, p.heads_v /= slices;
    return p;
}

static const struct {
    int32_t heads_q, heads_k, heads_v, dim_k, dim_v, slices;
    bool reached; /* twice the states */
} small[] = {
    {16, 16, 64, 128, 128, 4, true}, {16, 16, 32, 128, 128, 4, true}, {8, 8, 16, 128, 128, 4, true},
    {4, 4, 8, 128, 128, 4, true},    {16, 16, 16, 128, 128, 4, true}, {3, 3, 9, 128, 128, 3, true},
    {6, 6, 12, 128, 128, 3, true},   {7, 7, 7, 128, 128, 7, true},    {2, 2, 8, 128, 128, 2, false},
    {1, 1, 4, 128, 128, 1, false},   {32, 8, 8, 128, 128, 4, true},   {9, 3, 3, 128, 128, 3, true},
    {16, 16, 32, 64, 64, 8, true},   {6, 6, 6, 64, 64, 6, true},      {4, 4, 8, 64, 64, 4, false},
    {8, 8, 16, 64, 128, 4, true},    {4, 4, 4, 128, 64, 4, true},     {8, 2, 2, 128, 64, 2, false},
    {8, 8, 16, 96, 192, 4, true},    {16, 16, 32, 256, 256, 4, true}, {8, 8, 8, 7, 5, 8, false},
};
enum { kSmall = sizeof small / sizeof *small };

/* Dense or packed, with this flag. */
static gdelta_problem small_problem(int i, int64_t sequences, int64_t tokens, bool thd) {
    gdelta_problem p = thd ? packed(sequences, sequences * tokens) : dense(sequences, tokens);
    p.flags = GDELTA_FLAG_SMALL_WORKSPACE;
    p.heads_q = small[i].heads_q, p.heads_k = small[i].heads_k, p.heads_v = small[i].heads_v;
    p.dim_k = small[i].dim_k, p.dim_v = small[i].dim_v;
    return p;
}

/* That of a problem of so many heads less, at most twice the states where that can be; parts are aligned. */
Test(plan, small_workspace_is_a_slice) {
    static const int64_t lengths[] = {0, 1, 64, 100, 1024, 8192, 16384, 32768, 100000};
    for (int i = 0; i < kSmall; ++i) {
        for (int mode = 0; mode < 36; ++mode) {
            bool thd = mode % 2;
            gdelta_problem p = small_problem(i, mode / 2 % 2 ? 5 : 1, lengths[mode / 4], thd);
            p.gate = mode % 3 == 2 ? GDELTA_GATE_SOFTPLUS : GDELTA_GATE_LOG;
            gdelta_problem part = part_of(p, small[i].slices), all = p;
            all.flags = part.flags = 0;
            sizes got = sizes_of(&p), one = expected_sizes(&part), whole = sizes_of(&all);
            cr_expect(thd ? got.backward <= one.backward : got.backward == one.backward, "%d, mode %d: %zu not %zu", i,
                      mode, got.backward, one.backward);
            cr_expect_eq(got.forward, whole.forward, "%d, mode %d", i, mode);
            cr_expect_leq(got.backward, whole.backward, "%d, mode %d", i, mode);
            if (!small[i].reached) continue;
            cr_expect_leq(got.backward, twice_states(&p) + 4096, "%d, mode %d: %zu", i, mode, got.backward);
        }
    }
}

/* As few as will do: fewer pass that where there is room for all segments of a long text. */
Test(plan, small_workspace_has_the_fewest_slices) {
    char line[kLine], words[24];
    for (int i = 0; i < kSmall; ++i) {
        gdelta_problem p = small_problem(i, 2, 16384, false);
        p.multiprocessors = 65536;
        describe(&p, line);
        snprintf(words, sizeof words, ", slices %d); ", (int)small[i].slices);
        cr_expect_not_null(strstr(line, words), "%d: '%s'", i, line);
        for (int32_t fewer = 1; fewer < small[i].slices; ++fewer) {
            if (p.heads_k % fewer) continue;
            gdelta_problem part = part_of(p, fewer);
#ifdef GDELTA_HAVE_HOPPER
            cr_expect_gt(expected_sizes(&part).backward, twice_states(&p), "%d: %d", i, (int)fewer);
#else
            (void)part; /* whose hopper engine needs more */
#endif
        }
        p.flags = 0;
        describe(&p, line);
        cr_expect_null(strstr(line, "slices"), "%d: '%s'", i, line);
    }
}

/* The recurrent engine's states, which forward would leave side by side for all heads. */
Test(plan, small_workspace_saves_nothing) {
    for (int gate = GDELTA_GATE_LOG; gate <= GDELTA_GATE_LINEAR; ++gate) {
        gdelta_problem compact = small_problem(1, 3, 640, false), states = compact;
        compact.gate = states.gate = gate;
        states.save_mode = GDELTA_SAVE_STATES;
        sizes c = sizes_of(&compact), s = sizes_of(&states);
        cr_expect_eq(s.saved, 0);
        cr_expect_eq(s.backward, c.backward);
    }
}

/* ---- Same problem, same plan; one plan, many threads ---- */

Test(plan, the_same_problem_gives_the_same_plan) {
    gdelta_problem problems[] = {dense(3, 100), packed(4, 1000)};
    for (int i = 0; i < 2; ++i) {
        char a[kLine], b[kLine];
        gdelta_problem before = problems[i];
        sizes first = sizes_of(&problems[i]), second = sizes_of(&problems[i]);
        cr_expect_eq(memcmp(&first, &second, sizeof first), 0);
        describe(&problems[i], a);
        describe(&problems[i], b);
        cr_expect_str_eq(a, b);
        cr_expect_eq(memcmp(&before, &problems[i], sizeof before), 0, "the problem has changed");
    }
}

typedef struct reader {
    const gdelta_plan *plan;
    const char *line;
    size_t backward;
    int mistakes;
} reader;

static void *read_plan(void *argument) {
    reader *r = argument;
    for (int i = 0; i < 2000; ++i) {
        char line[kLine];
        size_t bytes = 0, saved = 1;
        gdelta_plan_describe(r->plan, line, sizeof line);
        gdelta_status status = gdelta_plan_workspace_size(r->plan, GDELTA_OPERATION_BACKWARD, &bytes);
        if (status == GDELTA_OK) status = gdelta_plan_saved_size(r->plan, &saved);
        r->mistakes += status != GDELTA_OK || bytes != r->backward || saved != 0 || strcmp(line, r->line) != 0;
    }
    return NULL;
}

Test(plan, threads_share_one_plan) {
    enum { kThreads = 4 };
    gdelta_problem problem = dense(3, 100);
    gdelta_plan *plan = plan_of(&problem);
    char line[kLine];
    gdelta_plan_describe(plan, line, sizeof line);
    pthread_t threads[kThreads];
    reader readers[kThreads];
    for (int i = 0; i < kThreads; ++i) {
        readers[i] = (reader){.plan = plan, .line = line, .backward = expected_sizes(&problem).backward};
        cr_assert_eq(pthread_create(&threads[i], NULL, read_plan, &readers[i]), 0);
    }
    for (int i = 0; i < kThreads; ++i) {
        pthread_join(threads[i], NULL);
        cr_expect_eq(readers[i].mistakes, 0, "thread %d", i);
    }
    gdelta_plan_destroy(plan);
}

/* ---- Supported ---- */

static void expect_refusal(const gdelta_problem *problem, gdelta_operation operation, gdelta_status wanted,
                           const char *start) {
    const char *reason = NULL;
    gdelta_status status = gdelta_supported(problem, operation, 90, &reason);
    cr_expect_eq(status, wanted, "'%s': %s", start, gdelta_status_string(status));
    cr_expect_eq(reason, gdelta_last_error(), "the reason is the last error");
    cr_expect_eq(strncmp(reason, start, strlen(start)), 0, "'%s' is not '%s...'", reason, start);
    cr_expect_eq(gdelta_supported(problem, operation, 90, NULL), wanted, "without a reason");
}

Test(supported, operations) {
    gdelta_problem many = dense(2, 17), none = dense(2, 0), thd = packed(2, 32), good = dense(2, 16);
    const gdelta_status invalid = GDELTA_ERROR_INVALID_ARGUMENT, unsupported = GDELTA_ERROR_UNSUPPORTED;
    expect_refusal(&many, GDELTA_OPERATION_STEP, invalid, "tokens is 17; a step takes 1 to 16 tokens");
    expect_refusal(&none, GDELTA_OPERATION_STEP, invalid, "tokens is 0; a step takes 1 to 16 tokens");
    expect_refusal(&thd, GDELTA_OPERATION_STEP, unsupported, "layout is THD; a step takes dense layouts");
    expect_refusal(&many, GDELTA_OPERATION_COMMIT, invalid, "tokens is 17; a step takes 1 to 16 tokens");
    expect_refusal(&thd, GDELTA_OPERATION_COMMIT, unsupported, "layout is THD; a step takes dense layouts");
    expect_refusal(&good, 4, invalid, "operation is 4; it must be 0 to 3");
    expect_refusal(&good, -1, invalid, "operation is -1; it must be 0 to 3");
    good.engine = GDELTA_ENGINE_HOPPER;
    expect_refusal(&good, GDELTA_OPERATION_STEP, unsupported, "engine is hopper (2); its step is not in this version");
    expect_refusal(&good, GDELTA_OPERATION_COMMIT, unsupported,
                   "engine is hopper (2); its commit is not in this version");
    good.engine = GDELTA_ENGINE_AUTO;
    good.dim_k = 257;
    expect_refusal(&good, GDELTA_OPERATION_FORWARD, unsupported, "dim_k, dim_v are 257, 128");
}

/* The plan refuses the size of what it could not run, and leaves the caller's number alone. */
Test(supported, workspace_sizes_of_operations) {
    const struct {
        gdelta_problem problem;
        gdelta_operation operation;
        gdelta_status status;
        const char *sentence;
    } refused[] = {
        {dense(2, 17), GDELTA_OPERATION_STEP, GDELTA_ERROR_INVALID_ARGUMENT, "tokens is 17;"},
        {packed(2, 32), GDELTA_OPERATION_STEP, GDELTA_ERROR_UNSUPPORTED, "layout is THD;"},
        {dense(2, 17), GDELTA_OPERATION_COMMIT, GDELTA_ERROR_INVALID_ARGUMENT, "tokens is 17;"},
        {dense(2, 16), 4, GDELTA_ERROR_INVALID_ARGUMENT, "operation is 4;"},
        {dense(2, 16), -1, GDELTA_ERROR_INVALID_ARGUMENT, "operation is -1;"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; ++i) {
        gdelta_plan *plan = plan_of(&refused[i].problem);
        size_t bytes = 11;
        cr_expect_eq(gdelta_plan_workspace_size(plan, refused[i].operation, &bytes), refused[i].status, "%zu", i);
        cr_expect_eq(bytes, 11, "%zu", i);
        cr_expect_eq(strncmp(gdelta_last_error(), refused[i].sentence, strlen(refused[i].sentence)), 0, "'%s'",
                     gdelta_last_error());
        gdelta_plan_destroy(plan);
    }
}

/* ---- Engines ---- */

/* Plan and gdelta_supported refuse it with the same sentence. */
static void expect_no_hopper(gdelta_problem problem, const char *rest) {
    char sentence[160];
    const char *reason = NULL;
    gdelta_plan *plan;
    problem.engine = GDELTA_ENGINE_HOPPER;
    snprintf(sentence, sizeof sentence, "engine is hopper (2), but %s", rest);
    cr_expect_eq(gdelta_plan_create(&problem, &plan), GDELTA_ERROR_UNSUPPORTED, "%s", rest);
    cr_expect_null(plan);
    cr_expect_eq(strncmp(gdelta_last_error(), sentence, strlen(sentence)), 0, "'%s'", gdelta_last_error());
    cr_expect_eq(gdelta_supported(&problem, GDELTA_OPERATION_FORWARD, problem.compute_capability, &reason),
                 GDELTA_ERROR_UNSUPPORTED, "%s", rest);
    cr_expect_eq(strncmp(reason, sentence, strlen(sentence)), 0, "'%s'", reason);
}

#ifdef GDELTA_HAVE_HOPPER

Test(plan, hopper_says_what_it_lacks) {
    gdelta_problem p = dense(2, 640);
    p.compute_capability = 80;
    expect_no_hopper(p, "compute_capability is 80; it must be 90");
    p.compute_capability = 100;
    expect_no_hopper(p, "compute_capability is 100; it must be 90");
    p = dense(2, 640);
    p.dtype = GDELTA_DTYPE_FP32;
    expect_no_hopper(p, "dtype is fp32; it must be bf16 or fp16");
    p = dense(2, 640);
    p.dim_k = 96;
    expect_no_hopper(p, "dim_k, dim_v are 96, 128; each must be one of 64 128");
    p = dense(2, 640);
    p.dim_v = 192;
    expect_no_hopper(p, "dim_k, dim_v are 64, 192; each must be one of 64 128");
    expect_no_hopper(dense(1 << 28, 64), "536870912 chunks of 4 heads need too many blocks");
}

/* By name for any number of tokens, none too, and any gate. A step has no size to ask for. */
Test(plan, hopper_by_name_has_forward_and_backward) {
    for (int64_t tokens = 0; tokens < 200; tokens += 13) {
        for (int thd = 0; thd < 2; ++thd) {
            gdelta_problem p = thd ? packed(3, tokens) : dense(3, tokens);
            p.engine = GDELTA_ENGINE_HOPPER;
            p.dtype = tokens % 2 ? GDELTA_DTYPE_FP16 : GDELTA_DTYPE_BF16;
            p.gate = (gdelta_gate)(tokens / 13 % 3);
            gdelta_plan *plan = plan_of(&p);
            size_t bytes;
            cr_expect_eq(gdelta_plan_workspace_size(plan, GDELTA_OPERATION_FORWARD, &bytes), GDELTA_OK);
            cr_expect_eq(bytes, expected_sizes(&p).forward, "%d tokens: %zu", (int)tokens, bytes);
            cr_expect_eq(gdelta_plan_workspace_size(plan, GDELTA_OPERATION_BACKWARD, &bytes), GDELTA_OK);
            cr_expect_eq(bytes, expected_sizes(&p).backward, "%d tokens: %zu", (int)tokens, bytes);
            cr_expect_eq(gdelta_supported(&p, GDELTA_OPERATION_FORWARD, 90, NULL), GDELTA_OK);
            cr_expect_eq(gdelta_supported(&p, GDELTA_OPERATION_BACKWARD, 90, NULL), GDELTA_OK);
            gdelta_plan_destroy(plan);
        }
    }
}

static void expect_engine(const gdelta_problem *problem, const char *engine) {
    char line[kLine];
    describe(problem, line);
    cr_expect_eq(strncmp(line, engine, strlen(engine)), 0, "'%s' is not %s", line, engine);
}

static void expect_backward(const gdelta_problem *problem, const char *engine) {
    char line[kLine], words[40];
    describe(problem, line);
    snprintf(words, sizeof words, " backward (%s", engine);
    cr_expect_not_null(strstr(line, words), "'%s' is not %s", line, engine);
}

/* A plan that AUTO makes leaves the last sentence alone, also where an engine did not fit. */
Test(plan, auto_takes_the_fastest) {
    gdelta_problem p = dense(2, -1);
    gdelta_plan *plan;
    cr_assert_eq(gdelta_plan_create(&p, &plan), GDELTA_ERROR_INVALID_ARGUMENT);
    p = dense(2, 65);
    expect_engine(&p, "hopper: ");
    p.save_mode = GDELTA_SAVE_STATES;
    expect_engine(&p, "hopper: ");
    p.dtype = GDELTA_DTYPE_FP16;
    expect_engine(&p, "hopper: ");
    p.dtype = GDELTA_DTYPE_FP32;
    expect_engine(&p, "recurrent: ");
    p = dense(2, 65);
    p.dim_k = 63;
    expect_engine(&p, "recurrent: ");
    p = dense(2, 65);
    p.compute_capability = 100;
    expect_engine(&p, "recurrent: ");
    p = dense(2, 64);
    expect_engine(&p, "recurrent: ");
    p.flags = GDELTA_FLAG_BATCH_INVARIANT; /* pieces of a text run where the whole does */
    expect_engine(&p, "hopper: ");
    p = packed(3, 1000);
    expect_engine(&p, "hopper: ");
    p.tokens = 64;
    expect_engine(&p, "recurrent: ");
    p = dense(2, 9);
    expect_backward(&p, "hopper");
    p.gate = GDELTA_GATE_LINEAR;
    expect_backward(&p, "recurrent");
    p = dense(2, 9);
    p.dtype = GDELTA_DTYPE_FP16;
    expect_backward(&p, "recurrent");
    p = dense(2, 8);
    expect_backward(&p, "recurrent");
    p.flags = GDELTA_FLAG_BATCH_INVARIANT;
    expect_backward(&p, "hopper");
    cr_expect_eq(strncmp(gdelta_last_error(), "tokens is -1;", 13), 0, "'%s'", gdelta_last_error());
}

/* Two blocks a head while they fit side by side, but where batches may change nothing. */
Test(plan, few_heads_are_split) {
    char line[kLine];
    for (int variant = 0; variant < 4; ++variant) {
        gdelta_problem p = dense(variant == 1 ? 17 : 16, 640); /* 64 or 68 output heads on 132 multiprocessors */
        if (variant == 2) p.dim_v = 64;
        if (variant == 3) p.flags = GDELTA_FLAG_BATCH_INVARIANT;
        describe(&p, line);
        cr_expect_not_null(strstr(line, variant == 0 ? ", split_v 2, segments 1, blocks 128 forward" : ", split_v 1, "),
                           "'%s'", line);
    }
}

/* Of forward and backward: whether there are several segments. */
static void expect_segments(const gdelta_problem *problem, bool forward, bool backward) {
    char line[kLine];
    describe(problem, line);
    cr_assert_not_null(strstr(line, "segments "), "'%s'", line);
    cr_assert_not_null(strstr(line, "(hopper: "), "'%s'", line);
    cr_expect_eq(!strstr(line, "segments 1,"), forward, "'%s'", line);
    cr_expect_eq(!strstr(line, "segments 1)"), backward, "'%s'", line);
}

/* Long texts of few heads are cut where that is faster, but where batches may change nothing. Backward moves more
 * bytes, which segments move again: of 16 heads it has no multiprocessors to gain. */
Test(plan, long_texts_of_few_heads_are_cut) {
    gdelta_problem p = dense(1, 32768);
    p.dim_k = 128;
    expect_segments(&p, true, true);
    p.flags = GDELTA_FLAG_BATCH_INVARIANT;
    expect_segments(&p, false, false);
    p.flags = 0;
    p.tokens = 8192;
    expect_segments(&p, true, true);
    p.tokens = 512;
    expect_segments(&p, false, false);
    p.tokens = 32768;
    p.heads_q = p.heads_k = 8;
    p.heads_v = 16;
    expect_segments(&p, true, false);
    p.heads_q = p.heads_k = 16;
    p.heads_v = 32;
    expect_segments(&p, true, false);
    p = dense(132, 32768);
    expect_segments(&p, false, false);
}

#else

Test(plan, no_hopper_without_sm_90a) {
    expect_no_hopper(dense(2, 640), "this libgdelta was compiled without sm_90a");
}

#endif

#ifdef GDELTA_HAVE_CUDA

/* AUTO: on any GPU that this build has code for, supported is what plan_create says. */
static void expect_agreement(const gdelta_problem *problem, int32_t capability) {
    gdelta_plan *plan = NULL;
    gdelta_status created = gdelta_plan_create(problem, &plan);
    gdelta_plan_destroy(plan);
    cr_expect_eq(gdelta_supported(problem, GDELTA_OPERATION_FORWARD, capability, NULL), created, "K %d V %d",
                 (int)problem->dim_k, (int)problem->dim_v);
    cr_expect_eq(gdelta_supported(problem, GDELTA_OPERATION_BACKWARD, capability, NULL), created, "K %d V %d",
                 (int)problem->dim_k, (int)problem->dim_v);
}

static const int32_t known[] = {75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121};

Test(supported, only_what_was_compiled) {
    gdelta_problem problem = dense(2, 16);
    int supported = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
        const char *reason = NULL;
        char start[80];
        gdelta_status status = gdelta_supported(&problem, GDELTA_OPERATION_FORWARD, known[i], &reason);
        if (status == GDELTA_OK) {
            ++supported;
            cr_expect_str_eq(reason, "");
            for (int32_t dim = 0; dim < 300; dim += 19) {
                problem.dim_k = dim, problem.dim_v = 299 - dim;
                expect_agreement(&problem, known[i]);
            }
            problem = dense(2, 16);
            continue;
        }
        snprintf(start, sizeof start, "compute_capability is %d; this libgdelta was compiled for ", (int)known[i]);
        cr_expect_eq(status, GDELTA_ERROR_UNSUPPORTED);
        cr_expect_eq(strncmp(reason, start, strlen(start)), 0, "'%s'", reason);
        cr_expect_neq(reason[strlen(start)], '\0', "the list of architectures is missing");
    }
    cr_expect_gt(supported, 0);
    cr_expect_eq(gdelta_supported(&problem, GDELTA_OPERATION_FORWARD, 75, NULL), GDELTA_ERROR_UNSUPPORTED);
    cr_expect_eq(gdelta_supported(&problem, GDELTA_OPERATION_FORWARD, 110, NULL), GDELTA_ERROR_UNSUPPORTED);
}

#else

/* No kernels: a good problem is unsupported everywhere, a bad one still invalid. */
Test(supported, nothing_without_cuda) {
    gdelta_problem problem = dense(2, 16);
    expect_refusal(&problem, GDELTA_OPERATION_FORWARD, GDELTA_ERROR_UNSUPPORTED,
                   "this libgdelta was built without CUDA");
    expect_refusal(&problem, GDELTA_OPERATION_BACKWARD, GDELTA_ERROR_UNSUPPORTED,
                   "this libgdelta was built without CUDA");
    expect_refusal(&problem, GDELTA_OPERATION_STEP, GDELTA_ERROR_UNSUPPORTED, "this libgdelta was built without CUDA");
    problem.dim_k = 0;
    expect_refusal(&problem, GDELTA_OPERATION_FORWARD, GDELTA_ERROR_INVALID_ARGUMENT, "dim_k is 0");
}

#endif
