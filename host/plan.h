/* What the library decided about a problem. Pure data. */
#ifndef GDELTA_PLAN_H
#define GDELTA_PLAN_H

#include "host/workspace.h"
#include "kernels/args.h"

struct gdelta_plan {
    gdelta_problem problem; /* as given */
    gdelta_shape shape;
    gdelta_engine forward_engine;                 /* of a forward that saves nothing, where it can take the call */
    gdelta_engine backward_engine;                /* likewise; step and commit are the recurrent engine's */
    gdelta_hopper_choice choice, backward_choice; /* hopper forward and backward */
    int32_t slices;     /* that a backward takes its heads in: 1 but for GDELTA_FLAG_SMALL_WORKSPACE */
    gdelta_shape slice; /* of each */
    int32_t compute_capability, multiprocessors;
    gdelta_workspace_table forward, backward, step;
    size_t saved_bytes;
};

#endif /* GDELTA_PLAN_H */
