/* Is a result what it should be? Every function prints what differs, with the case's line, and returns false. */
#ifndef GDELTA_TESTS_COMPARE_H
#define GDELTA_TESTS_COMPARE_H

#include "case.h"

/* `rows` rows of one sequence of a tensor, from `row` on; rows 0: all the rest. */
typedef struct slice {
    const instance *of;
    role role;
    int64_t sequence, row, rows;
} slice;

/* Relative L2 error of each head, at most `tolerance`, after rounding `want` to the type of `got`. NaN never passes.
 * Rows that are a part of want's sequence are measured against its average rows where those are longer: tolerances are
 * for whole sequences, and the error of a row is that of the state it was read from, however short the row came out.
 * Where all of `want` is zero or tiny, its size is taken as what the type can hold well: so `got` must then be zero but
 * for underflow. */
bool compare_slices(slice got, slice want, double tolerance);
/* The same bits. */
bool compare_slice_bits(slice got, slice want);

/* The same for whole tensors, of equal shapes: every sequence of every role in the set, with the tolerance of the
 * engine, the role and its type. On the GPU, where sums cancel, results count as no smaller than a part of their
 * natural scale (scales.h). */
bool compare_instances(const instance *got, const instance *want, role_set roles, const test_engine *engine);
bool compare_bits(const instance *got, const instance *want, role_set roles);

double compare_tolerance(const test_engine *engine, role role, gdelta_dtype dtype);
/* Whether scales count, and then the least size of a head's result. */
bool compare_needs_scales(const test_engine *engine, role role);
double compare_scale(const instance *scales, const test_engine *engine, role role, int64_t sequence, int64_t head);

/* A set of operations. */
#define OPERATION(operation) (1u << (operation))
enum {
    kForward = OPERATION(GDELTA_OPERATION_FORWARD),
    kBackward = OPERATION(GDELTA_OPERATION_BACKWARD),
    kStep = OPERATION(GDELTA_OPERATION_STEP),
    kTraining = kForward | kBackward
};

/* Runs those of the operations that the engine is to run, each on the reference in the plainest form too, and compares.
 */
bool check_instance(instance *x, const test_engine *engine, unsigned operations);
bool check_case(const test_case *c, const test_engine *engine, unsigned operations);

/* Whether sequences of the case's length have the same bits alone and among forty. */
bool check_crowd(const test_case *c, const test_engine *engine, gdelta_operation operation);
/* Whether a hundred calls more on the GPU give the bits of the first. */
bool check_repeats(const test_case *c, const test_engine *engine, gdelta_operation operation);

#endif /* GDELTA_TESTS_COMPARE_H */
