// Rows that start at any address, in tiles of contiguous channels: where a CTA's tile lies, and how it is copied. The tile picture is in
// scalar_columns.cuh.
#pragma once
// From capability 12.0 on, the shared memory of an SM holds fewer than BLOCKS CTAs, so registers need not be limited for them.
#if __CUDA_ARCH__ >= 1200
#undef BLOCKS
#define BLOCKS 1
#endif
enum : int { THREADS = 32 * WARPS };
#include "../common/bulk_copy.cuh"
#include "../common/compiler.cuh"
#include "../common/copy.cuh"
#include "../common/shared_memory.cuh"
#include "../common/tile_state.cuh"
#include "../common/workspace_init.cuh"
#include "../linear_scan/step.cuh"
// Whether a tile without gaps between its rows moves in one bulk copy. Only in builds for sm_90: with this code the archives of other
// architectures would exceed their size limits.
enum : bool { BULK = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000 };
enum : int {
    PIECE = 16,
    ITEM = sizeof(Storage),
    AREA = THREADS * STEPS * ITEM // bytes of the tile of one tensor (scalar.py)
};

template <class T>
__device__ inline T smaller(T a, T b) { return a < b ? a : b; }

// What the launch says of tiles (scalar.py), in bits of `flags`.
struct TileShape {
    const int across, steps;    // channels, and rows of a thread
    const bool joined, dense;   // whether a column is all batches; whether the rows of a tile have no gaps between them

    __device__ explicit TileShape(i64 flags)
        : across(int(flags >> 2) & 0x3ff), steps(int(flags >> 12) & 0xff), joined(flags >> 20 & 1), dense(flags >> 21 & 1) {}
    // Pieces of the workspace of an outer index.
    __device__ static i64 pieces(i64 flags) { return flags >> 23; }
    // Bytes of the maps that the first CTA zeroes, which then has no tile; 0 if the workspace is zeroed before the launch.
    __device__ static int maps(i64 flags) { return flags >> 22 & 1 ? int(pieces(flags)) * PIECE - WorkspaceInit::HEAD : 0; }
};

// Opens when copies in bulk are there.
__device__ inline u64* bulk_barrier() {
    __shared__ u64 barrier;
    return &barrier;
}
// The workspace of the CTA's outer index.
__device__ inline unsigned* own_workspace(void* workspace, i64 flags) {
    return workspace ? static_cast<unsigned*>(workspace) + blockIdx.y * TileShape::pieces(flags) * (PIECE / 4) : nullptr;
}

// A CTA's tile, and in it a thread's channel and rows. A column has fewer than 2^31 rows.
struct Position : TileShape {
    const bool against;
    const i64* const offsets;         // of packed sequences, or null
    const unsigned period, scans;     // of a column: rows of a scan where none are packed, and how many scans there are
    unsigned columns, column, index;  // how many columns there are, the tile's, and its number along the column
    int slots, lane, slot;
    unsigned batch, channel;           // of a column: the batch, or the first one; its first channel
    int rows, channels;                // of the tile
    unsigned all, begin, first;        // rows of the column and before the tile; the tile's first in memory
    int own;                           // rows of the thread's channel, 0 if it has none

    __device__ Position(i64 all_batches, i64 all_channels, i64 time, bool against, const i64* offsets,
                        i64 sequences, i64 flags)
        : TileShape(flags), against(against), offsets(sequences ? offsets : nullptr), period(unsigned(time)),
          scans(unsigned(sequences ? sequences : joined ? all_batches : 1)) {
        const unsigned batches = unsigned(all_batches), wide = unsigned(all_channels), columns_across = (wide + across - 1) / across;
        columns = (joined ? 1 : batches) * columns_across, all = joined ? batches * period : period;
        __shared__ unsigned drawn[3];
        if (threadIdx.x == 0) {
            if (BULK) init_bulk_barrier(bulk_barrier());
            const unsigned tile = blockIdx.x - (maps(flags) > 0);
            drawn[0] = tile / columns, drawn[1] = tile % columns, drawn[2] = drawn[1] / columns_across;
        }
        slots = int(unsigned(THREADS) / unsigned(across)), slot = int(threadIdx.x / unsigned(across));
        lane = int(threadIdx.x) - slot * across;
        __syncthreads();
        index = drawn[0], column = drawn[1], batch = drawn[2];
        channel = (column - batch * columns_across) * across;
        channels = smaller(int(wide - channel), across);
        begin = index * times();
        rows = int(smaller(all - begin, unsigned(times())));
        first = against ? all - begin - rows : begin;
        own = slot < slots && lane < channels && rows > slot * steps ? smaller(rows - slot * steps, steps) : 0;
    }
    __device__ int times() const { return slots * steps; }
    // Where the states of a scan of the column lie, by its number in order.
    __device__ i64 state(unsigned number, i64 by_outer, i64 by_batch, i64 by_channel, i64 by_sequence) const {
        const unsigned of = against ? scans - 1 - number : number;
        return blockIdx.y * by_outer + batch * by_batch + (channel + lane) * by_channel + of * (joined ? by_batch : by_sequence);
    }
    // The row of the column with which a scan begins; for `scans`, the row after the last one's last.
    __device__ unsigned begin_of(unsigned number) const {
        if (!offsets) return number * period;
        const unsigned offset = unsigned(offsets[against ? scans - number : number]);
        return against ? all - offset : offset;
    }
};

// A thread's scan, from one to the next. Whatever the offsets are, its number is one of those there are, and the last scan has all rows
// that follow.
struct Scan {
    unsigned number = 0, begin, next;  // rows of the column: its first, and the next scan's

    __device__ Scan(const Position& at, unsigned row) {
        if (at.offsets) {
#pragma unroll 1
            for (unsigned end = at.scans; end - number > 1;) {
                const unsigned middle = (number + end) / 2;
                if (at.begin_of(middle) <= row) number = middle;
                else end = middle;
            }
        } else if (at.joined) {
            number = row / at.period;
        }
        begin = at.begin_of(number);
        find_next(at);
    }
    __device__ void find_next(const Position& at) { next = number + 1 < at.scans ? at.begin_of(number + 1) : at.all; }
    __device__ void advance(const Position& at) { number++, begin = next, find_next(at); }
};

// Rows of one tensor: the tile's, and others before or after.
struct Rows {
    char* tile;   // the tile's first row
    i64 apart;    // bytes from row to row
    bool shared;  // whether all channels have one element

    __device__ Rows(const Storage* tensor, i64 by_outer, i64 by_batch, i64 by_time, const Position& at, i64 by_channel = 1)
        : tile(reinterpret_cast<char*>(
              const_cast<Storage*>(tensor) +
              (blockIdx.y * by_outer + at.batch * by_batch + at.channel * by_channel + i64(at.first) * by_time))),
          apart(by_time * i64(ITEM)),
          shared(by_channel == 0 && at.channels > 1) {}
    __device__ char* at(int row) const { return tile + row * apart; }
};

// Where rows lie in shared memory, in all tiles alike: rows without gaps as in memory, others with so much between them that no two
// have a piece in common. A row has the offset to a piece that it has in memory. One more row has room before the tile, and one
// after it.
struct Layout {
    int pitch, first;  // bytes from row to row, and where the tile's first row lies

    // Of the tensor whose rows are to move in whole pieces. Others may, if they lie like it.
    __device__ Layout(const Rows& model, const Position& at) {
        const int least = at.dense ? at.across * ITEM : at.across * ITEM + 2 * (PIECE - ITEM);
        pitch = least + ((int(model.apart) - least) & (PIECE - 1));
        first = ((pitch + PIECE - 1) & ~(PIECE - 1)) + offset(model);
    }
    __device__ static int offset(const Rows& rows) { return int(reinterpret_cast<u64>(rows.tile)) & (PIECE - 1); }
    __device__ int of(int row) const { return first + row * pitch; }
    __device__ bool fits(const Rows& rows) const {
        return !rows.shared && ((offset(rows) - first) & (PIECE - 1)) == 0 && ((int(rows.apart) - pitch) & (PIECE - 1)) == 0;
    }
};

// A thread's row, from one to the next: the place of its element in the first tile.
struct Cursor {
    int place, step;

    __device__ Cursor(const Layout& layout, const Position& at) {
        const int k = at.slot * at.steps;
        place = layout.of(at.against ? at.rows - 1 - k : k) + at.lane * ITEM;
        step = at.against ? -layout.pitch : layout.pitch;
    }
    __device__ void advance() { place += step; }
    __device__ int at() const { return place; }
};
__device__ inline Storage& element(int tile, int at) { return *reinterpret_cast<Storage*>(dynamic_rows() + (tile * AREA + at)); }
__device__ inline State get(int tile, int at) { return Element::widen(element(tile, at)); }

// How the CTA shares the pieces of rows: `side_by_side` threads have pieces of one row, and `lines` rows are moved at once.
struct Movers {
    int side_by_side, lines, line, first;  // first: bytes from the row's first piece to the thread's first

    __device__ Movers(const Layout& layout, const Position& at) {
        const unsigned across = !BULK && at.dense ? unsigned(THREADS) : unsigned(layout.pitch + PIECE - 1) / PIECE;
        lines = int(THREADS / across), line = !BULK && at.dense ? 0 : int(threadIdx.x / across), side_by_side = int(across);
        first = (int(threadIdx.x) - line * side_by_side) * PIECE;
    }
};
// Calls piece(in memory, in shared memory, lead, bytes) for the pieces of the rows [begin, end) of a tile: of a piece, what lies from
// byte `lead` to byte `bytes` belongs to the rows.
template <class Piece>
__device__ inline void for_pieces(const Rows& rows, const Layout& layout, const Movers& movers, const Position& at, int tile,
                                  int begin, int end, const Piece& piece) {
    const bool is_one = !BULK && at.dense;  // whether all rows of the tile are copied as a single one
    const int bytes = (is_one ? end - begin : 1) * at.channels * ITEM, after = is_one ? begin + 1 : end;
    if (movers.line >= movers.lines) return;
#pragma unroll 1
    for (int row = begin + movers.line; row < after; row += movers.lines) {
        const int to = layout.of(row), lead = to & (PIECE - 1);
        char *const shared = dynamic_rows() + (tile * AREA + to - lead), *const memory = rows.at(row) - lead;
#pragma unroll 1
        for (int c = movers.first; c < lead + bytes; c += movers.side_by_side * PIECE)
            piece(memory + c, shared + c, c < lead ? lead - c : 0, smaller(lead + bytes - c, int(PIECE)));
    }
}
// Calls visit(in memory, in shared memory) for the elements of the rows [begin, end).
template <class Visit>
__device__ inline void for_elements(const Rows& rows, const Layout& layout, const Position& at, int tile, int begin, int end,
                                    const Visit& visit) {
    if (at.lane >= at.channels || at.slot >= at.slots) return;
#pragma unroll 1
    for (int row = begin + at.slot; row < end; row += at.slots)
        visit(*(reinterpret_cast<Storage*>(rows.at(row)) + (rows.shared ? 0 : at.lane)),
              element(tile, layout.of(row) + at.lane * ITEM));
}
// The rows of a tile without gaps, from byte `begin` of shared memory to byte `end`. Whole pieces move in one copy, which a single
// thread asks for.
struct Span {
    int begin, end;
    char* memory;  // of byte 0

    __device__ Span(const Rows& rows, const Layout& layout, const Position& at, int first, int last)
        : begin(layout.of(first)), end(begin + (last - first) * at.channels * ITEM), memory(rows.at(first) - begin) {}
    __device__ void copy_in(int tile) const {
        if (threadIdx.x > 0) return;
        char* const shared = dynamic_rows() + tile * AREA;
        const int from = begin & -PIECE, to = end & -PIECE;
        if (from < to) copy_bulk(shared + from, memory + from, to - from, bulk_barrier());
        if (to < end) copy_async_first<false>(shared + to, memory + to, end - to, true);
    }
    __device__ void copy_out(int tile) const {
        const char* const shared = dynamic_rows() + tile * AREA;
        const int from = smaller((begin + PIECE - 1) & -PIECE, end), to = from < end ? end & -PIECE : end;
        if (threadIdx.x == 0 && from < to) store_bulk(memory + from, shared + from, to - from);
        const int own = int(threadIdx.x) * ITEM, tail = to > from ? to : from;
        if (begin + own < from) move(begin + own, shared);
        if (tail + own < end) move(tail + own, shared);
    }
    __device__ void move(int at, const char* shared) const {
        *reinterpret_cast<Storage*>(memory + at) = *reinterpret_cast<const Storage*>(shared + at);
    }
};
__device__ inline void copy_in(const Rows& rows, const Layout& layout, const Movers& movers, const Position& at, int tile,
                               int begin, int end) {
    if (BULK && at.dense && layout.fits(rows)) return Span(rows, layout, at, begin, end).copy_in(tile);
    if (layout.fits(rows))
        for_pieces(rows, layout, movers, at, tile, begin, end,
                   [](const char* from, char* to, int, int end) {
                       if (end == PIECE) copy_async<true>(to, from, true);
                       else copy_async_first<false>(to, from, end, true);
                   });
    else
        for_elements(rows, layout, at, tile, begin, end, [](const Storage& from, Storage& to) { to = from; });
}
// The CTA has written results to shared memory, and is to copy them out.
__device__ inline void meet_before_copies_out() {
    if (BULK) before_bulk_stores();
    __syncthreads();
}
__device__ inline void copy_out(const Rows& rows, const Layout& layout, const Movers& movers, const Position& at, int tile) {
    if (BULK && at.dense && layout.fits(rows)) return Span(rows, layout, at, 0, at.rows).copy_out(tile);
    if (layout.fits(rows))
        for_pieces(rows, layout, movers, at, tile, 0, at.rows, [](char* to, const char* from, int begin, int end) {
            if (begin == 0 && end == PIECE) return store_global(to, *reinterpret_cast<const uint4*>(from));
#pragma unroll 1
            for (int i = begin; i < end; i += ITEM)
                *reinterpret_cast<Storage*>(to + i) = *reinterpret_cast<const Storage*>(from + i);
        });
    else
        for_elements(rows, layout, at, tile, 0, at.rows, [](Storage& to, const Storage& from) { to = from; });
}
// Before the CTA ends.
__device__ inline void leave_copies_out() {
    if (BULK) wait_for_bulk_stores_read();
}
// Waits for the tile, and for the workspace that the first CTA zeroes.
__device__ inline void wait_for_tile(i64 flags, void* workspace) {
    commit_copies();
    if (BULK && threadIdx.x == 0) wait_for_bulk_copies(bulk_barrier());
    if (TileShape::maps(flags) && threadIdx.x == 0) WorkspaceInit(workspace, 0).await(gridDim.x - 1);
    wait_for_copies<0>();
    __syncthreads();
}
