// Channels contiguous, aligned, and few of them: what the forward and the backward kernel share.
//
// The build pins WARPS (per block), LANES (threads side by side along the channels), VECTOR
// (channels per thread), STEPS, LEVELS (tiles of a segment), STAGES and BLOCKS (per SM). A tile is
//
//               channels ->   LANES × VECTOR
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               32 / LANES slots
//
// of a warp, and a column is what lies below one another. Order runs along the walk, with time or against
// it. A warp takes one tile after the other, the next of which are on their way to shared memory meanwhile;
// tiles.cuh says which. A thread composes its rows' maps and a warp scans its slots; then the rows are
// walked again, from the state that enters them.
#pragma once
constexpr int WALKERS = WARPS, THREADS = 32 * WALKERS;
#include "ring.cuh"
#include "sequences.cuh"
#include "tiles.cuh"

constexpr int CHANNELS = LANES * VECTOR;
constexpr int TIMES = 32 / LANES * STEPS;
static_assert(32 % LANES == 0 && LEVELS > 0);

// What is scanned: batches × times × channels, along the walk.
struct Scans {
    i64 channels, time;
    unsigned across;  // columns side by side
    Grid grid;

    __device__ Scans(i64 batches, i64 channels, i64 time)
        : channels(channels),
          time(time),
          across(unsigned((channels + CHANNELS - 1) / CHANNELS)),
          grid{unsigned(batches) * across, unsigned((time + TIMES - 1) / TIMES)} {}
};

// Where a thread is in a tile.
struct Position {
    int lane = threadIdx.x % 32;
    i64 batch, tile_channel, channel;  // first channel of the tile, and of this thread
    i64 first;                         // order of this thread's first row
    int rows;                          // of this thread's, those that there are: at most STEPS

    __device__ Position(const Scans& scans, const Tile& tile) {
        batch = tile.column / scans.across;
        tile_channel = i64(tile.column % scans.across) * CHANNELS;
        channel = tile_channel + lane % LANES * VECTOR;
        first = i64(tile.level) * TIMES + lane / LANES * STEPS;
        const i64 left = scans.time - first;
        rows = channel >= scans.channels || left <= 0 ? 0 : left < STEPS ? int(left) : STEPS;
    }
};

// The state of a tile's scan, among those of batches × channels; null if there is none.
template <class S>
__device__ S* state_of(S* states, i64 by_batch, i64 by_channel, int scan, const Position& at, const Scans& scans) {
    const i64 channel = at.tile_channel + scan;
    return states && channel < scans.channels ? states + at.batch * by_batch + channel * by_channel
                                              : nullptr;
}

// One tensor of batches × times × channels.
struct Plane {
    Storage* first;
    i64 by_batch, by_time;

    __device__ Plane(const Storage* first, i64 by_batch, i64 by_time)
        : first(const_cast<Storage*>(first)), by_batch(by_batch), by_time(by_time) {}
    __device__ explicit operator bool() const { return first; }

    // This thread's channels in the rows at the orders at.first, at.first + 1, …
    struct Rows {
        Storage* row;
        i64 to_next;

        __device__ Storage* at(int k) const { return row + k * to_next; }
        __device__ void put(int k, const State (&x)[VECTOR]) const {
            Chunk<Element, VECTOR> chunk;
            chunk.set(x);
            store_global(at(k), words_of(chunk));
        }
    };
    __device__ Rows rows(const Position& at, const Walk& walk) const {
        return {first + at.batch * by_batch + at.channel + walk.at(at.first) * by_time,
                walk.step(by_time)};
    }
};

// How the states that enter a thread's rows are found, for each of its channels.
struct Entrance {
    Carried carried[VECTOR];                    // before the tile
    Affine composed[VECTOR], tile_map[VECTOR];  // of the tile: before this slot, and of all slots
    Affine part[VECTOR];                        // of the tiles composed against the walk

    // `rows` compose this thread's rows.
    __device__ void compose(Affine (&rows)[VECTOR], const Position& at) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            composed[v] = exclusive_scan<LANES>(rows[v], at.lane);
            tile_map[v] = from_lane(rows[v], 32 - LANES + at.lane % LANES);
        }
    }
    __device__ void clear() {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) part[v] = {};
    }
    __device__ void precede() {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) part[v] = then(tile_map[v], part[v]);
    }
    template <class Initial>
    __device__ void cross(uint4* maps, unsigned columns, unsigned column, unsigned segment, bool is_last,
                          const Initial& initial) {
        using Channels = Crossing<CHANNELS, VECTOR>;
        Channels::cross(Channels::maps_of(maps, columns, column), segment, is_last, initial, part, carried);
    }
    __device__ void enter(State (&entering)[VECTOR]) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            entering[v] = composed[v](carried[v].x);
            carried[v] = tile_map[v](carried[v]);
        }
    }
    // The states after the walk, of those channels that there are; `after`, of a channel of the tile, is null or
    // points to its own.
    template <class After>
    __device__ void leave(const Position& at, const After& after) const {
        if (at.lane >= LANES) return;
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            if (State* const to = after(at.lane * VECTOR + v)) *to = carried[v].x;
    }
};
