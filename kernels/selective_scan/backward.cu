// The backward pass of a selective scan: with y, δ and h as in forward.cu, dy = out_grad·silu(z) and, from the last
// step to the first,
//     g[t] = dy[t]·C[t] + exp(δ[t+1]·A)·g[t+1],  q[t] = g[t]·exp(δ[t]·A)·h[t-1]
//     dC = Σ_d dy·h,  dB = Σ_d g·δ·u,  dA = Σ_t q·δ,  d(δ·u) = Σ_n g·B,  dδ = Σ_n q·A + u·d(δ·u)
//
// Traffic of an element in 16 bits: 14 bytes (u, delta, z, out_grad and three gradients) and 2 of checkpoints; and of dB and
// dC 8 bytes for each state and every 64 channels.
//
// A warp has 16 channels and 16 states, and a lane two of those channels with 4 of the states each; of up to 8 states, 8 and 2
// (STATES). A CTA has WARPS warps of one batch and group:
//
//     lane % 4             0        1        2        3          a row of shared memory for each channel:
//     lane / 4      d      n 0…3    n 4…7    n 8…11   n 12…15    δ, δ·u, dy and a free float of TIMES steps
//     lane / 4 + 8  d + 8  n 0…3    n 4…7    n 8…11   n 12…15
//
// Tiles of TIMES steps come last first. For each one, in the order of the functions below:
//     stage      δ, δ·u and dy of each element to the rows
//     recompute  h before every fourth step, from the checkpoint before the tile, to shared memory
//     step_back  four steps at a time, the last first: h again, kept in registers with the gates; then g and q
//     store      du, dδ and dz of each element
//
// More than 16 states go one block of 16 after the other through recompute and step_back. What a block carries from tile to
// tile is in `carries` meanwhile.
//
// Sums over states, y, d(δ·u) and dδ, are products on tensor cores in 16 bits, as y is in forward.cu: of h with C, of g with
// B, and of q·A with ones. float32 is summed by shuffles, and so are dB and dC, over the channels of a warp: tensor cores
// sum over the lanes that share a channel. A CTA adds up its warps' dB and dC in shared memory; those of all CTAs are summed
// in order after the launch.
//
// Sequences can be cut into parts, each with its own CTAs. `adjoints` and `sizes` hold, of each part, g before its first
// step if no gradient enters at its end, and the sum of δ (adjoint.cu): from these follows the g that enters the parts
// before.
#include "backward_blocks.cuh"

// What a lane keeps of GROUP steps: the gates, and the states after each step and before the first.
struct StepGroup {
    LaneStates start, gate[GROUP], state[GROUP];

    __device__ float before(int j, int c, int s) const { return j ? state[j ? j - 1 : 0][c][s] : start[c][s]; }
};

// Sums over states. In 16 bits those of two steps, 2 · (lane % 4) and the next of eight; else the lane's terms of all steps.
struct StateSums {
    float y[NARROW ? 2 : GROUP][2], delta_u[NARROW ? 2 : GROUP][2], delta[NARROW ? 2 : GROUP][2];
    float size[2][2];  // δ of the two steps
};

struct Backward : BackwardBlocks {
    using BackwardBlocks::BackwardBlocks;

    __device__ void run() {
        load_channels();
        for (int block = 0; block < blocks; block++) begin_block(block), save(block, true);
        for (int number = range.end_tile - 1; number >= range.first_tile; number--) {
            stage(number);
            for (int block = 0; block < blocks; block++) {
                ProjectionTile projections;
                load_decay(block), restore(block), load(projections, block, number);
                __syncthreads();  // no warp reads B and C of the block before any more, and all have summed dB and dC
                if (block > 0) store_projection_grads(number, block - 1);
                else if (number + 1 < range.end_tile) store_projection_grads(number + 1, blocks - 1);
                projections.store(shared_B);
                __syncthreads();
                const int steps = whole_eights(number);
                recompute(steps);
                step_back(block > 0, steps);
                save(block, false);
            }
            __syncwarp();
            store(number);
        }
        __syncthreads();
        if (range.first_tile < range.end_tile) store_projection_grads(range.first_tile, blocks - 1);
        for (int block = 0; block < blocks; block++) store_state_grads(block);
        store_channel_grads();
    }

    // The states before every fourth step.
    __device__ void recompute(int steps) {
#pragma unroll 1
        for (int t = 0; t < steps; t += 8) {
            const float* const elements = row + element_at(0, t);
            const float* const B_tile = shared_B + t * CAPACITY + quarter * LANE_STATES;
            save_states(t);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j == 4) {
                    save_states(t + 4);
                    if (t + 8 == steps) break;
                }
                float b[LANE_STATES];
                load_floats(b, B_tile + j * CAPACITY);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float pair[2];  // δ and δ·u
                    load_floats(pair, elements + c * row_at(8) + 4 * j);
#pragma unroll
                    for (int s = 0; s < LANE_STATES; s++)
                        h[c][s] = gate_of(pair[0] * decay[c][s]) * h[c][s] + pair[1] * b[s];
                }
            }
        }
    }

    // `later` says whether sums over states are added to those of earlier blocks.
    __device__ void step_back(bool later, int steps) {
        LaneStates of_tile = {};  // dA, if it is summed exactly
        auto& decay_sum = COMPENSATED ? of_tile : decay_grad;
#pragma unroll 1
        for (int eight = steps - 8; eight >= 0; eight -= 8) {
            // B and C of eight steps, for tensor cores.
            float B_steps[LANE_STATES], C_steps[LANE_STATES];
            if constexpr (NARROW) {
                const float* const from = shared_B + (eight + own) * CAPACITY + quarter * LANE_STATES;
                load_floats(B_steps, from);
                load_floats(C_steps, from + TIMES * CAPACITY);
            }
#pragma unroll 1
            for (int half = 4; half >= 0; half -= GROUP) {
                StepGroup group;
                recompute_group(group, eight, half);
                StateSums sums = {};
                float B_terms[8], C_terms[8];  // of dB and dC, of SUMMED_STEPS steps
#pragma unroll
                for (int j = GROUP - 1; j >= 0; j--) {
                    step(group, sums, eight, half, j, B_steps, C_steps, decay_sum, B_terms, C_terms);
                    if (j % SUMMED_STEPS == 0) sum_over_channels(B_terms, C_terms, eight, half + j);
                }
                if constexpr (!NARROW) add_over_lanes(sums, eight + half, later);
                __syncwarp();
                if constexpr (NARROW) store_sums(sums, eight + 2 * quarter, later, quarter / 2 == half / GROUP);
            }
        }
        if constexpr (COMPENSATED) {
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++) add_exactly(decay_grad[c][s], decay_lost[c][s], of_tile[c][s]);
        }
    }

    // Gates and states of the GROUP steps from eight + half on.
    __device__ void recompute_group(StepGroup& group, int eight, int half) const {
        const float* const elements = row + element_at(0, eight);
        const float* const B_tile = shared_B + eight * CAPACITY + quarter * LANE_STATES;
        const float* const saved = saved_states + (eight + half) * SAVED_STEP;
        load_floats(group.start[0], saved);
        load_floats(group.start[1], saved + LANE_STATES * THREADS);
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            float b[LANE_STATES];
            load_floats(b, B_tile + (half + j) * CAPACITY);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float pair[2];
                load_floats(pair, elements + c * row_at(8) + 4 * (half + j));
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++) {
                    group.gate[j][c][s] = gate_of(pair[0] * decay[c][s]);
                    group.state[j][c][s] = group.gate[j][c][s] * group.before(j, c, s) + pair[1] * b[s];
                }
            }
        }
    }

    // g, q and all that is summed of step eight + half + j.
    __device__ void step(const StepGroup& group, StateSums& sums, int eight, int half, int j,
                         const float (&B_steps)[LANE_STATES], const float (&C_steps)[LANE_STATES], LaneStates& decay_sum,
                         float (&B_terms)[8], float (&C_terms)[8]) {
        const float* const elements = row + element_at(0, eight);
        const float* const B_tile = shared_B + eight * CAPACITY + quarter * LANE_STATES;
        float b[LANE_STATES], through[LANE_STATES], element[2][4];
        LaneStates g, q_decay;
        load_floats(b, B_tile + (half + j) * CAPACITY);
        load_floats(through, B_tile + TIMES * CAPACITY + (half + j) * CAPACITY);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            load_floats(element[c], elements + c * row_at(8) + 4 * (half + j));
            if constexpr (!NARROW) sums.y[j][c] = sums.delta_u[j][c] = sums.delta[j][c] = 0;
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++) {
                g[c][s] = element[c][2] * through[s] + carry[c][s];
                carry[c][s] = g[c][s] * group.gate[j][c][s];
                const float q = carry[c][s] * group.before(j, c, s);
                decay_sum[c][s] += q * element[c][0];
                if constexpr (NARROW) {
                    q_decay[c][s] = q * decay[c][s];
                } else {
                    sums.y[j][c] += through[s] * group.state[j][c][s];
                    sums.delta_u[j][c] += g[c][s] * b[s];
                    sums.delta[j][c] += q * decay[c][s];
                }
            }
        }
        if constexpr (NARROW) {
            multiply(sums, j, group.state[j], g, q_decay, B_steps, C_steps);
#pragma unroll
            for (int c = 0; c < 2; c++)
                sums.size[j % 2][c] = keeps(j) ? element[c][0] : sums.size[j % 2][c];
        }
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++) {
            B_terms[j % SUMMED_STEPS * LANE_STATES + s] = g[0][s] * element[0][1] + g[1][s] * element[1][1];
            C_terms[j % SUMMED_STEPS * LANE_STATES + s] =
                element[0][2] * group.state[j][0][s] + element[1][2] * group.state[j][1][s];
        }
    }

    // Whether a lane keeps the sums of a step of GROUP, of which the last one comes first. It keeps those of two steps, which are
    // its own in one of the two groups of eight steps; what it keeps in the other group is never stored.
    __device__ bool keeps(int step) const { return step >= GROUP / 2 || quarter % 2 == 0; }

    // Sums over states on tensor cores, of step `step` of GROUP.
    __device__ void multiply(StateSums& sums, int step, const LaneStates& state, const LaneStates& g,
                             const LaneStates& q_decay, const float (&B_steps)[LANE_STATES], const float (&C_steps)[LANE_STATES]) const {
        float ones[LANE_STATES];
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++) ones[s] = 1;
        float y[4] = {}, delta_u[4] = {}, delta[4] = {};
        add_over_states(y, state, C_steps);
        add_over_states(delta_u, g, B_steps);
        add_over_states(delta, q_decay, ones);
        const int j = step % 2;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            sums.y[j][c] = keeps(step) ? y[2 * c + j] : sums.y[j][c];
            sums.delta_u[j][c] = keeps(step) ? delta_u[2 * c + j] : sums.delta_u[j][c];
            sums.delta[j][c] = keeps(step) ? delta[2 * c + j] : sums.delta[j][c];
        }
    }

    // dB and dC of SUMMED_STEPS steps, summed over the warp's channels, to the place of a saved state that is not needed any more.
    __device__ void sum_over_channels(float (&B_terms)[8], float (&C_terms)[8], int eight, int step) const {
        float* const of_warp = all_states + (eight + 4) * SAVED_STEP + warp * WARP_SUMS;
        __syncwarp();  // all lanes have read what is there
        const int index = transposed_index<8, 4>();
        const int state = quarter * LANE_STATES + index % LANE_STATES;
        float* const to = of_warp + state * 8 + moved_step(state, step + index / LANE_STATES);
        to[0] = sum_by_choice<8, 4>(B_terms);
        to[LANE_STATES * THREADS] = sum_by_choice<8, 4>(C_terms);
    }

    // Where d(δ·u), dδ and y (`which` 1 to 3) of a step go: in place of what they are made of, or, if other blocks of states
    // need that, elsewhere.
    __device__ float* sum_at(int channel, int step, int which) const {
        if constexpr (BLOCKS == 1) return rows + element_at(channel, step) + which;
        return all_sums + ((which - 1) * CTA_CHANNELS + warp * CHANNELS + channel) * SUM_ROW + step;
    }
    __device__ void put_sums(int channel, int step, const float (&sum)[3], bool later) const {
        if constexpr (BLOCKS == 1) {
            float* const to = sum_at(channel, step, 1);
            to[0] = sum[0];
            store_float2(to + 1, sum[1], sum[2]);
        } else {
#pragma unroll
            for (int which = 0; which < 3; which++) {
                float* const to = sum_at(channel, step, which + 1);
                *to = later ? *to + sum[which] : sum[which];
            }
        }
    }
    // GROUP steps from `step` on, summed over the lanes that share a channel.
    __device__ void add_over_lanes(const StateSums& sums, int step, bool later) const {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float four[3][GROUP];
#pragma unroll
            for (int j = 0; j < GROUP; j++)
                four[0][j] = sums.delta_u[NARROW ? 0 : j][c], four[1][j] = sums.delta[NARROW ? 0 : j][c],
                four[2][j] = sums.y[NARROW ? 0 : j][c];
            float sum[3];
#pragma unroll
            for (int which = 0; which < 3; which++) sum[which] = transposed_sum<4, 1>(four[which]);
            put_sums(own + 8 * c, step + transposed_index<4, 1>(), sum, later);
        }
    }
    // Two steps from `step` on, which are sums already, if they are this lane's to write.
    __device__ void store_sums(const StateSums& sums, int step, bool later, bool mine) const {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (!mine) continue;
                const float sum[3] = {sums.delta_u[j][c], sums.delta[j][c], sums.y[j][c]};
                if constexpr (BLOCKS == 1)
                    store_float4(rows + element_at(own + 8 * c, step + j), sums.size[j][c], sum[0], sum[1], sum[2]);
                else
                    put_sums(own + 8 * c, step + j, sum, later);
            }
    }

    __device__ void store(int number) const {
        const Inputs in(*this);
        const int tile = number * TIMES, times = within(length() - tile, TIMES);
        const Pieces<Storage*> u_grads(args.u_grad, in.batch, in.from, range.begin);
        const Pieces<Storage*> delta_grads(args.delta_grad, in.batch, in.from, range.begin);
        const Pieces<Storage*> z_grads(args.z_grad, in.batch, in.from, range.begin);
#pragma unroll(int(AT_ONCE_AFTER))
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left(), times);
            PieceInputs now;
            now.u = in.u.load(i, tile, count), now.out_grad = in.out_grad.load(i, tile, count);
            now.z = in.z.load(i, tile, count);
            if constexpr (!NARROW) now.delta = in.delta.load(i, tile, count);
            float element[VALUES][4];
            load_elements(element, piece);
            const PieceGrads grads(element, piece, count, now, options);
            u_grads.store(i, tile, count, grads.u);
            delta_grads.store(i, tile, count, grads.delta);
            if (options.gated) z_grads.store(i, tile, count, grads.z);
            add_over_piece(grads, piece);
        }
        __syncwarp();
        if constexpr (CHANNEL_LAST) add_over_rows();
    }
    __device__ void load_elements(float (&element)[VALUES][4], const Piece& piece) const {
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
            const int step = piece.time + (CHANNEL_LAST ? 0 : k);
            load_floats(element[k], rows + element_at(channel, step));
            if constexpr (BLOCKS > 1) {
#pragma unroll
                for (int which = 1; which < 4; which++) element[k][which] = *sum_at(channel, step, which);
            }
        }
    }

    // --- Sums over time ------------------------------------------------------------------------------------------------

    // A piece's terms for D and delta_bias: added up along time, or, if it lies along channels, left in the rows.
    __device__ void add_over_piece(const PieceGrads& grads, const Piece& piece) const {
        float skip_sum = 0, bias_sum = 0;
#pragma unroll
        for (int k = 0; k < VALUES; k++) {
            if constexpr (CHANNEL_LAST)
                store_float2(rows + element_at(piece.channel + k, piece.time), grads.skip[k], grads.delta[k]);
            else
                skip_sum += grads.skip[k], bias_sum += grads.delta[k];
        }
        if constexpr (!CHANNEL_LAST) add_over_time(skip_sum, bias_sum, IN_A_ROW, 0, piece.channel, piece.time == 0);
    }
    __device__ void add_over_rows() const {
        float skip_sum = 0, bias_sum = 0;
        for (int step = lane / CHANNELS; step < TIMES; step += 2) {
            const float* const from = rows + element_at(lane % CHANNELS, step);
            skip_sum += from[0], bias_sum += from[1];
        }
        add_over_time(skip_sum, bias_sum, 2, 4, lane % CHANNELS, lane < CHANNELS);
        __syncwarp();
    }
    __device__ void add_over_time(float skip_sum, float bias_sum, int lanes, int shift, int channel, bool writes) const {
        sum_over_lanes(skip_sum, bias_sum, lanes, shift);
        if (writes) {
            skip_grads[warp * CHANNELS + channel] += skip_sum;
            bias_grads[warp * CHANNELS + channel] += bias_sum;
        }
    }

    // --- Gradients that are not of an element --------------------------------------------------------------------------

    __device__ void store_projection_grads(int number, int block) const {
        const int tile = number * TIMES;
        const int batch = int(opaque(unsigned(range.batch)));  // so that all this is computed anew, too
        const i64 group = i64(range.block * int(args.size.batch) + batch) *
                              (channels / int(args.size.group_channels)) + range.group;
        const i64 from = group * states * args.size.time + (range.begin + tile);
        ProjectionGrads{args.B_grad + from, args.C_grad + from, states - block * CAPACITY, block * CAPACITY,
                        int(args.size.time), range.begin, length() - tile}
            .store(all_states);
    }

    __device__ void store_state_grads(int block) {
        restore(block);
        if constexpr (BLOCKS > 1) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                load_floats(decay_grad[c], saved_at(block, 1, c));
                load_floats(decay_lost[c], saved_at(block, 2, c));
            }
        }
        float* const A_grad = args.A_grad + part_channel(range.part) * states;
        float* const initial_grad =
            args.initial_grad && range.part == 0 ? args.initial_grad + sequence_channel() * states : nullptr;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++) {
                const int n = block * CAPACITY + quarter * LANE_STATES + s;
                if (own + 8 * c >= left() || n >= states) continue;
                A_grad[i64(8 * c) * states + n] = decay_grad[c][s] + decay_lost[c][s];
                if (initial_grad) initial_grad[i64(8 * c) * states + n] = carry[c][s];
            }
    }

    __device__ void store_channel_grads() const {
        const i64 to = part_channel(range.part) - own;
#pragma unroll 1
        for (int i = lane; i < left(); i += 32) {
            if (args.D_grad) args.D_grad[to + i] = skip_grads[warp * CHANNELS + i];
            if (args.bias_grad) args.bias_grad[to + i] = bias_grads[warp * CHANNELS + i];
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_scan_backward(const Storage* u, const Storage* delta, const float* A, const Storage* B, const Storage* C,
                        const float* D, const Storage* z, const float* delta_bias, const Storage* out_grad,
                        const float* final_grad, const float* checkpoints, const float* adjoints,
                        const float* sizes, const i64* cu_seqlens, Storage* u_grad, Storage* delta_grad,
                        Storage* z_grad, float* A_grad, float* B_grad, float* C_grad, float* D_grad,
                        float* bias_grad, float* initial_grad, float* carries, i64 batch, i64 channels, i64 time,
                        i64 states, i64 group_channels, i64 sequences, i64 parts, i64 flags, i64 u_batch,
                        i64 u_channel, i64 u_time, i64 delta_batch, i64 delta_channel, i64 delta_time, i64 z_batch,
                        i64 z_channel, i64 z_time, i64 grad_batch, i64 grad_channel, i64 grad_time,
                        i64 u_grad_batch, i64 u_grad_channel, i64 u_grad_time, i64 B_batch, i64 B_group,
                        i64 B_state, i64 B_time, i64 C_batch, i64 C_group, i64 C_state, i64 C_time) {
    Backward({{u, u_batch, u_channel, u_time},
              {delta, delta_batch, delta_channel, delta_time},
              {z, z_batch, z_channel, z_time},
              {out_grad, grad_batch, grad_channel, grad_time},
              {u_grad, u_grad_batch, u_grad_channel, u_grad_time},
              {delta_grad, u_grad_batch, u_grad_channel, u_grad_time},
              {z_grad, u_grad_batch, u_grad_channel, u_grad_time},
              {B, B_batch, B_group, B_state, B_time, bool(flags & B_CONTIGUOUS)},
              {C, C_batch, C_group, C_state, C_time, bool(flags & C_CONTIGUOUS)},
              A, D, delta_bias, final_grad, checkpoints, adjoints, sizes,
              A_grad, B_grad, C_grad, D_grad, bias_grad, initial_grad, carries, cu_seqlens,
              {batch, channels, time, states, group_channels, sequences, parts},
              flags})
        .run();
}
