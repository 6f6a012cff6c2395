// Time contiguous: what the forward and the backward kernel share.
//
// A row is one channel of one batch. It is read in chunks of VECTOR elements (16 bytes). 2^lane_bits lanes of a warp, a
// group, take a piece of a row together, `steps` times a chunk each:
//
//      time     0 …
//      row      | piece 0                                  | piece 1 …
//      piece    | step 0: a chunk of each lane | step 1: … |
//
// So a row of a few dozen elements occupies few lanes, and no thread waits for another. What a lane needs of its
// neighbours' chunks it reads itself, which the L1 cache has by then.
//
// Chunks start at multiples of 16 bytes in memory, and not of VECTOR elements of the row: where rows do not start at such
// a multiple, a row's first and last chunk are partly outside of it. ALIGNED kernels have no such rows. The others look at
// each tensor by itself, and read a chunk that is not on a boundary in it by elements.
#pragma once
#include "conv.cuh"

enum : int { VECTOR = 16 / SIZE };

// The piece of a row that this thread's group has.
struct Piece {
    i64 row, batch, channel;
    i64 number;  // of the row's pieces
    i64 chunk;   // this lane's first one
    int lanes;
    bool there;

    __device__ Piece(i64 batches, i64 channels, i64 pieces, i64 lane_bits, i64 steps) : lanes(1 << lane_bits) {
        const i64 group = (i64(blockIdx.x) * THREADS + threadIdx.x) >> lane_bits;
        row = divide(group, pieces, number);
        there = row < batches * channels;
        batch = divide(there ? row : 0, channels, channel);
        chunk = number * steps * lanes + (threadIdx.x & (lanes - 1));
    }
};

// Elements of a row that precede the first boundary of 16 bytes, counted from the boundary before it.
__device__ inline int phase_of(const Storage* row) { return ALIGNED ? 0 : int(u64(row) / SIZE % VECTOR); }

// N elements that lie together, in as few accesses as there can be.
template <int N>
struct Stretch {
    enum : int { EACH = N < VECTOR ? N : VECTOR, COUNT = N / EACH };
    Chunk<Element, EACH> chunk[COUNT];

    __device__ float get(int i) const { return chunk[i / EACH].get(i % EACH); }

    // From `begin` on; zeros outside of the row.
    __device__ void load(const Storage* row, i64 begin, i64 time) {
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const i64 at = begin + c * EACH;
            const Storage* const from = row + at;
            const bool whole = ALIGNED ? at >= 0 && at < time
                                       : at >= 0 && at + EACH <= time && u64(from) % (EACH * SIZE) == 0;
#pragma unroll
            for (int w = 0; w < Chunk<Element, EACH>::WORDS; w++) chunk[c].word[w] = 0;
            if (whole) {
                chunk[c] = get_words<Element, EACH>(reinterpret_cast<const unsigned*>(from));
            } else if constexpr (!ALIGNED) {
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (at + i >= 0 && at + i < time) chunk[c].put(i, from[i]);
            }
        }
    }
};

__device__ inline void store_chunk(Storage* row, i64 begin, i64 time, const float (&x)[VECTOR]) {
    Chunk<Element, VECTOR> chunk;
    chunk.set(x);
    Storage* const to = row + begin;
    if (ALIGNED || (begin >= 0 && begin + VECTOR <= time && u64(to) % 16 == 0)) {
        store_global(to, words_of(chunk));
        return;
    }
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (begin + i >= 0 && begin + i < time) to[i] = chunk.bits(i);
    }
}

// Inputs of a row around a chunk, N in all, of which TAPS precede it, and which of them belong together.
template <int N>
struct Window {
    i64 begin;  // the chunk's first step, TAPS from the window's
    float x[N];
    int reach[ALIGNED ? 1 : N];  // how many steps before each belong to its run; from TAPS on, all that matter
    bool padding[ALIGNED ? 1 : N];
    bool several;

    // Where the state's inputs stand before the first step.
    __device__ void put_state(const Storage* state, i64 width) {
        if (begin >= TAPS || !state) return;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const i64 slot = width - 1 + begin - TAPS + k;
            if (slot >= 0 && slot < width - 1) x[k] = Element::widen(state[slot]);
        }
    }

    __device__ void mark(const Runs& runs) {
        several = runs.several();
        if constexpr (ALIGNED) return;
        if (!several) return;
        Run run;
        i64 t = begin - TAPS;
        int steps = 0;
#pragma unroll
        for (int k = 0; k < N; k++, t++) {
            padding[k] = false;
            const bool inside = t >= 0 && t < runs.time;
            bool starts = false;
            // What precedes all steps is the state of the first run, but not where each sequence has its own.
            if (inside) {
                starts = k == 0 || t == 0 ? run.enter(runs, t) : run.advance(runs, t);
                if (t == 0 && !runs.varlen()) starts = false;
                padding[k] = runs.is_padding(t);
            }
            steps = starts ? 0 : steps + 1;
            reach[k] = steps;
        }
    }

    __device__ bool has(int k, int j) const { return ALIGNED || !several || j <= reach[k]; }
    // The input j steps before that of place k.
    __device__ float tap(int k, int j) const { return has(k, j) ? x[k - j] : 0.f; }
    __device__ bool is_padding(int k) const {
        if constexpr (ALIGNED) return false;
        return several && padding[k];
    }

    // What the states of packed sequences add up to at place k. `states` is the channel's line of the first one. Few
    // steps come here, so weights are read again, which keeps the code short.
    __device__ float from_states(int k, const void* weight, i64 channel, const Runs& runs, const Storage* states,
                                 i64 to_next, i64 width, i64 flags) const {
        const i64 t = begin - TAPS + k;
        float sum = 0;
        if (reach[k] >= width - 1 || t < 0 || t >= runs.time) return sum;
        const Storage* const state = states + runs.number(t) * to_next;
#pragma unroll 1
        for (i64 slot = reach[k]; slot < width - 1; slot++)
            sum = __fmaf_rn(read_weight(weight, channel * width + slot - reach[k], flags & WIDE_WEIGHTS),
                            Element::widen(state[slot]), sum);
        return sum;
    }

    // Before the activation, at the places FIRST, FIRST + 1, …
    template <int FIRST, int COUNT>
    __device__ void convolve(float (&sum)[COUNT], const Filter& filter, i64 width) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) sum[i] = filter.bias;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    const float input = x[FIRST + i - j];
                    if (has(FIRST + i, j)) sum[i] = __fmaf_rn(filter.tap[j], input, sum[i]);
                }
            }
    }
};
