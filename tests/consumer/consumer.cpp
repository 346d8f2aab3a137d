// gdelta from C++17: the linked version, one token on the CPU by hand arithmetic, a plan, and a refusal.
#include <gdelta/reference.h>

#include <cstdio>
#include <cstring>
#include <memory>

int main() {
    float q = 2, k = 3, v = 5, beta = 0.5f, o = -1;

    gdelta_problem problem{};
    problem.struct_size = sizeof problem;
    problem.batch = problem.tokens = 1;
    problem.heads_q = problem.heads_k = problem.heads_v = 1;
    problem.dim_k = problem.dim_v = 1;
    problem.dtype = GDELTA_DTYPE_FP32;

    gdelta_forward_args args{};
    args.struct_size = sizeof args;
    args.q.data = &q;
    args.k.data = &k;
    args.v.data = &v;
    args.beta.data = &beta;
    args.o.data = &o;

    int failures = 0;
    auto expect = [&failures](bool truth, const char *what) {
        if (!truth) ++failures, std::printf("wrong: %s (last error: %s)\n", what, gdelta_last_error());
    };

    expect(gdelta_version() == GDELTA_VERSION_MAJOR * 10000 + GDELTA_VERSION_MINOR * 100 + GDELTA_VERSION_PATCH,
           "the library's version is the header's");

    expect(gdelta_reference_forward(&problem, &args) == GDELTA_OK, "the reference runs");
    expect(o == 15, "o = q (k beta v) = 2 * 3 * 0.5 * 5");

    gdelta_plan *made = nullptr;
    expect(gdelta_plan_create(&problem, &made) == GDELTA_OK, "a plan needs no GPU");
    std::unique_ptr<gdelta_plan, decltype(&gdelta_plan_destroy)> plan(made, gdelta_plan_destroy);
    char line[512];
    expect(gdelta_plan_describe(plan.get(), line, sizeof line) == std::strlen(line), "the plan describes itself");

    args.q.data = nullptr;
    expect(gdelta_forward(plan.get(), &args, nullptr, 0, nullptr) == GDELTA_ERROR_INVALID_ARGUMENT, "q is needed");
    expect(std::strstr(gdelta_last_error(), "q") != nullptr, "the sentence names q");

    if (!failures) std::puts(line);
    return failures != 0;
}
