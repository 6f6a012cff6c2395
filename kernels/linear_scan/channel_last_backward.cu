// linear_scan, backward, channels contiguous. With h[t] the gradient that reaches x[t-1],
//
//     tokens_grad[t] = states_grad[t] + h[t+1]
//     gates_grad[t]  = tokens_grad[t] * x[t-1]
//     h[t]           = gates[t] * tokens_grad[t]
//
// which is the forward scan run backwards in time over the maps h -> gates[t] * (states_grad[t] + h).
// The states are read one row earlier than the rest. Three reads and two writes: 20 bytes per
// element in float32, 10 in bfloat16 and float16. The tile picture is in channel_last.cuh.
#include "channel_last.cuh"

// initial_state, final_state_grad and initial_state_grad are (batch, channels), contiguous, and may
// be null. offsets and flags are reserved for packed sequences and reversed scans: null and 0.
extern "C" __global__ void __launch_bounds__(THREADS) linear_scan_channel_last_backward(
    const Storage* __restrict__ gates, const Storage* __restrict__ states,
    const Storage* __restrict__ states_grad, const Storage* __restrict__ initial_state,
    const Storage* __restrict__ final_state_grad, Storage* __restrict__ gates_grad,
    Storage* __restrict__ tokens_grad, Storage* __restrict__ initial_state_grad,
    const i64* __restrict__ offsets, u64* workspace,
    i64 batch, i64 channels, i64 time,
    i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 states_batch, i64 states_channel, i64 states_time,
    i64 states_grad_batch, i64 states_grad_channel, i64 states_grad_time,
    i64 grads_batch, i64 grads_channel, i64 grads_time, i64 flags) {
    const Position at(workspace, batch, channels);
    const i64 latest = time - 1 - at.first;  // the time of this thread's first row in order
    gates += at.batch * gates_batch + latest * gates_time;
    states += at.batch * states_batch + (latest - 1) * states_time;
    states_grad += at.batch * states_grad_batch + latest * states_grad_time;
    gates_grad += at.batch * grads_batch + latest * grads_time;
    tokens_grad += at.batch * grads_batch + latest * grads_time;

    Chunk<VECTOR> gate[STEPS], earlier[STEPS], grad[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const i64 end = latest - k >= 0 ? channels : 0;
        gate[k] = load<VECTOR>(gates - k * gates_time, at.channel, 0, end, Element::ONE);
        grad[k] = load<VECTOR>(states_grad - k * states_grad_time, at.channel, 0, end, 0);
        const bool is_first = latest - k == 0;  // its earlier state is the initial one
        const Storage* const row =
            is_first ? initial_state + at.batch * channels : states - k * states_time;
        earlier[k] = load<VECTOR>(row, at.channel, 0, is_first && !initial_state ? 0 : end, 0);
    }

    Affine rows[VECTOR];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            const State g = gate[k].get(v);
            rows[v] = then(rows[v], {g, g * grad[k].get(v)});
        }

    State h[VECTOR];
    enter_rows(rows, h, at, workspace, batch, channels, time, final_state_grad, initial_state_grad);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        State for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            for_tokens[v] = grad[k].get(v) + h[v];
            for_gates[v] = for_tokens[v] * earlier[k].get(v);
            h[v] = gate[k].get(v) * for_tokens[v];
        }
        const i64 end = latest - k >= 0 ? channels : 0;
        Chunk<VECTOR> chunk;
        chunk.set(for_gates);
        store(gates_grad - k * grads_time, at.channel, 0, end, chunk);
        chunk.set(for_tokens);
        store(tokens_grad - k * grads_time, at.channel, 0, end, chunk);
    }
}
