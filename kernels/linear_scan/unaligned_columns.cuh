// Contiguous channels, of any number, whose rows start at any address: what the forward and the backward kernel share.
//
// BACKWARD comes from the kernel that includes this file. The build pins WARPS, COPY_WARPS (that copy in, and as many that
// copy out), STAGES, AREA (bytes of a tile of one tensor) and BLOCKS (CTAs per SM). A CTA owns some channels of a batch, a
// column, and passes serially over all time steps; the launch says how many channels that is. A row is one time step of the
// column, and a tile is as many rows as AREA holds. In a turn, between two barriers,
//
//     SCANNERS    threads scan tile n, one channel each, row by row, from shared memory to shared memory
//     COPIERS     threads start to copy tile n + STAGES - 1 to where tile n - 1 was, and wait for tile n + 1
//     COPIERS     threads store the results of tile n - 1
//
// Copies move 16 bytes that are aligned in global memory. A tile lies in shared memory as it does in global memory: an
// element has the same place in its 16 bytes here and there. So the distance of rows in a tile, its pitch, is that of rows
// in memory modulo 16 bytes; where a column has all channels of a tensor without gaps, it is the same, and a tile is one
// stretch of memory. Elsewhere a row's 16-byte pieces are its own, and those of two rows do not overlap.
//
// Of memory, sectors of 32 bytes are written as a whole. A column's neighbours share sectors with it; in each row, the right
// one of two writes the sector that both have channels in. So a column also scans the OVERLAP channels before its own.
//
// Traffic: 12 bytes per element in float32 and 6 in 16 bits forward, 20 and 10 backward.
#pragma once
enum : int { THREADS = 32 * WARPS };
#include "../common/compiler.cuh"
#include "../common/copy.cuh"
#include "../common/global_memory.cuh"
#include "../common/shared_memory.cuh"
#include "../linear_scan/step.cuh"

enum : int {
    INPUTS = BACKWARD ? 3 : 2,
    RESULTS = BACKWARD ? 2 : 1,
    STAGE = INPUTS * AREA,
    RESULTS_STAGE = RESULTS * AREA,
    RESULTS_FIRST = STAGES * STAGE,  // bytes before the two tiles of results
    COPIERS = 32 * COPY_WARPS,
    SCANNERS = THREADS - 2 * COPIERS,
    ITEM = sizeof(Storage),
    PIECE = 16,
    SECTOR = 32,
    ITEMS = PIECE / ITEM,      // elements of a piece
    OVERLAP = SECTOR / ITEM,   // elements of a sector; a tile's rows are a multiple of it, so that tiles lie alike in their sectors
    MOST_OFF = PIECE - ITEM,   // bytes from an aligned address to a row, at most
    COPIES = (AREA / PIECE + COPIERS - 1) / COPIERS + 1,  // pieces of a tile of one tensor that a thread copies, at most
    WORDS = (COPIES * ITEMS + 31) / 32,
    UNROLL = 8,  // rows that a thread scans at once; of more, the compiler computes each address anew
};
static_assert(STAGES > 1 && AREA % 128 == 0 && sizeof(Storage) == sizeof(GateStorage));

// A CTA's column, and what of a tile this thread copies.
struct Column {
    i64 batches, batch, begin, channels, time;  // begin: the first channel that is scanned
    int width, times, pitch;                    // channels; rows of a tile; bytes from row to row of a tile
    bool against, leftmost, rightmost, stretch;  // stretch: a tile is one stretch of memory
    int bytes, piece, row, rows, copies;  // of a row, where this thread's piece begins in it, the thread's first row, and from
                                          // row to row; pieces of the thread; in a stretch, each piece is a row

    // `apart`: bytes from row to row, modulo 16 the same in all tensors. `dense`: whether no tensor has gaps between rows.
    __device__ Column(i64 channels, i64 time, i64 own, i64 apart, bool dense, bool against)
        : channels(channels), time(time), against(against) {
        const unsigned across = unsigned((channels + own - 1) / own), index = blockIdx.x % across;
        batches = gridDim.x / across, batch = blockIdx.x / across;
        leftmost = index == 0, rightmost = index + 1 == across;
        begin = leftmost ? 0 : index * own - OVERLAP;
        width = int((rightmost ? channels : (index + 1) * own) - begin);
        stretch = dense && across == 1;
        const int all = width * ITEM, least = all + 2 * MOST_OFF;
        pitch = stretch ? all : least + (int(apart) - least & PIECE - 1);
        bytes = stretch ? PIECE : all;
        const int pieces = stretch ? 1 : (all + MOST_OFF + PIECE - 1) / PIECE, copier = (int(threadIdx.x) - SCANNERS) % COPIERS;
        piece = copier % pieces * PIECE, row = copier / pieces, rows = COPIERS / pieces;
        const int fit = (AREA - 2 * PIECE) / pitch, copied = stretch ? fit : COPIES * rows;
        times = (fit < copied ? fit : copied) / OVERLAP * OVERLAP;
        copies = stretch ? COPIES : (times + rows - 1) / rows;
        if (row >= rows) row = times;
    }
    __device__ bool scans() const { return int(threadIdx.x) < width; }
    // Of so many rows to come, those in the tile.
    __device__ int count(i64 left) const { return left <= 0 ? 0 : left < times ? int(left) : times; }
};

// One tensor of batches × times × channels.
struct Plane {
    const Storage* first;
    i64 by_batch, by_time;
};

// The tiles of one tensor in the order of the walk, of which a thread copies COPIES pieces, or fewer. Where they lie from the
// start of a tile on is the same in all tiles. `area`: where these are in shared memory. `later`: by how many rows the tensor
// is read later than others.
struct Stream {
    u64 tile;              // address of the first place of the tile at hand, which may be before the tensor
    i64 by_row, by_tile;   // bytes from row to row, and from tile to tile
    u64 low, high;         // where the tensor begins and ends
    int off;               // of a tile, from the 16-byte boundary before it
    int shared;            // where a tile of the first stage is in shared memory
    int pieces[COPIES], places[COPIES];  // bytes from a tile's start to this thread's pieces, and where these are in shared
                                         // memory; opaque, or the compiler computes them again for each tile
    unsigned parts[WORDS];  // of a whole tile: which elements of this thread's pieces are its own, ITEMS bits for each piece

    __device__ Stream(const Column& column, const Plane& of, int area, int later = 0)
        : by_row(of.by_time * ITEM), low(reinterpret_cast<u64>(of.first)) {
        const i64 first = column.against ? column.time - column.times - later : later;
        tile = low + u64((column.batch * of.by_batch + column.begin) * ITEM + first * by_row);
        high = low + u64(((column.batches - 1) * of.by_batch + (column.time - 1) * of.by_time + column.channels) * ITEM);
        by_tile = column.against ? -column.times * by_row : column.times * by_row;
        off = int(tile) & (PIECE - 1);
        shared = area + off;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            pieces[i] = int(opaque(unsigned(piece(column, i)))), places[i] = int(opaque(unsigned(place(column, i))));
        set_parts(column, column.times);
    }
    // Of this thread's piece i: the row, or the piece of a stretch; bytes from the tile's start to it; and where it is in
    // shared memory.
    __device__ static int row(const Column& column, int i) { return column.row + i * column.rows; }
    __device__ int piece(const Column& column, int i) const {
        if (column.stretch) return row(column, i) * PIECE - off;
        const int start = row(column, i) * int(by_row);
        return start + column.piece - (off + start & PIECE - 1);
    }
    __device__ int place(const Column& column, int i) const {
        return shared + piece(column, i) + (column.stretch ? 0 : row(column, i) * (column.pitch - int(by_row)));
    }
    // Find the elements of this thread's pieces that a tile of `count` rows has, but for what other columns store.
    __device__ void set_parts(const Column& column, int count) {
        const int from = column.against ? column.times - count : 0, to = from + count;
#pragma unroll
        for (int w = 0; w < WORDS; w++) parts[w] = 0;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int low = from * column.pitch, high = to * column.pitch;  // bytes from the tile's start
            if (!column.stretch) {
                if (row(column, i) < from || row(column, i) >= to) continue;
                low = row(column, i) * int(by_row), high = low + column.bytes;
                if (!column.leftmost) low += SECTOR - (int(tile) + low & SECTOR - 1);
                if (!column.rightmost) high -= int(tile) + high & SECTOR - 1;
            }
            // Elements below the first and up to the last one of the piece.
            const int first = (low - pieces[i]) / ITEM, end = (high - pieces[i]) / ITEM;
            const unsigned below = first <= 0 ? 0 : first >= ITEMS ? (1u << ITEMS) - 1 : (1u << first) - 1;
            const unsigned until = end <= 0 ? 0 : end >= ITEMS ? (1u << ITEMS) - 1 : (1u << end) - 1;
            parts[i * ITEMS / 32] |= (until & ~below) << i * ITEMS % 32;
        }
    }
    // Which of this thread's pieces hold anything of a tile of `count` rows, a bit for each.
    __device__ unsigned wanted(const Column& column, int count) const {
        unsigned all = 0;
        int from = column.against ? column.times - count : 0, to = from + count;
        if (count == 0) return 0;
        if (column.stretch) from = (off + from * column.pitch) / PIECE, to = (off + to * column.pitch + PIECE - 1) / PIECE;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int at = row(column, i), begin = column.stretch ? 0 : at * int(by_row);
            const bool there = at >= from && at < to;
            all |= unsigned(there && (column.stretch || pieces[i] < begin + column.bytes)) << i;
        }
        return all;
    }
    // Copy pieces of the tile at hand to shared memory.
    __device__ void copy_in(const Column& column, int stage, unsigned all) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (i == column.copies) break;
            copy_async<false>(dynamic_rows() + (stage + places[i]),
                              reinterpret_cast<const void*>(tile + pieces[i]), all >> i & 1);
        }
    }
    // Copy those of the pieces that the tensor does not have as a whole, so that nothing is read before its first element or
    // after its last one. The others remain.
    __device__ unsigned copy_ends(const Column& column, int stage, unsigned all) const {
#pragma unroll 1
        for (int i = 0; i < COPIES; i++) {
            const u64 from = tile + piece(column, i);
            if (!(all >> i & 1) || (from >= low && from + PIECE <= high)) continue;
            all &= ~(1u << i);
            Storage* const to = reinterpret_cast<Storage*>(dynamic_rows() + (stage + place(column, i)));
            for (int k = 0; k < ITEMS; k++)
                if (from + k * ITEM >= low && from + k * ITEM < high) to[k] = reinterpret_cast<const Storage*>(from)[k];
        }
        return all;
    }
    // Store what is this column's of the tile at hand.
    __device__ void copy_out(const Column& column, int stage) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (i == column.copies) break;
            const unsigned part = parts[i * ITEMS / 32] >> i * ITEMS % 32 & (1u << ITEMS) - 1;
            if (!part) continue;
            const auto chunk = get_words<Element, ITEMS>(
                reinterpret_cast<const unsigned*>(dynamic_rows() + (stage + places[i])));
            if (part == (1u << ITEMS) - 1) {
                store_global(reinterpret_cast<void*>(tile + pieces[i]), words_of(chunk));
                continue;
            }
#pragma unroll
            for (int k = 0; k < ITEMS; k++)
                if (part >> k & 1) reinterpret_cast<Storage*>(tile + pieces[i])[k] = chunk.bits(k);
        }
    }
    __device__ void advance() { tile += by_tile; }
};

// An input, and which of this thread's pieces a whole tile has. That of states is read a row later, as a row takes the state
// before it.
struct Input : Stream {
    unsigned all;

    __device__ Input(const Column& column, const Plane& of, int number)
        : Stream(column, of, number * AREA, number == 2), all(wanted(column, column.times)) {}
    // INNER: the batch has 16 rows before the tile and after it.
    __device__ void fetch(const Column& column, int stage, int count, bool inner) {
        unsigned pieces = all;
        if (!inner) pieces = copy_ends(column, stage, wanted(column, count));
        copy_in(column, stage, pieces);
        advance();
    }
};
struct Output : Stream {
    __device__ Output(const Column& column, const Plane& of, int number)
        : Stream(column, of, RESULTS_FIRST + number * AREA) {}
    __device__ void leave(const Column& column, int stage, int count) {
        if (count < column.times) set_parts(column, count);
        copy_out(column, stage);
        advance();
    }
};

// A thread's channel in a tile: an element for each row.
struct Cells {
    char* first;
    int step;  // bytes from row to row of the walk

    Cells() = default;
    __device__ Cells(const Column& column, const Stream& stream)
        : first(dynamic_rows() + stream.shared + int(threadIdx.x) * ITEM +
                (column.against ? column.times - 1 : 0) * column.pitch),
          step(column.against ? -column.pitch : column.pitch) {}
    __device__ Storage& bits(int row) const { return *reinterpret_cast<Storage*>(first + row * step); }
    __device__ State get(int row) const { return Element::widen(bits(row)); }
    __device__ void put(int row, State x) const { bits(row) = Element::narrow(x); }
    __device__ void move(int rows) { first += rows * step; }
    __device__ void move_to(int stage) { first += stage; }
};

// Calls visit(left) in each turn. `left` are the rows to come from the tile on that is scanned in that turn. In the turns
// before the first tile, tiles are copied alone; in the one after the last tile, its results are stored.
template <class Visit>
__device__ void for_turns(const Column& column, const Visit& visit) {
#pragma unroll 1
    for (i64 left = column.time + i64(STAGES - 1) * column.times; left > -column.times; left -= column.times) {
        visit(left);
        __syncthreads();
    }
}
__device__ inline int stage_after(int stage) { return stage < (STAGES - 1) * STAGE ? stage + STAGE : 0; }

__device__ inline void load_tiles(const Column& column, const Plane (&of)[INPUTS]) {
    Input gates(column, of[0], 0), tokens(column, of[1], 1);
#if BACKWARD
    Input states(column, of[2], 2);
#endif
    int stage = 0;
    for_turns(column, [&](i64 left) {
        const i64 to_come = left - i64(STAGES - 1) * column.times;
        const bool inner = to_come < column.time && to_come > column.times + PIECE;
        if (to_come > 0) {
            const int count = column.count(to_come);
            gates.fetch(column, stage, count, inner), tokens.fetch(column, stage, count, inner);
#if BACKWARD
            // That of the walk's last row is not among the states.
            if (of[2].first) states.fetch(column, stage, column.count(to_come - 1), inner);
#endif
        }
        commit_copies();
        stage = stage_after(stage);
        wait_for_copies<STAGES - 2>();
    });
}

__device__ inline void store_tiles(const Column& column, const Plane (&to)[RESULTS]) {
    Output first(column, to[0], 0);
#if BACKWARD
    Output second(column, to[1], 1);
#endif
    int stage = 0;
    for_turns(column, [&](i64 left) {
        if (left + column.times > column.time) return;
        const int count = column.count(left + column.times);
        if (to[0].first) first.leave(column, stage, count);
#if BACKWARD
        if (to[1].first) second.leave(column, stage, count);
#endif
        stage = RESULTS_STAGE - stage;
    });
}

// States of batches × channels, of which this thread reads and writes one; null if there are none.
struct States {
    State* own;

    __device__ States(const State* states, i64 by_batch, i64 by_channel, const Column& column)
        : own(states && column.scans() ? const_cast<State*>(states) + column.batch * by_batch +
                                             (column.begin + i64(threadIdx.x)) * by_channel
                                       : nullptr) {}
    __device__ State read() const { return own ? *own : State(0); }
    // Each channel's state is written by the column that it belongs to.
    __device__ void write(const Column& column, State x) const {
        if (own && (column.leftmost || threadIdx.x >= OVERLAP)) *own = x;
    }
};

// A thread's channel, from tile to tile.
struct Scan {
    Cells from[INPUTS], to[RESULTS];
    State x;  // forward the state, backward the gradient that reaches it
#if BACKWARD
    State initial;  // before all of time

    // So many rows of a tile. FIRST: the first time step, whose state before it is the initial one.
    template <int ROWS, bool FIRST = false>
    __device__ void scan_rows(Cells (&from)[INPUTS], Cells (&to)[RESULTS]) {
        State gate[ROWS], grad[ROWS], earlier[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            gate[k] = from[0].get(k), grad[k] = from[1].get(k), earlier[k] = FIRST ? initial : from[2].get(k);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const auto gradients = BackwardStep::gradients(gate[k], grad[k], earlier[k], x);
            to[0].put(k, gradients.gate), to[1].put(k, gradients.token), x = gradients.earlier;
        }
        move(from, to, ROWS);
    }
#else
    template <int ROWS>
    __device__ void scan_rows(Cells (&from)[INPUTS], Cells (&to)[RESULTS]) {
        State gate[ROWS], token[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) gate[k] = from[0].get(k), token[k] = from[1].get(k);
#pragma unroll
        for (int k = 0; k < ROWS; k++) x = ForwardStep::map(gate[k], token[k])(x), to[0].put(k, x);
        move(from, to, ROWS);
    }
#endif
    __device__ static void move(Cells (&from)[INPUTS], Cells (&to)[RESULTS], int rows) {
#pragma unroll
        for (Cells& cells : from) cells.move(rows);
#pragma unroll
        for (Cells& cells : to) cells.move(rows);
    }
    __device__ void scan_tile(int stage, int results, int count, bool is_last) {
        Cells in[INPUTS], out[RESULTS];
#pragma unroll
        for (int i = 0; i < INPUTS; i++) in[i] = from[i], in[i].move_to(stage);
#pragma unroll
        for (int i = 0; i < RESULTS; i++) out[i] = to[i], out[i].move_to(results);
        count -= BACKWARD && is_last;
#pragma unroll 1
        for (; count >= UNROLL; count -= UNROLL) scan_rows<UNROLL>(in, out);
#pragma unroll 1
        for (; count > 0; count--) scan_rows<1>(in, out);
#if BACKWARD
        if (is_last) scan_rows<1, true>(in, out);
#endif
    }
    __device__ void scan_tiles(const Column& column) {
        int stage = 0, results = 0;
        for_turns(column, [&](i64 left) {
            if (left > column.time || left <= 0) return;
            if (column.scans()) scan_tile(stage, results, column.count(left), left <= column.times);
            stage = stage_after(stage), results = RESULTS_STAGE - results;
        });
    }
};

// Load, scan or store, whichever this thread is for. `before` and `after`: of the walk. `initial`: before all of time.
__device__ inline void pass_over(const Column& column, const Plane (&from)[INPUTS], const Plane (&to)[RESULTS],
                                 const States& before, const States& after, const States& initial) {
    if (threadIdx.x >= SCANNERS + COPIERS) return store_tiles(column, to);
    if (threadIdx.x >= SCANNERS) return load_tiles(column, from);
#if BACKWARD
    Scan scan{{Cells(column, Input(column, from[0], 0)), Cells(column, Input(column, from[1], 1)),
               Cells(column, Input(column, from[2], 2))},
              {Cells(column, Output(column, to[0], 0)), Cells(column, Output(column, to[1], 1))},
              before.read(),
              initial.read()};
#else
    Scan scan{{Cells(column, Input(column, from[0], 0)), Cells(column, Input(column, from[1], 1))},
              {Cells(column, Output(column, to[0], 0))},
              before.read()};
#endif
    scan.scan_tiles(column);
    after.write(column, scan.x);
}
