// What the backward pass of a selective scan needs beside its steps: constants, arithmetic on a lane's states, and the
// gradients of one piece of elements. backward.cu has the picture.
#pragma once
#define CHANNELS 16
#define CAPACITY (4 * STATES)
#define SPLIT 1
#include "../common/global_memory.cuh"
#include "tile.cuh"

enum : int {
    // Floats of a channel: four for each step, and four more for each eight of them.
    ROW = 4 * TIMES + TIMES / 2,
    SUM_ROW = TIMES + 1,
    LANE_STATES = STATES,  // of each of the lane's two channels
    GROUP = 4,             // steps that are kept in registers
    SUMMED_STEPS = 8 / LANE_STATES,  // whose dB and dC a warp sums over its channels at once
    CTA_CHANNELS = WARPS * CHANNELS,
    SHARED_ROWS = CTA_CHANNELS * (ROW + 2),
    SAVED_STEP = LANE_STATES / 2 * THREADS,  // floats of saved states for each step of the tile
    SHARED_STATES = SAVED_STEP * TIMES,      // of each thread for every four steps
    WARP_SUMS = 8 * CAPACITY,                // floats of a warp's dB, and of its dC, of eight steps
    SHARED_STAGE = 2 * CAPACITY * TIMES,
    COMPENSATED = !NARROW && BLOCKS == 1,
    SAVED = 24,  // floats of a thread for each block of states, in `carries`
    // Pieces whose loads are under way at once, before the steps and after: in float32 as many as there are registers for.
    AT_ONCE = !ALIGNED ? 1 : NARROW ? PER_LANE : BLOCKS > 1 ? 1 : CHANNEL_LAST ? 2 : PER_LANE,
    AT_ONCE_AFTER = !NARROW && ALIGNED && !CHANNEL_LAST && BLOCKS == 1 ? 2 : 1,
};
static_assert(PIECES % SHARING == 0);

// Where a channel's row starts, in the rows of a warp. Channels 2i and 2i + 1 are half of the banks apart, as the threads that
// stage their pieces need it; and the 8 channels that a warp's lanes read at once are each in four banks of their own.
__device__ inline int row_at(int channel) { return channel * ROW + channel / 2 * 4; }
// Where a step of a channel is in the rows of a warp: δ, δ·u, dy and a free float; after the steps δ, d(δ·u), dδ and y.
__device__ inline int element_at(int channel, int step) { return row_at(channel) + 4 * step + step / 8 * 4; }

// acc += the sums over states, of 16 channels, of states of one step and what eight steps have.
__device__ inline void add_over_states(float (&acc)[4], const float (&x)[2][LANE_STATES],
                                       const float (&of_steps)[LANE_STATES]) {
#pragma unroll
    for (int s = 0; s < LANE_STATES; s += 2)
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

// x, and what was lost in rounding, added to what was saved of earlier tiles.
__device__ inline void add_saved(float (&x)[LANE_STATES], float (&x_lost)[LANE_STATES], const float* saved,
                                 const float* saved_lost) {
    float sum[LANE_STATES], lost[LANE_STATES];
    load_floats(sum, saved);
    load_floats(lost, saved_lost);
#pragma unroll
    for (int s = 0; s < LANE_STATES; s++) {
        add_exactly(sum[s], lost[s], x[s]);
        x[s] = sum[s], x_lost[s] = lost[s];
    }
}

// A lane's states of one of its channels, from state `n` on, as the forward pass saved them; zeros beyond all `states`, and
// where the channel does not exist.
__device__ inline void load_checkpoint(float (&h)[LANE_STATES], const float* from, int n, int states, bool exists) {
#pragma unroll
    for (int s = 0; s < LANE_STATES; s++) h[s] = 0;
    if (!exists) return;
    if (states % LANE_STATES == 0 && n < states) {
        load_floats(h, from);
    } else {
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++)
            if (n + s < states) h[s] = from[s];
    }
}

// As transposed_sum, where the compiler swaps two values by three moves: to choose one of them twice takes two instructions,
// but registers that float32 does not have.
template <int N, int FIRST>
__device__ inline float sum_by_choice(float (&v)[N]) {
    if constexpr (!NARROW) return transposed_sum<N, FIRST>(v);
    int bit = FIRST;
#pragma unroll
    for (int width = N / 2; width >= 1; width /= 2, bit *= 2) {
        const bool high = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < width; i++)
            v[i] = chosen(high, v[i + width], v[i]) + __shfl_xor_sync(~0u, chosen(high, v[i], v[i + width]), bit);
    }
    return v[0];
}

// Two sums over the `count` lanes, 2^shift from each other, that have the same channel.
__device__ inline void sum_over_lanes(float& x, float& y, int count, int shift) {
    for (int bit = 1 << shift; bit < count << shift; bit *= 2) {
        x += __shfl_xor_sync(~0u, x, bit);
        y += __shfl_xor_sync(~0u, y, bit);
    }
}

// The elements of one piece, and what the launch does with all elements of a warp.
struct PieceInputs {
    Values u, delta, z, out_grad;
};
struct ElementOptions {
    const float *bias, *skip;  // of the warp's channels
    bool with_softplus, gated;
};

// δ, δ·u and dy of a piece to the rows.
__device__ inline void stage_piece(float* rows, const Piece& piece, int count, const PieceInputs& in,
                                   const ElementOptions& options) {
    // One branch for all of the piece's elements, whose chains of operations then overlap.
    float delta[VALUES], grad[VALUES];
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        delta[k] = in.delta.get(k) + options.bias[piece.channel + (CHANNEL_LAST ? k : 0)];
        grad[k] = in.out_grad.get(k);
    }
    if (options.with_softplus) {
#pragma unroll
        for (int k = 0; k < VALUES; k++) delta[k] = softplus<NARROW>(delta[k]);
    }
    if (options.gated) {
#pragma unroll
        for (int k = 0; k < VALUES; k++) grad[k] *= in.z.get(k) * sigmoid(in.z.get(k));
    }
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
        const int step = piece.time + (CHANNEL_LAST ? 0 : k);
        if (!Piece::has(count, k)) delta[k] = 0;
        store_float4(rows + element_at(channel, step), delta[k], delta[k] * in.u.get(k), grad[k], 0);
    }
}

// The gradients of a piece, and its terms of that of D.
struct PieceGrads {
    float u[VALUES], delta[VALUES], z[VALUES], skip[VALUES];

    // `element` has what the steps left: δ, d(δ·u), dδ and y.
    __device__ PieceGrads(const float (&element)[VALUES][4], const Piece& piece, int count, const PieceInputs& in,
                          const ElementOptions& options) {
        const float* const skip_of = options.skip + piece.channel;
        float size[VALUES], inner[VALUES];  // δ, and the gradient of y
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            size[k] = element[k][0], u[k] = element[k][1], delta[k] = element[k][2], z[k] = element[k][3];
            inner[k] = in.out_grad.get(k);
        }
        if (options.gated) {
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const float gate = in.z.get(k), open = sigmoid(gate), grad = inner[k];
                inner[k] *= gate * open;
                z[k] = grad * (z[k] + skip_of[CHANNEL_LAST ? k : 0] * in.u.get(k)) * open * (1 + gate * (1 - open));
            }
        }
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            delta[k] = LN_2 * delta[k] + in.u.get(k) * u[k];
            u[k] = size[k] * u[k] + skip_of[CHANNEL_LAST ? k : 0] * inner[k];
        }
        if (options.with_softplus) {  // times 1 - exp(-δ), the sigmoid of what δ is the softplus of
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                if constexpr (NARROW) delta[k] *= 1 - fast_exp2(-LOG2_E * size[k]);
                else delta[k] *= sigmoid(in.delta.get(k) + options.bias[piece.channel + (CHANNEL_LAST ? k : 0)]);
            }
        }
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            if (!Piece::has(count, k)) delta[k] = 0;
            skip[k] = inner[k] * in.u.get(k);
        }
    }
};

__device__ inline void exchange(float& x, float& y) {
    const float of_x = x;
    x = y, y = of_x;
}

// The sums lie in rows of eight steps for each state, and pairs of steps change places so that 16 states lie in all banks.
__device__ inline int moved_step(int state, int step) { return step ^ state / LANE_STATES % 4 * 2; }

// Where the sums of a CTA's warps over channels go: dB and dC of its group, of `states` states from `first` on and of the
// steps of a tile. `begin` is where the sequence of the tile starts.
struct ProjectionGrads {
    float *B, *C;  // at the tile's first step
    int states, first, time, begin, steps;

    // Adds up what a tile's warps have summed, of CAPACITY states, once the warps have met. The sums lie in place of the state
    // before the fourth step of each eight: dB in that of the first channels, dC in that of the second ones.
    __device__ void store(const float* all_states) const {
        constexpr int QUADS = 2 * CAPACITY * TIMES / 4;
#pragma unroll
        for (int i = int(opaque(threadIdx.x)); i < QUADS; i += THREADS) {
            const int step = i % (TIMES / 4) * 4, row = i / (TIMES / 4);
            const int state = row % CAPACITY, which = row / CAPACITY;
            const float* const from =
                all_states + (step / 8 * 8 + 4) * SAVED_STEP + which * LANE_STATES * THREADS + state * 8 +
                (moved_step(state, step % 8) & 4);
            float sum[4];
            load_floats(sum, from);
#pragma unroll
            for (int k = 1; k < WARPS; k++) {
                float of_warp[4];
                load_floats(of_warp, from + k * WARP_SUMS);
#pragma unroll
                for (int j = 0; j < 4; j++) sum[j] += of_warp[j];
            }
            if (moved_step(state, 0) & 2) exchange(sum[0], sum[2]), exchange(sum[1], sum[3]);
            if (state >= states || step >= steps) continue;
            float* const to = (which ? C : B) + i64(first + state) * time + step;
            if ((time | begin) % 4 == 0 && step + 4 <= steps) {
                store_floats(to, sum);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (step + j < steps) to[j] = sum[j];
            }
        }
    }
};
