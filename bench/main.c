/* gdelta-bench: times gdelta on this machine's GPU, or the CPU reference; see usage(). */
#define _GNU_SOURCE /* getopt_long */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "measure.h"

static void usage(FILE *out) {
    fputs(
        "gdelta-bench [OPTIONS]: time forward, backward and step\n"
        "  --op forward|backward|step|all   default all\n"
        "  --engine auto|recurrent|hopper|reference   default auto; reference is the CPU\n"
        "  --hq N --hv N --k N --v N        heads and dims, default 16 32 128 128\n"
        "  --dtype bf16|fp16|fp32           of q k v o, default bf16\n"
        "  --state-dtype fp32|bf16|fp16     default fp32\n"
        "  --state-order kv|vk              default kv\n"
        "  --seqlens 4x8192 | 100,200,300   equal lengths run as BSHD, others packed; default 1x8192\n"
        "  --batch N --tokens N             of a step, default 128 and 1\n"
        "  --checkpoint-every N             forward keeps the state after every N tokens, a multiple of 64\n"
        "  --small-workspace                backward in slices of heads; forward saves no states for it\n"
        "  --gate zero|weak|mild|strong     default mild, logsigmoid(N(0,1)) / 16\n"
        "  --suite quick|h200|decode        many cases instead; --op, --hv, --state-dtype, --batch and --tokens "
        "choose\n"
        "                                   among them. decode adds the states' bytes, read and written, their rate "
        "alone\n"
        "                                   and of the large copy's, a copy of the same bytes timed alike, and the\n"
        "                                   host's time to enqueue a call\n"
        "  --check                          compare a slice with the CPU reference, print the relative errors; one\n"
        "                                   beyond its tolerance makes the exit status 1\n"
        "  --repeats N                      default: as many as fit a second, 5 to 50\n"
        "  --json FILE                      write all numbers\n"
        "Times are medians of CUDA graph replays between two events, L2 flushed before each; calls under 60 us run "
        "many\n"
        "in one graph, each on tensors of its own (\"x 128\"). TFLOP/s counts the chunked\n"
        "form's operations, whatever the engine does; GB/s the fewest bytes. floor: the larger of both at 803 TFLOP/s\n"
        "and 4.24 TB/s, measured on an H200. Peers' milliseconds are published or measured ones: see bench/cases.c.\n",
        out);
}

static void die(const char *what, const char *value) {
    fprintf(stderr, "gdelta-bench: %s '%s'; --help says what there is\n", what, value);
    exit(2);
}

/* The number of `value` among the names, which end with NULL. */
static int choose(const char *option, const char *value, const char *const *names) {
    for (int i = 0; names[i]; ++i) {
        if (!strcmp(names[i], value)) return i;
    }
    die(option, value);
    return 0;
}

static int number(const char *option, const char *value, int least, int most) {
    char *end;
    long x = strtol(value, &end, 10);
    if (end == value || *end || x < least || x > most) die(option, value);
    return (int)x;
}

static const char *const operations[] = {"forward", "backward", "step", "all", NULL};
static const char *const engines[] = {"auto", "recurrent", "hopper", "reference", NULL};
static const char *const dtypes[] = {"default", "bf16", "fp16", "fp32", NULL};
static const char *const orders[] = {"kv", "vk", NULL};
static const char *const gates[] = {"zero", "weak", "mild", "strong", NULL};

static void describe_lengths(const bench_case *c, char *text, size_t size) {
    if (!case_is_packed(c)) {
        snprintf(text, size, "%dx%" PRId64, c->sequences, c->length[0]);
        return;
    }
    snprintf(text, size, "%d packed, %" PRId64, c->sequences, case_rows(c));
}

static double best_peer(const bench_peers *p) {
    double best = 0;
    const double times[] = {p->flash_qla, p->flash_infer, p->fla};
    for (int i = 0; i < 3; ++i) {
        if (times[i] > 0 && (best == 0 || times[i] < best)) best = times[i];
    }
    return best;
}

static void print_peer(double milliseconds) {
    if (milliseconds > 0)
        printf(" %8.4g", milliseconds);
    else
        printf(" %8s", "-");
}

/* What a suite's lines end with, or stand in the place of others. */
typedef enum suite_columns { kPlain, kPeers, kDecode } suite_columns;

static void print_head(suite_columns columns) {
    printf("%-8s %7s %8s %16s %5s %10s %17s %8s %8s %6s %6s", "op", "hq/hv", "k/v", "sequences", "type", "us",
           "p10..p90", "TFLOP/s", "GB/s", "%floor", "%copy");
    if (columns == kDecode)
        printf(" %9s %6s %6s %8s %6s %8s", "state MB", "TB/s", "state%", "copy us", "x copy", "host us");
    if (columns == kPeers) printf(" %8s %8s %8s %8s %8s", "FlashQLA", "FlashInf", "FLA", "goal", "x best");
    putchar('\n');
}

static bool within(const bench_error *e) {
    return e->relative <= e->tolerance;
}

static void print_case(const bench_case *c, const bench_result *r, const bench_machine *m, suite_columns columns) {
    char heads[24], dims[24], lengths[48], spread[40];
    snprintf(heads, sizeof heads, "%d/%d", (int)c->hq, (int)c->hv);
    snprintf(dims, sizeof dims, "%d/%d", (int)c->k, (int)c->v);
    snprintf(spread, sizeof spread, "%.1f..%.1f", r->p10, r->p90);
    describe_lengths(c, lengths, sizeof lengths);
    double seconds = r->median * 1e-6, rate = case_bytes(c) / seconds;
    printf("%-8s %7s %8s %16s %5s %10.1f %17s %8.3g %8.4g %6.3g", operations[c->operation], heads, dims, lengths,
           dtypes[c->operation == GDELTA_OPERATION_STEP ? c->state_dtype : c->dtype], r->median, spread,
           case_flops(c) / seconds / 1e12, rate / 1e9, 100 * case_floor(c) / r->median);
    if (m->copy_bytes_per_second > 0)
        printf(" %6.1f", 100 * rate / m->copy_bytes_per_second);
    else
        printf(" %6s", "-");
    if (columns == kDecode) {
        double bytes = case_state_bytes(c), state = bytes / seconds;
        printf(" %9.1f %6.3f %6.1f", bytes / 1e6, state / 1e12, 100 * state / m->copy_bytes_per_second);
        printf(" %8.1f %6.2f %8.2f", r->copy, r->median / r->copy, r->host);
    }
    if (columns == kPeers) {
        print_peer(c->peers.flash_qla);
        print_peer(c->peers.flash_infer);
        print_peer(c->peers.fla);
        print_peer(c->peers.goal);
        print_peer(best_peer(&c->peers) > 0 ? best_peer(&c->peers) * 1e3 / r->median : 0);
    }
    putchar('\n');
    if (r->errors) {
        printf("         check, %" PRId64 " tokens, worst head:", r->checked_tokens);
        for (int i = 0; i < r->errors; ++i) {
            const bench_error *e = &r->error[i];
            printf(" %s %.1e", e->tensor, e->relative);
            if (!within(e)) printf(" FAIL (at most %.0e)", e->tolerance);
        }
        putchar('\n');
    }
    printf("         %d x %d calls; %s; ", r->repeats, r->calls, r->plan);
    if (case_checkpoints(c)) printf("%" PRId64 " checkpoints; ", case_checkpoints(c));
    printf("first call %.0f us\n", r->first);
    fflush(stdout);
}

static void json_case(FILE *out, const bench_case *c, const bench_result *r, bool first) {
    fprintf(out, "%s\n  {\"op\": \"%s\", \"hq\": %d, \"hv\": %d, \"k\": %d, \"v\": %d, \"dtype\": \"%s\", ",
            first ? "" : ",", operations[c->operation], (int)c->hq, (int)c->hv, (int)c->k, (int)c->v, dtypes[c->dtype]);
    fprintf(out,
            "\"state_dtype\": \"%s\", \"state_order\": \"%s\", \"gate\": \"%s\", \"sequences\": %d, \"rows\": %" PRId64
            ", \"plan\": \"%s\", ",
            dtypes[c->state_dtype], orders[c->state_order], gates[c->gate], c->sequences, case_rows(c), r->plan);
    if (case_checkpoints(c)) fprintf(out, "\"checkpoint_every\": %" PRId64 ", ", c->checkpoint_interval);
    fprintf(out, "\"us\": %.3f, \"p10\": %.3f, \"p90\": %.3f, \"repeats\": %d, \"calls\": %d, ", r->median, r->p10,
            r->p90, r->repeats, r->calls);
    if (r->host > 0) fprintf(out, "\"host_us\": %.3f, \"copy_us\": %.3f, ", r->host, r->copy);
    fprintf(out, "\"first_call_us\": %.1f, \"checked_tokens\": %" PRId64 ", ", r->first, r->checked_tokens);
    fprintf(out, "\"flops\": %.6g, \"bytes\": %.6g, \"floor_us\": %.3f, ", case_flops(c), case_bytes(c), case_floor(c));
    fprintf(out, "\"peers_ms\": {\"flash_qla\": %g, \"flash_infer\": %g, \"fla\": %g, \"goal\": %g}, \"errors\": {",
            c->peers.flash_qla, c->peers.flash_infer, c->peers.fla, c->peers.goal);
    for (int i = 0; i < r->errors; ++i) {
        fprintf(out, "%s\"%s\": ", i ? ", " : "", r->error[i].tensor);
        if (r->error[i].relative < 1e300)
            fprintf(out, "%.3e", r->error[i].relative);
        else
            fprintf(out, "null"); /* JSON has no infinity */
    }
    fprintf(out, "}}");
}

/* Options that choose among a suite's cases. */
enum { kNamedBatch = 1, kNamedTokens = 2, kNamedHeads = 4, kNamedState = 8 };

/* What the options say. */
typedef struct options {
    unsigned named;
    bench_case base;
    int operation; /* 3: all */
    int batch, tokens, repeats;
    bool check;
    const char *suite, *json;
} options;

static options parse(int count, char **arguments) {
    options o = {.base = {.hq = 16,
                          .hv = 32,
                          .k = 128,
                          .v = 128,
                          .dtype = GDELTA_DTYPE_BF16,
                          .state_dtype = GDELTA_DTYPE_FP32,
                          .sequences = 1,
                          .length = {8192},
                          .gate = kGateMild},
                 .operation = 3,
                 .batch = 128,
                 .tokens = 1};
    static const struct option known[] = {{"op", 1, NULL, 'o'},
                                          {"engine", 1, NULL, 'e'},
                                          {"hq", 1, NULL, 'q'},
                                          {"hv", 1, NULL, 'h'},
                                          {"k", 1, NULL, 'k'},
                                          {"v", 1, NULL, 'v'},
                                          {"dtype", 1, NULL, 'd'},
                                          {"state-dtype", 1, NULL, 's'},
                                          {"seqlens", 1, NULL, 'l'},
                                          {"batch", 1, NULL, 'b'},
                                          {"tokens", 1, NULL, 't'},
                                          {"gate", 1, NULL, 'g'},
                                          {"suite", 1, NULL, 'S'},
                                          {"check", 0, NULL, 'c'},
                                          {"repeats", 1, NULL, 'r'},
                                          {"json", 1, NULL, 'j'},
                                          {"state-order", 1, NULL, 'O'},
                                          {"help", 0, NULL, '?'},
                                          {"checkpoint-every", 1, NULL, 'C'},
                                          {"small-workspace", 0, NULL, 'w'},
                                          {NULL, 0, NULL, 0}};
    opterr = 0;
    int c;
    while ((c = getopt_long(count, arguments, "", known, NULL)) != -1) {
        switch (c) {
            case 'o':
                o.operation = choose("unknown --op", optarg, operations);
                break;
            case 'e': {
                int engine = choose("unknown --engine", optarg, engines);
                o.base.on_cpu = engine == 3;
                o.base.engine = engine == 3 ? GDELTA_ENGINE_AUTO : engine;
                break;
            }
            case 'q':
                o.base.hq = number("bad --hq", optarg, 1, 1 << 20);
                break;
            case 'h':
                o.base.hv = number("bad --hv", optarg, 1, 1 << 20);
                o.named |= kNamedHeads;
                break;
            case 'k':
                o.base.k = number("bad --k", optarg, 1, 256);
                break;
            case 'v':
                o.base.v = number("bad --v", optarg, 1, 256);
                break;
            case 'd':
                o.base.dtype = choose("unknown --dtype", optarg, dtypes);
                break;
            case 's':
                o.base.state_dtype = choose("unknown --state-dtype", optarg, dtypes);
                o.named |= kNamedState;
                break;
            case 'O':
                o.base.state_order = choose("unknown --state-order", optarg, orders);
                break;
            case 'l':
                if (!case_parse_lengths(&o.base, optarg)) die("bad --seqlens", optarg);
                break;
            case 'b':
                o.batch = number("bad --batch", optarg, 1, 1 << 20);
                o.named |= kNamedBatch;
                break;
            case 't':
                o.tokens = number("bad --tokens", optarg, 1, 16);
                o.named |= kNamedTokens;
                break;
            case 'C':
                o.base.checkpoint_interval = number("bad --checkpoint-every", optarg, 1, INT32_MAX);
                break;
            case 'w':
                o.base.small_workspace = true;
                break;
            case 'g':
                o.base.gate = choose("unknown --gate", optarg, gates);
                break;
            case 'S':
                o.suite = optarg;
                break;
            case 'c':
                o.check = true;
                break;
            case 'r':
                o.repeats = number("bad --repeats", optarg, 1, kMaxRepeats);
                break;
            case 'j':
                o.json = optarg;
                break;
            default:
                if (optopt == 0 && !strcmp(arguments[optind - 1], "--help")) {
                    usage(stdout);
                    exit(0);
                }
                die("bad option", arguments[optind - 1]);
        }
    }
    if (optind < count) die("unexpected", arguments[optind]);
    if (o.suite && o.base.on_cpu && strcmp(o.suite, "quick") != 0) die("a GPU is needed for --suite", o.suite);
    return o;
}

/* Whether a case of a suite has what the options name. */
static bool chosen(const options *o, const bench_case *c) {
    bool is_step = c->operation == GDELTA_OPERATION_STEP;
    return (!(o->named & kNamedBatch) || (is_step && c->sequences == o->batch)) &&
           (!(o->named & kNamedTokens) || (is_step && c->length[0] == o->tokens)) &&
           (!(o->named & kNamedHeads) || c->hv == o->base.hv) &&
           (!(o->named & kNamedState) || c->state_dtype == o->base.state_dtype);
}

static int single_cases(const options *o, bench_case *cases) {
    for (int op = 0; op < 3; ++op) {
        cases[op] = o->base;
        cases[op].operation = op;
    }
    cases[GDELTA_OPERATION_STEP].sequences = o->batch;
    cases[GDELTA_OPERATION_STEP].length[0] = o->tokens;
    return 3;
}

int main(int count, char **arguments) {
    static bench_case cases[kMaxCases];
    options o = parse(count, arguments);
    int total = o.suite ? suite_cases(o.suite, &o.base, cases) : single_cases(&o, cases);
    if (total < 0) die("unknown --suite", o.suite);
    if (!o.base.on_cpu && measure_no_gpu()) {
        fprintf(stderr, "gdelta-bench: no GPU (%s); --engine reference runs on the CPU\n", measure_no_gpu());
        return 1;
    }
    FILE *json = o.json ? fopen(o.json, "w") : NULL;
    if (o.json && json == NULL) die("cannot write", o.json);

    bench_machine machine;
    measure_machine(o.base.on_cpu, &machine);
    char date[32];
    time_t now = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", localtime(&now));
    printf("gdelta %" PRId32 ", %s, %s, gate %s", gdelta_version(), machine.name, date, gates[o.base.gate]);
    if (!o.base.on_cpu) {
        printf("; copy %.0f GB/s, two events with nothing between %.1f us, an empty kernel in a graph of many %.2f us",
               machine.copy_bytes_per_second / 1e9, machine.event_overhead, machine.empty_kernel);
    } else if (o.check) {
        printf("; no check: this is the reference itself");
    }
    putchar('\n');
    suite_columns columns = !o.suite                     ? kPlain
                            : !strcmp(o.suite, "h200")   ? kPeers
                            : !strcmp(o.suite, "decode") ? kDecode
                                                         : kPlain;
    print_head(columns);
    if (json) {
        fprintf(json,
                "{\"version\": %" PRId32
                ", \"device\": \"%s\", \"date\": \"%s\", \"copy_bytes_per_second\": %.6g, "
                "\"event_overhead_us\": %.3f, \"empty_kernel_us\": %.3f, \"cases\": [",
                gdelta_version(), machine.name, date, machine.copy_bytes_per_second, machine.event_overhead,
                machine.empty_kernel);
    }
    int failed = 0, written = 0;
    for (int i = 0; i < total; ++i) {
        if (o.operation != 3 && cases[i].operation != o.operation) continue;
        if (o.suite && !chosen(&o, &cases[i])) continue;
        bench_result result;
        fprintf(stderr, "case %d of %d\r", i + 1, total);
        if (!measure_case(&cases[i], o.repeats, o.check && !o.base.on_cpu, &result)) {
            ++failed;
            continue;
        }
        print_case(&cases[i], &result, &machine, columns);
        for (int e = 0; e < result.errors; ++e) failed += !within(&result.error[e]);
        if (json) json_case(json, &cases[i], &result, written++ == 0);
    }
    if (json) {
        fprintf(json, "\n]}\n");
        if (fclose(json) != 0) {
            fprintf(stderr, "gdelta-bench: %s could not be written\n", o.json);
            return 1;
        }
    }
    return failed ? 1 : 0;
}
