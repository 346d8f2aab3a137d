/* gdelta-replay: checks this library against tensors from another implementation.
 *
 * A case is a folder of .npy files and meta.txt. Floats are f2, f4 or f8, in C order, little-endian:
 *
 *     q  [T, HQ, K]    k  [T, HK, K]    v  [T, HV, V]             needed; HK is the smaller of HQ and HV
 *     g  [T, HO]       beta  [T, HO]                              log gate and beta; absent: no decay, and 1
 *     h0 [N, HO, K, V]                                            initial states; absent: zeros
 *     cu_seqlens [N + 1], i4 or i8                                absent: one sequence. At most 64
 *     do [T, HO, V]    dht [N, HO, K, V]                          incoming gradients; absent: zeros
 *     o  [T, HO, V]    ht  [N, HO, K, V]                          expected results
 *     dq dk dv dg dbeta dh0                                       expected gradients, shaped as what they belong to
 *
 * Each expected tensor that is there is compared. meta.txt has lines key=value:
 *
 *     hq, hv, dk, dv, tokens, sequences     sizes: HQ, HV, K, V, T, N
 *     dtype=bf16|fp16|fp32                  q, k, v and do are rounded to it; g, beta, states and results are fp32
 *     use_l2=0|1|2                          the l2norm of q and k in the kernel: none, add eps, max eps
 *     l2_eps=1e-6, scale=0.125              default 1e-6 and K^-1/2
 *     note_...=...                          anything you like; transformers_rel_l2 is such a note too
 *
 * The error is relative L2, ||got - expected|| / ||expected||, the worst of all sequences and heads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/golden.h"

static const char usage[] =
    "usage: gdelta-replay [--engine auto|reference|recurrent|hopper] FOLDER...\n"
    "\n"
    "Runs the case in each FOLDER forward and, where it expects gradients, backward, and prints a line\n"
    "    case tensor rel_l2 tolerance PASS|FAIL\n"
    "for each tensor that it expects. rel_l2 is the worst of all sequences and heads. The engine auto is the fastest\n"
    "on the GPU that supports the case; reference is the CPU and needs no GPU. A named engine that has no backward\n"
    "leaves the gradients out: SKIP.\n"
    "Exit status: 0 all passed, 1 a tensor failed, 2 bad arguments or folder, or no GPU.\n"
    "\n"
    "To dump a case from PyTorch, for packed q [T, HQ, K], ..., and one sequence:\n"
    "\n"
    "    import os, numpy\n"
    "    os.makedirs('mycase', exist_ok=True)\n"
    "    tensors = dict(q=q, k=k, v=v, g=g, beta=beta, h0=h0, do=do, dht=dht,           # inputs\n"
    "                   o=o, ht=ht, dq=q.grad, dk=k.grad, dv=v.grad, dg=g.grad, dbeta=beta.grad, dh0=h0.grad)\n"
    "    for name, x in tensors.items():\n"
    "        numpy.save(f'mycase/{name}.npy', x.detach().float().cpu().contiguous().numpy())\n"
    "    with open('mycase/meta.txt', 'w') as f:\n"
    "        f.write(f'hq={q.shape[1]}\\nhv={v.shape[1]}\\ndk={q.shape[2]}\\ndv={v.shape[2]}\\ndtype=bf16\\n'\n"
    "                f'use_l2=1\\nl2_eps=1e-6\\nscale={scale}\\ntokens={q.shape[0]}\\nsequences=1\\n')\n"
    "\n"
    "g, beta, h0, do, dht and every expected tensor may be left out. Several sequences, at most 64, are packed one\n"
    "after another and cut by cu_seqlens.npy, i4 or i8 [sequences + 1]. States are [sequences, heads, K, V].\n"
    "use_l2 is 0 without a norm, 1 for x * rsqrt(sum(x^2) + l2_eps), 2 for x * rsqrt(max(sum(x^2), l2_eps)).\n"
    "q, k, v and do are rounded to dtype (bf16, fp16, fp32); all else is computed from and given in fp32.\n";

enum { kPassed = 0, kFailed = 1, kUnusable = 2 };

/* Can the engine run these operations of the case on this machine's GPU? Else gdelta_last_error() says why not. */
static bool runs(const test_engine *engine, const golden *g, bool backward) {
    gdelta_problem problem = case_problem(&g->x.c);
    gdelta_plan *plan;
    size_t bytes;
    problem.engine = engine->engine;
    if (gdelta_plan_create(&problem, &plan) != GDELTA_OK) return false;
    bool good = !backward || gdelta_plan_workspace_size(plan, GDELTA_OPERATION_BACKWARD, &bytes) == GDELTA_OK;
    gdelta_plan_destroy(plan);
    return good;
}

/* The engine of that name, or with auto the last on the GPU that runs the case: they are in order of speed. */
static const test_engine *choose(const char *name, const golden *g) {
    const test_engine *chosen = NULL;
    for (const test_engine *e = test_engines; e < test_engines + kEngines; ++e)
        if (strcmp(name, "auto") != 0 ? strcmp(name, e->name) == 0
                                      : e->on_gpu && runs(e, g, golden_needs_backward(g))) {
            chosen = e;
        }
    return chosen;
}

static int print_errors(const char *folder, const golden *g, const test_engine *engine, const double error[kRoles]) {
    int result = kPassed;
    for (role r = 0; r < kRoles; ++r) {
        if (!g->expected[r].data) continue;
        double tolerance = golden_tolerance(engine, r);
        if (error[r] == -1) {
            printf("%s %-5s - - SKIP\n", folder, golden_name(r));
            continue;
        }
        bool good = error[r] <= tolerance;
        printf("%s %-5s %.2e %.0e %s\n", folder, golden_name(r), error[r], tolerance, good ? "PASS" : "FAIL");
        if (!good) result = kFailed;
    }
    return result;
}

static int replay(const char *folder, const char *engine_name) {
    golden g;
    double error[kRoles];
    if (!golden_load(folder, &g)) return kUnusable;
    g.x.c.fp16_backward = true; /* who names an engine sees what it does */
    const test_engine *engine = choose(engine_name, &g);
    int result = kUnusable;
    if (!engine || (engine->on_gpu && !runs(engine, &g, false)))
        fprintf(stderr, "%s: %s\n", folder, gdelta_last_error());
    else
        result = golden_run(&g, engine, error) ? print_errors(folder, &g, engine, error) : kFailed;
    golden_free(&g);
    return result;
}

static bool known(const char *name) {
    bool found = strcmp(name, "auto") == 0;
    for (int i = 0; i < kEngines; ++i) found = found || strcmp(name, test_engines[i].name) == 0;
    return found;
}

int main(int count, char **arguments) {
    const char *engine = "auto";
    int first = 1;
    if (count > 1 && strcmp(arguments[1], "--help") == 0) {
        fputs(usage, stdout);
        return kPassed;
    }
    if (count > 2 && strcmp(arguments[1], "--engine") == 0) {
        engine = arguments[2];
        first = 3;
    }
    if (first >= count || arguments[first][0] == '-' || !known(engine)) {
        if (!known(engine)) fprintf(stderr, "there is no engine \"%s\"\n", engine);
        fputs(usage, stderr);
        return kUnusable;
    }
    if (strcmp(engine, "reference") != 0 && gpu_missing()) {
        fprintf(stderr, "no GPU (%s): only --engine reference runs here\n", gpu_missing());
        return kUnusable;
    }
    int worst = kPassed;
    for (int i = first; i < count; ++i) {
        int result = replay(arguments[i], engine);
        if (result > worst) worst = result;
    }
    return worst;
}
