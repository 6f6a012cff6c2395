// What the kernels of the family share: types, the filter of a channel, the activation, and runs of steps.
//
// Step t of a channel is y[t] = act(bias + sum over j < width of tap[j] * x[t - j]), where tap[j] is weight[width - 1 - j].
// The build pins ELEMENT, TAPS (room for taps: 4 or 8), ALIGNED and WARPS. The width itself is a run-time argument, and
// taps beyond it are not multiplied by zero but skipped, since an input may be infinite.
//
// Steps of one sequence form a run. Before the first step of a run come the width - 1 inputs of its state, or zeros.
// ALIGNED kernels know one run only, all of time. The others also know of seq_idx, where a run ends wherever the number
// changes and numbers below zero mark padding, and of cu_seqlens, between which sequences are packed.
#pragma once
#include "../common/element.cuh"
#include "../common/global_memory.cuh"
#include "../common/math.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;

enum : int { THREADS = 32 * WARPS, SIZE = sizeof(Storage) };
// Bits of the argument `flags`.
enum : i64 { SILU = 1, WIDE_WEIGHTS = 2 };

// Keeps what follows from between what happens often.
__device__ inline bool rarely(bool x) { return __builtin_expect(x, false); }

__device__ inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
__device__ inline i64 larger(i64 a, i64 b) { return a > b ? a : b; }

// a / b and its remainder; most are of 32 bits, which takes a fraction of the time.
__device__ inline i64 divide(i64 a, i64 b, i64& remainder) {
    if (b == 1) {
        remainder = 0;
        return a;
    }
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

    __device__ void load(const void* weight, const void* biases, i64 channel, int width, i64 flags) {
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

// A step within its run.
struct Place {
    int before, ahead;  // how many steps of the run come before it and after it; of seq_idx at most width - 1
    int entering, leaving;  // whose state precedes the run's first step, and follows its last; -1 if nobody's
    bool padding;
};

// Where runs begin and end, in one batch. `index` is the batch's line of seq_idx.
struct Runs {
    const int* index;
    const i64* cu_seqlens;
    int count, time, width, batch;

    __device__ Runs(const int* seq_idx, const i64* cu_seqlens, i64 sequences, i64 time, i64 width, i64 batch)
        : index(seq_idx ? seq_idx + batch * time : nullptr), cu_seqlens(cu_seqlens), count(int(sequences)), time(int(time)),
          width(int(width)), batch(int(batch)) {}

    // Of a step that there is. `number` is that of a packed sequence near it, from which the search goes on. Whatever the
    // cu_seqlens are, what is found is within the tensors.
    __device__ Place at(int t, int& number) const {
        Place place{t, time - 1 - t, batch, batch, false};
        if constexpr (ALIGNED) return place;
        if (cu_seqlens) {
#pragma unroll 1
            while (number > 0 && cu_seqlens[number] > t) number--;
#pragma unroll 1
            while (number + 1 < count && cu_seqlens[number + 1] <= t) number++;
            place.before = int(larger(smaller(t - cu_seqlens[number], t), 0));
            place.ahead = int(larger(smaller(cu_seqlens[number + 1] - 1 - t, time - 1 - t), 0));
            place.entering = place.leaving = number;
        } else if (index) {
            const int own = index[t];
            int before = 0, ahead = 0;
#pragma unroll 1
            while (before < width - 1 && before < t && index[t - before - 1] == own) before++;
#pragma unroll 1
            while (ahead < width - 1 && ahead < time - 1 - t && index[t + ahead + 1] == own) ahead++;
            place.before = before, place.ahead = ahead;
            if (before < t) place.entering = -1;
            if (ahead < time - 1 - t) place.leaving = -1;
            place.padding = own < 0;
        }
        return place;
    }
    // The packed sequence that holds a step.
    __device__ int number(int t) const {
        if (ALIGNED || !cu_seqlens) return 0;
        int low = 0, high = count;
#pragma unroll 1
        while (high - low > 1) {
            const int middle = low + (high - low) / 2;
            if (cu_seqlens[middle] <= t) low = middle;
            else high = middle;
        }
        return low;
    }
};

// Where a channel's inputs stand in the states of batches or sequences.
struct States {
    i64 channels, channel;
    int slots;  // inputs of each

    // Null if there is none.
    template <class T>
    __device__ T* of(T* states, int number) const {
        return states && number >= 0 ? states + (number * channels + channel) * slots : nullptr;
    }
};

// Writes the gradients of the inputs before a run of `length` steps. grads[m] is the gradient before the activation m steps
// after the run's first, zero beyond its last; `after` is the gradient of the run's final state.
template <int COUNT>
__device__ void write_entering_grads(Storage* to, const Filter& filter, const float (&grads)[COUNT], int length,
                                     int width, const Storage* after) {
#pragma unroll
    for (int q = 1; q < TAPS; q++)  // steps before the run
        if (q < width) {
            float sum = 0;
#pragma unroll
            for (int j = q; j < TAPS; j++)
                if (j < width) sum = __fmaf_rn(filter.tap[j], grads[j - q], sum);
            // A run shorter than the state leaves that input in its final state, too.
            const int kept = width - 1 - q - length;
            if (after && kept >= 0) sum += Element::widen(after[kept]);
            to[width - 1 - q] = Element::narrow(sum);
        }
}
