/* What crosses from the host layer to the kernels: plain data, C11 and CUDA. Every rule of gdelta.h has been checked
 * and every default filled in before one of these exists; kernels check only what the host cannot see, the contents of
 * tables on the device. dtypes and modes are the constants of gdelta.h. Strides are in elements. */
#ifndef GDELTA_ARGS_H
#define GDELTA_ARGS_H

#include <gdelta/gdelta.h>

#ifdef __cplusplus
#define _Alignas(bytes) alignas(bytes)
#endif

/* A token tensor: element (b, t, h, d) is data[b * batch + t * token + h * head + d]. NULL: absent. */
typedef struct gdelta_view {
    void *data;
    int64_t batch, token, head;
    gdelta_dtype dtype;
} gdelta_view;

/* A table of int32 or int64. NULL: absent. */
typedef struct gdelta_table {
    const void *data;
    int32_t is_int64;
} gdelta_table;

/* States: head h of entry s starts at data[s * slot + h * head] and is a contiguous [K, V], or [V, K] if order says so.
 */
typedef struct gdelta_state_view {
    void *data;
    int64_t slot, head;
    gdelta_dtype dtype;
    gdelta_state_order order;
    gdelta_table slots;
    int64_t slot_count;
} gdelta_state_view;

/* A CUtensorMap: how the copy engine (TMA) sees a token tensor. Made by host/tensor_map.c. */
typedef struct gdelta_tensor_map {
    _Alignas(64) unsigned char bytes[128];
} gdelta_tensor_map;

/* Sizes and arithmetic. Sequence n has rows [cu_seqlens[n], cu_seqlens[n + 1]) of batch 0 if packed, else the rows
 * [0, tokens) of batch n. */
typedef struct gdelta_shape {
    int64_t sequences; /* N */
    int64_t tokens;    /* T; packed: the longest sequence allowed */
    int64_t rows;      /* token rows in all: packed total_tokens, else N * T */
    int32_t packed;
    int32_t heads_q, heads_k, heads_v, heads_o;
    int32_t dim_k, dim_v;
    gdelta_head_map head_map;
    gdelta_l2norm l2norm;
    gdelta_gate gate;
    gdelta_beta beta;
    double scale, l2norm_eps;
} gdelta_shape;

/* What every operation reads. */
typedef struct gdelta_inputs {
    gdelta_view q, k, v, g, beta;
    gdelta_view a_log, dt_bias; /* [HO]: only head counts */
    gdelta_state_view initial;
    const uint8_t *has_initial;
    gdelta_table cu_seqlens;
    uint64_t *device_status;
} gdelta_inputs;

/* Forward and step. */
typedef struct gdelta_forward_call {
    gdelta_shape shape;
    gdelta_inputs in;
    gdelta_view o;
    gdelta_state_view final;
    gdelta_state_view checkpoints; /* by checkpoint number, see gdelta.h; its slots too */
    int64_t checkpoint_interval;   /* a multiple of 64, if there are checkpoints */
} gdelta_forward_call;

/* What tokens do to the state: fp32; fp64 too on the host. */
typedef struct gdelta_record_view {
    gdelta_view k, u, decay;
} gdelta_record_view;

/* A step whose tokens are a draft. */
typedef struct gdelta_draft_call {
    gdelta_forward_call step;
    gdelta_state_view token_states; /* entry n * T + t; its slots too */
    gdelta_record_view record;
    gdelta_table parents; /* [N, T] */
} gdelta_draft_call;

typedef struct gdelta_commit_call {
    gdelta_shape shape;
    gdelta_inputs in; /* the initial state and the status word alone */
    gdelta_record_view record;
    gdelta_table accepted, parents; /* [N], [N, T] */
    gdelta_state_view final;
} gdelta_commit_call;

typedef struct gdelta_backward_call {
    gdelta_shape shape;
    gdelta_inputs in;
    gdelta_view d_o;
    gdelta_state_view d_final;
    gdelta_view dq, dk, dv, dg, dbeta;
    gdelta_view da_log, ddt_bias; /* [HO], fp32 */
    gdelta_state_view d_initial;
    int32_t accumulate_parameters;
} gdelta_backward_call;

/* What the plan chose for the kernels along the chunks, of forward or of backward. */
typedef struct gdelta_hopper_choice {
    int32_t split_v;  /* blocks along V: 1, or 2 where one block a head would leave multiprocessors idle */
    int32_t segments; /* pieces that every sequence is cut into; 1: none */
} gdelta_hopper_choice;

#endif /* GDELTA_ARGS_H */
