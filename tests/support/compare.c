#include "compare.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fill.h"
#include "scales.h"

/* ---- Tolerances ---- */

typedef enum tensor_kind { kResult, kGradient, kGateGradient, kKinds } tensor_kind;

/* Relative L2 error of an engine's own arithmetic, by kind. */
static const double arithmetic[kEngines][kKinds] = {
    [kReference] = {1e-12, 1e-12, 1e-12},
    [kRecurrent] = {1e-5, 1e-5, 1e-4},
    [kHopper] = {5e-3, 8e-3, 1e-2}, /* products of numbers of 8 or 11 bits */
};

/* And where both results are rounded to a type: not each element falls to the same side. */
static const double rounding[] = {
    [GDELTA_DTYPE_BF16] = 5e-3,
    [GDELTA_DTYPE_FP16] = 1e-3,
    [GDELTA_DTYPE_FP32] = 1e-7,
    [GDELTA_DTYPE_FP64] = 0,
};

static tensor_kind kind_of(role role) {
    if (role == kRecordDecay) return kGateGradient; /* an exponential: the error of g, which may be large */
    if (role >= kO && role <= kCheckpoints) return kResult;
    return role == kDG || role == kDBeta || role == kDALog || role == kDDtBias ? kGateGradient : kGradient;
}

/* Rounding both results to a type adds that to the engine's own error, as a root mean square: twice 0.39 * 2^-p of
 * themselves (below), independent. */
static double two_roundings(gdelta_dtype dtype) {
    double digits = dtype == GDELTA_DTYPE_BF16 ? 0x1p-8 : dtype == GDELTA_DTYPE_FP16 ? 0x1p-11 : 0;
    return sqrt(2) * 0.39 * digits;
}

double compare_tolerance(const test_engine *engine, role role, gdelta_dtype dtype) {
    return fmax(hypot(arithmetic[engine - test_engines][kind_of(role)], two_roundings(dtype)), rounding[dtype]);
}

/* A root mean square below which a tensor counts as zero: above the subnormal numbers of the type, and for bf16 and
 * fp32 with room for the products of two such numbers' factors. */
static double tiny(gdelta_dtype dtype) {
    return dtype == GDELTA_DTYPE_FP16 ? 0x1p-14 : 1e-30;
}

/* Rounding follows the natural scale of a sum (scales.h), which is larger than the sum where its terms cancel. So what
 * is off by more than its own size allows is measured against a part of that scale.
 *
 * Hopper rounds its operands to 8 bits (bf16) or 11 (fp16). Rounding to nearest changes a number of p bits by 0.39 *
 * 2^-p of itself, as a root mean square over mantissas. Of gates' gradients each of the two factors of a term is
 * rounded as it is (S and dS', or w and y), and holds the roundings of the products that it was made by: of S those of
 * X and of beta W, of dS' those of y and of its row factors, of w and y those of R and W, of X and Z. Six in all,
 * independent: sqrt(6) times as much. A sequence of few tokens has few such errors to average, and of the thousands
 * that are compared some go to 2.7 of their standard deviations: 0.39 * 2^-8 * sqrt(6) * 2.7 = 1e-2 for bf16, the
 * tolerance of these gradients against their own size, and an eighth of it for fp16. The other results have fewer
 * factors and tolerances below that. Where gates are strong the tolerance of the size of gates' gradients is twice
 * that, for few tokens are left to share the error; that of the scale stays.
 *
 * Recurrent: a tenth of its tolerances. 1e-6 are 16 roundings of 2^-24, as a sum of 256 terms has; gates have ten times
 * that for the states that backward makes again. */
static bool is_strong(const test_case *c, role role) {
    return kind_of(role) == kGateGradient && c->strength >= kGateStrong;
}

static double scale_part(const test_engine *engine, const test_case *c, role role) {
    if (engine == &test_engines[kRecurrent]) return 0.1;
    return (c->dtype == GDELTA_DTYPE_FP16 ? 0.125 : 1) / (is_strong(c, role) ? 2 : 1);
}

bool compare_needs_scales(const test_engine *engine, role role) {
    return engine != &test_engines[kReference] && SCALED_ROLES & ROLE(role);
}

double compare_scale(const instance *scales, const test_engine *engine, role role, int64_t sequence, int64_t head) {
    double sum = 0;
    for (int64_t row = 0; row < instance_rows(scales, role, sequence); ++row) {
        for (int64_t column = 0; column < instance_columns(scales, role); ++column) {
            sum += pow(instance_get(scales, role, sequence, row, head, column), 2);
        }
    }
    return scale_part(engine, &scales->c, role) * sqrt(sum);
}

/* ---- Slices ---- */

static int64_t rows_of(slice s) {
    return s.rows ? s.rows : instance_rows(s.of, s.role, s.sequence) - s.row;
}

static const void *element(slice s, int64_t row, int64_t head, int64_t column) {
    return instance_at(s.of, s.role, s.sequence, s.row + row, head, column);
}

static double value(slice s, int64_t row, int64_t head, int64_t column) {
    return instance_get(s.of, s.role, s.sequence, s.row + row, head, column);
}

static bool same_shape(slice got, slice want) {
    if (rows_of(got) == rows_of(want) && instance_heads(got.of, got.role) == instance_heads(want.of, want.role) &&
        instance_columns(got.of, got.role) == instance_columns(want.of, want.role)) {
        return true;
    }
    fprintf(stderr, "%s and %s have different shapes\n  case: %s\n", role_name(got.role), role_name(want.role),
            case_line(&got.of->c));
    return false;
}

static void print_element(slice got, slice want, int64_t row, int64_t head, int64_t column) {
    fprintf(stderr,
            "  at sequence %" PRId64 ", row %" PRId64 ", head %" PRId64 ", column %" PRId64
            ": got %.9g, want %.9g (%s)\n  case: %s\n",
            got.sequence, got.row + row, head, column, value(got, row, head, column), value(want, row, head, column),
            role_name(want.role), case_line(&got.of->c));
}

/* The root mean square over its rows of the length of a head's rows of the whole sequence. */
static double average_row(slice part, int64_t head) {
    int64_t rows = instance_rows(part.of, part.role, part.sequence);
    slice all = {part.of, part.role, part.sequence, 0, rows};
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < instance_columns(part.of, part.role); ++column) {
            sum += pow(value(all, row, head, column), 2);
        }
    }
    return sqrt(sum / (double)rows);
}

/* Of whole sequences: no head's size counts as less than this engine's part of its scale. */
typedef struct natural {
    const test_engine *engine;
    instance scales; /* made when they are first needed: their replay takes longer than most calls */
} natural;

static double least_size(natural *natural, slice got, int64_t head) {
    if (!natural->scales.before) scales_create(&natural->scales, got.of);
    return compare_scale(&natural->scales, natural->engine, got.role, got.sequence, head);
}

/* compare_slices; natural: NULL, or what counts where a head is off. */
static bool compare_heads(slice got, slice want, double tolerance, natural *natural) {
    if (!same_shape(got, want)) return false;
    int64_t rows = rows_of(got), columns = instance_columns(got.of, got.role);
    gdelta_dtype dtype = got.of->tensor[got.role].dtype;
    for (int64_t head = 0; head < instance_heads(got.of, got.role); ++head) {
        double error = 0, size = 0, worst = -1;
        int64_t worst_row = 0, worst_column = 0;
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t column = 0; column < columns; ++column) {
                double w = fill_round(dtype, value(want, row, head, column));
                double difference = fabs(value(got, row, head, column) - w);
                size += w * w;
                error += difference * difference;
                if (difference <= worst) continue;
                worst = isnan(difference) ? INFINITY : difference;
                worst_row = row;
                worst_column = column;
            }
        }
        size = fmax(sqrt(size), tiny(dtype) * sqrt((double)(rows * columns)));
        if (want.rows) size = fmax(size, average_row(want, head) * sqrt((double)rows));
        if (rows * columns == 0 || sqrt(error) <= tolerance * size) continue;
        if (natural) size = fmax(size, least_size(natural, got, head));
        if (sqrt(error) <= tolerance * size) continue;
        fprintf(stderr, "%s: relative error %.3g, tolerance %.3g\n", role_name(got.role), sqrt(error) / size,
                tolerance);
        print_element(got, want, worst_row, head, worst_column);
        return false;
    }
    return true;
}

bool compare_slices(slice got, slice want, double tolerance) {
    return compare_heads(got, want, tolerance, NULL);
}

bool compare_slice_bits(slice got, slice want) {
    if (!same_shape(got, want)) return false;
    size_t bytes = got.of->tensor[got.role].bytes;
    if (bytes != want.of->tensor[want.role].bytes) {
        fprintf(stderr, "%s and %s have different types\n", role_name(got.role), role_name(want.role));
        return false;
    }
    for (int64_t row = 0; row < rows_of(got); ++row) {
        for (int64_t head = 0; head < instance_heads(got.of, got.role); ++head) {
            for (int64_t column = 0; column < instance_columns(got.of, got.role); ++column) {
                if (memcmp(element(got, row, head, column), element(want, row, head, column), bytes) == 0) continue;
                fprintf(stderr, "%s: different bits\n", role_name(got.role));
                print_element(got, want, row, head, column);
                return false;
            }
        }
    }
    return true;
}

/* ---- Whole tensors ---- */

bool compare_instances(const instance *got, const instance *want, role_set roles, const test_engine *engine) {
    bool good = true;
    natural natural = {.engine = engine};
    for (role r = 0; r < kRoles; ++r) {
        if (!(roles & ROLE(r))) continue;
        double tolerance = compare_tolerance(engine, r, got->tensor[r].dtype);
        if (engine == &test_engines[kHopper] && is_strong(&got->c, r)) tolerance *= 2;
        for (int64_t n = 0; n < instance_sequences(got, r); ++n) {
            slice g = {got, r, n, 0, 0}, w = {want, r, n, 0, 0};
            if (compare_heads(g, w, tolerance, compare_needs_scales(engine, r) ? &natural : NULL)) continue;
            good = false;
            break;
        }
    }
    instance_destroy(&natural.scales);
    return good;
}

bool compare_bits(const instance *got, const instance *want, role_set roles) {
    bool good = true;
    for (role r = 0; r < kRoles; ++r) {
        if (!(roles & ROLE(r))) continue;
        for (int64_t n = 0; n < instance_sequences(got, r); ++n) {
            if (compare_slice_bits((slice){got, r, n, 0, 0}, (slice){want, r, n, 0, 0})) continue;
            good = false;
            break;
        }
    }
    return good;
}

/* ---- Engine against reference ---- */

bool check_instance(instance *x, const test_engine *engine, unsigned operations) {
    instance plain;
    instance_create_plain(&plain, x);
    bool good = true;
    for (gdelta_operation operation = 0; operation <= GDELTA_OPERATION_STEP; ++operation) {
        if (!(operations & OPERATION(operation)) || !engine_runs(engine, &x->c, operation)) continue;
        good = instance_run(x, engine, operation) && instance_run(&plain, &test_engines[kReference], operation) &&
               compare_instances(x, &plain, instance_outputs(&plain, operation), engine) && good;
    }
    instance_destroy(&plain);
    return good;
}

bool check_case(const test_case *c, const test_engine *engine, unsigned operations) {
    instance x;
    instance_create(&x, c);
    bool good = check_instance(&x, engine, operations);
    instance_destroy(&x);
    return good;
}

/* ---- Engine against itself ---- */

static bool same_when_alone(const instance *crowd, int n, const test_engine *engine, gdelta_operation operation) {
    test_case c = crowd->c;
    c.sequences = 1;
    c.first_sequence = n;
    instance alone;
    instance_create(&alone, &c);
    bool good = instance_run(&alone, engine, operation);
    role_set outputs = instance_outputs(&alone, operation);
    for (role r = 0; good && r < kRoles; ++r) {
        good = !(outputs & ROLE(r)) || compare_slice_bits((slice){crowd, r, n, 0, 0}, (slice){&alone, r, 0, 0, 0});
    }
    instance_destroy(&alone);
    return good;
}

bool check_crowd(const test_case *c, const test_engine *engine, gdelta_operation operation) {
    enum { kCrowd = 40 };
    test_case many = *c;
    many.sequences = kCrowd;
    instance crowd;
    instance_create(&crowd, &many);
    bool good = instance_run(&crowd, engine, operation);
    for (int n = 0; good && n < kCrowd; n += 13) {
        good = same_when_alone(&crowd, n, engine, operation);
        if (!good) fprintf(stderr, "sequence %d of %d differs alone\n", n, kCrowd);
    }
    instance_destroy(&crowd);
    return good;
}

bool check_repeats(const test_case *c, const test_engine *engine, gdelta_operation operation) {
    instance x, first;
    device_instance d;
    instance_create(&x, c);
    instance_create(&first, c);
    bool good = instance_run(&first, engine, operation) && device_create(&d, &x, engine, operation);
    if (good) {
        gdelta_stream stream = gpu_stream_create();
        for (int call = 0; good && call < 100; ++call) {
            device_upload(&d, &x);
            good = device_enqueue(&d, &x, stream) == GDELTA_OK;
            if (!good) fprintf(stderr, "%s\n", gdelta_last_error());
            gpu_stream_finish(stream);
            good = good && device_download(&d, &x) && compare_bits(&x, &first, instance_outputs(&x, operation));
            if (!good) fprintf(stderr, "call %d differs from the first\n", call);
        }
        gpu_stream_destroy(stream);
        device_destroy(&d);
    }
    instance_destroy(&x);
    instance_destroy(&first);
    return good;
}
