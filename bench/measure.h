/* Times one case, and checks it against the CPU reference. */
#ifndef GDELTA_BENCH_MEASURE_H
#define GDELTA_BENCH_MEASURE_H

#include "cases.h"

typedef struct bench_error {
    const char *tensor;
    double relative; /* worst relative L2 error over sequences and heads */
    double tolerance;
} bench_error;

typedef struct bench_result {
    char plan[512];
    double median, p10, p90; /* microseconds */
    double first;            /* of the first call, host clock, to its end; module load included */
    double host;             /* a step: host clock, to enqueue a call; else 0 */
    double copy;             /* a step: median of a copy of its states onto themselves, timed as the step; else 0 */
    int repeats, calls;      /* each repeat is a graph of so many calls, on different tensors */
    int errors;
    bench_error error[10];
    int64_t checked_tokens;
} bench_result;

/* What the machine is and can do. */
typedef struct bench_machine {
    char name[256];
    double copy_bytes_per_second; /* device copy, read + write, 0 on the CPU */
    double empty_kernel;          /* microseconds of one of many in a graph */
    double event_overhead;        /* microseconds between two events with nothing between them */
} bench_machine;

/* NULL if a GPU is there, else why not. */
const char *measure_no_gpu(void);
void measure_machine(bool on_cpu, bench_machine *machine);

enum { kMaxRepeats = 1000 };

/* False, with a line on stderr, if the library refuses the case. `asked` 0: as many repeats as fit a second, 5 to 50;
 * on the CPU 1. At most kMaxRepeats. */
bool measure_case(const bench_case *c, int asked, bool check, bench_result *result);

#endif /* GDELTA_BENCH_MEASURE_H */
