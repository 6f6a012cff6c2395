// linear_scan, forward, channels contiguous:  x[t] = gates[t] * x[t-1] + tokens[t]  per channel.
//
// A thread holds STEPS rows of VECTOR channels and walks them twice: once to compose their maps,
// once, when the state that enters them is known, to write the states. One read of each input and one write of the output: 12 bytes per element in float32,
// 6 in bfloat16 and float16. The tile picture is in channel_last.cuh.
#include "channel_last.cuh"

// initial_state and final_state are (batch, channels), contiguous, and may be null.
// offsets and flags are reserved for packed sequences and reversed scans: null and 0.
extern "C" __global__ void __launch_bounds__(THREADS) linear_scan_channel_last_forward(
    const Storage* __restrict__ gates, const Storage* __restrict__ tokens,
    const Storage* __restrict__ initial_state, Storage* __restrict__ states,
    Storage* __restrict__ final_state, const i64* __restrict__ offsets, u64* workspace,
    i64 batch, i64 channels, i64 time,
    i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 states_batch, i64 states_channel, i64 states_time, i64 flags) {
    const Position at(workspace, batch, channels);
    gates += at.batch * gates_batch + at.first * gates_time;
    tokens += at.batch * tokens_batch + at.first * tokens_time;
    states += at.batch * states_batch + at.first * states_time;

    Chunk<VECTOR> gate[STEPS], token[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const i64 end = at.first + k < time ? channels : 0;
        gate[k] = load<VECTOR>(gates + k * gates_time, at.channel, 0, end, Element::ONE);
        token[k] = load<VECTOR>(tokens + k * tokens_time, at.channel, 0, end, 0);
    }

    Affine rows[VECTOR];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            rows[v] = then(rows[v], {gate[k].get(v), token[k].get(v)});

    State x[VECTOR];
    enter_rows(rows, x, at, workspace, batch, channels, time, initial_state, final_state);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) x[v] = gate[k].get(v) * x[v] + token[k].get(v);
        Chunk<VECTOR> chunk;
        chunk.set(x);
        store(states + k * states_time, at.channel, 0, at.first + k < time ? channels : 0, chunk);
    }
}
