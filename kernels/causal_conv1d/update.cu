// One step, or a few, of each sequence, with the last inputs in a state that is changed in place.
//
// `state` has `slots` rows of `length` inputs of each channel. A sequence reads the row of its own number, or what `indices`
// says, and writes that row, or what `destinations` says, if that is not negative. Where it reads none, y is zero and nothing else happens. Sequences
// are the batches of x; or, with `cu_seqlens`, they are packed along x's time.
//
// The last input is at the end of its row, and inputs move towards the row's begin as steps come. With `positions`, rows are rings, and
// positions[b] is the number of inputs so far. With `accepted`, a row has the width - 2 inputs before the last call's steps
// and then those steps, of which the first accepted[b] count, at least one; further ones were drafts that nobody took.
//
// Traffic: the state twice, an element of x and of y for each step. A CTA has channels of one sequence, and a thread has one of
// them. For a filter of four taps and rows of four inputs that lie together, as of Mamba's states, a thread reads and writes a
// row at once.
#include "conv.cuh"

enum : i64 { WIDE_BOUNDS = 4 };  // a bit of the argument `flags`, beside those of the other kernels

// Bounds of packed sequences, in whichever width they come; always within the steps that there are.
__device__ inline i64 read_bound(const void* cu_seqlens, i64 index, i64 time, i64 flags) {
    const i64 bound = flags & WIDE_BOUNDS ? static_cast<const i64*>(cu_seqlens)[index]
                                          : static_cast<const int*>(cu_seqlens)[index];
    return larger(0, smaller(bound, time));
}

// Which row of the state a sequence has: that of its own number where there are no `rows`; -1 for none.
__device__ inline i64 row_of(const int* rows, i64 sequence, i64 slots, i64 pad_slot) {
    if (!rows) return sequence < slots ? sequence : -1;
    const i64 row = rows[sequence];
    return row >= 0 && row < slots && row != pad_slot ? row : -1;
}

__device__ inline void write_zeros(Storage* y, i64 start, i64 end, i64 stride) {
#pragma unroll 1
    for (i64 t = start; t < end; t++) y[t * stride] = 0;
}

// One step with four taps, of a row of four inputs.
__device__ inline Storage step_of_four(const Storage* row, Storage* written, Storage input, const void* weight,
                                       const void* biases, i64 channel, i64 flags) {
    Chunk<Element, 4> inputs = get_words<Element, 4>(reinterpret_cast<const unsigned*>(row));
    const bool wide = flags & WIDE_WEIGHTS;
    float tap[4];
    if (u64(weight) % 16 == 0 && wide) {
        const auto taps = get_words<float32, 4>(static_cast<const unsigned*>(weight) + channel * 4);
#pragma unroll
        for (int k = 0; k < 4; k++) tap[k] = taps.get(k);
    } else if (u64(weight) % 16 == 0) {
        const Storage* const of_channel = static_cast<const Storage*>(weight) + channel * 4;
        const auto taps = get_words<Element, 4>(reinterpret_cast<const unsigned*>(of_channel));
#pragma unroll
        for (int k = 0; k < 4; k++) tap[k] = taps.get(k);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) tap[k] = read_weight(weight, channel * 4 + k, wide);
    }
    float sum = biases ? read_weight(biases, channel, wide) : 0.f;
    sum = __fmaf_rn(tap[3], Element::widen(input), sum);
#pragma unroll
    for (int k = 3; k > 0; k--) sum = __fmaf_rn(tap[k - 1], inputs.get(k), sum);
    if (written) {
#pragma unroll
        for (int k = 0; k < 4; k++) inputs.put(k, k < 3 ? inputs.bits(k + 1) : input);
        store_global(written, words_of(inputs));
    }
    return Element::narrow(activated(sum, flags));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_update(const Storage* x, Storage* state, const void* weight, const void* bias, const int* positions,
                     const int* indices, const int* destinations, const void* cu_seqlens, const int* accepted, Storage* y,
                     i64 sequences, i64 channels, i64 time, i64 width, i64 slots, i64 length, i64 pad_slot, i64 x_batch,
                     i64 x_channel, i64 x_time, i64 state_slot, i64 state_channel, i64 state_time, i64 y_batch,
                     i64 y_channel, i64 y_time, i64 flags) {
    const i64 sequence = blockIdx.x, channel = i64(blockIdx.y) * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const Storage* in = x + sequence * x_batch + channel * x_channel;
    Storage* out = y + sequence * y_batch + channel * y_channel;
    i64 steps = time;
    if (cu_seqlens) {  // x has one batch, whose stride the host passes as 0
        const i64 start = read_bound(cu_seqlens, sequence, time, flags);
        const i64 end = read_bound(cu_seqlens, sequence + 1, time, flags);
        if (sequence == sequences - 1) write_zeros(out, end, time, y_time);  // of steps that no sequence has
        steps = end - start;
        if (steps <= 0) return;
        in += start * x_time;
        out += start * y_time;
    }
    const i64 slot = row_of(indices, sequence, slots, pad_slot);
    if (slot < 0) return write_zeros(out, 0, steps, y_time);
    Storage* const inputs = state + slot * state_slot + channel * state_channel;
    const i64 target = destinations ? row_of(destinations, sequence, slots, pad_slot) : slot;
    Storage* const written = target < 0 ? nullptr : state + target * state_slot + channel * state_channel;
    if (length == 4 && width == 4 && state_time == 1 && steps == 1 && !positions && !accepted &&
        (u64(inputs) | u64(written)) % (4 * SIZE) == 0) {
        *out = step_of_four(inputs, written, *in, weight, bias, channel, flags);
        return;
    }

    // The next input would stand at `next` of the row that is read; in a ring, that is its place. The first step goes to `place`
    // of the row that is written, behind the latest inputs of the row that is read.
    i64 next = length, place = length - steps;
    if (positions) {
        next = positions[sequence] % length;
        if (next < 0) next += length;
        place = next;
    } else if (accepted) {
        place = width - 2;
        next = place + larger(1, smaller(accepted[sequence], length - place));
    }
    Filter filter;
    filter.load(weight, bias, channel, width, flags);
    Storage past[TAPS - 1] = {};  // past[j] is j + 1 steps before the first one
    const Storage* from = inputs + (next - 1) * state_time;
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++)
        if (j < width - 1) {
            if (j == next) from += length * state_time;  // in a ring
            past[j] = *from;
            from -= state_time;
        }
    if (!positions && written) {
        // Inputs that the filter does not reach move first, as both rows may be one.
#pragma unroll 1
        for (i64 k = 0; k < place - (width - 1); k++)
            written[k * state_time] = inputs[(k + next - place) * state_time];
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++)
            if (j < width - 1 && j < place) written[(place - 1 - j) * state_time] = past[j];
    }
    float last[TAPS];  // last[j] is j steps back
#pragma unroll
    for (int j = 0; j < TAPS; j++) last[j] = j < TAPS - 1 ? Element::widen(past[j]) : 0.f;
    Storage* const row = positions ? inputs : written;
    Storage bits = *in;
#pragma unroll 1
    for (i64 t = 0; t < steps; t++) {
        in += x_time;
        const Storage following = t + 1 < steps ? *in : Storage(0);
#pragma unroll
        for (int j = TAPS - 1; j > 0; j--) last[j] = last[j - 1];
        last[0] = Element::widen(bits);
        float sum = filter.bias;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) sum = __fmaf_rn(filter.tap[j], last[j], sum);
        *out = Element::narrow(activated(sum, flags));
        out += y_time;
        if (row && place >= 0 && place < length) row[place * state_time] = bits;
        place++;
        if (positions && place == length) place = 0;
        bits = following;
    }
}
