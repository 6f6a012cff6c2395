// One step, or a few, of each sequence, with the last inputs in a state that is changed in place.
//
// `state` has `slots` rows of `length` inputs of each channel. A sequence reads the row of its own number, or what `indices`
// says, and writes that row, or what `destinations` says. Where it reads none, y is zero and nothing else happens. Sequences
// are the batches of x; or, with `cu_seqlens`, they are packed along x's time.
//
// The last input is at the end of its row, and inputs move up as steps come. With `positions`, rows are rings, and
// positions[b] is the number of inputs so far. With `accepted`, a row has the width - 2 inputs before the last call's steps
// and then those steps, of which the first accepted[b] count; further ones were drafts that nobody took.
//
// Traffic: the state twice, an element of x and of y for each step. A thread has one channel of one sequence. Where four inputs
// of a channel lie together, as of Mamba's states, it reads and writes them at once.
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_update(const Storage* x, Storage* state, const void* weight, const void* bias, const int* positions,
                     const int* indices, const int* destinations, const void* cu_seqlens, const int* accepted, Storage* y,
                     i64 sequences, i64 channels, i64 time, i64 width, i64 slots, i64 length, i64 pad_slot, i64 x_batch,
                     i64 x_channel, i64 x_time, i64 state_slot, i64 state_channel, i64 state_time, i64 y_batch,
                     i64 y_channel, i64 y_time, i64 flags) {
    const i64 own = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (own >= sequences * channels) return;
    i64 channel;
    const i64 sequence = divide(own, channels, channel);
    const Storage* in = x + channel * x_channel;
    Storage* out = y + channel * y_channel;
    i64 steps = time;
    if (cu_seqlens) {
        const i64 start = read_bound(cu_seqlens, sequence, time, flags);
        const i64 end = read_bound(cu_seqlens, sequence + 1, time, flags);
        if (sequence == sequences - 1) write_zeros(out, end, time, y_time);  // of steps that no sequence has
        steps = end - start;
        if (steps <= 0) return;
        in += start * x_time;
        out += start * y_time;
    } else {
        in += sequence * x_batch;
        out += sequence * y_batch;
    }
    const i64 slot = row_of(indices, sequence, slots, pad_slot);
    if (slot < 0) return write_zeros(out, 0, steps, y_time);
    Storage* const inputs = state + slot * state_slot + channel * state_channel;
    const i64 target = destinations ? row_of(destinations, sequence, slots, pad_slot) : slot;
    Storage* const written = target < 0 ? nullptr : state + target * state_slot + channel * state_channel;
    // `next` is where the next input would stand in the row that is read; of a ring, its place. The new row has the inputs
    // from `moved` on, up to `kept` of them, and then the steps, up to its `end`.
    i64 next = length, moved = steps, kept = length - steps, end = length;
    if (positions) {
        next = positions[sequence] % length;
        if (next < 0) next += length;
    } else if (accepted) {
        moved = larger(1, smaller(accepted[sequence], length - width + 2));
        kept = width - 2;
        next = kept + moved;
        end = smaller(length, kept + steps);
    }

    const bool together = length == 4 && state_time == 1 && steps == 1 && !positions && !accepted &&
                          (u64(inputs) | u64(written)) % (4 * SIZE) == 0;
    Chunk<Element, 4> four;
    if (together) four = get_words<Element, 4>(reinterpret_cast<const unsigned*>(inputs));
    Filter filter;
    filter.load(weight, bias, channel, width, flags);
    float last[TAPS] = {};  // last[j] is j steps back
    if (together) {
#pragma unroll
        for (int j = 0; j < 4; j++) last[j] = four.get(3 - j);
    } else {
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width - 1) {
                i64 at = next - 1 - j;
                if (at < 0) at += length;
                last[j] = Element::widen(inputs[at * state_time]);
            }
    }
    // In a ring, steps may overwrite what later steps do not need any more.
#pragma unroll 1
    for (i64 t = 0; t < steps; t++) {
        const Storage bits = in[t * x_time];
#pragma unroll
        for (int j = TAPS - 1; j > 0; j--) last[j] = last[j - 1];
        last[0] = Element::widen(bits);
        float sum = filter.bias;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) sum = __fmaf_rn(filter.tap[j], last[j], sum);
        out[t * y_time] = Element::narrow(activated(sum, flags));
        if (positions) {
            inputs[next * state_time] = bits;
            if (++next == length) next = 0;
        }
    }
    if (positions || !written) return;
    if (together) {
        Chunk<Element, 4> row;
        row.fill(0);
#pragma unroll
        for (int k = 0; k < 4; k++) row.put(k, k < 3 ? four.bits(k + 1) : in[0]);
        store_global(written, words_of(row));
        return;
    }
#pragma unroll 1
    for (i64 k = 0; k < end; k++)
        written[k * state_time] = k < kept ? inputs[(k + moved) * state_time] : in[(k - kept) * x_time];
}
