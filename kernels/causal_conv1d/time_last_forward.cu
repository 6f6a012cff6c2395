// Forward pass, time contiguous: y[t] = act(bias + sum over j of tap[j] * x[t - j]).
//
// Traffic: an element of x and one of y; pieces and tiles are those of time_last.cuh. A thread has the inputs of UNROLL
// tiles under way at once.
#include "time_last.cuh"

enum : int { UNROLL = ALIGNED ? 2 : 4 };

extern "C" __global__ void __launch_bounds__(THREADS, ALIGNED ? 7 : 1)
causal_conv1d_time_last_forward(const Storage* x, const void* weight, const void* bias, const Storage* initial_state,
                                const int* seq_idx, const i64* cu_seqlens, Storage* y, Storage* final_state, i64 batches,
                                i64 channels, i64 length, i64 taps, i64 sequences, i64 x_batch, i64 x_channel,
                                i64 x_time, i64 y_batch, i64 y_channel, i64 y_time, i64 lane_bits, i64 steps,
                                i64 pieces, i64 flags) {
    const Piece piece(x, x_batch, x_channel, batches, channels, pieces, lane_bits, steps);
    if (!piece.there) return;
    const Runs runs(seq_idx, cu_seqlens, sequences, length, taps, piece.batch);
    const int time = int(length), width = int(taps), slots = width - 1;
    const States states{channels, piece.channel, slots};
    int t = piece.first;
    const Storage* in = x + piece.batch * x_batch + piece.channel * x_channel + t;
    Storage* out = y + piece.batch * y_batch + piece.channel * y_channel + t;
    Inputs inputs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        inputs[u].load(in + u * piece.stride, t + u * piece.stride, u < int(steps) ? time : 0, width);
    Filter filter;
    filter.load(weight, bias, piece.channel, width, flags);

    int number = runs.number(smaller(t, time - 1));
#pragma unroll 1
    for (int left = int(steps); left > 0; left -= UNROLL) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (u >= left || t >= time) return;
            const Place place = runs.at(t, number);
            float x[SPAN], sum[VECTOR];
            inputs[u].spread(x, place, states.of(initial_state, place.entering), width);
            const int ahead = UNROLL * piece.stride;
            inputs[u].load(in + ahead, t + ahead, u + UNROLL < left ? time : 0, width);
            convolve(sum, x, filter, width);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum[i] = place.padding ? 0.f : activated(sum[i], flags);
            store(out, t, time, sum);
            t += piece.stride, in += piece.stride, out += piece.stride;

            if (rarely(final_state && place.ahead < VECTOR && place.leaving >= 0)) {
                Storage* const after = states.of(final_state, place.leaving);
#pragma unroll
                for (int j = 0; j < TAPS - 1; j++) {
                    float input = 0;
#pragma unroll
                    for (int i = 0; i < VECTOR; i++)
                        if (i == place.ahead) input = x[TAPS - 1 + i - j];
                    if (j < slots) after[slots - 1 - j] = Element::narrow(input);
                }
            }
        }
    }
}
