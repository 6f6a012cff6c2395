// Backward pass, channels contiguous. With g[t] the gradient of y[t] before the activation:
//
//     x_grad[t]  = sum over j of tap[j] * g[t + j]
//     tap_grad[j] = sum over t of g[t] * x[t - j],  bias_grad = sum over t of g[t]
//
// Traffic: an element of x, y_grad and x_grad, and of `steps` rows TAPS - 1 of x and y_grad once more on either side, from
// the L2. channel_last.cuh has the picture of tiles. A thread goes backwards in time, from TAPS - 1 steps after its last
// one, and keeps the g of the steps after the one it is at.
//
// `partials` (batches * pieces, width + 1, channels) takes the CTA's sums, first those of the taps; null if no gradient of
// weight or bias is wanted. reduction.cu adds them in a fixed order, so results are the same in every run.
#include "channel_last.cuh"

struct Arguments {
    Strided<const Storage*> x, y_grad;
    Strided<Storage*> x_grad;
    const void *weight, *bias;
    const Storage *initial_state, *final_state_grad;
    Storage* initial_state_grad;
    const int* seq_idx;
    const i64* cu_seqlens;
    float* partials;
    i64 channels, time, width, sequences, lane_bits, steps, pieces, flags;
};

struct Backward {
    const Arguments& args;

    const Tile tile{args.channels, args.time, args.lane_bits, args.steps, args.pieces};
    const int width = int(args.width), slots = width - 1;
    float tap_grad[TAPS][VECTOR] = {}, bias_grad[VECTOR] = {};

    const Storage* const in = args.x.data + tile.batch * args.x.batch + tile.channel;
    int t = int(smaller(tile.end + TAPS - 1, args.time)) - 1;
    const int left = t + 1 - (TAPS - 1);
    Window window;
    Stream inputs{in + (left - 1) * args.x.time, -args.x.time, tile.any ? left : 0};
    Stream grads{args.y_grad.data + tile.batch * args.y_grad.batch + t * args.y_grad.time + tile.channel, -args.y_grad.time,
                 tile.any ? t + 1 - tile.first : 0};
    Storage* out = args.x_grad.data + tile.batch * args.x_grad.batch + (tile.end - 1) * args.x_grad.time + tile.channel;
    float g[TAPS][VECTOR] = {};  // g[m] is that of m steps later

    __device__ explicit Backward(const Arguments& args) : args(args) {}

    __device__ void run() {
#pragma unroll
        for (int j = 1; j < TAPS; j++) window.set(j, row_at(in, args.x.time, tile.any ? t + 1 - j : -1));
        const Filters filters(tile, args.weight, args.bias, args.channels, width, args.flags);
        // Threads without a step stay, since the sums of a CTA meet.
        if (tile.any) step_back(filters);
        if (args.partials) store_sums();
    }

    // Inner steps are a loop of their own where runs have two ends in all.
    __device__ void step_back(const Filters& filters) {
        const Runs runs(args.seq_idx, args.cu_seqlens, args.sequences, args.time, args.width, tile.batch);
        int number = runs.number(t);
        const int inner = int(larger(tile.first, TAPS - 1));
#pragma unroll 1
        while (t >= tile.first) {
            if (ALIGNED && t < tile.end && t < runs.time - (TAPS - 1)) {
#pragma unroll(UNROLLED)
                for (int n = t - inner; n >= 0; n--) step<false>(filters, runs, number);
                if (t < tile.first) break;
            }
            step<true>(filters, runs, number);
        }
    }

    template <bool NEAR_AN_END>
    __device__ void step(const Filters& filters, const Runs& runs, int& number) {
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) window.x[j][v] = window.x[j + 1][v];
        window.set(TAPS - 1, inputs.pop());
        const Row of_y = grads.pop();
        const States states{args.channels, tile.channel, slots};
        Window shown = window;
        Place place{t, TAPS, -1, -1, false};
        bool own = true;
        if (NEAR_AN_END) {
            place = runs.at(t, number);
            own = t < tile.end;
            if (place.before < slots) shown.enter(place, states.of(args.initial_state, place.entering), width);
        }
        float sum[VECTOR];
        shown.convolve(sum, filters, width);
#pragma unroll
        for (int m = TAPS - 1; m > 0; m--)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) g[m][v] = place.ahead ? g[m - 1][v] : 0.f;
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            g[0][v] = place.padding ? 0.f : activated_grad(sum[v], of_y.get(v), args.flags);
        t--;
        if (!own) return;
        add_taps(sum, shown, filters);
        if (NEAR_AN_END) add_state_grads(sum, place, states, filters);
        store_row(out, sum);
        out -= args.x_grad.time;
    }

    // A step's sums over taps, and its terms of the sums over time.
    __device__ void add_taps(float (&sum)[VECTOR], const Window& shown, const Filters& filters) {
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
    }

    // What reaches x through the final state, and, at a run's first step, the gradient of the state before it.
    __device__ void add_state_grads(float (&sum)[VECTOR], const Place& place, const States& states, const Filters& filters) {
        const Storage* const after = place.ahead < slots ? states.of(args.final_state_grad, place.leaving) : nullptr;
        if (after) {
#pragma unroll
            for (int v = 0; v < VECTOR; v++) sum[v] += Element::widen(after[(v + 1) * slots - 1 - place.ahead]);
        }
        Storage* const entering = place.before ? nullptr : states.of(args.initial_state_grad, place.entering);
        if (!entering) return;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            float later[TAPS];
#pragma unroll
            for (int m = 0; m < TAPS; m++) later[m] = g[m][v];
            write_entering_grads(entering + v * slots, filters.of[v], later, place.ahead + 1, width,
                                 after ? after + v * slots : after);
        }
    }

    // Adds up the sums of the CTA's groups, each in one row of `shared`.
    __device__ void store_sums() const {
        __shared__ float shared[THREADS * VECTOR];
        const int across = tile.lanes * VECTOR, groups = THREADS / tile.lanes;
        const i64 first_channel = tile.channel - tile.lane * VECTOR;
        float* const to =
            args.partials + (tile.batch * args.pieces + tile.piece) * (width + 1) * args.channels + first_channel;
#pragma unroll
        for (int j = 0; j <= TAPS; j++) {
            if (j < TAPS && j >= width) continue;
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                shared[tile.slot * across + tile.lane * VECTOR + v] =
                    j < TAPS ? tap_grad[j < TAPS ? j : 0][v] : bias_grad[v];
            __syncthreads();
            const i64 row = j < TAPS ? j : width;
            for (int c = threadIdx.x; c < across; c += THREADS) {
                float sum = 0;
#pragma unroll 1
                for (int group = 0; group < groups; group++) sum += shared[group * across + c];
                if (first_channel + c < args.channels) to[row * args.channels + c] = sum;
            }
            __syncthreads();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
causal_conv1d_channel_last_backward(const Storage* x, const void* weight, const void* bias,
                                    const Storage* initial_state, const int* seq_idx, const i64* cu_seqlens,
                                    const Storage* y_grad, const Storage* final_state_grad, Storage* x_grad,
                                    Storage* initial_state_grad, float* partials, i64 batches, i64 channels, i64 length,
                                    i64 taps, i64 sequences, i64 x_batch, i64 x_channel, i64 x_time,
                                    i64 y_grad_batch, i64 y_grad_channel, i64 y_grad_time, i64 x_grad_batch,
                                    i64 x_grad_channel, i64 x_grad_time, i64 lane_bits, i64 steps, i64 pieces,
                                    i64 flags) {
    Backward({{x, x_batch, x_channel, x_time},
              {y_grad, y_grad_batch, y_grad_channel, y_grad_time},
              {x_grad, x_grad_batch, x_grad_channel, x_grad_time},
              weight, bias, initial_state, final_state_grad, initial_state_grad, seq_idx, cu_seqlens, partials,
              channels, length, taps, sequences, lane_bits, steps, pieces, flags})
        .run();
}
