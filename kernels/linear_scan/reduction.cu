// linear_scan: the gradient of gates that are broadcast,
//
//     gates_grad = sum of tokens_grad[t] * conj(x[t-1])  over the dimensions that a gate is used in,
//
// from the gradient of the tokens that the backward kernel has written. A dimension is summed where
// it has more than one element and gates_grad has stride 0. Sums are in a fixed order, in the dtype
// of the computation. Two reads: 8 bytes per element in float32, 4 in bfloat16 and float16.
//
//                    UNIT contiguous elements: one per lane
//       warp 0       | OTHER / WARPS rows |         A CTA adds up one such tile, over the batches
//       warp 1       | …                  |         of one group, and writes a piece of the sum: one
//       …            OTHER rows                     for each group and, where that dimension is
//                                                   summed, each tile along it.
#include "sequences.cuh"

enum : int {
    UNIT = 32,
    OTHER = 64,
    ROWS = OTHER / WARPS,
    THREADS = 32 * WARPS,
};

__device__ inline State sum_of_warp(State x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = x + from_higher(x, distance);
    return x;
}

// initial_state and offsets may be null. flags: 1 if x[t] follows from x[t+1].
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) linear_scan_reduction(
    const Storage* __restrict__ tokens_grad, const Storage* __restrict__ states,
    const State* __restrict__ initial_state, State* __restrict__ gates_grad,
    const i64* __restrict__ offsets,
    i64 outer, i64 batch, i64 channels, i64 time, i64 sequences,
    i64 tokens_grad_outer, i64 tokens_grad_batch, i64 tokens_grad_channel, i64 tokens_grad_time,
    i64 states_outer, i64 states_batch, i64 states_channel, i64 states_time,
    i64 gates_grad_outer, i64 gates_grad_batch, i64 gates_grad_channel, i64 gates_grad_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time, i64 groups, i64 flags) {
    const bool sum_outer = outer > 1 && gates_grad_outer == 0;
    const bool sum_batch = batch > 1 && gates_grad_batch == 0;
    const bool sum_channels = channels > 1 && gates_grad_channel == 0;
    const bool sum_time = time > 1 && gates_grad_time == 0;
    constexpr int TILE_CHANNELS = TIME_LAST ? OTHER : UNIT;
    constexpr int TILE_TIMES = TIME_LAST ? UNIT : OTHER;
    const i64 tiles_c = (channels + TILE_CHANNELS - 1) / TILE_CHANNELS;
    const i64 tiles_t = (time + TILE_TIMES - 1) / TILE_TIMES;

    i64 block = blockIdx.x;
    const i64 tile_t = block % tiles_t;
    block /= tiles_t;
    const i64 tile_c = block % tiles_c;
    block /= tiles_c;
    const i64 group = block % groups, kept = block / groups;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto channel = [&](int row) {
        return tile_c * TILE_CHANNELS + (TIME_LAST ? warp * ROWS + row : lane);
    };
    const auto time_of = [&](int row) {
        return tile_t * TILE_TIMES + (TIME_LAST ? lane : warp * ROWS + row);
    };
    const Walk walk(time, flags & 1, offsets, sequences);

    // For each time of the tile, where the state before it is if a sequence starts there, else -1.
    __shared__ int start_of[TILE_TIMES];
    if (threadIdx.x < TILE_TIMES) {
        const i64 order = walk.at(tile_t * TILE_TIMES + threadIdx.x);
        int start = order == 0 ? 0 : -1;
        if (walk.varlen()) {
            const i64 number = walk.number(order);
            if (order == 0 || walk.begin(number) == order) start = walk.index(number);
        }
        start_of[threadIdx.x] = start;
    }
    __syncthreads();

    // The rows of a thread, one after the other along the dimension that is not contiguous. Rows
    // outside the tensors read its first element, so that all loads are on their way at once.
    const i64 t0 = time_of(0), c0 = channel(0);
    const i64 grads_first = c0 * tokens_grad_channel + t0 * tokens_grad_time;
    const i64 states_first = c0 * states_channel + (t0 - walk.step(1)) * states_time;
    const i64 grads_row = TIME_LAST ? tokens_grad_channel : tokens_grad_time;
    const i64 states_row = TIME_LAST ? states_channel : states_time;
    bool inside[ROWS];
    int start[ROWS];
    State sum[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        inside[row] = channel(row) < channels && time_of(row) < time;
        start[row] = start_of[time_of(row) - tile_t * TILE_TIMES];
        sum[row] = State(0);
    }
    const i64 summed = (sum_outer ? outer : 1) * (sum_batch ? batch : 1);
    i64 o = 0, b = 0;
    for (i64 pair = group * summed / groups; pair < (group + 1) * summed / groups; pair++) {
        if (sum_outer && sum_batch) o = pair / batch, b = pair % batch;
        else if (sum_outer) o = pair, b = kept;
        else if (sum_batch) o = kept, b = pair;
        else o = kept / batch, b = kept % batch;
        const i64 grads_batch = o * tokens_grad_outer + b * tokens_grad_batch;
        const i64 states_of = o * states_outer + b * states_batch;
        Storage grad[ROWS], state[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const bool has_state = inside[row] && start[row] < 0;
            grad[row] = tokens_grad[inside[row] ? grads_batch + grads_first + row * grads_row : 0];
            state[row] = states[has_state ? states_of + states_first + row * states_row : 0];
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            State x = Element::widen(state[row]);
            if (start[row] >= 0) x = State(0);
            if (start[row] >= 0 && inside[row] && initial_state)
                x = initial_state[o * state_outer + b * state_batch + channel(row) * state_channel +
                                  start[row] * state_time];
            if (inside[row]) sum[row] = sum[row] + BackwardStep::gate_gradient(Element::widen(grad[row]), x);
        }
    }

    const i64 gates = (sum_outer ? 1 : outer) * (sum_batch ? 1 : batch) *
                      (sum_channels ? 1 : channels) * (sum_time ? 1 : time);
    const i64 piece = (group * (sum_channels ? tiles_c : 1) + (sum_channels ? tile_c : 0)) *
                          (sum_time ? tiles_t : 1) +
                      (sum_time ? tile_t : 0);
    gates_grad += piece * gates + o * gates_grad_outer + b * gates_grad_batch;
    const auto write = [&](int row, State x) {
        if ((sum_channels || channel(row) < channels) && (sum_time || time_of(row) < time))
            gates_grad[channel(row) * gates_grad_channel + time_of(row) * gates_grad_time] = x;
    };

    const bool sum_unit = TIME_LAST ? sum_time : sum_channels;
    const bool sum_other = TIME_LAST ? sum_channels : sum_time;
    if (!sum_other) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const State x = sum_unit ? sum_of_warp(sum[row]) : sum[row];
            if (!sum_unit || lane == 0) write(row, x);
        }
        return;
    }
    __shared__ State of_warp[WARPS][32];
    State total = State(0);
#pragma unroll
    for (int row = 0; row < ROWS; row++) total = total + sum[row];
    of_warp[warp][lane] = total;
    __syncthreads();
    if (warp > 0) return;
    total = State(0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) total = total + of_warp[w][lane];
    if (sum_unit) total = sum_of_warp(total);
    if (!sum_unit || lane == 0) write(0, total);
}
