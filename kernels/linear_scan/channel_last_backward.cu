// linear_scan, backward, channels contiguous. With h[t] the gradient that reaches x[t-1],
//
//     tokens_grad[t] = states_grad[t] + h[t+1]
//     gates_grad[t]  = tokens_grad[t] * conj(x[t-1])
//     h[t]           = conj(gates[t]) * tokens_grad[t]
//
// which is a scan against the forward one over the maps h -> conj(gates[t]) * (states_grad[t] + h).
// The states are read one step further along the walk than the rest. Three reads and two writes: 20
// bytes per element in float32, 10 in bfloat16 and float16. The tile pictures are in
// channel_stream.cuh (staged) and channel_last.cuh (held in registers).
#if STAGES
#include "channel_stream.cuh"
#else
#include "channel_last.cuh"
#endif

// All pointers but gates and states_grad may be null; states are needed only for gates_grad.
// flags: 1 if x[t] follows from x[t+1].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_scan_channel_last_backward(
    const GateStorage* __restrict__ gates, const Storage* __restrict__ states,
    const Storage* __restrict__ states_grad, const State* __restrict__ initial_state,
    const State* __restrict__ final_state_grad, GateStorage* __restrict__ gates_grad,
    Storage* __restrict__ tokens_grad, State* __restrict__ initial_state_grad,
    const i64* __restrict__ offsets, void* workspace,
    i64 outer, i64 batch, i64 channels, i64 time, i64 sequences,
    i64 gates_outer, i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 states_outer, i64 states_batch, i64 states_channel, i64 states_time,
    i64 states_grad_outer, i64 states_grad_batch, i64 states_grad_channel, i64 states_grad_time,
    i64 grads_outer, i64 grads_batch, i64 grads_channel, i64 grads_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time, i64 flags) {
#if STAGES
    const Scans scans(batch, channels, time);
    const Walk walk(time, !(flags & 1), offsets, sequences);
    Sequences packed{walk};
    const Plane gates_plane(gates, gates_batch, gates_time);
    const Plane grads_plane(states_grad, states_grad_batch, states_grad_time);
    const Plane states_plane(states, states_batch, states_time);
    const Plane gates_grad_plane(gates_grad, grads_batch, grads_time);
    const Plane tokens_grad_plane(tokens_grad, grads_batch, grads_time);
    Schedule schedule(scans.grid, workspace, blockIdx.x, gridDim.x);
    Crossing<CHANNELS> crossing(schedule, workspace);
    Ring<3> ring;

    for (int round = 1;; round++) {
        const Tile coming = schedule.at(schedule.coming);
        if (coming.there) {
            const Position at(scans, coming);
            const auto gates_rows = gates_plane.rows(at, walk), grads_rows = grads_plane.rows(at, walk);
            const auto states_rows = states_plane.rows(at, walk);
            // Those whose earlier state is among the states; that of the walk's last one is not.
            const bool has_last = at.first + at.rows == time && at.rows > 0;
            const int earlier_rows = gates_grad ? at.rows - has_last : 0;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                ring.copy(0, k, gates_rows.at(k), k < at.rows);
                ring.copy(1, k, grads_rows.at(k), k < at.rows);
                ring.copy(2, k, states_rows.at(k + 1), k < earlier_rows);
            }
            ring.fill(0, at.rows, Element::ONE);
            ring.fill(1, at.rows, 0);
            if (!PACKED && gates_grad && earlier_rows < at.rows) {
                State initial[VECTOR];
#pragma unroll
                for (int v = 0; v < VECTOR; v++)
                    initial[v] = initial_state ? initial_state[at.batch * state_batch +
                                                               (at.channel + v) * state_channel]
                                               : State(0);
                ring.put(2, earlier_rows, initial);
            }
        }
        commit_copies();
        ring.turn();
        schedule.advance(schedule.coming);
        if (round < STAGES) continue;  // the ring is still to be filled

        const Tile tile = schedule.at(schedule.current);
        if (!tile.there) break;
        wait_for_copies<STAGES - 1>();
        const Position at(scans, tile);
        const bool meets = packed.meet(tile);
        const ChannelStates before(initial_state, state_batch, state_channel, state_time, at);
        const ChannelStates before_grad(initial_state_grad, state_batch, state_channel, state_time,
                                        at);
        const ChannelStates after_grad(final_state_grad, state_batch, state_channel, state_time, at);
        const auto step = [&](int k, int v, bool starts, i64 sequence) -> Step {
            const State kept = conj(ring.get(0, k).get(v)), grad = ring.get(1, k).get(v);
            if (starts) return {State(0), kept * (grad + after_grad.read(sequence, v))};
            return {kept, kept * grad};
        };
        Affine rows[VECTOR];
        if (meets) {
            packed.rows(at, [&](int k, bool starts, bool, i64 sequence) {
#pragma unroll
                for (int v = 0; v < VECTOR; v++)
                    rows[v] = then(rows[v], step(k, v, starts, sequence));
            });
        } else {
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int v = 0; v < VECTOR; v++) rows[v] = then(rows[v], step(k, v, false, 0));
        }
        State h[VECTOR];
        enter_rows(rows, h, tile, at, crossing,
                   spine_state(final_state_grad, state_batch, state_channel, at, scans),
                   spine_state(initial_state_grad, state_batch, state_channel, at, scans));
        const auto gates_grad_rows = gates_grad_plane.rows(at, walk);
        const auto tokens_grad_rows = tokens_grad_plane.rows(at, walk);
        const auto walk_row = [&](int k, bool starts, bool ends, i64 sequence) {
            const auto gate = ring.get(0, k), grad = ring.get(1, k), earlier = ring.get(2, k);
            State for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                if (starts) h[v] = after_grad.read(sequence, v);
                const State x = ends ? before.read(sequence, v) : earlier.get(v);
                for_tokens[v] = grad.get(v) + h[v];
                for_gates[v] = for_tokens[v] * conj(x);
                h[v] = conj(gate.get(v)) * for_tokens[v];
                if (ends) before_grad.write(sequence, v, h[v]);
            }
            if (k >= at.rows) return;
            if (gates_grad) gates_grad_rows.put(k, for_gates);
            if (tokens_grad) tokens_grad_rows.put(k, for_tokens);
        };
        if (meets) {
            packed.rows(at, walk_row);
        } else {
#pragma unroll
            for (int k = 0; k < STEPS; k++) walk_row(k, false, false, 0);
        }
        schedule.advance(schedule.current);
    }
#else
    const Position at(static_cast<u64*>(workspace), outer, batch, channels);
    const Walk walk(time, !(flags & 1), offsets, sequences);
    const Rows<GateElement> gates_rows(gates + at.offset(gates_outer, gates_batch), gates_channel,
                                       gates_time, channels, at, walk);
    const Rows<Element> states_rows(states + at.offset(states_outer, states_batch), states_channel,
                                    states_time, channels, at, walk);
    const Rows<Element> grads_rows(
        states_grad + at.offset(states_grad_outer, states_grad_batch), states_grad_channel,
        states_grad_time, channels, at, walk);
    const i64 own = at.offset(grads_outer, grads_batch);
    const Rows<GateElement> gates_grad_rows(gates_grad + own, grads_channel, grads_time, channels,
                                            at, walk);
    const Rows<Element> tokens_grad_rows(tokens_grad + own, grads_channel, grads_time, channels, at,
                                         walk);
    const i64 state = at.offset(state_outer, state_batch);
    if (initial_state) initial_state += state;
    if (final_state_grad) final_state_grad += state;
    if (initial_state_grad) initial_state_grad += state;

    Chunk<GateElement, VECTOR> gate[STEPS];
    Chunk<Element, VECTOR> earlier[STEPS], grad[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        gate[k] = gates_rows.load(k, GateElement::ONE);
        grad[k] = grads_rows.load(k, 0);
        if (!gates_grad) continue;
        if (k + 1 < states_rows.count) {
            earlier[k] = states_rows.load(k + 1, 0);
        } else {  // the walk's last step, or past it
            State initial[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const bool given = initial_state && !walk.packed() && at.channel + v < channels;
                initial[v] = given ? initial_state[(at.channel + v) * state_channel] : State(0);
            }
            earlier[k].set(initial);
        }
    }

    // Packed sequences come with VECTOR 1: their states are those of one channel.
    const i64 c = at.channel < channels ? at.channel : 0;
    const Boundary before{
        initial_state ? const_cast<State*>(initial_state) + c * state_channel : nullptr,
        state_time};
    const Boundary after_grad{
        final_state_grad ? const_cast<State*>(final_state_grad) + c * state_channel : nullptr,
        state_time};
    const Boundary before_grad{
        initial_state_grad ? initial_state_grad + c * state_channel : nullptr, state_time};
    const Marks marks = walk.marks(at.first, STEPS, own_places());

    Affine rows[VECTOR];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            rows[v] = then(rows[v], backward_step(conj(gate[k].get(v)), grad[k].get(v), k, marks,
                                                  after_grad));

    State h[VECTOR];
    enter_rows(rows, h, at, walk, static_cast<u64*>(workspace), channels, final_state_grad, initial_state_grad,
               state_channel);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        State for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            State x = earlier[k].get(v);
            if (marks.starts_at(k)) h[v] = after_grad.read(marks.places[k].of_first);
            if (marks.ends_at(k)) x = before.read(marks.places[k].of_last);
            for_tokens[v] = grad[k].get(v) + h[v];
            for_gates[v] = for_tokens[v] * conj(x);
            h[v] = conj(gate[k].get(v)) * for_tokens[v];
            if (marks.ends_at(k) && at.channel < channels)
                before_grad.write(marks.places[k].of_last, h[v]);
        }
        if (gates_grad) {
            Chunk<GateElement, VECTOR> chunk;
            chunk.set(for_gates);
            gates_grad_rows.store(k, chunk);
        }
        if (tokens_grad) {
            Chunk<Element, VECTOR> chunk;
            chunk.set(for_tokens);
            tokens_grad_rows.store(k, chunk);
        }
    }
#endif
}
