// What a CTA of backward.cu has: its place in the tensors, its shared memory, and the blocks of states that it takes one after the other.
#pragma once
#include "backward.cuh"

struct Arguments {
    ChannelTensor<const Storage*> u, delta, z, out_grad;
    ChannelTensor<Storage*> u_grad, delta_grad, z_grad;
    ProjectionTensor B, C;
    const float *A, *D, *delta_bias, *final_grad, *checkpoints, *adjoints, *sizes;
    float *A_grad, *B_grad, *C_grad, *D_grad, *bias_grad, *initial_grad, *carries;
    const i64* cu_seqlens;
    Sizes size;
    i64 flags;
};

using LaneStates = float[2][LANE_STATES];

struct BackwardBlocks {
    const Arguments& args;

    float* const all_rows = reinterpret_cast<float*>(dynamic_rows());
    float* const all_states = all_rows + SHARED_ROWS;
    float* const shared_B = all_states + SHARED_STATES;
    float* const biases = shared_B + SHARED_STAGE;
    float* const skips = biases + CTA_CHANNELS;
    float* const skip_grads = skips + CTA_CHANNELS;
    float* const bias_grads = skip_grads + CTA_CHANNELS;
    float* const all_sums = bias_grads + CTA_CHANNELS;  // if there are several blocks of states

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channels = int(args.size.channels), states = int(args.size.states);
    const int sequences = int(args.size.sequences), parts = int(args.size.parts);
    const CtaRange& range = shared_cta_range(args.size, parts, args.cu_seqlens);
    // The steps of the sequence, the warp's first channel, and its channels that there are.
    __device__ int length() const { return range.end - range.begin; }
    __device__ int first() const { return range.first + warp * CHANNELS; }
    __device__ int left() const { return within(range.limit - first(), CHANNELS); }
    const int blocks = BLOCKS > 1 ? (states + CAPACITY - 1) / CAPACITY : 1;

    // The warp's part of shared memory, and the lane's: its channels are `own` and `own` + 8.
    const int own = lane / 4, quarter = lane % 4;
    const ElementOptions options{biases + warp * CHANNELS, skips + warp * CHANNELS, bool(args.flags & SOFTPLUS),
                                 args.z.data != nullptr};
    float* const rows = all_rows + warp * CHANNELS * (ROW + 2);
    const float* const row = rows + row_at(own);
    float* const saved_states = all_states + LANE_STATES * threadIdx.x;  // of channel `own`, for every fourth step

    // Of the current block of states: A, the gradient that goes from step to step, dA and what dA lost in rounding.
    LaneStates decay, carry, decay_grad, decay_lost;
    LaneStates h;  // before the tile

    __device__ explicit BackwardBlocks(const Arguments& args) : args(args) {}

    __device__ void load_channels() {
        for (int i = lane; i < CHANNELS; i += 32) {
            const bool in = i < left();
            biases[warp * CHANNELS + i] = in && args.delta_bias ? args.delta_bias[first() + i] : 0;
            skips[warp * CHANNELS + i] = in && args.D ? args.D[first() + i] : 0;
            skip_grads[warp * CHANNELS + i] = bias_grads[warp * CHANNELS + i] = 0;
        }
        __syncwarp();
    }

    // Channel `own` in tensors of (sequence, channel), and of (sequence, part, channel). They are computed anew for each
    // use, so that they take no registers from the steps.
    __device__ i64 sequence_channel() const {
        return i64(int(opaque(unsigned(range.batch))) * sequences + range.sequence) * channels + first() + own;
    }
    __device__ i64 part_channel(int part) const {
        const int sequence = int(opaque(unsigned(range.batch))) * sequences + range.sequence;
        return (i64(sequence) * parts + part) * channels + first() + own;
    }

    // --- What goes from tile to tile -----------------------------------------------------------------------------------

    // The lane's first state of a block, computed anew for each use.
    __device__ int first_state(int block) const {
        return block * CAPACITY + int(opaque(unsigned(quarter))) * LANE_STATES;
    }

    __device__ void load_decay(int block) {
        const int channel = int(opaque(unsigned(own))), state = first_state(block);
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++) {
                const bool in = channel + 8 * c < left() && state + s < states;
                decay[c][s] = in ? args.A[i64(first() + channel + 8 * c) * states + state + s] * LOG2_E : 0;
            }
    }

    // What enters a block of states at the end of the part.
    __device__ void begin_block(int block) {
        load_decay(block);
        const float* const finals = args.final_grad ? args.final_grad + sequence_channel() * states : nullptr;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++) {
                const int n = block * CAPACITY + quarter * LANE_STATES + s;
                const bool in = own + 8 * c < left() && n < states;
                decay_grad[c][s] = decay_lost[c][s] = 0;
                carry[c][s] = in && finals ? finals[i64(8 * c) * states + n] : 0;
            }
#pragma unroll 1
        for (int later = parts - 1; later > range.part; later--)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                if (own + 8 * c >= left()) continue;
                const i64 from = part_channel(later) + 8 * c;
                const float size = args.sizes[from];
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++) {
                    const int n = block * CAPACITY + quarter * LANE_STATES + s;
                    if (n < states)
                        carry[c][s] = args.adjoints[from * states + n] + gate_of(decay[c][s] * size) * carry[c][s];
                }
            }
    }

    // Where `carry`, `decay_grad` or `decay_lost` (`what` 0 to 2) of a channel are while other values need the registers: in
    // `carries`, or, of one block, in place of states before a fourth step that no sums of the tile take the place of.
    __device__ float* saved_at(int block, int what, int c) const {
        if constexpr (BLOCKS == 1) return saved_states + 8 * what * SAVED_STEP + c * LANE_STATES * THREADS;
        const int thread = int(opaque(unsigned(block))) * THREADS + int(threadIdx.x);
        return args.carries + (i64(blockIdx.x) * blocks * THREADS + thread) * SAVED + (2 * what + c) * LANE_STATES;
    }

    // dA of several blocks is summed over one tile in registers, and over tiles in `carries`.
    __device__ void restore(int block) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            load_floats(carry[c], saved_at(block, 0, c));
            if (BLOCKS == 1) {
                load_floats(decay_grad[c], saved_at(block, 1, c));
                if constexpr (COMPENSATED) load_floats(decay_lost[c], saved_at(block, 2, c));
            } else {
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++) decay_grad[c][s] = 0;
            }
        }
    }
    __device__ void save(int block, bool first_time) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            store_floats(saved_at(block, 0, c), carry[c]);
            if (BLOCKS > 1 && !first_time)
                add_saved(decay_grad[c], decay_lost[c], saved_at(block, 1, c), saved_at(block, 2, c));
            store_floats(saved_at(block, 1, c), decay_grad[c]);
            if constexpr (COMPENSATED || BLOCKS > 1) store_floats(saved_at(block, 2, c), decay_lost[c]);
        }
    }

    // --- A tile --------------------------------------------------------------------------------------------------------

    // The inputs at the thread's first piece. They are computed anew for each use, or they would take registers from the
    // steps.
    struct Inputs {
        const int from, batch;
        const Pieces<const Storage*> u, delta, z, out_grad;

        __device__ explicit Inputs(const BackwardBlocks& of)
            : from(int(opaque(unsigned(of.first())))), batch(int(opaque(unsigned(of.range.batch)))),
              u(of.args.u, batch, from, of.range.begin), delta(of.args.delta, batch, from, of.range.begin),
              z(of.args.z, batch, from, of.range.begin), out_grad(of.args.out_grad, batch, from, of.range.begin) {}

        __device__ void prefetch_piece(int i, int tile) const {
            if (u.first) prefetch(u.at(i, tile));
            if (delta.first) prefetch(delta.at(i, tile));
            if (z.first) prefetch(z.at(i, tile));
            if (out_grad.first) prefetch(out_grad.at(i, tile));
        }
    };

    // The state before tile `number`, computed anew for each use, too.
    __device__ const float* checkpoint(int number, int channel) const {
        const int slot = int(opaque(unsigned(range.batch))) * (int(args.size.time) / INTERVAL + sequences) +
                         range.begin / INTERVAL + range.sequence;  // of the sequence's first one
        return args.checkpoints + (i64(slot + number) * channels + first() + channel) * states;
    }

    __device__ void stage(int number) const {
        const Inputs in(*this);
        const int tile = number * TIMES, times = within(length() - tile, TIMES);
        if (ALIGNED && number > range.first_tile) prefetch_tile(in, number - 1);
#pragma unroll(int(AT_ONCE))
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left(), times);
            const PieceInputs now{in.u.load(i, tile, count), in.delta.load(i, tile, count), in.z.load(i, tile, count),
                                  in.out_grad.load(i, tile, count)};
            if (piece.exists) stage_piece(rows, piece, count, now, options);
        }
    }
    __device__ void prefetch_tile(const Inputs& in, int number) const {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (Piece(i).count(left(), TIMES) > 0) in.prefetch_piece(i, number * TIMES);
        const int channel = own + 8 * (quarter / 2);
        if (BLOCKS == 1 && channel < left()) prefetch(checkpoint(number, channel) + quarter % 2 * 2 * LANE_STATES);
    }

    // B, C and the checkpoint of a block, all on their way before any is needed.
    __device__ void load(ProjectionTile& projections, int block, int number) {
        CtaRange again = range;
        again.begin = int(opaque(unsigned(range.begin))), again.batch = int(opaque(unsigned(range.batch)));
        const Projection B(args.B, again), C(args.C, again);
        number = int(opaque(unsigned(number)));
        const int tile = number * TIMES;
        projections.load(B, C, block * CAPACITY, states, tile, within(length() - tile, TIMES));
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = int(opaque(unsigned(own))) + 8 * c, n = first_state(block);
            load_checkpoint(h[c], checkpoint(number, channel) + n, n, states, channel < left());
        }
    }

    __device__ void save_states(int t) const {
        store_floats(saved_states + t * SAVED_STEP, h[0]);
        store_floats(saved_states + t * SAVED_STEP + LANE_STATES * THREADS, h[1]);
    }

    // The steps of a tile that recompute and step_back go through: eight at a time, and no eight beyond the sequence's end.
    __device__ int whole_eights(int number) const {
        const int remaining = length() - int(opaque(unsigned(number))) * TIMES;
        return remaining < TIMES ? (remaining + 7) / 8 * 8 : int(TIMES);
    }
};
