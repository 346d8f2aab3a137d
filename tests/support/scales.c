#include "scales.h"

#include <math.h>
#include <stdlib.h>

#include "host/convert.h"

enum { kMostDim = 256, kChunkTokens = 64 };

typedef struct token {
    double q[kMostDim], k[kMostDim], v[kMostDim], d_o[kMostDim];
    double decay, beta;
    double by_gate, by_beta;     /* of the log decay and of beta, the derivatives by what the tensors hold */
    double by_a_log, by_dt_bias; /* of the log decay */
} token;

/* ---- Inputs ---- */

static void read_row(const instance *x, role r, int64_t n, int64_t t, int64_t output_head, double *row) {
    const test_case *c = &x->c;
    int64_t heads = instance_heads(x, r);
    int64_t head = c->head_map == GDELTA_HEADS_TILED ? output_head % heads : output_head * heads / case_heads_o(c);
    for (int64_t d = 0; d < instance_columns(x, r); ++d) {
        row[d] = x->tensor[r].present ? instance_get(x, r, n, t, head, d) : 0;
    }
}

static void normalise(const test_case *c, double *row) {
    double sum = 0, eps = c->eps > 0 ? c->eps : 1e-6;
    if (c->l2norm == GDELTA_L2NORM_NONE) return;
    for (int d = 0; d < c->dim_k; ++d) sum += row[d] * row[d];
    sum = c->l2norm == GDELTA_L2NORM_ADD_EPS ? sum + eps : fmax(sum, eps);
    for (int d = 0; d < c->dim_k; ++d) row[d] /= sqrt(sum);
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
        token->by_gate = 1 / g; /* never of 0: there is no gradient by its log */
    } else if (x->c.gate == GDELTA_GATE_LOG) {
        token->decay = exp(g);
    } else {
        double rate = exp(instance_get(x, kALog, 0, 0, 0, head));
        if (x->tensor[kDtBias].present) g += instance_get(x, kDtBias, 0, 0, 0, head);
        token->by_a_log = -rate * (g > 20 ? g : log1p(exp(g)));
        token->by_gate = token->by_dt_bias = -rate * sigmoid(g);
        token->decay = exp(token->by_a_log);
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
    normalise(&x->c, token->q);
    normalise(&x->c, token->k);
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

/* The scales of the log decay's and beta's gradients. ds goes from the gradient of the state after the token, but for
 * what o adds to it, to that of the state before it. */
static void adjoint(const test_case *c, const token *token, const double *before, const double *missing, double *ds,
                    double *log_scale, double *beta_scale) {
    double du[kMostDim] = {0}, parts[kMostDim] = {0}, scale = c->has_scale ? c->scale : 1 / sqrt(c->dim_k), betas = 0,
           logs = 0;
    for (int i = 0; i < c->dim_k; ++i) {
        for (int j = 0; j < c->dim_v; ++j) {
            ds[i * c->dim_v + j] += scale * token->q[i] * token->d_o[j];
            double part = token->k[i] * ds[i * c->dim_v + j];
            du[j] += part;
            parts[j] += part * part;
        }
    }
    for (int j = 0; j < c->dim_v; ++j) betas += fmax(du[j] * du[j], parts[j]) * missing[j] * missing[j];
    for (int i = 0; i < c->dim_k; ++i) {
        for (int j = 0; j < c->dim_v; ++j) {
            double d = token->decay * (ds[i * c->dim_v + j] - token->k[i] * token->beta * du[j]);
            double term = d * before[i * c->dim_v + j];
            logs += term * term;
            ds[i * c->dim_v + j] = d;
        }
    }
    *log_scale = sqrt(logs);
    *beta_scale = sqrt(betas);
}

static void put(instance *scales, role r, int64_t n, int64_t t, int64_t head, int64_t column, double value) {
    const instance_tensor *tensor = &scales->tensor[r];
    if (!tensor->present) return;
    gdelta_store(scales->after + instance_offset(scales, r, n, t, head, column), tensor->dtype, 0, value);
}

/* One sequence and head; adds to the squares of the parameters' scales. */
static void replay(instance *scales, int64_t n, int64_t head, double *a_log, double *dt_bias) {
    const test_case *c = &scales->c;
    int64_t tokens = case_length(c, (int)n), size = (int64_t)c->dim_k * c->dim_v;
    bool skipped = scales->tensor[kInitial].present && instance_rows(scales, kInitial, n) == 0;
    double *states = malloc((size_t)((tokens + 2) * size + tokens * c->dim_v) * sizeof *states);
    double *ds = states + (tokens + 1) * size, *missing = ds + size, chunk_a_log = 0, chunk_dt_bias = 0;
    token token;
    read_state(scales, kInitial, n, head, states);
    read_state(scales, kDFinal, n, head, ds);
    for (int64_t t = 0; t < tokens; ++t) {
        read_token(scales, n, t, head, &token);
        update(c, &token, states + t * size, states + (t + 1) * size, missing + t * c->dim_v);
    }
    for (int64_t t = tokens - 1; t >= 0; --t) {
        double log_scale, beta_scale;
        read_token(scales, n, t, head, &token);
        adjoint(c, &token, states + t * size, missing + t * c->dim_v, ds, &log_scale, &beta_scale);
        if (skipped) log_scale = beta_scale = 0;
        if (token.decay == 0) log_scale = token.by_gate = token.by_a_log = token.by_dt_bias = 0;
        put(scales, kDG, n, t, head, 0, fabs(token.by_gate) * log_scale);
        put(scales, kDBeta, n, t, head, 0, token.by_beta * beta_scale);
        chunk_a_log += fabs(token.by_a_log) * log_scale;
        chunk_dt_bias += fabs(token.by_dt_bias) * log_scale;
        if (t % kChunkTokens) continue;
        *a_log += chunk_a_log * chunk_a_log;
        *dt_bias += chunk_dt_bias * chunk_dt_bias;
        chunk_a_log = chunk_dt_bias = 0;
    }
    free(states);
}

void scales_create(instance *scales, const instance *x) {
    instance_create_plain(scales, x);
    for (int64_t head = 0; head < case_heads_o(&scales->c); ++head) {
        double a_log = 0, dt_bias = 0;
        for (int64_t n = 0; n < scales->c.sequences; ++n) replay(scales, n, head, &a_log, &dt_bias);
        put(scales, kDALog, 0, 0, 0, head, sqrt(a_log));
        put(scales, kDDtBias, 0, 0, 0, head, sqrt(dt_bias));
    }
}
