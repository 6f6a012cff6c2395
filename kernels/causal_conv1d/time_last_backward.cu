// Backward pass, time contiguous. With g[t] the gradient of y[t] before the activation:
//
//     x_grad[t]  = sum over j of tap[j] * g[t + j]
//     tap_grad[j] = sum over t of g[t] * x[t - j],  bias_grad = sum over t of g[t]
//
// Traffic: an element of x, y_grad and x_grad. Pieces and tiles are those of time_last.cuh; a group goes through them
// backwards. What a lane needs of the g after its own steps comes from the lanes next to it, by shuffles: those of the tile
// that the group had before follow the last lane. The first steps after the piece are computed once more.
//
// `partials` (batches * pieces, width + 1, channels) takes each piece's sums, first those of the taps; null if nobody wants
// them. reduction.cu adds them in a fixed order, so results are the same in every run.
//
// The gradient of a state comes from the lane that has its run's first step.
#include "time_last.cuh"

// CTAs that an SM is to have room for. Fewer wait longer for each other's instructions; for more, older GPUs lack registers.
#if __CUDA_ARCH__ >= 900
enum : int { RESIDENT = 5 };
#else
enum : int { RESIDENT = 4 };
#endif
// How many tiles before its turn the L2 reads a tile from memory. A thread's registers hold but one tile that is under way.
enum : int { LEAD = 3 };
enum : int { KEPT = VECTOR < TAPS - 1 ? VECTOR : TAPS - 1 };  // of each lane, what others may need

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
causal_conv1d_time_last_backward(const Storage* x, const void* weight, const void* bias, const Storage* initial_state,
                                 const int* seq_idx, const i64* cu_seqlens, const Storage* y_grad,
                                 const Storage* final_state_grad, Storage* x_grad, Storage* initial_state_grad,
                                 float* partials, i64 batches, i64 channels, i64 all_steps, i64 taps, i64 sequences,
                                 i64 x_batch, i64 x_channel, i64 x_time, i64 y_grad_batch, i64 y_grad_channel,
                                 i64 y_grad_time, i64 x_grad_batch, i64 x_grad_channel, i64 x_grad_time,
                                 i64 lane_bits, i64 steps, i64 pieces, i64 flags) {
    const Piece piece(x, x_batch, x_channel, batches, channels, pieces, lane_bits, steps);
    // Lanes of groups that have no piece stay, since gradients and sums go from lane to lane.
    const int time = piece.there ? int(all_steps) : 0, width = int(taps), slots = width - 1;
    const Runs runs(seq_idx, cu_seqlens, sequences, all_steps, taps, piece.batch);
    const States states{channels, piece.channel, slots};
    Filter filter;
    filter.load(weight, bias, piece.channel, width, flags);
    float tap_grad[TAPS] = {}, bias_grad = 0;

    const int group = threadIdx.x % 32 - piece.lane;  // its first lane
    int t = piece.first + int(steps - 1) * piece.stride;
    const Storage* in = x + piece.batch * x_batch + piece.channel * x_channel + t;
    const Storage* grads = y_grad + piece.batch * y_grad_batch + piece.channel * y_grad_channel + t;
    Storage* out = x_grad + piece.batch * x_grad_batch + piece.channel * x_grad_channel + t;
    int number = runs.number(smaller(t, time - 1));
    Inputs inputs;
    OutputGrads output_grads;
    inputs.load(in, t, time, width), output_grads.load(grads, t, time);
    // This lane's 32 bytes of a tile, and of x or of y_grad.
    const Storage* soon = (2 * piece.lane < piece.lanes ? in : grads - piece.stride) + piece.lane * VECTOR;
#pragma unroll
    for (int n = 1; n <= LEAD; n++) {
        soon -= piece.stride;
        if (ALIGNED && n < LEAD && n < int(steps) && t < time) prefetch(soon);
    }

    // Gradients at the begin of the tile after.
    float kept[KEPT] = {};
    if (t + piece.stride < time && piece.lane * VECTOR < TAPS - 1) {
        Inputs beyond;
        OutputGrads of_y;
        beyond.load(in + piece.stride, t + piece.stride, time, width);
        of_y.load(grads + piece.stride, t + piece.stride, time);
        const Place place = runs.at(t + piece.stride, number);
        float x[SPAN], given[VECTOR], sum[KEPT];
        beyond.spread(x, place, states.of(initial_state, place.entering), width);
        convolve(sum, x, filter, width);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) given[i] = of_y.get(i);
        activation_grads(kept, sum, given, place, flags);
    }

    for (int s = int(steps) - 1; s >= 0; s--) {
        // Steps that there are not have zeros.
        Place place{t, time - 1 - t, -1, -1, true};
        if (ALIGNED || t < time) place = runs.at(t, number);
        float x[SPAN], g[VECTOR + TAPS - 1], given[VECTOR];
        inputs.spread(x, place, states.of(initial_state, place.entering), width);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) given[i] = output_grads.get(i);
        Storage* const to = out;
        const int own = t;
        t -= piece.stride, in -= piece.stride, grads -= piece.stride, out -= piece.stride;
        if (s > 0) inputs.load(in, t, time, width), output_grads.load(grads, t, time);
        if (ALIGNED && s >= LEAD && t < time) prefetch(soon);
        soon -= piece.stride;

        float sum[VECTOR];
        convolve(sum, x, filter, width);
        activation_grads(g, sum, given, place, flags);
#pragma unroll
        for (int m = 0; m < TAPS - 1; m++) {
            const int distance = 1 + m / VECTOR;  // in lanes
            const float later = __shfl_sync(0xffffffffu, piece.lane < distance ? kept[m % VECTOR] : g[m % VECTOR],
                                            group + ((piece.lane + distance) & (piece.lanes - 1)));
            g[VECTOR + m] = ALIGNED || VECTOR + m <= place.ahead ? later : 0.f;
        }
#pragma unroll
        for (int i = 0; i < KEPT; i++) kept[i] = g[i];
        if (own >= time) continue;

#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] = 0;
        add_taps(sum, filter, width, [&](int i, int j) { return g[i + j]; });
        if (rarely(final_state_grad && place.ahead < VECTOR + slots)) {
            const Storage* const after = states.of(final_state_grad, place.leaving);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (after && place.ahead - i < slots && place.ahead >= i)
                    sum[i] += Element::widen(after[slots - 1 - (place.ahead - i)]);
        }
        store(to, own, time, sum);

        if (partials) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                bias_grad += g[i];
                // Of taps beyond the width nobody asks.
#pragma unroll
                for (int j = 0; j < TAPS; j++) tap_grad[j] = __fmaf_rn(g[i], x[TAPS - 1 + i - j], tap_grad[j]);
            }
        }
        if (rarely(initial_state_grad && place.before <= 0 && place.before > -VECTOR && place.entering >= 0)) {
            Storage* const entering = states.of(initial_state_grad, place.entering);
            const Storage* const after = states.of(final_state_grad, place.leaving);
            // The run's first step is the lane's step -before: bit by bit, since registers have no index.
            float later[VECTOR + TAPS - 1];
#pragma unroll
            for (int m = 0; m < VECTOR + TAPS - 1; m++) later[m] = g[m];
#pragma unroll
            for (int bit = 0; bit < 3; bit++)
#pragma unroll
                for (int m = 0; m < VECTOR + TAPS - 1; m++)
                    if ((1 << bit) < VECTOR && m + (1 << bit) < VECTOR + TAPS - 1)
                        later[m] = -place.before >> bit & 1 ? later[m + (1 << bit)] : later[m];
            write_entering_grads(entering, filter, later, place.before + place.ahead + 1, width, after);
        }
    }
    if (!partials) return;

#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, bias_grad, distance);
        bias_grad += distance < piece.lanes ? other : 0.f;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) {
                const float other = __shfl_xor_sync(0xffffffffu, tap_grad[j], distance);
                tap_grad[j] += distance < piece.lanes ? other : 0.f;
            }
    }
    if (!piece.there || piece.lane) return;
    float* const to = partials + (piece.batch * pieces + piece.number) * (width + 1) * channels + piece.channel;
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        if (j < width) to[j * channels] = tap_grad[j];
    to[width * channels] = bias_grad;
}
