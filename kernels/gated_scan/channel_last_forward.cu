// gated_scan, forward, channels contiguous:  h[t] = gate[t] * h[t-1] + token[t]  for each channel. The kind (kinds/)
// computes gate and token from its inputs.
//
// Traffic: each input is read once, and the states are written once. With n inputs that is 4 (n + 1) bytes per element in
// float32, and 2 (n + 1) in bfloat16 and float16: 6 for minGRU, 8 for RG-LRU.
//
// In shared memory the states overwrite the first input. channel_last.cuh describes the two passes over a tile, and names
// the headers that have the tile pictures.
#include "channel_last.cuh"

#if COLUMN_SERIAL

struct Forward {
    Inputs inputs;
    const float* parameters;
    const unsigned char* reset;
    Storage* states;
    i64 channels, reset_batch, states_batch, states_time;
    bool option;
};

// What a thread does for the tiles of its column. Tiles::run and ColumnCta::run call these functions in order: `fetch`
// starts the copies of a later tile; `read`, `compose_tile` and `finish` compute the current tile; `leave` copies its
// results out.
template <bool RESETS>
struct ForwardPass {
    Rows inputs[INPUTS];
    Results states;
    Tiles<INPUTS> tiles;
    BlockPrefix block_prefix;
    ResetRows<RESETS> composing, finishing;  // resets of the next tile to compose, and of the next to finish
    Channel channel[VECTOR];
    const bool option;

    template <int... I, int... V>
    __device__ ForwardPass(const Forward& of, const Column& column, const States& before, IndexSequence<I...>,
                           IndexSequence<V...>)
        : inputs{Rows(of.inputs.first[I], of.inputs.by_batch, of.inputs.by_time, column)...},
          states(of.states, of.states_batch, of.states_time, column),
          tiles(column, of.inputs.by_batch, of.inputs.by_time),
          composing(of.reset, of.reset_batch, column),
          finishing(of.reset, of.reset_batch, column),
          channel{Channel(of.parameters, of.channels, column.channel + V * TO_NEXT, column.has(V))...},
          option(of.option) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) block_prefix.carried[v] = before.read(v);
    }
    __device__ ForwardPass(const Forward& of, const Column& column, const States& before)
        : ForwardPass(of, column, before, MakeIndexSequence<INPUTS>{}, MakeIndexSequence<VECTOR>{}) {}

    __device__ void fetch(int left) {
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            tiles.copy_in(i, inputs[i], left, Element::narrow(Kind::padding(i)));
            inputs[i].advance();
        }
    }
    // This lane's rows of the current tile.
    struct Held {
        Chunk<Element, VECTOR> inputs[STEPS][INPUTS];
        Step steps[STEPS][VECTOR];
    };
    __device__ void read(Held& held) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int i = 0; i < INPUTS; i++) held.inputs[k][i] = tiles.get(i, k);
    }
    __device__ Step step(const Held& held, int left, unsigned resets, int k, int v) const {
        const Given given = given_of(held.inputs[k], v, channel[v], RESETS && resets >> k & 1, option);
        return gated(given, Kind::values(given), tiles.first_own + k < left);
    }
    __device__ void compose_tile(Held& held, Affine (&maps)[VECTOR], int left) {
        const unsigned resets = composing.take_tile();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                held.steps[k][v] = step(held, left, resets, k, v);
                maps[v] = composed<RESETS>(maps[v], held.steps[k][v]);
            }
    }
    __device__ void finish(const Held& held, State (&x)[VECTOR], int left) {
        const unsigned resets = RECOMPUTE_GATES ? finishing.take_tile() : 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                x[v] = applied<RESETS>(RECOMPUTE_GATES ? step(held, left, resets, k, v) : held.steps[k][v], x[v]);
            tiles.put(0, states, left, k, x);
        }
    }
    __device__ void leave(int left) {
        tiles.copy_out(0, states, left);
        states.advance();
    }
};

template <bool RESETS>
__device__ void run_column(const Forward& of, const Column& column, const States& before, const States& after) {
    ForwardPass<RESETS> pass(of, column, before);
    pass.tiles.run(pass);
    if (threadIdx.x >= LANES_ACROSS) return;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) after.write(v, pass.block_prefix.carried[v].x);
}
#endif

// Only the pointers of the kind's inputs and `states` may not be null.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gated_scan_channel_last_forward(
    const Storage* __restrict__ input0, const Storage* __restrict__ input1, const Storage* __restrict__ input2,
    const Storage* __restrict__ input3, const float* __restrict__ parameters,
    const unsigned char* __restrict__ reset, const State* __restrict__ initial_state, Storage* __restrict__ states,
    State* __restrict__ final_state, const i64* __restrict__ offsets, void* workspace,
    i64 batch, i64 channels, i64 time, i64 sequences,
    i64 inputs_batch, i64 inputs_channel, i64 inputs_time,
    i64 states_batch, i64 states_channel, i64 states_time,
    i64 state_batch, i64 state_channel, i64 state_time, i64 reset_batch, i64 flags) {
    const Inputs inputs{{input0, input1, input2, input3}, inputs_batch, inputs_channel, inputs_time};
    const bool option = flags & WITH_OPTION;
#if COLUMN_SERIAL
#if CTAS_PER_COLUMN > 1
    const CtaRank cta(workspace);
    const Column column(channels, time, flags & AGAINST_TIME, offsets, sequences, cta.column, cta.rank * TIMES);
#else
    const Column column(channels, time, flags & AGAINST_TIME, offsets, sequences, blockIdx.x);
#endif
    const States before(initial_state, state_batch, state_channel, state_time, column);
    const Forward of{inputs, parameters, reset, states, channels, reset_batch, states_batch, states_time, option};
#if CTAS_PER_COLUMN > 1
    const Column own = column.with(place_of(ColumnCta::own_channel()));
    ColumnCta column_cta(cta, workspace, States(initial_state, state_batch, state_channel, state_time, own),
                         States(final_state, state_batch, state_channel, state_time, own));
    if (reset) column_cta.run(ForwardPass<true>(of, column, before), time);
    else column_cta.run(ForwardPass<false>(of, column, before), time);
#else
    const States after(final_state, state_batch, state_channel, state_time, column);
    if (reset) run_column<true>(of, column, before, after);
    else run_column<false>(of, column, before, after);
#endif
#else
    static_assert(VECTOR == 1, "boundaries are those of one channel");
    const Position at(static_cast<u64*>(workspace), 1, batch, channels);
    const Walk walk(time, flags & AGAINST_TIME, offsets, sequences);
    const bool has_channel = at.channel < channels;
    const i64 c = has_channel ? at.channel : 0;
    Chunk<Element, 1> held[STEPS][INPUTS];
#pragma unroll
    for (int i = 0; i < INPUTS; i++) {
        const Rows<Element> rows(inputs.first[i] + at.offset(0, inputs_batch), inputs_channel, inputs_time, channels,
                                   at, walk);
#pragma unroll
        for (int k = 0; k < STEPS; k++) held[k][i] = rows.load(k, Element::narrow(Kind::padding(i)));
    }
    const Rows<Element> states_rows(states + at.offset(0, states_batch), states_channel, states_time, channels, at,
                                    walk);
    const i64 state = at.offset(0, state_batch);
    if (initial_state) initial_state += state;
    if (final_state) final_state += state;
    const Boundary before{initial_state ? const_cast<State*>(initial_state) + c * state_channel : nullptr, state_time};
    const Boundary after{final_state ? final_state + c * state_channel : nullptr, state_time};
    const Marks marks = walk.marks(at.first, STEPS, own_places());
    __syncwarp();  // lanes with the same rows have written the same marks to shared memory

    const Channel channel(parameters, channels, at.channel, has_channel);
    const unsigned resets = resets_of(reset, reset_batch, at, walk);
    Step steps[STEPS];
    Affine rows[1];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const Given given = given_of(held[k], 0, channel, resets >> k & 1, option);
        steps[k] = gated(given, Kind::values(given), at.first + k < time);
        // A sequence starts from the state before it, whatever the tile's state is.
        if (marks.starts_at(k)) steps[k] = {State(0), steps[k](before.read(marks.places[k].of_first))};
        rows[0] = compose(rows[0], steps[k]);
    }
    State x[1];
    enter_rows(rows, x, at, walk, static_cast<u64*>(workspace), channels, initial_state, final_state, state_channel);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        x[0] = steps[k](x[0]);
        if (marks.ends_at(k) && has_channel) after.write(marks.places[k].of_last, x[0]);
        Chunk<Element, 1> chunk;
        chunk.set(x);
        states_rows.store(k, chunk);
    }
#endif
}
