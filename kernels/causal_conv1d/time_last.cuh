// Time contiguous: what the forward and the backward kernel share.
//
// A row is one channel of one batch. 2^lane_bits lanes of a warp, a group, share a piece of a row, and each has VECTOR
// steps of a tile:
//
//      row   | lane 0 | lane 1 | … | lane 0 | lane 1 | …      a piece: `steps` tiles of 2^lane_bits * VECTOR steps
//              tile 0                tile 1
//
// A row has `pieces` pieces, and group g has piece g mod pieces of row g / pieces. There is no barrier and no shared
// memory: a row of few elements occupies few lanes, and no thread waits for another's memory. What a lane needs of x before
// its own steps it reads itself, which the L1 cache has by then.
//
// ALIGNED kernels read 16 bytes at a time, VECTOR elements. Their chunks start at multiples of 16 bytes in memory, and not
// of VECTOR elements of the row; so a row's first and last chunk may be partly outside of it, and these are read by
// elements. Rows lie alike in all tensors. The other kernels have one step a lane, so that it does not matter where rows
// and runs begin.
#pragma once
#include "conv.cuh"

enum : int { VECTOR = ALIGNED ? 16 / SIZE : 1, SPAN = TAPS - 1 + VECTOR };

// What this thread's group has.
struct Piece {
    i64 row, batch, channel;
    i64 number;  // of the row's pieces
    int first;   // this lane's first step, which may be before the row
    int stride;  // from tile to tile
    int lane, lanes;
    bool there;

    // `x` is what has the strides.
    __device__ Piece(const Storage* x, i64 by_batch, i64 by_channel, i64 batches, i64 channels, i64 pieces, i64 lane_bits,
                     i64 steps)
        : lane(threadIdx.x & ((1 << lane_bits) - 1)), lanes(1 << lane_bits) {
        const i64 group = (i64(blockIdx.x) * THREADS + threadIdx.x) >> lane_bits;
        row = divide(group, pieces, number);
        there = row < batches * channels;
        batch = divide(there ? row : 0, channels, channel);
        stride = lanes * VECTOR;
        const int phase = int(u64(x + batch * by_batch + channel * by_channel) / SIZE % VECTOR);
        first = int(number * steps) * stride + lane * VECTOR - phase;
    }
};

#if ALIGNED
// COUNT elements from step t of a row that ends at `time`, which is at `from`; zeros outside of it.
template <int COUNT>
__device__ Chunk<Element, COUNT> load_chunk(const Storage* from, int t, int time) {
    Chunk<Element, COUNT> chunk;
    chunk.fill(0);
    if (t >= 0 && t + COUNT <= time) {
        chunk = get_words<Element, COUNT>(reinterpret_cast<const unsigned*>(from));
    } else if (rarely(t < time && t > -COUNT)) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (t + i >= 0 && t + i < time) chunk.put(i, from[i]);
    }
    return chunk;
}

// Inputs of a lane's steps, and those before them.
struct Inputs {
    Chunk<Element, TAPS> before;
    Chunk<Element, VECTOR> own;

    // From step t of the row on, which is at `from`.
    __device__ void load(const Storage* from, int t, int time, int) {
        before = load_chunk<TAPS>(from - TAPS, t - TAPS, time);
        own = load_chunk<VECTOR>(from, t, time);
    }
    // x[TAPS - 1 + i - j] is j steps before step i of the lane. `state` is that of a run's begin.
    __device__ void spread(float (&x)[SPAN], const Place& place, const Storage* state, int width) const {
#pragma unroll
        for (int k = 1; k < TAPS; k++) x[k - 1] = before.get(k);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) x[TAPS - 1 + i] = own.get(i);
        if (rarely(place.before < TAPS - 1 && state)) {
#pragma unroll
            for (int k = 0; k < SPAN; k++) {
                const int slot = width - TAPS + place.before + k;
                if (slot >= 0 && slot < width - 1) x[k] = Element::widen(state[slot]);
            }
        }
    }
};

// Gradients of a lane's outputs.
struct OutputGrads {
    Chunk<Element, VECTOR> own;

    __device__ void load(const Storage* from, int t, int time) { own = load_chunk<VECTOR>(from, t, time); }
    __device__ float get(int i) const { return own.get(i); }
};

// What of x lies in the row, which ends at `time`.
__device__ inline void store(Storage* to, int t, int time, const float (&x)[VECTOR]) {
    Chunk<Element, VECTOR> chunk;
    chunk.set(x);
    if (rarely(t < 0 || t + VECTOR > time)) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (t + i >= 0 && t + i < time) to[i] = chunk.bits(i);
    } else {
        store_global(to, words_of(chunk));
    }
}
#else
// The input of a lane's step, and those before it: back[j] is j steps before.
struct Inputs {
    Storage back[TAPS];

    // At step t of the row, which is at `from`. Zeros outside of the row, which ends at `time`.
    __device__ void load(const Storage* from, int t, int time, int width) {
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            back[j] = 0;
            if (j < width && t >= j && t < time) back[j] = from[-j];
        }
    }
    // x[TAPS - 1 - j] is j steps before: of the run, of the state that precedes it, or zero.
    __device__ void spread(float (&x)[SPAN], const Place& place, const Storage* state, int width) const {
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            Storage bits = j <= place.before ? back[j] : Storage(0);
            if (j > place.before && j < width && state) bits = state[width - 1 + place.before - j];
            x[TAPS - 1 - j] = Element::widen(bits);
        }
    }
};

// The gradient of a lane's output.
struct OutputGrads {
    Storage own;

    __device__ void load(const Storage* from, int t, int time) { own = t < time ? *from : Storage(0); }
    __device__ float get(int) const { return Element::widen(own); }
};

__device__ inline void store(Storage* to, int, int, const float (&x)[VECTOR]) { *to = Element::narrow(x[0]); }
#endif

// Adds, to each of COUNT sums, every tap times what is `at` that tap's and that sum's place. Filters that fill their room
// are worth code of their own, in which nothing is asked in between.
template <int COUNT, class At>
__device__ void add_taps(float (&sum)[COUNT], const Filter& filter, int width, const At& at) {
    if (width == TAPS) {
#pragma unroll
        for (int j = 0; j < TAPS; j++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) sum[i] = __fmaf_rn(filter.tap[j], at(i, j), sum[i]);
        return;
    }
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        if (j < width) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) sum[i] = __fmaf_rn(filter.tap[j], at(i, j), sum[i]);
        }
}

// Before the activation, of a lane's first COUNT steps.
template <int COUNT>
__device__ void convolve(float (&sum)[COUNT], const float (&x)[SPAN], const Filter& filter, int width) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum[i] = filter.bias;
    add_taps(sum, filter, width, [&](int i, int j) { return x[TAPS - 1 + i - j]; });
}

// The gradients before the activation of a lane's first COUNT steps, from those after it; zeros outside of the row.
template <int COUNT>
__device__ void activation_grads(float* g, const float (&sum)[COUNT], const float (&grads)[VECTOR], const Place& place,
                                 i64 flags) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) g[i] = place.padding ? 0.f : activated_grad(sum[i], grads[i], flags);
    if (ALIGNED && rarely(place.before < 0 || place.ahead < VECTOR - 1)) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (place.before + i < 0 || i > place.ahead) g[i] = 0;
    }
}
