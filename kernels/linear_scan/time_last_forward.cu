// linear_scan, forward, time contiguous:  x[t] = gates[t] * x[t-1] + tokens[t]  along each row.
//
// Each lane composes the affine maps (gate, token) of its chunk, a warp scan and one exchange between the warps
// of the row give the state that enters each chunk, and a second pass over the registers writes
// the states. One read of each input and one write of the output: 12 bytes per element in float32,
// 6 in bfloat16 and float16. The tile pictures are in time_stream.cuh (staged), short_rows.cuh (short rows
// without gaps), resident.cuh (one gate for all steps) and time_last.cuh (held in registers).
#if RESIDENT
#define BACKWARD 0
#include "resident.cuh"
#elif SHORT_ROWS
#include "short_rows.cuh"

// The states of a thread's steps, which take the place of tokens in shared memory.
struct Finishing {
    const Tile& tile;
    State x;

    template <int N>
    __device__ void steps(char* cell, int) {
        const Inputs<N> in(cell, tile.apart);
#pragma unroll
        for (int k = 0; k < N; k++)
            put(cell + k * tile.apart + AREA, x = ForwardStep::map(in.first[k], in.second[k])(x));
    }
};
#elif STAGES
#include "time_stream.cuh"

struct Forward {
    Rows gates, tokens, states;
    bool one_gate;  // a row has one for all times
    States initial, last;
    Walk walk;
};

template <bool TURNED>
struct ForwardTiles {
    using Tiles = Ring<GATES + 1, 32 * PIECES>;
    using TilePrefix = RowTilePrefix;
    enum : int { SCANS = 1, HELD = 1 };
    const Forward& of;
    const Scans& scans;

    __device__ void fetch(const Tile& tile, int stage) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        if (GATES && of.one_gate) fill_in<TURNED>(ring, 0, of.gates, at, scans, ForwardStep::Padding::GATE);
        else if (GATES) copy_in<TURNED>(ring, 0, of.gates, at, scans, [](unsigned) { return ForwardStep::Padding::GATE; });
        copy_in<TURNED>(ring, GATES, of.tokens, at, scans, [](unsigned) { return ForwardStep::Padding::TOKEN; });
    }
    // Of a row of one sequence.
    __device__ const State* before(unsigned row, int) const {
        return VARLEN ? nullptr : of.initial.of_row(scans, Position({0, row}, scans), row);
    }
    __device__ State* after(unsigned row, int) const {
        return VARLEN ? nullptr : of.last.of_row(scans, Position({0, row}, scans), row);
    }
    __device__ void compose_tile(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        if constexpr (MISALIGNED) {
            mend_both<TURNED>(ring, at, scans, ForwardStep::Padding::GATE, ForwardStep::Padding::TOKEN);
        }
#if VARLEN
        const auto start = [&](int k, i64 number) {
            Storage &gate = element<TURNED>(ring, 0, k), &token = element<TURNED>(ring, 1, k);
            if (!of.initial.first) {
                gate = closed(gate);
                return;
            }
            const Nearby& nearby = Nearby::of_warp();
            if (nearby.begin_of(of.walk, number) == nearby.begin_of(of.walk, number + 1)) return;  // another one starts here
            const State before = read(of.initial.of_sequence(scans, at, of.walk.index(number)));
            const State x = ForwardStep::map(Element::widen(gate), Element::widen(token))(before);
            const unsigned bits = __float_as_uint(x);
            gate = joins() ? Storage(bits >> 16) : 0, token = Storage(bits);
        };
        tile_prefix.marked = find_ends(of.walk, scans.order<TURNED>(at), TIMES, start, [](int) {});
#endif
        const Gates<TURNED, Tiles> gates(ring, of.gates, at, scans);
        Affine map;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const auto gate = gates.piece(p);
            const Piece<TURNED> token{read_piece(ring.place(GATES, at.lane * PIECES + p))};
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                map = compose(map, ForwardStep::map(gate.get(i), token.get(i)));
        }
#if VARLEN
        if (tile_prefix.marked && (joins() || !is_finite(map.scale) || !is_finite(map.shift)))
            compose_marked(ring, at, map);
#endif
        tile_prefix.scan(map, at);
    }
    __device__ void finish(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        State x = tile_prefix.enter(tile, at, scans.grid.levels, of.initial.of_row(scans, at, at.row()),
                                    of.last.of_row(scans, at, at.row()));
        const Gates<TURNED, Tiles> gates(ring, of.gates, at, scans);
        uint4 results[PIECES];
        const State entering = x;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const auto gate = gates.piece(p);
            uint4* const place = ring.place(GATES, at.lane * PIECES + p);
            Piece<TURNED> piece{read_piece(place)};
            State out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                out[i] = x = ForwardStep::map(gate.get(i), piece.get(i))(x);
            piece.set(out);
            (VARLEN ? results[p] : *place) = words_of(piece.chunk);
        }
#if VARLEN
        const bool is_scanned = tile_prefix.marked && (joins() || of.last.first || !is_finite(x)) &&
                                finish_marked(ring, at, entering);
        if (!is_scanned)
#pragma unroll
            for (int p = 0; p < PIECES; p++) *ring.place(GATES, at.lane * PIECES + p) = results[p];
#endif
        meet_copiers();
        copy_out<TURNED>(ring, GATES, of.states, at, scans);
    }
#if VARLEN
    // Whether the first state of a sequence, computed when its tile is composed, waits in the places of its gate and token. It has
    // the place of a token of 32 bits.
    __device__ bool joins() const { return sizeof(Storage) == 2 && of.initial.first; }
    __device__ State first_state(const Piece<TURNED>& gate, const Piece<TURNED>& token, int i) const {
        if (joins()) return __uint_as_float(unsigned(gate.bits(i)) << 16 | unsigned(token.bits(i)));
        return ForwardStep::map(gate.get(i), token.get(i))(State(0));
    }
    // The same for a lane, if sequences start or end among its elements.
    __device__ void compose_marked(const Tiles& ring, const Position& at, Affine& map) const {
        const LaneEnds lane(of.walk, scans.own_order<TURNED>(at));
        if (!lane.starts) return;
        map = {};
#pragma unroll 1
        for (int p = 0; p < PIECES; p++) {
            const Piece<TURNED> gate{read_piece(ring.place(0, at.lane * PIECES + p))};
            const Piece<TURNED> token{read_piece(ring.place(1, at.lane * PIECES + p))};
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                map = compose(map, ForwardStep::map(gate.get(i), token.get(i)));
                if (lane.starts >> (p * VECTOR + i) & 1) map = {State(0), State(0), first_state(gate, token, i)};
            }
        }
    }
    __device__ bool finish_marked(const Tiles& ring, const Position& at, State x) const {
        const i64 order = scans.own_order<TURNED>(at);
        const LaneEnds lane(of.walk, order);
        if (!lane.any()) return false;
#pragma unroll 1
        for (int p = 0; p < PIECES; p++) {
            uint4* const place = ring.place(1, at.lane * PIECES + p);
            const Piece<TURNED> gate{read_piece(ring.place(0, at.lane * PIECES + p))};
            Piece<TURNED> piece{read_piece(place)};
            State out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const bool starts = lane.starts >> (p * VECTOR + i) & 1;
                out[i] = x = starts ? first_state(gate, piece, i) : ForwardStep::map(gate.get(i), piece.get(i))(x);
            }
            piece.set(out);
            *place = words_of(piece.chunk);
            unsigned left = of.last.first ? lane.ends >> p * VECTOR & ((1u << VECTOR) - 1) : 0;
#pragma unroll 1
            for (; left; left &= left - 1) {
                const int i = __ffs(left) - 1;
                const Cursor cursor(of.walk, order + p * VECTOR + i);
                write(of.last.of_sequence(scans, at, cursor.index()), element_of(out, i));
            }
        }
        return true;
    }
#endif
};

#else
#include "time_last.cuh"

template <bool TURNED>
struct Inputs {
    Steps<GateElement, TURNED> gates[STEPS];
    Steps<Element, TURNED> tokens[STEPS];

    __device__ void load_tile(const Row<GateElement, TURNED>& gates_row,
                              const Row<Element, TURNED>& tokens_row, const Position& at,
                              i64 tile) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            if constexpr (MISALIGNED) {
                const i64 order = at.order(tile, k);
                const Own own = gates_row.own(order);
                gates_row.load_whole(order, own, gates[k]);
                tokens_row.load_whole(order, own, tokens[k]);
                if (!own.is_cut()) continue;
                gates_row.load_end(order, own, gates[k]);
                tokens_row.load_end(order, own, tokens[k]);
            } else {
                gates[k] = gates_row.load(at.order(tile, k), ForwardStep::Padding::GATE);
                tokens[k] = tokens_row.load(at.order(tile, k), ForwardStep::Padding::TOKEN);
            }
        }
    }
};

template <bool TURNED>
__device__ __forceinline__ void scan_row(const Row<GateElement, TURNED>& gates_row,
                                         const Row<Element, TURNED>& tokens_row,
                                         const Row<Element, TURNED>& states_row,
                                         const Boundary& before, const Boundary& after,
                                         const Position& at, const Walk& walk) {
    RunningPrefix carry = walk.varlen() ? State(0) : before.read(0);
    const i64 time = walk.time;
    const i64 first = MISALIGNED ? gates_row.first() - TILE : 0;
    Inputs<TURNED> next;
    if constexpr (!MISALIGNED) next.load_tile(gates_row, tokens_row, at, first);
    int parity = 0;
    for (i64 tile = first; tile < time; tile += TILE, parity ^= 1) {
        Inputs<TURNED> here = next;
        if (tile + TILE < time) next.load_tile(gates_row, tokens_row, at, tile + TILE);
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
                    gates_row.mend(own, here.gates[k], ForwardStep::Padding::GATE);
                    tokens_row.mend(own, here.tokens[k], ForwardStep::Padding::TOKEN);
                }
            }
            marks[k] = walk.marks(order, VECTOR, own_places(k));
            Affine chunk;
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                chunk = compose(chunk, forward_map(here.gates[k].get(i), here.tokens[k].get(i),
                                                 i, marks[k], before));
            before_chunk[k] = compose(total, exclusive_scan(chunk, at.lane));
            total = compose(total, from_lane(chunk, 31));
        }

        const State entering = enter_warp(total, at.warp, at.lane, parity, carry);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            if constexpr (MISALIGNED)
                if (at.past(tile, k, time)) continue;
            State x = before_chunk[k](entering), out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const Step step = forward_map(here.gates[k].get(i), here.tokens[k].get(i), i,
                                                 marks[k], before);
                out[i] = x = step(x);
                if (marks[k].ends_at(i)) after.write(marks[k].places[i].of_last, x);
            }
            Steps<Element, TURNED> steps;
            steps.set(out);
            states_row.store(order, steps);
        }
    }
    if (!walk.varlen() && at.warp == 0 && at.lane == 0) after.write(0, carry.x);
}
#endif

// initial_state, final_state and offsets may be null. flags: bit 0 is set if x[t] follows from x[t+1]; where the build pins that, there
// is no code for the other way. Of packed sequences, the 8 bits from bit 2 on say how many warps of a CTA have whole rows, 0 if rows are
// cut, and those from bit 10 on how many rows a column has.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_scan_time_last_forward(
    const GateStorage* __restrict__ gates, const Storage* __restrict__ tokens,
    const State* __restrict__ initial_state, Storage* __restrict__ states,
    State* __restrict__ final_state, const i64* __restrict__ offsets, void* workspace,
    i64 outer, i64 batch, i64 channels, i64 time, i64 sequences,
    i64 gates_outer, i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_outer, i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 states_outer, i64 states_batch, i64 states_channel, i64 states_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time, i64 flags) {
#if RESIDENT
    const Run run(batch, channels, 1, time, flags & 1, flags);
    const i64 own = run.offset(state_batch, state_channel);
    const auto boundary = [&](const State* of) { return Boundary{of ? const_cast<State*>(of) + own : nullptr, state_channel}; };
    const State gate = run.has_channel ? Element::widen(gates[run.offset(gates_batch, gates_channel)]) : State(0);
    scan_resident(run, {tokens + run.offset(tokens_batch, tokens_channel), nullptr, states + run.offset(states_batch, states_channel), gate,
                        State(0), boundary(initial_state), boundary(final_state), {}, 0}, workspace);
#elif SHORT_ROWS
    const Tile tile(batch * channels, time, flags & 1, flags);
    copy_in(tile, 1, tokens);
    if (gates_time == 0 && time > 1) fill_in(tile, gates, channels, gates_batch, gates_channel);
    else copy_in(tile, 0, gates);
    const i64 own_state = tile.row() * state_channel;
    const State initial = tile.own && initial_state ? initial_state[own_state] : State(0);
    await_copies();
    Finishing pass{tile, enter_steps<ForwardStep>(tile, initial)};
    for_own(tile, pass);
    if (final_state && tile.ends()) final_state[own_state] = pass.x;
    __syncthreads();
    copy_out(tile, 1, states);
#elif STAGES
    const Scans scans(batch, channels, time, {tokens_batch, tokens_channel}, flags);
    const Forward of{{gates, gates_batch, gates_channel},
                     {tokens, tokens_batch, tokens_channel},
                     {states, states_batch, states_channel},
                     gates_time == 0 && time > 1,
                     {const_cast<State*>(initial_state), {state_batch, state_channel}, state_time},
                     {final_state, {state_batch, state_channel}, state_time},
                     Walk(time, flags & 1, offsets, sequences)};
    run<ForwardTiles>(of, scans, flags & 1, workspace);
#else
    const Position at(batch, channels);
    if (at.row >= outer * batch * channels) return;
    const Walk walk(time, flags & 1, offsets, sequences);
    gates += at.offset(gates_outer, gates_batch, gates_channel);
    tokens += at.offset(tokens_outer, tokens_batch, tokens_channel);
    states += at.offset(states_outer, states_batch, states_channel);
    const i64 state = at.offset(state_outer, state_batch, state_channel);
    const Boundary before{initial_state ? const_cast<State*>(initial_state) + state : nullptr,
                          state_time};
    const Boundary after{final_state ? final_state + state : nullptr, state_time};
    if (ALIGNED && walk.against)
        scan_row<ALIGNED>({gates, gates_time, walk}, {tokens, tokens_time, walk},
                          {states, states_time, walk}, before, after, at, walk);
    else
        scan_row<false>({gates, gates_time, walk}, {tokens, tokens_time, walk},
                        {states, states_time, walk}, before, after, at, walk);
#endif
}
