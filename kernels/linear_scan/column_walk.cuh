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
//
// RAGGED: rows do not start and end where pieces of 16 bytes do, and each in another place, but all tensors'
// alike. Then a block copies the pieces that its channels lie in, as many as before, and has fewer channels of
// its own, WIDTH; lanes read and write them one by one.
#pragma once
constexpr int THREADS = 32 * WARPS;
#include "affine.cuh"

constexpr int ITEMS = 16 / sizeof(Storage);  // in 16 bytes
constexpr int CHANNELS = ACROSS * VECTOR;
constexpr int WIDTH = CHANNELS - (RAGGED ? ITEMS : 0);
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
    i64 end;                                   // of the block's channels
    i64 origin, way = 1, rows;                 // time of the row at order 0, from row to row, and how many

    __device__ Column(i64 channels, i64 time, bool against, const i64* offsets, i64 sequences) {
        const unsigned across = unsigned((channels + WIDTH - 1) / WIDTH);
        unsigned number = blockIdx.x;
        const i64 first = i64(number % across) * WIDTH;
        end = first + WIDTH < channels ? first + WIDTH : channels;
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

    // Whether a lane's channels are the block's own.
    __device__ bool has(int v) const { return channel + v < end; }

    // Of a tensor of batches × channels.
    __device__ State value(const Storage* tensor, i64 by_batch, int v) const {
        return Element::widen(tensor[batch * by_batch + channel + v]);
    }
};

// This lane's share of a tensor of batches × times × channels: one piece of every ROWS-th row.
struct Rows {
    Storage* first;
    i64 apart;  // rows of the walk
    int to_own;  // from the first channel that this lane copies to its own

    __device__ Rows(const Storage* tensor, i64 by_batch, i64 by_time, const Column& column)
        : first(const_cast<Storage*>(tensor) + column.batch * by_batch + column.copied +
                (column.origin + column.way * (column.lane / PIECES)) * by_time),
          apart(column.way * by_time),
          to_own(int(column.channel - column.copied)) {}
    __device__ Storage* at(i64 order) const { return first + order * apart; }
    // This lane's channels.
    __device__ Storage* own(i64 order) const {
        return at(order - threadIdx.x % 32 / PIECES) + to_own;
    }
};

// Tiles on their way: a warp's rows of INPUTS tensors, in STAGES places.
template <int INPUTS>
struct Tiles {
    static constexpr int STAGE = INPUTS * COPIES * 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool copies, owns;  // whether what this lane copies is there, and it may have channels
    bool has[VECTOR];         // and which
    const i64 rows;
    const int to_end;  // from the first channel that this lane copies to the block's end
    // Elements before the block's channels in their piece: at order 0, and how that grows.
    const unsigned lead, lead_apart;
    uint4* const own = reinterpret_cast<uint4*>(dynamic_shared()) + warp * (STAGES * STAGE);
    int stage = 0;  // the next to be filled; after the turn, the one that was filled first
    int own_lead = 0;  // of this lane's first row

    // The strides are those of any tensor.
    __device__ Tiles(const Column& column, i64 by_batch, i64 by_time)
        : copies(RAGGED || column.copied < column.end),
          owns(lane % ACROSS * VECTOR < WIDTH),
          rows(column.rows),
          to_end(int(column.end - column.copied)),
          lead(unsigned(column.batch * by_batch + column.origin * by_time + column.copied)),
          lead_apart(unsigned(column.way * by_time)) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) has[v] = column.has(v);
    }
    __device__ void turn() { stage = stage + 1 < STAGES ? stage + 1 : 0; }
    __device__ int lead_at(i64 order) const {
        return RAGGED ? int((lead + unsigned(order) * lead_apart) & (ITEMS - 1)) : 0;
    }

    __device__ uint4* piece(int input, int copy) const {
        return own + stage * STAGE + (input * COPIES + copy) * 32 + lane;
    }
    // The first of this lane's channels in its row k.
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
        for (int i = 0; i < COPIES; i++) {
            const int before = before_own(first + i * ROWS);
            copy_async<16>(piece(input, i), from.at(first + i * ROWS) - before,
                           i * ROWS < there && (!RAGGED || before > -to_end));
        }
        if (there < WARP_STEPS) {
            Chunk<Element, ITEMS> chunk;
            chunk.fill(outside);
            for (int i = 0; i < COPIES; i++)
                if (i * ROWS >= there) *piece(input, i) = words_of(chunk);
        }
    }
    __device__ void copy_out(int input, const Rows& to, i64 order) const {
        if (RAGGED) return;  // results are out
        const int there = count(order);
        const i64 first = order + warp * WARP_STEPS;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i * ROWS < there) store_global(to.at(first + i * ROWS), *piece(input, i));
    }
    // From where the piece that this lane copies of a row starts, to its first channel.
    __device__ int before_own(i64 order) const {
        return lead_at(order + lane / PIECES);
    }

    // This lane's channels in its row k of a tensor whose rows are LATER by so many.
    template <int LATER = 0>
    __device__ Chunk<Element, VECTOR> get(int input, int k) const {
        const Storage* const from = cells(input, k);
        if constexpr (!RAGGED && VECTOR * sizeof(Storage) >= 4) {
            return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(from));
        } else {
            const int before = !RAGGED || !owns ? 0 : (own_lead + (k + LATER) * lead_apart) & (ITEMS - 1);
            Chunk<Element, VECTOR> chunk;
            chunk.word[0] = 0;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) chunk.put(v, from[before + v]);
            return chunk;
        }
    }
    // Results of this lane's row k, to where they take the place of an input or, of ragged rows, to memory.
    __device__ void put(int input, const Rows& to, i64 order, int k, const State (&x)[VECTOR]) const {
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        if constexpr (RAGGED) {
            Storage* const row = to.own(order + threadIdx.x / ACROSS * STEPS + k);
            if (k < left(order)) {
#pragma unroll
                for (int v = 0; v < VECTOR; v++)
                    if (has[v]) row[v] = chunk.bits(v);
            }
        } else if constexpr (VECTOR * sizeof(Storage) >= 4) {
            *reinterpret_cast<decltype(words_of(chunk))*>(cells(input, k)) = words_of(chunk);
        } else {
            *cells(input, k) = Storage(chunk.word[0]);
        }
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
            own_lead = lead_at(order + threadIdx.x / ACROSS * STEPS);
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
                      const Column& column)
        : first(states ? const_cast<State*>(states) + column.batch * by_batch +
                             column.sequence * by_sequence + column.channel * by_channel
                       : nullptr),
          by_channel(by_channel) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) there[v] = first && column.has(v);
    }
    __device__ State read(int v) const { return there[v] ? first[v * by_channel] : State(0); }
    __device__ void write(int v, State x) const {
        if (there[v]) first[v * by_channel] = x;
    }
};
