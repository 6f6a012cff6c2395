// Rows with contiguous time: what the forward and the backward kernel share.
//
// The build pins WARPS (per row), ROWS (per CTA) and STEPS. A tile is the part of a row that its
// warps hold in registers at once:
//
//     order  0                                                              TILE
//            | warp 0                     | warp 1                     | …  |
//            | step 0      | step 1  | …  | step 0      | step 1  | …  |
//            | 32 lanes × VECTOR elements |
//
// Order runs along the walk, with time or against it; either way an aligned
// lane's chunk is 16 consecutive bytes. While a tile is computed, the next one is already loading.
//
// MISALIGNED: rows need not start or end on 16-byte boundaries, but lie at the same offset to them in all tensors. A walk
// then starts before its row, on such a boundary, at a negative order. What its chunks hold of other rows is replaced by
// the identity, and not written.
#pragma once
#include "../linear_scan/load_first.cuh"
#include "../linear_scan/sequences.cuh"

enum : int {
    VECTOR = ALIGNED || sizeof(Storage) > 4 ? 16 / sizeof(Storage) : 4,
    BLOCKS = LEAST_BLOCKS,
    WARP_TILE = STEPS * 32 * VECTOR,
    TILE = WARPS * WARP_TILE,
    THREADS = WARPS * ROWS * 32,
    LINE = 128 / sizeof(Storage),  // of the caches
};
static_assert(WARPS == 1 || ROWS == 1, "warps that share a row meet at a block-wide barrier");

struct Position {
    i64 row;  // of outer * batch * channels
    i64 outer, batch, channel;
    int warp;  // within the row
    int lane;

    __device__ Position(i64 batches, i64 channels)
        : row(i64(blockIdx.x) * ROWS + threadIdx.x / (32 * WARPS)),
          outer(0),
          batch(row / channels),
          channel(row % channels),
          warp(threadIdx.x / 32 % WARPS),
          lane(threadIdx.x % 32) {
        if constexpr (!ALIGNED) outer = batch / batches, batch %= batches;
    }

    // Order of this lane's chunk in a step of a tile.
    __device__ i64 order(i64 tile, int step) const {
        return tile + warp * WARP_TILE + (step * 32 + lane) * VECTOR;
    }

    // Whether a step of the warp lies past the row; of aligned rows, which tend to fill their tiles, nobody asks.
    __device__ bool past(i64 tile, int step, i64 time) const {
        return MISALIGNED && tile + warp * WARP_TILE + step * 32 * VECTOR >= time;
    }

    // Of this row in a tensor with these strides.
    __device__ i64 offset(i64 by_outer, i64 by_batch, i64 by_channel) const {
        return outer * by_outer + batch * by_batch + channel * by_channel;
    }
};

// A chunk in the order of a walk. TURNED says that memory has it in the opposite order.
template <class E, bool TURNED>
struct Steps {
    Chunk<E, VECTOR> chunk;

    __device__ typename E::State get(int i) const { return chunk.get(TURNED ? VECTOR - 1 - i : i); }

    __device__ void set(const typename E::State (&x)[VECTOR]) {
        typename E::State in_memory[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) in_memory[i] = x[TURNED ? VECTOR - 1 - i : i];
        chunk.set(in_memory);
    }
};

// The elements of a chunk, as they lie in memory, that are the row's own.
struct Own {
    int begin, end;

    // `first` is the place of the chunk's first element in the row.
    __device__ Own(i64 first, i64 time)
        : begin(first < 0 ? -int(first) : 0), end(time - first < VECTOR ? int(time - first) : VECTOR) {}
    __device__ bool all() const { return begin == 0 && end == VECTOR; }
    __device__ bool is_whole() const { return begin < VECTOR && end == VECTOR; }  // to its end
    __device__ bool is_cut() const { return begin < VECTOR && end > 0 && end < VECTOR; }
    __device__ bool has(int i) const { return begin <= i && i < end; }
};

// A row of a tensor along a walk. Aligned rows are read as they lie, and TURNED if the walk goes
// against time; the others are turned by their stride.
template <class E, bool TURNED>
struct Row {
    Line<E> along;
    i64 time;

    __device__ Row(const typename E::Storage* row, i64 stride, const Walk& walk)
        : along(ALIGNED ? line<E>(row, 1) : line<E>(row + walk.at(0) * stride, walk.step(stride))),
          time(walk.time) {}

    __device__ i64 begin(i64 order) const { return TURNED ? time - order - VECTOR : order; }

    // The steps [order, order + VECTOR).
    __device__ Steps<E, TURNED> load(i64 order, typename E::Storage outside) const {
        return {::load<VECTOR>(along, begin(order), time, outside)};
    }
    __device__ void store(i64 order, const Steps<E, TURNED>& steps) const {
        if constexpr (MISALIGNED) store_own(order, steps);
        else ::store(along, begin(order), time, steps.chunk);
    }

    // Of a misaligned row: what a chunk has of the row before comes with it, until `mend` replaces it, since looking at it
    // would wait for the load. Nothing past the row's end is read, which may be that of the tensor.
    __device__ Own own(i64 order) const { return {begin(order), time}; }
    __device__ void load_whole(i64 order, const Own& of, Steps<E, TURNED>& steps) const {
        load_line(steps.chunk.word, along.at(begin(order)), of.is_whole());
    }
    __device__ void load_end(i64 order, const Own& of, Steps<E, TURNED>& steps) const {
        load_first(steps.chunk.word, along.at(begin(order)), of.end * int(sizeof(Storage)));
    }
    __device__ void store_own(i64 order, const Steps<E, TURNED>& steps) const {
        const Own of = own(order);
        Storage* const to = along.at(begin(order));
        if (of.all()) return put_words(to, steps.chunk);
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (of.has(i)) to[i] = steps.chunk.bits(i);
    }
    __device__ static void mend(const Own& of, Steps<E, TURNED>& steps, typename E::Storage outside) {
        Chunk<E, VECTOR> padding{};
        padding.fill(outside);
#pragma unroll
        for (int w = 0; w < Chunk<E, VECTOR>::WORDS; w++) {
            unsigned kept = 0;
            if constexpr (sizeof(Storage) == 2)
                kept = (of.has(2 * w) ? 0xffffu : 0) | (of.has(2 * w + 1) ? 0xffff0000u : 0);
            else kept = of.has(w) ? ~0u : 0;
            steps.chunk.word[w] = (steps.chunk.word[w] & kept) | (padding.word[w] & ~kept);
        }
    }
    // Order of the first element of a walk over a misaligned row: on a boundary before it, or on a line, if that takes no
    // more tiles.
    __device__ i64 first() const {
        const u64 edge = reinterpret_cast<u64>(along.at(TURNED ? time : 0)) / sizeof(Storage);
        const int to_line = int((TURNED ? -edge : edge) % LINE), to_chunk = to_line % VECTOR;
        return -((time + to_line - 1) / TILE > (time + to_chunk - 1) / TILE ? to_chunk : to_line);
    }

    __device__ typename E::Storage bits(i64 order) const { return *along.at(TURNED ? time - 1 - order : order); }
    __device__ typename E::State get(i64 order) const {
        return E::widen(*along.at(TURNED ? time - 1 - order : order));
    }
};

// Room for the marks of a thread's chunks.
__device__ inline Places* own_places(int step) {
    if constexpr (ALIGNED) return nullptr;
    __shared__ Places places[ALIGNED ? 1 : STEPS * VECTOR * THREADS];
    return places + (threadIdx.x * STEPS + step) * VECTOR;
}

// The state that enters this warp's part of the tile. `carry` is the state that enters the tile
// and becomes the one that leaves it. Two buffers alternate, so that one barrier a tile is enough.
__device__ inline State enter_warp(Affine warp_total, int warp, int lane, int parity,
                                   RunningPrefix& carry) {
    if constexpr (WARPS == 1) {
        const State entering = carry.x;
        carry = warp_total(carry);
        return entering;
    } else {
        __shared__ Affine totals[2][WARPS];
        if (lane == 0) totals[parity][warp] = warp_total;
        __syncthreads();
        State entering = carry.x;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) entering = carry.x;
            carry = totals[parity][w](carry);
        }
        return entering;
    }
}
