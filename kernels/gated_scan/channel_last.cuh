// Channels contiguous: what the forward and the backward kernel share. The build chooses one of linear_scan's designs
// (spec.py), each with a picture of its tiles:
//
//     COLUMN_SERIAL   ../linear_scan/column_serial.cuh    aligned, many channels; and multi_cta_column.cuh, where several
//                                                         CTAs share a column (CTAS_PER_COLUMN > 1)
//     otherwise       ../linear_scan/channel_last.cuh     generic: any strides, packed sequences
//
// Inputs take the place of gates and tokens. A thread computes gate and token of each of its elements when it composes a
// tile's maps, and keeps them, or what the gradients need besides, in registers until it knows the state that enters. Where
// several CTAs share a column it does not: a tile is composed turns before its states are computed, which computes gates
// again.
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
enum : int { INPUTS = Kind::INPUTS, PARAMETERS = Kind::PARAMETERS, ROOM = Kind::ROOM };
// Bits of `flags`: h[t] follows from h[t+1]; the kind's option.
enum : int { AGAINST_TIME = 1, WITH_OPTION = 2 };

// The numbers 0 … N - 1, for what has no default constructor.
template <int... N>
struct Numbers {};
template <int N, int... NUMBERS>
struct Counted : Counted<N - 1, N - 1, NUMBERS...> {};
template <int... NUMBERS>
struct Counted<0, NUMBERS...> {
    using All = Numbers<NUMBERS...>;
};
template <int N>
using Count = typename Counted<N>::All;

// CTAs per SM that registers leave room for. From 12.0 on an SM's shared memory is too small for as many, and more
// registers are needed.
#if __CUDA_ARCH__ >= 1200
enum : int { RESIDENT = 1 };
#else
enum : int { RESIDENT = BLOCKS };
#endif

struct Inputs {
    const Storage* first[4];
    i64 by_batch, by_channel, by_time;
};

// A channel's parameters, prepared.
struct Channel {
    float parameter[ROOM];

    // `parameters` are P × channels.
    __device__ Channel(const float* parameters, i64 channels, i64 channel, bool exists) {
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++)
            parameter[p] = Kind::prepared(p, exists ? parameters[p * channels + channel] : 0.0f);
    }
};

// One element's inputs, of chunks that hold it as number v.
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

// Gate and token where the step exists. Padding gives the identity of itself, if the kind has such.
__device__ inline Step gated(const Given& given, const Values& values, bool exists) {
    Step step = Kind::step(values);
    if (given.reset) step.scale = 0;
    if (!Kind::PADS && !exists) step = {State(1), State(0)};
    return step;
}

// RESETS: whether there are resets. Where there are none, a gate of 0 takes no look.
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
// Whether a tile's states are computed when its maps are long gone.
enum : bool { AGAIN = CTAS_PER_COLUMN > 1 };

// The resets of this lane's rows of one tile after another. A lane reads those of one row of its warp's, a tile ahead.
template <bool RESETS>
struct ResetRows {
    const unsigned char* at;
    int apart, left;  // from tile to tile, in time and in rows that are left
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
    // A bit for each of this lane's rows.
    __device__ unsigned turn() {
        if (!RESETS) return 0;
        const unsigned rows = __ballot_sync(FULL_WARP, next != 0);
        at += apart, left -= CTAS_PER_COLUMN * TIMES;
        fetch();
        return rows >> (threadIdx.x % 32 / LANES_ACROSS * STEPS);
    }
};
#else
// The resets of this thread's rows, a bit for each.
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
