// Backward pass, channels contiguous. With g[t] the gradient of y[t] before the activation:
//
//     x_grad[t]  = sum over j of tap[j] * g[t + j]
//     tap_grad[j] = sum over t of g[t] * x[t - j],  bias_grad = sum over t of g[t]
//
// Traffic: an element of x, y_grad and x_grad, and of `steps` rows TAPS - 1 of x and y_grad once more on either side, from
// the L2. Tiles are those of channel_last.cuh. A thread goes backwards in time, from TAPS - 1 steps after its last one, and
// keeps the g of the steps that it was at.
//
// `partials` (batches * pieces, width + 1, channels) takes the CTA's sums, first those of the taps; null if nobody wants
// them. reduction.cu adds them in a fixed order, so results are the same in every run.
#include "channel_last.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_channel_last_backward(const Storage* x, const void* weight, const void* bias,
                                    const Storage* initial_state, const int* seq_idx, const i64* cu_seqlens,
                                    const Storage* y_grad, const Storage* final_state_grad, Storage* x_grad,
                                    Storage* initial_state_grad, float* partials, i64 batches, i64 channels, i64 length,
                                    i64 taps, i64 sequences, i64 x_batch, i64 x_channel, i64 x_time,
                                    i64 y_grad_batch, i64 y_grad_channel, i64 y_grad_time, i64 x_grad_batch,
                                    i64 x_grad_channel, i64 x_grad_time, i64 lane_bits, i64 steps, i64 pieces,
                                    i64 flags) {
    const Tile tile(channels, length, lane_bits, steps, pieces);
    const int width = int(taps), slots = width - 1;
    float tap_grad[TAPS][VECTOR] = {}, bias_grad[VECTOR] = {};

    const Storage* const in = x + tile.batch * x_batch + tile.channel;
    int t = int(smaller(tile.end + TAPS - 1, length)) - 1;
    const int left = t + 1 - (TAPS - 1);
    Window window;
    Stream inputs(in + (left - 1) * x_time, -x_time, tile.any ? left : 0);
    Stream grads(y_grad + tile.batch * y_grad_batch + t * y_grad_time + tile.channel, -y_grad_time,
                 tile.any ? t + 1 - tile.first : 0);
#pragma unroll
    for (int j = 1; j < TAPS; j++) window.set(j, row_at(in, x_time, tile.any ? t + 1 - j : -1));
    const Filters filters(tile, weight, bias, channels, width, flags);

    // Threads without a step stay, since a CTA's sums meet.
    if (tile.any) {
        const Runs runs(seq_idx, cu_seqlens, sequences, length, taps, tile.batch);
        const States states{channels, tile.channel, slots};
        Storage* out = x_grad + tile.batch * x_grad_batch + (tile.end - 1) * x_grad_time + tile.channel;
        float g[TAPS][VECTOR] = {};  // g[m] is that of m steps later

        int number = runs.number(t);
        const auto step = [&](bool near_an_end) {
#pragma unroll
            for (int j = 0; j + 1 < TAPS; j++)
#pragma unroll
                for (int v = 0; v < VECTOR; v++) window.x[j][v] = window.x[j + 1][v];
            window.set(TAPS - 1, inputs.pop());
            const Row of_y = grads.pop();
            Window shown = window;
            Place place{t, TAPS, -1, -1, false};
            bool own = true;
            if (near_an_end) {
                place = runs.at(t, number);
                own = t < tile.end;
                if (place.before < slots) shown.enter(place, states.of(initial_state, place.entering), width);
            }
            float sum[VECTOR];
            shown.convolve(sum, filters, width);
#pragma unroll
            for (int m = TAPS - 1; m > 0; m--)
#pragma unroll
                for (int v = 0; v < VECTOR; v++) g[m][v] = place.ahead ? g[m - 1][v] : 0.f;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) g[0][v] = place.padding ? 0.f : activated_grad(sum[v], of_y.get(v), flags);
            t--;
            if (!own) return;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) bias_grad[v] += g[0][v], sum[v] = 0;
#pragma unroll
            for (int j = 0; j < TAPS; j++)
                if (j < width) {
#pragma unroll
                    for (int v = 0; v < VECTOR; v++) {
                        sum[v] = __fmaf_rn(filters.of[v].tap[j], g[j][v], sum[v]);
                        tap_grad[j][v] = __fmaf_rn(g[0][v], shown.x[j][v], tap_grad[j][v]);
                    }
                }
            if (near_an_end) {
                const Storage* const after =
                    place.ahead < slots ? states.of(final_state_grad, place.leaving) : nullptr;
                if (after) {
#pragma unroll
                    for (int v = 0; v < VECTOR; v++) sum[v] += Element::widen(after[(v + 1) * slots - 1 - place.ahead]);
                }
                Storage* const entering = place.before ? nullptr : states.of(initial_state_grad, place.entering);
                if (entering) {
#pragma unroll
                    for (int v = 0; v < VECTOR; v++) {
                        float later[TAPS];
#pragma unroll
                        for (int m = 0; m < TAPS; m++) later[m] = g[m][v];
                        write_entering_grads(entering + v * slots, filters.of[v], later, place.ahead + 1, width,
                                             after ? after + v * slots : after);
                    }
                }
            }
            store_row(out, sum);
            out -= x_grad_time;
        };
        // Inner steps are a loop of their own where runs have two ends in all.
        const int inner = int(larger(tile.first, TAPS - 1));
#pragma unroll 1
        while (t >= tile.first) {
            if (ALIGNED && t < tile.end && t < runs.time - (TAPS - 1)) {
#pragma unroll(UNROLLED)
                for (int n = t - inner; n >= 0; n--) step(false);
                if (t < tile.first) break;
            }
            step(true);
        }
    }
    if (!partials) return;

    // Sums of the CTA's groups, one row of `shared` a group.
    __shared__ float shared[THREADS * VECTOR];
    const int across = tile.lanes * VECTOR, groups = THREADS / tile.lanes;
    const i64 first_channel = tile.channel - tile.lane * VECTOR;
    float* const to = partials + (tile.batch * pieces + tile.piece) * (width + 1) * channels + first_channel;
#pragma unroll
    for (int j = 0; j <= TAPS; j++) {
        if (j < TAPS && j >= width) continue;
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            shared[tile.slot * across + tile.lane * VECTOR + v] = j < TAPS ? tap_grad[j < TAPS ? j : 0][v] : bias_grad[v];
        __syncthreads();
        const i64 row = j < TAPS ? j : width;
        for (int c = threadIdx.x; c < across; c += THREADS) {
            float sum = 0;
#pragma unroll 1
            for (int group = 0; group < groups; group++) sum += shared[group * across + c];
            if (first_channel + c < channels) to[row * channels + c] = sum;
        }
        __syncthreads();
    }
}
