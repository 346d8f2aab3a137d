/* From a checked call to launches: buffers, device, engine. */
#ifndef GDELTA_RUN_H
#define GDELTA_RUN_H

#include "host/plan.h"

/* Buffers that a caller hands in, not looked at yet. */
typedef struct gdelta_buffers {
    void *workspace;
    size_t workspace_bytes;
    void *saved;
    size_t saved_bytes;
} gdelta_buffers;

gdelta_status gdelta_run_forward(const gdelta_plan *plan, const gdelta_forward_call *call,
                                 const gdelta_buffers *buffers, gdelta_stream stream);
/* `saved` stays unused. */
gdelta_status gdelta_run_step(const gdelta_plan *plan, const gdelta_draft_call *call, const gdelta_buffers *buffers,
                              gdelta_stream stream);
gdelta_status gdelta_run_commit(const gdelta_plan *plan, const gdelta_commit_call *call, const gdelta_buffers *buffers,
                                gdelta_stream stream);
gdelta_status gdelta_run_backward(const gdelta_plan *plan, const gdelta_backward_call *call,
                                  const gdelta_buffers *buffers, gdelta_stream stream);

#endif /* GDELTA_RUN_H */
