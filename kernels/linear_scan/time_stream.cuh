// Time contiguous, aligned, without options: what the forward and the backward kernel share.
//
// The build pins LANES (threads that share a row), PIECES (of 16 bytes, per thread), WARPS (that share
// a row), ROWS (warps side by side), STAGES and BLOCKS (per SM). A warp's part of a tile is
//
//                 time in the order of the walk ->
//     row 0       | lane 0: PIECES pieces | lane 1 | …  LANES |
//     row 1       | lane LANES: …
//     …           SIDE = 32 / LANES rows
//
// Pieces are copied to shared memory so that successive lanes copy successive 16 bytes, and read from
// there by the lane that they belong to; results go back the same way. A piece lies where neither way
// makes lanes of a quarter warp meet in a bank. Meanwhile the next STAGES - 1 tiles are on their way;
// tiles.cuh says which.
//
// Either WARPS is 1, and each of ROWS warps has tiles, rows and states of its own and never waits for
// the others; or ROWS is 1, and the warps of a block follow one another along a row.
#pragma once
constexpr int THREADS = 32 * WARPS * ROWS;
#include "sequences.cuh"
#include "tiles.cuh"

constexpr int VECTOR = 16 / sizeof(Storage);
constexpr int SIDE = 32 / LANES;
constexpr int ITEMS = PIECES * VECTOR;         // of a lane
constexpr int WARP_TIMES = LANES * ITEMS;      // that a warp covers
constexpr int TIMES = WARPS * WARP_TIMES;      // that a tile covers
static_assert(WARPS == 1 || (ROWS == 1 && LANES == 32));

// What is scanned: rows of `time` elements, batches × channels of them.
struct Scans {
    unsigned channels;
    i64 rows, time;
    Grid grid;

    __device__ Scans(i64 batches, i64 channels, i64 time)
        : channels(unsigned(channels)),
          rows(batches * channels),
          time(time),
          grid{unsigned((rows + SIDE - 1) / SIDE), unsigned((time + TIMES - 1) / TIMES)} {}
};

// Strides between rows. Where a warp has several rows side by side, one stride leads from each to the
// next, whatever their batch.
struct Strides {
    i64 by_batch, by_channel;

    __device__ i64 offset(unsigned row, unsigned channels) const {
        if constexpr (SIDE > 1) return row * by_channel;
        const unsigned batch = row / channels;
        return batch * by_batch + (row - batch * channels) * by_channel;
    }
};

struct Position {
    int lane = threadIdx.x % 32, warp = WARPS > 1 ? threadIdx.x / 32 : 0;
    unsigned first_row;  // of the warp's SIDE rows
    i64 first;           // order of the warp's first element in each of them

    __device__ Position(const Tile& tile)
        : first_row(tile.column * SIDE), first(i64(tile.level) * TIMES + warp * WARP_TIMES) {}
    __device__ unsigned row() const { return first_row + lane / LANES; }  // this lane's own
    __device__ bool ends_row() const { return lane % LANES == LANES - 1; }
};

// Where a warp's pieces lie: piece p of the SIDE * LANES * PIECES in the order of rows and times.
__device__ inline int swizzled(int piece) { return piece ^ (piece >> 3 & 7); }

// A warp's share of the ring. EXTRA inputs have one more piece a row, past the last.
template <int INPUTS, int EXTRA>
struct Ring {
    static constexpr int INPUT = 32 * PIECES;
    static constexpr int STAGE = INPUTS * INPUT + EXTRA * SIDE;
    uint4* own;
    int stage = 0;  // the next to be filled; after the turn, the one that was filled first

    __device__ Ring()
        : own(reinterpret_cast<uint4*>(dynamic_shared()) + threadIdx.x / 32 * (STAGES * STAGE)) {}
    __device__ void turn() { stage = stage + 1 < STAGES ? stage + 1 : 0; }

    __device__ uint4* place(int input, int piece) const {
        return own + stage * STAGE + input * INPUT + swizzled(piece);
    }
    __device__ uint4* extra(int side) const { return own + stage * STAGE + INPUTS * INPUT + side; }
};

__device__ inline Chunk<Element, VECTOR> read_piece(const uint4* place) {
    return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(place));
}
__device__ inline uint4 piece_of(Storage bits) {
    Chunk<Element, VECTOR> chunk;
    chunk.fill(bits);
    return words_of(chunk);
}

// A piece in the order of a walk. TURNED says that memory has it in the opposite order.
template <bool TURNED>
struct Piece {
    Chunk<Element, VECTOR> chunk;

    __device__ State get(int i) const { return chunk.get(TURNED ? VECTOR - 1 - i : i); }
    __device__ void set(const State (&x)[VECTOR]) {
        State in_memory[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) in_memory[i] = x[TURNED ? VECTOR - 1 - i : i];
        chunk.set(in_memory);
    }
};

// Rows of a tensor.
struct Rows {
    Storage* first;
    Strides strides;

    __device__ Rows(const Storage* first, i64 by_batch, i64 by_channel)
        : first(const_cast<Storage*>(first)), strides{by_batch, by_channel} {}

    // Where the piece is whose order is `order`.
    template <bool TURNED>
    __device__ Storage* at(const Scans& scans, unsigned row, i64 order) const {
        return first + strides.offset(row, scans.channels) +
               (TURNED ? scans.time - order - VECTOR : order);
    }
};

// The piece that a lane copies in turn `i`, and its row and order.
struct Turn {
    int piece;
    unsigned row;
    i64 order;
    bool inside;

    __device__ Turn(int i, const Position& at, const Scans& scans)
        : piece(i * 32 + at.lane),
          row(at.first_row + piece / (LANES * PIECES)),
          order(at.first + piece % (LANES * PIECES) * VECTOR),
          inside(order < scans.time && row < scans.rows) {}
};

// `outside` gives for a row what its elements past the walk's end read as.
template <bool TURNED, int INPUTS, int EXTRA, class Outside>
__device__ void copy_in(const Ring<INPUTS, EXTRA>& ring, int input, const Rows& rows,
                        const Position& at, const Scans& scans, Outside outside) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const Turn turn(i, at, scans);
        uint4* const place = ring.place(input, turn.piece);
        copy_async<16>(place, rows.at<TURNED>(scans, turn.row, turn.order), turn.inside);
        if (!turn.inside) *place = piece_of(outside(turn.row));
    }
}

template <bool TURNED, int INPUTS, int EXTRA>
__device__ void copy_out(const Ring<INPUTS, EXTRA>& ring, int input, const Rows& rows,
                         const Position& at, const Scans& scans) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const Turn turn(i, at, scans);
        if (turn.inside)
            store_global(rows.at<TURNED>(scans, turn.row, turn.order), *ring.place(input, turn.piece));
    }
}

// The state that enters a lane's elements, whose maps `lane_map` composes. `before` and `after` are
// null, or this row's states before and after the walk.
struct Entrance {
    Crossing<1>& crossing;
    Carried carried = State(0);  // of rows that a warp has to itself

    __device__ State operator()(Affine lane_map, const Tile& tile, const Position& at,
                                const State* before, State* after) {
        const Affine before_lane = exclusive_scan<1, LANES>(lane_map, at.lane);
        if constexpr (WARPS == 1) {
            const Affine row = from_lane(lane_map, at.lane | (LANES - 1));
            if (tile.level == 0) carried = before ? *before : State(0);
            const State x = carried.x;
            carried = row(carried);
            if (tile.level + 1 == crossing.schedule.grid.levels && at.ends_row() && after)
                *after = carried.x;
            return before_lane(x);
        } else {
            if (at.lane == 31) crossing.shared().total[at.warp][0] = lane_map;
            crossing.chain(tile, before, after);
            return before_lane(crossing.shared().entering[at.warp][0]);
        }
    }
};
