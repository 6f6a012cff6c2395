// Channels contiguous: what the forward and the backward kernel share.
//
// The build pins VECTOR and DEPTH. 2^lane_bits lanes of a warp, a group, hold VECTOR channels each, side by side, and go through
// `steps` steps of time:
//
//                    channels ->   lanes × VECTOR
//      time   group 0              | steps rows, one after the other |
//       |     group 1              | steps rows                      |
//       v     …                    a CTA has THREADS / lanes groups of the same channels
//
// The last inputs of a channel stay in registers, so a row is read once, but for the rows before a group's first: those
// another group has read, too. DEPTH rows of a tensor are under way at any time.
//
// A lane's channels are VECTOR neighbours where rows consist of whole chunks on their boundaries, as always where ALIGNED.
// Otherwise they are `lanes` apart, so that the lanes together still read neighbours.
#pragma once
#include "conv.cuh"

// Loops over time are unrolled where that lets registers change their names in place of their contents.
enum : int { UNROLLED = ALIGNED ? 8 : 1 };

// What this thread's group has.
struct Tile {
    i64 batch, piece;     // of batches * pieces, a piece being what a CTA has of time
    i64 channel, stride;  // its first, and what is between two of them
    i64 channels;
    i64 first, end;       // its steps
    int lanes, slot;      // the group's number in the CTA
    bool chunks;

    __device__ Tile(i64 channels, i64 time, i64 lane_bits, i64 steps, i64 pieces, i64 flags)
        : channels(channels), lanes(1 << lane_bits), slot(threadIdx.x >> lane_bits) {
        const i64 across = (channels + lanes * VECTOR - 1) / (lanes * VECTOR);
        i64 column;
        const i64 rest = divide(blockIdx.x, across, column);
        batch = divide(rest, pieces, piece);
        chunks = ALIGNED || (flags & WHOLE_CHUNKS);
        const int lane = threadIdx.x & (lanes - 1);
        stride = chunks ? 1 : lanes;
        channel = column * lanes * VECTOR + (chunks ? lane * VECTOR : lane);
        first = smaller((piece * (THREADS >> lane_bits) + slot) * steps, time);
        end = smaller(first + steps, time);
    }
    __device__ i64 at(int v) const { return channel + v * stride; }
    __device__ bool has(int v) const { return at(v) < channels; }
    __device__ bool any() const { return first < end && channel < channels; }

    // This thread's channels of a row that starts at `row`; zeros where it is not `wanted` or has none.
    __device__ Chunk<Element, VECTOR> load(const Storage* row, bool wanted) const {
        Chunk<Element, VECTOR> chunk;
#pragma unroll
        for (int w = 0; w < chunk.WORDS; w++) chunk.word[w] = 0;
        if (!wanted) return chunk;
        if (chunks) {
            if (channel < channels) chunk = get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(row + channel));
        } else if constexpr (!ALIGNED) {
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                if (has(v)) chunk.put(v, row[at(v)]);
        }
        return chunk;
    }
    __device__ void store(Storage* row, const float (&x)[VECTOR]) const {
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        if (chunks) {
            if (channel < channels) store_global(row + channel, words_of(chunk));
        } else if constexpr (!ALIGNED) {
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                if (has(v)) row[at(v)] = chunk.bits(v);
        }
    }
};

// The filters of a thread's channels, and the inputs up to the current step.
struct Channels {
    float tap[TAPS][VECTOR], bias[VECTOR];
    float x[TAPS][VECTOR];  // x[j] is j steps back

    __device__ void load(const Tile& tile, const void* weight, const void* biases, i64 width, i64 flags) {
        Filter filter;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            if (tile.has(v)) {
                filter.load(weight, biases, tile.at(v), width, flags);
            } else {
#pragma unroll
                for (int j = 0; j < TAPS; j++) filter.tap[j] = 0;
                filter.bias = 0;
            }
#pragma unroll
            for (int j = 0; j < TAPS; j++) tap[j][v] = filter.tap[j];
            bias[v] = filter.bias;
        }
    }

    // Begin a run after what its state holds; `states` is the batch's or the sequence's first line, or null.
    __device__ void begin(const Tile& tile, const Storage* states, i64 width) {
#pragma unroll
        for (int j = 0; j < TAPS; j++)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                x[j][v] = 0;
                if (states && j < width - 1 && tile.has(v))
                    x[j][v] = Element::widen(states[tile.at(v) * (width - 1) + width - 2 - j]);
            }
    }
    __device__ void push(const Chunk<Element, VECTOR>& chunk) {
#pragma unroll
        for (int j = TAPS - 1; j > 0; j--)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) x[j][v] = x[j - 1][v];
#pragma unroll
        for (int v = 0; v < VECTOR; v++) x[0][v] = chunk.get(v);
    }
    // Before the activation.
    __device__ void convolve(float (&sum)[VECTOR], i64 width) const {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sum[v] = bias[v];
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) {
#pragma unroll
                for (int v = 0; v < VECTOR; v++) sum[v] = __fmaf_rn(tap[j][v], x[j][v], sum[v]);
            }
    }
};

// The states that belong to a run: one line of width - 1 for each channel. Null if it has none.
template <class T>
__device__ T* states_of(T* states, i64 number, i64 channels, i64 width) {
    return states && number >= 0 ? states + number * channels * (width - 1) : nullptr;
}

// Rows of a tensor, DEPTH of them under way.
struct Stream {
    const Storage* next;  // the row that is loaded next
    i64 to_next, left;    // and how many there are from it on
    Chunk<Element, VECTOR> ring[DEPTH];

    __device__ Stream(const Tile& tile, const Storage* batch, i64 by_time, i64 first, i64 end)
        : next(batch + first * by_time), to_next(by_time), left(end - first) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) ring[i] = fetch(tile);
    }
    __device__ Chunk<Element, VECTOR> fetch(const Tile& tile) {
        const Chunk<Element, VECTOR> chunk = tile.load(next, left > 0);
        next += to_next, left--;
        return chunk;
    }
    __device__ Chunk<Element, VECTOR> pop(const Tile& tile) {
        const Chunk<Element, VECTOR> chunk = ring[0];
#pragma unroll
        for (int i = 0; i + 1 < DEPTH; i++) ring[i] = ring[i + 1];
        ring[DEPTH - 1] = fetch(tile);
        return chunk;
    }
};
