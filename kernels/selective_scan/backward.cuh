// The parts of the backward pass around its steps: what is laid out for them of each element, what is made of what they
// leave, and the sums of a CTA's warps.
#pragma once
#define CHANNELS 16
#define CAPACITY 16
#define SPLIT 1
#include "tile.cuh"

enum : int {
    // Floats of a channel: four for each step, and four more for each eight of them, for the banks.
    ROW = 4 * TIMES + TIMES / 2,
    SUM_ROW = TIMES + 1,
    MINE = 4,  // states of a lane, of each of its two channels
    HALF = 4,  // steps that are kept in registers
    SHARED_ROWS = WARPS * CHANNELS * ROW,
    SHARED_STATES = 2 * THREADS * TIMES,  // of each thread for every four steps
    SHARED_STAGE = 2 * CAPACITY * TIMES,
    COMPENSATED = !NARROW && BLOCKS == 1,
    KEPT = 24,  // floats of a thread for each block of states
    // Pieces whose loads are under way at once, before the steps and after: in float32 as many as there are registers for.
    AT_ONCE = !ALIGNED ? 1 : NARROW ? PER_LANE : BLOCKS > 1 ? 1 : CHANNEL_LAST ? 2 : PER_LANE,
    AT_ONCE_AFTER = !NARROW && ALIGNED && !CHANNEL_LAST && BLOCKS == 1 ? 2 : 1,
};
static_assert(PIECES % SHARING == 0);

__device__ inline int element_at(int channel, int step) { return channel * ROW + 4 * step + step / 8 * 4; }

// acc += the sums over states, of 16 channels, of states of one step and what eight steps have.
__device__ inline void add_over_states(float (&acc)[4], const float (&x)[2][MINE], const float (&of_steps)[MINE]) {
#pragma unroll
    for (int s = 0; s < MINE; s += 2)
        mma_tf32(acc,
                 make_uint4(__float_as_uint(x[0][s]), __float_as_uint(x[1][s]), __float_as_uint(x[0][s + 1]),
                            __float_as_uint(x[1][s + 1])),
                 make_uint2(__float_as_uint(of_steps[s]), __float_as_uint(of_steps[s + 1])));
}

// x += y, with what is lost in rounding.
__device__ inline void add_exactly(float& x, float& lost, float y) {
    const float sum = x + y, of_y = sum - x;
    lost += (x - (sum - of_y)) + (y - of_y);
    x = sum;
}

// x, and what was lost in rounding, added to what is kept of earlier tiles.
__device__ inline void add_kept(float (&x)[MINE], float (&x_lost)[MINE], const float* kept, const float* kept_lost) {
    float sum[MINE], lost[MINE];
    load_floats(sum, kept);
    load_floats(lost, kept_lost);
#pragma unroll
    for (int s = 0; s < MINE; s++) {
        add_exactly(sum[s], lost[s], x[s]);
        x[s] = sum[s], x_lost[s] = lost[s];
    }
}

// Of a piece: δ, δ·u and dy to the rows.
__device__ inline void lay_out(float* rows, const Piece& piece, int count, const Values& u_now, const Values& delta_now,
                               const Values& z_now, const Values& grad_now, const float* bias, bool smooth, bool gated) {
    // One branch for all of the piece's elements, whose chains of operations then overlap.
    float size[VALUES], grad[VALUES];
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        size[k] = delta_now.get(k) + bias[piece.channel + (CHANNEL_LAST ? k : 0)];
        grad[k] = grad_now.get(k);
    }
    if (smooth) {
#pragma unroll
        for (int k = 0; k < VALUES; k++) size[k] = softplus<NARROW>(size[k]);
    }
    if (gated) {
#pragma unroll
        for (int k = 0; k < VALUES; k++) grad[k] *= z_now.get(k) * sigmoid(z_now.get(k));
    }
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
        const int step = piece.time + (CHANNEL_LAST ? 0 : k);
        if (!Piece::has(count, k)) size[k] = 0;
        store_float4(rows + element_at(channel, step), size[k], size[k] * u_now.get(k), grad[k], 0);
    }
}

// Of a piece, and what the steps have left of it, δ, d(δ·u), dδ and y: its gradients, and its share of that of D.
__device__ inline void differentiate(const float (&found)[VALUES][4], const Piece& piece, int count, const Values& u_now,
                                     const Values& delta_now, const Values& z_now, const Values& grad_now,
                                     const float* bias, const float* skip, bool smooth, bool gated, float (&of_u)[VALUES],
                                     float (&of_delta)[VALUES], float (&of_z)[VALUES], float (&of_skip)[VALUES]) {
    const float* const skip_of = skip + piece.channel;
    float size[VALUES], inner[VALUES];
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        size[k] = found[k][0], of_u[k] = found[k][1], of_delta[k] = found[k][2], of_z[k] = found[k][3];
        inner[k] = grad_now.get(k);
    }
    if (gated) {
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            const float gate = z_now.get(k), open = sigmoid(gate), grad = inner[k];
            inner[k] *= gate * open;
            of_z[k] = grad * (of_z[k] + skip_of[CHANNEL_LAST ? k : 0] * u_now.get(k)) * open * (1 + gate * (1 - open));
        }
    }
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        of_delta[k] = LN_2 * of_delta[k] + u_now.get(k) * of_u[k];
        of_u[k] = size[k] * of_u[k] + skip_of[CHANNEL_LAST ? k : 0] * inner[k];
    }
    if (smooth) {  // times 1 - exp(-δ), the sigmoid of what δ is the softplus of
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            if constexpr (NARROW) of_delta[k] *= 1 - fast_exp2(-LOG2_E * size[k]);
            else of_delta[k] *= sigmoid(delta_now.get(k) + bias[piece.channel + (CHANNEL_LAST ? k : 0)]);
        }
    }
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        if (!Piece::has(count, k)) of_delta[k] = 0;
        of_skip[k] = inner[k] * u_now.get(k);
    }
}

// A lane's states of one of its channels, from number `n` on, as they were kept; zeros beyond all `states`, and where there is
// no such channel.
__device__ inline void load_checkpoint(float (&h)[MINE], const float* from, int n, int states, bool there) {
#pragma unroll
    for (int s = 0; s < MINE; s++) h[s] = 0;
    if (!there) return;
    if (states % MINE == 0 && n < states) {
        load_floats(h, from);
    } else {
#pragma unroll
        for (int s = 0; s < MINE; s++)
            if (n + s < states) h[s] = from[s];
    }
}

// To where `sum_at` says, for a lane's two channels from `channel` on: d(δ·u), dδ and y of HALF steps from `step` on, summed
// over the lanes that share a channel. They are added to those of earlier blocks of states where there are.
template <class SumAt>
__device__ inline void add_over_lanes(const float (&product)[HALF][2], const float (&size_grad)[HALF][2],
                                      const float (&y)[HALF][2], const SumAt& sum_at, int channel, int step, bool later) {
#pragma unroll
    for (int held = 0; held < 2; held++) {
        float four[3][HALF];
#pragma unroll
        for (int j = 0; j < HALF; j++)
            four[0][j] = product[j][held], four[1][j] = size_grad[j][held], four[2][j] = y[j][held];
#pragma unroll
        for (int which = 0; which < 3; which++) {
            float* const to = sum_at(channel + 8 * held, step + transposed_index<4, 1>(), which + 1);
            const float sum = transposed_sum<4, 1>(four[which]);
            *to = BLOCKS > 1 && later ? *to + sum : sum;
        }
    }
}

// Likewise those of two steps that are sums already, if they are this lane's to write.
template <class SumAt>
__device__ inline void put_sums(const float (&product)[2][2], const float (&size_grad)[2][2], const float (&y)[2][2],
                                const SumAt& sum_at, int channel, int step, bool later, bool mine) {
#pragma unroll
    for (int held = 0; held < 2; held++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float sums[3] = {product[held][j], size_grad[held][j], y[held][j]};
#pragma unroll
            for (int which = 0; which < 3; which++) {
                float* const to = sum_at(channel + 8 * held, step + j, which + 1);
                if (mine) *to = BLOCKS > 1 && later ? *to + sums[which] : sums[which];
            }
        }
}

// Two numbers each, summed over the `alike` lanes, 2^shift from each other, that have the same channel.
__device__ inline void add_alike(float& one, float& other, int alike, int shift) {
    for (int bit = 1 << shift; bit < alike << shift; bit *= 2) {
        one += __shfl_xor_sync(~0u, one, bit);
        other += __shfl_xor_sync(~0u, other, bit);
    }
}

// What a tile's warps have summed of dB and dC, of 16 states, is there once they have met. It lies in place of the state
// before the fourth step of each eight: dB where the first channels' was, dC where the second ones' was. Of `states`, those
// from `first` on are written; `of_B` and `of_C` are at the tile's first step, `begin` says where its sequence starts.
__device__ inline void add_up(const float* all_states, float* of_B, float* of_C, int states, int first, int time, int begin,
                              int steps) {
    constexpr int QUADS = 2 * CAPACITY * TIMES / 4;
#pragma unroll
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        const int step = i % (TIMES / 4) * 4, row_of = i / (TIMES / 4);
        const int state = row_of % CAPACITY, which = row_of / CAPACITY;
        const float* const from = all_states + (2 * (step / 8 * 8 + 4) + 4 * which) * THREADS + state * 8 + step % 8;
        float sum[4];
        load_floats(sum, from);
#pragma unroll
        for (int k = 1; k < WARPS; k++) {
            float of_one[4];
            load_floats(of_one, from + k * 128);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += of_one[j];
        }
        if (state >= states || step >= steps) continue;
        float* const to = (which ? of_C : of_B) + i64(first + state) * time + step;
        if ((time | begin) % 4 == 0 && step + 4 <= steps) {
            store_floats(to, sum);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (step + j < steps) to[j] = sum[j];
        }
    }
}
