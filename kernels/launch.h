/* The host layer's only way to the kernels. Each enqueues on the stream of the current device and returns the CUDA
 * runtime's error code, 0 for success. */
#ifndef GDELTA_LAUNCH_H
#define GDELTA_LAUNCH_H

#include "kernels/args.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Scratch of the recurrent engine, in device memory. R = rows, tiles = gdelta_backward_tiles. */
typedef struct gdelta_recurrent_work {
    int32_t *malformed; /* [1]: cu_seqlens broke a rule, so nothing may be written. Packed only, else NULL */
    float *checkpoints; /* [R / 64, HO, K, V]: states after every 64 tokens of a sequence. NULL: not wanted */
    float *dq, *dk;     /* [R, HO, tiles, K]: parts of dq and dk, before the norm */
    float *dv;          /* [R, HO, V]: parts of dv where heads share it, else NULL */
    float *ddecay;      /* [HO, tiles, R]: parts of the gradient of exp(g) */
    float *dbeta;       /* [HO, tiles, R]: parts of the gradient of beta */
} gdelta_recurrent_work;

/* Forward and step. Writes what of o, the final state and the checkpoints is there. */
int gdelta_launch_recurrent_forward(const gdelta_forward_call *call, const gdelta_recurrent_work *work,
                                    gdelta_stream stream);

/* Backward, from the checkpoints that a forward of the same inputs left in `work`. */
int gdelta_launch_recurrent_backward(const gdelta_backward_call *call, const gdelta_recurrent_work *work,
                                     gdelta_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* GDELTA_LAUNCH_H */
