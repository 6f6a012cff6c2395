// linear_scan, forward, time contiguous:  x[t] = gates[t] * x[t-1] + tokens[t]  along each row.
//
// Each lane composes the affine maps of its chunk, a warp scan and one exchange between the warps
// of the row give the state that enters each chunk, and a second walk over the registers writes
// the states. One read of each input and one write of the output: 12 bytes per element in float32,
// 6 in bfloat16 and float16. The tile picture is in time_last.cuh.
#include "time_last.cuh"

struct Inputs {
    Chunk<VECTOR> gates[STEPS], tokens[STEPS];

    __device__ void load_tile(const Storage* gates_row, const Storage* tokens_row,
                              const Position& at, i64 tile, i64 time) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 begin = at.order(tile, k);
            gates[k] = load<VECTOR>(gates_row, begin, 0, time, Element::ONE);
            tokens[k] = load<VECTOR>(tokens_row, begin, 0, time, 0);
        }
    }
};

// initial_state and final_state are (batch, channels), contiguous, and may be null.
// offsets and flags are reserved for packed sequences and reversed scans: null and 0.
extern "C" __global__ void __launch_bounds__(THREADS) linear_scan_time_last_forward(
    const Storage* __restrict__ gates, const Storage* __restrict__ tokens,
    const Storage* __restrict__ initial_state, Storage* __restrict__ states,
    Storage* __restrict__ final_state, const i64* __restrict__ offsets, void* workspace,
    i64 batch, i64 channels, i64 time,
    i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 states_batch, i64 states_channel, i64 states_time, i64 flags) {
    const Position at;
    if (at.row >= batch * channels) return;
    const i64 b = at.row / channels, c = at.row % channels;
    gates += b * gates_batch + c * gates_channel;
    tokens += b * tokens_batch + c * tokens_channel;
    states += b * states_batch + c * states_channel;

    State carry = initial_state ? Element::widen(initial_state[at.row]) : State(0);
    Inputs next;
    next.load_tile(gates, tokens, at, 0, time);
    int parity = 0;
    for (i64 tile = 0; tile < time; tile += TILE, parity ^= 1) {
        const Inputs here = next;
        if (tile + TILE < time) next.load_tile(gates, tokens, at, tile + TILE, time);

        Affine total, before[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            Affine chunk;
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                chunk = then(chunk, {here.gates[k].get(i), here.tokens[k].get(i)});
            before[k] = then(total, exclusive_scan(chunk, at.lane));
            total = then(total, from_lane(chunk, 31));
        }

        const State entering = enter_warp(total, at.warp, at.lane, parity, carry);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            State x = before[k](entering), out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                out[i] = x = here.gates[k].get(i) * x + here.tokens[k].get(i);
            Chunk<VECTOR> chunk;
            chunk.set(out);
            store(states, at.order(tile, k), 0, time, chunk);
        }
    }
    if (final_state && at.warp == 0 && at.lane == 0) final_state[at.row] = narrow(carry);
}
