// The forward pass of a selective scan: for each batch, channel d and state n
//     h[t] = exp(δ[t]·A)·h[t-1] + δ[t]·u[t]·B[t],  y[t] = Σ_n C[t]·h[t] + D·u[t],  out[t] = y[t]·silu(z[t])
//
// A warp has 16 channels, and a lane two of them with STATES states each, in registers. SPLIT warps share the channels
// and have other states. A CTA has WARPS warps, all of one batch and group, so B and C are read once for all of them:
//
//     lane % 4             0        1        2        3          a row of shared memory for each channel:
//     lane / 4      d      n 0…3    n 4…7    n 8…11   n 12…15    (δ, δ·u) of TIMES steps
//     lane / 4 + 8  d + 8  n 0…3    n 4…7    n 8…11   n 12…15    and one for each warp with y
//
// A tile is TIMES steps. Threads load pieces of u, delta and z, 16 bytes each, a tile ahead; compute δ and δ·u once for
// each element and leave them in the rows; walk the tile, with B from shared memory; and write the pieces of out.
//
// The states of a lane are its part of a matrix of 16 × 8 as tensor cores take it. So in 16 bits y is a product on
// them: of the states of a step with C of eight steps, of which the column of that step is kept. What the product
// reads of C are a lane's registers for eight steps. float32 is multiplied and summed by shuffles.
//
// Traffic of an element: u, delta, z and out, 8 bytes in 16 bits, and 2 of the states that are kept. Work for each of
// its states: an exponential (16 a cycle on an SM, so 8 cycles of a quarter of it for a warp), some 5 other
// instructions, and 4 bytes of shared memory. For an element come three of the exponential's unit and some 30 others.
// With 16 states that unit is the bound, with 9.5 cycles, where issue takes 7 and shared memory 4.
#define CHANNELS 16
#define CAPACITY (4 * STATES * SPLIT)
#include "tile.cuh"

enum : int {
    ROW = 2 * TIMES + 4,  // so that channels lie in different banks
    Y_ROW = TIMES + 4,
    STEPS = 8,
    // Sequences are so many steps at a time, of which none beyond the end is worked on.
    WHOLE_STEPS = ALIGNED && !CHANNEL_LAST && VALUES == STEPS,
    CTA_CHANNELS = WARPS / SPLIT * CHANNELS,
    WIDTH = STATES < 4 ? STATES : 4,  // states that lie together
    BLOCKS = STATES / WIDTH,
    SHARED_ROWS = CTA_CHANNELS * ROW,
    SHARED_Y = WARPS * CHANNELS * Y_ROW,
    SHARED_STAGE = 2 * CAPACITY * TIMES,
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_scan_forward(const Storage* u, const Storage* delta, const float* A, const Storage* B, const Storage* C,
                       const float* D, const Storage* z, const float* delta_bias, const float* initial_state,
                       Storage* out, float* final_state, float* checkpoints, const i64* offsets, i64 batch,
                       i64 channels, i64 time, i64 states, i64 group_channels, i64 sequences, i64 flags,
                       i64 u_batch, i64 u_channel, i64 u_time, i64 delta_batch, i64 delta_channel,
                       i64 delta_time, i64 z_batch, i64 z_channel, i64 z_time, i64 out_batch, i64 out_channel,
                       i64 out_time, i64 B_batch, i64 B_group, i64 B_state, i64 B_time, i64 C_batch, i64 C_group,
                       i64 C_state, i64 C_time) {
    float* const all_rows = reinterpret_cast<float*>(dynamic_rows());
    float* const all_y = all_rows + SHARED_ROWS;
    float* const stages = all_y + SHARED_Y;
    float* const biases = stages + 2 * SHARED_STAGE;
    float* const skips = biases + CTA_CHANNELS;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sharers = warp / SPLIT;
    const int channel_count = int(channels), state_count = int(states), sequence_count = int(sequences);
    const Place at = place_of(channel_count, int(time), int(group_channels), sequence_count, 1, offsets);
    const bool smooth = flags & 1;
    const int first = at.first + sharers * CHANNELS;
    const int channels_left = within(at.limit - first, CHANNELS);
    const Rows<const Storage*> us(u, {u_batch, u_channel, u_time}, at.batch, first, at.begin);
    const Rows<const Storage*> deltas(delta, {delta_batch, delta_channel, delta_time}, at.batch, first, at.begin);
    const Rows<const Storage*> zs(z, {z_batch, z_channel, z_time}, at.batch, first, at.begin);
    const Rows<Storage*> outs(out, {out_batch, out_channel, out_time}, at.batch, first, at.begin);
    const Projection b(B, {B_batch, B_group, B_state, B_time}, at, flags & 2);
    const Projection c(C, {C_batch, C_group, C_state, C_time}, at, flags & 4);
    const i64 length = at.end - at.begin;

#pragma unroll 1
    for (int i = threadIdx.x; i < CTA_CHANNELS; i += THREADS) {
        const bool in = at.first + i < at.limit;
        biases[i] = in && delta_bias ? delta_bias[at.first + i] : 0;
        skips[i] = in && D ? D[at.first + i] : 0;
    }
    __syncthreads();
    const float* const bias = biases + sharers * CHANNELS;
    const float* const skip = skips + sharers * CHANNELS;
    float* const rows = all_rows + sharers * CHANNELS * ROW;
    float* const ys = all_y + sharers * SPLIT * CHANNELS * Y_ROW;

    // Of the lane's channels, which are eight from each other, blocks of WIDTH state_count that are STATES_APART from each other.
    const int own = lane / 4, quarter = lane % 4;
    const float* const row = rows + own * ROW;
    float* const y_row = all_y + (warp * CHANNELS + own) * Y_ROW;
    const int n_first = (warp % SPLIT * 4 + quarter) * WIDTH;
    enum : int { STATES_APART = 4 * WIDTH * SPLIT };
    const auto of_state = [&](int channel) {  // which takes no registers while steps go on
        const int of_sequence = int(opaque(unsigned(at.batch))) * sequence_count + at.sequence;
        return (i64(of_sequence) * channel_count + first + channel) * state_count;
    };
    float decay[BLOCKS][2][WIDTH], h[BLOCKS][2][WIDTH];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int held = 0; held < 2; held++)
#pragma unroll
            for (int s = 0; s < WIDTH; s++) {
                const int n = n_first + block * STATES_APART + s;
                const bool in = own + 8 * held < channels_left && n < state_count;
                decay[block][held][s] = in ? A[i64(first + own + 8 * held) * state_count + n] * LOG2_E : 0;
                h[block][held][s] = in && initial_state ? initial_state[of_state(own + 8 * held) + n] : 0;
            }
    const int slot = at.batch * (int(time) / INTERVAL + sequence_count) + at.begin / INTERVAL + at.sequence;

    Values next_u[PER_LANE], next_delta[PER_LANE];
    Staged staged;
    const auto fetch = [&](i64 tile) {
        const int times = within(length - tile, TIMES);
        staged.load(b, c, 0, state_count, tile, times);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            next_u[i] = us.load(i, tile, count);
            next_delta[i] = deltas.load(i, tile, count);
        }
    };
    fetch(0);
    int side = 0;
    for (i64 tile = 0; tile < length; tile += TIMES, side ^= 1) {
        float* const stage = stages + side * SHARED_STAGE;
        const int times = within(length - tile, TIMES);
        staged.store(stage);
        Values now_u[PER_LANE], now_z[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            now_u[i] = next_u[i], now_z[i] = zs.load(i, tile, count);
            if (!piece.there) continue;
            float size[VALUES], product[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                size[k] = next_delta[i].get(k) + bias[piece.channel + (CHANNEL_LAST ? k : 0)];
                if (smooth) size[k] = softplus<NARROW>(size[k]);
                if (!WHOLE_STEPS && !Piece::has(count, k)) size[k] = 0;
                product[k] = size[k] * now_u[i].get(k);
            }
            float* const to = rows + piece.channel * ROW + 2 * piece.time;
            if constexpr (CHANNEL_LAST) {
#pragma unroll
                for (int k = 0; k < VALUES; k++) store_float2(to + k * ROW, size[k], product[k]);
            } else {
#pragma unroll
                for (int k = 0; k < VALUES; k += 2)
                    store_float4(to + 2 * k, size[k], product[k], size[k + 1], product[k + 1]);
            }
        }
        __syncthreads();
        if (tile + TIMES < length) fetch(tile + TIMES);

#pragma unroll 1
        for (int t = 0; t < times; t += STEPS) {
            if (checkpoints && (tile + t) % INTERVAL == 0) {
#pragma unroll
                for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                    for (int held = 0; held < 2; held++) {
                        const int n = n_first + block * STATES_APART;
                        if (own + 8 * held >= channels_left) continue;
                        float* const to =
                            checkpoints + (i64(slot + (tile + t) / INTERVAL) * channel_count + first + own + 8 * held) * state_count;
                        if (state_count % WIDTH == 0 && n < state_count) {
                            store_floats(to + n, h[block][held]);
                        } else {
#pragma unroll
                            for (int s = 0; s < WIDTH; s++)
                                if (n + s < state_count) to[n + s] = h[block][held][s];
                        }
                    }
            }
            // In 16 bits of steps 2 · quarter and the next, else of all.
            float y[2][NARROW ? 2 : STEPS] = {};
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                if (block && block * STATES_APART >= state_count) break;
                const float* const ins = stage + t * CAPACITY + n_first + block * STATES_APART;
                const float* const throughs = ins + TIMES * CAPACITY;
                float through[WIDTH];
                if constexpr (NARROW) load_floats(through, throughs + own * CAPACITY);
                float pair[2][4];
#pragma unroll
                for (int j = 0; j < STEPS; j++) {
                    if (j % 2 == 0) load_floats(pair[0], row + 2 * (t + j)), load_floats(pair[1], row + 8 * ROW + 2 * (t + j));
                    float in[WIDTH];
                    load_floats(in, ins + j * CAPACITY);
                    float(&now)[2][WIDTH] = h[block];
#pragma unroll
                    for (int held = 0; held < 2; held++)
#pragma unroll
                        for (int s = 0; s < WIDTH; s++)
                            now[held][s] = gate_of(pair[held][j % 2 * 2] * decay[block][held][s]) * now[held][s] +
                                           pair[held][j % 2 * 2 + 1] * in[s];
                    if constexpr (NARROW) {
                        float of_steps[4] = {};
#pragma unroll
                        for (int s = 0; s < WIDTH; s += 2) {
                            const bool both = s + 1 < WIDTH;
                            const int other = both ? s + 1 : s;
                            mma_tf32(of_steps,
                                     make_uint4(__float_as_uint(now[0][s]), __float_as_uint(now[1][s]),
                                                both ? __float_as_uint(now[0][other]) : 0u,
                                                both ? __float_as_uint(now[1][other]) : 0u),
                                     make_uint2(__float_as_uint(through[s]), both ? __float_as_uint(through[other]) : 0u));
                        }
                        const bool mine = quarter == j / 2;
#pragma unroll
                        for (int held = 0; held < 2; held++) {
                            float found = of_steps[2 * held + j % 2];
                            if (block) found += y[held][j % 2];
                            y[held][j % 2] = mine ? found : y[held][j % 2];
                        }
                    } else {
                        load_floats(through, throughs + j * CAPACITY);
#pragma unroll
                        for (int held = 0; held < 2; held++)
#pragma unroll
                            for (int s = 0; s < WIDTH; s++)
                                y[held][NARROW ? 0 : j] += through[s] * now[held][s];
                    }
                }
            }
#pragma unroll
            for (int held = 0; held < 2; held++) {
                float* const to = y_row + 8 * held * Y_ROW + t;
                if constexpr (NARROW) {
                    store_float2(to + 2 * quarter, y[held][0], y[held][1]);
                } else {
#pragma unroll
                    for (int j = 0; j < STEPS; j += 4) {
                        float four[4];
#pragma unroll
                        for (int k = 0; k < 4; k++) four[k] = y[held][NARROW ? 0 : j + k];
                        const float sum = transposed_sum<4, 1>(four);
                        to[j + transposed_index<4, 1>()] = sum;
                    }
                }
            }
        }
        if constexpr (SPLIT > 1) __syncthreads();
        else __syncwarp();

#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            if (!piece.there) continue;
            float y[VALUES];
#pragma unroll
            for (int split = 0; split < SPLIT; split++) {
                const float* const from = ys + (split * CHANNELS + piece.channel) * Y_ROW + piece.time;
                float part[VALUES];
                if constexpr (CHANNEL_LAST) {
#pragma unroll
                    for (int k = 0; k < VALUES; k++) part[k] = from[k * Y_ROW];
                } else {
                    load_floats(part, from);
                }
#pragma unroll
                for (int k = 0; k < VALUES; k++) y[k] = split ? y[k] + part[k] : part[k];
            }
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                y[k] += skip[piece.channel + (CHANNEL_LAST ? k : 0)] * now_u[i].get(k);
                if (z) {
                    const float gate = now_z[i].get(k);
                    y[k] *= gate * sigmoid(gate);
                }
            }
            outs.store(i, tile, count, y);
        }
        __syncwarp();
    }
    if (final_state) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int held = 0; held < 2; held++)
#pragma unroll
                for (int s = 0; s < WIDTH; s++) {
                    const int n = n_first + block * STATES_APART + s;
                    if (own + 8 * held < channels_left && n < state_count)
                        final_state[of_state(own + 8 * held) + n] = h[block][held][s];
                }
    }
}
