// Forward pass, channels contiguous: y[t] = act(bias + sum over j of tap[j] * x[t - j]).
//
// Traffic: an element of x and one of y, and TAPS - 1 of `steps` rows of x once more, from the L2. Tiles are those of
// channel_last.cuh.
#include "channel_last.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_channel_last_forward(const Storage* x, const void* weight, const void* bias,
                                   const Storage* initial_state, const int* seq_idx, const i64* cu_seqlens, Storage* y,
                                   Storage* final_state, i64 batches, i64 channels, i64 length, i64 taps,
                                   i64 sequences, i64 x_batch, i64 x_channel, i64 x_time, i64 y_batch, i64 y_channel,
                                   i64 y_time, i64 lane_bits, i64 steps, i64 pieces, i64 flags) {
    const Tile tile(channels, length, lane_bits, steps, pieces);
    const int width = int(taps), slots = width - 1;
    const Runs runs(seq_idx, cu_seqlens, sequences, length, taps, tile.batch);
    const States states{channels, tile.channel, slots};
    const Storage* const in = x + tile.batch * x_batch + tile.channel;
    Storage* out = y + tile.batch * y_batch + tile.first * y_time + tile.channel;

    Window window;
    Stream stream(in + tile.first * x_time, x_time, tile.end - tile.first);
#pragma unroll
    for (int j = 1; j < TAPS; j++) window.set(j - 1, row_at(in, x_time, tile.any ? tile.first - j : -1));
    const Filters filters(tile, weight, bias, channels, width, flags);
    if (!tile.any) return;

    int t = tile.first, number = runs.number(t);
    const auto step = [&](bool near_an_end) {
#pragma unroll
        for (int j = TAPS - 1; j > 0; j--)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) window.x[j][v] = window.x[j - 1][v];
        window.set(0, stream.pop());
        Window shown = window;
        Place place{t, 0, -1, -1, false};
        if (near_an_end) {
            place = runs.at(t, number);
            if (place.before < slots)
                shown.enter(place, states.of(initial_state, place.entering), width);
        }
        float sum[VECTOR];
        shown.convolve(sum, filters, width);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sum[v] = place.padding ? 0.f : activated(sum[v], flags);
        store_row(out, sum);
        out += y_time, t++;
        if (near_an_end) {
            if (place.ahead) return;
            Storage* const after = states.of(final_state, place.leaving);
            if (!after) return;
#pragma unroll
            for (int j = 0; j < TAPS - 1; j++)
#pragma unroll
                for (int v = 0; v < VECTOR; v++)
                    if (j < slots) after[(v + 1) * slots - 1 - j] = Element::narrow(shown.x[j][v]);
        }
    };
    // Inner steps are a loop of their own where runs have two ends in all.
    const int inner = int(smaller(tile.end, runs.time - 1));
#pragma unroll 1
    while (t < tile.end) {
        if (ALIGNED && t >= TAPS - 1) {
#pragma unroll(UNROLLED)
            for (int n = inner - t; n > 0; n--) step(false);
            if (t == tile.end) break;
        }
        step(true);
    }
}
