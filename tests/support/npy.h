/* Arrays in NumPy's .npy files, versions 1 to 3: little-endian f2, f4, f8, i4, i8 in C order, at most 8 axes. */
#ifndef GDELTA_TESTS_NPY_H
#define GDELTA_TESTS_NPY_H

#include <gdelta/gdelta.h>
#include <stdbool.h>

enum { kNpyAxes = 8 };

typedef struct npy_array {
    gdelta_dtype dtype; /* fp16, fp32, fp64, int32 or int64 */
    int axes;
    int64_t shape[kNpyAxes];
    int64_t count; /* elements */
    void *data;
} npy_array;

/* False, with the file's name and the reason printed to stderr, if it cannot be read. */
bool npy_load(const char *path, npy_array *array);
void npy_free(npy_array *array);

double npy_get(const npy_array *array, int64_t index);

#endif /* GDELTA_TESTS_NPY_H */
