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
// Traffic: the state twice, an element of x and of y for each step. A CTA has channels of one sequence. A thread has four
// channels, if the filter has four taps and the host finds that the channels lie together, and else one. Four lie together where
// neighbouring channels do in x, y and the state (`run_steps`), or, for one step, where a channel's row of three or four inputs lies
// before the next one's (`step_of_rows`). No load stands behind a branch on what another one brings: what counts for so few bytes is how often a thread waits.
#include "conv.cuh"

enum : i64 { WIDE_BOUNDS = 4, BY_FOURS = 8 };  // bits of the argument `flags`, beside those of the other kernels

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

// V channels that lie together: in one access if they are four.
template <int V>
__device__ Chunk<Element, V> load_channels(const Storage* from) {
    if constexpr (V == 4) return get_words<Element, 4>(reinterpret_cast<const unsigned*>(from));
    Chunk<Element, V> chunk = {};
    chunk.put(0, *from);
    return chunk;
}
template <int V>
__device__ void store_channels(Storage* to, const Chunk<Element, V>& chunk) {
    if constexpr (V == 4) store_global(to, words_of(chunk));
    else *to = chunk.bits(0);
}
__device__ inline void write_zeros(Storage* y, i64 start, i64 end, i64 stride, bool by_fours) {
#pragma unroll 1
    for (i64 t = start; t < end; t++) {
        if (by_fours) store_channels<4>(y + t * stride, {});
        else y[t * stride] = 0;
    }
}

// Filters of V channels, of at most T taps; of four channels, of four taps.
template <int V, int T>
struct Filters {
    float tap[V][T], bias[V];

    __device__ void load(const void* weight, const void* biases, i64 channel, int width, i64 flags) {
        if (flags & WIDE_WEIGHTS) load_as<float32>(weight, biases, channel, width);
        else load_as<Element>(weight, biases, channel, width);
    }
    // All elements are loaded before one of them is used.
    template <class E>
    __device__ void load_as(const void* weight, const void* biases, i64 channel, int width) {
        using Of = typename E::Storage;
        const Of* const taps = static_cast<const Of*>(weight) + channel * width;
        const Of* const of_bias = static_cast<const Of*>(biases) + channel;
        Chunk<E, T> weights[V] = {};
        Chunk<E, V> numbers = {};
        if constexpr (V == 4) {
            static_assert(T == 4);
            if (biases) numbers = get_words<E, 4>(reinterpret_cast<const unsigned*>(of_bias));
#pragma unroll
            for (int v = 0; v < V; v++) weights[v] = get_words<E, 4>(reinterpret_cast<const unsigned*>(taps + 4 * v));
        } else {
            if (biases) numbers.put(0, *of_bias);
#pragma unroll
            for (int j = 0; j < T; j++)
                if (j < width) weights[0].put(j, taps[width - 1 - j]);
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            bias[v] = numbers.get(v);
#pragma unroll
            for (int j = 0; j < T; j++) tap[v][j] = weights[v].get(V == 4 ? T - 1 - j : j);
        }
    }
    // What a step gives, of the inputs j steps back.
    __device__ float output(int v, const float (&inputs)[T], int width, i64 flags) const {
        float sum = bias[v];
#pragma unroll
        for (int j = 0; j < T; j++)
            if (V == 4 || j < width) sum = __fmaf_rn(tap[v][j], inputs[j], sum);
        return activated(sum, flags);
    }
};

// A sequence and a thread's channels, where their first input of the row that is read, of the row that is written and of x and y
// are.
struct Sequence {
    const Storage* x;
    Storage *y, *inputs, *written;  // null: nothing is written
    i64 steps, channel, number;
};
struct Arguments {
    const void *weight, *bias;
    const int *positions, *accepted;
    i64 length, flags, x_time, state_time, y_time;
    int width;
};

// One step of four channels, each with a row of LENGTH inputs that lies before the next one's.
template <int LENGTH>
__device__ void step_of_rows(const Arguments& args, const Sequence& sequence) {
    const auto input = load_channels<4>(sequence.x);
    Chunk<Element, 4> rows[LENGTH], shifted[LENGTH], y;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) rows[i] = load_channels<4>(sequence.inputs + 4 * i);
    Filters<4, 4> filters;
    filters.load(args.weight, args.bias, sequence.channel, 4, args.flags);
    float outputs[4];
#pragma unroll
    for (int v = 0; v < 4; v++) {
        float inputs[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int at = v * LENGTH + LENGTH - j;
            inputs[j] = j == 0 ? input.get(v) : j <= LENGTH ? rows[at / 4].get(at % 4) : 0.f;
        }
        outputs[v] = filters.output(v, inputs, 4, args.flags);
#pragma unroll
        for (int k = 0; k < LENGTH; k++) {
            const int at = v * LENGTH + k, from = at + 1;
            shifted[at / 4].put(at % 4, k == LENGTH - 1 ? input.bits(v) : rows[from / 4 % LENGTH].bits(from % 4));
        }
    }
    y.set(outputs);
    store_channels<4>(sequence.y, y);
    if (sequence.written)
#pragma unroll
        for (int i = 0; i < LENGTH; i++) store_channels<4>(sequence.written + 4 * i, shifted[i]);
}

// All steps of V channels that lie together, of at most T taps.
template <int V, int T>
__device__ void run_steps(const Arguments& args, const Sequence& sequence) {
    const i64 length = args.length, steps = sequence.steps, state_time = args.state_time;
    const int width = V == 4 ? 4 : args.width;
    Storage *const inputs = sequence.inputs, *const written = sequence.written;
    const Storage* in = sequence.x;
    Storage* out = sequence.y;
    auto bits = load_channels<V>(in);
    // The next input would stand at `next` of the row that is read; in a ring, that is its place. The first step goes to `place`
    // of the row that is written, behind the latest inputs of the row that is read.
    i64 next = length, place = length - steps;
    if (args.positions) {
        next = args.positions[sequence.number] % length;
        if (next < 0) next += length;
        place = next;
    } else if (args.accepted) {
        place = width - 2;
        next = place + larger(1, smaller(args.accepted[sequence.number], length - place));
    }
    Chunk<Element, V> past[T - 1] = {};  // past[j] is j + 1 steps before the first one
#pragma unroll
    for (int j = 0; j < T - 1; j++)
        if (j < width - 1)
            past[j] = load_channels<V>(inputs + (next - 1 - j + (j < next ? 0 : length)) * state_time);
    Filters<V, T> filters;
    filters.load(args.weight, args.bias, sequence.channel, width, args.flags);
    if (!args.positions && written) {
        // Inputs that the filter does not reach move first, as both rows may be one.
#pragma unroll 4
        for (i64 k = 0; k < place - (width - 1); k++)
            store_channels<V>(written + k * state_time, load_channels<V>(inputs + (k + next - place) * state_time));
#pragma unroll
        for (int j = 0; j < T - 1; j++)
            if (j < width - 1 && j < place) store_channels<V>(written + (place - 1 - j) * state_time, past[j]);
    }
    float last[V][T];  // last[v][j] is j steps back
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int j = 0; j < T; j++) last[v][j] = j < T - 1 ? past[j < T - 1 ? j : 0].get(v) : 0.f;
    Storage* const row = args.positions ? inputs : written;
#pragma unroll 1
    for (i64 t = 0; t < steps; t++) {
        in += args.x_time;
        Chunk<Element, V> following = {}, y;
        if (t + 1 < steps) following = load_channels<V>(in);
        float outputs[V];
#pragma unroll
        for (int v = 0; v < V; v++) {
#pragma unroll
            for (int j = T - 1; j > 0; j--) last[v][j] = last[v][j - 1];
            last[v][0] = bits.get(v);
            outputs[v] = filters.output(v, last[v], width, args.flags);
        }
        y.set(outputs);
        store_channels<V>(out, y);
        out += args.y_time;
        if (row && place >= 0 && place < length) store_channels<V>(row + place * state_time, bits);
        place++;
        if (args.positions && place == length) place = 0;
        bits = following;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_update(const Storage* x, Storage* state, const void* weight, const void* bias, const int* positions,
                     const int* indices, const int* destinations, const void* cu_seqlens, const int* accepted, Storage* y,
                     i64 sequences, i64 channels, i64 time, i64 width, i64 slots, i64 length, i64 pad_slot, i64 x_batch,
                     i64 x_channel, i64 x_time, i64 state_slot, i64 state_channel, i64 state_time, i64 y_batch,
                     i64 y_channel, i64 y_time, i64 flags) {
    const bool by_fours = flags & BY_FOURS;
    const i64 number = blockIdx.x, channel = (i64(blockIdx.y) * THREADS + threadIdx.x) * (by_fours ? 4 : 1);
    if (channel >= channels) return;
    Sequence sequence{x + number * x_batch + channel * x_channel, y + number * y_batch + channel * y_channel,
                      nullptr, nullptr, time, channel, number};
    if (cu_seqlens) {  // x has one batch, whose stride the host passes as 0
        const i64 start = read_bound(cu_seqlens, number, time, flags);
        const i64 end = read_bound(cu_seqlens, number + 1, time, flags);
        if (number == sequences - 1) write_zeros(sequence.y, end, time, y_time, by_fours);  // of steps that no sequence has
        sequence.steps = end - start;
        if (sequence.steps <= 0) return;
        sequence.x += start * x_time;
        sequence.y += start * y_time;
    }
    const i64 slot = row_of(indices, number, slots, pad_slot);
    const i64 target = destinations ? row_of(destinations, number, slots, pad_slot) : slot;
    if (slot < 0) return write_zeros(sequence.y, 0, sequence.steps, y_time, by_fours);
    sequence.inputs = state + slot * state_slot + channel * state_channel;
    if (target >= 0) sequence.written = state + target * state_slot + channel * state_channel;
    const Arguments args{weight, bias, positions, accepted, length, flags, x_time, state_time, y_time, int(width)};
    if (!by_fours) run_steps<1, TAPS>(args, sequence);
    else if (state_channel == 1) run_steps<4, 4>(args, sequence);
    else if (length == 3) step_of_rows<3>(args, sequence);
    else step_of_rows<4>(args, sequence);
}
