// Few contiguous channels, each of which has one gate for all time steps: what the forward and the backward kernel share.
//
// The build pins WARPS (per CTA), STEPS (rows of a thread) and BLOCKS (CTAs per SM). A CTA has one tile, in registers:
//
//               channels ->   across: threads for the channels, or for an even part of them
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               slots = THREADS / across
//
// A thread has VECTOR channels side by side, two of 16-bit elements, which it reads at once: rows have whole pieces of VECTOR.
//
// Order runs in the direction of the scan, with time or against it. A run of n rows scales the state by gate^n, whatever the
// rows are. So runs differ only in their shifts, the states that they end with if they begin with zero: no maps are composed.
//
// A thread computes the shift of its rows, the CTA that of the tile, which it publishes. Then it looks back: it reads the shifts of
// the tiles before. Where a column has more than GROUP tiles, it does not read all of them. GROUP consecutive tiles are a group,
// GROUP groups are a group of level 2. The last tile of a group publishes the group's shift. A look-back reads the groups of
// level 2, the groups since the last of them, and the tiles since the last group, all at once. The order of operations is fixed,
// so results are the same in every run. A tile waits only for tiles of CTAs with lower numbers, which a GPU starts first.
//
// workspace: null if columns have one tile each; the head of WorkspaceInit, and then for each level the published shifts of its
// groups, a piece of 16 bytes each (tile_state.cuh): [group][column][channel]. Either the host zeroes it before the launch, or the
// first CTA does; then all CTAs with z = 0 have no tile.
#pragma once
enum : int { THREADS = 32 * WARPS };
#include "../common/compiler.cuh"
#include "../common/element.cuh"
#include "../common/tile_state.cuh"
#include "../common/workspace_init.cuh"
#include "../linear_scan/gate_power.cuh"

enum : int {
    GROUP = 32,                  // tiles of a group, groups of a group of level 2
    LEVELS = 3,                  // of tiles, groups and groups of level 2 (constant_gate.py)
    VECTOR = sizeof(Storage) == 2 ? 2 : 1,    // channels of a thread
    WIDE = 128 / (VECTOR * sizeof(Storage)),  // threads for the channels of a tile, at most
    LOOKS = 2,                   // shifts that a thread reads at once
};

// What a thread reads or writes of a row.
using Piece = Chunk<Element, VECTOR>;

// States of a thread's channels.
struct States {
    State of[VECTOR] = {};

    __device__ States operator+(const States& other) const {
        States sum;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sum.of[v] = of[v] + other.of[v];
        return sum;
    }
};

// Of a thread's channels.
struct Power {
    PowerOf of[VECTOR];

    __device__ States operator()(const States& x, const States& shift) const {
        States after;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) after.of[v] = of[v](x.of[v], shift.of[v]);
        return after;
    }
};
// A CTA's tile, and in it a thread's channels and rows. What the launch says of tiles is in bits of `flags` (constant_gate.py).
struct Position {
    const bool against, is_zeroed;
    const int across, slots, slot, lane;
    const unsigned columns, column, tile;
    const int channel, time, first;  // the thread's first channel, and the order of its first row
    const bool has_channel;
    int own;  // rows of the thread

    __device__ Position(i64 channels, i64 time, bool against, i64 flags)
        : against(against),
          is_zeroed(flags >> 9 & 1),
          across(int(flags >> 2) & 0x7f),
          slots(int(unsigned(THREADS) / unsigned(across))),
          slot(int(threadIdx.x / unsigned(across))),
          lane(int(threadIdx.x) - slot * across),
          columns(gridDim.x * gridDim.y),
          column(blockIdx.y * gridDim.x + blockIdx.x),
          tile(blockIdx.z - !is_zeroed),
          channel((int(blockIdx.x) * across + lane) * VECTOR),
          time(int(time)),
          first(int(tile) * times() + slot * STEPS),
          has_channel(slot < slots && channel < int(channels)) {
        const int left = has_channel ? this->time - first : 0;
        own = left < 0 ? 0 : left < STEPS ? left : STEPS;
    }
    __device__ int times() const { return slots * STEPS; }
    __device__ unsigned tiles() const { return gridDim.z - !is_zeroed; }
    __device__ bool begins() const { return first == 0; }
    __device__ bool ends() const { return own > 0 && first + own == time; }
};

// The states before or after all rows, which may be null.
struct Boundary {
    State* first;
    i64 by_channel;

    __device__ Boundary(const State* states, i64 by_batch, i64 by_channel, const Position& at)
        : first(states ? const_cast<State*>(states) + blockIdx.y * by_batch + at.channel * by_channel : nullptr), by_channel(by_channel) {}
    __device__ States read(bool wanted) const {
        States x;
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            if (first && wanted) x.of[v] = first[v * by_channel];
        return x;
    }
    __device__ void write(const States& x, i64 further = 0) const {
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            if (first) first[v * by_channel + further] = x.of[v];
    }
};

// The rows of a thread in one tensor, one after the other.
struct Rows {
    Storage* row;
    i64 apart;

    __device__ Rows(const Storage* tensor, i64 by_batch, i64 by_time, const Position& at, int later = 0) {
        const int order = at.first + later;
        row = const_cast<Storage*>(tensor) + blockIdx.y * by_batch + (at.against ? at.time - 1 - order : order) * by_time + at.channel;
        apart = at.against ? -by_time : by_time;
    }
    __device__ Piece read() const {
        if constexpr (VECTOR > 1) return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(row));
        Piece piece{};
        piece.put(0, *row);
        return piece;
    }
    __device__ void load(Piece (&x)[STEPS], int rows) {
#pragma unroll
        for (int k = 0; k < STEPS; k++, row += apart) x[k] = k < rows ? read() : Piece{};
    }
    __device__ void store(const States& x) {
        Piece piece;
        piece.set(x.of);
        if constexpr (VECTOR > 1) *reinterpret_cast<unsigned*>(row) = piece.word[0];
        else *row = piece.bits(0);
        row += apart;
    }
};

// The states that enter the rows of threads.
struct Lookback {
    const Position& at;
    const WorkspaceInit workspace_init;
    uint4* const published;
    const bool composes;  // whether the thread is of the last slot, which computes what the others take
    unsigned seen = 0;    // CTAs that have seen the workspace's flag before this one

    // Of each channel gate^n, with n the rows of a slot, of a tile, of a group and of a group of level 2.
    static __device__ Power& power_of(int level, int lane) {
        __shared__ Power powers[1 + LEVELS][WIDE];
        return powers[1 + level][lane];
    }
    // The shifts of slots, and what sums up the gradient of gates.
    static __device__ States& of_slot(int slot, const Position& at) {
        __shared__ States of_slots[THREADS];
        return of_slots[slot * at.across + at.lane];
    }
    // Those of groups before the tile, those of a level after those of the level below.
    static __device__ States& before(int number, int lane) {
        __shared__ States shifts[LEVELS * (GROUP - 1)][WIDE];
        return shifts[number][lane];
    }

    __device__ Lookback(const Position& at, void* workspace)
        : at(at),
          workspace_init(workspace, int(of_levels(LEVELS) * sizeof(uint4))),
          published(static_cast<uint4*>(workspace_init.past_head())),
          composes(at.slot == at.slots - 1) {}
    __device__ bool is_shared() const { return at.tiles() > 1; }
    // The first CTA without a tile zeroes the workspace.
    __device__ bool initializes() const {
        if (at.is_zeroed || blockIdx.z > 0) return false;
        if (at.column == 0) workspace_init.initialize();
        return true;
    }
    // Pieces of all levels below one.
    __device__ unsigned of_levels(int end) const {
        unsigned pieces = 0, count = at.tiles();
#pragma unroll
        for (int level = 0; level < LEVELS; level++, count = (count + GROUP - 1) / GROUP) pieces += level < end ? count : 0;
        return pieces * pitch();
    }
    __device__ unsigned pitch() const { return at.columns * at.across; }
    // The group of a level that the tile is in, and how many groups of that level and of those below are to be read.
    __device__ unsigned group(int level) const { return at.tile >> 5 * level; }
    __device__ int count(int level) const { return int(level + 1 < LEVELS ? group(level) % GROUP : group(level)); }
    __device__ int counts(int end) const {
        int all = 0;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) all += level < end ? count(level) : 0;
        return all;
    }
    __device__ unsigned piece(int level, unsigned group) const {
        return of_levels(level) + group * pitch() + at.column * at.across + at.lane;
    }

    // To be called before the rows are used, which are on their way.
    __device__ void raise(const States& gate) const {
        const int level = at.slot - 1;
        if (level >= LEVELS || (level > 0 && group(level) == 0)) return;
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            power_of(level, at.lane).of[v] = PowerOf(WidePower(gate.of[v]).raised(level < 0 ? unsigned(STEPS) : unsigned(at.times()) << 5 * level));
    }
    // The state that enters the thread's rows, whose shift is `own`. To be called by the whole CTA.
    __device__ States enter(const States& own) {
        __shared__ States entering[WIDE];
        of_slot(at.slot, at) = own;
        if (is_shared() && !at.is_zeroed && threadIdx.x == 0) {
            while (!workspace_init.is_ready()) {}
            seen = workspace_init.count_reader();
        }
        __syncthreads();
        States x;
        if (is_shared()) {
            look_back(x);
            if (composes) entering[at.lane] = x;
            __syncthreads();
            x = entering[at.lane];
        }
        return after_slots(x, at.slot);
    }
    // The state after some runs of one length, whose shifts lie `apart`. They are read ahead.
    __device__ static States after(States x, const Power& power, const States* shifts, int apart, int count) {
#pragma unroll 4
        for (int i = 0; i < count; i++) x = power(x, shifts[i * apart]);
        return x;
    }
    __device__ States after_slots(const States& x, int slots) const {
        return after(x, power_of(-1, at.lane), &of_slot(0, at), at.across, slots);
    }
    __device__ States after_groups(int level, const States& x) const {
        return after(x, power_of(level, at.lane), &before(counts(level), at.lane), WIDE, count(level));
    }
    __device__ void publish(int level, const States& shift) const {
        LineBuffer<1> line;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) line.put(v, shift.of[v]);
        line.publish(published + piece(level, group(level)), 0);
    }
    // The state before the tile, in the last slot.
    __device__ void look_back(States& x) {
        States shift;
        if (composes) publish(0, shift = after_slots(States(), at.slots));
        // Others wait for the shift of a group, and it for those of the group's parts alone, which are read first.
        int begin = 0;
#pragma unroll 1
        for (int level = 0;; level++) {
            const bool completes = level + 1 < LEVELS && group(level) % GROUP == GROUP - 1;
            const int end = counts(completes ? level + 1 : int(LEVELS));
            read(begin, end);
            __syncthreads();
            if (!completes) break;
            if (composes) publish(level + 1, shift = power_of(level, at.lane)(after_groups(level, States()), shift));
            begin = end;
        }
        if (!composes) return;
#pragma unroll 1
        for (int level = LEVELS - 1; level >= 0; level--) x = after_groups(level, x);
    }
    // All threads read the shifts of groups, by their numbers in `before`.
    __device__ void read(int begin, int end) const {
        unsigned first[LEVELS];
#pragma unroll
        for (int level = 0; level < LEVELS; level++) first[level] = piece(level, group(level) - count(level) - counts(level));
#pragma unroll 1
        for (int number = begin + at.slot; number < end; number += LOOKS * at.slots) {
            const uint4* from[LOOKS];
            LineBuffer<1> lines[LOOKS];
            unsigned missing = 0;
#pragma unroll
            for (int i = 0; i < LOOKS; i++) {
                const int own = number + i * at.slots;
                from[i] = published + ((own < counts(1) ? first[0] : own < counts(2) ? first[1] : first[2]) + own * pitch());
                missing |= own < end ? 1u << i : 0;
            }
#pragma unroll 1
            while (true) {
#pragma unroll
                for (int i = 0; i < LOOKS; i++)
                    if (missing >> i & 1 && lines[i].fetch(from[i], 0)) missing &= ~(1u << i);
                if (!missing) break;
                __nanosleep(POLLED_NS);
            }
#pragma unroll
            for (int i = 0; i < LOOKS; i++)
                if (number + i * at.slots < end)
#pragma unroll
                    for (int v = 0; v < VECTOR; v++) before(number + i * at.slots, at.lane).of[v] = lines[i].get(v);
        }
    }
    __device__ void leave() const {
        if (is_shared() && !at.is_zeroed && threadIdx.x == 0 && seen + 1 == at.columns * at.tiles()) workspace_init.retract();
    }
    // The sum over the tile's rows. Sums of one state lie `apart`.
    __device__ void add_up(States sum, const Boundary& sums, i64 apart) const {
        __syncthreads();  // the shifts have been read
        of_slot(at.slot, at) = sum;
        __syncthreads();
        if (at.slot > 0 || at.own == 0) return;
#pragma unroll 4
        for (int slot = 1; slot < at.slots; slot++) sum = sum + of_slot(slot, at);
        sums.write(sum, at.tile * apart);
    }
};
