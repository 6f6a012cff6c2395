// Many contiguous channels: a CTA owns a column of channels, and passes serially over all time steps. No CTA waits for
// another. Two other designs build on this file: single_wave.cuh and multi_cta_column.cuh.
//
// The build pins WARPS (per CTA), LANES_ACROSS (threads along the channels), VECTOR (channels of a thread), STEPS (rows of
// a thread in a tile), STAGES, BLOCKS (CTAs per SM), CTAS_PER_COLUMN (above 1 in multi_cta_column.cuh) and SINGLE_WAVE (1
// in single_wave.cuh). A row is one time step of the column's channels. A tile is
//
//                 channels ->    LANES_ACROSS × VECTOR
//      time       | group 0: STEPS rows |
//        |        | group 1: STEPS rows |
//        v        | …           GROUPS  |
//
// and the next STAGES - 1 tiles are being copied to shared memory meanwhile. For each tile
//
// 1. a thread composes the affine maps (gate, token) of its STEPS rows, for each of its channels;
// 2. groups exchange these maps through shared memory, and a thread applies those of the groups before its own to the
//    state that enters the tile;
// 3. it computes the states of its rows.
//
// A warp copies its own rows, 16 bytes at a time, whichever threads need them. Results overwrite the inputs they are
// computed from in shared memory, and leave the same way. Traffic: 12 bytes per element in float32 and 6 in 16 bits
// forward, 20 and 10 backward.
//
// VARLEN: each packed sequence is a column of its own, and the longest start first. A gate that a channel has for all rows is
// written to each row of a tile, so that there is no further code for it. EACH_GATE: channels have a gate for each row, in binaries
// that are half as large.
//
// MISALIGNED: rows start and end off 16-byte boundaries. The offset differs from row to row, but is the same in all
// tensors. A CTA copies every 16-byte piece that holds one of its channels, which is one piece more for each row. The
// channels of neighbouring threads are neighbours, and the channels of one thread are LANES_ACROSS apart; threads read
// single elements, and write results from registers.
#pragma once
enum : int {
    // Warps beside those that have tiles, of columns that several CTAs share (multi_cta_column.cuh).
    EXCHANGE_WARPS = CTAS_PER_COLUMN > 1 ? LANES_ACROSS * VECTOR / 32 : 0,
    THREADS = 32 * (WARPS + EXCHANGE_WARPS),
};
#include "../common/global_memory.cuh"
#include "../common/shared_memory.cuh"
#include "../linear_scan/copy_hint.cuh"
#include "../linear_scan/longest_first.cuh"
#include "../linear_scan/step.cuh"

enum : int {
    ITEMS = 16 / sizeof(Storage),              // elements in a 16-byte piece
    CHANNELS = LANES_ACROSS * VECTOR,          // of a column
    GROUPS = 32 * WARPS / LANES_ACROSS,        // threads that share rows
    WARP_STEPS = STEPS * (32 / LANES_ACROSS),  // rows of a warp in a tile
    FULL = CHANNELS / ITEMS,                   // pieces that the channels of an aligned row fill
    PIECES = FULL + MISALIGNED,                // pieces of a row
    ROWS = 32 / FULL,                          // rows that a warp copies at once
    COPIES = (WARP_STEPS + ROWS - 1) / ROWS,   // copies of a lane, for each input of a tile
    TIMES = (SINGLE_WAVE ? 1 : WARPS) * WARP_STEPS,  // rows of a tile
    TO_NEXT = MISALIGNED ? LANES_ACROSS : 1,   // channels between two successive channels of a lane
    TO_LANE = MISALIGNED ? 1 : VECTOR,         // channels between the first channels of neighbouring lanes
};
// Pieces of padding between the rows of a warp's groups, against bank conflicts.
enum : int { APART = LANES_ACROSS < 32 && sizeof(Storage) < 8 ? 4 : 0 };
static_assert(FULL <= 32 && CHANNELS % ITEMS == 0);
// Whether lanes write results from registers to global memory, and not through shared memory.
enum : bool { DIRECT = MISALIGNED || SINGLE_WAVE };

// Tiles from one that a CTA has to the next. Of misaligned rows, CTAS_PER_COLUMN is the most that the launch may have.
#if MISALIGNED && CTAS_PER_COLUMN > 1
__device__ inline int& tiles_apart() {
    __shared__ int tiles;
    return tiles;
}
#else
__device__ constexpr int tiles_apart() { return CTAS_PER_COLUMN; }
#endif

// A thread's warp and group among those that share a tile. With SINGLE_WAVE each warp has tiles of its own.
__device__ inline unsigned own_warp() { return SINGLE_WAVE ? 0 : threadIdx.x / 32; }
__device__ inline unsigned own_group() { return (SINGLE_WAVE ? threadIdx.x % 32 : threadIdx.x) / LANES_ACROSS; }

// In exchanges between CTAs a thread serves one channel of the column, whichever channels it scans. These threads number
// the channels so that shared memory has no bank conflicts: first every lane's channel 0, then every lane's channel 1, and
// so on. `number_of` gives the number of this lane's channel v, and `place_of` the channel of a number.
__device__ inline int number_of(int v) { return v * LANES_ACROSS + threadIdx.x % LANES_ACROSS; }
__device__ inline int place_of(int number) {
    return MISALIGNED ? number : number % LANES_ACROSS * VECTOR + number / LANES_ACROSS;
}

// A CTA's column, and in it the channels of this lane.
struct Column {
    int lane = threadIdx.x % 32;
    i64 batch, sequence = 0, channel, copied;  // first channels: this lane's, and what it copies
    i64 end;                                   // of the CTA's channels
    i64 origin, way = 1, rows;                 // time of the first row, from row to row, and how many

    // `skipped`: the first rows, which other CTAs or warps have.
    __device__ Column(i64 channels, i64 time, bool against, const i64* offsets, i64 sequences,
                      unsigned number, i64 skipped = 0) {
        const unsigned columns_across = SINGLE_WAVE ? gridDim.x : unsigned((channels + CHANNELS - 1) / CHANNELS);
        const i64 first = i64(SINGLE_WAVE ? blockIdx.x : number % columns_across) * CHANNELS;
        end = first + CHANNELS < channels ? first + CHANNELS : channels;
        number = SINGLE_WAVE ? blockIdx.y : number / columns_across;
        batch = number;
        origin = 0, rows = time;
        if constexpr (VARLEN) {
            batch = number / unsigned(sequences);
            sequence = longest_first(offsets, unsigned(sequences), number % unsigned(sequences));
            // Bounds may be anything, and nothing else is to be touched.
            const auto within = [](i64 bound, i64 least, i64 most) {
                return bound < least ? least : bound > most ? most : bound;
            };
            origin = within(offsets[sequence], 0, time);
            rows = within(offsets[sequence + 1], origin, time) - origin;
        }
        channel = first + lane % LANES_ACROSS * TO_LANE;
        copied = first + lane % FULL * ITEMS;
        if (against) origin += rows - 1, way = -1;
        origin += way * skipped, rows -= skipped;
    }

    // The same column for a thread that serves channel `own` of it.
    __device__ Column with(int own) const {
        Column other = *this;
        other.channel += own - lane % LANES_ACROSS * TO_LANE;
        return other;
    }
    // Whether channel v of this lane exists.
    __device__ bool has(int v) const { return channel + v * TO_NEXT < end; }

    // Of a tensor of batches × channels.
    __device__ State value(const Storage* tensor, i64 by_batch, int v) const {
        return Element::widen(tensor[batch * by_batch + channel + v * TO_NEXT]);
    }
};

// This lane's share of a tensor of batches × times × channels: one piece of every ROWS-th row of its warp's,
// in the tile that is at hand.
struct Rows {
    Storage* first;
    i64 apart;   // from a row to the next in scan order
    int later;   // by how many rows it is read later than others

    __device__ Rows(const Storage* tensor, i64 by_batch, i64 by_time, const Column& column, int later = 0)
        : apart(column.way * by_time), later(later) {
        const int copied = own_warp() * WARP_STEPS + column.lane / FULL;
        first = const_cast<Storage*>(tensor) + column.batch * by_batch + column.origin * by_time + column.copied +
                (copied + later) * apart;
    }
    __device__ Storage* at(int row) const { return first + row * apart; }
    __device__ void advance(int tiles = tiles_apart()) { first += tiles * TIMES * apart; }
    // Whether two pieces from the end of a row on are still within the next one, or the one before.
    __device__ bool far_apart() const { return apart > 2 * ITEMS || apart < -2 * ITEMS; }
};

// Likewise of results, or what is written by the lane that has it: its channels, and successive rows.
struct Results : Rows {
    __device__ Results(const Storage* tensor, i64 by_batch, i64 by_time, const Column& column)
        : Rows(tensor, by_batch, by_time, column) {
        const int copied = own_warp() * WARP_STEPS + column.lane / FULL, own = own_group() * STEPS;
        if (DIRECT) first += column.channel - column.copied + (own - copied) * apart;
    }
    // In bytes there is one addition a row.
    __device__ Storage* own(int k) const {
        return reinterpret_cast<Storage*>(reinterpret_cast<char*>(first) + k * i64(apart * sizeof(Storage)));
    }
};

// Misaligned rows: elements between the start of a 16-byte piece and the CTA's first channel. The offset grows evenly
// from row to row, so it repeats after ITEMS rows and is computed once. A shuffle from the own lane keeps the compiler
// from computing it again for each tile.
struct Leads {
    enum : int {
        OWN = ITEMS < STEPS + 1 ? ITEMS : STEPS + 1,  // of a lane's rows
        COPIED = ITEMS > ROWS ? ITEMS / ROWS : 1,     // of what it copies
    };
    unsigned first, apart;  // in a tile's first row, and from row to row
    int own[OWN], copied[2][COPIED], last[2];  // last: pieces of a row; and where rows are read later

    __device__ Leads(const Column& column, i64 by_batch, i64 by_time)
        : first(unsigned(column.batch * by_batch + column.origin * by_time + column.copied)),
          apart(unsigned(column.way * by_time)) {
        static_assert(!MISALIGNED || TIMES % ITEMS == 0, "or leads would change from tile to tile");
        if (!MISALIGNED) return;
        const int lane = column.lane, first_own = threadIdx.x / LANES_ACROSS * STEPS;
        const int first_copied = threadIdx.x / 32 * WARP_STEPS;
#pragma unroll
        for (int k = 0; k < OWN; k++) own[k] = from_lane(of(first_own + k), lane);
#pragma unroll
        for (int later = 0; later < 2; later++) {
#pragma unroll
            for (int i = 0; i < COPIED; i++)
                copied[later][i] = from_lane(of(first_copied + lane / FULL + i * ROWS + later), lane);
            last[later] = from_lane(of(first_copied + lane + later), lane);
        }
    }
    __device__ int of(int row) const { return int((first + row * apart) & (ITEMS - 1)); }
};

// Tiles on their way: a warp's rows of INPUTS tensors, in STAGES places. Of the rows from a tile on, only as
// many as matter are counted: one more than a tile has.
template <int INPUTS>
struct Tiles {
    enum : int { INPUT = WARP_STEPS * PIECES + (32 / LANES_ACROSS - 1) * APART, STAGE = INPUTS * INPUT };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_own = own_group() * STEPS;
    const int own_row = lane / FULL;  // of ROWS, what this lane copies a piece of
    const i64 rows;
    const int to_end;   // from the first channel that this lane copies to the end
    const bool copies;  // whether there is something for this lane to copy
    const int own_channels;  // from this lane's first one to the end
    const Leads leads;
    bool inner = false;  // whether all of a tile's rows are there, and others before and after them
    uint4* const own = reinterpret_cast<uint4*>(dynamic_rows()) + warp * (STAGES * STAGE);
    int stage = 0;  // the next to be filled; after the turn, the one that was filled first

    // The strides are those of any tensor.
    __device__ Tiles(const Column& column, i64 by_batch, i64 by_time)
        : rows(column.rows),
          to_end(int(column.end - column.copied)),
          copies(MISALIGNED || to_end > 0),
          own_channels(DIRECT ? from_lane(int(column.end - column.channel), lane) : 0),
          leads(column, by_batch, by_time) {}
    __device__ void turn() { stage = stage + 1 < STAGES ? stage + 1 : 0; }
    __device__ void turn_back() { stage = stage > 0 ? stage - 1 : STAGES - 1; }
    __device__ uint4* piece(int input, int copy) const {
        const int row = copy * ROWS + own_row;
        return own + stage * STAGE + input * INPUT + copy * (ROWS * PIECES) +
               (MISALIGNED ? own_row * PIECES + lane % FULL : lane) + row / STEPS * APART;
    }
    // Of a row of this warp the piece that is one more than its channels fill.
    __device__ uint4* last_piece(int input, int row) const {
        return own + stage * STAGE + input * INPUT + row * PIECES + FULL + row / STEPS * APART;
    }
    // The first of this lane's channels in its row k, of a tensor whose rows are LATER by so many.
    template <int LATER = 0>
    __device__ Storage* cells(int input, int k) const {
        const int group = lane / LANES_ACROSS, row = group * STEPS + k;
        return reinterpret_cast<Storage*>(own + stage * STAGE + input * INPUT + row * PIECES + group * APART) +
               lane % LANES_ACROSS * TO_LANE + (MISALIGNED ? leads.own[(k + LATER) % Leads::OWN] : 0);
    }

    // Rows of this warp that this lane has to copy: every ROWS-th below this.
    __device__ int count(int left) const {
        const int own = left - (SINGLE_WAVE ? 0 : warp) * WARP_STEPS;
        return !copies ? 0 : (own < WARP_STEPS ? own : WARP_STEPS) - own_row;
    }
    // Rows that are not there read as `outside`. LATER is what `from.later` is.
    template <int LATER = 0>
    __device__ void copy_in(int input, const Rows& from, int left, Storage outside) const {
        if (MISALIGNED && inner && from.far_apart()) return copy_pieces<LATER, true>(input, from);
        const int there = count(left - from.later);
        copy_pieces<LATER, false>(input, from, there, left - from.later - warp * WARP_STEPS);
        if (there < WARP_STEPS - own_row) {
            Chunk<Element, ITEMS> chunk;
            chunk.fill(outside);
            for (int i = 0; i < COPIES; i++) {
                if (i * ROWS < there || i * ROWS >= WARP_STEPS - own_row) continue;
                *piece(input, i) = words_of(chunk);
                if (MISALIGNED && lane % FULL == 0) *last_piece(input, i * ROWS + own_row) = words_of(chunk);
            }
        }
    }
    // Rows that all are the row where `from` is, of one gate for each channel.
    __device__ void fill_in(int input, const Rows& from, int left, Storage outside) const {
        const int there = count(left);
        Chunk<Element, ITEMS> chunk;
        chunk.fill(outside);
        const uint4 beyond = words_of(chunk), row = there > 0 ? *reinterpret_cast<const uint4*>(from.first) : beyond;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i * ROWS < WARP_STEPS - own_row) *piece(input, i) = i * ROWS < there ? row : beyond;
    }
    // Of this lane's and of the warp's rows, so many are there. INNER: all are, and pieces may be read to their ends.
    template <int LATER, bool INNER>
    __device__ void copy_pieces(int input, const Rows& from, int there = WARP_STEPS, int all = WARP_STEPS) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int lead = MISALIGNED ? leads.copied[LATER][i % Leads::COPIED] : 0;
            if (INNER) there = WARP_STEPS % ROWS == 0 ? i * ROWS + 1 : WARP_STEPS - own_row;
            copy_piece<INNER>(piece(input, i), from.at(i * ROWS), lead, to_end, i * ROWS < there);
        }
        if constexpr (MISALIGNED) {
            const int to_last = CHANNELS - lane % FULL * ITEMS;  // channels, from the first that this lane copies
#pragma unroll
            for (int row = lane; row < WARP_STEPS; row += 32)
                copy_piece<INNER>(last_piece(input, row), from.at(row - own_row) + to_last, leads.last[LATER],
                                  to_end - to_last, row < all);
        }
    }
    // Copy a piece. A misaligned one starts `lead` elements before `from`. INNER: all of it may be read. Otherwise nothing
    // is read past the CTA's last channel, which may be the tensor's end.
    template <bool INNER>
    __device__ static void copy_piece(uint4* to, const Storage* from, int lead, int to_end, bool wanted) {
        const int left = to_end + lead;
        if constexpr (!MISALIGNED) copy_async(to, from, wanted);
        else if constexpr (INNER) copy_async(to, from - lead, wanted && to_end + ITEMS > 1);
        else
            copy_async_first(to, from - lead, (left < ITEMS ? left : ITEMS) * int(sizeof(Storage)),
                             wanted && left > 0);
    }
    __device__ void copy_out(int input, const Results& to, int left) const {
        if (DIRECT) return;
        const int there = count(left);
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (i * ROWS < there) store_global(to.at(i * ROWS), *piece(input, i));
    }

    // This lane's channels in its row k.
    template <int LATER = 0>
    __device__ Chunk<Element, VECTOR> get(int input, int k) const {
        const Storage* const from = cells<LATER>(input, k);
        if constexpr (!MISALIGNED && VECTOR * sizeof(Storage) >= 4) {
            return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(from));
        } else {
            Chunk<Element, VECTOR> chunk;
            chunk.word[0] = 0;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) chunk.put(v, from[v * TO_NEXT]);
            return chunk;
        }
    }
    // Results of this lane's row k, to where they take the place of an input, or to memory.
    __device__ void put(int input, const Results& to, int left, int k, const State (&x)[VECTOR]) const {
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        if constexpr (MISALIGNED) {
            Storage* const cell = to.own(k);
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                if (v * TO_NEXT < own_channels && first_own + k < left) cell[v * TO_NEXT] = chunk.bits(v);
        } else if constexpr (DIRECT) {
            if (own_channels > 0 && first_own + k < left) store_global(to.own(k), words_of(chunk));
        } else if constexpr (VECTOR * sizeof(Storage) >= 4) {
            put_words(cells(input, k), chunk);
        } else {
            *cells(input, k) = Storage(chunk.word[0]);
        }
    }

    // Pass over all rows. Of `work`, fetch(left) copies a tile in, of which `left` rows exist; read() loads this lane's
    // rows to registers; compose_tile() composes their maps; finish() computes their states from what block_prefix gives;
    // leave() copies results out.
    template <class Work>
    __device__ void run(Work& work) {
        i64 to_come = rows;
        const auto next = [&] {
            if (to_come > 0) fetch(work, to_come);
            commit_copies();
            turn();
            to_come -= TIMES;
        };
#pragma unroll 1
        for (int i = 1; i < STAGES; i++) next();
#pragma unroll 1
        for (i64 left = rows; left > 0; left -= TIMES) {
            next();
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // of all lanes
            run_tile(work, counted(left));
        }
    }

    __device__ static int counted(i64 left) { return left <= TIMES ? int(left) : TIMES + 1; }
    template <class Work>
    __device__ static void hand_out(Work& work, int left) {
        __syncwarp();  // results are there
        work.leave(left);
        __syncwarp();  // and gone, before others come in
    }

  private:
    template <class Work>
    __device__ void fetch(Work& work, i64 left) {
        inner = left < rows && left > TIMES + 1;
        work.fetch(counted(left));
    }
    template <class Work>
    __device__ static void run_tile(Work& work, int left) {
        typename Work::Held held;
        Affine maps[VECTOR];
        State x[VECTOR];
        work.read(held);
        work.compose_tile(held, maps, left);
        work.block_prefix.enter(maps, x);
        work.finish(held, x, left);
        hand_out(work, left);
    }
};

// Whether the groups of a warp compose their maps by shuffles before step 2, so that fewer maps are left to apply. Where few
// sequences are packed, the time of the longest counts, and with it the time of a tile.
enum : bool { JOINED = VARLEN && LANES_ACROSS < 32 && !COMPENSATED };

// Step 2: the running prefix of a lane's channels, from group to group and from tile to tile.
struct BlockPrefix {
    enum : int { MAPS = JOINED ? WARPS : GROUPS };  // of a tile
    RunningPrefix carried[VECTOR];  // the state that enters the tile
    int turn = 0;

    // The state that enters this lane's rows, whose composed map is `own`. To be called by the whole CTA.
    __device__ void enter(const Affine (&own)[VECTOR], State (&entering)[VECTOR]) {
        __shared__ Stored<> maps[2][MAPS][VECTOR][LANES_ACROSS];
        const int part = threadIdx.x / (JOINED ? 32 : LANES_ACROSS), lane = threadIdx.x % LANES_ACROSS;
        Affine before[VECTOR];  // of the groups of this warp that come before
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            Affine all = own[v];
            if (JOINED) before[v] = exclusive_scan<LANES_ACROSS>(all, threadIdx.x % 32);
            if (!JOINED || threadIdx.x % 32 >= 32 - LANES_ACROSS) maps[turn][part][v][lane] = all;
        }
        __syncthreads();  // one for each tile: the next tile's maps go to the other buffer
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            RunningPrefix x = carried[v];
#pragma unroll(UNROLLED)
            for (int p = 0; p < MAPS; p++) {
                if (p == part) entering[v] = x.x;
                x = Affine(maps[turn][p][v][lane])(x);
            }
            carried[v] = x;
            if (JOINED) entering[v] = before[v](entering[v]);
        }
        turn ^= 1;
    }
};

// The states of this lane's channels before or after the scan; null where there are none.
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
    __device__ State read(int v) const { return there[v] ? first[v * TO_NEXT * by_channel] : State(0); }
    // `further`: elements from the states on.
    __device__ void write(int v, State x) const {
        if (there[v]) first[v * TO_NEXT * by_channel] = x;
    }
};
