// Time contiguous, aligned access: rows whose tiles come through a ring in shared memory. The forward and the backward
// kernel share this file. The tile picture is in ../linear_scan/time_stream.cuh, here with LANES 32: a tile is part of
// one row.
//
// A stage of the ring holds a tile: its 16-byte pieces of each tensor, then extra pieces (backward one, the state after the
// tile), and then the tile's bytes of `reset`. Each lane copies its own ITEMS reset bytes: 4 at a time where they start on
// 4 bytes, else one at a time.
#pragma once
#include "../linear_scan/time_stream.cuh"
#include "time_last_gates.cuh"

static_assert(LANES == 32 && !MISALIGNED);
enum : int { RESET_WORDS = ITEMS / 4, RESET_PIECES = 2 * ITEMS };
// Pieces that the VECTOR elements of one piece take in float32.
enum : int { WIDTH = sizeof(float) / sizeof(Storage) };

// What gates and tokens are computed from: the inputs, the channel parameters and the resets.
struct Sources {
    const Storage* input[4];
    Strides strides;
    const float* parameters;
    const unsigned char* reset;
    i64 reset_batch, channels;
    bool option;

    __device__ Rows rows(int i) const { return {input[i], strides.by_batch, strides.by_channel}; }
};

// The resets of a lane's items in a tile, one byte for each.
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
        // Rows are made of whole pieces, so a word lies wholly inside the row or wholly outside.
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

// The composition of a lane's map with the next step. With RESETS, a gate of 0 drops the state before it, even an
// infinite one or NaN; that takes a comparison, which is left out without RESETS. Maps of different lanes are always
// composed with the comparison, so a product of gates that underflows to 0 there drops even an infinite state.
template <bool RESETS>
__device__ Affine compose_step(const Affine& first, const Step& second) {
    if constexpr (RESETS) return compose(first, second);
    const float shift = second.scale * first.shift + second.shift;
    if constexpr (!COMPENSATED) return {first.scale * second.scale, 0.0f, shift};
    float error_term = first.error_term * second.scale;
    const float scale = exact_product(first.scale, second.scale, error_term);
    return {scale, error_term, shift};
}

// Write and read VECTOR float32 numbers, which take WIDTH columns of the ring.
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

// Start the copies of a tile of each input.
template <bool TURNED, class Ring>
__device__ void copy_inputs(const Ring& ring, const Sources& of, const Position& at, const Scans& scans) {
#pragma unroll
    for (int j = 0; j < INPUTS; j++)
        copy_in<TURNED>(ring, j, of.rows(j), at, scans, [&](unsigned) { return padding_of(j); });
}

// Past the end of its row a step must be the identity. Kinds with PADS get inputs there that make it so; for other kinds it
// is selected here.
__device__ inline Step padded(const Step& step, bool inside) {
    if (Kind::PADS) return step;
    return {inside ? step.scale : 1.0f, inside ? step.shift : 0.0f};
}

// One piece of each input, as a lane reads it from the ring.
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
