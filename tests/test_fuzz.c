/* A numeric fuzzer: problems that nobody thought of, every engine against the fp64 reference, for a few seconds or as
 * long as the environment says:
 *
 *     GDELTA_FUZZ_SECONDS   per engine and part; default 1
 *     GDELTA_FUZZ_SEED      the first case is this number; default 0
 *
 * Case i of the grid is a function of i alone. A failure prints its number: with it as the seed, it comes first in part
 * 0. */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/case.h"
#include "support/compare.h"
#include "support/engine_test.h"
#include "support/grid.h"

enum { kParts = 4 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int environment(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

ENGINE_TEST(fuzz, numbers, kParts) {
    int seed = environment("GDELTA_FUZZ_SEED", 0), cases = 0;
    double end = now() + environment("GDELTA_FUZZ_SECONDS", 1);
    for (int i = seed + part; cases == 0 || now() < end; i += kParts, ++cases) {
        test_case c = grid_case(kAnything, i);
        cr_expect(check_case(&c, engine, grid_operations(&c)), "case %d, GDELTA_FUZZ_SEED=%d", i, i);
    }
    fprintf(stderr, "fuzz: %s, seed %d, part %d: %d cases\n", engine->name, seed, part, cases);
}

/* What it found. All were sums that cancel, which were measured against what was left of them: with keys that are
 * alike, with one key element under the norm, in one token of few, where all comes from the final state; and a result
 * that was rounded to bf16 after it had been off by what is allowed. */
ENGINE_TEST(fuzz, found, kParts) {
    static const int found[] = {513756424, 513756608, 513756644, 513756660, 513756706, 513756739, 513756884, 513756952,
                                513757168, 513757220, 513757260, 20261359,  20261431,  20261531,  20261662,  20262011};
    for (int i = part; i < (int)(sizeof found / sizeof *found); i += kParts) {
        test_case c = grid_case(kAnything, found[i]);
        cr_expect(check_case(&c, engine, grid_operations(&c)), "case %d", found[i]);
    }
}
