#include "host/tensor_map.h"

#include <inttypes.h>
#include <stdio.h>

#include "host/device.h"
#include "host/layout.h"
#include "kernels/config.h"

enum {
    kElementBytes = 2,
    kPanel = 64, /* elements of a row that lie side by side in shared memory: 128 bytes, one span of the swizzle */
    kAlignment = 16
};

/* Axes that have strides of the caller's, in the order of gdelta_tensor.stride. */
typedef struct axis {
    int64_t extent, stride;
} axis;

static void find_axes(const gdelta_shape *shape, const gdelta_mapped *tensor, axis axes[3]) {
    axes[0] = (axis){shape->packed ? 1 : shape->sequences, tensor->view->batch};
    axes[1] = (axis){shape->packed ? shape->rows : shape->tokens, tensor->view->token};
    axes[2] = (axis){tensor->heads, tensor->view->head};
}

bool gdelta_tensor_map_fits(const gdelta_shape *shape, const gdelta_mapped *tensor, char *why, size_t size) {
    const gdelta_view *view = tensor->view;
    if (gdelta_dtype_size(view->dtype) != kElementBytes) {
        snprintf(why, size, "%s.dtype is %s; the copy engine takes bf16 and fp16 here", tensor->name,
                 gdelta_dtype_name(view->dtype));
        return false;
    }
    if ((uintptr_t)view->data % kAlignment != 0) {
        snprintf(why, size, "%s.data is %p; the copy engine needs it aligned to %d bytes", tensor->name, view->data,
                 kAlignment);
        return false;
    }
    axis axes[3];
    find_axes(shape, tensor, axes);
    for (int i = 0; i < 3; ++i) {
        if (axes[i].extent > INT32_MAX) { /* boxes are asked for by 32-bit coordinates */
            snprintf(why, size, "%s has %" PRId64 " rows on axis %d; the copy engine takes at most 2^31 - 1",
                     tensor->name, axes[i].extent, i);
            return false;
        }
        if (axes[i].extent <= 1) continue; /* its stride counts for nothing */
        if (axes[i].stride % (kAlignment / kElementBytes) != 0 || axes[i].stride >= INT64_C(1) << 39) {
            snprintf(why, size,
                     "%s.stride[%d] is %" PRId64 "; the copy engine needs a multiple of %d elements, less than 2^39",
                     tensor->name, i, axes[i].stride, kAlignment / kElementBytes);
            return false;
        }
    }
    return true;
}

gdelta_status gdelta_tensor_map_encode(const gdelta_shape *shape, const gdelta_mapped *tensor, gdelta_tensor_map *map) {
    enum { kPanelBytes = kPanel * kElementBytes };
    axis axes[3];
    uint64_t byte_stride[3];
    find_axes(shape, tensor, axes);
    for (int i = 0; i < 3; ++i) {
        byte_stride[i] = axes[i].extent > 1 ? (uint64_t)axes[i].stride * kElementBytes : kPanelBytes;
    }
    uint32_t panels = (uint32_t)tensor->dim / kPanel;
    const uint64_t extent[5] = {kPanel, (uint64_t)axes[1].extent, panels, (uint64_t)axes[2].extent,
                                (uint64_t)axes[0].extent};
    const uint64_t strides[4] = {byte_stride[1], kPanelBytes, byte_stride[2], byte_stride[0]};
    const uint32_t box[5] = {kPanel, kChunk, 1, 1, 1};
    return gdelta_device_encode_map(map, tensor->name, tensor->view, extent, strides, box);
}
