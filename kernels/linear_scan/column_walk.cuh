// Channels contiguous, aligned, and many of them: a block walks its channels from one end of time to the
// other, and waits for no other block.
//
// The build pins WARPS (per block), ACROSS (lanes side by side), VECTOR (channels of a lane), STEPS, STAGES
// and BLOCKS (per SM):
//
//                 channels ->    ACROSS × VECTOR
//      order      | group 0: STEPS rows |  a tile of the block's column; the next STAGES - 1
//        |        | group 1: STEPS rows |  are on their way to shared memory meanwhile
//        v        | …           GROUPS  |
//
// A lane composes the maps of its channels' rows, learns from the groups before its own which state
// enters them, and walks them again. A warp copies its own rows, 16 bytes at a time, whichever lanes
// need them; results take the place of what they are computed from, and leave the same way. A packed
// sequence is a column of its own.
#pragma once
constexpr int THREADS = 32 * WARPS;
#include "affine.cuh"

constexpr int ITEMS = 16 / sizeof(Storage);  // in 16 bytes
constexpr int CHANNELS = ACROSS * VECTOR;
constexpr int GROUPS = THREADS / ACROSS;
constexpr int WARP_STEPS = STEPS * (32 / ACROSS);
constexpr int PIECES = CHANNELS / ITEMS;     // of a row
constexpr int ROWS = 32 / PIECES;            // that a warp copies at once
constexpr int COPIES = WARP_STEPS / ROWS;    // of a lane, for each input of a tile
constexpr int TIMES = WARPS * WARP_STEPS;    // of a tile
static_assert(PIECES <= 32 && WARP_STEPS % ROWS == 0);

// Where a block's column is, and in it the channels of this lane.
struct Column {
    int lane = threadIdx.x % 32;
    i64 batch, sequence = 0, channel, copied;  // first channels: this lane's, and what it copies
    i64 origin, way = 1, rows;                 // time of the row at order 0, from row to row, and how many

    __device__ Column(i64 channels, i64 time, bool against, const i64* offsets, i64 sequences) {
        const unsigned across = unsigned((channels + CHANNELS - 1) / CHANNELS);
        unsigned number = blockIdx.x;
        const i64 first = i64(number % across) * CHANNELS;
        number /= across;
        batch = number;
        origin = 0, rows = time;
        if constexpr (PACKED) {
            batch = number / unsigned(sequences), sequence = number % unsigned(sequences);
            origin = offsets[sequence], rows = offsets[sequence + 1] - origin;
        }
        channel = first + lane % ACROSS * VECTOR;
        copied = first + lane % PIECES * ITEMS;
        if (against) origin += rows - 1, way = -1;
    }

    // Of a tensor of batches × channels.
    __device__ State value(const Storage* tensor, i64 by_batch, int v) const {
        return Element::widen(tensor[batch * by_batch + channel + v]);
    }
};

// This lane's share of a tensor of batches × times × channels: one piece of every ROWS-th row.
struct Rows {
    Storage* first;
    i64 apart;  // rows of the walk

    __device__ Rows(const Storage* tensor, i64 by_batch, i64 by_time, const Column& column)
        : first(const_cast<Storage*>(tensor) + column.batch * by_batch + column.copied +
                (column.origin + column.way * (column.lane / PIECES)) * by_time),
          apart(column.way * by_time) {}
    __device__ Storage* at(i64 order) const { return first + order * apart; }
};

// Tiles on their way: a warp's rows of INPUTS tensors, in STAGES places.
template <int INPUTS>
struct Tiles {
    static constexpr int STAGE = INPUTS * COPIES * 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool copies;  // whether what this lane copies is there
    const i64 rows;
    uint4* const own = reinterpret_cast<uint4*>(dynamic_shared()) + warp * (STAGES * STAGE);
    int stage = 0;  // the next to be filled; after the turn, the one that was filled first

    __device__ Tiles(const Column& column, i64 channels)
        : copies(column.copied < channels), rows(column.rows) {}
    __device__ void turn() { stage = stage + 1 < STAGES ? stage + 1 : 0; }

    __device__ uint4* piece(int input, int copy) const {
        return own + stage * STAGE + (input * COPIES + copy) * 32 + lane;
    }
    __device__ Storage* cells(int input, int k) const {
        return reinterpret_cast<Storage*>(own + stage * STAGE + input * COPIES * 32) +
               (lane / ACROSS * STEPS + k) * CHANNELS + lane % ACROSS * VECTOR;
    }

    // This lane's rows that there are, of a tile from `order` on.
    __device__ i64 left(i64 order) const { return rows - order - threadIdx.x / ACROSS * STEPS; }

    // Rows of this warp that this lane has to copy: every ROWS-th below this.
    __device__ int count(i64 order) const {
        const i64 left = rows - order - warp * WARP_STEPS - lane / PIECES;
        return !copies || left < 0 ? 0 : left < WARP_STEPS ? int(left) : WARP_STEPS;
    }
    // Rows that are not there read as `outside`.
    __device__ void copy_in(int input, const Rows& from, i64 order, Storage outside) const {
        const int there = count(order);
        const i64 first = order + warp * WARP_STEPS;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            copy_async<16>(piece(input, i), from.at(first + i * ROWS), i * ROWS < there);
        if (there < WARP_STEPS) {
            Chunk<Element, ITEMS> chunk;
            chunk.fill(outside);
            for (int i = 0; i < COPIES; i++)
                if (i * ROWS >= there) *piece(input, i) = words_of(chunk);
        }
    }
    __device__ void copy_out(int input, const Rows& to, i64 order) const {
        const int there = count(order);
        const i64 first = order + warp * WARP_STEPS;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i * ROWS < there) store_global(to.at(first + i * ROWS), *piece(input, i));
    }

    __device__ Chunk<Element, VECTOR> get(int input, int k) const {
        const Storage* const from = cells(input, k);
        if constexpr (VECTOR * sizeof(Storage) >= 4) {
            return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(from));
        } else {
            Chunk<Element, VECTOR> chunk;
            chunk.word[0] = *from;
            return chunk;
        }
    }
    __device__ void put(int input, int k, const State (&x)[VECTOR]) const {
        Storage* const to = cells(input, k);
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        if constexpr (VECTOR * sizeof(Storage) >= 4)
            *reinterpret_cast<decltype(words_of(chunk))*>(to) = words_of(chunk);
        else
            *to = Storage(chunk.word[0]);
    }

    // Walk all rows. `work.fetch(order)` copies the tile at `order` in, `work.walk_rows(order)` walks this
    // warp's rows of it, and `work.leave(order)` copies results out.
    template <class Work>
    __device__ void walk(Work& work) {
        i64 coming = 0;
        const auto next = [&] {
            if (coming < rows) work.fetch(coming);
            commit_copies();
            turn();
            coming += TIMES;
        };
#pragma unroll 1
        for (int i = 1; i < STAGES; i++) next();
#pragma unroll 1
        for (i64 order = 0; order < rows; order += TIMES) {
            next();
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // of all lanes
            work.walk_rows(order);
            __syncwarp();  // results are there
            work.leave(order);
            __syncwarp();  // and gone, before others come in
        }
    }
};

// How a lane's channels get from group to group, and from tile to tile.
struct Passage {
    Carried carried[VECTOR];  // the state that enters the tile
    int turn = 0;

    // The state that enters this lane's rows, whose maps `own` composes. To be called by the whole block.
    __device__ void enter(const Affine (&own)[VECTOR], State (&entering)[VECTOR]) {
        __shared__ Affine maps[2][GROUPS][VECTOR][ACROSS];
        const int group = threadIdx.x / ACROSS, lane = threadIdx.x % ACROSS;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) maps[turn][group][v][lane] = own[v];
        __syncthreads();  // one a tile: the maps of the next are elsewhere
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            Carried x = carried[v];
#pragma unroll(UNROLLED)
            for (int g = 0; g < GROUPS; g++) {
                if (g == group) entering[v] = x.x;
                x = maps[turn][g][v][lane](x);
            }
            carried[v] = x;
        }
        turn ^= 1;
    }
};

// The states of this lane's channels, before or after the walk; null where there are none.
struct States {
    State* first;
    i64 by_channel;
    bool there[VECTOR];

    __device__ States(const State* states, i64 by_batch, i64 by_channel, i64 by_sequence,
                      const Column& column, i64 channels)
        : first(states ? const_cast<State*>(states) + column.batch * by_batch +
                             column.sequence * by_sequence + column.channel * by_channel
                       : nullptr),
          by_channel(by_channel) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) there[v] = first && column.channel + v < channels;
    }
    __device__ State read(int v) const { return there[v] ? first[v * by_channel] : State(0); }
    __device__ void write(int v, State x) const {
        if (there[v]) first[v * by_channel] = x;
    }
};
