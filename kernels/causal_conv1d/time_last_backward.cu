// Backward pass, time contiguous. With g[t] the gradient of y[t] before the activation:
//
//     x_grad[t]  = sum over j of tap[j] * g[t + j]
//     tap_grad[j] = sum over t of g[t] * x[t - j],  bias_grad = sum over t of g[t]
//
// Traffic: an element of x, y_grad and x_grad. A lane computes g of its own chunk and of the TAPS - 1 steps after it, for
// which it convolves those inputs again.
//
// `partials` (batches * pieces, width + 1, channels) takes each piece's sums, first those of the taps; null if nobody wants
// them. reduction.cu adds them in a fixed order, so results are the same in every run.
//
// The gradient of a state comes from the lane that has its run's first step.
#include "time_last.cuh"

enum : int { REACHED = TAPS + VECTOR, SPAN = TAPS + REACHED };  // places with a g; places of the window

struct Loaded {
    Stretch<TAPS> before, after, grad_after;
    Stretch<VECTOR> own, grad;

    __device__ void load(const Storage* x, const Storage* y_grad, i64 begin, i64 time) {
        const i64 end = begin < time ? time : 0;
        before.load(x, begin - TAPS, end);
        own.load(x, begin, end);
        grad.load(y_grad, begin, end);
        after.load(x, begin + VECTOR, end);
        grad_after.load(y_grad, begin + VECTOR, end);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_time_last_backward(const Storage* x, const void* weight, const void* bias, const Storage* initial_state,
                                 const int* seq_idx, const i64* offsets, const Storage* y_grad,
                                 const Storage* final_state_grad, Storage* x_grad, Storage* initial_state_grad,
                                 float* partials, i64 batches, i64 channels, i64 time, i64 width, i64 sequences,
                                 i64 x_batch, i64 x_channel, i64 x_time, i64 y_grad_batch, i64 y_grad_channel,
                                 i64 y_grad_time, i64 x_grad_batch, i64 x_grad_channel, i64 x_grad_time,
                                 i64 lane_bits, i64 steps, i64 pieces, i64 flags) {
    const Piece piece(batches, channels, pieces, lane_bits, steps);
    // Lanes of groups that have no piece stay, since sums go from lane to lane.
    const i64 length = piece.there ? time : 0;
    const Storage* const row = x + piece.batch * x_batch + piece.channel * x_channel;
    const Storage* const grad_row = y_grad + piece.batch * y_grad_batch + piece.channel * y_grad_channel;
    Storage* const out = x_grad + piece.batch * x_grad_batch + piece.channel * x_grad_channel;
    const int phase = phase_of(row);
    const Runs runs{seq_idx ? seq_idx + piece.batch * time : nullptr, offsets, sequences, time};
    const i64 slots = width - 1, state_line = piece.row * slots;
    const Storage* const state = initial_state && !runs.varlen() && piece.there ? initial_state + state_line : nullptr;

    Filter filter;
    filter.load(weight, bias, piece.channel, width, flags);
    float tap_grad[TAPS] = {}, bias_grad = 0;

    i64 begin = piece.chunk * VECTOR - phase;
    Loaded next;
    next.load(row, grad_row, begin, length);
    for (i64 s = 0; s < steps; s++) {
        const Loaded loaded = next;
        const i64 after = begin + piece.lanes * VECTOR;
        if (s + 1 < steps) next.load(row, grad_row, after, length);
        if (begin < length) {
            Window<SPAN> window;
            window.begin = begin;
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                window.x[k] = loaded.before.get(k);
                window.x[REACHED + k] = loaded.after.get(k);
            }
#pragma unroll
            for (int i = 0; i < VECTOR; i++) window.x[TAPS + i] = loaded.own.get(i);
            window.put_state(state, width);
            window.mark(runs);

            float g[REACHED];
            window.convolve<TAPS>(g, filter, width);
            if constexpr (!ALIGNED) {
                if (runs.varlen() && initial_state) {
#pragma unroll
                    for (int i = 0; i < REACHED; i++)
                        g[i] += window.from_states(TAPS + i, weight, piece.channel, runs,
                                                   initial_state + piece.channel * slots, channels * slots, width,
                                                   flags);
                }
            }
#pragma unroll
            for (int i = 0; i < REACHED; i++) {
                const float grad = i < VECTOR ? loaded.grad.get(i) : loaded.grad_after.get(i - VECTOR);
                const bool inside = begin + i >= 0 && begin + i < length && !window.is_padding(TAPS + i);
                g[i] = inside ? activated_grad(g[i], grad, flags) : 0.f;
            }

            float grads[VECTOR] = {};
#pragma unroll
            for (int j = 0; j < TAPS; j++)
                if (j < width) {
#pragma unroll
                    for (int i = 0; i < VECTOR; i++) {
                        const bool inside = begin + i + j < length;
                        if (inside && window.has(TAPS + i + j, j))
                            grads[i] = __fmaf_rn(filter.tap[j], g[i + j], grads[i]);
                    }
                }
            if (final_state_grad) {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    const i64 t = begin + i;
                    if (t < 0 || t >= length) continue;
                    i64 last = length - 1, line = state_line;
                    if constexpr (!ALIGNED) {
                        if (runs.varlen()) {
                            const i64 number = runs.number(t);
                            last = larger(offsets[number + 1] - 1, t);
                            line = (number * channels + piece.channel) * slots;
                        } else if (seq_idx && last - t < slots) {
#pragma unroll 1
                            for (i64 k = t; k < last; k++)
                                if (runs.index[k] != runs.index[k + 1]) line = -1;
                        }
                    }
                    if (last - t < slots && line >= 0)
                        grads[i] += Element::widen(final_state_grad[line + slots - 1 - (last - t)]);
                }
            }
            store_chunk(out, begin, length, grads);

            if (partials) {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) bias_grad += g[i];
#pragma unroll
                for (int j = 0; j < TAPS; j++)
                    if (j < width) {
#pragma unroll
                        for (int i = 0; i < VECTOR; i++)
                            if (begin + i >= 0 && begin + i < length && window.has(TAPS + i, j))
                                tap_grad[j] = __fmaf_rn(g[i], window.x[TAPS + i - j], tap_grad[j]);
                    }
            }

            const bool with_states = ALIGNED ? initial_state_grad && begin == 0
                                             : (initial_state_grad || (initial_state && partials)) &&
                                                   (begin < TAPS || runs.varlen());
            if (with_states) {
                // By an index that registers do not take; every thread has its own line.
                __shared__ float shared[THREADS][REACHED];
                float* const mine = shared[threadIdx.x];
#pragma unroll
                for (int i = 0; i < REACHED; i++) mine[i] = g[i];
#pragma unroll 1
                for (int i = 0; i < VECTOR; i++) {
                    const i64 t = begin + i;
                    if (t < 0 || t >= length || (!runs.varlen() && t > 0)) continue;
                    i64 end = length, line = state_line, run_begin = 0;
                    if constexpr (!ALIGNED) {
                        if (runs.varlen()) {
                            const i64 number = runs.number(t);
                            run_begin = offsets[number], end = smaller(offsets[number + 1], length);
                            line = (number * channels + piece.channel) * slots;
                            if (partials && initial_state && t >= run_begin) {
#pragma unroll
                                for (int j = 1; j < TAPS; j++)
                                    if (j < width && j > t - run_begin)
                                        tap_grad[j] = __fmaf_rn(
                                            mine[i],
                                            Element::widen(initial_state[line + slots + (t - run_begin) - j]),
                                            tap_grad[j]);
                            }
                        } else if (seq_idx) {
                            end = 1;
#pragma unroll 1
                            while (end < length && end < width && runs.index[end] == runs.index[0]) end++;
                        }
                    }
                    if (t != run_begin || !initial_state_grad) continue;
#pragma unroll 1
                    for (i64 q = 1; q < width; q++) {  // the input q steps before the run
                        float sum = 0;
#pragma unroll
                        for (int j = 1; j < TAPS; j++)
                            if (j >= q && j < width && t + j - q < end)
                                sum = __fmaf_rn(filter.tap[j], mine[i + j - int(q)], sum);
                        // Of a run that is shorter than the state, the final state has that input, too.
                        const i64 at = slots - q - (end - t);
                        const bool ends = runs.varlen() || end == length;
                        if (final_state_grad && ends && at >= 0)
                            sum += Element::widen(final_state_grad[line + at]);
                        initial_state_grad[line + slots - q] = Element::narrow(sum);
                    }
                }
            }
        }
        begin = after;
    }
    if (!partials) return;

#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        bias_grad += distance < piece.lanes ? __shfl_xor_sync(0xffffffffu, bias_grad, distance) : 0.f;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width)
                tap_grad[j] += distance < piece.lanes ? __shfl_xor_sync(0xffffffffu, tap_grad[j], distance) : 0.f;
    }
    if (!piece.there || (threadIdx.x & (piece.lanes - 1)) != 0) return;
    float* const to = partials + (piece.batch * pieces + piece.number) * (width + 1) * channels + piece.channel;
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        if (j < width) to[j * channels] = tap_grad[j];
    to[width * channels] = bias_grad;
}
