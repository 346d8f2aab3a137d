/* A problem with known results, from a folder: the inputs become an instance (see case.h) that any engine can run, and
 * the results are compared with what the folder expects. tests/replay.c describes the format. */
#ifndef GDELTA_TESTS_GOLDEN_H
#define GDELTA_TESTS_GOLDEN_H

#include "case.h"
#include "npy.h"

typedef struct golden {
    instance x;
    npy_array expected[kRoles]; /* data is NULL where the folder expects nothing */
} golden;

/* False, with the reason printed to stderr, if the folder is not such a problem. */
bool golden_load(const char *folder, golden *g);
void golden_free(golden *g);

/* True if a gradient is expected. */
bool golden_needs_backward(const golden *g);

/* Runs forward, and backward if a gradient is expected and the engine has it. error[role] becomes the relative L2 error
 * of an expected tensor, the worst of its sequences and heads, relative to its natural scale where compare.h says so;
 * -1 where the engine gave none. False, with the reason printed, if a call fails. */
bool golden_run(golden *g, const test_engine *engine, double error[kRoles]);

/* The engine's tolerance, but at least what expected values in fp32 allow. */
double golden_tolerance(const test_engine *engine, role role);

/* The name of a tensor's file without ".npy"; NULL for a role that has none. */
const char *golden_name(role role);

#endif /* GDELTA_TESTS_GOLDEN_H */
