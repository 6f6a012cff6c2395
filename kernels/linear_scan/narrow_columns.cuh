// At most 32 contiguous channels of float32 whose rows start at any address and follow one another without gaps: what the
// forward and the backward kernel share.
//
// A CTA owns one batch, whose channels * time elements are one stretch of memory. A thread scans one channel from the first
// time step to the last, so no affine maps are composed; other warps copy. A tile is as many whole rows (time steps) as AREA
// bytes hold. In shared memory it has the same offset to 16 bytes as in global memory, in each tensor its own, so that nearly
// all of it is moved 16 bytes at a time:
//
//     aligned 16 bytes   |       |       |       |       |       |
//     rows of a tile         [ row 0 | row 1 | ... | last row ]
//     moved as            wwww 16 B    16 B    16 B    16 B wwww      w: the words of the ends that the tile has
//
// In each turn, between two barriers,
//
//     SCANNERS    threads scan tile n row by row, from shared memory to shared memory
//     COPIERS     threads start to copy tile n + STAGES - 1 to where tile n - 1 was, and wait for tile n + 1
//     COPIERS     threads store the results of tile n - 1
//
// BACKWARD comes from the kernel that includes this file. The build pins WARPS, STAGES, AREA (bytes that a tile of one tensor
// may have) and BLOCKS (CTAs per SM).
//
// Traffic: 12 bytes per element forward, 20 backward.
#pragma once
enum : int { THREADS = 32 * WARPS };
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
    SCANNERS = 32,
    COPIERS = (THREADS - SCANNERS) / 2,
    ITEM = sizeof(Storage),
    PIECE = 16,
    COPIES = AREA / (PIECE * COPIERS),  // pieces of a tile of one tensor for each thread that copies
    UNROLL = 8,  // rows that a thread scans at once. Whole tiles have a multiple: 32 bytes, so all have one offset to 16 bytes
};
static_assert(STAGES > 1 && ITEM == 4 && COPIES * PIECE * COPIERS == AREA);

// A CTA's way through the time steps of its batch.
struct Walk {
    i64 time;
    int pitch, times;  // bytes of a row; rows of a tile
    bool against;      // time

    __device__ Walk(i64 channels, i64 time, bool against)
        : time(time), pitch(int(channels) * ITEM), times((AREA - PIECE) / pitch / UNROLL * UNROLL), against(against) {}
    // Of so many rows to come, those in the tile.
    __device__ int count(i64 left) const { return left <= 0 ? 0 : left < times ? int(left) : times; }
};

// One tensor, and this thread's pieces of its tiles, in the order of the walk. `area`: where its tiles are in the shared memory
// of a stage. `later`: by how many rows the tensor is read later than others.
struct Stream {
    u64 tile;     // address of the tile at hand
    i64 by_tile;  // bytes from tile to tile
    int shared;   // where the tile is in the first stage
    int first;    // bytes from the start of the tile to the thread's first piece: below 0 where the tile begins within it

    __device__ Stream(const Walk& walk, const Storage* batch, int area, int later = 0) {
        const i64 row = walk.against ? walk.time - walk.times - later : later;
        tile = reinterpret_cast<u64>(batch) + u64(row * walk.pitch);
        by_tile = (walk.against ? -walk.times : walk.times) * walk.pitch;
        const int off = int(tile) & (PIECE - 1);
        shared = area + off;
        first = (int(threadIdx.x) - SCANNERS) % COPIERS * PIECE - off;
    }
    // This thread's part of a tile of `count` rows: piece(global, shared, wanted) moves 16 bytes if they are all the tile's, and
    // word(global, shared, wanted) moves those of the tile's ends.
    template <class Piece, class Word>
    __device__ void for_pieces(const Walk& walk, int stage, int count, const Piece& piece, const Word& word) {
        const int begin = walk.against ? (walk.times - count) * walk.pitch : 0, end = begin + count * walk.pitch;
        char* const first_shared = dynamic_rows() + (stage + shared + first);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int at = first + i * COPIERS * PIECE;
            char* const own = first_shared + i * COPIERS * PIECE;
            const bool whole = at >= begin && at + PIECE <= end;
            piece(tile + at, own, whole);
            if (whole || at >= end || at + PIECE <= begin) continue;
#pragma unroll
            for (int k = 0; k < PIECE; k += ITEM) word(tile + at + k, own + k, at + k >= begin && at + k < end);
        }
        tile += by_tile;
    }
    __device__ void copy_in(const Walk& walk, int stage, int count) {
        for_pieces(
            walk, stage, count,
            [](u64 from, char* to, bool wanted) { copy_async<false>(to, reinterpret_cast<const void*>(from), wanted); },
            [](u64 from, char* to, bool wanted) { copy_word_async(to, reinterpret_cast<const void*>(from), wanted); });
    }
    __device__ void copy_out(const Walk& walk, int stage, int count) {
        for_pieces(
            walk, stage, count,
            [](u64 to, const char* from, bool wanted) {
                if (wanted) store_global(reinterpret_cast<void*>(to), *reinterpret_cast<const uint4*>(from));
            },
            [](u64 to, const char* from, bool wanted) {
                if (wanted) store_global(reinterpret_cast<void*>(to), *reinterpret_cast<const unsigned*>(from));
            });
    }
};
// That of states is read a row later, as a row takes the state before it.
__device__ inline Stream input(const Walk& walk, const Storage* const (&from)[INPUTS], int number) {
    return {walk, from[number], number * AREA, number == 2};
}
__device__ inline Stream result(const Walk& walk, Storage* const (&to)[RESULTS], int number) {
    return {walk, to[number], RESULTS_FIRST + number * AREA};
}

// A thread's channel in a tile: an element for each row.
struct Cells {
    char* first;
    int step;  // bytes from row to row of the walk

    Cells() = default;
    __device__ Cells(const Walk& walk, const Stream& stream)
        : first(dynamic_rows() + stream.shared + int(threadIdx.x) * ITEM +
                (walk.against ? walk.times - 1 : 0) * walk.pitch),
          step(walk.against ? -walk.pitch : walk.pitch) {}
    __device__ Storage& bits(int row) const { return *reinterpret_cast<Storage*>(first + row * step); }
    __device__ State get(int row) const { return Element::widen(bits(row)); }
    __device__ void put(int row, State x) const { bits(row) = Element::narrow(x); }
    __device__ void move(int rows) { first += rows * step; }
    __device__ void move_to(int stage) { first += stage; }
};

// Calls visit(left) in each turn. `left` are the rows to come from the tile on that is scanned in that turn. In the turns
// before the first tile, tiles are copied alone; in the one after the last tile, its results are stored.
template <class Visit>
__device__ void for_turns(const Walk& walk, const Visit& visit) {
#pragma unroll 1
    for (i64 left = walk.time + i64(STAGES - 1) * walk.times; left > -walk.times; left -= walk.times) {
        visit(left);
        __syncthreads();
    }
}
__device__ inline int stage_after(int stage) { return stage < (STAGES - 1) * STAGE ? stage + STAGE : 0; }

__device__ inline void load_tiles(const Walk& walk, const Storage* const (&from)[INPUTS]) {
    Stream gates = input(walk, from, 0), tokens = input(walk, from, 1);
#if BACKWARD
    Stream states = input(walk, from, 2);
#endif
    int stage = 0;
    for_turns(walk, [&](i64 left) {
        const i64 to_come = left - i64(STAGES - 1) * walk.times;
        if (to_come > 0) {
            const int count = walk.count(to_come);
            gates.copy_in(walk, stage, count), tokens.copy_in(walk, stage, count);
#if BACKWARD
            // That of the walk's last row is not among the states.
            if (from[2]) states.copy_in(walk, stage, walk.count(to_come - 1));
#endif
        }
        commit_copies();
        stage = stage_after(stage);
        wait_for_copies<STAGES - 2>();
    });
}

__device__ inline void store_tiles(const Walk& walk, Storage* const (&to)[RESULTS]) {
    Stream first = result(walk, to, 0);
#if BACKWARD
    Stream second = result(walk, to, 1);
#endif
    int stage = 0;
    for_turns(walk, [&](i64 left) {
        if (left + walk.times > walk.time) return;
        const int count = walk.count(left + walk.times);
        if (to[0]) first.copy_out(walk, stage, count);
#if BACKWARD
        if (to[1]) second.copy_out(walk, stage, count);
#endif
        stage = RESULTS_STAGE - stage;
    });
}

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
    __device__ void scan_tiles(const Walk& walk) {
        int stage = 0, results = 0;
        for_turns(walk, [&](i64 left) {
            if (left > walk.time || left <= 0) return;
            if (int(threadIdx.x) * ITEM < walk.pitch)
                scan_tile(stage, results, walk.count(left), left <= walk.times);
            stage = stage_after(stage), results = RESULTS_STAGE - results;
        });
    }
};

// Load, scan or store, whichever this thread is for. `before` and `after`: each channel's state before and after the walk, or
// null. `initial`: the state before all of time, or null.
__device__ inline void pass_over(const Walk& walk, const Storage* const (&from)[INPUTS], Storage* const (&to)[RESULTS],
                                 const State* before, State* after, const State* initial) {
    if (threadIdx.x >= SCANNERS + COPIERS) return store_tiles(walk, to);
    if (threadIdx.x >= SCANNERS) return load_tiles(walk, from);
    Scan scan;
#pragma unroll
    for (int i = 0; i < INPUTS; i++) scan.from[i] = Cells(walk, input(walk, from, i));
#pragma unroll
    for (int i = 0; i < RESULTS; i++) scan.to[i] = Cells(walk, result(walk, to, i));
    const bool has_channel = int(threadIdx.x) * ITEM < walk.pitch;
    scan.x = has_channel && before ? *before : State(0);
#if BACKWARD
    scan.initial = has_channel && initial ? *initial : State(0);
#endif
    scan.scan_tiles(walk);
    if (has_channel && after) *after = scan.x;
}
