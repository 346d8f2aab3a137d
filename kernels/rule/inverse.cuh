// T = (I + A)^-1 of a strictly lower triangular A, 64 x 64, by one warpgroup; no gate is needed for it.
//
//   8 x 8 diagonal blocks: forward substitution in fp32, one row of T a lane;
//   then  T21 = -(T22 A21) T11  for blocks of 8, of 16 and of 32, fp16 operands and fp32 sums.
//
// With A_ij = beta_i k_i.k_j and |k| <= 1 every intermediate is a w_i.k_j of the delta rule and stays below beta, which
// a power series does not grant: it overflows fp16 on correlated keys. fp16 and not bf16, inside and for the result:
// where keys are alike, what is left of them is a difference of nearly equal terms of T.
#pragma once

#include "kernels/tile/panel.cuh"

namespace gdelta {

struct __align__(1024) InverseScratch {
    unsigned char a[kPanelBytes];  // A up to the diagonal's 16 x 16 blocks, fp16
    float diagonal[4][16][12];     // each warp's two 8 x 8 blocks of A; rows padded to spread over the banks
};

// Address of the lane's row of the 16 x 16 block at block row and column (r, c).
__device__ __forceinline__ uint32_t square_at(uint32_t panel, int r, int c) {
    int lane = threadIdx.x % 32;
    return panel + panel_offset(16 * r + (lane & 15), 2 * c + (lane >> 4));
}

// y += a b, 16 x 16 blocks of fp16; b is in shared memory.
__device__ __forceinline__ void multiply_square(float (&y)[8], const uint32_t (&a)[4], uint32_t b) {
    uint32_t f[4];
    ldmatrix_x4_trans(b, f);
    mma_f16(reinterpret_cast<float(&)[4]>(y[0]), a, f[0], f[1]);
    mma_f16(reinterpret_cast<float(&)[4]>(y[4]), a, f[2], f[3]);
}

__device__ __forceinline__ void pack_square(const float (&y)[8], float upper, float lower, uint32_t (&r)[4]) {
    r[0] = pack<__half>(upper * y[0], upper * y[1]);
    r[1] = pack<__half>(lower * y[2], lower * y[3]);
    r[2] = pack<__half>(upper * y[4], upper * y[5]);
    r[3] = pack<__half>(lower * y[6], lower * y[7]);
}

// kk: the warpgroup's fragments of a symmetric product; A_ij = beta_i kk_ij below the diagonal. Writes T as a panel of
// fp16 at `out`, whose blocks above the diagonal are zero already. `barrier` is a named barrier of the 128 threads: it
// is met three times, the last time after the panel is visible to bulk copies and tensor cores. `before_out` runs in
// every thread before the first write to `out`.
template <typename F>
__device__ __forceinline__ void invert_lower(const float (&kk)[32], const float *beta, InverseScratch &scratch,
                                             uint32_t out, int barrier, F before_out) {
    Lane p = lane_of_warpgroup(opaque(threadIdx.x));
    uint32_t a = shared_address(scratch.a);
    float beta_upper = beta[p.row], beta_lower = beta[p.row + 8];
    float(*diagonal)[12] = scratch.diagonal[p.warp];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        if (s > p.warp) continue;
        float y[8];
        uint32_t f[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = (i & 2 ? beta_lower : beta_upper) * kk[8 * s + i];
        pack_square(y, 1.0f, 1.0f, f);
        stmatrix_x4(square_at(a, p.warp, s), f[0], f[1], f[2], f[3]);
        if (s == p.warp) {
            *reinterpret_cast<float2 *>(&diagonal[p.lane / 4][p.column]) = make_float2(y[0], y[1]);
            *reinterpret_cast<float2 *>(&diagonal[p.lane / 4 + 8][p.column]) = make_float2(y[6], y[7]);
        }
    }
    __syncwarp();

    // Row i of T (I + A) = I: t_j = delta_ij - sum over m > j of t_m A_mj. Lanes 0-7 and 8-15 have a block each; the
    // others do the same and write the zeros beside it.
    int i = p.lane & 7, block = p.lane >> 3 & 1;
    float t[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) t[j] = j == i ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 7; m > 0; --m) {
        float row[8];
#pragma unroll
        for (int j = 0; j < m; j += 4) {
            float4 four = *reinterpret_cast<const float4 *>(&diagonal[8 * block + m][j]);
            row[j] = four.x, row[j + 1] = four.y, row[j + 2] = four.z, row[j + 3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < m; ++j) t[j] = fmaf(-t[m], row[j], t[j]);
    }
    bool beside = p.lane >= 16;
    uint4 row = {pack<__half>(t[0], t[1]), pack<__half>(t[2], t[3]), pack<__half>(t[4], t[5]),
                 pack<__half>(t[6], t[7])};
    before_out();
    st_shared(out + panel_offset(16 * p.warp + (p.lane & 15), 2 * p.warp + (block ^ beside)),
              beside ? make_uint4(0, 0, 0, 0) : row);
    __syncwarp();

    // 8 -> 16: as below, of the blocks' lower left quarter alone.
    {
        uint32_t d[4], f[4], columns[4];
        float ta[4] = {}, t21[4] = {};
        ldmatrix_x4(square_at(out, p.warp, p.warp), d);
        ldmatrix_x4_trans(square_at(out, p.warp, p.warp), columns);
        ldmatrix_x4_trans(square_at(a, p.warp, p.warp), f);
        mma_f16(ta, d, 0, f[1]);
        uint32_t left[4] = {0, pack<__half>(-ta[2], -ta[3]), 0, 0};
        mma_f16(t21, left, columns[0], 0);
        st_shared(out + panel_offset(16 * p.warp + 8 + p.lane / 4, 2 * p.warp) + 2 * p.column,
                  pack<__half>(t21[2], t21[3]));
    }
    named_barrier(barrier, 128);

    // 16 -> 32: warps 1 and 3, the block left of their own.
    if (p.warp & 1) {
        uint32_t f[4];
        float ta[8] = {}, t21[8] = {};
        ldmatrix_x4(square_at(out, p.warp, p.warp), f);
        multiply_square(ta, f, square_at(a, p.warp, p.warp - 1));
        pack_square(ta, -1.0f, -1.0f, f);
        multiply_square(t21, f, square_at(out, p.warp - 1, p.warp - 1));
        pack_square(t21, 1.0f, 1.0f, f);
        stmatrix_x4(square_at(out, p.warp, p.warp - 1), f[0], f[1], f[2], f[3]);
    }
    named_barrier(barrier, 128);

    // 32 -> 64: warp 2 i + j makes block (i, j) of the lower left quarter.
    {
        int block_i = p.warp >> 1, block_j = p.warp & 1;
        float t21[8] = {};
        uint32_t f[4];
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            if (d < block_j) continue;  // T11 is lower triangular
            float ta[8] = {};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (c > block_i) continue;  // so is T22
                ldmatrix_x4(square_at(out, 2 + block_i, 2 + c), f);
                multiply_square(ta, f, square_at(a, 2 + c, d));
            }
            pack_square(ta, -1.0f, -1.0f, f);
            multiply_square(t21, f, square_at(out, d, block_j));
        }
        pack_square(t21, 1.0f, 1.0f, f);
        stmatrix_x4(square_at(out, 2 + block_i, block_j), f[0], f[1], f[2], f[3]);
    }
    fence_async_shared();
    named_barrier(barrier, 128);
}

}  // namespace gdelta
