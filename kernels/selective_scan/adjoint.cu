// What a part of a sequence hands on to the parts before it, in the backward pass of a selective scan: with nothing
// coming in at the part's end,
//     g[t] = dy[t]·C[t] + exp(δ[t+1]·A)·g[t+1]
// from its last step to its first, and there exp(δ·A)·g, with the sum of δ over the part. As products of the decays
// are exp(A·Σδ), these say what comes out of the part for anything that comes in.
//
// Four lanes of a warp have a channel, with 4 of 16 states each; more states are other CTAs', along y. Tiles are as in
// forward.cu. The first part of a sequence hands nothing on, and has no CTA.
//
// A launch with no states computes the sums of δ alone. It reads δ, and each of the four lanes adds up every fourth step.
#define CHANNELS 8
#define CAPACITY 16
#define SPLIT 1
#include "tile.cuh"

enum : int {
    ROW = 2 * TIMES + 4,
    MINE = 4,
    SHARED_ROWS = WARPS * CHANNELS * ROW,
    SHARED_STAGE = 2 * CAPACITY * TIMES,
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
selective_scan_adjoint(const Storage* delta, const float* A, const Storage* C, const Storage* z,
                       const float* delta_bias, const Storage* out_grad, const i64* offsets, float* adjoints,
                       float* sizes, i64 batch, i64 channels, i64 time, i64 states, i64 group_channels,
                       i64 sequences, i64 parts, i64 flags, i64 delta_batch, i64 delta_channel, i64 delta_time,
                       i64 z_batch, i64 z_channel, i64 z_time, i64 grad_batch, i64 grad_channel, i64 grad_time,
                       i64 C_batch, i64 C_group, i64 C_state, i64 C_time) {
    float* const shared = reinterpret_cast<float*>(dynamic_rows());
    float* const stages = shared + SHARED_ROWS;
    float* const biases = stages + 2 * SHARED_STAGE;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channel_count = int(channels), state_count = int(states), sequence_count = int(sequences), part_count = int(parts);
    const Place at = place_of(channel_count, int(time), int(group_channels), sequence_count, part_count - 1, offsets);
    const int own_part = at.part + 1;
    const bool smooth = flags & 1;
    const int first = at.first + warp * CHANNELS;
    const int left = within(at.limit - first, CHANNELS);
    const Rows<const Storage*> deltas(delta, {delta_batch, delta_channel, delta_time}, at.batch, first, at.begin);
    const Rows<const Storage*> zs(z, {z_batch, z_channel, z_time}, at.batch, first, at.begin);
    const Rows<const Storage*> grads(out_grad, {grad_batch, grad_channel, grad_time}, at.batch, first, at.begin);
    const Projection c(C, {C_batch, C_group, C_state, C_time}, at, flags & 4);
    const int length = at.end - at.begin;

    for (int i = lane; i < CHANNELS; i += 32)
        biases[warp * CHANNELS + i] = i < left && delta_bias ? delta_bias[first + i] : 0;
    __syncwarp();
    const float* const bias = biases + warp * CHANNELS;
    float* const rows = shared + warp * CHANNELS * ROW;

    const int own = lane / 4, quarter = lane % 4, state = blockIdx.y * CAPACITY;
    const bool mine = own < left;
    const float* const row = rows + own * ROW;
    const int tiles = (length + TIMES - 1) / TIMES, per_part = (tiles + part_count - 1) / part_count;
    const int first_tile = own_part * per_part < tiles ? own_part * per_part : tiles;
    const int end_tile = first_tile + per_part < tiles ? first_tile + per_part : tiles;
    float decay[MINE], carry[MINE], size_sum = 0;
#pragma unroll
    for (int s = 0; s < MINE; s++) {
        const int n = state + quarter * MINE + s;
        decay[s] = mine && n < state_count ? A[i64(first + own) * state_count + n] * LOG2_E : 0;
        carry[s] = 0;
    }

    Values next_delta[PER_LANE], next_z[PER_LANE], next_grad[PER_LANE];
    Staged staged;
    const auto fetch = [&](int tile) {
        const int times = within(length - tile, TIMES);
        staged.load(c, c, state, state_count, tile, times);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            next_delta[i] = deltas.load(i, tile, count);
            next_z[i] = zs.load(i, tile, count);
            next_grad[i] = grads.load(i, tile, state_count ? count : 0);
        }
    };
    if (end_tile > first_tile) fetch((end_tile - 1) * TIMES);
    int side = 0;
    for (int number = end_tile - 1; number >= first_tile; number--, side ^= 1) {
        const int times = within(length - number * TIMES, TIMES);
        float* const stage = stages + side * SHARED_STAGE;
        staged.store(stage);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            if (!piece.there) continue;
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                const int step = piece.time + (CHANNEL_LAST ? 0 : k);
                float size = next_delta[i].get(k) + bias[channel], grad = next_grad[i].get(k);
                if (smooth) size = softplus<NARROW>(size);
                if (!Piece::has(count, k)) size = 0;
                if (z) grad *= next_z[i].get(k) * sigmoid(next_z[i].get(k));
                store_float2(rows + channel * ROW + 2 * step, size, grad);
            }
        }
        __syncthreads();
        if (number > first_tile) fetch((number - 1) * TIMES);
        if (state_count == 0) {
#pragma unroll
            for (int t = 0; t < TIMES; t += 4) size_sum += row[2 * (t + quarter)];
            __syncwarp();
            continue;
        }
        for (int t = TIMES - 8; t >= 0; t -= 8) {
#pragma unroll
            for (int j = 7; j >= 0; j--) {
                float pair[2], through[MINE];
                load_floats(pair, row + 2 * (t + j));
                load_floats(through, stage + (TIMES + t + j) * CAPACITY + quarter * MINE);
                size_sum += pair[0];
#pragma unroll
                for (int s = 0; s < MINE; s++)
                    carry[s] = gate_of(pair[0] * decay[s]) * (pair[1] * through[s] + carry[s]);
            }
        }
        __syncwarp();
    }
    if (state_count == 0) {
        size_sum += __shfl_xor_sync(~0u, size_sum, 1);
        size_sum += __shfl_xor_sync(~0u, size_sum, 2);
    }
    const i64 of_part = (i64(at.batch * sequence_count + at.sequence) * part_count + own_part) * channel_count + first + own;
#pragma unroll
    for (int s = 0; s < MINE; s++) {
        const int n = state + quarter * MINE + s;
        if (mine && n < state_count) adjoints[of_part * state_count + n] = carry[s];
    }
    if (mine && quarter == 0 && state == 0) sizes[of_part] = size_sum;
}
