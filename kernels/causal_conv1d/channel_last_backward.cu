// Backward pass, channels contiguous. With g[t] the gradient of y[t] before the activation:
//
//     x_grad[t]  = sum over j of tap[j] * g[t + j]
//     tap_grad[j] = sum over t of g[t] * x[t - j],  bias_grad = sum over t of g[t]
//
// Traffic: an element of x, y_grad and x_grad, and TAPS - 1 of `steps` rows of x and y_grad once more on either side, from
// the L2. Tiles are those of channel_last.cuh; a thread goes on for TAPS - 1 steps after its last, whose g reach back.
//
// grad[j] gathers the gradient of the input j steps back. After TAPS - 1 further steps, or where its run ends, it is
// complete. At the begin of a run, the inputs before it are those of its state, and so are their gradients.
//
// `partials` (batches * pieces, width + 1, channels) takes the CTA's sums, first those of the taps; null if nobody wants
// them. reduction.cu adds them in a fixed order, so results are the same in every run.
#include "channel_last.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_channel_last_backward(const Storage* x, const void* weight, const void* bias,
                                    const Storage* initial_state, const int* seq_idx, const i64* offsets,
                                    const Storage* y_grad, const Storage* final_state_grad, Storage* x_grad,
                                    Storage* initial_state_grad, float* partials, i64 batches, i64 channels, i64 time,
                                    i64 width, i64 sequences, i64 x_batch, i64 x_channel, i64 x_time,
                                    i64 y_grad_batch, i64 y_grad_channel, i64 y_grad_time, i64 x_grad_batch,
                                    i64 x_grad_channel, i64 x_grad_time, i64 lane_bits, i64 steps, i64 pieces,
                                    i64 flags) {
    const Tile tile(channels, time, lane_bits, steps, pieces, flags);
    float tap_grad[TAPS][VECTOR] = {}, bias_grad[VECTOR] = {};

    // Threads without a step stay, since a CTA's sums meet.
    if (tile.any()) {
        const Storage* const rows = x + tile.batch * x_batch;
        Storage* const out = x_grad + tile.batch * x_grad_batch;
        const Runs runs{seq_idx ? seq_idx + tile.batch * time : nullptr, offsets, sequences, time};
        const i64 earliest = larger(tile.first - (TAPS - 1), 0), latest = smaller(tile.end + TAPS - 1, time);
        Stream stream(tile, rows, x_time, earliest, latest);
        Stream grads(tile, y_grad + tile.batch * y_grad_batch, y_grad_time, tile.first, latest);

        Channels own;
        own.load(tile, weight, bias, width, flags);
        Run run;
        const bool starts = run.enter(runs, earliest);
        own.begin(tile,
                  starts ? states_of(initial_state, state_before(runs, run, tile.batch), channels, width) : nullptr,
                  width);
        float grad[TAPS][VECTOR] = {};

        // The gradient of the input at `t` is `complete`.
        const auto emit = [&](i64 t, const float (&complete)[VECTOR]) {
            if (t >= run.begin && t >= 0) {
                if (t >= tile.first && t < tile.end) tile.store(out + t * x_grad_time, complete);
                return;
            }
            const i64 number = state_before(runs, run, tile.batch), slot = width - 1 + t - run.begin;
            if (!initial_state_grad || number < 0 || slot < 0 || slot >= width - 1) return;
            if (run.begin < tile.first || run.begin >= tile.end) return;
            Storage* const states = states_of(initial_state_grad, number, channels, width);
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                if (tile.has(v)) states[tile.at(v) * (width - 1) + slot] = Element::narrow(complete[v]);
        };
        // The run has ended before `end`.
        const auto finish = [&](i64 end) {
            const i64 number = state_after(runs, run, tile.batch, end);
            const Storage* const after = states_of(final_state_grad, number, channels, width);
#pragma unroll
            for (int q = 1; q < TAPS; q++) {
                if (after && q < width) {
#pragma unroll
                    for (int v = 0; v < VECTOR; v++)
                        if (tile.has(v)) grad[q - 1][v] += Element::widen(after[tile.at(v) * (width - 1) + width - 1 - q]);
                }
                emit(end - q, grad[q - 1]);
            }
        };

        i64 t = earliest;
        const auto enter = [&] {
            if constexpr (!ALIGNED) {
                if (runs.several() && t > earliest) {
                    const Run before = run;
                    if (run.advance(runs, t)) {
                        const Run entered = run;
                        run = before;
                        finish(t);
                        run = entered;
                        own.begin(tile,
                                  states_of(initial_state, state_before(runs, run, tile.batch), channels, width),
                                  width);
#pragma unroll
                        for (int j = 0; j < TAPS; j++)
#pragma unroll
                            for (int v = 0; v < VECTOR; v++) grad[j][v] = 0;
                    }
                }
            }
            own.push(stream.pop(tile));
#pragma unroll
            for (int j = TAPS - 1; j > 0; j--)
#pragma unroll
                for (int v = 0; v < VECTOR; v++) grad[j][v] = grad[j - 1][v];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) grad[0][v] = 0;
        };
#pragma unroll 1
        for (; t < tile.first; t++) enter();

#pragma unroll(UNROLLED)
        for (; t < latest; t++) {
            enter();
            const Chunk<Element, VECTOR> of_y = grads.pop(tile);
            float g[VECTOR];
            own.convolve(g, width);
            const bool padding = runs.is_padding(t);
            const bool counts = t < tile.end;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                g[v] = padding ? 0.f : activated_grad(g[v], of_y.get(v), flags);
                if (counts) bias_grad[v] += g[v];
            }
#pragma unroll
            for (int j = 0; j < TAPS; j++)
                if (j < width) {
#pragma unroll
                    for (int v = 0; v < VECTOR; v++) {
                        grad[j][v] = __fmaf_rn(own.tap[j][v], g[v], grad[j][v]);
                        if (counts) tap_grad[j][v] = __fmaf_rn(g[v], own.x[j][v], tap_grad[j][v]);
                    }
                }
            emit(t - (TAPS - 1), grad[TAPS - 1]);
        }
        if (t == time) finish(time);
    }
    if (!partials) return;

    // Sums of the CTA's groups, one row of `shared` a group.
    __shared__ float shared[THREADS * VECTOR];
    const int across = tile.lanes * VECTOR, groups = THREADS / tile.lanes;
    const int lane = threadIdx.x & (tile.lanes - 1);
    float* const to = partials + (tile.batch * pieces + tile.piece) * (width + 1) * channels;
#pragma unroll
    for (int j = 0; j <= TAPS; j++) {
        if (j < TAPS && j >= width) continue;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            const int c = tile.chunks ? lane * VECTOR + v : lane + v * tile.lanes;
            shared[tile.slot * across + c] = j < TAPS ? tap_grad[j < TAPS ? j : 0][v] : bias_grad[v];
        }
        __syncthreads();
        const i64 row = j < TAPS ? j : width;
        const i64 first_channel = tile.channel - (tile.chunks ? lane * VECTOR : lane);
        for (int c = threadIdx.x; c < across; c += THREADS) {
            float sum = 0;
#pragma unroll 1
            for (int group = 0; group < groups; group++) sum += shared[group * across + c];
            if (first_channel + c < channels) to[row * channels + first_channel + c] = sum;
        }
        __syncthreads();
    }
}
