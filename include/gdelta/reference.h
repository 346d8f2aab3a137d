/* The gated delta rule on the CPU: the token recurrence and its adjoint in double precision, written to be believed at
 * a glance. The same structs and the same validation as gdelta.h, with these differences:
 *
 *   - every pointer is a host pointer, cu_seqlens.data and slots.data included; device_status is a host word, and a
 *     malformed table is an error with a sentence, because it can be read;
 *   - tensors may be GDELTA_DTYPE_FP64, and every output may also be fp32 or fp64 whatever the problem's dtype, so that
 *     an error against it is not the rounding of its own result;
 *   - any K and V; no plan, workspace or stream; problem.engine, save_mode, compute_capability and multiprocessors do
 * not matter; `saved` must be NULL;
 *   - independent sequences and heads run in threads where the library was built with OpenMP. The bits do not depend on
 *     the number of threads.
 *
 * Statuses: INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY; gdelta_last_error() holds the sentence. On an error nothing
 * is written. */
#ifndef GDELTA_REFERENCE_H
#define GDELTA_REFERENCE_H

#include <gdelta/gdelta.h>

#ifdef __cplusplus
extern "C" {
#endif

/* o and the final state; see gdelta_forward. */
GDELTA_API gdelta_status gdelta_reference_forward(const gdelta_problem *problem, const gdelta_forward_args *args);

/* All gradients; see gdelta_backward. Keeps every state of one sequence and head: (T + 1) K V doubles a thread. */
GDELTA_API gdelta_status gdelta_reference_backward(const gdelta_problem *problem, const gdelta_backward_args *args);

/* T tokens on each state; see gdelta_step. */
GDELTA_API gdelta_status gdelta_reference_step(const gdelta_problem *problem, const gdelta_step_args *args);

/* The accepted tokens of a record; see gdelta_commit. Bit for bit the step's states if the record is fp64. */
GDELTA_API gdelta_status gdelta_reference_commit(const gdelta_problem *problem, const gdelta_commit_args *args);

#ifdef __cplusplus
}
#endif

#endif /* GDELTA_REFERENCE_H */
