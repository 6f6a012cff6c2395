// Contiguous channels, however many, in rows that start at any address: what the forward and the backward kernel share.
//
// The build pins WARPS (per CTA), LANES (channels side by side in a tile, at most), STEPS (rows of a thread) and BLOCKS (CTAs
// per SM). A CTA has one tile, which it copies to shared memory in words of 4 bytes:
//
//               channels ->   across: the channels, or an even part of them that is at most LANES
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               slots = THREADS / across
//
// Order runs in the direction of the scan, with time or against it. A thread composes the affine maps of its rows. The CTA
// scans the maps of its slots, and publishes the map of the tile. Then it looks back: it reads the maps of the tiles before, in
// two or three trips to the L2, and composes them to the state that enters the tile.
//
// A look-back does not read every map. A column is some channels of one batch, over all of time. GROUP consecutive tiles of a column are
// a group, GROUP groups are a group of level 2, and
// so on. The last tile of a group publishes the map of the whole group. So a look-back reads fewer than GROUP maps on each
// level: the tiles since the last whole group, the groups since the last whole group of level 2, and so on. The order of
// operations is fixed, so results are the same in every run. CTAs draw tiles from a counter, those of the earliest time steps
// first, so a tile waits only for tiles of CTAs that are running or done.
//
// workspace, zeroed before the launch, or null if columns have one tile each: a counter in its first 16 bytes; then for each level the maps (tile_state.cuh) of its
// groups: [group][column][line of the map][channel].
#pragma once
// From capability 12.0 on, the shared memory of an SM holds fewer than BLOCKS CTAs, so registers need not be limited for them.
#if __CUDA_ARCH__ >= 1200
#undef BLOCKS
#define BLOCKS 1
#endif
enum : int { THREADS = 32 * WARPS };
#include "../common/copy.cuh"
#include "../common/shared_memory.cuh"
#include "../common/tile_state.cuh"
#include "../linear_scan/sequences.cuh"

enum : int {
    GROUP = 32,             // tiles of a group, groups of a group of the next level
    LOOKS = 4,              // maps that a thread reads at once
    READERS = GROUP / LOOKS, // slots that look back
    AT_ONCE = 4              // rows that are unrolled: more would be more code, and no faster
};
static_assert(READERS * LANES <= THREADS, "fewer slots than look back");

// A CTA's tile, and in it a thread's channel and rows.
struct Position {
    unsigned columns, column, index;  // how many columns there are, the tile's, and its number along the column
    int across, slots, lane, slot;
    unsigned batch, channel;  // the column's first channel
    i64 first;           // order of the slot's first row
    int rows, channels;  // of the slot's rows and of the column's channels, those that there are
    int own;             // rows of the thread's channel, 0 if it has none
    bool has_channel;

    __device__ Position(unsigned* workspace, i64 batches, i64 all_channels, i64 time) {
        const unsigned wide = unsigned(all_channels), columns_across = (wide + LANES - 1) / LANES;
        across = int((wide + columns_across - 1) / columns_across);
        columns = unsigned(batches) * columns_across;
        __shared__ unsigned drawn[3];
        if (threadIdx.x == 0) {
            const unsigned tile = workspace ? atomicAdd(workspace, 1u) : blockIdx.x;
            drawn[0] = tile / columns, drawn[1] = tile % columns, drawn[2] = tile % columns / columns_across;
        }
        slots = int(THREADS) / across, slot = int(threadIdx.x) / across, lane = int(threadIdx.x) - slot * across;
        __syncthreads();
        index = drawn[0], column = drawn[1], batch = drawn[2];
        channel = (column - drawn[2] * columns_across) * across;
        channels = int(wide - channel) < across ? int(wide - channel) : across;
        has_channel = lane < channels && slot < slots;
        first = (i64(index) * slots + slot) * STEPS;
        const i64 left = time - first;
        rows = slot >= slots || left < 0 ? 0 : left < STEPS ? int(left) : STEPS;
        own = has_channel ? rows : 0;
    }
    __device__ int times() const { return slots * STEPS; }
    __device__ bool is_last(i64 time) const { return i64(index + 1) * times() >= time; }
};

// A slot's rows of a tensor.
struct Rows {
    Storage* first;  // the column's first channel
    i64 apart;       // from row to row

    __device__ Rows(const Storage* tensor, i64 by_batch, i64 by_time, const Position& at, const Walk& walk)
        : first(const_cast<Storage*>(tensor) + at.batch * by_batch + at.channel + walk.at(at.first) * by_time),
          apart(walk.step(by_time)) {}
    __device__ void advance(int rows) { first += rows * apart; }
};

enum : int { WORD = 4, PER_WORD = WORD / sizeof(Storage), CELL = sizeof(Storage) < WORD ? WORD : sizeof(Storage) };
// Bytes of one row of all slots in shared memory. They lie together, so threads have no bank conflicts.
enum : int { ROW = THREADS * CELL };

// The tile of an input in shared memory. Two elements of 16 bits share a word: a row is copied from the word that holds its
// first channel, to that of its last.
struct Staged {
    const int slot;  // in shared memory, in bytes: the first row's first word
    const int lane;
    unsigned first = 0, apart = 0;  // elements between the start of a word and the row, modulo 2: of the first row, and from row to row

    __device__ Staged(int input, const Position& at)
        : slot(input * (STEPS * ROW) + at.slot * at.across * CELL), lane(at.lane) {}
    __device__ int lead(int k) const { return PER_WORD > 1 ? int(first + k * apart) & 1 : 0; }
    // The slot's first `rows` rows.
    __device__ void copy_in(Rows from, const Position& at, int rows) {
        char* const to = dynamic_rows() + (slot + lane * CELL);
        if constexpr (PER_WORD > 1) {
            first = unsigned(reinterpret_cast<u64>(from.first) / sizeof(Storage)), apart = unsigned(from.apart);
            from.first += lane * PER_WORD;
            const int left = at.channels - lane * PER_WORD;
#pragma unroll AT_ONCE
            for (int k = 0; k < rows; k++, from.advance(1))
                copy_word_async(to + k * ROW, from.first - lead(k), left + lead(k) > 0);
        } else {
            if (lane >= at.channels) rows = 0;
            from.first += lane;
#pragma unroll AT_ONCE
            for (int k = 0; k < rows; k++, from.advance(1))
#pragma unroll
                for (int word = 0; word < CELL; word += WORD)
                    copy_word_async(to + k * ROW + word, reinterpret_cast<const char*>(from.first) + word, true);
        }
    }
    __device__ State get(int k) const {
        return Element::widen(reinterpret_cast<const Storage*>(dynamic_rows() + (slot + k * ROW))[lane + lead(k)]);
    }
};

// Gates. Of which a channel has one for all time steps, they are read once for each thread.
struct Gates {
    Staged staged;
    const bool one;
    State gate = State(0);

    __device__ Gates(const Rows& from, const Position& at) : staged(0, at), one(from.apart == 0) {
        if (!one) staged.copy_in(from, at, at.rows);
        else if (at.has_channel) gate = Element::widen(from.first[at.lane]);
    }
    __device__ State get(int k) const { return one ? gate : staged.get(k); }
};

__device__ inline void wait_for_tile() {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
}

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
    const i64 time;
    Stored<>* maps;      // in shared memory, of a thread each
    const bool composes;  // whether the thread is of the last slot
    Affine slots, tile, tiles;  // of the slots before the thread's; and, in the last slot, of the tile and of those before

    __device__ Prefix(const Position& at, i64 time) : at(at), time(time), composes(at.slot == at.slots - 1) {
        __shared__ Stored<> shared[THREADS];
        maps = shared;
    }
    // `map` composes the thread's rows.
    __device__ void scan(Affine map) {
        const int number = int(threadIdx.x), last = (at.slots - 1) * at.across;
#pragma unroll 1
        for (int distance = at.across; distance <= last; distance *= 2) {
            maps[number] = map;
            __syncthreads();
            if (number >= distance) map = compose(Affine(maps[number - distance]), map);
            __syncthreads();
        }
        maps[number] = map;
        __syncthreads();
        if (at.slot > 0) slots = maps[number - at.across];
        tile = map;
    }
    __device__ void look_back(uint4* workspace) {
        const i64 of_column = i64(MAP_LINES) * at.across;
        Level level{workspace + at.column * of_column + at.lane, at.columns * of_column,
                    unsigned((time - 1) / at.times()) + 1};
        if (composes) publish(level.of(at.index), at.across, tile);
        Affine group = tile;
        bool completes = composes;  // whether the tile is the last of its group, the group the last of its own, and so on
#pragma unroll 1
        for (unsigned place = at.index;; place /= GROUP) {
            const int before = place % GROUP, first = at.slot * LOOKS;
            __syncthreads();  // what `maps` held has been read
            if (first < before) maps[threadIdx.x] = composed(level.of(place - before + first), level.apart, before - first);
            __syncthreads();
            level.ascend();
            if (composes) {
                Affine since;
#pragma unroll 1
                for (int reader = 0; reader * LOOKS < before; reader++)
                    since = compose(since, Affine(maps[reader * at.across + at.lane]));
                tiles = compose(since, tiles), group = compose(since, group);
                completes = completes && before == GROUP - 1;
                if (completes) publish(level.of(place / GROUP), at.across, group);
            }
            if (place < GROUP) break;
        }
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

// The state before the thread's rows, whose composed map is `own`. `before` and `after`: the channel's states before and after
// the scan, or null. To be called by the whole CTA.
__device__ inline State enter_rows(const Affine& own, const Position& at, void* workspace, i64 time, const State* before,
                                   State* after) {
    __shared__ State entering[LANES];
    Prefix prefix(at, time);
    prefix.scan(own);
    // A launch of one tile for each column has no room for maps.
    if (workspace) prefix.look_back(static_cast<uint4*>(workspace) + 1);
    if (prefix.composes) {
        RunningPrefix x = at.has_channel && before ? *before : State(0);
        if (at.index > 0) x = prefix.tiles(x);
        entering[at.lane] = x.x;
        if (at.has_channel && after && at.is_last(time)) *after = prefix.tile(x).x;
    }
    __syncthreads();
    const State x = entering[at.lane];
    return at.slot > 0 ? prefix.slots(x) : x;
}

// Steps of a sum over time. Where channels have one gate, gates_grad has time / SUM_STEPS + 1 sums for each state (problem.py).
enum : int { SUM_STEPS = 64 };
// The sum over the tile's rows goes to the first of the pieces that are the tile's own, which lie `apart`. The others hold zeros.
__device__ inline void add_up(State sum, const Position& at, i64 time, State* sums, i64 apart) {
    __shared__ State of_slots[THREADS];
#pragma unroll 1
    for (int count = at.slots; count > 1; count = (count + 1) / 2) {
        of_slots[threadIdx.x] = sum;
        __syncthreads();
        const int other = at.slot + (count + 1) / 2;
        if (other < count) sum = sum + of_slots[other * at.across + at.lane];
        __syncthreads();
    }
    of_slots[threadIdx.x] = sum;
    __syncthreads();
    if (!at.has_channel) return;
    const i64 begin = i64(at.index) * at.times() / SUM_STEPS, next = i64(at.index + 1) * at.times() / SUM_STEPS;
    const i64 end = at.is_last(time) ? time / SUM_STEPS + 1 : next;
    for (i64 i = begin + at.slot; i < end; i += at.slots) sums[i * apart] = i == begin ? of_slots[at.lane] : State(0);
}
