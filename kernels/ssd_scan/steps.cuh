// The chunks that sequences are cut into, and of each chunk the step sizes and decays.
#pragma once
#include "tensors.cuh"

// A chunk of a sequence: `steps` steps from `begin` on; no steps if its slot is not used.
struct ChunkRange {
    int begin, steps, sequence_begin;
};
struct SequenceRange {
    int begin, end, slot;  // the slot of its first chunk
};

template <int CHUNK>
__device__ inline SequenceRange sequence_range(const Sizes& sizes, const int* cu_seqlens, int sequence) {
    const int time = int(sizes.time);
    if (!cu_seqlens) return {0, time, 0};
    const int first = cu_seqlens[sequence], last = cu_seqlens[sequence + 1];
    // Clamped: a wrong cu_seqlens must not lead outside of the tensors.
    const int begin = smaller(first, time), end = smaller(last, time);
    return {begin, end < begin ? begin : end, begin / CHUNK + sequence};
}

template <int CHUNK>
__device__ inline ChunkRange chunk_range(const Sizes& sizes, const int* cu_seqlens, int slot) {
    int low = 0, high = int(sizes.sequences);  // the sequence is in [low, high)
    if (cu_seqlens)
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (sequence_range<CHUNK>(sizes, cu_seqlens, middle).slot <= slot) low = middle;
            else high = middle;
        }
    const SequenceRange sequence = sequence_range<CHUNK>(sizes, cu_seqlens, low);
    const int begin = sequence.begin + (slot - sequence.slot) * CHUNK;
    return {begin, smaller(i64(sequence.end) - begin, CHUNK), sequence.begin};
}

// The number of the thread's warp, taken from lane 0 so that the compiler knows it is uniform.
__device__ inline int warp_number() { return from_lane(int(threadIdx.x) / 32, 0); }

// What decays and step sizes dt are computed of: dt = limited(unlimited(value of raw_dt + bias)).
struct StepInputs {
    const void* raw_dt;  // of the elements' type or, with WIDE_STEPS, float32
    i64 batch, time, head;
    const float *A, *bias;
    const int* seq_idx;  // of (batch, step), or null
    i64 seq_idx_batch;
    i64 flags;
    float low, high;  // limits of step sizes

    // The bits of an element of `raw_dt`, and its value: apart, so that nothing waits for the element until it is wanted.
    __device__ unsigned bits(i64 b, i64 t, i64 h) const {
        const i64 at = b * batch + t * time + h * head;
        if (flags & WIDE_STEPS) return static_cast<const unsigned*>(raw_dt)[at];
        return static_cast<const Storage*>(raw_dt)[at];
    }
    __device__ float value(unsigned bits) const {
        return flags & WIDE_STEPS ? __uint_as_float(bits) : Element::widen(Storage(bits));
    }
    // Whether seq_idx changes at step t, which is not the first of its row.
    __device__ bool starts(i64 b, i64 t) const {
        const int* const of_batch = seq_idx + b * seq_idx_batch;
        return of_batch[t] != of_batch[t - 1];
    }
    __device__ float bias_of(int h) const { return bias ? bias[h] : 0; }
    __device__ float unlimited(float raw) const { return flags & SOFTPLUS ? softplus(raw) : raw; }
    __device__ float limited(float dt) const { return dt < low ? low : dt > high ? high : dt; }  // keeps NaN
};

// A sum of the base-2 logarithms of decays, as it is stored. Differences of sums are exponents, and float32's results are as exact as
// these, so its sums have an error term. ExactSum is what sums are computed in that nearly cancel in differences.
#if WIDE
using ExactSum = double;
struct alignas(8) StoredSum {
    float value, error;
};
__device__ inline StoredSum stored(ExactSum sum) { return {float(sum), float(sum - float(sum))}; }
__device__ inline float exp2_of(ExactSum sum) {
    const StoredSum parts = stored(sum);
    return fast_exp2(parts.value) * (1 + LN_2 * parts.error);
}
__device__ inline float operator-(StoredSum a, StoredSum b) { return a.value - b.value + (a.error - b.error); }
#else
using ExactSum = float;
struct StoredSum {
    float value;
};
__device__ inline StoredSum stored(ExactSum sum) { return {sum}; }
__device__ inline float exp2_of(ExactSum sum) { return fast_exp2(sum); }
__device__ inline float operator-(StoredSum a, StoredSum b) { return a.value - b.value; }
#endif
// Those of a step and the next.
struct alignas(2 * sizeof(StoredSum)) TwoSums {
    StoredSum x, y;
};

// Stands for log2(0), the decay at a step where another sequence starts: exp2 of it is 0 in float32.
#define LOG_NOTHING -200.f

// A lane has steps N·lane to N·lane + N - 1 of a chunk. `sum` is the inclusive prefix sum of the base-2 logarithms of decays, so
// the decay from step j to step i is exp2(sum_i - sum_j).
template <int N>
struct LaneSteps {
    float dt[N];
    ExactSum sum[N], total;
    unsigned bits[N];
    bool starts[N];

    // `first` is where the sequence begins.
    __device__ void load(const StepInputs& inputs, i64 batch, int first, int begin, int steps, int head) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int step = N * lane + k;
            bits[k] = step < steps ? inputs.bits(batch, begin + step, head) : 0;
            starts[k] = inputs.seq_idx && step < steps && begin + step > first && inputs.starts(batch, begin + step);
        }
    }
    // After `load`: what is loaded becomes `dt` and sums.
    __device__ void add_up(const StepInputs& inputs, int steps, float A, float bias) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float limited = inputs.limited(inputs.unlimited(inputs.value(bits[k]) + bias));
            dt[k] = N * lane + k < steps ? limited : 0;
            sum[k] = starts[k] ? LOG_NOTHING : ExactSum(dt[k]) * A * ExactSum(1.4426950408889634);
            if (k) sum[k] += sum[k - 1];
        }
        ExactSum through = sum[N - 1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const ExactSum before = from_lower(through, distance);
            if (lane >= distance) through += before;
        }
        const ExactSum before = from_lower(through, 1);
#pragma unroll
        for (int k = 0; k + 1 < N; k++) sum[k] += lane ? before : 0;
        sum[N - 1] = through;
        total = from_lane(through, 31);
    }
};
