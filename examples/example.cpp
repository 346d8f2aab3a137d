// gdelta from C++17: structs start from zeros, a plan is a unique_ptr, an error is an exception with the sentence.
#include <gdelta/reference.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <vector>

static void check(gdelta_status status) {
    if (status != GDELTA_OK) throw std::runtime_error(gdelta_last_error());
}

int main() {
    gdelta_problem problem{};
    problem.struct_size = sizeof problem;
    problem.batch = 1, problem.tokens = 1000;
    problem.heads_q = problem.heads_k = 2, problem.heads_v = 4;
    problem.dim_k = problem.dim_v = 64;
    problem.dtype = GDELTA_DTYPE_FP32;
    problem.l2norm = GDELTA_L2NORM_ADD_EPS;

    std::vector<float> q(1000 * 2 * 64, 1.0f), k = q, v(1000 * 4 * 64, 1.0f), o(v.size());
    gdelta_forward_args args{};
    args.struct_size = sizeof args;
    args.q.data = q.data(), args.k.data = k.data(), args.v.data = v.data(), args.o.data = o.data();
    check(gdelta_reference_forward(&problem, &args));  // on the CPU
    std::printf("o[0] = %g\n", o[0]);

    gdelta_plan *made = nullptr;  // on the GPU: the same args with device pointers
    check(gdelta_plan_create(&problem, &made));
    std::unique_ptr<gdelta_plan, decltype(&gdelta_plan_destroy)> plan(made, gdelta_plan_destroy);
    size_t bytes = 0;
    check(gdelta_plan_workspace_size(plan.get(), GDELTA_OPERATION_FORWARD, &bytes));
    std::printf("cudaMalloc %zu bytes, then gdelta_forward(plan.get(), &args, workspace, bytes, stream)\n", bytes);
}
