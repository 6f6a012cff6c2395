// Rows of any strides, whose tiles are held in registers: what the forward and the backward kernel share. The tile picture
// is in ../linear_scan/time_last.cuh.
#pragma once
#include "../linear_scan/time_last.cuh"
#include "time_last_gates.cuh"

static_assert(!ALIGNED && VECTOR == 4);

// A row of each sequence that gates and tokens are computed from, its channel's parameters, and its resets.
struct Sources {
    const Storage* input[INPUTS];  // at the first step of the walk
    i64 stride, time;
    Channel channel;
    const unsigned char* reset;  // likewise
    int reset_stride;
    bool option;

    __device__ Sources(const Storage* const (&inputs)[4], i64 row, i64 by_time, const float* parameters,
                       const unsigned char* resets, i64 of_channel, i64 channels, bool option, const Walk& walk)
        : stride(walk.step(by_time)),
          time(walk.time),
          reset(resets ? resets + walk.at(0) : nullptr),
          reset_stride(walk.against ? -1 : 1),
          option(option) {
#pragma unroll
        for (int j = 0; j < INPUTS; j++) input[j] = inputs[j] + row + walk.at(0) * by_time;
        channel.load(parameters, channels, of_channel);
    }
};

// The steps [order, order + VECTOR) of a row.
struct Chunks {
    Chunk<Element, VECTOR> input[INPUTS];
    unsigned resets;  // a bit each

    __device__ void load(const Sources& from, i64 order) {
#pragma unroll
        for (int j = 0; j < INPUTS; j++)
            input[j] = ::load<VECTOR>(line<Element>(from.input[j], from.stride), order, from.time, padding_of(j));
        resets = 0;
        if (!from.reset) return;
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (order + i < from.time && from.reset[(order + i) * from.reset_stride]) resets |= 1u << i;
    }
    __device__ Given given(int i, const Sources& from) const {
        Given given;
#pragma unroll
        for (int j = 0; j < INPUTS; j++) given.input[j] = input[j].get(i);
        from.channel.give(given);
        given.reset = resets >> i & 1, given.option = from.option;
        return given;
    }
};
