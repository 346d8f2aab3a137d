/* The natural scale of gradients that are sums of products.
 *
 * Per token and output head, with P the state before the token, dS the gradient of the state after it, e what the token
 * finds missing under its key, and dS~ = dS - beta k (dS^T k)^T (host/reference.c):
 *
 *     dbeta = sum over v of (dS^T k)_v e_v           d log decay = a sum over k, v of dS~_kv P_kv
 *
 * Both are sums of many terms of either sign, so that chance may make one token's as small as it likes. Rounding does
 * not follow: it changes each factor by a part of its own size, and so the sum by that part of the root of the sum of
 * the squares of its terms, the natural scale, however small the sum came out. (A bound of a dot product's error
 * likewise has |x| and |y| in it, not <x, y>.) Where nothing cancels by chance the scale is about the gradient itself.
 * (dS^T k)_v is such a sum too, of the rounded dS, and counts as no smaller than its own scale. Gradients of what gate
 * and beta are made of, and of the parameters, have the scale times the chain's factor. A parameter's is summed over
 * tokens: linearly within a chunk of 64, whose tokens share the rounded state, else as squares. */
#ifndef GDELTA_TESTS_SCALES_H
#define GDELTA_TESTS_SCALES_H

#include "case.h"

/* Makes an instance whose dg, dbeta, da_log and ddt_bias, as far as x has them, hold their natural scale: from a replay
 * of x's inputs in fp64. */
void scales_create(instance *scales, const instance *x);

#endif /* GDELTA_TESTS_SCALES_H */
