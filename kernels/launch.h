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

/* Forward and step. Writes what of o, the final state and the checkpoints, the call's and `work`'s, is there. */
int gdelta_launch_recurrent_forward(const gdelta_forward_call *call, const gdelta_recurrent_work *work,
                                    gdelta_stream stream);

/* A step of at most 16 tokens that also leaves their states or their record, or follows a tree. */
int gdelta_launch_recurrent_draft(const gdelta_draft_call *call, gdelta_stream stream);

/* Replays a record. */
int gdelta_launch_recurrent_commit(const gdelta_commit_call *call, gdelta_stream stream);

/* Backward, from the checkpoints that a forward of the same inputs left in `work`. */
int gdelta_launch_recurrent_backward(const gdelta_backward_call *call, const gdelta_recurrent_work *work,
                                     gdelta_stream stream);

/* ---- Hopper engine ---- */

/* Scratch in device memory, from `prepare` (token-parallel) to `scan` (along the tokens). chunks =
 * gdelta_chunk_capacity. Tiles are 64 x 64 in the problem's type, 8192 bytes, in the order that the tensor cores read.
 */
typedef struct gdelta_hopper_work {
    int32_t *malformed; /* [1], as in gdelta_recurrent_work */
    float *rows;        /* [chunks, HO] row tables (chunk.cuh): what gate, beta and norm make of each token */
    void *x, *z;        /* [chunks, HO, 64, K] and [chunks, HO] lower triangles or tiles, as prepare.cu says */
    float *m, *n;       /* with segments. [N HO, segments - 1, K, K] and [.., V, K], as scan.cu says; backward, as
                           chains.cu says: the states' direction, then the gradients' */
    void *r;            /* backward, all three or none. [chunks, HO] tiles, as prepare.cu says */
    void *p, *l;        /* [chunks, HQ] tiles: lower(Q K^T) and strictly_lower(K K^T) */
    gdelta_hopper_choice choice;
} gdelta_hopper_work;

/* The tensors as the copy engine sees them: boxes of 64 tokens by 64 elements. `o` only if has_o: absent or
 * unaligned outputs and those in another type are stored without it. */
typedef struct gdelta_hopper_maps {
    gdelta_tensor_map q, k, v, o;
    int32_t has_o;
} gdelta_hopper_maps;

/* Forward of sm_90a: q, k, v of one 16-bit type, aligned to 16 bytes with strides that are multiples of 8. */
int gdelta_launch_hopper_forward(const gdelta_forward_call *call, const gdelta_hopper_work *work,
                                 const gdelta_hopper_maps *maps, gdelta_stream stream);

/* Scratch of a chunked backward: what prepare leaves, `l` included, then what the chains along the tokens leave for the
 * kernel that is parallel over chunks. 16-bit, in the order that the tensor cores read. */
typedef struct gdelta_hopper_backward_work {
    gdelta_hopper_work chunk;
    void *s;            /* [chunks, HO, V, K]: the state before each chunk */
    void *ds;           /* [chunks, HO, V, K]: the gradient of the state after it */
    void *w, *y;        /* [chunks, HO, 64, V]: what each token writes, over beta, and its gradient */
    double *parameters; /* [HO, chunks, 2]: parts of the gradients of A_log and dt_bias. NULL: neither is wanted */
    int32_t multiprocessors;
} gdelta_hopper_backward_work;

/* As gdelta_hopper_maps; `d_o` only where call.d_o is there. */
typedef struct gdelta_hopper_backward_maps {
    gdelta_tensor_map q, k, v, d_o;
} gdelta_hopper_backward_maps;

/* Backward of sm_90a: q, k, v, d_o as forward's inputs. Nothing that a forward left is needed. */
int gdelta_launch_hopper_backward(const gdelta_backward_call *call, const gdelta_hopper_backward_work *work,
                                  const gdelta_hopper_backward_maps *maps, gdelta_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* GDELTA_LAUNCH_H */
