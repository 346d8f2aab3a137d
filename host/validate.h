/* Every rule of gdelta.h, once: turns the caller's structs into the kernels' (kernels/args.h), or says which rule
 * broke. Pure host code; reads no device memory. */
#ifndef GDELTA_VALIDATE_H
#define GDELTA_VALIDATE_H

#include "kernels/args.h"

/* Where the pointers of a call point to. Host: the CPU reference, which also takes fp64, and whose tables are read and
 * checked here. */
typedef enum gdelta_place { GDELTA_PLACE_DEVICE, GDELTA_PLACE_HOST } gdelta_place;

gdelta_status gdelta_validate_problem(const gdelta_problem *problem, gdelta_place place, gdelta_shape *shape);

/* Whether this operation can be asked of this problem at all: a step, and its commit, has 1 to 16 tokens and a dense
 * layout, and a named engine has the operation. */
gdelta_status gdelta_validate_operation(const gdelta_problem *problem, const gdelta_shape *shape,
                                        gdelta_operation operation);

/* `problem` has passed gdelta_validate_problem, which made `shape`. On failure `call` holds nothing of use. */
gdelta_status gdelta_validate_forward(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                      const gdelta_forward_args *args, gdelta_forward_call *call);
gdelta_status gdelta_validate_backward(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                       const gdelta_backward_args *args, gdelta_backward_call *call);
/* A step is a forward whose final state is, by default, its initial state; with what it leaves of a draft. */
gdelta_status gdelta_validate_step(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                   const gdelta_step_args *args, gdelta_draft_call *call);
gdelta_status gdelta_validate_commit(const gdelta_problem *problem, const gdelta_shape *shape, gdelta_place place,
                                     const gdelta_commit_args *args, gdelta_commit_call *call);

#endif /* GDELTA_VALIDATE_H */
