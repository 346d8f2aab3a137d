/* The gated delta rule token by token, and its adjoint, in double precision on the CPU.
 *
 * Forward, for one sequence and output head; a is the decay, S before the token is P:
 *
 *     S~ = a P
 *     e  = v - S~^T k
 *     S  = S~ + beta k e^T
 *     o  = scale S^T q
 *
 * Backward, with dS arriving from the tokens after this one:
 *
 *     dS   += scale q do^T            dq    = scale S do
 *     du    = dS^T k                  dbeta = <du, e>,  dv = beta du
 *     dS~   = dS - k dv^T             dk    = beta dS e - S~ dv
 *     dP    = a dS~                   da    = <dS~, P>
 *
 * q and k are the normalised rows. The chains through norm, gate and beta, and the sums over the output heads that
 * share a head, come last, in head order, from a double for every output head: so no bit depends on the number of
 * threads. */
#include <gdelta/reference.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "host/convert.h"
#include "host/layout.h"
#include "host/status.h"
#include "host/validate.h"

/* ---- Where things are ------------------------------------------------------------------------------------------- */

/* The tokens of one sequence: rows first .. first + length - 1 of a batch. Their numbers in a buffer of
 * gdelta_shape.rows rows begin at `flat`. */
typedef struct span {
    int64_t batch, first, length, flat;
} span;

static int64_t table_at(const gdelta_table *table, int64_t index) {
    return table->is_int64 ? ((const int64_t *)table->data)[index] : ((const int32_t *)table->data)[index];
}

static span tokens_of(const gdelta_shape *shape, const gdelta_inputs *in, int64_t sequence) {
    if (!shape->packed) return (span){sequence, 0, shape->tokens, sequence * shape->tokens};
    int64_t first = table_at(&in->cu_seqlens, sequence);
    return (span){0, first, table_at(&in->cu_seqlens, sequence + 1) - first, first};
}

static int64_t longest(const gdelta_shape *shape, const gdelta_inputs *in) {
    int64_t most = 0;
    for (int64_t n = 0; n < shape->sequences; n++) {
        int64_t length = tokens_of(shape, in, n).length;
        if (length > most) most = length;
    }
    return most;
}

static int64_t head_of(const gdelta_shape *shape, int64_t output_head, int64_t heads) {
    return shape->head_map == GDELTA_HEADS_TILED ? output_head % heads : output_head * heads / shape->heads_o;
}

static int64_t offset(const gdelta_view *x, span rows, int64_t token, int64_t head) {
    return rows.batch * x->batch + (rows.first + token) * x->token + head * x->head;
}

static double scalar(const gdelta_view *x, span rows, int64_t token, int64_t head) {
    return gdelta_load(x->data, x->dtype, offset(x, rows, token, head));
}

static void read_row(const gdelta_view *x, span rows, int64_t token, int64_t head, int64_t size, double *row) {
    int64_t start = offset(x, rows, token, head);
    for (int64_t d = 0; d < size; d++) row[d] = gdelta_load(x->data, x->dtype, start + d);
}

static void write_row(const gdelta_view *x, span rows, int64_t token, int64_t head, int64_t size, const double *row) {
    int64_t start = offset(x, rows, token, head);
    for (int64_t d = 0; d < size; d++) gdelta_store(x->data, x->dtype, start + d, row[d]);
}

/* ---- States ----------------------------------------------------------------------------------------------------- */

/* `number`: of the sequence, where each has one state. */
static int64_t entry_of(const gdelta_state_view *state, int64_t number) {
    return state->slots.data ? table_at(&state->slots, number) : number;
}

static int skips(const gdelta_state_view *state, int64_t sequence) {
    return state->data && entry_of(state, sequence) < 0;
}

static int starts_from_zeros(const gdelta_inputs *in, int64_t sequence) {
    return !in->initial.data || (in->has_initial && !in->has_initial[sequence]);
}

static int64_t state_offset(const gdelta_shape *shape, const gdelta_state_view *state, int64_t number, int64_t head,
                            int64_t i, int64_t j) {
    int64_t inner = state->order == GDELTA_STATE_KV ? i * shape->dim_v + j : j * shape->dim_k + i;
    return entry_of(state, number) * state->slot + head * state->head + inner;
}

static void read_state(const gdelta_shape *shape, const gdelta_state_view *state, int64_t number, int64_t head,
                       double *s) {
    for (int64_t i = 0; i < shape->dim_k; i++)
        for (int64_t j = 0; j < shape->dim_v; j++)
            *s++ = gdelta_load(state->data, state->dtype, state_offset(shape, state, number, head, i, j));
}

static void write_state(const gdelta_shape *shape, const gdelta_state_view *state, int64_t number, int64_t head,
                        const double *s) {
    for (int64_t i = 0; i < shape->dim_k; i++)
        for (int64_t j = 0; j < shape->dim_v; j++)
            gdelta_store(state->data, state->dtype, state_offset(shape, state, number, head, i, j), *s++);
}

/* One of several states of a sequence: -1 does not store it. */
static void keep_state(const gdelta_shape *shape, const gdelta_state_view *state, int64_t number, int64_t head,
                       const double *s) {
    if (state->data && entry_of(state, number) >= 0) write_state(shape, state, number, head, s);
}

/* Element by element without a conversion, so that a NaN keeps its payload. In place it changes nothing. */
static void copy_state(const gdelta_shape *shape, const gdelta_state_view *from, const gdelta_state_view *to,
                       int64_t sequence, int64_t head) {
    size_t size = gdelta_dtype_size(to->dtype);
    for (int64_t i = 0; i < shape->dim_k; i++)
        for (int64_t j = 0; j < shape->dim_v; j++)
            memmove((char *)to->data + (size_t)state_offset(shape, to, sequence, head, i, j) * size,
                    (const char *)from->data + (size_t)state_offset(shape, from, sequence, head, i, j) * size, size);
}

static void read_initial_state(const gdelta_shape *shape, const gdelta_inputs *in, int64_t sequence, int64_t head,
                               double *s) {
    if (starts_from_zeros(in, sequence))
        memset(s, 0, (size_t)shape->dim_k * (size_t)shape->dim_v * sizeof *s);
    else
        read_state(shape, &in->initial, sequence, head, s);
}

/* ---- Norm, gate and beta ---------------------------------------------------------------------------------------- */

static double dot(const double *x, const double *y, int64_t size) {
    double sum = 0;
    for (int64_t d = 0; d < size; d++) sum += x[d] * y[d];
    return sum;
}

/* The r of y = r x. */
static double norm_factor(const gdelta_shape *shape, const double *x) {
    double sum = dot(x, x, shape->dim_k);
    switch (shape->l2norm) {
        case GDELTA_L2NORM_ADD_EPS:
            return 1 / sqrt(sum + shape->l2norm_eps);
        case GDELTA_L2NORM_MAX_EPS:
            return 1 / sqrt(fmax(sum, shape->l2norm_eps));
        default:
            return 1;
    }
}

static void read_normalised(const gdelta_shape *shape, const gdelta_view *x, span rows, int64_t token, int64_t head,
                            double *y) {
    read_row(x, rows, token, head, shape->dim_k, y);
    double r = norm_factor(shape, y);
    for (int64_t d = 0; d < shape->dim_k; d++) y[d] *= r;
}

/* d holds dy and becomes dx = r (dy - y <y, dy>); where r does not depend on x, dx = r dy. */
static void norm_backward(const gdelta_shape *shape, const double *x, double *d) {
    double r = norm_factor(shape, x);
    int varies = shape->l2norm == GDELTA_L2NORM_ADD_EPS ||
                 (shape->l2norm == GDELTA_L2NORM_MAX_EPS && dot(x, x, shape->dim_k) > shape->l2norm_eps);
    double along = varies ? r * r * dot(x, d, shape->dim_k) : 0;
    for (int64_t i = 0; i < shape->dim_k; i++) d[i] = r * (d[i] - along * x[i]);
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

/* A gate in parts: decay = exp(log) with log = -rate softplus(x), as far as the mode has them. */
typedef struct gate {
    double decay, log, rate, x;
} gate;

static gate read_gate(const gdelta_shape *shape, const gdelta_inputs *in, span rows, int64_t token, int64_t head) {
    gate gate = {.decay = 1};
    if (!in->g.data) return gate;
    double g = scalar(&in->g, rows, token, head);
    if (shape->gate == GDELTA_GATE_LINEAR) {
        gate.decay = g;
        return gate;
    }
    gate.log = g;
    if (shape->gate == GDELTA_GATE_SOFTPLUS) {
        gate.rate = exp(gdelta_load(in->a_log.data, in->a_log.dtype, head * in->a_log.head));
        gate.x = g;
        if (in->dt_bias.data) gate.x += gdelta_load(in->dt_bias.data, in->dt_bias.dtype, head * in->dt_bias.head);
        gate.log = -gate.rate * (gate.x > 20 ? gate.x : log1p(exp(gate.x)));
    }
    gate.decay = exp(gate.log);
    return gate;
}

static double read_beta(const gdelta_shape *shape, const gdelta_inputs *in, span rows, int64_t token, int64_t head) {
    if (!in->beta.data) return 1;
    double beta = scalar(&in->beta, rows, token, head);
    if (shape->beta == GDELTA_BETA_VALUE) return beta;
    return (shape->beta == GDELTA_BETA_TWO_SIGMOID ? 2 : 1) * sigmoid(beta);
}

/* The derivative of read_beta by what the tensor holds. */
static double beta_slope(const gdelta_shape *shape, double b) {
    if (shape->beta == GDELTA_BETA_VALUE) return 1;
    return (shape->beta == GDELTA_BETA_TWO_SIGMOID ? 2 : 1) * sigmoid(b) * sigmoid(-b);
}

/* ---- Memory and threads ----------------------------------------------------------------------------------------- */

/* `count` doubles, all 0; NULL if there is no such memory. The product of sizes is taken by the caller in a double,
 * which cannot overflow and is exact as far as any memory goes. */
static double *zeros(double count) {
    return count < 0x1p53 ? calloc((size_t)count + 1, sizeof(double)) : NULL;
}

static int threads_for(double tasks) {
#ifdef _OPENMP
    int most = omp_get_max_threads();
    return tasks < most ? (int)fmax(tasks, 1) : most;
#else
    (void)tasks;
    return 1;
#endif
}

static int this_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* What a token of one output head reads, as doubles. */
typedef struct token {
    double *q, *k, *v;
    double decay, beta;
} token;

static double token_size(const gdelta_shape *shape) {
    return 2.0 * shape->dim_k + shape->dim_v;
}

static token token_in(const gdelta_shape *shape, double *memory) {
    return (token){.q = memory, .k = memory + shape->dim_k, .v = memory + 2 * (int64_t)shape->dim_k};
}

static void read_token(const gdelta_shape *shape, const gdelta_inputs *in, span rows, int64_t t, int64_t head,
                       token *token) {
    read_normalised(shape, &in->q, rows, t, head_of(shape, head, shape->heads_q), token->q);
    read_normalised(shape, &in->k, rows, t, head_of(shape, head, shape->heads_k), token->k);
    read_row(&in->v, rows, t, head_of(shape, head, shape->heads_v), shape->dim_v, token->v);
    token->decay = read_gate(shape, in, rows, t, head).decay;
    token->beta = read_beta(shape, in, rows, t, head);
}

/* ---- Forward ---------------------------------------------------------------------------------------------------- */

/* From the state `before` a token to the state `after` it, which may be the same memory. `error` is e. */
static void update(const gdelta_shape *shape, const token *token, const double *before, double *after, double *error) {
    int64_t rows = shape->dim_k, columns = shape->dim_v;
    for (int64_t j = 0; j < columns; j++) error[j] = token->v[j];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            after[i * columns + j] = token->decay * before[i * columns + j];
            error[j] -= token->k[i] * after[i * columns + j];
        }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) after[i * columns + j] += token->k[i] * (token->beta * error[j]);
}

/* o = scale S^T q */
static void read_out(const gdelta_shape *shape, const token *token, const double *s, double *o) {
    for (int64_t j = 0; j < shape->dim_v; j++) o[j] = 0;
    for (int64_t i = 0; i < shape->dim_k; i++)
        for (int64_t j = 0; j < shape->dim_v; j++) o[j] += shape->scale * token->q[i] * s[i * shape->dim_v + j];
}

static double forward_scratch(const gdelta_shape *shape) {
    return (double)shape->dim_k * shape->dim_v + 2.0 * shape->dim_v + token_size(shape);
}

/* The state after this many tokens, a multiple of the interval. */
static int64_t checkpoint_number(const gdelta_forward_call *call, span rows, int64_t tokens) {
    int64_t interval = call->checkpoint_interval;
    int64_t first = call->shape.packed ? rows.first / interval : rows.batch * (call->shape.tokens / interval);
    return first + tokens / interval - 1;
}

static int64_t parent_of(const gdelta_shape *shape, const gdelta_table *parents, int64_t sequence, int64_t t) {
    return parents->data ? table_at(parents, sequence * shape->tokens + t) : t - 1;
}

/* The state after token `last` of a tree, from the root on. */
static void follow_path(const gdelta_forward_call *call, const gdelta_table *parents, int64_t sequence, int64_t head,
                        int64_t last, token *token, double *s, double *error) {
    if (last < 0) {
        read_initial_state(&call->shape, &call->in, sequence, head, s);
        return;
    }
    follow_path(call, parents, sequence, head, parent_of(&call->shape, parents, sequence, last), token, s, error);
    read_token(&call->shape, &call->in, tokens_of(&call->shape, &call->in, sequence), last, head, token);
    update(&call->shape, token, s, s, error);
}

/* Output heads that share a key write the same one: the first of them does. */
static int reads_first(const gdelta_shape *shape, int64_t head, int64_t heads) {
    for (int64_t h = 0; h < head; h++) {
        if (head_of(shape, h, heads) == head_of(shape, head, heads)) return 0;
    }
    return 1;
}

static void write_record(const gdelta_shape *shape, const gdelta_record_view *record, span rows, int64_t t,
                         int64_t head, const token *token, const double *error) {
    int64_t u = offset(&record->u, rows, t, head), decay = offset(&record->decay, rows, t, head);
    if (reads_first(shape, head, shape->heads_k))
        write_row(&record->k, rows, t, head_of(shape, head, shape->heads_k), shape->dim_k, token->k);
    for (int64_t j = 0; j < shape->dim_v; j++)
        gdelta_store(record->u.data, record->u.dtype, u + j, token->beta * error[j]);
    gdelta_store(record->decay.data, record->decay.dtype, decay, token->decay);
}

static void forward_head(const gdelta_draft_call *draft, int64_t sequence, int64_t head, double *scratch) {
    const gdelta_forward_call *call = &draft->step;
    const gdelta_shape *shape = &call->shape;
    span rows = tokens_of(shape, &call->in, sequence);
    double *s = scratch, *o = s + (int64_t)shape->dim_k * shape->dim_v, *error = o + shape->dim_v;
    token token = token_in(shape, error + shape->dim_v);

    if (skips(&call->in.initial, sequence) || skips(&call->final, sequence)) {
        for (int64_t j = 0; j < shape->dim_v; j++) o[j] = 0;
        for (int64_t t = 0; call->o.data && t < rows.length; t++) write_row(&call->o, rows, t, head, shape->dim_v, o);
        return;
    }
    if (rows.length == 0 && call->final.data && !starts_from_zeros(&call->in, sequence) &&
        call->in.initial.dtype == call->final.dtype) {
        copy_state(shape, &call->in.initial, &call->final, sequence, head);
        return;
    }
    read_initial_state(shape, &call->in, sequence, head, s);
    for (int64_t t = 0; t < rows.length; t++) {
        if (draft->parents.data) {
            follow_path(call, &draft->parents, sequence, head, parent_of(shape, &draft->parents, sequence, t), &token,
                        s, error);
        }
        read_token(shape, &call->in, rows, t, head, &token);
        update(shape, &token, s, s, error);
        if (draft->record.u.data) write_record(shape, &draft->record, rows, t, head, &token, error);
        keep_state(shape, &draft->token_states, sequence * shape->tokens + t, head, s);
        if (call->checkpoints.data && (t + 1) % call->checkpoint_interval == 0)
            keep_state(shape, &call->checkpoints, checkpoint_number(call, rows, t + 1), head, s);
        if (!call->o.data) continue;
        read_out(shape, &token, s, o);
        write_row(&call->o, rows, t, head, shape->dim_v, o);
    }
    if (call->final.data) write_state(shape, &call->final, sequence, head, s);
}

/* Forward, step and draft. */
static gdelta_status forward(const gdelta_draft_call *draft) {
    const gdelta_forward_call *call = &draft->step;
    int64_t heads = call->shape.heads_o, tasks = call->shape.sequences * heads;
    int threads = threads_for((double)tasks);
    double size = forward_scratch(&call->shape);
    double *scratch = zeros(threads * size);
    if (!scratch)
        return gdelta_fail(GDELTA_ERROR_OUT_OF_MEMORY,
                           "the reference needs %.0f bytes of host memory, one state for each of %d threads",
                           threads * size * (double)sizeof(double), threads);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(dynamic)
#endif
    for (int64_t task = 0; task < tasks; task++)
        forward_head(draft, task / heads, task % heads, scratch + this_thread() * (int64_t)size);
    free(scratch);
    return GDELTA_OK;
}

/* ---- Commit ----------------------------------------------------------------------------------------------------- */

/* The tokens from the root to `last`, from their record. */
static void replay(const gdelta_commit_call *call, int64_t sequence, int64_t head, int64_t last, double *s, double *k,
                   double *u) {
    const gdelta_shape *shape = &call->shape;
    if (last < 0) return;
    replay(call, sequence, head, parent_of(shape, &call->parents, sequence, last), s, k, u);
    span rows = tokens_of(shape, &call->in, sequence);
    double decay = scalar(&call->record.decay, rows, last, head);
    read_row(&call->record.k, rows, last, head_of(shape, head, shape->heads_k), shape->dim_k, k);
    read_row(&call->record.u, rows, last, head, shape->dim_v, u);
    for (int64_t i = 0; i < shape->dim_k; i++)
        for (int64_t j = 0; j < shape->dim_v; j++, s++) *s = decay * *s + k[i] * u[j];
}

static gdelta_status commit(const gdelta_commit_call *call) {
    const gdelta_shape *shape = &call->shape;
    int64_t states = (int64_t)shape->dim_k * shape->dim_v;
    double *s = zeros((double)states + shape->dim_k + shape->dim_v);
    if (!s) return gdelta_fail(GDELTA_ERROR_OUT_OF_MEMORY, "the reference has no host memory for one state");
    for (int64_t n = 0; n < shape->sequences; n++)
        for (int64_t head = 0; head < shape->heads_o; head++) {
            if (skips(&call->in.initial, n) || skips(&call->final, n)) continue;
            read_initial_state(shape, &call->in, n, head, s);
            replay(call, n, head, table_at(&call->accepted, n) - 1, s, s + states, s + states + shape->dim_k);
            write_state(shape, &call->final, n, head, s);
        }
    free(s);
    return GDELTA_OK;
}

/* ---- Backward --------------------------------------------------------------------------------------------------- */

/* Gradients for every token row and output head, before norm, gate and beta: [rows, HO, K], [rows, HO, V], [rows, HO].
 * Rows of skipped sequences stay 0. */
typedef struct gradients {
    double *dq, *dk, *dv, *ddecay, *dbeta;
} gradients;

/* One token of the adjoint. On entry ds is the gradient of the state after the token, on return of the one before.
 * d_o is NULL where there is none; du is scratch. The sums over the state run along its rows. */
static void token_backward(const gdelta_shape *shape, const token *token, const double *before, const double *after,
                           const double *error, const double *d_o, double *ds, double *du, double *dq, double *dk,
                           double *dv, double *ddecay, double *dbeta) {
    int64_t rows = shape->dim_k, columns = shape->dim_v;
    for (int64_t j = 0; j < columns; j++) du[j] = 0;
    for (int64_t i = 0; i < rows; i++) {
        double *ds_row = ds + i * columns;
        if (d_o) {
            dq[i] = shape->scale * dot(after + i * columns, d_o, columns);
            for (int64_t j = 0; j < columns; j++) ds_row[j] += shape->scale * token->q[i] * d_o[j];
        }
        for (int64_t j = 0; j < columns; j++) du[j] += ds_row[j] * token->k[i];
    }
    *dbeta = dot(du, error, columns);
    for (int64_t j = 0; j < columns; j++) dv[j] = token->beta * du[j];
    for (int64_t i = 0; i < rows; i++) {
        double *ds_row = ds + i * columns;
        const double *before_row = before + i * columns;
        dk[i] = token->beta * dot(ds_row, error, columns) - token->decay * dot(before_row, dv, columns);
        for (int64_t j = 0; j < columns; j++) ds_row[j] -= token->k[i] * dv[j];
        *ddecay += dot(ds_row, before_row, columns);
        for (int64_t j = 0; j < columns; j++) ds_row[j] *= token->decay;
    }
}

/* All states, and dS; e of every token; d_o, du and a token. */
static double backward_scratch(const gdelta_shape *shape, double tokens) {
    return (tokens + 2) * shape->dim_k * shape->dim_v + (tokens + 2) * shape->dim_v + token_size(shape);
}

static void backward_head(const gdelta_backward_call *call, int64_t sequence, int64_t head, const gradients *out,
                          double *scratch) {
    const gdelta_shape *shape = &call->shape;
    span rows = tokens_of(shape, &call->in, sequence);
    int64_t state = (int64_t)shape->dim_k * shape->dim_v;
    double *states = scratch, *ds = states + (rows.length + 1) * state, *errors = ds + state;
    double *d_o = errors + rows.length * shape->dim_v, *du = d_o + shape->dim_v;
    token token = token_in(shape, du + shape->dim_v);

    int skipped = skips(&call->in.initial, sequence);
    if (skipped || !call->d_final.data)
        memset(ds, 0, (size_t)state * sizeof *ds);
    else
        read_state(shape, &call->d_final, sequence, head, ds);
    if (!skipped) {
        read_initial_state(shape, &call->in, sequence, head, states);
        for (int64_t t = 0; t < rows.length; t++) {
            read_token(shape, &call->in, rows, t, head, &token);
            update(shape, &token, states + t * state, states + (t + 1) * state, errors + t * shape->dim_v);
        }
        for (int64_t t = rows.length - 1; t >= 0; t--) {
            int64_t at = (rows.flat + t) * shape->heads_o + head;
            read_token(shape, &call->in, rows, t, head, &token);
            if (call->d_o.data) read_row(&call->d_o, rows, t, head, shape->dim_v, d_o);
            token_backward(shape, &token, states + t * state, states + (t + 1) * state, errors + t * shape->dim_v,
                           call->d_o.data ? d_o : NULL, ds, du, out->dq + at * shape->dim_k,
                           out->dk + at * shape->dim_k, out->dv + at * shape->dim_v, out->ddecay + at, out->dbeta + at);
        }
    }
    if (!call->d_initial.data) return;
    if (starts_from_zeros(&call->in, sequence) && call->in.initial.data) memset(ds, 0, (size_t)state * sizeof *ds);
    write_state(shape, &call->d_initial, sequence, head, ds);
}

/* Sums `from` over the output heads that read each of `heads` heads. `x` is the tensor whose norm the rows go back
 * through, NULL for none. */
static void write_gradient(const gdelta_backward_call *call, int64_t sequence, const gdelta_view *to,
                           const gdelta_view *x, int64_t heads, int64_t size, const double *from, double *scratch) {
    const gdelta_shape *shape = &call->shape;
    span rows = tokens_of(shape, &call->in, sequence);
    double *sum = scratch, *row = scratch + size;
    if (!to->data) return;
    for (int64_t t = 0; t < rows.length; t++)
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t d = 0; d < size; d++) sum[d] = 0;
            for (int64_t h = 0; h < shape->heads_o; h++) {
                if (head_of(shape, h, heads) != head) continue;
                const double *part = from + ((rows.flat + t) * shape->heads_o + h) * size;
                for (int64_t d = 0; d < size; d++) sum[d] += part[d];
            }
            if (x && !skips(&call->in.initial, sequence)) {
                read_row(x, rows, t, head, size, row);
                norm_backward(shape, row, sum);
            }
            write_row(to, rows, t, head, size, sum);
        }
}

/* dg and dbeta of one sequence and head, and what it adds to the gradients of the gate's parameters. A decay of 0 is
 * flat in its logarithm, which may be -inf: those gradients are 0. */
static void write_gates(const gdelta_backward_call *call, int64_t sequence, int64_t head, const gradients *from,
                        double *da_log, double *ddt_bias) {
    const gdelta_shape *shape = &call->shape;
    span rows = tokens_of(shape, &call->in, sequence);
    int skipped = skips(&call->in.initial, sequence);
    for (int64_t t = 0; t < rows.length; t++) {
        int64_t at = (rows.flat + t) * shape->heads_o + head;
        double dg = 0, dbeta = 0;
        if (!skipped && call->in.g.data) {
            gate gate = read_gate(shape, &call->in, rows, t, head);
            double dlog = gate.decay == 0 ? 0 : gate.decay * from->ddecay[at];
            dg = shape->gate == GDELTA_GATE_LINEAR ? from->ddecay[at] : dlog;
            if (shape->gate == GDELTA_GATE_SOFTPLUS) {
                dg = dlog * -gate.rate * (gate.x > 20 ? 1 : sigmoid(gate.x));
                *da_log += gate.decay == 0 ? 0 : dlog * gate.log;
                *ddt_bias += dg;
            }
        }
        if (!skipped && call->in.beta.data)
            dbeta = from->dbeta[at] * beta_slope(shape, scalar(&call->in.beta, rows, t, head));
        if (call->dg.data) gdelta_store(call->dg.data, call->dg.dtype, offset(&call->dg, rows, t, head), dg);
        if (call->dbeta.data)
            gdelta_store(call->dbeta.data, call->dbeta.dtype, offset(&call->dbeta, rows, t, head), dbeta);
    }
}

static void write_parameter(const gdelta_view *to, int64_t head, int accumulate, double value) {
    if (!to->data) return;
    int64_t at = head * to->head;
    gdelta_store(to->data, to->dtype, at, accumulate ? gdelta_load(to->data, to->dtype, at) + value : value);
}

static gdelta_status backward(const gdelta_backward_call *call) {
    const gdelta_shape *shape = &call->shape;
    int64_t heads = shape->heads_o, tasks = shape->sequences * heads;
    int threads = threads_for((double)tasks);
    double size = backward_scratch(shape, (double)longest(shape, &call->in)), cells = (double)shape->rows * heads;
    double all = threads * size + cells * (2.0 * shape->dim_k + shape->dim_v + 2);
    double *memory = zeros(all);
    if (!memory)
        return gdelta_fail(GDELTA_ERROR_OUT_OF_MEMORY,
                           "the reference needs %.0f bytes of host memory: every state of a sequence and head for each "
                           "of %d threads, and the gradients in double",
                           all * (double)sizeof(double), threads);
    gradients sums = {.dq = memory};
    sums.dk = sums.dq + (int64_t)cells * shape->dim_k;
    sums.dv = sums.dk + (int64_t)cells * shape->dim_k;
    sums.ddecay = sums.dv + (int64_t)cells * shape->dim_v;
    sums.dbeta = sums.ddecay + (int64_t)cells;
    double *scratch = sums.dbeta + (int64_t)cells;

#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(dynamic)
#endif
    for (int64_t task = 0; task < tasks; task++)
        backward_head(call, task / heads, task % heads, &sums, scratch + this_thread() * (int64_t)size);

    for (int64_t n = 0; n < shape->sequences; n++) {
        write_gradient(call, n, &call->dq, &call->in.q, shape->heads_q, shape->dim_k, sums.dq, scratch);
        write_gradient(call, n, &call->dk, &call->in.k, shape->heads_k, shape->dim_k, sums.dk, scratch);
        write_gradient(call, n, &call->dv, NULL, shape->heads_v, shape->dim_v, sums.dv, scratch);
    }
    for (int64_t head = 0; head < heads; head++) {
        double da_log = 0, ddt_bias = 0;
        for (int64_t n = 0; n < shape->sequences; n++) write_gates(call, n, head, &sums, &da_log, &ddt_bias);
        write_parameter(&call->da_log, head, call->accumulate_parameters, da_log);
        write_parameter(&call->ddt_bias, head, call->accumulate_parameters, ddt_bias);
    }
    free(memory);
    return GDELTA_OK;
}

/* ---- Public ----------------------------------------------------------------------------------------------------- */

gdelta_status gdelta_reference_forward(const gdelta_problem *problem, const gdelta_forward_args *args) {
    gdelta_shape shape;
    gdelta_draft_call call = {.parents = {.data = NULL}}; /* no draft */
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_HOST, &shape);
    if (status == GDELTA_OK) status = gdelta_validate_forward(problem, &shape, GDELTA_PLACE_HOST, args, &call.step);
    return status == GDELTA_OK ? forward(&call) : status;
}

gdelta_status gdelta_reference_backward(const gdelta_problem *problem, const gdelta_backward_args *args) {
    gdelta_shape shape;
    gdelta_backward_call call;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_HOST, &shape);
    if (status == GDELTA_OK) status = gdelta_validate_backward(problem, &shape, GDELTA_PLACE_HOST, args, &call);
    return status == GDELTA_OK ? backward(&call) : status;
}

gdelta_status gdelta_reference_step(const gdelta_problem *problem, const gdelta_step_args *args) {
    gdelta_shape shape;
    gdelta_draft_call call;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_HOST, &shape);
    if (status == GDELTA_OK) status = gdelta_validate_step(problem, &shape, GDELTA_PLACE_HOST, args, &call);
    return status == GDELTA_OK ? forward(&call) : status;
}

gdelta_status gdelta_reference_commit(const gdelta_problem *problem, const gdelta_commit_args *args) {
    gdelta_shape shape;
    gdelta_commit_call call;
    gdelta_status status = gdelta_validate_problem(problem, GDELTA_PLACE_HOST, &shape);
    if (status == GDELTA_OK) status = gdelta_validate_commit(problem, &shape, GDELTA_PLACE_HOST, args, &call);
    return status == GDELTA_OK ? commit(&call) : status;
}
