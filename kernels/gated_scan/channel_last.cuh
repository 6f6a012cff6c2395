// Channels contiguous: what the forward and the backward kernel share. The build chooses one of linear_scan's designs
// (spec.py), each with a picture of its tiles:
//
//     COLUMN_SERIAL   ../linear_scan/column_serial.cuh    aligned, many channels; and multi_cta_column.cuh, where several
//                                                         CTAs share a column (CTAS_PER_COLUMN > 1)
//     otherwise       ../linear_scan/channel_last.cuh     generic: any strides, packed sequences
//
// Where linear_scan's designs copy gates and tokens, these kernels copy the kind's inputs. A thread handles a tile in two
// passes. The first pass computes the gate and the token of each element, and composes them to the tile's affine map. The
// second pass starts from the state that enters the tile, and computes states or gradients.
//
// If a CTA has a column for itself, what the second pass needs stays in registers: gates and tokens forward, the kind's
// Values backward. If several CTAs share a column, several turns lie between the two passes of a tile, which is too long to
// hold registers. The second pass then computes the gates again (RECOMPUTE_GATES).
#pragma once
#if CTAS_PER_COLUMN > 1
#include "../linear_scan/multi_cta_column.cuh"
#elif COLUMN_SERIAL
#include "../linear_scan/column_serial.cuh"
#else
#include "../linear_scan/channel_last.cuh"
#endif
#include "kind.cuh"

using Given = Kind::Given;
using Values = Kind::Values;
enum : int { INPUTS = Kind::INPUTS, PARAMETERS = Kind::PARAMETERS, PARAMETER_SLOTS = Kind::PARAMETER_SLOTS };
// Bits of `flags`: whether h[t] follows from h[t+1], and the kind's option.
enum : int { AGAINST_TIME = 1, WITH_OPTION = 2 };

// MakeIndexSequence<N> is IndexSequence<0, …, N - 1>, as in the standard library, which NVRTC has not. Arrays of types
// without a default constructor are initialized from it.
template <int... N>
struct IndexSequence {};
template <int N, int... NUMBERS>
struct BuildIndexSequence : BuildIndexSequence<N - 1, N - 1, NUMBERS...> {};
template <int... NUMBERS>
struct BuildIndexSequence<0, NUMBERS...> {
    using All = IndexSequence<NUMBERS...>;
};
template <int N>
using MakeIndexSequence = typename BuildIndexSequence<N>::All;

// CTAs per SM that the compiler limits registers for. From capability 12.0 on the shared memory of an SM is too small for
// BLOCKS CTAs, so registers need not be limited for as many.
#if __CUDA_ARCH__ >= 1200
enum : int { RESIDENT = 1 };
#else
enum : int { RESIDENT = BLOCKS };
#endif

struct Inputs {
    const Storage* first[4];
    i64 by_batch, by_channel, by_time;
};

// The parameters of one channel, after Kind::prepared.
struct Channel {
    float parameter[PARAMETER_SLOTS];

    // `parameters` is a matrix (PARAMETERS, channels).
    __device__ Channel(const float* parameters, i64 channels, i64 channel, bool exists) {
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++)
            parameter[p] = Kind::prepared(p, exists ? parameters[p * channels + channel] : 0.0f);
    }
};

// What a kind gets at one step of one channel: element v of each input's chunk, and the channel's parameters.
template <int COUNT>
__device__ Given given_of(const Chunk<Element, COUNT> (&inputs)[INPUTS], int v, const Channel& channel, bool reset,
                          bool option) {
    Given given;
#pragma unroll
    for (int i = 0; i < INPUTS; i++) given.input[i] = inputs[i].get(v);
#pragma unroll
    for (int p = 0; p < PARAMETERS; p++) given.parameter[p] = channel.parameter[p];
    given.reset = reset, given.option = option;
    return given;
}

// Gate and token of one step. Past the end of the sequence the map must be the identity. Kinds with PADS get there inputs
// that make it so; for other kinds it is selected here.
__device__ inline Step gated(const Given& given, const Values& values, bool exists) {
    Step step = Kind::step(values);
    if (given.reset) step.scale = 0;
    if (!Kind::PADS && !exists) step = {State(1), State(0)};
    return step;
}

// One step of the recurrence, and the composition of an affine map with the step after it. With RESETS, a gate of 0 drops
// the state before it, even one that is infinite or NaN; that takes a comparison, which kernels without resets leave out.
template <bool RESETS>
__device__ State applied(Step step, State x) {
    return RESETS ? step(x) : step.scale * x + step.shift;
}
template <bool RESETS>
__device__ Affine composed(Affine first, Step second) {
    if constexpr (RESETS) return compose(first, second);
    const State shift = second.scale * first.shift + second.shift;
    if constexpr (!COMPENSATED) return {first.scale * second.scale, State(0), shift};
    State error_term = first.error_term * second.scale;
    const State scale = exact_product(first.scale, second.scale, error_term);
    return {scale, error_term, shift};
}

#if COLUMN_SERIAL
// Whether a tile's second pass computes gates again, since registers do not last from the first pass to the second.
enum : bool { RECOMPUTE_GATES = CTAS_PER_COLUMN > 1 };

// The resets of a lane's rows, one tile after the other. Each lane loads the reset byte of one of its warp's rows, one tile
// before it is used. A ballot then gives all lanes the resets of all rows of the warp.
template <bool RESETS>
struct ResetRows {
    const unsigned char* at;
    int apart, left;  // steps in time from tile to tile, negative against time; and how many rows are left
    unsigned next = 0;

    __device__ ResetRows(const unsigned char* reset, i64 by_batch, const Column& column) {
        static_assert(WARP_STEPS <= 32, "a lane for each row");
        if (!RESETS) return;
        const int row = own_warp() * WARP_STEPS + column.lane;
        at = reset + column.batch * by_batch + column.origin + column.way * row;
        apart = int(column.way) * CTAS_PER_COLUMN * TIMES;
        left = column.lane < WARP_STEPS ? int(column.rows) - row : 0;
        fetch();
    }
    __device__ void fetch() { next = left > 0 ? *at : 0; }
    // The resets of this lane's rows of the current tile, one bit for each row. Advances to the next tile.
    __device__ unsigned take_tile() {
        if (!RESETS) return 0;
        const unsigned rows = __ballot_sync(FULL_WARP, next != 0);
        at += apart, left -= CTAS_PER_COLUMN * TIMES;
        fetch();
        return rows >> (threadIdx.x % 32 / LANES_ACROSS * STEPS);
    }
};
#else
// The resets of this thread's rows, one bit for each row.
__device__ inline unsigned resets_of(const unsigned char* reset, i64 by_batch, const Position& at, const Walk& walk) {
    unsigned rows = 0;
    if (!reset) return rows;
    const unsigned char* const first = reset + at.batch * by_batch + walk.at(at.first);
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (at.first + k < walk.time) rows |= unsigned(first[walk.step(k)] != 0) << k;
    return rows;
}
#endif
