// One step, or a few, of each sequence, with the last inputs in a state that is changed in place.
//
// `state` has `slots` rows of `length` inputs of each channel. A batch's row is that of its own number, or what `indices`
// says; where that is no row, y is zero and nothing else happens. The last input is at the end of its row, and inputs
// move up as steps come; or, with `positions`, rows are rings, and positions[b] is the number of inputs so far.
//
// Traffic: the state twice, an element of x and of y for each step. A thread has one channel of one batch. Where four inputs
// of a channel lie together, as of Mamba's states, it reads and writes them at once.
#include "conv.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_update(const Storage* x, Storage* state, const void* weight, const void* bias, const int* positions,
                     const int* indices, Storage* y, i64 batches, i64 channels, i64 time, i64 width, i64 slots,
                     i64 length, i64 x_batch, i64 x_channel, i64 x_time, i64 state_slot, i64 state_channel,
                     i64 state_time, i64 y_batch, i64 y_channel, i64 y_time, i64 flags) {
    const i64 own = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (own >= batches * channels) return;
    i64 channel;
    const i64 batch = divide(own, channels, channel);
    const Storage* const in = x + batch * x_batch + channel * x_channel;
    Storage* const out = y + batch * y_batch + channel * y_channel;
    const i64 slot = indices ? indices[batch] : batch;
    if (slot < 0 || slot >= slots) {
#pragma unroll 1
        for (i64 t = 0; t < time; t++) out[t * y_time] = 0;
        return;
    }
    Storage* const inputs = state + slot * state_slot + channel * state_channel;
    // Of the ring: the place of the next input.
    i64 place = 0;
    if (positions) {
        place = positions[batch] % length;
        if (place < 0) place += length;
    }

    const bool together = length == 4 && state_time == 1 && time == 1 && !positions && u64(inputs) % (4 * SIZE) == 0;
    Chunk<Element, 4> held;
    if (together) held = get_words<Element, 4>(reinterpret_cast<const unsigned*>(inputs));
    Filter filter;
    filter.load(weight, bias, channel, width, flags);
    float last[TAPS] = {};  // last[j] is j steps back
    if (together) {
#pragma unroll
        for (int j = 0; j < 4; j++) last[j] = held.get(3 - j);
    } else {
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width - 1) {
                i64 at = (positions ? place : length) - 1 - j;
                if (at < 0) at += length;
                last[j] = Element::widen(inputs[at * state_time]);
            }
    }
    // In a ring, steps may overwrite what later steps do not need any more.
#pragma unroll 1
    for (i64 t = 0; t < time; t++) {
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
            inputs[place * state_time] = bits;
            if (++place == length) place = 0;
        }
    }
    if (positions) return;
    if (together) {
        Chunk<Element, 4> moved;
        moved.fill(0);
#pragma unroll
        for (int k = 0; k < 4; k++) moved.put(k, k < 3 ? held.bits(k + 1) : in[0]);
        store_global(inputs, words_of(moved));
        return;
    }
#pragma unroll 1
    for (i64 k = 0; k < length; k++) {
        const i64 from = k + time;
        inputs[k * state_time] = from < length ? inputs[from * state_time] : in[(from - length) * x_time];
    }
}
