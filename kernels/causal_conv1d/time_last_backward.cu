// Backward pass, time contiguous. With g[t] the gradient of y[t] before the activation:
//
//     x_grad[t]  = sum over j of tap[j] * g[t + j]
//     tap_grad[j] = sum over t of g[t] * x[t - j],  bias_grad = sum over t of g[t]
//
// Traffic: an element of x, y_grad and x_grad. Pieces and tiles are those of time_last.cuh; a group goes through them
// backwards. What a lane needs of the g after its own steps comes from the lanes next to it, by shuffles: those of the tile
// that the group had before follow the last lane. The first steps after the piece are computed once more.
//
// `partials` (batches * pieces, width + 1, channels) takes each piece's sums, first those of the taps; null if no gradient
// of weight or bias is wanted. reduction.cu adds them in a fixed order, so results are the same in every run.
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

struct Arguments {
    Strided<const Storage*> x, y_grad;
    Strided<Storage*> x_grad;
    const void *weight, *bias;
    const Storage *initial_state, *final_state_grad;
    Storage* initial_state_grad;
    const int* seq_idx;
    const i64* cu_seqlens;
    float* partials;
    i64 batches, channels, time, width, sequences, lane_bits, steps, pieces, flags;
};

struct Backward {
    const Arguments& args;

    const Piece piece{args.x.data,   args.x.batch, args.x.channel,  args.batches,
                      args.channels, args.pieces,  args.lane_bits, args.steps};
    // Lanes of groups that have no piece stay, since gradients and sums go from lane to lane.
    const int time = piece.there ? int(args.time) : 0, width = int(args.width), slots = width - 1;
    const Runs runs{args.seq_idx, args.cu_seqlens, args.sequences, args.time, args.width, piece.batch};
    const States states{args.channels, piece.channel, slots};
    const int group = threadIdx.x % 32 - piece.lane;  // its first lane

    // The lane's step of the tile that is loaded next, and where it lies.
    int t = piece.first + int(args.steps - 1) * piece.stride;
    const Storage* in = args.x.data + piece.batch * args.x.batch + piece.channel * args.x.channel + t;
    const Storage* grads = args.y_grad.data + piece.batch * args.y_grad.batch + piece.channel * args.y_grad.channel + t;
    Storage* out = args.x_grad.data + piece.batch * args.x_grad.batch + piece.channel * args.x_grad.channel + t;
    int number = runs.number(smaller(t, time - 1));
    Filter filter;
    Inputs inputs;
    OutputGrads output_grads;
    // This lane's 32 bytes of x or of y_grad, of the tile that is prefetched next.
    const Storage* soon;

    float kept[KEPT] = {};  // gradients at the begin of the tile after
    float tap_grad[TAPS] = {}, bias_grad = 0;

    __device__ explicit Backward(const Arguments& args) : args(args) {}

    __device__ void run() {
        filter.load(args.weight, args.bias, piece.channel, width, args.flags);
        load();
        prefetch_first();
        load_beyond();
        for (int s = int(args.steps) - 1; s >= 0; s--) step_back(s);
        if (args.partials) store_sums();
    }

    __device__ void load() { inputs.load(in, t, time, width), output_grads.load(grads, t, time); }

    __device__ void prefetch_first() {
        soon = (2 * piece.lane < piece.lanes ? in : grads - piece.stride) + piece.lane * VECTOR;
#pragma unroll
        for (int n = 1; n <= LEAD; n++) {
            soon -= piece.stride;
            if (ALIGNED && n < LEAD && n < int(args.steps) && t < time) prefetch(soon);
        }
    }

    // Gradients at the begin of the tile after the piece.
    __device__ void load_beyond() {
        if (t + piece.stride >= time || piece.lane * VECTOR >= TAPS - 1) return;
        Inputs beyond;
        OutputGrads of_y;
        beyond.load(in + piece.stride, t + piece.stride, time, width);
        of_y.load(grads + piece.stride, t + piece.stride, time);
        const Place place = runs.at(t + piece.stride, number);
        float x[SPAN], y_grad[VECTOR], sum[KEPT];
        beyond.spread(x, place, states.of(args.initial_state, place.entering), width);
        convolve(sum, x, filter, width);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) y_grad[i] = of_y.get(i);
        activation_grads(kept, sum, y_grad, place, args.flags);
    }

    // Tile `s` of the piece.
    __device__ void step_back(int s) {
        // Steps that do not exist have zeros.
        Place place{t, time - 1 - t, -1, -1, true};
        if (ALIGNED || t < time) place = runs.at(t, number);
        float x[SPAN], g[VECTOR + TAPS - 1], y_grad[VECTOR], sum[VECTOR];
        inputs.spread(x, place, states.of(args.initial_state, place.entering), width);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) y_grad[i] = output_grads.get(i);
        Storage* const to = out;
        const int own = t;
        t -= piece.stride, in -= piece.stride, grads -= piece.stride, out -= piece.stride;
        if (s > 0) load();
        if (ALIGNED && s >= LEAD && t < time) prefetch(soon);
        soon -= piece.stride;

        convolve(sum, x, filter, width);
        activation_grads(g, sum, y_grad, place, args.flags);
        exchange(g, place);
        if (own >= time) return;
        store_inputs_grad(to, own, g, place);
        if (args.partials) add_sums(g, x);
        if (rarely(args.initial_state_grad && place.before <= 0 && place.before > -VECTOR && place.entering >= 0))
            store_state_grad(g, place);
    }

    // The gradients after the lane's own steps come from the lanes after it, and for the last ones from the tile after.
    __device__ void exchange(float (&g)[VECTOR + TAPS - 1], const Place& place) {
#pragma unroll
        for (int m = 0; m < TAPS - 1; m++) {
            const int distance = 1 + m / VECTOR;  // in lanes
            const float later = __shfl_sync(0xffffffffu, piece.lane < distance ? kept[m % VECTOR] : g[m % VECTOR],
                                            group + ((piece.lane + distance) & (piece.lanes - 1)));
            g[VECTOR + m] = ALIGNED || VECTOR + m <= place.ahead ? later : 0.f;
        }
#pragma unroll
        for (int i = 0; i < KEPT; i++) kept[i] = g[i];
    }

    __device__ void store_inputs_grad(Storage* to, int own, const float (&g)[VECTOR + TAPS - 1], const Place& place) const {
        float sum[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] = 0;
        add_taps(sum, filter, width, [&](int i, int j) { return g[i + j]; });
        if (rarely(args.final_state_grad && place.ahead < VECTOR + slots)) {
            const Storage* const after = states.of(args.final_state_grad, place.leaving);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (after && place.ahead - i < slots && place.ahead >= i)
                    sum[i] += Element::widen(after[slots - 1 - (place.ahead - i)]);
        }
        ::store(to, own, time, sum);
    }

    __device__ void add_sums(const float (&g)[VECTOR + TAPS - 1], const float (&x)[SPAN]) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            bias_grad += g[i];
            // The sums of taps beyond the width are not stored.
#pragma unroll
            for (int j = 0; j < TAPS; j++) tap_grad[j] = __fmaf_rn(g[i], x[TAPS - 1 + i - j], tap_grad[j]);
        }
    }

    __device__ void store_state_grad(const float (&g)[VECTOR + TAPS - 1], const Place& place) const {
        Storage* const entering = states.of(args.initial_state_grad, place.entering);
        const Storage* const after = states.of(args.final_state_grad, place.leaving);
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

    __device__ void store_sums() {
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
        float* const to =
            args.partials + (piece.batch * args.pieces + piece.number) * (width + 1) * args.channels + piece.channel;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            if (j < width) to[j * args.channels] = tap_grad[j];
        to[width * args.channels] = bias_grad;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
causal_conv1d_time_last_backward(const Storage* x, const void* weight, const void* bias, const Storage* initial_state,
                                 const int* seq_idx, const i64* cu_seqlens, const Storage* y_grad,
                                 const Storage* final_state_grad, Storage* x_grad, Storage* initial_state_grad,
                                 float* partials, i64 batches, i64 channels, i64 all_steps, i64 taps, i64 sequences,
                                 i64 x_batch, i64 x_channel, i64 x_time, i64 y_grad_batch, i64 y_grad_channel,
                                 i64 y_grad_time, i64 x_grad_batch, i64 x_grad_channel, i64 x_grad_time,
                                 i64 lane_bits, i64 steps, i64 pieces, i64 flags) {
    Backward({{x, x_batch, x_channel, x_time},
              {y_grad, y_grad_batch, y_grad_channel, y_grad_time},
              {x_grad, x_grad_batch, x_grad_channel, x_grad_time},
              weight, bias, initial_state, final_state_grad, initial_state_grad, seq_idx, cu_seqlens, partials,
              batches, channels, all_steps, taps, sequences, lane_bits, steps, pieces, flags})
        .run();
}
