// Contiguous channels, however many, in rows that start at any address: what the forward and the backward kernel share.
//
// The build pins WARPS (per CTA), STEPS (rows of a thread, at most) and BLOCKS (CTAs per SM). A CTA has one tile:
//
//               channels ->   across: the channels, or an even part of them
//      order  slot 0          | rows, one after the other in a thread |
//        |    slot 1          | rows                                  |
//        v    …               slots = THREADS / across
//
// Order runs in the direction of the scan, with time or against it. The tiles of all inputs are copied to shared memory in the 16-byte
// pieces that they lie in. A thread composes the affine maps of its rows. The CTA scans the maps of its slots, and publishes the
// map of the tile. Then it looks back: it reads the maps of the tiles before, and composes them to the state that enters the tile.
// Results take the place of inputs in shared memory, and leave it in pieces of 16 bytes.
//
// blockIdx.y is the index along the outer one of two dimensions of batches. Its batches have maps of their own.
//
// A column is some channels over all of time: of one batch, or, where batches are short, of all batches, one after the other. The
// first row of each batch begins a scan, and so does that of each packed sequence: its map has scale 0.
//
// Gates that all channels share are copied to each channel's place in shared memory. gates_channel is then 0.
//
// Where a scan has more than GROUP tiles, a look-back does not read every map. GROUP consecutive tiles of a column are
// a group, GROUP groups are a group of level 2, and so on. The last tile of a group publishes the map of the whole group. So a
// look-back reads fewer than GROUP maps on each level: the tiles since the last whole group, the groups since the last whole group
// of level 2, and so on. The order of operations is fixed, so results are the same in every run. CTAs have the tiles of their
// indices, those of the earliest time steps first. A GPU starts CTAs in this order, so a tile waits only for tiles of CTAs that are
// running or done.
//
// Where threads can read the maps of all tiles at once, there are no groups.
//
// Where maps are few (scalar.py), the first CTA of each outer index zeroes them while others load.
//
// workspace, zeroed before the launch or by the first CTAs, or null if columns have one tile each: for each outer index the head of
// WorkspaceInit; then for each level the maps (tile_state.cuh) of its groups:
// [group][column][line of the map][channel].
#pragma once
#include "scalar_tiles.cuh"

enum : int {
    GROUP = 32,              // tiles of a group, groups of a group of the next level
    LOOKS = BLOCKS * THREADS > 1024 ? 2 : 4, // maps that a thread reads at once: fewer where four would spill registers
    AT_ONCE = 4,             // rows that are unrolled: more would be more code, and no faster
};

// Where N rows of a thread lie in shared memory, one after the other, and behind them the row that follows.
template <int N>
struct RowsAhead {
    int at[N + 1];
    __device__ explicit RowsAhead(Cursor& cursor) {
#pragma unroll
        for (int k = 0; k < N; k++, cursor.advance()) at[k] = cursor.at();
        at[N] = cursor.at();
    }
    __device__ void read(int tile, State (&values)[N], int later = 0) const {
#pragma unroll
        for (int k = 0; k < N; k++) values[k] = get(tile, at[k + later]);
    }
};
// Passes over a thread's rows as parts of scans: pass.begin(number of the scan, whether the part begins the scan, whether it ends it),
// then pass.rows<N>(cursor, rows left of the part) for N rows each, then pass.end(number) if the part ends the scan.
template <class Pass>
__device__ inline void for_rows(const Position& at, Cursor cursor, Scan scan, Pass& pass) {
    unsigned row = at.begin + at.slot * at.steps;
#pragma unroll 1
    for (int left = at.own; left > 0; scan.advance(at)) {
        const bool ends = scan.next - row <= unsigned(left);
        int run = ends ? int(scan.next - row) : left;
        left -= run;
        pass.begin(scan.number, scan.begin == row, ends);
        row += run;
#pragma unroll 1
        for (; run >= AT_ONCE; run -= AT_ONCE) pass.template rows<AT_ONCE>(cursor, run);
#pragma unroll 1
        for (; run > 0; run--) pass.template rows<1>(cursor, run);
        if (ends) pass.end(scan.number);
    }
}

// States of the channel at the ends of scans, or null: before them, and after them, in the direction of the walk.
struct Ends {
    const Position& at;
    const State* before;
    State* after;
    i64 by_outer, by_batch, by_channel, by_sequence;

    __device__ State read(const State* states, unsigned scan) const {
        return states ? states[at.state(scan, by_outer, by_batch, by_channel, by_sequence)] : State(0);
    }
    __device__ State enter(unsigned scan) const { return read(before, scan); }
    __device__ void leave(unsigned scan, State x) const {
        if (after) after[at.state(scan, by_outer, by_batch, by_channel, by_sequence)] = x;
    }
};
// What maps are made of: gates, from the first tile, or one of each channel; and tokens or their gradients, from the second tile.
struct Inputs {
    const bool one_gate;
    const State gate;

    __device__ Inputs(const Storage* gates, i64 by_outer, i64 by_batch, i64 by_channel, i64 by_time, const Position& at)
        : one_gate(by_time == 0),
          gate(one_gate && at.own
                   ? Element::widen(gates[blockIdx.y * by_outer + at.batch * by_batch + (at.channel + at.lane) * by_channel])
                   : State(0)) {}
    template <int N>
    __device__ void read(const RowsAhead<N>& rows, State (&gates)[N], State (&others)[N]) const {
        rows.read(1, others);
        if (!one_gate) rows.read(0, gates);
        else
#pragma unroll
            for (int k = 0; k < N; k++) gates[k] = gate;
    }
};
// Composes a thread's rows. DirectedStep is ForwardStep or BackwardStep.
template <class DirectedStep>
struct Composing {
    const Inputs& inputs;
    const Ends& ends;
    Affine own;

    __device__ Composing(const Inputs& inputs, const Ends& ends) : inputs(inputs), ends(ends) {}
    __device__ void begin(unsigned scan, bool is_first, bool) {
        const State x = is_first ? ends.enter(scan) : State(0);
        own.scale = chosen(is_first, State(0), own.scale), own.shift = chosen(is_first, x, own.shift);
        if (COMPENSATED) own.error_term = chosen(is_first, State(0), own.error_term);
    }
    template <int N>
    __device__ void rows(Cursor& cursor, int) {
        State gates[N], others[N];
        inputs.read(RowsAhead<N>(cursor), gates, others);
#pragma unroll
        for (int k = 0; k < N; k++) own = compose(own, DirectedStep::map(gates[k], others[k]));
    }
    __device__ void end(unsigned) {}
};

// The maps of tiles, groups, groups of groups, …, of one level at a time.
struct Level {
    uint4* maps;
    i64 apart;       // from the map of one group to that of the next
    unsigned count;  // of groups

    __device__ void ascend() { maps += count * apart, count = (count + GROUP - 1) / GROUP; }
    __device__ uint4* of(unsigned group) const { return maps + group * apart; }
};

// What a CTA needs to know of the tiles before its own. The threads of the last slot compose maps for all others.
struct Prefix {
    const Position& at;
    Stored<>* maps;      // in shared memory, of a thread each
    const bool composes;  // whether the thread is of the last slot
    Affine slots, tile, tiles;  // of the slots before the thread's; and, in the last slot, of the tile and of those before

    __device__ explicit Prefix(const Position& at) : at(at), composes(at.slot == at.slots - 1) {
        __shared__ Stored<> shared[THREADS];
        maps = shared;
    }
    // `map` composes the thread's rows. Slots of a warp are composed by shuffles, then those of the warps before.
    __device__ void scan(Affine map) {
        const int number = int(threadIdx.x), lane = number % 32;
#pragma unroll 1
        for (int distance = at.across; distance < 32; distance *= 2) {
            const Affine lower = from_lower(map, distance);
            if (lane >= distance) map = compose(lower, map);
        }
        maps[number] = map;
        __syncthreads();
        Affine before;
        if (at.across >= 32) {
#pragma unroll 1
            for (int other = at.lane; other < number; other += at.across) before = compose(before, Affine(maps[other]));
            slots = before;
        } else {
            // The last thread of each warp that has the channel; `back` says how many threads before the warp's last.
            const int shift = 32 % at.across;
            int back = (31 - at.lane) % at.across;
#pragma unroll 1
            for (int last = 31; last < number - lane; last += 32) {
                before = compose(before, Affine(maps[last - back]));
                back += shift, back -= back >= at.across ? at.across : 0;
            }
            const Affine lower = from_lower(map, at.across);
            slots = lane >= at.across ? compose(before, lower) : before;
        }
        tile = compose(before, map);
    }
    __device__ void look_back(uint4* workspace) {
        const unsigned times = at.times();
        const i64 of_column = i64(MAP_LINES) * at.across;
        Level level{workspace + at.column * of_column + at.lane, at.columns * of_column, (at.all - 1) / times + 1};
        if (composes) publish(level.of(at.index), at.across, tile);
        Affine group = tile;
        const bool is_one_group = level.count <= unsigned(at.slots * LOOKS);
        // Whether the tile is the last of its group, the group the last of its own, and so on.
        bool completes = composes && !is_one_group;
#pragma unroll 1
        for (unsigned place = at.index;; place /= GROUP) {
            // Where batches are joined, a scan has few tiles: those before this one are read, in whatever group they are.
            const int before = at.joined ? (at.begin % at.period + times - 1) / times : is_one_group ? place : place % GROUP;
            const Affine since = read(level, place - before, before);
            level.ascend();
            if (composes) {
                tiles = compose(since, tiles), group = compose(since, group);
                completes = completes && before == GROUP - 1;
                if (completes) publish(level.of(place / GROUP), at.across, group);
            }
            if (at.joined || is_one_group || place < GROUP) break;
        }
    }
    // In the last slot, the composition of `count` maps. Each of the other slots that read composes some of them.
    __device__ Affine read(const Level& level, unsigned first, int count) {
        const int share = (count + at.slots * LOOKS - 1) / (at.slots * LOOKS) * LOOKS, own = at.slot * share;
        __syncthreads();  // what `maps` held has been read
        if (own < count) {
            Affine run;
#pragma unroll 1
            for (int i = own; i < own + share && i < count; i += LOOKS)
                run = compose(run, composed(level.of(first + i), level.apart, count - i));
            maps[threadIdx.x] = run;
        }
        __syncthreads();
        Affine all;
        if (composes)
#pragma unroll 1
            for (int reader = 0; reader * share < count; reader += AT_ONCE) {
                Affine runs[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    if ((reader + k) * share < count) runs[k] = maps[(reader + k) * at.across + at.lane];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) all = compose(all, runs[k]);
            }
        return all;
    }
    __device__ Affine composed(const uint4* first, i64 apart, int count) const {
        PendingMaps<LOOKS> pending;
        pending.request(first, apart, at.across, count);
        Affine maps[LOOKS], run;
        pending.await(maps);
#pragma unroll
        for (int i = 0; i < LOOKS; i++) run = compose(run, maps[i]);
        return run;
    }
};

// The state before the thread's rows. To be called by the whole CTA. The first row of each scan has scale 0, so the map of all rows
// before the thread's has, too: its shift is the state.
template <class DirectedStep>
__device__ inline State enter_rows(const Inputs& inputs, const Ends& ends, const Position& at, const Cursor& cursor, const Scan& scan,
                                   unsigned* workspace) {
    __shared__ State entering[THREADS];
    Composing<DirectedStep> pass(inputs, ends);
    for_rows(at, cursor, scan, pass);
    Prefix prefix(at);
    prefix.scan(pass.own);
    // A launch of one tile for each column has no room for maps.
    if (workspace) prefix.look_back(static_cast<uint4*>(WorkspaceInit(workspace, 0).past_head()));
    if (prefix.composes) entering[at.lane] = prefix.tiles.shift;
    __syncthreads();
    const State x = at.lane < at.across ? entering[at.lane] : State(0);
    return at.slot > 0 ? prefix.slots(x) : x;
}

// The sum over the tile's rows. Sums of one state lie `apart`.
__device__ inline void add_up(State sum, const Position& at, State* sums, i64 apart) {
    __shared__ State of_slots[THREADS];
#pragma unroll 1
    for (int count = at.slots; count > 1; count = (count + 1) / 2) {
        of_slots[threadIdx.x] = sum;
        __syncthreads();
        const int other = at.slot + (count + 1) / 2;
        if (other < count) sum = sum + of_slots[other * at.across + at.lane];
        __syncthreads();
    }
    if (at.lane >= at.channels || at.slot >= at.slots) return;
    // Threads of the first slot write the sum. This is a loop of one turn because ptxas, without it, computes the address at the
    // kernel's start, and then spills 64 bytes a thread of 16-bit tiles.
#pragma unroll 1
    for (int i = at.slot; i < 1; i += at.slots) sums[i64(at.index) * apart] = sum;
}
