// linear_scan, forward, channels contiguous:  x[t] = gates[t] * x[t-1] + tokens[t]  per channel.
//
// A thread holds STEPS rows of VECTOR channels and walks them twice: once to compose their maps,
// once, when the state that enters them is known, to write the states. One read of each input and
// one write of the output: 12 bytes per element in float32, 6 in bfloat16 and float16. The tile
// picture is in channel_last.cuh.
#include "channel_last.cuh"

// initial_state, final_state and offsets may be null. flags: 1 if x[t] follows from x[t+1].
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) linear_scan_channel_last_forward(
    const GateStorage* __restrict__ gates, const Storage* __restrict__ tokens,
    const State* __restrict__ initial_state, Storage* __restrict__ states,
    State* __restrict__ final_state, const i64* __restrict__ offsets, u64* workspace,
    i64 outer, i64 batch, i64 channels, i64 time, i64 sequences,
    i64 gates_outer, i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_outer, i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 states_outer, i64 states_batch, i64 states_channel, i64 states_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time, i64 flags) {
    const Position at(workspace, outer, batch, channels);
    const Walk walk(time, flags & 1, offsets, sequences);
    const Rows<GateElement> gates_rows(gates + at.offset(gates_outer, gates_batch), gates_channel,
                                       gates_time, channels, at, walk);
    const Rows<Element> tokens_rows(tokens + at.offset(tokens_outer, tokens_batch), tokens_channel,
                                    tokens_time, channels, at, walk);
    const Rows<Element> states_rows(states + at.offset(states_outer, states_batch), states_channel,
                                    states_time, channels, at, walk);
    const i64 state = at.offset(state_outer, state_batch);
    if (initial_state) initial_state += state;
    if (final_state) final_state += state;

    Chunk<GateElement, VECTOR> gate[STEPS];
    Chunk<Element, VECTOR> token[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        gate[k] = gates_rows.load(k, GateElement::ONE);
        token[k] = tokens_rows.load(k, 0);
    }

    // Packed sequences come with VECTOR 1: their states are those of one channel.
    const i64 c = at.channel < channels ? at.channel : 0;
    const Boundary before{
        initial_state ? const_cast<State*>(initial_state) + c * state_channel : nullptr,
        state_time};
    const Boundary after{final_state ? final_state + c * state_channel : nullptr, state_time};
    const Marks marks = walk.marks(at.first, STEPS, own_places());

    Affine rows[VECTOR];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            rows[v] = then(rows[v],
                           forward_step(gate[k].get(v), token[k].get(v), k, marks, before));

    State x[VECTOR];
    enter_rows(rows, x, at, walk, workspace, channels, initial_state, final_state, state_channel);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            const Step step =
                forward_step(gate[k].get(v), token[k].get(v), k, marks, before);
            x[v] = step(x[v]);
            if (marks.ends_at(k) && at.channel < channels)
                after.write(marks.places[k].of_last, x[v]);
        }
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        states_rows.store(k, chunk);
    }
}
