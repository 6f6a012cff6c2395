// Channels contiguous, aligned, and few of them: what the forward and the backward kernel share.
//
// The build pins WARPS (per CTA), LANES (threads side by side along the channels), VECTOR (channels of a
// thread), STEPS, PREFIX_LEAD, STAGES and BLOCKS (per SM). A tile is
//
//               channels ->   LANES pieces of 16 bytes
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               32 / LANES slots
//
// of a warp, and a column is the tiles below one another. Order runs in the direction of the scan, forwards or backwards
// in time. A thread composes the affine maps of its rows, and a warp scans its slots; then the thread computes its rows'
// states from the state that enters them, and stores results from registers. The next STAGES - 1 tiles are being copied
// to shared memory meanwhile; lookback.cuh says which.
//
// Gates of which a channel has one for all rows are read once for a tile.
#pragma once
enum : int { CHANNELS = LANES * VECTOR };
enum : int {
    TILE_WARPS = WARPS,
    LOOKBACK_WARPS = (PREFIX_LEAD + 1) * CHANNELS * TILE_WARPS / 32,
    THREADS = 32 * (TILE_WARPS + LOOKBACK_WARPS),
};
#include "../common/ring.cuh"
#include "../common/lookback.cuh"
#include "../linear_scan/copy_hint.cuh"
#include "../linear_scan/sequences.cuh"

enum : int { TIMES = 32 / LANES * STEPS };
enum : int { ROWS = 32 / LANES };  // that a warp copies at once
static_assert(32 % LANES == 0 && PREFIX_LEAD > 0 && CHANNELS * TILE_WARPS >= 32);

// What is scanned: batches × times × channels, along the walk.
struct Scans {
    i64 channels, time, states;
    unsigned columns_across;  // columns side by side
    Grid grid;

    __device__ Scans(i64 batches, i64 channels, i64 time)
        : channels(channels),
          time(time),
          states(batches * channels),
          columns_across(unsigned((channels + CHANNELS - 1) / CHANNELS)),
          grid{unsigned(batches) * columns_across, unsigned((time + TIMES - 1) / TIMES)} {}

    // The first channel of a column.
    __device__ i64 channel(unsigned column) const { return i64(column % columns_across) * CHANNELS; }

    // A state of a column, among those of batches × channels; null if there is none.
    template <class S>
    __device__ S* state_of(S* states, i64 by_batch, i64 by_channel, unsigned column, int scan) const {
        const i64 of = channel(column) + scan;
        return states && of < channels ? states + column / columns_across * by_batch + of * by_channel : nullptr;
    }
};

// Where a tile is, and in it this lane: its part, and what it copies.
struct Position {
    int lane = threadIdx.x % 32;
    i64 batch, channel;  // this lane's first
    i64 first;           // order of the tile's first row
    int rows;            // of the tile that there are
    bool has_channels;

    __device__ Position(const Scans& scans, const Tile& tile)
        : batch(tile.column / scans.columns_across),
          channel(scans.channel(tile.column) + lane % LANES * VECTOR),
          first(i64(tile.level) * TIMES),
          has_channels(channel < scans.channels) {
        const i64 left = scans.time - first;
        rows = left < 0 ? 0 : left < TIMES ? int(left) : TIMES;
    }
    // Of what this lane copies in turn i.
    __device__ int row(int i) const { return i * ROWS + lane / LANES; }
    __device__ bool has(int i) const { return has_channels && row(i) < rows; }
    // This lane's row k, whether there is one, and its piece.
    __device__ int own_row(int k) const { return lane / LANES * STEPS + k; }
    __device__ bool has_own(int k) const { return has_channels && own_row(k) < rows; }
    __device__ int own(int k) const { return own_row(k) * LANES + lane % LANES; }
};

// One tensor of batches × times × channels.
struct Plane {
    Storage* first;
    i64 by_batch, by_time;

    __device__ Plane(const Storage* first, i64 by_batch, i64 by_time)
        : first(const_cast<Storage*>(first)), by_batch(by_batch), by_time(by_time) {}
    __device__ explicit operator bool() const { return first; }

    // This lane's channels in a row of the tile.
    __device__ Storage* at(const Position& at, const Walk& walk, int row) const {
        return first + at.batch * by_batch + at.channel + walk.at(at.first + row) * by_time;
    }
    // From a row to the next of the walk.
    __device__ i64 apart(const Walk& walk) const { return walk.step(by_time); }
};

// Rows that are not there read as `outside`.
template <class Ring>
__device__ void copy_in(const Ring& ring, int input, const Plane& from, const Position& at, const Walk& walk,
                        Storage outside) {
    const Storage* const first = from.at(at, walk, at.row(0));
    const i64 apart = from.apart(walk) * ROWS;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        uint4* const place = ring.place(input, i * 32 + at.lane);
        copy_async(place, first + i * apart, at.has(i));
        if (!at.has(i)) *place = piece_of(outside);
    }
}

// Fill a tile with gates where each channel has one gate for all rows, so that this gate alone is read.
template <class Ring>
__device__ void fill_in(const Ring& ring, int input, const Plane& gates, const Position& at, Storage outside) {
    uint4 gate = piece_of(outside);
    if (at.has_channels) gate = *reinterpret_cast<const uint4*>(gates.first + at.batch * gates.by_batch + at.channel);
#pragma unroll
    for (int i = 0; i < STEPS; i++) *ring.place(input, i * 32 + at.lane) = at.has(i) ? gate : piece_of(outside);
}
template <class Ring>
__device__ void gates_in(const Ring& ring, int input, const Plane& gates, const Position& at, const Walk& walk,
                         Storage outside) {
    if (gates.by_time) copy_in(ring, input, gates, at, walk, outside);
    else fill_in(ring, input, gates, at, outside);
}

// The states that enter a lane's rows, for each of its channels.
struct ColumnTilePrefix {
    State carried[VECTOR];                  // before the tile
    Affine composed[VECTOR], tile[VECTOR];  // before this slot, and of all slots

    // `rows` compose this lane's rows.
    __device__ void scan(Affine (&rows)[VECTOR], const Position& at) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            composed[v] = exclusive_scan<LANES>(rows[v], at.lane);
            tile[v] = from_lane(rows[v], 32 - LANES + at.lane % LANES);
        }
    }
    __device__ void enter(State (&entering)[VECTOR]) const {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) entering[v] = composed[v](carried[v]);
    }
};
