// Channels contiguous: what the forward and the backward kernel share.
//
// The build pins VECTOR and DEPTH. 2^lane_bits lanes of a warp, a group, hold VECTOR channels each, side by side, and go
// through `steps` steps of time:
//
//                    channels ->   lanes × VECTOR
//      time   group 0              | steps rows, one after the other |
//       |     group 1              | steps rows                      |
//       v     …                    a CTA has THREADS / lanes groups of the same channels
//
// The last inputs of a channel stay in registers, so a row is read once, but for the rows around a group's: those another
// group has read, too. DEPTH rows of a tensor are under way at any time. ALIGNED kernels have whole chunks of VECTOR
// elements on their boundaries; the others have one channel a lane.
#pragma once
#include "conv.cuh"

// Loops over time are unrolled where that lets registers change their names in place of their contents.
enum : int { UNROLLED = ALIGNED ? DEPTH : 1 };

// What this thread's group has.
struct Tile {
    i64 batch, piece;       // of batches * pieces, a piece being what a CTA has of time
    i64 channel;            // its first
    int first, end;         // its steps
    int lane, lanes, slot;  // slot: the group's number in the CTA
    bool any;               // whether there is a step

    __device__ Tile(i64 channels, i64 time, i64 lane_bits, i64 steps, i64 pieces)
        : lane(threadIdx.x & ((1 << lane_bits) - 1)), lanes(1 << lane_bits), slot(threadIdx.x >> lane_bits) {
        const i64 across = (channels + lanes * VECTOR - 1) / (lanes * VECTOR);
        i64 column;
        const i64 rest = divide(blockIdx.x, across, column);
        batch = divide(rest, pieces, piece);
        channel = (column * lanes + lane) * VECTOR;
        first = int(smaller((piece * (THREADS >> lane_bits) + slot) * steps, time));
        end = channel < channels ? int(smaller(first + steps, time)) : first;
        any = first < end;
    }
};

using Row = Chunk<Element, VECTOR>;

__device__ inline Row load_row(const Storage* from) {
    if constexpr (ALIGNED) return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(from));
    Row row;
    row.word[0] = *from;
    return row;
}
__device__ inline void store_row(Storage* to, const float (&x)[VECTOR]) {
    if constexpr (ALIGNED) {
        Row row;
        row.set(x);
        store_global(to, words_of(row));
    } else {
        *to = Element::narrow(x[0]);
    }
}

// The filters of a thread's channels.
struct Filters {
    Filter of[VECTOR];

    // All threads of the CTA come here. Its groups have the same channels, whose weights are read side by side, once.
    __device__ Filters(const Tile& tile, const void* weight, const void* bias, i64 channels, int width, i64 flags) {
        struct alignas(16) Weights {
            float of[TAPS + 1][32 * VECTOR];  // the biases last
        };
        __shared__ Weights shared;
        const bool wide = flags & WIDE_WEIGHTS;
        const i64 first = tile.channel - tile.lane * VECTOR, size = wide ? sizeof(float) : sizeof(Storage);
        const int count = int(smaller(channels - first, tile.lanes * VECTOR));
        const char* const weights = static_cast<const char*>(weight) + first * width * size;
        const char* const biases = static_cast<const char*>(bias) + first * size;
#pragma unroll 4
        for (int i = threadIdx.x; i < count * width; i += THREADS)
            shared.of[width - 1 - i % width][i / width] = read_weight(weights, i, wide);
#pragma unroll 2
        for (int i = threadIdx.x; i < count; i += THREADS) shared.of[TAPS][i] = bias ? read_weight(biases, i, wide) : 0.f;
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            const int c = tile.lane * VECTOR + v;
#pragma unroll
            for (int j = 0; j < TAPS; j++) of[v].tap[j] = j < width ? shared.of[j][c] : 0.f;
            of[v].bias = shared.of[TAPS][c];
        }
    }
};

// x[j] is the input j steps back.
struct Window {
    float x[TAPS][VECTOR];

    __device__ void set(int j, const Row& row) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) x[j][v] = row.get(v);
    }
    // Makes of the rows around a run's begin what the run has there: zeros, or the inputs of its state, of which `states` is
    // the line of the thread's first channel.
    __device__ void enter(const Place& place, const Storage* states, int width) {
#pragma unroll
        for (int j = 1; j < TAPS; j++)
            if (j > place.before) {
#pragma unroll
                for (int v = 0; v < VECTOR; v++) {
                    x[j][v] = 0;
                    if (states && j < width) x[j][v] = Element::widen(states[(v + 1) * (width - 1) + place.before - j]);
                }
            }
    }
    // Before the activation.
    __device__ void convolve(float (&sum)[VECTOR], const Filters& filters, int width) const {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sum[v] = filters.of[v].bias;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) {
#pragma unroll
                for (int v = 0; v < VECTOR; v++) sum[v] = __fmaf_rn(filters.of[v].tap[j], x[j][v], sum[v]);
            }
    }
};

// The thread's elements of rows that follow each other, forwards or backwards in time, DEPTH of them under way; zeros after
// `left` rows.
struct Stream {
    const Storage* next;
    i64 by;  // to the row after
    int left;
    Row ring[DEPTH];

    __device__ Stream(const Storage* first, i64 by, int left) : next(first), by(by), left(left) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) ring[i] = fetch();
    }
    __device__ Row fetch() {
        Row row;
        row.fill(0);
        if (left > 0) row = load_row(next);
        next += by, left--;
        return row;
    }
    __device__ Row pop() {
        const Row row = ring[0];
#pragma unroll
        for (int i = 0; i + 1 < DEPTH; i++) ring[i] = ring[i + 1];
        ring[DEPTH - 1] = fetch();
        return row;
    }
};

// Of a row that may be before the first step.
__device__ inline Row row_at(const Storage* step_zero, i64 by_time, int t) {
    Row row;
    row.fill(0);
    if (t >= 0) row = load_row(step_zero + t * by_time);
    return row;
}
