// Forward pass, time contiguous: y[t] = act(bias + sum over j of tap[j] * x[t - j]).
//
// Traffic: an element of x and one of y; pieces and chunks are those of time_last.cuh. A thread has UNROLL chunks of x
// under way at once.
#include "time_last.cuh"

enum : int { UNROLL = ALIGNED ? 2 : 1 };

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_time_last_forward(const Storage* x, const void* weight, const void* bias, const Storage* initial_state,
                                const int* seq_idx, const i64* offsets, Storage* y, Storage* final_state, i64 batches,
                                i64 channels, i64 time, i64 width, i64 sequences, i64 x_batch, i64 x_channel,
                                i64 x_time, i64 y_batch, i64 y_channel, i64 y_time, i64 lane_bits, i64 steps,
                                i64 pieces, i64 flags) {
    const Piece piece(batches, channels, pieces, lane_bits, steps);
    if (!piece.there) return;
    const Storage* const row = x + piece.batch * x_batch + piece.channel * x_channel;
    Storage* const out = y + piece.batch * y_batch + piece.channel * y_channel;
    const int phase = phase_of(row);
    const Runs runs{seq_idx ? seq_idx + piece.batch * time : nullptr, offsets, sequences, time};
    const i64 state_line = piece.row * (width - 1);
    const Storage* const state = initial_state && !runs.varlen() ? initial_state + state_line : nullptr;

    Filter filter;
    filter.load(weight, bias, piece.channel, width, flags);

    for (i64 s = 0; s < steps; s += UNROLL) {
        Stretch<TAPS> before[UNROLL];
        Stretch<VECTOR> own[UNROLL];
        i64 begin[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            begin[u] = s + u < steps ? (piece.chunk + (s + u) * piece.lanes) * VECTOR - phase : time;
            before[u].load(row, begin[u] - TAPS, begin[u] < time ? time : 0);
            own[u].load(row, begin[u], time);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (begin[u] >= time) break;
            Window<TAPS + VECTOR> window;
            window.begin = begin[u];
#pragma unroll
            for (int k = 0; k < TAPS; k++) window.x[k] = before[u].get(k);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) window.x[TAPS + i] = own[u].get(i);
            window.put_state(state, width);
            window.mark(runs);

            float sum[VECTOR];
            window.convolve<TAPS>(sum, filter, width);
            if constexpr (!ALIGNED) {
                if (runs.varlen() && initial_state) {
#pragma unroll
                    for (int i = 0; i < VECTOR; i++)
                        sum[i] += window.from_states(TAPS + i, weight, piece.channel, runs,
                                                     initial_state + piece.channel * (width - 1),
                                                     channels * (width - 1), width, flags);
                }
            }
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                sum[i] = window.is_padding(TAPS + i) ? 0.f : activated(sum[i], flags);
            store_chunk(out, begin[u], time, sum);

            if (!final_state) continue;
            if constexpr (!ALIGNED) {
                if (runs.varlen()) {
#pragma unroll 1
                    for (i64 t = larger(begin[u], 0); t < smaller(begin[u] + VECTOR, time); t++) {
                        const i64 number = runs.number(t);
                        if (t + 1 != time && t + 1 != offsets[number + 1]) continue;
                        const i64 line = (number * channels + piece.channel) * (width - 1);
                        write_final(final_state + line, initial_state ? initial_state + line : nullptr, row, 1,
                                    offsets[number], t + 1, width);
                    }
                    continue;
                }
            }
            if (begin[u] + VECTOR < time) continue;
            i64 first = 0;
            if constexpr (!ALIGNED) {
                if (seq_idx) {
                    first = time - 1;
#pragma unroll 1
                    while (first > 0 && first > time - width && runs.index[first - 1] == runs.index[first]) first--;
                }
            }
            write_final(final_state + state_line, first == 0 ? state : nullptr, row, 1, first, time, width);
        }
    }
}
