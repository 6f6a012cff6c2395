// The backward pass of a selective scan: with y, δ and h as in forward.cu, dy = out_grad·silu(z) and, from the last
// step to the first,
//     g[t] = dy[t]·C[t] + exp(δ[t+1]·A)·g[t+1],  q[t] = g[t]·exp(δ[t]·A)·h[t-1]
//     dC = Σ_d dy·h,  dB = Σ_d g·δ·u,  dA = Σ_t q·δ,  d(δ·u) = Σ_n g·B,  dδ = Σ_n q·A + u·d(δ·u)
//
// A warp has 16 channels and 16 states, and a lane two channels with 4 of the states each: lane / 4 and eight more give
// the channel, lane % 4 the states. A CTA has WARPS warps of one batch and group. A tile is TIMES steps, and the forward
// pass has left the state before each. Tiles come last first:
//
//     1  for each element, δ, δ·u and dy to a row of shared memory
//     2  from the state before the tile, that before every fourth step, to shared memory
//     3  four steps at a time, the last first: states again, kept in registers with the decays; then the steps back
//     4  du, dδ and dz of each element
//
// Sums over states, y, d(δ·u) and dδ, are products on tensor cores in 16 bits, as y is in forward.cu: of h with C, of g
// with B, and of q·A with ones. float32 is summed by shuffles, and so are dB and dC, over the channels of a warp: tensor
// cores sum over the lanes that share a channel.
// A CTA adds up its warps' dB and dC in shared memory and writes its partial sum; those of all CTAs are summed in order
// later.
//
// More than 16 states go one block of 16 after the other, through steps 2 and 3, with what is carried in `carries`.
//
// Sequences can be cut into parts, with CTAs of their own; then `adjoints` and `sizes` hold, of each part, g before its
// first step if none comes in at its end, and the sum of δ, from which the later parts' g is made.
//
// Traffic of an element in 16 bits: 14 bytes and 2 of the states that were kept, and of dB and dC, 8 bytes for each
// state and every 64 channels. Work for each state of an element: two exponentials, some 18 other instructions, and 12
// bytes of shared memory; besides 6 operations of the exponential's unit for an element, and some 80 instructions.
#include "backward.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_scan_backward(const Storage* u, const Storage* delta, const float* A, const Storage* B, const Storage* C,
                        const float* D, const Storage* z, const float* delta_bias, const Storage* out_grad,
                        const float* final_grad, const float* checkpoints, const float* adjoints,
                        const float* sizes, const i64* offsets, Storage* u_grad, Storage* delta_grad,
                        Storage* z_grad, float* A_grad, float* B_grad, float* C_grad, float* D_grad,
                        float* bias_grad, float* initial_grad, float* carries, i64 batch, i64 channels, i64 time,
                        i64 states, i64 group_channels, i64 sequences, i64 parts, i64 flags, i64 u_batch,
                        i64 u_channel, i64 u_time, i64 delta_batch, i64 delta_channel, i64 delta_time, i64 z_batch,
                        i64 z_channel, i64 z_time, i64 grad_batch, i64 grad_channel, i64 grad_time,
                        i64 u_grad_batch, i64 u_grad_channel, i64 u_grad_time, i64 B_batch, i64 B_group,
                        i64 B_state, i64 B_time, i64 C_batch, i64 C_group, i64 C_state, i64 C_time) {
    float* const all_rows = reinterpret_cast<float*>(dynamic_rows());
    float* const all_states = all_rows + SHARED_ROWS;
    float* const stage = all_states + SHARED_STATES;
    float* const biases = stage + SHARED_STAGE;
    float* const skips = biases + WARPS * CHANNELS;
    float* const skip_grads = skips + WARPS * CHANNELS;
    float* const bias_grads = skip_grads + WARPS * CHANNELS;
    float* const all_sums = bias_grads + WARPS * CHANNELS;  // if there are several blocks

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channel_count = int(channels), state_count = int(states), sequence_count = int(sequences), part_count = int(parts);
    const Place at = place_of(channel_count, int(time), int(group_channels), sequence_count, part_count, offsets);
    const bool smooth = flags & 1;
    const int first = at.first + warp * CHANNELS;
    const int left = within(at.limit - first, CHANNELS);
    const int length = at.end - at.begin;

    for (int i = lane; i < CHANNELS; i += 32) {
        const bool in = i < left;
        biases[warp * CHANNELS + i] = in && delta_bias ? delta_bias[first + i] : 0;
        skips[warp * CHANNELS + i] = in && D ? D[first + i] : 0;
        skip_grads[warp * CHANNELS + i] = bias_grads[warp * CHANNELS + i] = 0;
    }
    __syncwarp();
    const float* const bias = biases + warp * CHANNELS;
    const float* const skip = skips + warp * CHANNELS;
    float* const rows = all_rows + warp * CHANNELS * ROW;
    float* const before = all_states + 4 * threadIdx.x;  // of the first channel; every fourth step, 8 · THREADS on

    const int own = lane / 4, quarter = lane % 4;
    const float* const row = rows + own * ROW;
    const i64 of_state = i64(at.batch * sequence_count + at.sequence) * channel_count + first + own;
    const int blocks = BLOCKS > 1 ? (state_count + CAPACITY - 1) / CAPACITY : 1;
    const int slot = at.batch * (int(time) / INTERVAL + sequence_count) + at.begin / INTERVAL + at.sequence;
    const int tiles = (length + TIMES - 1) / TIMES, per_part = (tiles + part_count - 1) / part_count;
    const int first_tile = at.part * per_part < tiles ? at.part * per_part : tiles;
    const int end_tile = first_tile + per_part < tiles ? first_tile + per_part : tiles;

    // Where a step's d(δ·u), dδ and y, number `which` of them from 1 on, go: in place of what they are made of, or, if
    // other blocks of states need that, elsewhere.
    const auto sum_at = [&](int channel, int step, int which) -> float* {
        if constexpr (BLOCKS == 1) return rows + element_at(channel, step) + which;
        return all_sums + ((which - 1) * WARPS * CHANNELS + warp * CHANNELS + channel) * SUM_ROW + step;
    };

    float decay[2][MINE], carry[2][MINE], decay_grad[2][MINE], decay_lost[2][MINE];
    // Of a block of states: A, and what comes in at the end.
    const auto begin_block = [&](int block, bool entering) {
        const int own_first = int(opaque(unsigned(first + own)));
#pragma unroll
        for (int held = 0; held < 2; held++)
#pragma unroll
            for (int s = 0; s < MINE; s++) {
                const int n = block * CAPACITY + quarter * MINE + s;
                const bool in = own + 8 * held < left && n < state_count;
                decay[held][s] = in ? A[i64(own_first + 8 * held) * state_count + n] * LOG2_E : 0;
                if (entering) {
                    decay_grad[held][s] = decay_lost[held][s] = 0;
                    carry[held][s] = in && final_grad ? final_grad[(of_state + 8 * held) * state_count + n] : 0;
                }
            }
        if (!entering) return;
#pragma unroll 1
        for (int later = part_count - 1; later > at.part; later--)
#pragma unroll
            for (int held = 0; held < 2; held++) {
                if (own + 8 * held >= left) continue;
                const i64 of_part =
                    (i64(at.batch * sequence_count + at.sequence) * part_count + later) * channel_count + first + own + 8 * held;
                const float size = sizes[of_part];
#pragma unroll
                for (int s = 0; s < MINE; s++) {
                    const int n = block * CAPACITY + quarter * MINE + s;
                    if (n < state_count)
                        carry[held][s] = adjoints[of_part * state_count + n] + gate_of(decay[held][s] * size) * carry[held][s];
                }
            }
    };
    // What is carried from one tile to the earlier one lies, while other things need registers, in `carries`, or, of one
    // block, in place of states before a fourth step, of which no sums of the tile take the place.
    const auto kept_at = [&](int block, int what, int held) {
        if constexpr (BLOCKS == 1) return before + (16 * what + 4 * held) * THREADS;
        const int of_cta = int(opaque(unsigned(block))) * THREADS + int(threadIdx.x);
        return carries + (i64(blockIdx.x) * blocks * THREADS + of_cta) * KEPT + (2 * what + held) * MINE;
    };
    // dA of several blocks is summed over one tile in registers, and over tiles there.
    const auto recall = [&](int block) {
#pragma unroll
        for (int held = 0; held < 2; held++) {
            load_floats(carry[held], kept_at(block, 0, held));
            if (BLOCKS == 1) {
                load_floats(decay_grad[held], kept_at(block, 1, held));
                if constexpr (COMPENSATED) load_floats(decay_lost[held], kept_at(block, 2, held));
            } else {
#pragma unroll
                for (int s = 0; s < MINE; s++) decay_grad[held][s] = 0;
            }
        }
    };
    const auto keep = [&](int block, bool entering) {
#pragma unroll
        for (int held = 0; held < 2; held++) {
            store_floats(kept_at(block, 0, held), carry[held]);
            if (BLOCKS > 1 && !entering)
                add_kept(decay_grad[held], decay_lost[held], kept_at(block, 1, held), kept_at(block, 2, held));
            store_floats(kept_at(block, 1, held), decay_grad[held]);
            if constexpr (COMPENSATED || BLOCKS > 1) store_floats(kept_at(block, 2, held), decay_lost[held]);
        }
    };
    for (int block = 0; block < blocks; block++) begin_block(block, true), keep(block, true);

    // Adds a lane's part of the sums over time for D and delta_bias.
    const auto add_over_time = [&](float of_skip, float of_bias, int alike, int shift, int channel, bool first_of_them) {
        add_alike(of_skip, of_bias, alike, shift);
        if (first_of_them) {
            skip_grads[warp * CHANNELS + channel] += of_skip;
            bias_grads[warp * CHANNELS + channel] += of_bias;
        }
    };

    const auto add_up_warps = [&](int tile, int block) {
        const i64 of_group =
            i64(at.block * int(batch) + at.batch) * (channel_count / int(group_channels)) + at.group;
        const i64 from = of_group * state_count * time + at.begin + tile;
        add_up(all_states, B_grad + from, C_grad + from, state_count - block * CAPACITY, block * CAPACITY, int(time),
               at.begin, length - tile);
    };

    for (int number = end_tile - 1; number >= first_tile; number--) {
        const int tile = number * TIMES;
        const int times = within(length - tile, TIMES);
        // All that is read for the tile is on its way before any of it is needed.
        Staged staged;
        float h[2][MINE];
        const auto fetch = [&](int block) {
            Place place = at;
            place.begin = int(opaque(unsigned(at.begin))), place.batch = int(opaque(unsigned(at.batch)));
            const Projection b(B, {B_batch, B_group, B_state, B_time}, place, flags & 2);
            const Projection c(C, {C_batch, C_group, C_state, C_time}, place, flags & 4);
            const int again = int(opaque(unsigned(number))), from_tile = again * TIMES;
            staged.load(b, c, block * CAPACITY, state_count, from_tile, within(length - from_tile, TIMES));
#pragma unroll
            for (int held = 0; held < 2; held++) {
                const int channel = own + 8 * held, n = block * CAPACITY + quarter * MINE;
                const float* const from = checkpoints + (i64(slot + again) * channel_count + first + channel) * state_count + n;
                load_checkpoint(h[held], from, n, state_count, channel < left);
            }
        };
        // Made anew in each tile, or they would take registers from the steps.
        const int warp_first = int(opaque(unsigned(first))), of_batch = int(opaque(unsigned(at.batch)));
        const Rows<const Storage*> us(u, {u_batch, u_channel, u_time}, of_batch, warp_first, at.begin);
        const Rows<const Storage*> deltas(delta, {delta_batch, delta_channel, delta_time}, of_batch, warp_first, at.begin);
        const Rows<const Storage*> zs(z, {z_batch, z_channel, z_time}, of_batch, warp_first, at.begin);
        const Rows<const Storage*> grads(out_grad, {grad_batch, grad_channel, grad_time}, of_batch, warp_first, at.begin);
        const int earlier = tile - TIMES;
        const auto bring = [&](const Rows<const Storage*>& rows_of, int i) {
            if (rows_of.first) prefetch(rows_of.at(i, earlier));
        };
        if (ALIGNED && number > first_tile) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const Piece piece(i);
                if (piece.count(left, TIMES) > 0)
                    bring(us, i), bring(deltas, i), bring(zs, i), bring(grads, i);
            }
            if (BLOCKS == 1 && own + 8 * (quarter / 2) < left)
                prefetch(checkpoints + (i64(slot + number - 1) * channel_count + first + own + 8 * (quarter / 2)) * state_count +
                         quarter % 2 * 8);
        }
#pragma unroll(int(AT_ONCE))
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            const Values u_now = us.load(i, tile, count), delta_now = deltas.load(i, tile, count);
            const Values z_now = zs.load(i, tile, count), grad_now = grads.load(i, tile, count);
            if (!piece.there) continue;
            lay_out(rows, piece, count, u_now, delta_now, z_now, grad_now, bias, smooth, z != nullptr);
        }

        for (int block = 0; block < blocks; block++) {
            begin_block(block, false), recall(block), fetch(block);
            __syncthreads();  // nobody reads what was staged before, and the warps' sums are there
            if (block > 0) add_up_warps(tile, block - 1);
            else if (number + 1 < end_tile) add_up_warps(tile + TIMES, blocks - 1);
            staged.store(stage);
            __syncthreads();
            const auto save = [&](int t) {
                store_floats(before + 2 * t * THREADS, h[0]);
                store_floats(before + (2 * t + 4) * THREADS, h[1]);
            };
#pragma unroll 1
            for (int t = 0; t < TIMES; t += 8) {
                const float* const pairs = row + element_at(0, t);
                const float* const ins = stage + t * CAPACITY + quarter * MINE;
                save(t);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j == 4) {
                        save(t + 4);
                        if (t + 8 == TIMES) break;
                    }
                    float in[MINE];
                    load_floats(in, ins + j * CAPACITY);
#pragma unroll
                    for (int held = 0; held < 2; held++) {
                        float pair[2];
                        load_floats(pair, pairs + 8 * held * ROW + 4 * j);
#pragma unroll
                        for (int s = 0; s < MINE; s++)
                            h[held][s] = gate_of(pair[0] * decay[held][s]) * h[held][s] + pair[1] * in[s];
                    }
                }
            }

            float of_tile[2][MINE] = {};  // dA, if it is summed exactly
            auto& decay_sum = *(COMPENSATED ? &of_tile : &decay_grad);
#pragma unroll 1
            for (int eight = TIMES - 8; eight >= 0; eight -= 8) {
                const float* const pairs = row + element_at(0, eight);
                const float* const ins = stage + eight * CAPACITY + quarter * MINE;
                const float* const throughs = ins + TIMES * CAPACITY;
                float* const of_warp = all_states + 2 * (eight + 4) * THREADS + warp * 128;  // dB, and dC
                // Of eight steps, on tensor cores.
                float in_steps[MINE], through_steps[MINE];
                const float ones[MINE] = {1, 1, 1, 1};
                if constexpr (NARROW) {
                    load_floats(in_steps, ins + own * CAPACITY);
                    load_floats(through_steps, throughs + own * CAPACITY);
                }
#pragma unroll
                for (int half = 4; half >= 0; half -= HALF) {
                    float start[2][MINE], gate[HALF][2][MINE], state[HALF][2][MINE];
                    // What is kept of the sums, of steps 2 · quarter and the next.
                    float of_y[2][2], of_product[2][2], of_size[2][2];
                    float y[HALF][2], product[HALF][2], size_grad[HALF][2];  // summed by shuffles
                    load_floats(start[0], before + 2 * (eight + half) * THREADS);
                    load_floats(start[1], before + (2 * (eight + half) + 4) * THREADS);
#pragma unroll
                    for (int j = 0; j < HALF; j++) {
                        float in[MINE];
                        load_floats(in, ins + (half + j) * CAPACITY);
                        const auto& earlier_state = j ? state[j ? j - 1 : 0] : start;
#pragma unroll
                        for (int held = 0; held < 2; held++) {
                            float pair[2];
                            load_floats(pair, pairs + 8 * held * ROW + 4 * (half + j));
#pragma unroll
                            for (int s = 0; s < MINE; s++) {
                                gate[j][held][s] = gate_of(pair[0] * decay[held][s]);
                                state[j][held][s] = gate[j][held][s] * earlier_state[held][s] + pair[1] * in[s];
                            }
                        }
                    }
                    float in_terms[2 * MINE], out_terms[2 * MINE];  // of two steps
#pragma unroll
                    for (int j = HALF - 1; j >= 0; j--) {
                        const int step = half + j;
                        const bool mine = quarter == step / 2;
                        float in[MINE], through[MINE], element[2][4], g[2][MINE], through_decay[2][MINE];
                        load_floats(in, ins + step * CAPACITY);
                        load_floats(through, throughs + step * CAPACITY);
                        const auto& earlier_state = j ? state[j ? j - 1 : 0] : start;
#pragma unroll
                        for (int held = 0; held < 2; held++) {
                            load_floats(element[held], pairs + 8 * held * ROW + 4 * step);
                            if constexpr (!NARROW) y[j][held] = product[j][held] = size_grad[j][held] = 0;
#pragma unroll
                            for (int s = 0; s < MINE; s++) {
                                g[held][s] = element[held][2] * through[s] + carry[held][s];
                                carry[held][s] = g[held][s] * gate[j][held][s];
                                const float q = carry[held][s] * earlier_state[held][s];
                                decay_sum[held][s] += q * element[held][0];
                                if constexpr (NARROW) {
                                    through_decay[held][s] = q * decay[held][s];
                                } else {
                                    y[j][held] += through[s] * state[j][held][s];
                                    product[j][held] += g[held][s] * in[s];
                                    size_grad[j][held] += q * decay[held][s];
                                }
                            }
                        }
                        if constexpr (NARROW) {
                            float ys[4] = {}, products[4] = {}, size_grads[4] = {};
                            add_over_states(ys, state[j], through_steps);
                            add_over_states(products, g, in_steps);
                            add_over_states(size_grads, through_decay, ones);
#pragma unroll
                            for (int held = 0; held < 2; held++) {
                                of_y[held][j % 2] = mine ? ys[2 * held + j % 2] : of_y[held][j % 2];
                                of_product[held][j % 2] = mine ? products[2 * held + j % 2] : of_product[held][j % 2];
                                of_size[held][j % 2] = mine ? size_grads[2 * held + j % 2] : of_size[held][j % 2];
                            }
                        }
#pragma unroll
                        for (int s = 0; s < MINE; s++) {
                            in_terms[j % 2 * MINE + s] = g[0][s] * element[0][1] + g[1][s] * element[1][1];
                            out_terms[j % 2 * MINE + s] =
                                element[0][2] * state[j][0][s] + element[1][2] * state[j][1][s];
                        }
                        if (j % 2 == 0) {
                            __syncwarp();  // what lies there was read
                            const int summed = transposed_index<8, 4>();
                            float* const to = of_warp + (quarter * MINE + summed % MINE) * 8 + step + summed / MINE;
                            to[0] = transposed_sum<8, 4>(in_terms);
                            to[4 * THREADS] = transposed_sum<8, 4>(out_terms);
                        }
                    }
                    if constexpr (!NARROW) add_over_lanes(product, size_grad, y, sum_at, own, eight + half, block > 0);
                    __syncwarp();
                    const bool of_half = quarter / 2 == half / HALF;
                    if constexpr (NARROW)
                        put_sums(of_product, of_size, of_y, sum_at, own, eight + 2 * quarter, block > 0, of_half);
                }
            }
            if constexpr (COMPENSATED) {
#pragma unroll
                for (int held = 0; held < 2; held++)
#pragma unroll
                    for (int s = 0; s < MINE; s++)
                        add_exactly(decay_grad[held][s], decay_lost[held][s], of_tile[held][s]);
            }
            keep(block, false);
        }
        __syncwarp();

        const int again_first = int(opaque(unsigned(first))), batch_again = int(opaque(unsigned(at.batch)));
        const Rows<const Storage*> us_again(u, {u_batch, u_channel, u_time}, batch_again, again_first, at.begin);
        const Rows<const Storage*> deltas_again(delta, {delta_batch, delta_channel, delta_time}, batch_again, again_first, at.begin);
        const Rows<const Storage*> zs_again(z, {z_batch, z_channel, z_time}, batch_again, again_first, at.begin);
        const Rows<const Storage*> grads_again(out_grad, {grad_batch, grad_channel, grad_time}, batch_again, again_first, at.begin);
        const Strides3 new_strides{u_grad_batch, u_grad_channel, u_grad_time};
        const Rows<Storage*> u_grads(u_grad, new_strides, batch_again, again_first, at.begin);
        const Rows<Storage*> delta_grads(delta_grad, new_strides, batch_again, again_first, at.begin);
        const Rows<Storage*> z_grads(z_grad, new_strides, batch_again, again_first, at.begin);
#pragma unroll(int(AT_ONCE_AFTER))
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            const Values u_now = us_again.load(i, tile, count), grad_now = grads_again.load(i, tile, count);
            const Values z_now = zs_again.load(i, tile, count);
            Values delta_now;
            if constexpr (!NARROW) delta_now = deltas_again.load(i, tile, count);
            float found[VALUES][4], of_u[VALUES], of_delta[VALUES], of_z[VALUES], of_skip[VALUES];
            float skip_sum = 0, bias_sum = 0;
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                const int step = piece.time + (CHANNEL_LAST ? 0 : k);
                load_floats(found[k], rows + element_at(channel, step));
                if constexpr (BLOCKS > 1) {
#pragma unroll
                    for (int which = 1; which < 4; which++) found[k][which] = *sum_at(channel, step, which);
                }
            }
            differentiate(found, piece, count, u_now, delta_now, z_now, grad_now, bias, skip, smooth, z != nullptr, of_u,
                          of_delta, of_z, of_skip);
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                if constexpr (CHANNEL_LAST) store_float2(rows + element_at(piece.channel + k, piece.time), of_skip[k], of_delta[k]);
                else skip_sum += of_skip[k], bias_sum += of_delta[k];
            }
            u_grads.store(i, tile, count, of_u);
            delta_grads.store(i, tile, count, of_delta);
            if (z) z_grads.store(i, tile, count, of_z);
            if constexpr (!CHANNEL_LAST) add_over_time(skip_sum, bias_sum, IN_A_ROW, 0, piece.channel, piece.time == 0);
        }
        __syncwarp();
        if constexpr (CHANNEL_LAST) {
            float skip_sum = 0, bias_sum = 0;
            for (int step = lane / CHANNELS; step < TIMES; step += 2) {
                const float* const from = rows + element_at(lane % CHANNELS, step);
                skip_sum += from[0], bias_sum += from[1];
            }
            add_over_time(skip_sum, bias_sum, 2, 4, lane % CHANNELS, lane < CHANNELS);
            __syncwarp();
        }
    }

    __syncthreads();
    if (first_tile < end_tile) add_up_warps(first_tile * TIMES, blocks - 1);

    const i64 of_part = (i64(at.batch * sequence_count + at.sequence) * part_count + at.part) * channel_count + first;
    for (int block = 0; block < blocks; block++) {
        recall(block);
        if constexpr (BLOCKS > 1) {
#pragma unroll
            for (int held = 0; held < 2; held++) {
                load_floats(decay_grad[held], kept_at(block, 1, held));
                load_floats(decay_lost[held], kept_at(block, 2, held));
            }
        }
#pragma unroll
        for (int held = 0; held < 2; held++)
#pragma unroll
            for (int s = 0; s < MINE; s++) {
                const int n = block * CAPACITY + quarter * MINE + s, channel = own + 8 * held;
                if (channel >= left || n >= state_count) continue;
                A_grad[(of_part + channel) * state_count + n] = decay_grad[held][s] + decay_lost[held][s];
                if (initial_grad && at.part == 0) initial_grad[(of_state + 8 * held) * state_count + n] = carry[held][s];
            }
    }
    for (int i = lane; i < left; i += 32) {
        if (D_grad) D_grad[of_part + i] = skip_grads[warp * CHANNELS + i];
        if (bias_grad) bias_grad[of_part + i] = bias_grads[warp * CHANNELS + i];
    }
}
