/* What gdelta-bench can time: cases, suites, and the floors that times are held against. */
#ifndef GDELTA_BENCH_CASES_H
#define GDELTA_BENCH_CASES_H

#include <gdelta/gdelta.h>
#include <stdbool.h>

enum { kMaxSequences = 256 };

typedef enum bench_gate { kGateZero, kGateWeak, kGateMild, kGateStrong } bench_gate;

/* Milliseconds, 0 where nothing was published. */
typedef struct bench_peers {
    double flash_qla, flash_infer, fla, goal;
} bench_peers;

typedef struct bench_case {
    gdelta_operation operation;
    gdelta_engine engine;
    bool on_cpu; /* the CPU reference instead of an engine */
    int32_t hq, hv, k, v;
    gdelta_dtype dtype, state_dtype;
    gdelta_state_order state_order;
    int sequences;
    int64_t length[kMaxSequences]; /* step: one entry, the tokens of each of `sequences` */
    int64_t checkpoint_interval;   /* forward; 0: no checkpoints */
    bool small_workspace;          /* backward: GDELTA_FLAG_SMALL_WORKSPACE */
    bench_gate gate;
    bench_peers peers;
} bench_case;

/* Key heads and output heads: value heads share a key head, or query heads share a value head. */
int32_t case_heads_k(const bench_case *c);
int32_t case_heads_o(const bench_case *c);
int64_t case_rows(const bench_case *c);
/* True if the lengths differ: run packed (THD), else BSHD. */
bool case_is_packed(const bench_case *c);
/* Checkpoints of all sequences, with the numbers that packed sequences may leave out. */
int64_t case_checkpoints(const bench_case *c);

/* "4x8192" or "100,200,300" into sequences and lengths; false if it is neither. */
bool case_parse_lengths(bench_case *c, const char *text);

/* Floating-point operations of the chunked form, 64 tokens a chunk, as peers count them: the recurrent engine does
 * other work for the same result. */
double case_flops(const bench_case *c);
/* The fewest bytes: each input read once, each output written once. */
double case_bytes(const bench_case *c);
/* Of those, the states read and written: what a step is about. */
double case_state_bytes(const bench_case *c);
/* Microseconds: the larger of flops at 803 TFLOP/s and bytes at 4.24 TB/s, both measured on an H200 on 2026-12-02
 * (8192^3 bf16 matrix product of random data; device copy, read + write). */
double case_floor(const bench_case *c);

/* Cases of a suite, made from `base`'s engine and gate; returns how many, -1 for an unknown name. `cases` holds up to
 * kMaxCases. */
enum { kMaxCases = 128 };
int suite_cases(const char *name, const bench_case *base, bench_case *cases);

#endif /* GDELTA_BENCH_CASES_H */
