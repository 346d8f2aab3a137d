/* The format: "\x93NUMPY", major and minor version, the header's length (2 bytes in version 1, else 4), and the header,
 * a Python dictionary such as {'descr': '<f4', 'fortran_order': False, 'shape': (65, 2), }. Then the elements. */
#include "npy.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host/convert.h"
#include "host/layout.h"

static bool fail(const char *path, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s: ", path);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return false;
}

static const struct {
    const char *name;
    gdelta_dtype dtype;
} types[] = {{"'<f2'", GDELTA_DTYPE_FP16},
             {"'<f4'", GDELTA_DTYPE_FP32},
             {"'<f8'", GDELTA_DTYPE_FP64},
             {"'<i4'", GDELTA_DTYPE_INT32},
             {"'<i8'", GDELTA_DTYPE_INT64}};

/* Where the value of a key starts; NULL if the header has no such key. */
static const char *value_of(const char *header, const char *key) {
    const char *at = strstr(header, key);
    if (!at) return NULL;
    at += strlen(key);
    return at + strspn(at, ": ");
}

static bool parse_shape(const char *path, const char *at, npy_array *array) {
    array->count = 1;
    if (*at++ != '(') return fail(path, "the header's 'shape' is not a tuple");
    for (;;) {
        at += strspn(at, ", ");
        if (*at == ')') return true;
        char *end;
        errno = 0;
        long long extent = strtoll(at, &end, 10);
        if (end == at || errno || extent < 0) return fail(path, "the header's 'shape' has a bad extent at \"%s\"", at);
        if (array->axes == kNpyAxes) return fail(path, "the array has more than %d axes", kNpyAxes);
        array->shape[array->axes++] = extent;
        if (__builtin_mul_overflow(array->count, (int64_t)extent, &array->count))
            return fail(path, "the array passes 2^63 elements");
        at = end;
    }
}

static bool parse_header(const char *path, const char *header, npy_array *array) {
    const char *descr = value_of(header, "'descr'"), *order = value_of(header, "'fortran_order'"),
               *shape = value_of(header, "'shape'");
    if (!descr || !order || !shape) return fail(path, "the header lacks 'descr', 'fortran_order' or 'shape'");
    for (size_t i = 0; i < sizeof types / sizeof *types; ++i)
        if (strncmp(descr, types[i].name, strlen(types[i].name)) == 0) array->dtype = types[i].dtype;
    if (!array->dtype)
        return fail(path, "the element type is %.*s; it must be '<f2', '<f4', '<f8', '<i4' or '<i8'",
                    (int)strcspn(descr, ","), descr);
    if (strncmp(order, "False", 5) != 0)
        return fail(path, "the array is in Fortran order; save numpy.ascontiguousarray of it");
    return parse_shape(path, shape, array);
}

static bool load(const char *path, FILE *file, npy_array *array) {
    unsigned char start[12];
    char header[65536];
    if (fread(start, 1, 10, file) != 10 || memcmp(start, "\x93NUMPY", 6) != 0) return fail(path, "not a .npy file");
    if (start[6] < 1 || start[6] > 3) return fail(path, ".npy version %d; 1 to 3 are known", start[6]);
    size_t length = start[8] | (size_t)start[9] << 8;
    if (start[6] > 1) {
        if (fread(start + 10, 1, 2, file) != 2) return fail(path, "the file ends within its header");
        length |= (size_t)start[10] << 16 | (size_t)start[11] << 24;
    }
    if (length >= sizeof header) return fail(path, "the header has %zu bytes; more than 65535 are not read", length);
    if (fread(header, 1, length, file) != length) return fail(path, "the file ends within its header");
    header[length] = '\0';
    if (!parse_header(path, header, array)) return false;

    size_t size = gdelta_dtype_size(array->dtype), bytes;
    if (__builtin_mul_overflow((size_t)array->count, size, &bytes) || !(array->data = malloc(bytes + 1)))
        return fail(path, "no memory for %lld elements", (long long)array->count);
    if (fread(array->data, 1, bytes, file) != bytes || fgetc(file) != EOF)
        return fail(path, "the file does not hold exactly the %lld elements of its shape", (long long)array->count);
    return true;
}

bool npy_load(const char *path, npy_array *array) {
    memset(array, 0, sizeof *array);
    FILE *file = fopen(path, "rb");
    if (!file) return fail(path, "%s", strerror(errno));
    bool good = load(path, file, array);
    fclose(file);
    if (!good) npy_free(array);
    return good;
}

void npy_free(npy_array *array) {
    free(array->data);
    memset(array, 0, sizeof *array);
}

double npy_get(const npy_array *array, int64_t index) {
    switch (array->dtype) {
        case GDELTA_DTYPE_INT32:
            return ((const int32_t *)array->data)[index];
        case GDELTA_DTYPE_INT64:
            return (double)((const int64_t *)array->data)[index];
        default:
            return gdelta_load(array->data, array->dtype, index);
    }
}
