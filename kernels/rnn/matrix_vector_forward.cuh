// The forward pass of one sequence of one head in a CTA, see matrix_vector.cuh. The grid is heads × batch, batch first.
//
// A unit's step reads `INPUTS` values and writes `STATES`, and `KEPT` more for the backward pass.
#pragma once
#include "matrix_vector.cuh"

// initial, reset (batch, time) and cache may be null; no workspace is needed.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_sequence_forward(
    const Storage* __restrict__ inputs, const Storage* __restrict__ recurrent,
    const float* __restrict__ bias, const Storage* __restrict__ initial,
    const unsigned char* __restrict__ reset, Storage* __restrict__ states, Storage* __restrict__ cache, void*,
    i64 batch, i64 time, i64 heads, i64 dim, i64 forward_clip,
    i64 inputs_batch, i64 inputs_time, i64 states_state, i64 states_batch, i64 states_time,
    i64 cache_batch, i64 cache_time) {
    __shared__ Vectors<1> hidden[2];
    const Lane at;
    const i64 head = blockIdx.x / unsigned(batch), sequence = blockIdx.x % unsigned(batch);
    const i64 block_of = heads * dim;  // elements of all heads' units
    const i64 of_head = head * dim, offset = of_head + at.unit;
    const float clip = __uint_as_float(unsigned(forward_clip));

    for (unsigned i = threadIdx.x; i < CAPACITY; i += THREADS) {
        hidden[0].of(0)[i] = initial && i < dim ? Element::widen(initial[sequence * block_of + of_head + i]) : 0.f;
        hidden[1].of(0)[i] = 0;
    }
    __syncthreads();
    if (at.unit >= dim) return;  // With SPLIT > 1 whole warps leave, so shuffles are safe. Barriers ignore them.

    Matrix matrix;
    matrix.load<true>(recurrent + offset * dim, block_of * dim, unsigned(dim), at);
    float biases[Cell::GATES], carried[Cell::STATES];
#pragma unroll
    for (int g = 0; g < Cell::GATES; g++) biases[g] = bias[g * block_of + offset];
#pragma unroll
    for (int s = 0; s < Cell::STATES; s++)
        carried[s] = initial ? Element::widen(initial[(s * batch + sequence) * block_of + offset]) : 0.f;

    const Storage* input = inputs + sequence * inputs_batch + offset;
    Storage* state = states + sequence * states_batch + offset;
    Storage* keep = cache ? cache + sequence * cache_batch + offset : nullptr;
    const unsigned char* resets = reset ? reset + sequence * time : nullptr;
    Storage coming[Cell::INPUTS];
    bool coming_anew = false;
    const auto fetch = [&](i64 t) {
        coming_anew = resets && resets[t];
#pragma unroll
        for (int g = 0; g < Cell::INPUTS; g++) coming[g] = input[g * block_of];
        if (at.unit % SECTOR == 0 && t + PREFETCH_STEPS < time)
#pragma unroll
            for (int g = 0; g < Cell::INPUTS; g++)
                if (at.does(g)) prefetch(input + g * block_of + PREFETCH_STEPS * inputs_time);
        input += inputs_time;
    };
    fetch(0);

    for (i64 t = 0; t < time; t++) {
        float x[Cell::INPUTS], r[RECURRENT], kept[at_least_one(Cell::KEPT)];
        bool anew = false;
        const auto consume = [&] {
            anew = coming_anew;
#pragma unroll
            for (int g = 0; g < Cell::INPUTS; g++) x[g] = Element::widen(coming[g]);
            if (t + 1 < time) fetch(t + 1);
        };
        if (STEP_AHEAD) consume();
        matrix.multiply(r, hidden[t % 2], unsigned(dim), at);
#pragma unroll
        for (int g = 0; g < RECURRENT; g++) r[g] = total(r[g]);
        if (!STEP_AHEAD) consume();
        if (anew) start_anew(r, carried);
        Cell::forward(r, x, biases, carried, kept);
        carried[0] = clipped(carried[0], clip);
        if (at.does(0)) hidden[(t + 1) % 2].of(0)[at.unit] = carried[0];
        __syncthreads();

#pragma unroll
        for (int s = 0; s < Cell::STATES; s++)
            if (at.does(s)) state[s * states_state] = ELEMENT::narrow(carried[s]);
        state += states_time;
        if (!keep) continue;
#pragma unroll
        for (int v = 0; v < Cell::KEPT; v++)
            if (at.does(Cell::STATES + v)) keep[v * block_of] = ELEMENT::narrow(kept[v]);
        keep += cache_time;
    }
}
