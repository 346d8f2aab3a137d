#include "host/status.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];
static _Thread_local char device_sentence[160];

gdelta_status gdelta_fail(gdelta_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *gdelta_last_error(void) {
    return last_error;
}

const char *gdelta_status_string(gdelta_status status) {
    switch (status) {
        case GDELTA_OK:
            return "GDELTA_OK";
        case GDELTA_ERROR_INVALID_ARGUMENT:
            return "GDELTA_ERROR_INVALID_ARGUMENT";
        case GDELTA_ERROR_UNSUPPORTED:
            return "GDELTA_ERROR_UNSUPPORTED";
        case GDELTA_ERROR_WORKSPACE_TOO_SMALL:
            return "GDELTA_ERROR_WORKSPACE_TOO_SMALL";
        case GDELTA_ERROR_OUT_OF_MEMORY:
            return "GDELTA_ERROR_OUT_OF_MEMORY";
        case GDELTA_ERROR_CUDA:
            return "GDELTA_ERROR_CUDA";
        default:
            return "unknown status";
    }
}

const char *gdelta_device_status_string(uint64_t word) {
    static const char *const rules[] = {
        [GDELTA_DEVICE_CU_SEQLENS_START] = "must be 0",
        [GDELTA_DEVICE_CU_SEQLENS_ORDER] = "is less than the entry before it",
        [GDELTA_DEVICE_CU_SEQLENS_END] = "is greater than total_tokens",
        [GDELTA_DEVICE_CU_SEQLENS_LENGTH] = "ends a sequence longer than problem.tokens",
        [GDELTA_DEVICE_INITIAL_SLOT_RANGE] = "is outside -1..slot_count-1",
        [GDELTA_DEVICE_FINAL_SLOT_RANGE] = "is outside -1..slot_count-1",
        [GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE] = "is outside -1..slot_count-1",
        [GDELTA_DEVICE_TOKEN_SLOT_RANGE] = "is outside -1..slot_count-1",
        [GDELTA_DEVICE_PARENT_RANGE] = "is no earlier token, nor -1",
        [GDELTA_DEVICE_ACCEPTED_RANGE] = "is outside 0..T",
    };
    static const char *const tables[] = {
        [GDELTA_DEVICE_CU_SEQLENS_START] = "cu_seqlens",
        [GDELTA_DEVICE_CU_SEQLENS_ORDER] = "cu_seqlens",
        [GDELTA_DEVICE_CU_SEQLENS_END] = "cu_seqlens",
        [GDELTA_DEVICE_CU_SEQLENS_LENGTH] = "cu_seqlens",
        [GDELTA_DEVICE_INITIAL_SLOT_RANGE] = "the initial state's slots",
        [GDELTA_DEVICE_FINAL_SLOT_RANGE] = "the final state's slots",
        [GDELTA_DEVICE_CHECKPOINT_SLOT_RANGE] = "the checkpoints' slots",
        [GDELTA_DEVICE_TOKEN_SLOT_RANGE] = "the token states' slots",
        [GDELTA_DEVICE_PARENT_RANGE] = "parents",
        [GDELTA_DEVICE_ACCEPTED_RANGE] = "accepted",
    };
    uint32_t rule = (uint32_t)(word >> 32), index = (uint32_t)word;
    if (word == GDELTA_DEVICE_OK) return "no error";
    if (rule < GDELTA_DEVICE_CU_SEQLENS_START || rule > GDELTA_DEVICE_ACCEPTED_RANGE) {
        snprintf(device_sentence, sizeof device_sentence, "0x%016" PRIx64 " is not a device status word", word);
        return device_sentence;
    }
    snprintf(device_sentence, sizeof device_sentence, "entry %" PRIu32 " of %s %s", index, tables[rule], rules[rule]);
    return device_sentence;
}
