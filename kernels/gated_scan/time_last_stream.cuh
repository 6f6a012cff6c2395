// Rows whose tiles come through a ring in shared memory: what the forward and the backward kernel share. The tile picture
// is in ../linear_scan/time_stream.cuh, here with LANES 32.
//
// A stage of the ring holds the tile's pieces of each sequence, and after them EXTRA ones and the tile's bytes of `reset`.
// A lane's bytes of `reset` are ITEMS contiguous ones, which the lane copies for itself, 4 at a time where they lie so.
#pragma once
#include "../linear_scan/time_stream.cuh"
#include "../common/copy_word.cuh"
#include "time_last_gates.cuh"

static_assert(LANES == 32 && !MISALIGNED);
enum : int { RESET_WORDS = ITEMS / 4, RESET_PIECES = 2 * ITEMS };
// Pieces that a piece of float32 numbers takes.
enum : int { WIDTH = sizeof(float) / sizeof(Storage) };

// The sequences that gates and tokens are computed from, channel parameters and resets.
struct Sources {
    const Storage* input[4];
    Strides strides;
    const float* parameters;
    const unsigned char* reset;
    i64 reset_batch, channels;
    bool option;

    __device__ Rows rows(int i) const { return {input[i], strides.by_batch, strides.by_channel}; }
};

// Of a lane's items in a tile, where a state starts anew.
template <bool TURNED, bool RESETS>
struct Resets {
    unsigned word[RESET_WORDS] = {};

    __device__ bool at(int i) const {
        const int byte = TURNED ? ITEMS - 1 - i : i;
        return RESETS && (word[byte / 4] >> 8 * (byte % 4) & 0xff);
    }
};

template <bool TURNED, bool RESETS, class Ring>
__device__ Resets<TURNED, RESETS> read_resets(const Ring& ring, int extra, int lane) {
    Resets<TURNED, RESETS> resets;
    if constexpr (RESETS) {
        const unsigned* const words = reinterpret_cast<const unsigned*>(ring.extra(extra)) + lane * RESET_WORDS;
#pragma unroll
        for (int w = 0; w < RESET_WORDS; w++) resets.word[w] = words[w];
    }
    return resets;
}

template <bool TURNED, class Ring>
__device__ void copy_resets(const Ring& ring, int extra, const Sources& of, const Position& at, const Scans& scans) {
    unsigned* const words = reinterpret_cast<unsigned*>(ring.extra(extra)) + at.lane * RESET_WORDS;
    const unsigned char* const row = of.reset + at.batch * of.reset_batch;
    const i64 order = at.first + at.lane * ITEMS, begin = TURNED ? scans.time - order - ITEMS : order;
    const bool in_words = ((u64(of.reset) | u64(of.reset_batch)) & 3) == 0;
#pragma unroll
    for (int w = 0; w < RESET_WORDS; w++) {
        // Rows are made of whole pieces, so words lie wholly inside or outside.
        const i64 first = begin + 4 * w;
        const bool inside = of.reset && first >= 0 && first < scans.time;
        copy_word_async(words + w, row + first, inside && in_words);
        if (inside && in_words) continue;
        unsigned word = 0;
        if (inside)
            for (int b = 0; b < 4; b++) word |= unsigned(row[first + b]) << 8 * b;
        words[w] = word;
    }
}

// A lane's map with the one of the step that follows. Without resets no step forgets the state, and the question is left
// out. (Between lanes it is asked: a product of gates that is 0 there forgets even an infinite state.)
template <bool RESETS>
__device__ Affine compose_step(const Affine& first, const Step& second) {
    if constexpr (RESETS) return compose(first, second);
    const float shift = second.scale * first.shift + second.shift;
    if constexpr (!COMPENSATED) return {first.scale * second.scale, 0.0f, shift};
    float error_term = first.error_term * second.scale;
    const float scale = exact_product(first.scale, second.scale, error_term);
    return {scale, error_term, shift};
}

// Float32 numbers of one piece, in WIDTH columns of the ring.
template <class Ring>
__device__ void put_floats(const Ring& ring, int column, int piece, const float (&x)[VECTOR]) {
#pragma unroll
    for (int w = 0; w < WIDTH; w++)
        *ring.place(column + w, piece) = make_uint4(__float_as_uint(x[4 * w]), __float_as_uint(x[4 * w + 1]),
                                                    __float_as_uint(x[4 * w + 2]), __float_as_uint(x[4 * w + 3]));
}
template <class Ring>
__device__ void get_floats(const Ring& ring, int column, int piece, float (&x)[VECTOR]) {
#pragma unroll
    for (int w = 0; w < WIDTH; w++) {
        const uint4 words = *ring.place(column + w, piece);
        x[4 * w] = __uint_as_float(words.x), x[4 * w + 1] = __uint_as_float(words.y);
        x[4 * w + 2] = __uint_as_float(words.z), x[4 * w + 3] = __uint_as_float(words.w);
    }
}

// Copy in a tile of each input.
template <bool TURNED, class Ring>
__device__ void copy_inputs(const Ring& ring, const Sources& of, const Position& at, const Scans& scans) {
#pragma unroll
    for (int j = 0; j < INPUTS; j++)
        copy_in<TURNED>(ring, j, of.rows(j), at, scans, [&](unsigned) { return padding_of(j); });
}

// Past the end of its row a step is the identity: the inputs there are such that it is, or else the question is asked.
__device__ inline Step padded(const Step& step, bool inside) {
    if (Kind::PADS) return step;
    return {inside ? step.scale : 1.0f, inside ? step.shift : 0.0f};
}

// One piece of each input, which a lane reads.
template <bool TURNED>
struct InputPieces {
    Piece<TURNED> input[INPUTS];

    template <class Ring>
    __device__ void read(const Ring& ring, int piece) {
#pragma unroll
        for (int j = 0; j < INPUTS; j++) input[j] = {read_piece(ring.place(j, piece))};
    }
    __device__ Given given(int i, const Channel& channel, bool reset, bool option) const {
        Given given;
#pragma unroll
        for (int j = 0; j < INPUTS; j++) given.input[j] = input[j].get(i);
        channel.give(given);
        given.reset = reset, given.option = option;
        return given;
    }
};
