// What comes before the product with Rᵀ in one step of a recurrent network, backwards: for each batch,
// head and unit, with dh[t] as the sum of what is carried, states_grad[t] and terms,
//     gates_grad[t], … = cell'(dh[t], …)  with terms = Rᵀ·gates_grad[t+1], zeros where null
//
// The gradients of the states are carried in float32 from step to step, in `carry`.
#include "step.cuh"

// `before` and `cache` may be null.
extern "C" __global__ void __launch_bounds__(THREADS) rnn_step_backward(
    const Storage* __restrict__ terms, const Storage* __restrict__ before,
    const Storage* __restrict__ states, const Storage* __restrict__ cache,
    const Storage* __restrict__ states_grad, float* __restrict__ carry,
    Storage* __restrict__ gates_grad, i64 batch, i64 heads, i64 dim, i64 graded,
    i64 recurrent_clip, i64 before_state, i64 before_batch, i64 states_state, i64 states_batch,
    i64 cache_batch, i64 states_grad_state, i64 states_grad_batch, i64 gates_grad_batch) {
    const Pairs at{batch, heads, dim};
    if (!at.there()) return;
    const float clip = __uint_as_float(unsigned(recurrent_clip));
    float r[2][1], kept[2][at_least_one(Cell::KEPT)], old[2][Cell::TRACKED], now[2][Cell::TRACKED];
    float given[2][Cell::STATES], carried[2][Cell::STATES], gates[2][Cell::GATES];
    load_pairs(r, terms ? terms + at.in_terms(1) : nullptr, 0, 1);
    load_pairs(kept, cache + at.batch * cache_batch + at.offset, at.block_of(), Cell::KEPT);
    load_pairs(old, before ? before + Cell::FIRST * before_state + at.batch * before_batch + at.offset
                           : nullptr,
               before_state, Cell::TRACKED);
    load_pairs(now, states + Cell::FIRST * states_state + at.batch * states_batch + at.offset,
               states_state, Cell::TRACKED);
    load_pairs(given, states_grad + at.batch * states_grad_batch + at.offset, states_grad_state,
               int(graded));
    load_floats(carried, carry + at.own(), at.of_state());
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float grads[Cell::STATES];
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++) grads[s] = 0;
        given[i][0] += clipped(r[i][0], clip);
        receive(grads, carried[i], now[i]);
        receive(grads, given[i], now[i]);
        Cell::backward(kept[i], old[i], now[i], grads, gates[i]);
        release(grads, old[i]);
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++)
            carry[at.own() + s * at.of_state() + i] = grads[s];
    }
    store_pairs(gates_grad + at.batch * gates_grad_batch + at.offset, at.block_of(), gates,
                Cell::GATES);
}
