#include "host/layout.h"

size_t gdelta_dtype_size(gdelta_dtype dtype) {
    switch (dtype) {
        case GDELTA_DTYPE_BF16:
            return 2;
        case GDELTA_DTYPE_FP16:
            return 2;
        case GDELTA_DTYPE_FP32:
            return 4;
        case GDELTA_DTYPE_FP64:
            return 8;
        case GDELTA_DTYPE_INT32:
            return 4;
        case GDELTA_DTYPE_INT64:
            return 8;
        default:
            return 0;
    }
}

const char *gdelta_dtype_name(gdelta_dtype dtype) {
    switch (dtype) {
        case GDELTA_DTYPE_DEFAULT:
            return "default";
        case GDELTA_DTYPE_BF16:
            return "bf16";
        case GDELTA_DTYPE_FP16:
            return "fp16";
        case GDELTA_DTYPE_FP32:
            return "fp32";
        case GDELTA_DTYPE_FP64:
            return "fp64";
        case GDELTA_DTYPE_INT32:
            return "int32";
        case GDELTA_DTYPE_INT64:
            return "int64";
        default:
            return "unknown";
    }
}

void gdelta_layout_strides(gdelta_layout layout, const int64_t extent[4], int64_t stride[4]) {
    /* Axes 0 batch, 1 token, 2 head, from innermost to outermost. */
    static const int order[4][3] = {
        [GDELTA_LAYOUT_BSHD] = {2, 1, 0},
        [GDELTA_LAYOUT_SBHD] = {2, 0, 1},
        [GDELTA_LAYOUT_BHSD] = {1, 2, 0},
        [GDELTA_LAYOUT_THD] = {2, 1, 0},
    };
    int64_t step = extent[3];
    stride[3] = 1;
    for (int i = 0; i < 3; ++i) {
        int axis = order[layout][i];
        stride[axis] = step;
        step *= extent[axis];
    }
    if (layout == GDELTA_LAYOUT_THD) stride[0] = 0;
}

bool gdelta_layout_span(const int64_t extent[4], const int64_t stride[4], int64_t *span) {
    *span = 0;
    for (int axis = 0; axis < 4; ++axis) {
        int64_t length;
        if (extent[axis] <= 1) continue;
        if (__builtin_mul_overflow(extent[axis] - 1, stride[axis], &length)) return false;
        if (__builtin_add_overflow(*span, length, span)) return false;
    }
    return *span < INT64_MAX / 16;
}

bool gdelta_layout_distinct(const int64_t extent[4], const int64_t stride[4]) {
    int order[4] = {0, 1, 2, 3};
    for (int i = 1; i < 4; ++i) {
        for (int j = i; j > 0 && stride[order[j]] < stride[order[j - 1]]; --j) {
            int swap = order[j];
            order[j] = order[j - 1];
            order[j - 1] = swap;
        }
    }
    int64_t span = 0; /* from the first to the last element of the axes looked at so far */
    for (int i = 0; i < 4; ++i) {
        int axis = order[i];
        if (extent[axis] <= 1) continue;
        if (stride[axis] <= span) return false;
        span += (extent[axis] - 1) * stride[axis];
    }
    return true;
}
