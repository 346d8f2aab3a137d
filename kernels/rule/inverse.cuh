// T = (I + A)^-1 of a strictly lower triangular A_ij = beta_i kk_ij, 64 x 64, by one warp in registers; no gate is
// needed for it.
//
//   8 x 8 diagonal blocks: forward substitution in fp32, a row of T a lane;
//   then, with U = T^T in blocks of 8 and of 16,   U_ji = -(sum over j <= k < i of U_jk A_ik^T) U_ii.
//
// Transposed, for then no block changes its layout: what a product leaves (D) is the next one's left operand, and right
// operands are transposes of what is there anyway. Operands fp16, sums fp32. With |k| <= 1 every sum is a w_i.k_j of
// the delta rule and stays below beta, which a power series does not grant: it overflows fp16 on correlated keys. fp16
// and not bf16, inside and for the result: where keys are alike, what is left of them is a difference of nearly equal
// terms of T.
#pragma once

#include "kernels/tile/panel.cuh"

namespace gdelta {

// A 16 x 16 block of fp16 as a lane holds it: the left operand of mma, four 8 x 8 matrices, those of a column together.
using Square = uint32_t[4];

// kk below the diagonal, once for all who need it: matrices of fp32.
struct InverseInput {
    float diagonal[8][68];   // 8 x 8; four blocks of a step are 4 banks apart
    float2 corner[4][32];    // upper right quarters of the diagonal's 16 x 16 blocks: the lane's elements
    float4 below[6][2][32];  // blocks of 16: the lane's elements, by rows of blocks
};

// Place of block (i, j), j <= i, of a lower triangle of 4 x 4 blocks.
__device__ __forceinline__ constexpr int lower_block(int i, int j) {
    return i * (i + 1) / 2 + j;
}

__device__ __forceinline__ void pack_square(const float (&y)[8], float upper, float lower, Square &r) {
    r[0] = pack<__half>(upper * y[0], upper * y[1]);
    r[1] = pack<__half>(lower * y[2], lower * y[3]);
    r[2] = pack<__half>(upper * y[4], upper * y[5]);
    r[3] = pack<__half>(lower * y[6], lower * y[7]);
}
__device__ __forceinline__ void pack_square(const float (&y)[8], Square &r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = pack<__half>(y[2 * i], y[2 * i + 1]);
}

// y += a b^T.
__device__ __forceinline__ void multiply_transposed(float (&y)[8], const Square &a, const Square &b) {
    mma<__half>(reinterpret_cast<float(&)[4]>(y[0]), a, b[0], b[2]);
    mma<__half>(reinterpret_cast<float(&)[4]>(y[4]), a, b[1], b[3]);
}

// A warp's block (i, j) of kk goes to its place.
__device__ __forceinline__ void put_inverse_input(InverseInput &input, int i, int j, const float (&y)[8]) {
    int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
    if (j == i) {
        *reinterpret_cast<float2 *>(&input.diagonal[2 * i][8 * row + column]) = make_float2(y[0], y[1]);
        *reinterpret_cast<float2 *>(&input.diagonal[2 * i + 1][8 * row + column]) = make_float2(y[6], y[7]);
        input.corner[i][lane] = make_float2(y[4], y[5]);  // kk is symmetric
    } else {
        int at = lower_block(i - 1, j);
        input.below[at][0][lane] = make_float4(y[0], y[1], y[2], y[3]);
        input.below[at][1][lane] = make_float4(y[4], y[5], y[6], y[7]);
    }
}

enum { kInverseScratch = 1024 + 512 + 16 };

// u[lower_block(i, j)] = U_ji. `scratch`: of shared memory, the warp's own.
__device__ __forceinline__ void invert_lower(const InverseInput &input, const float *beta, uint32_t scratch,
                                             Square (&u)[10]) {
    int lane = threadIdx.x % 32, i = lane & 7;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Row i of T (I + A) = I: t_j = delta_ij - sum over m > j of t_m A_mj. Eight lanes a block.
        const float *a = input.diagonal[4 * half + lane / 8];
        const float4 *b = reinterpret_cast<const float4 *>(beta + 32 * half + lane / 8 * 8);
        float4 b0 = b[0], b1 = b[1];
        float factor[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w}, t[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) t[j] = j == i ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 7; m > 0; --m) {
            float f = -factor[m] * t[m];
#pragma unroll
            for (int j = 0; j < m; j += 4) {
                float4 four = *reinterpret_cast<const float4 *>(&a[8 * m + j]);
                float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int d = 0; d < 4 && j + d < m; ++d) t[j + d] = fmaf(f, row[d], t[j + d]);
            }
        }
        st_shared(scratch + 512 * half + 16 * lane, make_uint4(pack<__half>(t[0], t[1]), pack<__half>(t[2], t[3]),
                                                               pack<__half>(t[4], t[5]), pack<__half>(t[6], t[7])));
    }
    __syncwarp();

    // 8 -> 16: T21 = -(T22 A21) T11. The second of a pair of matrices is in T22's place.
    uint32_t second[4], first_transposed[4], at = scratch + 256 * (lane / 8) + 16 * i, corners = scratch + 1024;
    ldmatrix_x4(at + 128, second);
    ldmatrix_x4_trans(at, first_transposed);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        float2 kk = input.corner[b][lane];
        float2 f = *reinterpret_cast<const float2 *>(&beta[16 * b + 8 + lane % 4 * 2]);
        float y[4] = {}, z[4] = {};
        mma_k8<__half>(y, second[b], 0, pack<__half>(-f.x * kk.x, -f.y * kk.y));
        mma_k8<__half>(z, pack<__half>(y[0], y[1]), 0, first_transposed[b]);
        st_shared(corners + 128 * b + 4 * lane, pack<__half>(z[0], z[1]));
    }
    if (lane == 0) st_shared(corners + 512, make_uint4(0, 0, 0, 0));
    __syncwarp();
    // Matrices T11, 0, T21, T22: the order of U_bb as left operand, and of T_bb as transposed right one.
    uint32_t from = lane / 8 == 1   ? corners + 512
                    : lane / 8 == 2 ? corners + 16 * i
                                    : scratch + lane / 8 / 2 * 128 + 16 * i;
    uint32_t step = lane / 8 == 1 ? 0 : lane / 8 == 2 ? 128 : 256;
    Square t[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        ldmatrix_x4_trans(from + b * step, u[lower_block(b, b)]);
        if (b > 0) ldmatrix_x4(from + b * step, t[b]);
    }
#pragma unroll
    for (int i = 1; i < 4; ++i) {
        Square a[3];  // -A_ik
        float upper = -beta[16 * i + lane / 4], lower = -beta[16 * i + 8 + lane / 4];
#pragma unroll
        for (int k = 0; k < i; ++k) {
            float4 x = input.below[lower_block(i - 1, k)][0][lane], y = input.below[lower_block(i - 1, k)][1][lane];
            float kk[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
            pack_square(kk, upper, lower, a[k]);
        }
#pragma unroll
        for (int j = 0; j < i; ++j) {
            float y[8] = {}, z[8] = {};
            Square f;
#pragma unroll
            for (int k = j; k < i; ++k) multiply_transposed(y, u[lower_block(k, j)], a[k]);
            pack_square(y, f);
            mma<__half>(reinterpret_cast<float(&)[4]>(z[0]), f, t[i][0], t[i][1]);
            mma<__half>(reinterpret_cast<float(&)[4]>(z[4]), f, t[i][2], t[i][3]);
            pack_square(z, u[lower_block(i, j)]);
        }
    }
}

}  // namespace gdelta
