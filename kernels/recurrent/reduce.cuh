// From the parts that backward leaves in the workspace to the caller's gradients.
#pragma once

#include "kernels/launch.h"

namespace gdelta {

// Enqueues what of dq, dk, dv, dg, dbeta, da_log and ddt_bias is there.
int launch_reduce(const gdelta_backward_call &call, const gdelta_recurrent_work &work, gdelta_stream stream);

}  // namespace gdelta
