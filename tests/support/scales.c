#include "scales.h"

#include <math.h>
#include <stdlib.h>

#include "host/convert.h"

enum { kMostDim = 256, kChunkTokens = 64 };

typedef struct token {
    double q[kMostDim], k[kMostDim], v[kMostDim], d_o[kMostDim];
    double length_q, length_k; /* before the norm, if there is one; else 1 */
    double decay, beta;
    double by_gate, by_beta;     /* of the decay and of beta, the derivatives by what the tensors hold */
    double by_a_log, by_dt_bias; /* of the decay */
} token;

/* ---- Inputs ---- */

static int64_t head_of(const instance *x, role r, int64_t output_head) {
    int64_t heads = instance_heads(x, r);
    return x->c.head_map == GDELTA_HEADS_TILED ? output_head % heads : output_head * heads / case_heads_o(&x->c);
}

static void read_row(const instance *x, role r, int64_t n, int64_t t, int64_t output_head, double row[kMostDim]) {
    int64_t head = head_of(x, r, output_head);
    int64_t columns = x->tensor[r].present ? instance_columns(x, r) : 0;
    for (int64_t d = 0; d < kMostDim; ++d) row[d] = d < columns ? instance_get(x, r, n, t, head, d) : 0;
}

/* Returns what the row was divided by. */
static double normalise(const test_case *c, double *row) {
    double sum = 0, eps = c->eps > 0 ? c->eps : 1e-6;
    if (c->l2norm == GDELTA_L2NORM_NONE) return 1;
    for (int d = 0; d < c->dim_k; ++d) sum += row[d] * row[d];
    sum = c->l2norm == GDELTA_L2NORM_ADD_EPS ? sum + eps : fmax(sum, eps);
    for (int d = 0; d < c->dim_k; ++d) row[d] /= sqrt(sum);
    return sqrt(sum);
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static void read_gate(const instance *x, int64_t n, int64_t t, int64_t head, token *token) {
    token->decay = token->by_gate = 1;
    token->by_a_log = token->by_dt_bias = 0;
    if (!x->tensor[kG].present) return;
    double g = instance_get(x, kG, n, t, head, 0);
    if (x->c.gate == GDELTA_GATE_LINEAR) {
        token->decay = g;
    } else if (x->c.gate == GDELTA_GATE_LOG) {
        token->decay = token->by_gate = exp(g);
    } else {
        double rate = exp(instance_get(x, kALog, 0, 0, 0, head));
        if (x->tensor[kDtBias].present) g += instance_get(x, kDtBias, 0, 0, 0, head);
        double log_decay = -rate * (g > 20 ? g : log1p(exp(g)));
        token->decay = exp(log_decay);
        token->by_a_log = token->decay * log_decay;
        token->by_gate = token->by_dt_bias = token->decay * -rate * sigmoid(g);
    }
}

static void read_beta(const instance *x, int64_t n, int64_t t, int64_t head, token *token) {
    token->beta = token->by_beta = 1;
    if (!x->tensor[kBeta].present) return;
    double b = instance_get(x, kBeta, n, t, head, 0), most = x->c.beta == GDELTA_BETA_TWO_SIGMOID ? 2 : 1;
    token->beta = x->c.beta == GDELTA_BETA_VALUE ? b : most * sigmoid(b);
    token->by_beta = x->c.beta == GDELTA_BETA_VALUE ? 1 : most * sigmoid(b) * sigmoid(-b);
}

static void read_token(const instance *x, int64_t n, int64_t t, int64_t head, token *token) {
    read_row(x, kQ, n, t, head, token->q);
    read_row(x, kK, n, t, head, token->k);
    read_row(x, kV, n, t, head, token->v);
    read_row(x, kDO, n, t, head, token->d_o);
    token->length_q = normalise(&x->c, token->q);
    token->length_k = normalise(&x->c, token->k);
    read_gate(x, n, t, head, token);
    read_beta(x, n, t, head, token);
}

static void read_state(const instance *x, role r, int64_t n, int64_t head, double *s) {
    const test_case *c = &x->c;
    bool given = x->tensor[r].present && !(r == kInitial && c->recycled >> n & 1);
    for (int64_t i = 0; i < c->dim_k; ++i) {
        for (int64_t j = 0; j < c->dim_v; ++j) *s++ = given ? instance_get(x, r, n, i, head, j) : 0;
    }
}

/* ---- The replay ---- */

/* From the state before a token to the one after it; what was missing under its key. */
static void update(const test_case *c, const token *token, const double *before, double *after, double *missing) {
    for (int j = 0; j < c->dim_v; ++j) missing[j] = token->v[j];
    for (int i = 0; i < c->dim_k; ++i) {
        for (int j = 0; j < c->dim_v; ++j) {
            after[i * c->dim_v + j] = token->decay * before[i * c->dim_v + j];
            missing[j] -= token->k[i] * after[i * c->dim_v + j];
        }
    }
    for (int i = 0; i < c->dim_k; ++i) {
        for (int j = 0; j < c->dim_v; ++j) after[i * c->dim_v + j] += token->k[i] * token->beta * missing[j];
    }
}

/* The squares of a token's scales; of q, k and v those of their gradients, q and k normalised. */
typedef struct squares {
    double o[kMostDim], q[kMostDim], k[kMostDim], v[kMostDim], decay, beta;
} squares;

static double square(double x) {
    return x * x;
}

/* ds goes from the gradient of the state after the token, but for what o adds to it, to that of the state before it. */
static void adjoint(const test_case *c, const token *token, const double *before, const double *after,
                    const double *missing, double *ds, squares *squares) {
    double du[kMostDim] = {0}, du_square[kMostDim] = {0}, read[kMostDim] = {0};
    double scale = c->has_scale ? c->scale : 1 / sqrt(c->dim_k);
    *squares = (struct squares){.beta = 0};
    for (int i = 0; i < c->dim_k; ++i) {
        for (int j = 0; j < c->dim_v; ++j) {
            int64_t at = i * c->dim_v + j;
            ds[at] += scale * token->q[i] * token->d_o[j];
            du[j] += token->k[i] * ds[at];
            du_square[j] += square(token->k[i] * ds[at]);
            read[j] += token->k[i] * before[at];
            squares->o[j] += square(scale * token->q[i] * after[at]);
            squares->q[i] += square(scale * token->d_o[j] * after[at]);
            squares->k[i] += square(ds[at] * token->beta * missing[j]);
        }
    }
    for (int j = 0; j < c->dim_v; ++j) {
        du_square[j] = fmax(du_square[j], square(du[j]));
        squares->v[j] = square(token->beta) * du_square[j];
        squares->beta += du_square[j] * square(missing[j]);
        squares->decay += squares->v[j] * square(read[j]);
    }
    for (int i = 0; i < c->dim_k; ++i) {
        for (int j = 0; j < c->dim_v; ++j) {
            int64_t at = i * c->dim_v + j;
            squares->k[i] += square(token->decay * before[at]) * squares->v[j];
            ds[at] -= token->k[i] * token->beta * du[j];
            squares->decay += square(ds[at] * before[at]);
            ds[at] *= token->decay;
        }
    }
}

static void set(instance *scales, role r, int64_t n, int64_t t, int64_t head, int64_t column, double value) {
    gdelta_store(scales->after + instance_offset(scales, r, n, t, head, column), scales->tensor[r].dtype, 0, value);
}

static void add(instance *scales, role r, int64_t n, int64_t t, int64_t head, int64_t column, double term) {
    if (!scales->tensor[r].present) return;
    set(scales, r, n, t, head, column, instance_get(scales, r, n, t, head, column) + term);
}

static void add_row(instance *scales, role r, int64_t n, int64_t t, int64_t output_head, const double *terms,
                    double part) {
    int64_t head = scales->tensor[r].present ? head_of(scales, r, output_head) : 0;
    int64_t columns = scales->tensor[r].present ? instance_columns(scales, r) : 0;
    for (int64_t d = 0; d < columns; ++d) add(scales, r, n, t, head, d, terms[d] * part);
}

/* One sequence and head. */
static void replay(instance *scales, int64_t n, int64_t head) {
    const test_case *c = &scales->c;
    int64_t tokens = case_length(c, (int)n), size = (int64_t)c->dim_k * c->dim_v;
    if (scales->tensor[kInitial].present && instance_rows(scales, kInitial, n) == 0) return; /* skipped */
    double *states = malloc((size_t)((tokens + 2) * size + tokens * c->dim_v) * sizeof *states);
    double *ds = states + (tokens + 1) * size, *missing = ds + size, chunk_a_log = 0, chunk_dt_bias = 0;
    token token;
    squares squares;
    read_state(scales, kInitial, n, head, states);
    read_state(scales, kDFinal, n, head, ds);
    for (int64_t t = 0; t < tokens; ++t) {
        read_token(scales, n, t, head, &token);
        update(c, &token, states + t * size, states + (t + 1) * size, missing + t * c->dim_v);
    }
    for (int64_t t = tokens - 1; t >= 0; --t) {
        read_token(scales, n, t, head, &token);
        adjoint(c, &token, states + t * size, states + (t + 1) * size, missing + t * c->dim_v, ds, &squares);
        add_row(scales, kO, n, t, head, squares.o, 1);
        add_row(scales, kDQ, n, t, head, squares.q, 1 / square(token.length_q));
        add_row(scales, kDK, n, t, head, squares.k, 1 / square(token.length_k));
        add_row(scales, kDV, n, t, head, squares.v, 1);
        add(scales, kDG, n, t, head, 0, square(token.by_gate) * squares.decay);
        add(scales, kDBeta, n, t, head, 0, square(token.by_beta) * squares.beta);
        chunk_a_log += fabs(token.by_a_log) * sqrt(squares.decay);
        chunk_dt_bias += fabs(token.by_dt_bias) * sqrt(squares.decay);
        if (t % kChunkTokens) continue;
        add(scales, kDALog, 0, 0, 0, head, square(chunk_a_log));
        add(scales, kDDtBias, 0, 0, 0, head, square(chunk_dt_bias));
        chunk_a_log = chunk_dt_bias = 0;
    }
    free(states);
}

void scales_create(instance *scales, const instance *x) {
    instance_create_plain(scales, x);
    for (role r = 0; r < kRoles; ++r) {
        if (!(SCALED_ROLES & ROLE(r)) || !scales->tensor[r].present) continue;
        FOR_ELEMENTS(scales, r, n, row, head, column) set(scales, r, n, row, head, column, 0);
    }
    for (int64_t head = 0; head < case_heads_o(&scales->c); ++head) {
        for (int64_t n = 0; n < scales->c.sequences; ++n) replay(scales, n, head);
    }
    for (role r = 0; r < kRoles; ++r) {
        if (!(SCALED_ROLES & ROLE(r)) || !scales->tensor[r].present) continue;
        FOR_ELEMENTS(scales, r, n, row, head, column) {
            set(scales, r, n, row, head, column, sqrt(instance_get(scales, r, n, row, head, column)));
        }
    }
}
