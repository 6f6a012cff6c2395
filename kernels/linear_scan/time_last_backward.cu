// linear_scan, backward, time contiguous. With h[t] the gradient that reaches x[t-1],
//
//     tokens_grad[t] = states_grad[t] + h[t+1]
//     gates_grad[t]  = tokens_grad[t] * x[t-1]
//     h[t]           = gates[t] * tokens_grad[t]
//
// which is the forward scan run backwards in time over the maps h -> gates[t] * (states_grad[t] + h):
// no gate has to be read one place off its own. Three reads and two writes: 20 bytes per element in
// float32, 10 in bfloat16 and float16. The tile picture is in time_last.cuh.
#include "time_last.cuh"

struct Inputs {
    Chunk<VECTOR> gates[STEPS], grads[STEPS], states[STEPS];
    Storage edge[STEPS];  // x[t-1] for the chunk's first element, where no other lane holds it

    // Chunk of order q covers the times [time - q - VECTOR, time - q).
    __device__ void load_tile(const Storage* gates_row, const Storage* grads_row,
                              const Storage* states_row, Storage initial, const Position& at,
                              i64 tile, i64 time) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 begin = time - at.order(tile, k) - VECTOR;
            gates[k] = load<VECTOR>(gates_row, begin, 0, time, Element::ONE);
            grads[k] = load<VECTOR>(grads_row, begin, 0, time, 0);
            if constexpr (ALIGNED) {
                states[k] = load<VECTOR>(states_row, begin, 0, time, 0);
                edge[k] = begin > 0 && at.lane == 31 ? states_row[begin - 1] : initial;
            } else {
                states[k] = load<VECTOR>(states_row - 1, begin, 1, time, 0);
                edge[k] = initial;
            }
        }
    }

    // x[t-1] for every t of the chunk; `begin` is the chunk's first time.
    __device__ Chunk<VECTOR> earlier(int k, i64 begin, int lane) const {
        if constexpr (ALIGNED) {
            const Storage neighbour = __shfl_down_sync(FULL_WARP, unsigned(states[k].bits(VECTOR - 1)), 1);
            return states[k].delayed(begin > 0 && lane < 31 ? neighbour : edge[k]);
        } else {
            Chunk<VECTOR> chunk = states[k];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                if (begin + i != 0) continue;
                if constexpr (Chunk<VECTOR>::PER_WORD == 1) chunk.word[i] = edge[k];
                else chunk.word[i / 2] |= unsigned(edge[k]) << (16 * (i % 2));
            }
            return chunk;
        }
    }
};

// initial_state, final_state_grad and initial_state_grad are (batch, channels), contiguous, and may
// be null. offsets and flags are reserved for packed sequences and reversed scans: null and 0.
extern "C" __global__ void __launch_bounds__(THREADS) linear_scan_time_last_backward(
    const Storage* __restrict__ gates, const Storage* __restrict__ states,
    const Storage* __restrict__ states_grad, const Storage* __restrict__ initial_state,
    const Storage* __restrict__ final_state_grad, Storage* __restrict__ gates_grad,
    Storage* __restrict__ tokens_grad, Storage* __restrict__ initial_state_grad,
    const i64* __restrict__ offsets, void* workspace,
    i64 batch, i64 channels, i64 time,
    i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 states_batch, i64 states_channel, i64 states_time,
    i64 states_grad_batch, i64 states_grad_channel, i64 states_grad_time,
    i64 grads_batch, i64 grads_channel, i64 grads_time, i64 flags) {
    const Position at;
    if (at.row >= batch * channels) return;
    const i64 b = at.row / channels, c = at.row % channels;
    gates += b * gates_batch + c * gates_channel;
    states += b * states_batch + c * states_channel;
    states_grad += b * states_grad_batch + c * states_grad_channel;
    gates_grad += b * grads_batch + c * grads_channel;
    tokens_grad += b * grads_batch + c * grads_channel;

    const Storage initial = initial_state ? initial_state[at.row] : Storage(0);
    State carry = final_state_grad ? Element::widen(final_state_grad[at.row]) : State(0);
    Inputs next;
    next.load_tile(gates, states_grad, states, initial, at, 0, time);
    int parity = 0;
    for (i64 tile = 0; tile < time; tile += TILE, parity ^= 1) {
        const Inputs here = next;
        if (tile + TILE < time)
            next.load_tile(gates, states_grad, states, initial, at, tile + TILE, time);

        Affine total, before[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            Affine chunk;
#pragma unroll
            for (int i = VECTOR - 1; i >= 0; i--) {
                const State gate = here.gates[k].get(i);
                chunk = then(chunk, {gate, gate * here.grads[k].get(i)});
            }
            before[k] = then(total, exclusive_scan(chunk, at.lane));
            total = then(total, from_lane(chunk, 31));
        }

        const State entering = enter_warp(total, at.warp, at.lane, parity, carry);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 begin = time - at.order(tile, k) - VECTOR;
            const Chunk<VECTOR> earlier = here.earlier(k, begin, at.lane);
            State h = before[k](entering), for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
            for (int i = VECTOR - 1; i >= 0; i--) {
                const State grad = here.grads[k].get(i) + h;
                for_tokens[i] = grad;
                for_gates[i] = grad * earlier.get(i);
                h = here.gates[k].get(i) * grad;
            }
            Chunk<VECTOR> chunk;
            chunk.set(for_gates);
            store(gates_grad, begin, 0, time, chunk);
            chunk.set(for_tokens);
            store(tokens_grad, begin, 0, time, chunk);
        }
    }
    if (initial_state_grad && at.warp == 0 && at.lane == 0)
        initial_state_grad[at.row] = narrow(carry);
}
