#include "cases.h"

#include <stdlib.h>
#include <string.h>

/* Peers on an NVIDIA H200, bf16, K = V = 128, milliseconds. FlashQLA and FlashInfer: FlashQLA's own published H200 file
 * (flash_qla 0.1.2, flashinfer 0.6.13, fla 0.5.1, CUDA graphs, 100 repeats). FLA: measured on 2026-12-02 on an H200
 * with Triton 3.6 and PyTorch 2.11 (FLA itself refuses its backward on Hopper with this Triton, for wrong gradients:
 * time only). FlashQLA's split of one long sequence is approximate. FlashInfer's later split kernel, on an H100: 0.239,
 * 0.114 and 0.061 at 2/8 heads and one sequence of 32768, 8192 and 2048. Decode: FLA's fused recurrent kernel, same
 * day, fp32 state, cold L2, CUDA graph. Goals are this project's. FlashQLA's benchmark hands over q and k normalised
 * before, packs its sequences, cuts the backward's 8 at random places, and leaves a quarter of the heads without decay.
 */
typedef struct table_row {
    gdelta_operation operation;
    int32_t hq, hv;
    const char *lengths;
    bench_peers peers;
} table_row;

static const table_row h200[] = {
    {GDELTA_OPERATION_FORWARD, 16, 64, "4x8192", {1.214, 0.827, 3.47, 0.55}},
    {GDELTA_OPERATION_FORWARD, 16, 64, "1x32768", {1.521, 1.552, 3.46, 0.80}},
    {GDELTA_OPERATION_FORWARD, 16, 64, "1x8192", {0.397, 0.392, 0.84, 0.20}},
    {GDELTA_OPERATION_FORWARD, 16, 64, "1x2048", {0.113, 0.105, 0, 0.06}},
    {GDELTA_OPERATION_FORWARD, 16, 32, "4x8192", {0.611, 0.425, 1.95, 0.30}},
    {GDELTA_OPERATION_FORWARD, 16, 32, "1x32768", {0.877, 1.550, 1.96, 0.50}},
    {GDELTA_OPERATION_FORWARD, 16, 32, "1x8192", {0.280, 0.394, 0.51, 0.16}},
    {GDELTA_OPERATION_FORWARD, 2, 8, "1x32768", {0.320, 1.655, 0.93, 0.18}},
    {GDELTA_OPERATION_FORWARD, 2, 8, "1x8192", {0.119, 0.417, 0, 0.07}},
    {GDELTA_OPERATION_FORWARD, 2, 8, "1x2048", {0.061, 0.109, 0, 0.035}},
    {GDELTA_OPERATION_FORWARD, 2, 8, "8x1024", {0.061, 0.058, 0, 0.04}},
    {GDELTA_OPERATION_FORWARD, 16, 48, "1x16384", {0.671, 0.781, 0, 0.38}},
    {GDELTA_OPERATION_BACKWARD, 16, 64, "4x8192", {0, 0, 10.0, 2.8}},
    {GDELTA_OPERATION_BACKWARD, 16, 32, "1x32768", {2.515, 0, 5.81, 1.4}},
    {GDELTA_OPERATION_BACKWARD, 16, 32, "713,9241,1607,4380,2966,7031,1195,5635", {2.893, 0, 5.78, 1.4}},
    {GDELTA_OPERATION_BACKWARD, 16, 32, "1x8192", {0.789, 0, 1.50, 0.45}},
    {GDELTA_OPERATION_BACKWARD, 8, 16, "1x32768", {1.377, 0, 3.70, 0.8}},
    {GDELTA_OPERATION_BACKWARD, 2, 4, "1x32768", {0.548, 0, 2.31, 0.35}},
    {GDELTA_OPERATION_STEP, 16, 32, "1x1", {0, 0, 0.0073, 0.0035}},
    {GDELTA_OPERATION_STEP, 16, 32, "8x1", {0, 0, 0.0175, 0.010}},
    {GDELTA_OPERATION_STEP, 16, 32, "32x1", {0, 0, 0.0517, 0.035}},
    {GDELTA_OPERATION_STEP, 16, 32, "128x1", {0, 0, 0.187, 0.141}},
    {GDELTA_OPERATION_STEP, 16, 64, "1x1", {0, 0, 0.0085, 0.0045}},
    {GDELTA_OPERATION_STEP, 16, 64, "128x1", {0, 0, 0.367, 0.281}},
    {GDELTA_OPERATION_STEP, 16, 64, "256x1", {0, 0, 0.727, 0.563}},
};

static const table_row quick[] = {
    {GDELTA_OPERATION_FORWARD, 16, 32, "1x4096", {0, 0, 0, 0}},
    {GDELTA_OPERATION_BACKWARD, 16, 32, "1x4096", {0, 0, 0, 0}},
    {GDELTA_OPERATION_STEP, 16, 32, "32x1", {0, 0, 0, 0}},
};

int32_t case_heads_k(const bench_case *c) {
    return c->hq < c->hv ? c->hq : c->hv;
}

int32_t case_heads_o(const bench_case *c) {
    return c->hq > c->hv ? c->hq : c->hv;
}

int64_t case_rows(const bench_case *c) {
    int64_t rows = 0;
    if (c->operation == GDELTA_OPERATION_STEP) return c->sequences * c->length[0];
    for (int n = 0; n < c->sequences; ++n) rows += c->length[n];
    return rows;
}

bool case_is_packed(const bench_case *c) {
    if (c->operation == GDELTA_OPERATION_STEP) return false;
    for (int n = 1; n < c->sequences; ++n) {
        if (c->length[n] != c->length[0]) return true;
    }
    return false;
}

int64_t case_checkpoints(const bench_case *c) {
    if (c->operation != GDELTA_OPERATION_FORWARD || c->checkpoint_interval == 0) return 0;
    return case_is_packed(c) ? case_rows(c) / c->checkpoint_interval
                             : c->sequences * (c->length[0] / c->checkpoint_interval);
}

bool case_parse_lengths(bench_case *c, const char *text) {
    char *end;
    long long first = strtoll(text, &end, 10);
    if (end == text || first < 0) return false;
    if (*end == 'x') {
        const char *rest = end + 1;
        long long length = strtoll(rest, &end, 10);
        if (end == rest || *end || first < 1 || first > kMaxSequences) return false;
        if (length < 1 || length > INT32_MAX) return false;
        c->sequences = (int)first;
        for (int n = 0; n < c->sequences; ++n) c->length[n] = length;
        return true;
    }
    c->sequences = 0;
    int64_t total = 0;
    for (const char *at = text;; at = end + 1) {
        long long length = strtoll(at, &end, 10);
        if (end == at || length < 0 || length > INT32_MAX || c->sequences == kMaxSequences) return false;
        c->length[c->sequences++] = length;
        total += length;
        if (!*end) return total > 0 && total <= INT32_MAX; /* cu_seqlens is int32 */
        if (*end != ',') return false;
    }
}

static double element_bytes(gdelta_dtype dtype) {
    return dtype == GDELTA_DTYPE_FP32 ? 4 : 2;
}

double case_flops(const bench_case *c) {
    /* Forward 10.5 and backward 33 MFLOP a chunk and value head at K = V = 128; a step 6 K V a token and head. */
    double heads_rows = (double)case_rows(c) * case_heads_o(c), square = (double)c->k * c->v / (128 * 128);
    switch (c->operation) {
        case GDELTA_OPERATION_FORWARD:
            return heads_rows / 64 * 10.5e6 * square;
        case GDELTA_OPERATION_BACKWARD:
            return heads_rows / 64 * 33e6 * square;
        default:
            return heads_rows * 6 * c->k * c->v;
    }
}

double case_bytes(const bench_case *c) {
    double rows = (double)case_rows(c), io = element_bytes(c->dtype), heads = case_heads_o(c);
    double qkv = rows * io * ((double)(c->hq + case_heads_k(c)) * c->k + (double)c->hv * c->v);
    double o = rows * io * heads * c->v, gates = rows * heads * 2 * 4;
    double state = heads * c->k * c->v * element_bytes(c->state_dtype), states = c->sequences * state;
    switch (c->operation) {
        case GDELTA_OPERATION_BACKWARD: /* q k v g beta do S0 dS_T; dq dk dv dg dbeta dS0. What is saved is a choice */
            return 2 * qkv + o + 2 * gates + 3 * states;
        default: /* q k v g beta S0; o S_T, checkpoints */
            return qkv + o + gates + 2 * states + (double)case_checkpoints(c) * state;
    }
}

double case_state_bytes(const bench_case *c) {
    double elements = (double)c->sequences * case_heads_o(c) * c->k * c->v;
    return 2 * elements * element_bytes(c->state_dtype);
}

double case_floor(const bench_case *c) {
    double compute = case_flops(c) / 803e12, memory = case_bytes(c) / 4.24e12;
    return 1e6 * (compute > memory ? compute : memory);
}

static int from_rows(const table_row *rows, size_t count, const bench_case *base, bench_case *cases) {
    for (size_t i = 0; i < count; ++i) {
        bench_case *c = &cases[i];
        *c = *base;
        c->operation = rows[i].operation;
        c->hq = rows[i].hq;
        c->hv = rows[i].hv;
        c->k = c->v = 128;
        c->dtype = GDELTA_DTYPE_BF16;
        c->state_dtype = GDELTA_DTYPE_FP32;
        c->peers = rows[i].peers;
        case_parse_lengths(c, rows[i].lengths);
    }
    return (int)count;
}

/* B 1..512, T 1..8, HV 32 and 64, fp32 and bf16 states; HQ 16. 512 sequences are more than a table of lengths holds, so
 * a step keeps one length for all. */
static int decode_cases(const bench_case *base, bench_case *cases) {
    static const int batches[] = {1, 8, 32, 128, 512};
    int count = 0;
    for (int state = 0; state < 2; ++state)
        for (int32_t hv = 32; hv <= 64; hv *= 2)
            for (int64_t tokens = 1; tokens <= 8; tokens *= 2)
                for (size_t b = 0; b < sizeof batches / sizeof *batches; ++b) {
                    bench_case *c = &cases[count++];
                    from_rows(&(table_row){GDELTA_OPERATION_STEP, 16, hv, "1x1", {0, 0, 0, 0}}, 1, base, c);
                    c->sequences = batches[b];
                    c->length[0] = tokens;
                    c->state_dtype = state ? GDELTA_DTYPE_BF16 : GDELTA_DTYPE_FP32;
                }
    return count;
}

int suite_cases(const char *name, const bench_case *base, bench_case *cases) {
    if (!strcmp(name, "h200")) return from_rows(h200, sizeof h200 / sizeof *h200, base, cases);
    if (!strcmp(name, "quick")) return from_rows(quick, sizeof quick / sizeof *quick, base, cases);
    if (!strcmp(name, "decode")) return decode_cases(base, cases);
    return -1;
}
