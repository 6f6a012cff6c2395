// The gradients of one sequence of one head in a CTA, see matrix_vector.cuh. The grid is heads × batch, batch first. There is
// one vector for each gate that R feeds, its gradients at the step after, and rows are those of R's transpose.
//
// A unit's step reads `KEPT` values, `TRACKED` states before it and the gradients of at most `STATES` states, and writes
// the gradients of `GATES` gates.
#pragma once
#include "matrix_vector.cuh"

// What a step needs of a unit, as it lies in memory.
struct Known {
    Storage kept[at_least_one(Cell::KEPT)], before[Cell::TRACKED], given[Cell::STATES];
    bool anew;  // at this step the states started from zeros, and not from those before
};

// initial, reset (batch, time), final_grad and initial_grad may be null; no workspace is needed. recurrent_clip 0: no
// gradient flows through R.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_sequence_backward(
    const Storage* __restrict__ recurrent, const Storage* __restrict__ states,
    const Storage* __restrict__ initial, const unsigned char* __restrict__ reset,
    const Storage* __restrict__ cache, const Storage* __restrict__ states_grad,
    const Storage* __restrict__ final_grad,
    Storage* __restrict__ gates_grad, Storage* __restrict__ initial_grad, void*,
    i64 batch, i64 time, i64 heads, i64 dim, i64 graded, i64 recurrent_clip,
    i64 states_state, i64 states_batch, i64 states_time, i64 cache_batch, i64 cache_time,
    i64 states_grad_state, i64 states_grad_batch, i64 states_grad_time,
    i64 gates_grad_batch, i64 gates_grad_time) {
    __shared__ Vectors<RECURRENT> gate_grads[2];
    const Lane at;
    const i64 head = blockIdx.x / unsigned(batch), sequence = blockIdx.x % unsigned(batch);
    const i64 block_of = heads * dim, of_state = batch * block_of;
    const i64 of_head = head * dim, offset = of_head + at.unit, last = time - 1;
    const float clip = __uint_as_float(unsigned(recurrent_clip));

    for (unsigned i = threadIdx.x; i < CAPACITY; i += THREADS)
#pragma unroll
        for (int n = 0; n < RECURRENT; n++) gate_grads[0].of(n)[i] = gate_grads[1].of(n)[i] = 0;
    __syncthreads();
    if (at.unit >= dim) return;  // With SPLIT > 1 whole warps leave, so shuffles are safe. Barriers ignore them.

    Matrix matrix;
    if (clip > 0) matrix.load<false>(recurrent + of_head * dim + at.unit, block_of * dim, unsigned(dim), at);

    // Pointers to the step that `fetch` loads next.
    const Storage* keep = cache + sequence * cache_batch + last * cache_time + offset;
    const Storage* earlier = states + sequence * states_batch + (last - 1) * states_time + offset;
    const Storage* given = states_grad + sequence * states_grad_batch + last * states_grad_time + offset;
    const unsigned char* resets = reset ? reset + sequence * time : nullptr;
    Storage* out = gates_grad + sequence * gates_grad_batch + last * gates_grad_time + offset;
    Known coming;
    const auto fetch = [&](i64 t) {
        coming.anew = resets && resets[t];
#pragma unroll
        for (int v = 0; v < Cell::KEPT; v++) coming.kept[v] = keep[v * block_of];
#pragma unroll
        for (int s = 0; s < Cell::TRACKED; s++) {
            const i64 state = s + Cell::FIRST;
            if (t > 0) coming.before[s] = earlier[state * states_state];
            else coming.before[s] = initial ? initial[state * of_state + sequence * block_of + offset] : 0;
        }
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++) coming.given[s] = s < graded ? given[s * states_grad_state] : 0;
        keep -= cache_time;
        earlier -= states_time;
        given -= states_grad_time;
    };
    const auto prefetch_later = [&] {
#pragma unroll
        for (int v = 0; v < Cell::KEPT; v++)
            if (at.does(v)) prefetch(keep + v * block_of - PREFETCH_STEPS * cache_time);
#pragma unroll
        for (int s = 0; s < Cell::TRACKED; s++)
            if (at.does(s)) prefetch(earlier + (s + Cell::FIRST) * states_state - PREFETCH_STEPS * states_time);
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++)
            if (at.does(s + 1) && s < graded)
                prefetch(given + s * states_grad_state - PREFETCH_STEPS * states_grad_time);
    };

    float after[Cell::TRACKED], grads[Cell::STATES] = {};
    bool blocked = false;  // the step after this one had a reset, which the gradients do not pass
#pragma unroll
    for (int s = 0; s < Cell::TRACKED; s++)
        after[s] = Element::widen(earlier[states_time + (s + Cell::FIRST) * states_state]);
    if (final_grad) {
        float finals[Cell::STATES];
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++)
            finals[s] = Element::widen(final_grad[s * of_state + sequence * block_of + offset]);
        receive(grads, finals, after);
    }
    fetch(last);

    for (i64 t = last;; t--) {
        Known early;
        if (STEP_AHEAD) {
            early = coming;
            if (t > 0) fetch(t - 1);
        }
        if (t < last && clip > 0) {
            float sums[RECURRENT];
            matrix.multiply(sums, gate_grads[(t + 1) % 2], unsigned(dim), at);
            float sum = sums[0];
#pragma unroll
            for (int n = 1; n < RECURRENT; n++) sum += sums[n];
            grads[0] += clipped(total(sum), clip);
        }
        if (at.unit % SECTOR == 0 && t > PREFETCH_STEPS + 2) prefetch_later();
        if (blocked)
#pragma unroll
            for (int s = 0; s < Cell::STATES; s++) grads[s] = 0;
        if (t < 0) break;

        const Known& known = STEP_AHEAD ? early : coming;
        float kept[at_least_one(Cell::KEPT)], from[Cell::TRACKED], received[Cell::STATES], gates[Cell::GATES];
#pragma unroll
        for (int v = 0; v < Cell::KEPT; v++) kept[v] = Element::widen(known.kept[v]);
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++) received[s] = Element::widen(known.given[s]);
#pragma unroll
        for (int s = 0; s < Cell::TRACKED; s++) from[s] = known.anew ? 0.f : Element::widen(known.before[s]);
        receive(grads, received, after);
        Cell::backward(kept, from, after, grads, gates);
#pragma unroll
        for (int s = 0; s < Cell::TRACKED; s++) after[s] = Element::widen(known.before[s]);
        blocked = known.anew;
        if (!STEP_AHEAD && t > 0) fetch(t - 1);

#pragma unroll
        for (int n = 0; n < RECURRENT; n++)
            if (at.does(n)) gate_grads[t % 2].of(n)[at.unit] = gates[n];
        __syncthreads();
#pragma unroll
        for (int g = 0; g < Cell::GATES; g++)
            if (at.does(g)) out[g * block_of] = ELEMENT::narrow(gates[g]);
        out -= gates_grad_time;
    }
    if (!initial_grad) return;
    if (!blocked) release(grads, after);
#pragma unroll
    for (int s = 0; s < Cell::STATES; s++)
        if (at.does(s)) initial_grad[s * of_state + sequence * block_of + offset] = ELEMENT::narrow(grads[s]);
}
