#include "fill.h"

#include <math.h>

#include "host/convert.h"

/* The finalizer of splitmix64. */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t fill_key(uint64_t seed, int64_t tensor, int64_t sequence, int64_t row, int64_t head, int64_t element) {
    uint64_t key = mix(seed ^ mix((uint64_t)tensor));
    key = mix(key ^ (uint64_t)sequence);
    key = mix(key ^ (uint64_t)row);
    key = mix(key ^ (uint64_t)head);
    return mix(key ^ (uint64_t)element);
}

double fill_uniform(uint64_t key) {
    return ((double)(key >> 11) + 0.5) * 0x1p-53;
}

/* Box and Muller. */
double fill_normal(uint64_t key) {
    const double two_pi = 6.283185307179586;
    return sqrt(-2 * log(fill_uniform(key))) * cos(two_pi * fill_uniform(mix(key)));
}

double fill_round(gdelta_dtype dtype, double value) {
    union {
        uint16_t half;
        float single;
        double full;
    } element;
    gdelta_store(&element, dtype, 0, value);
    return gdelta_load(&element, dtype, 0);
}
