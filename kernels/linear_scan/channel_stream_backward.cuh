// Channels contiguous, aligned, and few of them, backward: what a warp does with a tile, for the schedule of lookback.cuh. The
// tile picture is in channel_stream.cuh.
#pragma once
#include "channel_stream.cuh"

// Time steps for which there is room for a sum of gates_grad, where channels have one gate (problem.py).
enum : int { SUM_STEPS = 64 };

struct BackwardTiles {
    using Tiles = Ring<3, 32 * STEPS>;
    using TilePrefix = ColumnTilePrefix;
    enum : int { SCANS = CHANNELS, HELD = VECTOR };
    enum : int { EACH = 16 / sizeof(State) };  // of a piece's states
    // Whether the gradient of gates can be summed: where threads have registers for sums.
    enum : bool { SUMS = STEPS <= 4 && int(TIMES) >= int(SUM_STEPS) };
    const Scans scans;
    const Walk walk;
    const Plane gates, grads, states, gates_grad, tokens_grad;
    State* const sums;  // of gates_grad: one of each tile for each state; the next one of a state lies after one of every state
    const State *const initial_state, *const final_grad;
    State* const initial_grad;
    const i64 state_batch, state_channel;

    __device__ const State* before(unsigned column, int scan) const {
        return scans.state_of(final_grad, state_batch, state_channel, column, scan);
    }
    __device__ State* after(unsigned column, int scan) const {
        return scans.state_of(initial_grad, state_batch, state_channel, column, scan);
    }
    __device__ bool for_gates() const { return gates_grad || (SUMS && sums); }
    __device__ bool has_last(const Position& at) const { return at.first + at.rows == scans.time && at.rows > 0; }
    __device__ void fetch(const Tile& tile, int stage) const {
        const Position at(scans, tile);
        const Tiles ring(stage);
        copy_in(ring, 1, grads, at, walk, BackwardStep::Padding::GRAD);
        gates_in(ring, 0, gates, at, walk, BackwardStep::Padding::GATE);
        if (!for_gates()) return;
        // Of each row the state before it; that of the walk's last is not among the states.
        Position earlier = at;
        earlier.first++, earlier.rows -= has_last(at);
        copy_in(ring, 2, states, earlier, walk, BackwardStep::Padding::STATE);
    }
    __device__ void compose_tile(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(scans, tile);
        const Tiles ring(stage);
        Affine rows[VECTOR];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const auto gates = read_piece(ring.place(0, at.own(k))), grad = read_piece(ring.place(1, at.own(k)));
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                rows[v] = compose(rows[v], BackwardStep::map(gates.get(v), grad.get(v)));
        }
        tile_prefix.scan(rows, at);
    }
    __device__ void finish(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(scans, tile);
        const Tiles ring(stage);
        State h[VECTOR], sum[VECTOR] = {};
        tile_prefix.enter(h);
        Storage* const to_gates = gates_grad.at(at, walk, at.own_row(0));
        Storage* const to_tokens = tokens_grad.at(at, walk, at.own_row(0));
        const i64 apart = tokens_grad.apart(walk);
        const bool with_initial = for_gates() && initial_state && at.has_channels && has_last(at);
        const int last = with_initial ? at.rows - 1 : -1;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            auto gate = read_piece(ring.place(0, at.own(k))), grad = read_piece(ring.place(1, at.own(k)));
            const auto earlier = read_piece(ring.place(2, at.own(k)));
            State for_gates[VECTOR], for_tokens[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const auto to = BackwardStep::gradients(gate.get(v), grad.get(v), earlier.get(v), h[v]);
                for_gates[v] = to.gate, for_tokens[v] = to.token, h[v] = to.earlier;
                if (SUMS && at.has_own(k)) sum[v] = sum[v] + for_gates[v];
            }
            if (at.own_row(k) == last) keep(ring, at.own(k), for_tokens);
            gate.set(for_gates), grad.set(for_tokens);
            if (gates_grad && at.has_own(k)) store_global(to_gates + k * apart, words_of(gate));
            if (tokens_grad && at.has_own(k)) store_global(to_tokens + k * apart, words_of(grad));
        }
        if (unsigned(last - at.own_row(0)) < unsigned(STEPS)) use_initial(ring, at, last, sum);
        if (SUMS && sums) add_up(tile, at, sum);
    }
    // The walk's last row takes the state before it as it is, which the states' storage could not hold. What that
    // multiplies is put by where the row's inputs were, so that the rows' code is no longer for it.
    __device__ static void keep(const Tiles& ring, int own, const State (&x)[VECTOR]) {
#pragma unroll
        for (int part = 0; part < VECTOR / EACH; part++) {
            Chunk<Element::Whole, EACH> chunk;
#pragma unroll
            for (int v = 0; v < EACH; v++) chunk.put(v, Element::Whole::narrow(x[part * EACH + v]));
            *ring.place(part, own) = words_of(chunk);
        }
    }
    __device__ void use_initial(const Tiles& ring, const Position& at, int last, State (&sum)[VECTOR]) const {
        const int own = last * LANES + at.lane % LANES;
        const State* const initial = initial_state + at.batch * state_batch + at.channel * state_channel;
        State for_gates[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            const auto kept = get_words<Element::Whole, EACH>(
                reinterpret_cast<const unsigned*>(ring.place(v / EACH, own)));
            for_gates[v] = BackwardStep::gate_gradient(kept.get(v % EACH), initial[v * state_channel]);
            sum[v] = sum[v] + for_gates[v];  // the row has added zero, or NaN if its gradient is infinite
        }
        if (!gates_grad) return;
        Chunk<Element, VECTOR> chunk;
        chunk.set(for_gates);
        store_global(gates_grad.at(at, walk, last), words_of(chunk));
    }
    __device__ void add_up(const Tile& tile, const Position& at, State (&sum)[VECTOR]) const {
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
#pragma unroll
            for (int distance = LANES; distance < 32; distance *= 2) sum[v] = sum[v] + from_lane(sum[v], at.lane ^ distance);
        if (tile.level >= scans.grid.levels || !at.has_channels || at.lane >= LANES) return;
        State* const to = sums + tile.level * scans.states + at.batch * state_batch + at.channel * state_channel;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) to[v * state_channel] = sum[v];
    }
};
