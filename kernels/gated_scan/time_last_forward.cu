// gated_scan, forward, time contiguous:  h[t] = gate[t] * h[t-1] + token[t]  along each row, with gate and token computed
// from the inputs (kind.cuh).
//
// Each lane computes the affine maps (gate, token) of its chunk once and composes them; a warp scan gives the state that
// enters each chunk; a second pass over the maps writes the states. Whole rows keep the maps in registers from one pass to
// the other. Rows that are cut keep them in float32 where the inputs were in shared memory. One read of each input and one
// write of the states: with two inputs 12 bytes per element in float32, 6 in bfloat16 and float16; with three, 16 and 8.
// The tile pictures are in time_last_stream.cuh (staged) and ../linear_scan/time_last.cuh (held in registers).
#if STAGES
#include "time_last_stream.cuh"

struct Forward {
    Sources sources;
    Rows states;
    const State* initial_state;
    State* final_state;
    Strides of_state;
};

enum : int { MAPS = CUT ? 1 : ITEMS };
enum : int { COLUMNS = CUT && 2 * WIDTH > INPUTS ? 2 * WIDTH : INPUTS };

struct ForwardPrefix : RowTilePrefix {
    Channel channel;
    float gate[MAPS], token[MAPS];
};

template <bool TURNED, bool RESETS>
struct ForwardTiles {
    using Tiles = Ring<COLUMNS, 32 * PIECES, RESET_PIECES>;
    using TilePrefix = ForwardPrefix;
    enum : int { SCANS = 1, HELD = 1 };
    const Forward& of;
    const Scans& scans;

    __device__ void fetch(const Tile& tile, int stage) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        copy_inputs<TURNED>(ring, of.sources, at, scans);
        if (RESETS) copy_resets<TURNED>(ring, 0, of.sources, at, scans);
    }
    // Of a row among batches × channels; null if there is none.
    template <class S>
    __device__ S* of_row(S* states, const Position& at, unsigned row) const {
        return states && row < scans.rows ? states + of.of_state.offset(at, row) : nullptr;
    }
    __device__ const State* before(unsigned row, int) const {
        return of_row(of.initial_state, Position({0, row}, scans), row);
    }
    __device__ State* after(unsigned row, int) const { return of_row(of.final_state, Position({0, row}, scans), row); }
    __device__ void compose_tile(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        if (PARAMETERS && (CUT || tile.level == 0))
            tile_prefix.channel.load(of.sources.parameters, of.sources.channels, at.channel);
        const Resets<TURNED, RESETS> resets = read_resets<TURNED, RESETS>(ring, 0, at.lane);
        Affine map;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int own = at.lane * PIECES + p;
            const bool inside = at.first + own * VECTOR < scans.time;
            InputPieces<TURNED> inputs;
            inputs.read(ring, own);
            float gates[VECTOR], tokens[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const int item = p * VECTOR + i;
                const Given given = inputs.given(i, tile_prefix.channel, resets.at(item), of.sources.option);
                const Step step = padded(gated(given, Kind::values(given)), inside);
                gates[i] = step.scale, tokens[i] = step.shift;
                map = compose_step<RESETS>(map, step);
                if (!CUT) tile_prefix.gate[item % MAPS] = gates[i], tile_prefix.token[item % MAPS] = tokens[i];
            }
            if (CUT) put_floats(ring, 0, own, gates), put_floats(ring, WIDTH, own, tokens);
        }
        tile_prefix.scan(map, at);
    }
    __device__ void finish(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        State x = tile_prefix.enter(tile, at, scans.grid.levels, of_row(of.initial_state, at, at.row()),
                                    of_row(of.final_state, at, at.row()));
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int own = at.lane * PIECES + p;
            float gates[VECTOR], tokens[VECTOR];
            if (CUT) get_floats(ring, 0, own, gates), get_floats(ring, WIDTH, own, tokens);
            State out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const int item = (p * VECTOR + i) % MAPS;
                const Step step{CUT ? gates[i] : tile_prefix.gate[item], CUT ? tokens[i] : tile_prefix.token[item]};
                out[i] = x = RESETS ? step(x) : step.scale * x + step.shift;
            }
            Piece<TURNED> piece;
            piece.set(out);
            *ring.place(0, own) = words_of(piece.chunk);
        }
        meet_copiers();
        copy_out<TURNED>(ring, 0, of.states, at, scans);
    }
};
template <bool TURNED>
using PlainTiles = ForwardTiles<TURNED, false>;
template <bool TURNED>
using ResetTiles = ForwardTiles<TURNED, true>;

#else
#include "time_last_chunks.cuh"

struct Inputs {
    Chunks chunks[STEPS];

    __device__ void load_tile(const Sources& sources, const Position& at, i64 tile) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) chunks[k].load(sources, at.order(tile, k));
    }
};

__device__ __forceinline__ void scan_row(const Sources& sources, const Row<Element, false>& states_row,
                                         const Boundary& before, const Boundary& after, const Position& at,
                                         const Walk& walk) {
    RunningPrefix carry = walk.varlen() ? State(0) : before.read(0);
    const i64 time = walk.time;
    Inputs next;
    next.load_tile(sources, at, 0);
    int parity = 0;
    for (i64 tile = 0; tile < time; tile += TILE, parity ^= 1) {
        const Inputs here = next;
        if (tile + TILE < time) next.load_tile(sources, at, tile + TILE);

        Affine total, before_chunk[STEPS];
        Marks marks[STEPS];
        Step steps[STEPS][VECTOR];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            marks[k] = walk.marks(order, VECTOR, own_places(k));
            Affine chunk;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const Given given = here.chunks[k].given(i, sources);
                Step step = gated(given, Kind::values(given));
                // A packed sequence starts from the state before it, whatever the run's state is.
                if (marks[k].starts_at(i))
                    step = {0.0f, step(before.read(marks[k].places[i].of_first))};
                if (order + i >= time) step = {1.0f, 0.0f};
                steps[k][i] = step;
                chunk = compose(chunk, step);
            }
            before_chunk[k] = compose(total, exclusive_scan(chunk, at.lane));
            total = compose(total, from_lane(chunk, 31));
        }

        const State entering = enter_warp(total, at.warp, at.lane, parity, carry);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            State x = before_chunk[k](entering), out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                out[i] = x = steps[k][i](x);
                if (marks[k].ends_at(i)) after.write(marks[k].places[i].of_last, x);
            }
            Steps<Element, false> written;
            written.set(out);
            states_row.store(at.order(tile, k), written);
        }
    }
    if (!walk.varlen() && at.warp == 0 && at.lane == 0) after.write(0, carry.x);
}
#endif

// Inputs beyond the kind's are null; parameters, reset, initial_state, final_state and offsets may be. flags: 1 if h[t]
// follows from h[t+1], and 2 for the kind's option.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gated_scan_time_last_forward(
    const Storage* __restrict__ input0, const Storage* __restrict__ input1, const Storage* __restrict__ input2,
    const Storage* __restrict__ input3, const float* __restrict__ parameters,
    const unsigned char* __restrict__ reset, const State* __restrict__ initial_state, Storage* __restrict__ states,
    State* __restrict__ final_state, const i64* __restrict__ offsets, void* workspace,
    i64 batch, i64 channels, i64 time, i64 sequences,
    i64 inputs_batch, i64 inputs_channel, i64 inputs_time,
    i64 states_batch, i64 states_channel, i64 states_time,
    i64 state_batch, i64 state_channel, i64 state_time, i64 reset_batch, i64 flags) {
#if STAGES
    const Scans scans(batch, channels, time, {inputs_batch, inputs_channel});
    const Forward of{{{input0, input1, input2, input3},
                      {inputs_batch, inputs_channel},
                      parameters,
                      reset,
                      reset_batch,
                      channels,
                      (flags & WITH_OPTION) != 0},
                     {states, states_batch, states_channel},
                     initial_state,
                     final_state,
                     {state_batch, state_channel}};
    if (CUT || reset) run<ResetTiles>(of, scans, flags & AGAINST_TIME, workspace);
    else run<PlainTiles>(of, scans, flags & AGAINST_TIME, workspace);
#else
    const Position at(batch, channels);
    if (at.row >= batch * channels) return;
    const Walk walk(time, flags & AGAINST_TIME, offsets, sequences);
    const Sources sources({input0, input1, input2, input3}, at.offset(0, inputs_batch, inputs_channel), inputs_time,
                          parameters, reset ? reset + at.batch * reset_batch : nullptr, at.channel, channels,
                          flags & WITH_OPTION, walk);
    const i64 state = at.offset(0, state_batch, state_channel);
    const Boundary before{initial_state ? const_cast<State*>(initial_state) + state : nullptr, state_time};
    const Boundary after{final_state ? final_state + state : nullptr, state_time};
    scan_row(sources, {states + at.offset(0, states_batch, states_channel), states_time, walk}, before, after, at, walk);
#endif
}
