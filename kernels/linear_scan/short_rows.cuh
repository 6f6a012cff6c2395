// Short rows of contiguous time that follow one another without gaps: what the forward and the backward kernel share.
//
// The build pins WARPS (per CTA), STEPS (of a thread, at most) and BLOCKS (CTAs per SM). A CTA has one tile, of whole rows:
//
//                 time in the order of the scan ->
//     slot 0      | lane 0: `steps` elements | lane 1 | …  `lanes` |
//     slot 1      | lane 0
//     …           THREADS / lanes rows
//
// The launch says how many lanes share a row, and how many steps a lane has. A tile has a multiple of 8 rows, so it starts on a
// 16-byte boundary, wherever its rows start. It is copied in and out as it lies in memory. A thread composes the affine maps of its
// steps, the lanes of a row scan these maps by shuffles, and each thread computes its results, which take the place of inputs in
// shared memory. No CTA waits for another. A row may have one gate for all steps, whose gradient the lanes of the row add up.
//
// Traffic: 12 bytes per element in float32 and 6 in 16 bits forward, 20 and 10 backward.
#pragma once
enum : int { THREADS = 32 * WARPS };
#include "../common/compiler.cuh"
#include "../common/global_memory.cuh"
#include "../common/shared_memory.cuh"
#include "../linear_scan/copy_hint.cuh"
#include "../linear_scan/step.cuh"

enum : int {
    PIECE = 16,
    ITEM = sizeof(Storage),
    AREA = THREADS * STEPS * ITEM,  // bytes of the tile of one tensor (short_rows.py)
    AT_ONCE = 4,                    // elements that are read before any is computed
};

// The CTA's rows, and of one of them this thread's steps.
struct Tile {
    const int time, lanes, lane, slot;
    i64 first_row;
    int bytes;        // of the rows that there are
    int own, order;   // this thread's steps, and the first one's number in the row
    int cell, apart;  // bytes to its first element, and from one to the next

    __device__ Tile(i64 rows, i64 time, bool turned, i64 flags)
        : time(int(time)),
          lanes(int(flags >> 2) & 0xff),
          lane(int(threadIdx.x) & (lanes - 1)),
          slot(int(threadIdx.x / unsigned(lanes))) {
        const int steps = int(flags >> 10), most = THREADS / lanes;
        first_row = i64(blockIdx.x) * most;
        const int count = rows - first_row < most ? int(rows - first_row) : most;
        bytes = count * int(time) * ITEM;
        order = lane * steps;
        const int left = slot < count ? int(time) - order : 0;
        own = left < 0 ? 0 : left < steps ? left : steps;
        cell = (slot * int(time) + (turned ? int(time) - 1 - order : order)) * ITEM, apart = turned ? -ITEM : ITEM;
    }
    __device__ i64 row() const { return first_row + slot; }
    __device__ bool ends() const { return own > 0 && order + own == time; }
    // Of a tensor of rows.
    __device__ char* start(const Storage* tensor) const {
        return reinterpret_cast<char*>(const_cast<Storage*>(tensor + first_row * time));
    }
};

__device__ inline void copy_in(const Tile& tile, int input, const Storage* tensor) {
    const char* const from = tile.start(tensor);
    const int part = tile.bytes % PIECE, whole = tile.bytes - part;
    // By shuffles, so that no address of a copy has a part that the compiler knows to be uniform (elf.illegal_copies).
    const auto place = [&](int at) {
        return reinterpret_cast<char*>(from_lane(reinterpret_cast<u64>(dynamic_shared() + input * AREA + at), threadIdx.x % 32));
    };
    char *const to = place(0), *const end = place(whole);
#pragma unroll 1
    for (int at = threadIdx.x * PIECE; at < whole; at += THREADS * PIECE) copy_async(to + at, from + at, true);
    if (part && threadIdx.x == 0) copy_async_first(end, from + whole, part, true);
}
// Of a row that has one gate, write it to each of this thread's steps, so that there is no further code for it.
__device__ inline void fill_in(const Tile& tile, const Storage* gates, i64 channels, i64 by_batch, i64 by_channel) {
    if (!tile.own) return;
    const unsigned row = unsigned(tile.row()), batch = row / unsigned(channels);
    const Storage gate = gates[batch * by_batch + (row - batch * unsigned(channels)) * by_channel];
    char* cell = dynamic_shared() + tile.cell;
#pragma unroll 1
    for (int k = 0; k < tile.own; k++, cell += tile.apart) *reinterpret_cast<Storage*>(cell) = gate;
}
__device__ inline void copy_out(const Tile& tile, int input, const Storage* tensor) {
    char* const to = tile.start(tensor);
    const char* const from = dynamic_shared() + input * AREA;
    const int whole = tile.bytes / PIECE * PIECE;
#pragma unroll 1
    for (int at = threadIdx.x * PIECE; at < whole; at += THREADS * PIECE)
        store_global(to + at, *reinterpret_cast<const uint4*>(from + at));
    const int last = whole + threadIdx.x * ITEM;  // elements of a part of a piece
    if (last < tile.bytes) *reinterpret_cast<Storage*>(to + last) = *reinterpret_cast<const Storage*>(from + last);
}
__device__ inline void await_copies() {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
}

__device__ inline State element(const char* cell) { return Element::widen(*reinterpret_cast<const Storage*>(cell)); }
__device__ inline void put(char* cell, State x) { *reinterpret_cast<Storage*>(cell) = Element::narrow(x); }

// Calls pass.steps<N>(cell, left) for this thread's elements, N at once; `left`: elements of the row from the first of these on.
template <class Pass>
__device__ void for_own(const Tile& tile, Pass& pass) {
    char* cell = dynamic_shared() + tile.cell;
    int left = tile.time - tile.order;
    const int after = left - tile.own;
#pragma unroll 1
    for (; left - after >= AT_ONCE; left -= AT_ONCE, cell += AT_ONCE * tile.apart) pass.template steps<AT_ONCE>(cell, left);
#pragma unroll 1
    for (; left > after; left--, cell += tile.apart) pass.template steps<1>(cell, left);
}

// The first two inputs of N steps, the second of which lies AREA bytes after the first.
template <int N>
struct Inputs {
    State first[N], second[N];

    __device__ Inputs(const char* cell, int apart) {
#pragma unroll
        for (int k = 0; k < N; k++) first[k] = element(cell + k * apart), second[k] = element(cell + k * apart + AREA);
    }
};

// The map of a thread's steps.
template <class StepOf>
struct Composing {
    const Tile& tile;
    Affine map;

    template <int N>
    __device__ void steps(const char* cell, int) {
        const Inputs<N> in(cell, tile.apart);
#pragma unroll
        for (int k = 0; k < N; k++) map = compose(map, StepOf::map(in.first[k], in.second[k]));
    }
};

// The state that enters this thread's steps. `entering` is that before the row's first step, which any lane may ask for.
template <class StepOf>
__device__ State enter_steps(const Tile& tile, State entering) {
    if (tile.lanes == 1) return entering;
    Composing<StepOf> pass{tile};
    for_own(tile, pass);
    Affine map = pass.map;
#pragma unroll 1
    for (int distance = 1; distance < tile.lanes; distance *= 2) {
        const Affine lower = from_lower(map, distance);
        if (tile.lane >= distance) map = compose(lower, map);
    }
    const Affine before = from_lower(map, 1);
    return tile.lane == 0 ? entering : before(entering);
}
