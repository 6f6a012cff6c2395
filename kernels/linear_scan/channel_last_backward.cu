// linear_scan, backward, channels contiguous. With h[t] the gradient that reaches x[t-1],
//
//     tokens_grad[t] = states_grad[t] + h[t+1]
//     gates_grad[t]  = tokens_grad[t] * conj(x[t-1])
//     h[t]           = conj(gates[t]) * tokens_grad[t]
//
// which is a scan in the opposite direction over the affine maps h -> conj(gates[t]) * (states_grad[t] + h).
// The states are read one time step further along that scan than the other inputs. Three reads and two writes: 20
// bytes per element in float32, 10 in bfloat16 and float16. The tile pictures are in column_serial.cuh (many
// channels), channel_stream.cuh (few, staged in shared memory), narrow_columns.cuh (at most 32, rows at any address),
// constant_gate_columns.cuh (few with one gate for all steps, in tiles that look back), resident.cuh (such channels, all in shared
// memory at once), scalar_columns.cuh (rows at any address, in tiles that look back) and channel_last.cuh (generic, held in registers).
#include "../common/compiler.cuh"
#if RESIDENT
#define BACKWARD 1
#include "resident.cuh"
#elif NARROW
#define BACKWARD 1
#include "narrow_columns.cuh"
#elif CONSTANT_GATE
#include "constant_gate_columns.cuh"
#elif SCALAR
#include "scalar_columns_backward.cuh"
#elif SINGLE_WAVE
#include "single_wave.cuh"
#elif CTAS_PER_COLUMN > 1
#include "multi_cta_column.cuh"
#elif COLUMN_SERIAL
#include "column_serial.cuh"
#elif STAGES
#include "channel_stream.cuh"
#else
#include "channel_last.cuh"
#endif

#if COLUMN_SERIAL

struct Backward {
    const Storage *gates, *states, *states_grad;
    Storage *gates_grad, *tokens_grad;
    State* sums;  // of gates_grad over time, one for each state
    i64 gates_batch, gates_time, states_batch, states_time, states_grad_batch, states_grad_time;
    i64 grads_batch, grads_time;
};

// A lane's serial pass over time. ONE_GATE: each channel has one gate for all times. Of packed sequences `fills` says so.
template <bool ONE_GATE>
struct BackwardPass {
    const bool fills;
    Rows gates, grads, states;
    Results gates_grad, tokens_grad;
    const bool for_gates, each_gate, each_token;  // what is asked for
    Tiles<3> tiles;
    BlockPrefix block_prefix;
    State gate[VECTOR] = {}, initial[VECTOR], sum[VECTOR] = {};

    __device__ BackwardPass(const Backward& of, const Column& column, const States& before,
                            const States& after_grad)
        : fills(VARLEN && of.gates_time == 0),
          gates(of.gates, of.gates_batch, of.gates_time, column),
          grads(of.states_grad, of.states_grad_batch, of.states_grad_time, column),
          // The earlier state of each row; that of the walk's last is not among the states.
          states(of.states, of.states_batch, of.states_time, column, 1),
          gates_grad(of.gates_grad, of.grads_batch, of.grads_time, column),
          tokens_grad(of.tokens_grad, of.grads_batch, of.grads_time, column),
          for_gates(of.gates_grad || of.sums),
          each_gate(of.gates_grad),
          each_token(of.tokens_grad),
          tiles(column, of.states_grad_batch, of.states_grad_time) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            block_prefix.carried[v] = after_grad.read(v), initial[v] = before.read(v);
            if (ONE_GATE && column.has(v))
                gate[v] = column.value(of.gates, of.gates_batch, v);
        }
    }

    __device__ void fetch(int left) { fetch_for_map(left), fetch_for_output(left), move(tiles_apart()); }
    // What composing takes, and what walking does besides.
    __device__ void fetch_for_map(int left) {
        if (fills) tiles.fill_in(0, gates, left, BackwardStep::Padding::GATE);
        else if (!ONE_GATE) tiles.copy_in(0, gates, left, BackwardStep::Padding::GATE);
        tiles.copy_in(1, grads, left, BackwardStep::Padding::GRAD);
    }
    __device__ void fetch_for_output(int left) {
        if (for_gates) tiles.template copy_in<1>(2, states, left, BackwardStep::Padding::STATE);
    }
    __device__ void move(int tiles) { gates.advance(tiles), grads.advance(tiles), states.advance(tiles); }
    // This lane's rows of the tile at hand; of the states, each is read when it is needed.
    struct Held {
        Chunk<Element, VECTOR> gates[STEPS], grads[STEPS];
    };
    __device__ void read(Held& held) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            if (!ONE_GATE) held.gates[k] = tiles.get(0, k);
            held.grads[k] = tiles.get(1, k);
        }
    }
    __device__ State gate_of(const Held& held, int left, int k, int v) const {
        if (!ONE_GATE) return held.gates[k].get(v);
        return tiles.first_own + k < left ? gate[v] : GateElement::widen(BackwardStep::Padding::GATE);
    }
    __device__ void compose_tile(const Held& held, Affine (&maps)[VECTOR], int left) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                maps[v] = compose(maps[v], BackwardStep::map(gate_of(held, left, k, v), held.grads[k].get(v)));
    }
    __device__ void finish(const Held& held, State (&h)[VECTOR], int left) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const Chunk<Element, VECTOR> earlier = tiles.get<1>(2, k);
            State to_gates[VECTOR], to_tokens[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const State x = chosen(tiles.first_own + k + 1 == left, initial[v], earlier.get(v));
                const auto to =
                    BackwardStep::gradients(gate_of(held, left, k, v), held.grads[k].get(v), x, h[v]);
                to_gates[v] = to.gate, to_tokens[v] = to.token, h[v] = to.earlier;
                // Unless a sum is asked for, packed sequences have one all the same: a condition would take longer.
                if (VARLEN || (ONE_GATE && tiles.first_own + k < left)) sum[v] = sum[v] + to_gates[v];
            }
            // A condition less where nothing goes to memory yet.
            if ((!DIRECT && !ONE_GATE) || each_gate) tiles.put(0, gates_grad, left, k, to_gates);
            if (!DIRECT || each_token) tiles.put(1, tokens_grad, left, k, to_tokens);
        }
    }
    __device__ void leave(int left) {
        if (each_gate) tiles.copy_out(0, gates_grad, left);
        if (each_token) tiles.copy_out(1, tokens_grad, left);
        gates_grad.advance(), tokens_grad.advance();
    }
    // The sums of all groups, for the first.
    __device__ void add_up() {
        __shared__ State sums[GROUPS][VECTOR][LANES_ACROSS];
        const int group = threadIdx.x / LANES_ACROSS, lane = threadIdx.x % LANES_ACROSS;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sums[group][v][lane] = sum[v];
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            for (int g = 1; g < GROUPS; g++) sum[v] = sum[v] + sums[g][v][lane];
    }
};

#if CTAS_PER_COLUMN == 1 && !SINGLE_WAVE
template <bool ONE_GATE>
__device__ void run_column(const Backward& of, const Column& column, const States& before, const States& after_grad,
                            const States& before_grad, const States& sums) {
    BackwardPass<ONE_GATE> pass(of, column, before, after_grad);
    pass.tiles.run(pass);
    const bool sums_up = ONE_GATE || (VARLEN && of.sums);
    if (sums_up) pass.add_up();
    if (threadIdx.x >= LANES_ACROSS) return;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        before_grad.write(v, pass.block_prefix.carried[v].x);
        if (sums_up) sums.write(v, pass.sum[v]);
    }
}
#endif
#elif STAGES && !NARROW
#include "channel_stream_backward.cuh"
#endif

// All pointers but gates and states_grad may be null; states are needed only for gates_grad.
// flags: 1 if x[t] follows from x[t+1]; 2 if gates_grad is to be summed over time, where each channel has
// one gate: then it points to State, and lies as initial_state does. The bits from 2 on are as for the forward kernel.
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
#if RESIDENT
    const Run run(batch, 1, channels, time, !(flags & 1), flags);
    const i64 own = run.offset(state_batch);
    const auto boundary = [&](const State* of) { return Boundary{of ? const_cast<State*>(of) + own : nullptr, state_channel}; };
    const State gate = run.has_channel ? Element::widen(gates[run.offset(gates_batch) + run.channel * gates_channel]) : State(0);
    scan_resident(run, {states_grad + run.offset(states_grad_batch),
                        gates_grad ? states + run.offset(states_batch) : nullptr,
                        tokens_grad ? tokens_grad + run.offset(grads_batch) : nullptr, gate,
                        run.has_channel ? boundary(initial_state).read(run.channel) : State(0), boundary(final_state_grad),
                        boundary(initial_state_grad), boundary(reinterpret_cast<State*>(gates_grad)), batch * channels}, workspace);
#elif NARROW
    const Storage* const from[] = {gates + blockIdx.x * gates_batch, states_grad + blockIdx.x * states_grad_batch,
                                   gates_grad ? states + blockIdx.x * states_batch : nullptr};
    Storage* const to[] = {gates_grad ? gates_grad + blockIdx.x * grads_batch : nullptr,
                           tokens_grad ? tokens_grad + blockIdx.x * grads_batch : nullptr};
    const i64 own_state = blockIdx.x * state_batch + threadIdx.x * state_channel;
    pass_over(Walk(channels, time, !(flags & 1)), from, to, final_state_grad ? final_state_grad + own_state : nullptr,
              initial_state_grad ? initial_state_grad + own_state : nullptr,
              initial_state ? initial_state + own_state : nullptr);
#elif CONSTANT_GATE
    const Position at(channels, time, !(flags & 1), flags);
    Lookback lookback(at, workspace);
    if (lookback.initializes()) return;
    States gate, conjugate;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        if (at.has_channel) gate.of[v] = Element::widen(gates[blockIdx.y * gates_batch + at.channel + v]);
        conjugate.of[v] = conj(gate.of[v]);
    }
    Piece grad[STEPS], earlier[STEPS];
    Rows(states_grad, states_grad_batch, states_grad_time, at).load(grad, at.own);
    // Of each row the state before it; that of the walk's last is not among the states.
    Rows(states, states_batch, states_time, at, 1).load(earlier, gates_grad ? at.own - at.ends() : 0);
    const auto boundary = [&](const State* of) { return Boundary(of, state_batch, state_channel, at); };
    const States initial = boundary(initial_state).read(at.ends());
    const States entering = boundary(final_state_grad).read(at.begins() && at.own);
    lookback.raise(conjugate);
    States h = entering, sum;
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++) h.of[v] = BackwardStep::map(gate.of[v], grad[k].get(v))(h.of[v]);
    h = lookback.enter(h);
    if (at.begins()) h = entering;
    Rows to(tokens_grad, grads_batch, grads_time, at);
    const int last = at.ends() ? at.own - 1 : -1;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        if (k < at.own) {
            States to_tokens;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const State before = chosen(k == last, initial.of[v], earlier[k].get(v));
                const auto of = BackwardStep::gradients(gate.of[v], grad[k].get(v), before, h.of[v]);
                h.of[v] = of.earlier, sum.of[v] = sum.of[v] + of.gate, to_tokens.of[v] = of.token;
            }
            if (tokens_grad) to.store(to_tokens);
        }
    }
    if (at.ends()) boundary(initial_state_grad).write(h);
    if (gates_grad) lookback.add_up(sum, boundary(reinterpret_cast<State*>(gates_grad)), batch * channels);
    lookback.leave();
#elif SCALAR
    unsigned* const own = own_workspace(workspace, flags);
    if (const int maps = TileShape::maps(flags); maps && blockIdx.x == 0) return WorkspaceInit(own, maps).initialize();
    const Position at(batch, channels, time, !(flags & 1), offsets, sequences, flags);
    GateStorage* const each_gate = flags & 2 ? nullptr : gates_grad;
    const auto result = [&](Storage* tensor) { return Rows(tensor, grads_outer, grads_batch, grads_time, at); };
    const Layout layout(tokens_grad || each_gate ? result(tokens_grad ? tokens_grad : each_gate)
                                                 : Rows(states_grad, states_grad_outer, states_grad_batch, states_grad_time, at), at);
    const Movers movers(layout, at);
#pragma unroll 1
    for (int tile = gates_time ? 0 : 1; tile < (gates_grad ? 3 : 2); tile++) {
        // Of each row the state before it, which lies in the next row of the scan.
        const int later = tile < 2 ? 0 : at.against ? -1 : 1;
        const int begin = later < 0 && at.first == 0 ? 0 : later;
        const int end = at.rows + (later > 0 && at.first + at.rows == at.all ? 0 : later);
        copy_in(tile == 0   ? Rows(gates, gates_outer, gates_batch, gates_time, at, gates_channel)
                : tile == 1 ? Rows(states_grad, states_grad_outer, states_grad_batch, states_grad_time, at)
                            : Rows(states, states_outer, states_batch, states_time, at),
                layout, movers, at, tile, begin, end);
    }
    const Scan scan(at, at.begin + at.slot * at.steps);
    wait_for_tile(flags, own);
    const Cursor cursor(layout, at);
    const Inputs inputs(gates, gates_outer, gates_batch, gates_channel, gates_time, at);
    const Ends ends{at, final_state_grad, initial_state_grad, state_outer, state_batch, state_channel, state_time};
    Finishing pass{inputs, ends, initial_state, gates_grad != nullptr,
                   enter_rows<BackwardStep>(inputs, ends, at, cursor, scan, own)};
    for_rows(at, cursor, scan, pass);
    meet_before_copies_out();
#pragma unroll 1
    for (int tile = each_gate ? 0 : 1; tile < (tokens_grad ? 2 : 1); tile++)
        copy_out(result(tile ? tokens_grad : each_gate), layout, movers, at, tile);
    leave_copies_out();
    if (flags & 2 && gates_grad)
        add_up(pass.sum, at, reinterpret_cast<State*>(gates_grad) + at.state(0, state_outer, state_batch, state_channel, 0),
               outer * batch * channels);
#elif COLUMN_SERIAL
#if SINGLE_WAVE
    const Part part(flags >> 2);
    const Column column(channels, time, !(flags & 1), offsets, sequences, 0, part.before());
#elif CTAS_PER_COLUMN > 1
    const CtaRank cta(workspace, int(flags >> 2));
    const Column column(channels, time, !(flags & 1), offsets, sequences, cta.column, cta.rank * TIMES);
#else
    const Column column(channels, time, !(flags & 1), offsets, sequences, blockIdx.x);
#endif
    const auto states_of = [&](const State* tensor, const Column& column) {
        return States(tensor, state_batch, state_channel, state_time, column);
    };
    State* const all_sums = flags & 2 ? reinterpret_cast<State*>(gates_grad) : nullptr;
    const Backward of{gates,       states,       states_grad, flags & 2 ? nullptr : gates_grad,
                      tokens_grad, all_sums,     gates_batch, gates_time,
                      states_batch, states_time, states_grad_batch, states_grad_time,
                      grads_batch, grads_time};
    const States before = states_of(initial_state, column), after_grad = states_of(final_state_grad, column);
#if SINGLE_WAVE
    const Column own = column.with(SingleWave::first_served());
    const SingleWave wave(part, workspace, states_of(final_state_grad, own), states_of(initial_state_grad, own));
    run_single_wave(BackwardPass<false>(of, column, before, after_grad), wave);
#elif CTAS_PER_COLUMN > 1
    const Column own = column.with(place_of(ColumnCta::own_channel()));
    // Only backward kernels of misaligned columns of 64 channels wait for the columns beside them (`await_beside`). For wide columns,
    // and forward, waiting costs more than the shared sectors save.
    const int columns_across = MISALIGNED && CHANNELS == 64 ? int((channels + CHANNELS - 1) / CHANNELS) : 0;
    ColumnCta column_cta(cta, workspace, states_of(final_state_grad, own), states_of(initial_state_grad, own), columns_across);
    column_cta.run(BackwardPass<false>(of, column, before, after_grad), time);
#else
    const States before_grad = states_of(initial_state_grad, column), sums = states_of(all_sums, column);
#if !EACH_GATE
    if (!VARLEN && gates_time == 0)
        run_column<true>(of, column, before, after_grad, before_grad, sums);
    else
#endif
        run_column<false>(of, column, before, after_grad, before_grad, sums);
#endif
#elif STAGES
    const Scans scans(batch, channels, time);
    const BackwardTiles work{scans,
                             Walk(time, !(flags & 1), nullptr, 0),
                             Plane(gates, gates_batch, gates_time),
                             Plane(states_grad, states_grad_batch, states_grad_time),
                             Plane(states, states_batch, states_time),
                             Plane(flags & 2 ? nullptr : gates_grad, grads_batch, grads_time),
                             Plane(tokens_grad, grads_batch, grads_time),
                             flags & 2 ? reinterpret_cast<State*>(gates_grad) : nullptr,
                             initial_state,
                             final_state_grad,
                             initial_state_grad,
                             state_batch,
                             state_channel};
    const Schedule schedule{scans.grid};
    if (schedule.initializes<BackwardTiles>(workspace)) return;
    if (schedule.is_lookback()) schedule.combine(work, workspace);
    else schedule.walk(work, workspace);
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
        gate[k] = gates_rows.load(k, BackwardStep::Padding::GATE);
        grad[k] = grads_rows.load(k, BackwardStep::Padding::GRAD);
        if (!gates_grad) continue;
        if (k + 1 < states_rows.count) {
            earlier[k] = states_rows.load(k + 1, BackwardStep::Padding::STATE);
        } else {  // the walk's last step, or past it
            State initial[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const bool given = initial_state && !walk.varlen() && at.channel + v < channels;
                initial[v] = given ? initial_state[(at.channel + v) * state_channel] : State(0);
            }
            earlier[k].set(initial);
        }
    }

    static_assert(VECTOR == 1, "boundaries are those of one channel");
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
    __syncwarp();  // the lanes of a slot have written the same places

    Affine rows[VECTOR];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            rows[v] = compose(rows[v], backward_map(gate[k].get(v), grad[k].get(v), k, marks, after_grad));

    State h[VECTOR];
    enter_rows(rows, h, at, walk, static_cast<u64*>(workspace), channels, final_state_grad, initial_state_grad,
               state_channel);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        State for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            State x = earlier[k].get(v);
            // The state before the walk, as it is: in their storage it is rounded.
            if (sizeof(Storage) < sizeof(State) && k + 1 == states_rows.count && !walk.varlen()) x = before.read(0);
            if (marks.starts_at(k)) h[v] = after_grad.read(marks.places[k].of_first);
            if (marks.ends_at(k)) x = before.read(marks.places[k].of_last);
            const auto to = BackwardStep::gradients(gate[k].get(v), grad[k].get(v), x, h[v]);
            for_gates[v] = to.gate, for_tokens[v] = to.token, h[v] = to.earlier;
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
