// What comes after the product with R in one step of a recurrent network: for each batch, head and unit
//     h[t], … = cell(inputs[t], terms + b, …)  with terms = R·h[t-1], zeros where null
//
// The states are carried in float32 from step to step, in `carry`, beside those that are written.
#include "step.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) rnn_step_forward(
    const Storage* __restrict__ inputs, const Storage* __restrict__ terms,
    const float* __restrict__ bias, float* __restrict__ carry, Storage* __restrict__ states,
    Storage* __restrict__ cache, i64 batch, i64 heads, i64 dim, i64 forward_clip,
    i64 inputs_batch, i64 states_state, i64 states_batch, i64 cache_batch) {
    const Pairs at{batch, heads, dim};
    if (!at.there()) return;
    float x[2][Cell::INPUTS], r[2][Cell::RECURRENT], b[2][Cell::GATES], s[2][Cell::STATES];
    float kept[2][at_least_one(Cell::KEPT)];
    load_pairs(x, inputs + at.batch * inputs_batch + at.offset, at.block_of(), Cell::INPUTS);
    load_pairs(r, terms ? terms + at.in_terms(Cell::RECURRENT) : nullptr, dim, Cell::RECURRENT);
    load_floats(b, bias + at.offset, at.block_of());
    load_floats(s, carry + at.own(), at.of_state());
#pragma unroll
    for (int i = 0; i < 2; i++) {
        Cell::forward(r[i], x[i], b[i], s[i], kept[i]);
        s[i][0] = clipped(s[i][0], __uint_as_float(unsigned(forward_clip)));
#pragma unroll
        for (int k = 0; k < Cell::STATES; k++) carry[at.own() + k * at.of_state() + i] = s[i][k];
    }
    store_pairs(states + at.batch * states_batch + at.offset, states_state, s, Cell::STATES);
    if (cache) store_pairs(cache + at.batch * cache_batch + at.offset, at.block_of(), kept, Cell::KEPT);
}
