// Channels contiguous, aligned, and few of them: what the forward and the backward kernel share.
//
// The build pins WARPS (per block), LANES (threads side by side along the channels), VECTOR
// (channels per thread), STEPS, STAGES and BLOCKS (per SM). A tile is
//
//               channels ->   LANES × VECTOR
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               SLOTS = 32 × WARPS / LANES
//
// and a column is what lies below one another. Order runs along the walk, with time or against it. A
// block takes one tile after the other, the next of which are on their way to shared memory meanwhile;
// tiles.cuh says which. A thread composes its rows' maps, a warp scans its slots, and the warps' totals
// are chained; then the rows are walked again, from the state that enters them.
#pragma once
constexpr int THREADS = 32 * WARPS;
constexpr int SKEW = 1;
#include "ring.cuh"
#include "sequences.cuh"
#include "tiles.cuh"

constexpr int SLOTS_PER_WARP = 32 / LANES;
constexpr int CHANNELS = LANES * VECTOR;
constexpr int TIMES = WARPS * SLOTS_PER_WARP * STEPS;
static_assert(32 % LANES == 0);

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
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 batch, tile_channel, channel;  // first channel of the tile, and of this thread
    i64 first;                         // order of this thread's first row
    int rows;                          // of this thread's, those that there are: at most STEPS

    __device__ Position(const Scans& scans, const Tile& tile) {
        batch = tile.column / scans.across;
        tile_channel = i64(tile.column % scans.across) * CHANNELS;
        channel = tile_channel + lane % LANES * VECTOR;
        first = i64(tile.level) * TIMES + (warp * SLOTS_PER_WARP + lane / LANES) * STEPS;
        const i64 left = scans.time - first;
        rows = channel >= scans.channels || left <= 0 ? 0 : left < STEPS ? int(left) : STEPS;
    }
};

// The state of the scan that this lane keeps, among those of batches × channels; null if there is none.
template <class S>
__device__ S* state_of(S* states, i64 by_batch, i64 by_channel, const Position& at, const Scans& scans) {
    const i64 channel = at.tile_channel + at.lane % CHANNELS;
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
    Crossing<CHANNELS> crossing;
    Affine composed[VECTOR], kept[VECTOR];  // before this slot: of the tile just composed, and of the one before

    __device__ Entrance(const Schedule& schedule, void* workspace) : crossing(schedule, workspace) {}

    __device__ void turn() {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) kept[v] = composed[v];
        crossing.turn();
    }
    // `rows` compose this thread's rows.
    __device__ void compose(Affine (&rows)[VECTOR], const Tile& tile, const Position& at) {
        const int first = at.lane % LANES * VECTOR;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            composed[v] = exclusive_scan<LANES>(rows[v], at.lane);
            if (at.lane >= 32 - LANES) crossing.total()[first + v] = rows[v];
        }
        crossing.compose(tile);
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            composed[v] = then(from_lane(crossing.composed.before, first + v), composed[v]);
    }
    // `before` and `after` are null, or the state of this lane's scan before and after the walk.
    __device__ void enter(State (&entering)[VECTOR], const Tile& tile, const Position& at,
                          const State* before, State* after) {
        const State x = crossing.enter(tile, before, after);
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            entering[v] = kept[v](from_lane(x, at.lane % LANES * VECTOR + v));
    }
};
