/* Numbers in memory: load and store of bf16, fp16, fp32 and fp64 elements as doubles.
 *
 * A store rounds once, to nearest with ties to even, straight from the double: subnormals are kept, what is too large
 * becomes infinity, NaN becomes the quiet NaN of its sign. A load is exact. */
#ifndef GDELTA_CONVERT_H
#define GDELTA_CONVERT_H

#include <gdelta/gdelta.h>
#include <math.h>

/* A 16-bit float has a sign, 15 - mantissa exponent bits and mantissa bits: bf16 is 7, fp16 is 10. The smallest normal
 * number is 2^lowest. */
static inline int gdelta_half_lowest(int mantissa) {
    return 2 - (1 << (14 - mantissa));
}

static inline double gdelta_half_load(uint16_t bits, int mantissa) {
    int infinite = 0x7fff >> mantissa;
    int exponent = (bits & 0x7fff) >> mantissa;
    int fraction = bits & ((1 << mantissa) - 1);
    double value;
    if (exponent == infinite)
        value = fraction ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = scalbn(fraction, gdelta_half_lowest(mantissa) - mantissa);
    else
        value = scalbn(fraction + (1 << mantissa), gdelta_half_lowest(mantissa) - mantissa + exponent - 1);
    return bits & 0x8000 ? -value : value;
}

static inline uint16_t gdelta_half_store(double value, int mantissa) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    uint16_t infinity = (uint16_t)((0x7fff >> mantissa) << mantissa);
    if (isnan(value)) return (uint16_t)(sign | infinity | 1u << (mantissa - 1));
    double size = fabs(value);
    if (isinf(size)) return sign | infinity;
    int lowest = gdelta_half_lowest(mantissa);
    int exponent = size == 0 || ilogb(size) < lowest ? lowest : ilogb(size);
    /* The number in units of its last place. The leading 1 of a normal number adds 1 to the exponent field, and so does
     * a carry out of the rounding. */
    int64_t units = (int64_t)rint(scalbn(size, mantissa - exponent));
    int64_t bits = ((int64_t)(exponent - lowest) << mantissa) + units;
    return sign | (uint16_t)(bits < infinity ? bits : infinity);
}

static inline double gdelta_load(const void *data, gdelta_dtype dtype, int64_t index) {
    switch (dtype) {
        case GDELTA_DTYPE_BF16:
            return gdelta_half_load(((const uint16_t *)data)[index], 7);
        case GDELTA_DTYPE_FP16:
            return gdelta_half_load(((const uint16_t *)data)[index], 10);
        case GDELTA_DTYPE_FP32:
            return ((const float *)data)[index];
        default:
            return ((const double *)data)[index];
    }
}

static inline void gdelta_store(void *data, gdelta_dtype dtype, int64_t index, double value) {
    switch (dtype) {
        case GDELTA_DTYPE_BF16:
            ((uint16_t *)data)[index] = gdelta_half_store(value, 7);
            break;
        case GDELTA_DTYPE_FP16:
            ((uint16_t *)data)[index] = gdelta_half_store(value, 10);
            break;
        case GDELTA_DTYPE_FP32:
            ((float *)data)[index] = (float)value;
            break;
        default:
            ((double *)data)[index] = value;
    }
}

#endif /* GDELTA_CONVERT_H */
