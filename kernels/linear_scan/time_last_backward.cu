// linear_scan, backward, time contiguous. With h[t] the gradient that reaches x[t-1],
//
//     tokens_grad[t] = states_grad[t] + h[t+1]
//     gates_grad[t]  = tokens_grad[t] * conj(x[t-1])
//     h[t]           = conj(gates[t]) * tokens_grad[t]
//
// which is a scan in the opposite direction over the affine maps h -> conj(gates[t]) * (states_grad[t] + h):
// no gate has to be read one place off its own. Three reads and two writes: 20 bytes per element in float32, 10 in bfloat16 and
// float16. The tile pictures are in time_stream.cuh (staged), short_rows.cuh (short rows without gaps), resident.cuh (one gate for
// all steps) and time_last.cuh (held in registers).
#include "../common/compiler.cuh"
#if RESIDENT
#define BACKWARD 1
#include "resident.cuh"
#elif SHORT_ROWS
#include "short_rows_backward.cuh"
#elif STAGES
#include "time_stream.cuh"

struct Backward {
    Rows gates, states, grads, gates_grad, tokens_grad;
    bool one_gate;  // a row has one for all times
    State* sums;  // of gates_grad: one for each row or, of rows that are cut, for each tile; the next of a row lies after one of every row
    States initial, final_grad, initial_grad;
    Walk walk;
};

template <bool TURNED>
struct BackwardTiles {
    using Tiles = Ring<GATES + 2, 32 * PIECES, SIDE>;  // of the states one more a row, past the last
    using TilePrefix = RowTilePrefix;
    enum : int { SCANS = 1, HELD = 1, GRADS = GATES, STATES = GATES + 1 };
    static_assert(!CUT || TIMES >= SUM_STEPS, "or a tile has no room for its sum");
    const Backward& of;
    const Scans& scans;

    __device__ void fetch(const Tile& tile, int stage) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        if (GATES && of.one_gate) fill_in<TURNED>(ring, 0, of.gates, at, scans, BackwardStep::Padding::GATE);
        else if (GATES) copy_in<TURNED>(ring, 0, of.gates, at, scans, [](unsigned) { return BackwardStep::Padding::GATE; });
        copy_in<TURNED>(ring, GRADS, of.grads, at, scans, [](unsigned) { return BackwardStep::Padding::GRAD; });
        if (!of.gates_grad.first && !of.sums) return;
        copy_in<TURNED>(ring, STATES, of.states, at, scans, [](unsigned) { return BackwardStep::Padding::STATE; });
        if (at.lane >= SIDE) return;
        const unsigned row = at.first_row + at.lane;
        const i64 next = at.first + TIMES - scans.skip<TURNED>(at, row);
        const bool inside = row < scans.rows && next < scans.time && (!MISALIGNED || next > -VECTOR);
        copy_piece<TURNED>(ring.extra(at.lane), of.states.at<TURNED>(scans, at, row, next), next, scans, inside);
    }
    // Of a row of one sequence.
    __device__ const State* before(unsigned row, int) const {
        return VARLEN ? nullptr : of.final_grad.of_row(scans, Position({0, row}, scans), row);
    }
    __device__ State* after(unsigned row, int) const {
        return VARLEN ? nullptr : of.initial_grad.of_row(scans, Position({0, row}, scans), row);
    }
    __device__ void compose_tile(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        if constexpr (MISALIGNED) {
            mend_both<TURNED>(ring, at, scans, BackwardStep::Padding::GATE, BackwardStep::Padding::GRAD);
            __syncwarp();  // a neighbour reads some of it
        }
#if VARLEN
        const auto close = [&](int k) {
            element<TURNED>(ring, 0, k) = 0;
            (k + 1 < TIMES ? element<TURNED>(ring, 2, k + 1) : *extra_element(ring)) = BackwardStep::Padding::STATE;
        };
        tile_prefix.marked = find_ends(of.walk, scans.order<TURNED>(at), TIMES, [](int, i64) {}, close);
#endif
        const Gates<TURNED, Tiles> gates(ring, of.gates, at, scans);
        Affine map;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const auto gate = gates.piece(p);
            const Piece<TURNED> grad{read_piece(ring.place(GRADS, at.lane * PIECES + p))};
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                map = compose(map, BackwardStep::map(gate.get(i), grad.get(i)));
        }
#if VARLEN
        if (tile_prefix.marked && (of.final_grad.first || !is_finite(map.scale) || !is_finite(map.shift)))
            compose_marked(ring, at, map);
#endif
        tile_prefix.scan(map, at);
    }
    __device__ void finish(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        State h = tile_prefix.enter(tile, at, scans.grid.levels, of.final_grad.of_row(scans, at, at.row()),
                                    of.initial_grad.of_row(scans, at, at.row()));
        // The state before the walk's last step is not among the states, nor in their storage, which could not
        // hold it: it is taken as it is, where one of this lane's items is that step.
        const i64 to_last = scans.time - 1 + scans.skip<TURNED>(at, at.row()) - at.first - at.lane % LANES * ITEMS;
        const int last = !VARLEN && to_last >= 0 && to_last < ITEMS ? int(to_last) : -1;
        const State* const initial_state = last < 0 ? nullptr : of.initial.of_row(scans, at, at.row());
        const State initial = initial_state ? *initial_state : State(0);
        State sum = State(0);
        const Gates<TURNED, Tiles> gates(ring, of.gates, at, scans);
        uint4 results[2][PIECES];
        const State entering = h;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int own = at.lane * PIECES + p;
            const auto gate = gates.piece(p);
            Piece<TURNED> grad{read_piece(ring.place(GRADS, own))};
            const Piece<TURNED> states{read_piece(ring.place(STATES, own))};
            const bool past = p + 1 == PIECES && at.ends_row();
            const Piece<TURNED> next{read_piece(past ? ring.extra(at.lane / LANES)
                                                     : ring.place(STATES, own + 1))};
            State for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                State earlier = i + 1 < VECTOR ? states.get(i + 1) : next.get(0);
                if (MISALIGNED || i + 1 == VECTOR) earlier = chosen(p * VECTOR + i == last, initial, earlier);
                const auto to = BackwardStep::gradients(gate.get(i), grad.get(i), earlier, h);
                for_gates[i] = to.gate, for_tokens[i] = to.token, h = to.earlier;
            }
            // Of a piece that is not all the row's, what lies outside does not count.
            const bool counts = MISALIGNED || to_last >= p * VECTOR;
            if (!VARLEN && of.sums && counts) {
                const Own inside(scans.time - 1 - to_last + p * VECTOR, scans.time);
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    sum = sum + (!MISALIGNED || inside.has(i) ? for_gates[i] : State(0));
            }
            grad.set(for_tokens);
            uint4* const grad_place = VARLEN ? &results[1][p] : ring.place(GRADS, own);
            *grad_place = words_of(grad.chunk);
#if !ONE_GATE
            Piece<TURNED> gate_grad;
            gate_grad.set(for_gates);
            uint4* const gate_place = VARLEN ? &results[0][p] : ring.place(0, own);
            *gate_place = words_of(gate_grad.chunk);
#endif
        }
#if VARLEN
        __syncwarp();  // a neighbour has read states
        const bool with_states = of.final_grad.first || of.initial.first || of.initial_grad.first;
        const bool is_scanned = tile_prefix.marked && (with_states || !is_finite(h)) && finish_marked(ring, at, entering);
        if (!is_scanned)
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                *ring.place(0, at.lane * PIECES + p) = results[0][p];
                *ring.place(1, at.lane * PIECES + p) = results[1][p];
            }
#endif
        meet_copiers();
        if (GATES && of.gates_grad.first) copy_out<TURNED>(ring, 0, of.gates_grad, at, scans);
        if (of.tokens_grad.first) copy_out<TURNED>(ring, GRADS, of.tokens_grad, at, scans);
        if (!VARLEN && of.sums) add_up(tile, at, sum, tile_prefix);
    }
#if VARLEN
    // The same for a lane, if sequences start or end among its elements.
    __device__ void compose_marked(const Tiles& ring, const Position& at, Affine& map) const {
        Cursor cursor(of.walk, scans.own_order<TURNED>(at));
        if (!cursor.changes(ITEMS)) return;
        map = {};
#pragma unroll 1
        for (int k = 0; k < ITEMS; k++, cursor.advance()) {
            if (cursor.starts()) map = {State(0), State(0), read(of.final_grad.of_sequence(scans, at, cursor.index()))};
            map = compose(map, BackwardStep::map(gate(ring, at, cursor, k), value(ring, 1, at, k)));
        }
    }
    __device__ bool finish_marked(const Tiles& ring, const Position& at, State h) const {
        Cursor cursor(of.walk, scans.own_order<TURNED>(at));
        if (!cursor.changes(ITEMS)) return false;
#pragma unroll 1
        for (int k = 0; k < ITEMS; k++, cursor.advance()) {
            State earlier = at.lane == LANES - 1 && k + 1 == ITEMS ? Element::widen(*extra_element(ring)) : value(ring, 2, at, k + 1);
            if (cursor.starts()) h = read(of.final_grad.of_sequence(scans, at, cursor.index()));
            if (cursor.ends()) earlier = read(of.initial.of_sequence(scans, at, cursor.index()));
            const auto to = BackwardStep::gradients(gate(ring, at, cursor, k), value(ring, 1, at, k), earlier, h);
            h = to.earlier;
            if (cursor.ends()) write(of.initial_grad.of_sequence(scans, at, cursor.index()), h);
            element<TURNED>(ring, 0, at.lane * ITEMS + k) = Element::narrow(to.gate);
            element<TURNED>(ring, 1, at.lane * ITEMS + k) = Element::narrow(to.token);
        }
        return true;
    }
    __device__ static State value(const Tiles& ring, int input, const Position& at, int k) {
        return Element::widen(element<TURNED>(ring, input, at.lane * ITEMS + k));
    }
    // The tile's own gate of a sequence's last step in the walk has been overwritten.
    __device__ State gate(const Tiles& ring, const Position& at, const Cursor& cursor, int k) const {
        if (!cursor.ends()) return value(ring, 0, at, k);
        return Element::widen(of.gates.row(at)[of.one_gate ? 0 : of.walk.at(cursor.order)]);
    }
    // The state before the tile's last step.
    __device__ static Storage* extra_element(const Tiles& ring) {
        return reinterpret_cast<Storage*>(ring.extra(0)) + (TURNED ? VECTOR - 1 : 0);
    }
#endif
    // The sum of a tile that is a part of its row has room of its own; others are added up until the row's last.
    __device__ void add_up(const Tile& tile, const Position& at, State sum, TilePrefix& tile_prefix) const {
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) sum = sum + from_lane(sum, at.lane ^ distance);
        const bool is_last = tile.level + 1 == scans.grid.levels;
        if (!CUT) sum = tile_prefix.sum = tile.level ? tile_prefix.sum + sum : sum;
        State* const sums = States{of.sums, of.initial.strides, 0}.of_row(scans, at, at.row());
        if (!sums || at.lane % LANES > 0 || (CUT ? tile.level >= scans.grid.levels : !is_last)) return;
        sums[CUT ? tile.level * scans.rows : 0] = sum;
    }
};

#else
#include "time_last.cuh"

// The value of an element whose bits lie in a float. A template, as compilers would refuse the body for complex states.
template <class Float>
__device__ __forceinline__ State widened(Float bits) {
    return Element::widen(Storage(__float_as_uint(bits)));
}

template <bool TURNED>
struct Inputs {
    Steps<GateElement, TURNED> gates[STEPS];
    Steps<Element, TURNED> grads[STEPS], states[STEPS];
    // The state one step further along the walk than the last of the chunk. Of misaligned rows lane 31 has its bits, as they
    // lie in memory, since to widen them it would wait for the load.
    State edge[STEPS];

    // Aligned chunks of states lie on their own grid, and a lane gets that state from the next lane;
    // the others are read where they are needed. `initial` is the state after the walk's last step.
    __device__ void load_tile(const Row<GateElement, TURNED>& gates_row, const Row<Element, TURNED>& grads_row,
                              const Row<Element, TURNED>& states_row, State initial, bool with_states,
                              const Position& at, i64 tile) {
        const i64 time = gates_row.time;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            if constexpr (MISALIGNED) {
                const Own own = gates_row.own(order);
                gates_row.load_whole(order, own, gates[k]);
                grads_row.load_whole(order, own, grads[k]);
                if (with_states) states_row.load_whole(order, own, states[k]);
                if (own.is_cut()) {
                    gates_row.load_end(order, own, gates[k]);
                    grads_row.load_end(order, own, grads[k]);
                    if (with_states) states_row.load_end(order, own, states[k]);
                }
                if (!with_states) continue;
            } else {
                gates[k] = gates_row.load(order, BackwardStep::Padding::GATE);
                grads[k] = grads_row.load(order, BackwardStep::Padding::GRAD);
                if (!with_states) continue;
                states[k] = states_row.load(order, BackwardStep::Padding::STATE);
            }
            edge[k] = initial;
            if ((!ALIGNED || at.lane == 31) && order + VECTOR < time) {
                if constexpr (MISALIGNED) edge[k] = __uint_as_float(unsigned(states_row.bits(order + VECTOR)));
                else edge[k] = states_row.get(order + VECTOR);
            }
        }
    }

    // The state before each step of a chunk; a lane's chunk ends at the walk's last step, or a
    // neighbour has the state wanted.
    __device__ void earlier(int k, i64 order, i64 time, int lane, State (&x)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i + 1 < VECTOR; i++) x[i] = states[k].get(i + 1);
        x[VECTOR - 1] = edge[k];
        if constexpr (ALIGNED) {
            const State neighbour = from_higher(states[k].get(0), 1);
            if (lane < 31 && order + VECTOR < time) x[VECTOR - 1] = neighbour;
        }
        if constexpr (MISALIGNED) {
            if (lane == 31 && order + VECTOR < time) x[VECTOR - 1] = widened(edge[k]);
            if (order + VECTOR <= time) return;
        }
        if constexpr (!ALIGNED || MISALIGNED) {
#pragma unroll
            for (int i = 0; i + 1 < VECTOR; i++)
                if (order + i + 1 == time) x[i] = edge[k];
        }
    }
};

template <bool TURNED>
__device__ __forceinline__ void scan_row(
    const Row<GateElement, TURNED>& gates_row, const Row<Element, TURNED>& grads_row,
    const Row<Element, TURNED>& states_row, const Row<GateElement, TURNED>& gates_grad_row,
    const Row<Element, TURNED>& tokens_grad_row, bool with_gates, bool with_tokens,
    const Boundary& before, const Boundary& before_grad, const Boundary& after_grad,
    const Position& at, const Walk& walk) {
    const State initial = walk.varlen() ? State(0) : before.read(0);
    RunningPrefix carry = walk.varlen() ? State(0) : after_grad.read(0);
    const i64 time = walk.time;
    const i64 first = MISALIGNED ? gates_row.first() - TILE : 0;
    Inputs<TURNED> next;
    if constexpr (!MISALIGNED) next.load_tile(gates_row, grads_row, states_row, initial, with_gates, at, first);
    int parity = 0;
    for (i64 tile = first; tile < time; tile += TILE, parity ^= 1) {
        Inputs<TURNED> here = next;
        if (tile + TILE < time)
            next.load_tile(gates_row, grads_row, states_row, initial, with_gates, at, tile + TILE);
        if constexpr (MISALIGNED)
            if (tile <= -TILE) continue;  // so that the code to load a tile is there once

        Affine total, before_chunk[STEPS];
        Marks marks[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            if constexpr (MISALIGNED) {
                if (at.past(tile, k, time)) continue;
                if (const Own own = gates_row.own(order); !own.all()) {
                    gates_row.mend(own, here.gates[k], BackwardStep::Padding::GATE);
                    grads_row.mend(own, here.grads[k], BackwardStep::Padding::GRAD);
                }
            }
            marks[k] = walk.marks(order, VECTOR, own_places(k));
            Affine chunk;
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                chunk = compose(chunk, backward_map(here.gates[k].get(i), here.grads[k].get(i), i, marks[k],
                                                    after_grad));
            before_chunk[k] = compose(total, exclusive_scan(chunk, at.lane));
            total = compose(total, from_lane(chunk, 31));
        }

        const State entering = enter_warp(total, at.warp, at.lane, parity, carry);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            if constexpr (MISALIGNED)
                if (at.past(tile, k, time)) continue;
            State earlier[VECTOR], for_gates[VECTOR], for_tokens[VECTOR];
            here.earlier(k, order, time, at.lane, earlier);
            State h = before_chunk[k](entering);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const Marks& mark = marks[k];
                if (mark.starts_at(i)) h = after_grad.read(mark.places[i].of_first);
                if (mark.ends_at(i)) earlier[i] = before.read(mark.places[i].of_last);
                const auto to =
                    BackwardStep::gradients(here.gates[k].get(i), here.grads[k].get(i), earlier[i], h);
                for_gates[i] = to.gate, for_tokens[i] = to.token, h = to.earlier;
                if (mark.ends_at(i)) before_grad.write(mark.places[i].of_last, h);
            }
            if (with_gates) {
                Steps<GateElement, TURNED> steps;
                steps.set(for_gates);
                gates_grad_row.store(order, steps);
            }
            if (with_tokens) {
                Steps<Element, TURNED> steps;
                steps.set(for_tokens);
                tokens_grad_row.store(order, steps);
            }
        }
    }
    if (!walk.varlen() && at.warp == 0 && at.lane == 0) before_grad.write(0, carry.x);
}
#endif

// All pointers but gates and states_grad may be null; states are needed only for gates_grad.
// flags: as for the forward kernel; bit 1 is set if the gradient of gates is summed over time.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_scan_time_last_backward(
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
    const Run run(batch, channels, 1, time, !(flags & 1), flags);
    const i64 own = run.offset(state_batch, state_channel);
    const auto boundary = [&](const State* of) { return Boundary{of ? const_cast<State*>(of) + own : nullptr, state_channel}; };
    const State gate = run.has_channel ? Element::widen(gates[run.offset(gates_batch, gates_channel)]) : State(0);
    scan_resident(run, {states_grad + run.offset(states_grad_batch, states_grad_channel),
                        gates_grad ? states + run.offset(states_batch, states_channel) : nullptr,
                        tokens_grad ? tokens_grad + run.offset(grads_batch, grads_channel) : nullptr, gate,
                        run.has_channel ? boundary(initial_state).read(run.channel) : State(0), boundary(final_state_grad),
                        boundary(initial_state_grad), boundary(reinterpret_cast<State*>(gates_grad)), batch * channels}, workspace);
#elif SHORT_ROWS
    const Tile tile(batch * channels, time, !(flags & 1), flags);
    copy_in(tile, 1, states_grad);
    if (gates_grad) copy_in(tile, 2, states);
    if (gates_time == 0 && time > 1) fill_in(tile, gates, channels, gates_batch, gates_channel);
    else copy_in(tile, 0, gates);
    const i64 own_state = tile.row() * state_channel;
    const auto state = [&](const State* of) { return tile.own && of ? of[own_state] : State(0); };
    const State entering = state(final_state_grad), initial = state(initial_state);
    await_copies();
    Finishing pass{tile, initial, enter_steps<BackwardStep>(tile, entering)};
    for_own(tile, pass);
    if (initial_state_grad && tile.ends()) initial_state_grad[own_state] = pass.h;
    if (gates_grad && flags & 2) add_up(tile, pass.sum, reinterpret_cast<State*>(gates_grad) + own_state);
    __syncthreads();
    if (gates_grad && !(flags & 2)) copy_out(tile, 0, gates_grad);
    if (tokens_grad) copy_out(tile, 1, tokens_grad);
#elif STAGES
    State* const sums = flags & 2 ? reinterpret_cast<State*>(gates_grad) : nullptr;
    if (sums) gates_grad = nullptr;
    const Scans scans(batch, channels, time, {states_grad_batch, states_grad_channel}, flags);
    const auto states_of = [&](const State* tensor) {
        return States{const_cast<State*>(tensor), {state_batch, state_channel}, state_time};
    };
    const Backward of{{gates, gates_batch, gates_channel},
                      {states, states_batch, states_channel},
                      {states_grad, states_grad_batch, states_grad_channel},
                      {gates_grad, grads_batch, grads_channel},
                      {tokens_grad, grads_batch, grads_channel},
                      gates_time == 0 && time > 1,
                      sums,
                      states_of(initial_state),
                      states_of(final_state_grad),
                      states_of(initial_state_grad),
                      Walk(time, !(flags & 1), offsets, sequences)};
    run<BackwardTiles>(of, scans, !(flags & 1), workspace);
#else
    const Position at(batch, channels);
    if (at.row >= outer * batch * channels) return;
    const Walk walk(time, !(flags & 1), offsets, sequences);
    gates += at.offset(gates_outer, gates_batch, gates_channel);
    states += at.offset(states_outer, states_batch, states_channel);
    states_grad += at.offset(states_grad_outer, states_grad_batch, states_grad_channel);
    const bool with_gates = gates_grad, with_tokens = tokens_grad;
    gates_grad += at.offset(grads_outer, grads_batch, grads_channel);
    tokens_grad += at.offset(grads_outer, grads_batch, grads_channel);
    const i64 state = at.offset(state_outer, state_batch, state_channel);
    const Boundary before{initial_state ? const_cast<State*>(initial_state) + state : nullptr,
                          state_time};
    const Boundary before_grad{initial_state_grad ? initial_state_grad + state : nullptr,
                               state_time};
    const Boundary after_grad{
        final_state_grad ? const_cast<State*>(final_state_grad) + state : nullptr, state_time};
    if (ALIGNED && walk.against)
        scan_row<ALIGNED>({gates, gates_time, walk}, {states_grad, states_grad_time, walk},
                          {states, states_time, walk}, {gates_grad, grads_time, walk},
                          {tokens_grad, grads_time, walk}, with_gates, with_tokens, before,
                          before_grad, after_grad, at, walk);
    else
        scan_row<false>({gates, gates_time, walk}, {states_grad, states_grad_time, walk},
                        {states, states_time, walk}, {gates_grad, grads_time, walk},
                        {tokens_grad, grads_time, walk}, with_gates, with_tokens, before,
                        before_grad, after_grad, at, walk);
#endif
}
