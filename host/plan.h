/* What the library decided about a problem. Pure data. */
#ifndef GDELTA_PLAN_H
#define GDELTA_PLAN_H

#include "host/workspace.h"
#include "kernels/args.h"

struct gdelta_plan {
    gdelta_problem problem; /* as given */
    gdelta_shape shape;
    gdelta_engine engine;
    int32_t compute_capability, multiprocessors;
    gdelta_workspace_table forward, backward;
    size_t saved_bytes;
};

#endif /* GDELTA_PLAN_H */
