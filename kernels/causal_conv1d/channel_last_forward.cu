// Forward pass, channels contiguous: y[t] = act(bias + sum over j of tap[j] * x[t - j]).
//
// Traffic: an element of x and one of y, and TAPS - 1 of `steps` rows of x once more, from the L2. Tiles are those of
// channel_last.cuh.
#include "channel_last.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_channel_last_forward(const Storage* x, const void* weight, const void* bias,
                                   const Storage* initial_state, const int* seq_idx, const i64* offsets, Storage* y,
                                   Storage* final_state, i64 batches, i64 channels, i64 time, i64 width,
                                   i64 sequences, i64 x_batch, i64 x_channel, i64 x_time, i64 y_batch, i64 y_channel,
                                   i64 y_time, i64 lane_bits, i64 steps, i64 pieces, i64 flags) {
    const Tile tile(channels, time, lane_bits, steps, pieces, flags);
    if (!tile.any()) return;
    const Storage* const rows = x + tile.batch * x_batch;
    const Runs runs{seq_idx ? seq_idx + tile.batch * time : nullptr, offsets, sequences, time};
    const i64 earliest = larger(tile.first - (TAPS - 1), 0);
    Stream stream(tile, rows, x_time, earliest, tile.end);

    Channels own;
    own.load(tile, weight, bias, width, flags);
    Run run;
    const bool starts = run.enter(runs, earliest);
    own.begin(tile, starts ? states_of(initial_state, state_before(runs, run, tile.batch), channels, width) : nullptr,
              width);

    const auto finish = [&](i64 end) {
        if (!final_state) return;
        const i64 number = state_after(runs, run, tile.batch, end), before = state_before(runs, run, tile.batch);
        if (number < 0) return;
        Storage* const after = states_of(final_state, number, channels, width);
        const Storage* const entering = states_of(initial_state, before, channels, width);
#pragma unroll 1
        for (int v = 0; v < VECTOR; v++) {
            const i64 line = tile.at(v) * (width - 1);
            if (tile.has(v))
                write_final(after + line, entering ? entering + line : nullptr, rows + tile.at(v), x_time, run.begin,
                            end, width);
        }
    };

    i64 t = earliest;
    const auto enter = [&] {
        if constexpr (!ALIGNED) {
            if (runs.several() && t > earliest && run.advance(runs, t))
                own.begin(tile, states_of(initial_state, state_before(runs, run, tile.batch), channels, width), width);
        }
        own.push(stream.pop(tile));
    };
#pragma unroll 1
    for (; t < tile.first; t++) enter();

    Storage* out = y + tile.batch * y_batch + t * y_time;
#pragma unroll(UNROLLED)
    for (; t < tile.end; t++, out += y_time) {
        enter();
        float sum[VECTOR];
        own.convolve(sum, width);
        const bool padding = runs.is_padding(t);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sum[v] = padding ? 0.f : activated(sum[v], flags);
        tile.store(out, sum);
        if constexpr (!ALIGNED) {
            if (runs.varlen() && (t + 1 == time || t + 1 == offsets[run.number + 1])) finish(t + 1);
        }
    }
    if (!runs.varlen() && t == time) finish(time);
}
