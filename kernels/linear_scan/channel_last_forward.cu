// linear_scan, forward, channels contiguous:  x[t] = gates[t] * x[t-1] + tokens[t]  per channel.
//
// A thread has STEPS time steps of VECTOR channels in a tile, and passes over them twice. First it composes their affine
// maps (gate, token). Then it computes and writes the states, from the state that enters them. Each input is read once and
// the output is written once: 12 bytes per element in float32, 6 in bfloat16 and float16.
//
// The constants that a variant is compiled with (spec.py) choose one of seven designs. Each header has a picture of its
// tiles:
//
//     RESIDENT        resident.cuh         few channels, each with one gate for all steps, all in shared memory at once
//     NARROW          narrow_columns.cuh   at most 32 channels, rows at any address
//     CONSTANT_GATE   constant_gate_columns.cuh  few channels, each with one gate for all steps, in tiles that look back
//     SCALAR          scalar_columns.cuh   rows at any address, in tiles that look back
//     COLUMN_SERIAL   column_serial.cuh    many channels. Also single_wave.cuh (SINGLE_WAVE) and multi_cta_column.cuh
//                                          (CTAS_PER_COLUMN > 1)
//     STAGES > 0      channel_stream.cuh   few channels; tiles are staged in shared memory
//     neither         channel_last.cuh     any strides and packed sequences; tiles are held in registers
#if RESIDENT
#define BACKWARD 0
#include "resident.cuh"
#elif NARROW
#define BACKWARD 0
#include "narrow_columns.cuh"
#elif CONSTANT_GATE
#include "constant_gate_columns.cuh"
#elif SCALAR
#include "scalar_columns.cuh"
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

struct Forward {
    const Storage *gates, *tokens;
    Storage* states;
    i64 gates_batch, gates_time, tokens_batch, tokens_time, states_batch, states_time;
};

// A lane's serial pass over time. ONE_GATE: each channel has one gate for all times. Of packed sequences `fills` says so.
template <bool ONE_GATE>
struct ForwardPass {
    const bool fills;
    Rows gates, tokens;
    Results states;
    Tiles<2> tiles;
    BlockPrefix block_prefix;
    State gate[VECTOR] = {};

    __device__ ForwardPass(const Forward& of, const Column& column, const States& before)
        : fills(VARLEN && of.gates_time == 0),
          gates(of.gates, of.gates_batch, of.gates_time, column),
          tokens(of.tokens, of.tokens_batch, of.tokens_time, column),
          states(of.states, of.states_batch, of.states_time, column),
          tiles(column, of.tokens_batch, of.tokens_time) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            block_prefix.carried[v] = before.read(v);
            if (ONE_GATE && column.has(v))
                gate[v] = column.value(of.gates, of.gates_batch, v);
        }
    }

    __device__ void fetch(int left) { fetch_for_map(left), move(tiles_apart()); }
    // What the first pass over a tile reads. The second pass reads nothing more, so fetch_for_output has nothing to do.
    __device__ void fetch_for_map(int left) {
        if (fills) tiles.fill_in(0, gates, left, ForwardStep::Padding::GATE);
        else if (!ONE_GATE) tiles.copy_in(0, gates, left, ForwardStep::Padding::GATE);
        tiles.copy_in(1, tokens, left, ForwardStep::Padding::TOKEN);
    }
    __device__ void fetch_for_output(int) {}
    __device__ void move(int tiles) { gates.advance(tiles), tokens.advance(tiles); }
    // This lane's rows of the current tile.
    struct Held {
        Chunk<Element, VECTOR> gates[STEPS], tokens[STEPS];
    };
    __device__ void read(Held& held) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            if (!ONE_GATE) held.gates[k] = tiles.get(0, k);
            held.tokens[k] = tiles.get(1, k);
        }
    }
    __device__ Step step(const Held& held, int left, int k, int v) const {
        const State token = held.tokens[k].get(v);
        if (!ONE_GATE) return ForwardStep::map(held.gates[k].get(v), token);
        const bool exists = tiles.first_own + k < left;
        return ForwardStep::map(exists ? gate[v] : GateElement::widen(ForwardStep::Padding::GATE), token);
    }
    __device__ void compose_tile(const Held& held, Affine (&maps)[VECTOR], int left) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) maps[v] = compose(maps[v], step(held, left, k, v));
    }
    __device__ void finish(const Held& held, State (&x)[VECTOR], int left) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
#pragma unroll
            for (int v = 0; v < VECTOR; v++) x[v] = step(held, left, k, v)(x[v]);
            tiles.put(1, states, left, k, x);
        }
    }
    __device__ void leave(int left) {
        tiles.copy_out(1, states, left);
        states.advance();
    }
};

#if CTAS_PER_COLUMN == 1 && !SINGLE_WAVE
template <bool ONE_GATE>
__device__ void run_column(const Forward& of, const Column& column, const States& before,
                            const States& after) {
    ForwardPass<ONE_GATE> pass(of, column, before);
    pass.tiles.run(pass);
    if (threadIdx.x >= LANES_ACROSS) return;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) after.write(v, pass.block_prefix.carried[v].x);
}
#endif
#elif STAGES && !NARROW
struct ForwardTiles {
    using Tiles = Ring<2, 32 * STEPS>;
    using TilePrefix = ColumnTilePrefix;
    enum : int { SCANS = CHANNELS, HELD = VECTOR };
    const Scans scans;
    const Walk walk;
    const Plane gates, tokens, states;
    const State* const initial_state;
    State* const final_state;
    const i64 state_batch, state_channel;

    __device__ const State* before(unsigned column, int scan) const {
        return scans.state_of(initial_state, state_batch, state_channel, column, scan);
    }
    __device__ State* after(unsigned column, int scan) const {
        return scans.state_of(final_state, state_batch, state_channel, column, scan);
    }
    __device__ void fetch(const Tile& tile, int stage) const {
        const Position at(scans, tile);
        const Tiles ring(stage);
        copy_in(ring, 1, tokens, at, walk, ForwardStep::Padding::TOKEN);
        gates_in(ring, 0, gates, at, walk, ForwardStep::Padding::GATE);
    }
    __device__ void compose_tile(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(scans, tile);
        const Tiles ring(stage);
        Affine rows[VECTOR];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const auto gate = read_piece(ring.place(0, at.own(k))), token = read_piece(ring.place(1, at.own(k)));
#pragma unroll
            for (int v = 0; v < VECTOR; v++) rows[v] = compose(rows[v], ForwardStep::map(gate.get(v), token.get(v)));
        }
        tile_prefix.scan(rows, at);
    }
    __device__ void finish(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(scans, tile);
        const Tiles ring(stage);
        State x[VECTOR];
        tile_prefix.enter(x);
        Storage* const first = states.at(at, walk, at.own_row(0));
        const i64 apart = states.apart(walk);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const auto gate = read_piece(ring.place(0, at.own(k))), token = read_piece(ring.place(1, at.own(k)));
#pragma unroll
            for (int v = 0; v < VECTOR; v++) x[v] = ForwardStep::map(gate.get(v), token.get(v))(x[v]);
            Chunk<Element, VECTOR> chunk;
            chunk.set(x);
            if (at.has_own(k)) store_global(first + k * apart, words_of(chunk));
        }
    }
};
#endif

#if SCALAR
// The states of a thread's rows, which take the place of tokens in shared memory.
struct Finishing {
    const Inputs& inputs;
    const Ends& ends;
    State x;

    __device__ void begin(unsigned scan, bool is_first, bool) {
        if (is_first) x = ends.enter(scan);
    }
    template <int N>
    __device__ void rows(Cursor& cursor, int) {
        const RowsAhead<N> rows(cursor);
        State gates[N], tokens[N];
        inputs.read(rows, gates, tokens);
#pragma unroll
        for (int k = 0; k < N; k++) x = ForwardStep::map(gates[k], tokens[k])(x), element(1, rows.at[k]) = Element::narrow(x);
    }
    __device__ void end(unsigned scan) const { ends.leave(scan, x); }
};
#endif

// initial_state, final_state and offsets may be null. flags: bit 0 is set if x[t] follows from x[t+1]; bit 1 is unused here;
// the bits from 2 on are the number of time steps of a warp (single_wave.cuh), of CTAs of a column (multi_cta_column.cuh), or the shape
// of a tile (TileShape in scalar_tiles.cuh).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_scan_channel_last_forward(
    const GateStorage* __restrict__ gates, const Storage* __restrict__ tokens,
    const State* __restrict__ initial_state, Storage* __restrict__ states,
    State* __restrict__ final_state, const i64* __restrict__ offsets, void* workspace,
    i64 outer, i64 batch, i64 channels, i64 time, i64 sequences,
    i64 gates_outer, i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_outer, i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 states_outer, i64 states_batch, i64 states_channel, i64 states_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time, i64 flags) {
#if RESIDENT
    const Run run(batch, 1, channels, time, flags & 1, flags);
    const i64 own = run.offset(state_batch);
    const auto boundary = [&](const State* of) { return Boundary{of ? const_cast<State*>(of) + own : nullptr, state_channel}; };
    const State gate = run.has_channel ? Element::widen(gates[run.offset(gates_batch) + run.channel * gates_channel]) : State(0);
    scan_resident(run, {tokens + run.offset(tokens_batch), nullptr, states + run.offset(states_batch), gate,
                        State(0), boundary(initial_state), boundary(final_state), {}, 0}, workspace);
#elif NARROW
    const Storage* const from[] = {gates + blockIdx.x * gates_batch, tokens + blockIdx.x * tokens_batch};
    Storage* const to[] = {states + blockIdx.x * states_batch};
    const i64 own_state = blockIdx.x * state_batch + threadIdx.x * state_channel;
    const State* const before = initial_state ? initial_state + own_state : nullptr;
    pass_over(Walk(channels, time, flags & 1), from, to, before, final_state ? final_state + own_state : nullptr, before);
#elif CONSTANT_GATE
    const Position at(channels, time, flags & 1, flags);
    Lookback lookback(at, workspace);
    if (lookback.initializes()) return;
    States gate;
#pragma unroll
    for (int v = 0; v < VECTOR; v++)
        if (at.has_channel) gate.of[v] = Element::widen(gates[blockIdx.y * gates_batch + at.channel + v]);
    Piece tokens_of[STEPS];
    Rows(tokens, tokens_batch, tokens_time, at).load(tokens_of, at.own);
    const States initial = Boundary(initial_state, state_batch, state_channel, at).read(at.begins() && at.own);
    lookback.raise(gate);
    const auto advance = [&](States& x, int k) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) x.of[v] = ForwardStep::map(gate.of[v], tokens_of[k].get(v))(x.of[v]);
    };
    States state = initial;
#pragma unroll
    for (int k = 0; k < STEPS; k++) advance(state, k);
    state = lookback.enter(state);
    if (at.begins()) state = initial;
    Rows to(states, states_batch, states_time, at);
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < at.own) advance(state, k), to.store(state);
    if (at.ends()) Boundary(final_state, state_batch, state_channel, at).write(state);
    lookback.leave();
#elif SCALAR
    unsigned* const own = own_workspace(workspace, flags);
    if (const int maps = TileShape::maps(flags); maps && blockIdx.x == 0) return WorkspaceInit(own, maps).initialize();
    const Position at(batch, channels, time, flags & 1, offsets, sequences, flags);
    const Layout layout(Rows(states, states_outer, states_batch, states_time, at), at);
    const Movers movers(layout, at);
#pragma unroll 1
    for (int tile = gates_time ? 0 : 1; tile < 2; tile++)
        copy_in(tile ? Rows(tokens, tokens_outer, tokens_batch, tokens_time, at)
                     : Rows(gates, gates_outer, gates_batch, gates_time, at, gates_channel),
                layout, movers, at, tile, 0, at.rows);
    const Scan scan(at, at.begin + at.slot * at.steps);
    wait_for_tile(flags, own);
    const Cursor cursor(layout, at);
    const Inputs inputs(gates, gates_outer, gates_batch, gates_channel, gates_time, at);
    const Ends ends{at, initial_state, final_state, state_outer, state_batch, state_channel, state_time};
    Finishing pass{inputs, ends, enter_rows<ForwardStep>(inputs, ends, at, cursor, scan, own)};
    for_rows(at, cursor, scan, pass);
    meet_before_copies_out();
    copy_out(Rows(states, states_outer, states_batch, states_time, at), layout, movers, at, 1);
    leave_copies_out();
#elif COLUMN_SERIAL
#if SINGLE_WAVE
    const Part part(flags >> 2);
    const Column column(channels, time, flags & 1, offsets, sequences, 0, part.before());
#elif CTAS_PER_COLUMN > 1
    const CtaRank cta(workspace, int(flags >> 2));
    const Column column(channels, time, flags & 1, offsets, sequences, cta.column, cta.rank * TIMES);
#else
    const Column column(channels, time, flags & 1, offsets, sequences, blockIdx.x);
#endif
    const States before(initial_state, state_batch, state_channel, state_time, column);
    const Forward of{gates,        tokens,      states,       gates_batch, gates_time,
                     tokens_batch, tokens_time, states_batch, states_time};
#if SINGLE_WAVE
    const Column own = column.with(SingleWave::first_served());
    const SingleWave wave(part, workspace, States(initial_state, state_batch, state_channel, state_time, own),
                    States(final_state, state_batch, state_channel, state_time, own));
    run_single_wave(ForwardPass<false>(of, column, before), wave);
#elif CTAS_PER_COLUMN > 1
    const Column own = column.with(place_of(ColumnCta::own_channel()));
    ColumnCta column_cta(cta, workspace, States(initial_state, state_batch, state_channel, state_time, own),
                States(final_state, state_batch, state_channel, state_time, own));
    column_cta.run(ForwardPass<false>(of, column, before), time);
#else
    const States after(final_state, state_batch, state_channel, state_time, column);
#if !EACH_GATE
    if (!VARLEN && gates_time == 0) run_column<true>(of, column, before, after);
    else
#endif
        run_column<false>(of, column, before, after);
#endif
#elif STAGES
    const Scans scans(batch, channels, time);
    const ForwardTiles work{scans,
                            Walk(time, flags & 1, nullptr, 0),
                            Plane(gates, gates_batch, gates_time),
                            Plane(tokens, tokens_batch, tokens_time),
                            Plane(states, states_batch, states_time),
                            initial_state,
                            final_state,
                            state_batch,
                            state_channel};
    const Schedule schedule{scans.grid};
    if (schedule.initializes<ForwardTiles>(workspace)) return;
    if (schedule.is_lookback()) schedule.combine(work, workspace);
    else schedule.walk(work, workspace);
#else
    const Position at(static_cast<u64*>(workspace), outer, batch, channels);
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
        gate[k] = gates_rows.load(k, ForwardStep::Padding::GATE);
        token[k] = tokens_rows.load(k, ForwardStep::Padding::TOKEN);
    }

    // With packed sequences VECTOR is 1, since `before` and `after` point to the states of a single channel.
    const i64 c = at.channel < channels ? at.channel : 0;
    const Boundary before{
        initial_state ? const_cast<State*>(initial_state) + c * state_channel : nullptr,
        state_time};
    const Boundary after{final_state ? final_state + c * state_channel : nullptr, state_time};
    const Marks marks = walk.marks(at.first, STEPS, own_places());
    __syncwarp();  // lanes with the same rows have written the same marks to shared memory

    Affine rows[VECTOR];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            rows[v] = compose(rows[v], forward_map(gate[k].get(v), token[k].get(v), k, marks, before));

    State x[VECTOR];
    enter_rows(rows, x, at, walk, static_cast<u64*>(workspace), channels, initial_state, final_state, state_channel);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            x[v] = forward_map(gate[k].get(v), token[k].get(v), k, marks, before)(x[v]);
            if (marks.ends_at(k) && at.channel < channels)
                after.write(marks.places[k].of_last, x[v]);
        }
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        states_rows.store(k, chunk);
    }
#endif
}
