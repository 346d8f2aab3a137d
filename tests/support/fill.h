/* Numbers for tests: a random number is a pure function of a key, and the key of the place in the problem that it
 * fills. So a tensor holds the same numbers in every layout, packed or not, whole or cut. */
#ifndef GDELTA_TESTS_FILL_H
#define GDELTA_TESTS_FILL_H

#include <gdelta/gdelta.h>
#include <stdint.h>

/* What a place is: which tensor, sequence, token (or row of K), head, element. */
uint64_t fill_key(uint64_t seed, int64_t tensor, int64_t sequence, int64_t row, int64_t head, int64_t element);

double fill_uniform(uint64_t key); /* in (0, 1) */
double fill_normal(uint64_t key);  /* mean 0, variance 1 */

/* The nearest number of a dtype. */
double fill_round(gdelta_dtype dtype, double value);

#endif /* GDELTA_TESTS_FILL_H */
