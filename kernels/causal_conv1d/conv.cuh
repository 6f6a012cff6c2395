// What the kernels of the family share: types, the filter of a channel, the activation, and runs of steps.
//
// Step t of a channel is y[t] = act(bias + sum over j < width of tap[j] * x[t - j]), where tap[j] is weight[width - 1 - j].
// The build pins ELEMENT, TAPS (room for taps: 4 or 8), ALIGNED and WARPS. The width itself is a run-time argument, and
// taps beyond it are not multiplied by zero but skipped, since an input may be infinite.
//
// Steps of one sequence form a run. Before the first step of a run come the width - 1 inputs of its state, or zeros.
// ALIGNED kernels know one run only, all of time. The others also know of seq_idx, where a run ends wherever the number
// changes and numbers below zero mark padding, and of offsets, between which sequences are packed.
#pragma once
#include "../common/approximations.cuh"
#include "../common/element.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;

enum : int { THREADS = 32 * WARPS, SIZE = sizeof(Storage) };
// Bits of the argument `flags`.
enum : i64 { SILU = 1, WIDE_WEIGHTS = 2, WHOLE_CHUNKS = 4 };

__device__ inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
__device__ inline i64 larger(i64 a, i64 b) { return a > b ? a : b; }

// a / b and its remainder; most are of 32 bits, which takes a fraction of the time.
__device__ inline i64 divide(i64 a, i64 b, i64& remainder) {
    if ((u64(a) | u64(b)) >> 32 == 0) {
        const unsigned quotient = unsigned(a) / unsigned(b);
        remainder = unsigned(a) - quotient * unsigned(b);
        return quotient;
    }
    const i64 quotient = a / b;
    remainder = a - quotient * b;
    return quotient;
}

// Of weights and biases, which are of the tensors' dtype or float32.
__device__ inline float read_weight(const void* from, i64 index, bool wide) {
    if (wide) return static_cast<const float*>(from)[index];
    return Element::widen(static_cast<const Storage*>(from)[index]);
}

// Of one channel.
struct Filter {
    float tap[TAPS];
    float bias;

    __device__ void load(const void* weight, const void* biases, i64 channel, i64 width, i64 flags) {
        const bool wide = flags & WIDE_WEIGHTS;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            tap[j] = j < width ? read_weight(weight, channel * width + width - 1 - j, wide) : 0.f;
        bias = biases ? read_weight(biases, channel, wide) : 0.f;
    }
};

__device__ inline float logistic(float x) { return fast_reciprocal(1.f + fast_exp2(-1.4426950408889634f * x)); }
__device__ inline float activated(float x, i64 flags) { return flags & SILU ? x * logistic(x) : x; }
// The gradient before the activation, of one after it.
__device__ inline float activated_grad(float x, float grad, i64 flags) {
    if (!(flags & SILU)) return grad;
    const float s = logistic(x);
    return grad * (s * (1.f + x * (1.f - s)));
}

// Where runs begin and end. `index` is the line of seq_idx that belongs to the batch.
struct Runs {
    const int* index;
    const i64* offsets;
    i64 count, time;

    __device__ bool several() const { return !ALIGNED && (index || offsets); }
    __device__ bool varlen() const { return !ALIGNED && offsets; }

    // The number of the packed sequence that holds a step; whatever the offsets are, one of those there are.
    __device__ i64 number(i64 t) const {
        i64 low = 0, high = count;
#pragma unroll 1
        while (high - low > 1) {
            const i64 middle = low + (high - low) / 2;
            if (offsets[middle] <= t) low = middle;
            else high = middle;
        }
        return low;
    }
    __device__ bool is_padding(i64 t) const { return !ALIGNED && index && index[t] < 0; }
};

// The run that a thread is in, as it goes from step to step.
struct Run {
    i64 number = 0;  // of its packed sequence
    i64 begin = 0;   // its first step, or any step before the thread's first one

    // At the first step that the thread looks at; whether the run begins there.
    __device__ bool enter(const Runs& runs, i64 t) {
        if (runs.varlen()) {
            number = runs.number(t);
            begin = runs.offsets[number];
            return begin == t;
        }
        const bool starts = t == 0 || (runs.several() && runs.index[t] != runs.index[t - 1]);
        begin = starts ? t : t - 1;
        return starts;
    }
    // At the step after; likewise.
    __device__ bool advance(const Runs& runs, i64 t) {
        bool starts = false;
        if (runs.varlen()) {
#pragma unroll 1
            while (number + 1 < runs.count && t >= runs.offsets[number + 1]) number++, starts = true;
        } else if (runs.several()) {
            starts = runs.index[t] != runs.index[t - 1];
        }
        if (starts) begin = t;
        return starts;
    }
};

// Which state a run has, before or after it: of a packed sequence its own; else the batch's, before the first run and
// after the last. -1 if none.
__device__ inline i64 state_before(const Runs& runs, const Run& run, i64 batch) {
    return runs.varlen() ? run.number : run.begin == 0 ? batch : -1;
}
__device__ inline i64 state_after(const Runs& runs, const Run& run, i64 batch, i64 end) {
    return runs.varlen() ? run.number : end == runs.time ? batch : -1;
}

// The last width - 1 inputs of a run that ends before `end`, those of its state among them. `x` is the channel's first
// input, `before` and `after` are the channel's lines of the states; `before` may be null.
__device__ inline void write_final(Storage* after, const Storage* before, const Storage* x, i64 x_time, i64 begin,
                                   i64 end, i64 width) {
#pragma unroll 1
    for (i64 k = 0; k < width - 1; k++) {
        const i64 t = end - (width - 1) + k, slot = width - 1 + t - begin;
        Storage bits = 0;
        if (t >= begin && t >= 0) bits = x[t * x_time];
        else if (before && slot >= 0 && slot < width - 1) bits = before[slot];
        after[k] = bits;
    }
}
