// What the tensors g and beta mean: from what they hold to the decay exp(g) and beta, and back for the gradients.
#pragma once

#include "kernels/rule/element.cuh"

namespace gdelta {

// softplus, linear above 20 where log1p(exp(x)) - x < 2.1e-9; exp(x) does not overflow.
__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// One head's gate parameters.
struct GateParameters {
    float a;     // exp(A_log)
    float bias;  // dt_bias
};

// The same on their way from memory, where nothing may wait for them yet.
struct GateBits {
    uint32_t a_log, dt_bias;

    __device__ __forceinline__ void load(const gdelta_inputs &in, int head) {
        if (in.a_log.data) a_log = load_bits(in.a_log.data, in.a_log.dtype, head * in.a_log.head);
        if (in.dt_bias.data) dt_bias = load_bits(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.head);
    }

    __device__ __forceinline__ GateParameters parameters(const gdelta_inputs &in) const {
        GateParameters p = {0.0f, 0.0f};
        if (in.a_log.data) p.a = expf(bits_to_float(a_log, in.a_log.dtype));
        if (in.dt_bias.data) p.bias = bits_to_float(dt_bias, in.dt_bias.dtype);
        return p;
    }
};

__device__ __forceinline__ GateParameters load_gate_parameters(const gdelta_inputs &in, int head) {
    GateParameters p = {0.0f, 0.0f};
    if (in.a_log.data) p.a = expf(load_element(in.a_log.data, in.a_log.dtype, head * in.a_log.head));
    if (in.dt_bias.data) p.bias = load_element(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.head);
    return p;
}

// exp(g): exactly 0 for g = -inf.
__device__ __forceinline__ float decay_of(gdelta_gate gate, float x, GateParameters p) {
    if (gate == GDELTA_GATE_LINEAR) return x;
    if (gate == GDELTA_GATE_SOFTPLUS) x = -p.a * softplus(x + p.bias);
    return expf(x);
}

// log2 of exp(g), at least -128: exp2_fast makes that exactly 0, and a sum of 64 keeps 12 bits behind the point.
__device__ __forceinline__ float log2_decay_of(gdelta_gate gate, float x, GateParameters p) {
    float log2 = 1.4426950408889634f * x;
    if (gate == GDELTA_GATE_LINEAR) log2 = log2f(x);
    if (gate == GDELTA_GATE_SOFTPLUS) log2 = -1.4426950408889634f * p.a * softplus(x + p.bias);
    return log2 < -128.0f ? -128.0f : log2;  // NaN stays
}

__device__ __forceinline__ float beta_of(gdelta_beta mode, float x) {
    if (mode == GDELTA_BETA_VALUE) return x;
    return mode == GDELTA_BETA_SIGMOID ? sigmoid(x) : 2.0f * sigmoid(x);
}

// d beta / d x.
__device__ __forceinline__ float beta_slope(gdelta_beta mode, float x) {
    if (mode == GDELTA_BETA_VALUE) return 1.0f;
    float slope = sigmoid(x) * sigmoid(-x);
    return mode == GDELTA_BETA_SIGMOID ? slope : 2.0f * slope;
}

// One token's g and beta on their way from memory.
struct Gates {
    uint32_t g, beta;

    // At element offsets of g and beta.
    __device__ __forceinline__ void load(const gdelta_inputs &in, int64_t at_g, int64_t at_beta) {
        if (in.g.data) g = load_bits(in.g.data, in.g.dtype, at_g);
        if (in.beta.data) beta = load_bits(in.beta.data, in.beta.dtype, at_beta);
    }

    // exp(g), 1 without a gate.
    __device__ __forceinline__ float decay(const gdelta_shape &shape, const gdelta_inputs &in, GateParameters p) const {
        return in.g.data ? decay_of(shape.gate, bits_to_float(g, in.g.dtype), p) : 1.0f;
    }

    // log2 of that, 0 without a gate.
    __device__ __forceinline__ float log2_decay(const gdelta_shape &shape, const gdelta_inputs &in,
                                                GateParameters p) const {
        return in.g.data ? log2_decay_of(shape.gate, bits_to_float(g, in.g.dtype), p) : 0.0f;
    }

    // beta, 1 without a beta.
    __device__ __forceinline__ float beta_value(const gdelta_shape &shape, const gdelta_inputs &in) const {
        return in.beta.data ? beta_of(shape.beta, bits_to_float(beta, in.beta.dtype)) : 1.0f;
    }
};

}  // namespace gdelta
