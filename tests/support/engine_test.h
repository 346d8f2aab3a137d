/* ENGINE_TEST(suite, name, parts) { ... engine, part ... }: a Criterion test that runs with every engine of
 * test_engines and every part from 0 on, each in a process of its own. On an engine that needs a GPU it is skipped
 * where there is none (see gpu_require). GPU_ENGINE_TEST leaves out the engines that need none. */
#ifndef GDELTA_TESTS_ENGINE_TEST_H
#define GDELTA_TESTS_ENGINE_TEST_H

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#include "case.h"

#define ENGINE_TEST(suite, name, parts) ENGINE_TEST_FROM(0, suite, name, parts)
#define GPU_ENGINE_TEST(suite, name, parts) ENGINE_TEST_FROM(kReference + 1, suite, name, parts)

#define ENGINE_TEST_FROM(first, suite, name, parts)                            \
    static void suite##_##name(const test_engine *engine, int part);           \
    ParameterizedTestParameters(suite, name) {                                 \
        enum { kCount = (kEngines - (first)) * (parts) };                      \
        static int indices[kCount];                                            \
        for (int i = 0; i < kCount; ++i) indices[i] = i;                       \
        return cr_make_param_array(int, indices, kCount, NULL);                \
    }                                                                          \
    ParameterizedTest(const int *index, suite, name) {                         \
        const test_engine *engine = &test_engines[(first) + *index / (parts)]; \
        if (engine->on_gpu) gpu_require(#suite "/" #name, engine->capability); \
        suite##_##name(engine, *index % (parts));                              \
    }                                                                          \
    static void suite##_##name(const test_engine *engine, int part __attribute__((unused)))

/* In such a test: runs one operation of an instance, or ends the test. */
#define RUN(x, operation) cr_assert(instance_run(x, engine, GDELTA_OPERATION_##operation))
/* Whether the engine is to run it at all. */
#define RUNS(c, operation) engine_runs(engine, c, GDELTA_OPERATION_##operation)
/* Ends the test as skipped if not. */
#define NEEDS(c, operation)                                                              \
    do {                                                                                 \
        if (!RUNS(c, operation)) cr_skip_test("the engine %s has none", (engine)->name); \
    } while (0)

static inline instance make_instance(const test_case *c) {
    instance x;
    instance_create(&x, c);
    return x;
}

/* The hopper engine cuts the case's sequences into segments. */
static inline void expect_segments(const test_case *c, const test_engine *engine, gdelta_operation operation) {
    if (engine->engine == GDELTA_ENGINE_HOPPER)
        cr_assert_gt(engine_segments(engine, c, operation), 1, "%s", case_line(c));
}

/* A text, the text without its last token and `absent`, and that token, whose initial state is the prefill's final one
 * once the caller has copied it. Of the case's first sequence. */
typedef struct cut_text {
    instance whole, prefill, decode;
} cut_text;

static inline cut_text make_cut_text(test_case c, role_set absent) {
    cut_text text;
    instance_create(&text.whole, &c);
    c.lengths[0] -= 1;
    c.absent |= absent;
    instance_create(&text.prefill, &c);
    c.absent = 0;
    c.first_token = c.lengths[0];
    c.lengths[0] = 1;
    instance_create(&text.decode, &c);
    return text;
}

static inline void destroy_cut_text(cut_text *text) {
    instance_destroy(&text->whole);
    instance_destroy(&text->prefill);
    instance_destroy(&text->decode);
}

#endif /* GDELTA_TESTS_ENGINE_TEST_H */
