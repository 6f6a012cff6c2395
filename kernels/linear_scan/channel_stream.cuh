// Channels contiguous, aligned: what the forward and the backward kernel share.
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
// block takes one tile after the other, the next STAGES - 1 of which are on their way to shared memory
// meanwhile; tiles.cuh says which. A thread composes its rows' maps, a warp scans its slots, and the
// spine chains the warps' totals onto the state that enters the tile; then the rows are walked again,
// from the state that enters them.
#pragma once
constexpr int THREADS = 32 * WARPS;
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

// The state of a thread's scan, if it is one of the spine, among those of batches × channels; null if
// there is none.
template <class S>
__device__ S* spine_state(S* states, i64 by_batch, i64 by_channel, const Position& at,
                          const Scans& scans) {
    const i64 channel = at.tile_channel + threadIdx.x % CHANNELS;
    return states && channel < scans.channels ? states + at.batch * by_batch + channel * by_channel
                                              : nullptr;
}

// One tensor of batches × times × channels.
struct Plane {
    Storage* first;
    i64 by_batch, by_time;

    __device__ Plane(const Storage* first, i64 by_batch, i64 by_time)
        : first(const_cast<Storage*>(first)), by_batch(by_batch), by_time(by_time) {}

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

// The state that enters this thread's rows, for each of its channels; `rows` holds the maps of the
// thread's own rows. `before` and `after` are null or the state of this thread's scan, if it is one of
// the spine.
__device__ inline void enter_rows(Affine (&rows)[VECTOR], State (&entering)[VECTOR],
                                  const Tile& tile, const Position& at,
                                  Crossing<CHANNELS>& crossing, const State* before, State* after) {
    auto& shared = crossing.shared();
    const int first = at.lane % LANES * VECTOR;
    Affine before_slot[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        before_slot[v] = exclusive_scan<LANES>(rows[v], at.lane);
        if (at.lane >= 32 - LANES) shared.total[at.warp][first + v] = rows[v];
    }
    crossing.chain(tile, before, after);
#pragma unroll
    for (int v = 0; v < VECTOR; v++)
        entering[v] = before_slot[v](shared.entering[at.warp][first + v]);
}
