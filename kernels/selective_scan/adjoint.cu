// What a part of a sequence hands to the parts before it, in the backward pass of a selective scan: if no gradient enters at
// the part's end,
//     g[t] = dy[t]·C[t] + exp(δ[t+1]·A)·g[t+1]
// from its last step to its first, and then exp(δ·A)·g of the first, with the sum of δ over the part. As products of the gates
// are exp(A·Σδ), these give what leaves the part for any gradient that enters.
//
// A launch with the flag FORWARDS does likewise for the forward pass: with B in place of C, u in place of out_grad and no z, it
// computes what a part of a sequence hands to the parts after it, the state after its last step if the one before its first
// step is zero. Then a sequence's last part hands nothing on, and has no CTA.
//
// Traffic of an element in 16 bits: 6 bytes (delta, z and out_grad).
//
// A lane has 4 of 16 states of one channel; other CTAs along y have more states. Rows of shared memory have (δ, dy):
//
//     lane % 4          0        1        2        3
//     lane / 4     d    n 0…3    n 4…7    n 8…11   n 12…15
//
// Tiles and the functions below are as in forward.cu, the last tile first. The first part of a sequence hands nothing on,
// and has no CTA.
//
// A launch with no states computes the sums of δ alone. It reads delta alone, and each of the four lanes of a channel adds up
// every fourth step.
#define CHANNELS 8
#define CAPACITY 16
#define SPLIT 1
#include "tile.cuh"

enum : int {
    ROW = 2 * TIMES + 4,
    LANE_STATES = 4,
    SHARED_ROWS = WARPS * CHANNELS * ROW,
    SHARED_STAGE = 2 * CAPACITY * TIMES,
};

struct Arguments {
    ChannelTensor<const Storage*> delta, z, out_grad;
    ProjectionTensor C;
    const float *A, *delta_bias;
    float *adjoints, *sums;
    const i64* cu_seqlens;
    Sizes sizes;
    i64 flags;
};

struct Adjoint {
    const Arguments& args;

    float* const shared = reinterpret_cast<float*>(dynamic_rows());
    float* const stages = shared + SHARED_ROWS;
    float* const biases = stages + 2 * SHARED_STAGE;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channels = int(args.sizes.channels), states = int(args.sizes.states);
    const int sequences = int(args.sizes.sequences), parts = int(args.sizes.parts);
    const bool forwards = args.flags & FORWARDS;
    CtaRange range = cta_range(args.sizes, parts - 1, args.cu_seqlens);
    const int part = range.part + !forwards;
    const bool with_softplus = args.flags & SOFTPLUS;
    const int first = range.first + warp * CHANNELS;
    const int left = within(range.limit - first, CHANNELS);
    const Pieces<const Storage*> deltas{args.delta, range.batch, first, range.begin};
    const Pieces<const Storage*> zs{args.z, range.batch, first, range.begin};
    const Pieces<const Storage*> grads{args.out_grad, range.batch, first, range.begin};
    const Projection C{args.C, range};
    const int length = range.end - range.begin;
    const float* const bias = biases + warp * CHANNELS;
    float* const rows = shared + warp * CHANNELS * ROW;
    const int own = lane / 4, quarter = lane % 4, first_state = blockIdx.y * CAPACITY;
    const bool exists = own < left;
    const float* const row = rows + own * ROW;

    float decay[LANE_STATES], carry[LANE_STATES], delta_sum = 0;
    Values next_delta[PER_LANE], next_z[PER_LANE], next_grad[PER_LANE];
    ProjectionTile projections;

    __device__ explicit Adjoint(const Arguments& args) : args(args) { range.set_tiles(part, parts); }

    __device__ void run() {
        load_channels();
        const int tiles = range.end_tile - range.first_tile;
        if (tiles > 0) load(tile_number(0));
        int side = 0;
        for (int i = 0; i < tiles; i++, side ^= 1) {
            float* const shared_B = stages + side * SHARED_STAGE;
            stage(tile_number(i), shared_B);
            __syncthreads();
            if (i + 1 < tiles) load(tile_number(i + 1));
            if (states == 0) sum_deltas();
            else step(shared_B + TIMES * CAPACITY);
            __syncwarp();
        }
        store();
    }

    // The tile that the part's loop comes to after `i` others.
    __device__ int tile_number(int i) const { return forwards ? range.first_tile + i : range.end_tile - 1 - i; }

    __device__ void load_channels() {
        for (int i = lane; i < CHANNELS; i += 32)
            biases[warp * CHANNELS + i] = i < left && args.delta_bias ? args.delta_bias[first + i] : 0;
        __syncwarp();
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++) {
            const int n = first_state + quarter * LANE_STATES + s;
            decay[s] = exists && n < states ? args.A[i64(first + own) * states + n] * LOG2_E : 0;
            carry[s] = 0;
        }
    }

    __device__ void load(int number) {
        const int tile = number * TIMES, times = within(length - tile, TIMES);
        projections.load(C, C, first_state, states, tile, times);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int count = Piece(i).count(left, times);
            next_delta[i] = deltas.load(i, tile, count);
            next_z[i] = zs.load(i, tile, count);
            next_grad[i] = grads.load(i, tile, states ? count : 0);
        }
    }

    __device__ void stage(int number, float* shared_B) const {
        const int times = within(length - number * TIMES, TIMES);
        projections.store(shared_B);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            if (!piece.exists) continue;
            float delta[VALUES], grad[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                delta[k] = next_delta[i].get(k) + bias[piece.channel + (CHANNEL_LAST ? k : 0)];
                grad[k] = next_grad[i].get(k);
            }
            if (with_softplus) {
#pragma unroll
                for (int k = 0; k < VALUES; k++) delta[k] = softplus<NARROW>(delta[k]);
            }
            if (args.z.data) {
#pragma unroll
                for (int k = 0; k < VALUES; k++) grad[k] *= next_z[i].get(k) * sigmoid(next_z[i].get(k));
            }
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                const int step = piece.time + (CHANNEL_LAST ? 0 : k);
                if (!Piece::has(count, k)) delta[k] = 0;
                store_float2(rows + channel * ROW + 2 * step, delta[k], forwards ? delta[k] * grad[k] : grad[k]);
            }
        }
    }

    __device__ void sum_deltas() {
#pragma unroll
        for (int t = 0; t < TIMES; t += 4) delta_sum += row[2 * (t + quarter)];
    }

    // g from the last step to the first, or h from the first step to the last: what a step adds is multiplied by its gate in the
    // one case, and not in the other.
    __device__ void step(const float* shared_C) {
        const int first = forwards ? 0 : TIMES - 1, next = forwards ? 1 : -1;
        const float* pairs = row + 2 * first;
        const float* projections_of_step = shared_C + first * CAPACITY + quarter * LANE_STATES;
#pragma unroll 1
        for (int eight = 0; eight < TIMES; eight += 8) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float pair[2], c[LANE_STATES];
                load_floats(pair, pairs);
                load_floats(c, projections_of_step);
                pairs += 2 * next, projections_of_step += CAPACITY * next;
                const float before = forwards ? 0 : pair[1], after = forwards ? pair[1] : 0;
                delta_sum += pair[0];
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++)
                    carry[s] = gate_of(pair[0] * decay[s]) * (before * c[s] + carry[s]) + after * c[s];
            }
        }
    }

    __device__ void store() {
        if (states == 0) {
            delta_sum += __shfl_xor_sync(~0u, delta_sum, 1);
            delta_sum += __shfl_xor_sync(~0u, delta_sum, 2);
        }
        const i64 to = (i64(range.batch * sequences + range.sequence) * parts + part) * channels + first + own;
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++) {
            const int n = first_state + quarter * LANE_STATES + s;
            if (exists && n < states) args.adjoints[to * states + n] = carry[s];
        }
        if (exists && quarter == 0 && first_state == 0) args.sums[to] = delta_sum;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
selective_scan_adjoint(const Storage* delta, const float* A, const Storage* C, const Storage* z,
                       const float* delta_bias, const Storage* out_grad, const i64* cu_seqlens, float* adjoints,
                       float* sizes, i64 batch, i64 channels, i64 time, i64 states, i64 group_channels,
                       i64 sequences, i64 parts, i64 flags, i64 delta_batch, i64 delta_channel, i64 delta_time,
                       i64 z_batch, i64 z_channel, i64 z_time, i64 grad_batch, i64 grad_channel, i64 grad_time,
                       i64 C_batch, i64 C_group, i64 C_state, i64 C_time) {
    Adjoint({{delta, delta_batch, delta_channel, delta_time},
             {z, z_batch, z_channel, z_time},
             {out_grad, grad_batch, grad_channel, grad_time},
             {C, C_batch, C_group, C_state, C_time, bool(flags & C_CONTIGUOUS)},
             A, delta_bias, adjoints, sizes, cu_seqlens,
             {batch, channels, time, states, group_channels, sequences, parts},
             flags})
        .run();
}
