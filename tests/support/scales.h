/* The natural scale of results that are sums of products.
 *
 * Per token and output head, with P the state before the token, S the one after it, dS the gradient of S, e what the
 * token finds missing under its key, and a its decay (host/reference.c):
 *
 *     o     = scale S^T q                     dq    = scale S do
 *     dbeta = <dS^T k, e>                     dv    = beta dS^T k
 *     dk    = beta dS e - a P dv              da    = <dS, P> - <dv, P^T k>
 *
 * Each is a sum of many terms of either sign, so that chance may make one token's as small as it likes, and where keys
 * are alike it need not be chance: all that o has of the states is then one number, <q, k>, and the two sums of the
 * last two gradients nearly cancel. Rounding does not follow: it changes each factor by a part of its own size, and so
 * the sum by that part of the root of the sum of the squares of its terms, the natural scale, however small the sum
 * came out. (A bound of a dot product's error likewise has |x| and |y| in it, not <x, y>.) Where nothing cancels the
 * scale is about the result itself. Terms are the products above; of the first sum of da, of the gradient of a P,
 * which holds what the second subtracts in whole rows. (dS^T k)_v is such a sum too, of the rounded dS, and counts
 * as no smaller than its own scale. A shared head's gradient adds the squares of its group. Gradients of what gate and
 * beta are made of, of rows before their norm, and of the parameters, have the scale times the chain's factor. A
 * parameter's is summed over tokens: linearly within a chunk of 64, whose tokens share the rounded state, else as
 * squares. */
#ifndef GDELTA_TESTS_SCALES_H
#define GDELTA_TESTS_SCALES_H

#include "case.h"

#define SCALED_ROLES \
    (ROLE(kO) | ROLE(kDQ) | ROLE(kDK) | ROLE(kDV) | ROLE(kDG) | ROLE(kDBeta) | ROLE(kDALog) | ROLE(kDDtBias))

/* Makes an instance whose results of these roles, as far as x has them, hold their natural scale: from a replay of x's
 * inputs in fp64. */
void scales_create(instance *scales, const instance *x);

#endif /* GDELTA_TESTS_SCALES_H */
