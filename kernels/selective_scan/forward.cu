// The forward pass of a selective scan: for each batch, channel d and state n
//     h[t] = exp(δ[t]·A)·h[t-1] + δ[t]·u[t]·B[t],  y[t] = Σ_n C[t]·h[t] + D·u[t],  out[t] = y[t]·silu(z[t])
//
// LANES lanes of a warp have HELD channels, with STATES states each in registers; a warp has CHANNELS of them and a CTA WARPS warps, all of one batch and group, so B and C are read and converted once for all of them:
//
//          lane 0      lane 1      …                    a warp's row of shared memory, one for each channel:
//     d    n 0…S-1     n S…2S-1    …                    (δ, δ·u) of TIMES steps, then y in place of δ
//     d+1  n 0…S-1     n S…2S-1    …
//
// A tile is TIMES steps. Lanes load pieces of u, delta and z, 16 bytes each, a tile ahead; compute δ and δ·u once for
// each element and leave them in the row; walk the tile, with B and C from shared memory; sum y over the lanes of a
// channel, a few steps at a time so that each lane ends up with another step's sum; and write the pieces of out. Only
// B and C are the CTA's, in two buffers, so it meets once a tile.
//
// Traffic of an element: u, delta, z and out, 8 bytes in 16 bits. Work for each of its states: an exponential (16 a
// cycle on an SM), and 4 multiplications or additions; besides 2 / 4 loads from shared memory, and for an element some
// 40 instructions and four more of the exponential's unit. With 16 states that unit is the bound: 10 cycles of a
// quarter of an SM for 32 states, where issue takes about 8.
#define CHANNELS (32 / LANES * HELD)
#define CAPACITY (LANES * STATES)
#include "tile.cuh"

enum : int {
    ROW = 2 * TIMES + 4,  // so that channels lie in different banks
    GROUP = LANES < 8 ? LANES : 8,
    STEPS = 8,
    SHARED_ROWS = WARPS * CHANNELS * ROW,
    SHARED_STAGE = 2 * CAPACITY * TIMES,
};

// Threads of an SM that registers leave room for.
enum : int {
    WIDE = sizeof(Storage) == 4,
    RESIDENT = LANES * HELD == 4 && ALIGNED && !WIDE ? 512 : HELD * STATES >= 16 && (WIDE || !ALIGNED) ? 256 : 384,
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS)
selective_scan_forward(const Storage* u, const Storage* delta, const float* A, const Storage* B, const Storage* C,
                       const float* D, const Storage* z, const float* delta_bias, const float* initial_state,
                       Storage* out, float* final_state, float* checkpoints, const i64* offsets, i64 batch,
                       i64 channels, i64 time, i64 states, i64 group_channels, i64 sequences, i64 flags,
                        i64 u_batch, i64 u_channel, i64 u_time, i64 delta_batch, i64 delta_channel,
                       i64 delta_time, i64 z_batch, i64 z_channel, i64 z_time, i64 out_batch, i64 out_channel,
                       i64 out_time, i64 B_batch, i64 B_group, i64 B_state, i64 B_time, i64 C_batch, i64 C_group,
                       i64 C_state, i64 C_time) {
    float* const shared = reinterpret_cast<float*>(dynamic_rows());
    float* const stages = shared + SHARED_ROWS;
    float* const biases = stages + 2 * SHARED_STAGE;
    float* const skips = biases + WARPS * CHANNELS;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Place at = place_of(channels, time, group_channels, sequences, 1, offsets);
    const bool smooth = flags & 1;
    const i64 first = at.first + warp * CHANNELS;
    const int channels_left = within(at.limit - first, CHANNELS);
    const Rows<const Storage*> us(u, {u_batch, u_channel, u_time}, at.batch, first, at.begin);
    const Rows<const Storage*> deltas(delta, {delta_batch, delta_channel, delta_time}, at.batch, first, at.begin);
    const Rows<const Storage*> zs(z, {z_batch, z_channel, z_time}, at.batch, first, at.begin);
    const Rows<Storage*> outs(out, {out_batch, out_channel, out_time}, at.batch, first, at.begin);
    const Projection b(B, {B_batch, B_group, B_state, B_time}, at, flags & 2);
    const Projection c(C, {C_batch, C_group, C_state, C_time}, at, flags & 4);
    const i64 length = at.end - at.begin;

    for (int i = lane; i < CHANNELS; i += 32) {
        const bool in = i < channels_left;
        biases[warp * CHANNELS + i] = in && delta_bias ? delta_bias[first + i] : 0;
        skips[warp * CHANNELS + i] = in && D ? D[first + i] : 0;
    }
    __syncwarp();
    const float* const bias = biases + warp * CHANNELS;
    const float* const skip = skips + warp * CHANNELS;
    float* const rows = shared + warp * CHANNELS * ROW;

    // The lane's channels are APART from each other.
    enum : int { APART = 32 / LANES };
    const int own = lane / LANES, part = lane % LANES;
    float* const row = rows + own * ROW;
    const i64 state = ((at.batch * sequences + at.sequence) * channels + first + own) * states + part * STATES;
    float decay[HELD][STATES], h[HELD][STATES];
#pragma unroll
    for (int held = 0; held < HELD; held++)
#pragma unroll
        for (int s = 0; s < STATES; s++) {
            const int channel = own + held * APART;
            const bool in = channel < channels_left && part * STATES + s < states;
            decay[held][s] = in ? A[(first + channel) * states + part * STATES + s] * LOG2_E : 0;
            h[held][s] = in && initial_state ? initial_state[state + held * APART * states + s] : 0;
        }
    i64 slot = 0;
    if (checkpoints) {
        const i64 slots = time / INTERVAL + sequences;
        slot = at.batch * slots + at.begin / INTERVAL + at.sequence;
    }

    float own_bias[PER_LANE], own_skip[PER_LANE];  // of each piece's channel
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const Piece piece(i);
        own_bias[i] = piece.there ? bias[piece.channel] : 0, own_skip[i] = piece.there ? skip[piece.channel] : 0;
    }
    Values next_u[PER_LANE], next_delta[PER_LANE];
    Staged staged;
    const auto fetch = [&](i64 tile) {
        const int times = within(length - tile, TIMES);
        staged.load(b, c, 0, int(states), tile, times);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            next_u[i] = us.load(piece, tile, count);
            next_delta[i] = deltas.load(piece, tile, count);
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
            now_u[i] = next_u[i], now_z[i] = zs.load(piece, tile, count);
            float size[VALUES], product[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                size[k] = next_delta[i].get(k) + (CHANNEL_LAST ? (piece.there ? bias[channel] : 0) : own_bias[i]);
                if (smooth) size[k] = softplus(size[k]);
                if (!Piece::has(count, k)) size[k] = 0;
                product[k] = size[k] * now_u[i].get(k);
            }
            if (piece.there) {
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
        }
        __syncthreads();
        if (tile + TIMES < length) fetch(tile + TIMES);

#pragma unroll 1
        for (int t = 0; t < TIMES; t += STEPS) {
            if (checkpoints && tile + t < length && (tile + t) % INTERVAL == 0) {
#pragma unroll
                for (int held = 0; held < HELD; held++) {
                    const int channel = own + held * APART;
                    if (channel >= channels_left) continue;
                    float* const to = checkpoints + part * STATES +
                                      ((slot + (tile + t) / INTERVAL) * channels + first + channel) * states;
                    if (STATES % 4 == 0 && states == CAPACITY) {
                        store_floats<STATES>(to, h[held]);
                    } else {
#pragma unroll
                        for (int s = 0; s < STATES; s++)
                            if (part * STATES + s < states) to[s] = h[held][s];
                    }
                }
            }
#pragma unroll
            for (int group = t; group < t + STEPS; group += GROUP) {
                float y[HELD][GROUP];
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    float in[STATES], through[STATES];
                    load_floats(in, stage + (group + j) * CAPACITY + part * STATES);
                    load_floats(through, stage + (TIMES + group + j) * CAPACITY + part * STATES);
#pragma unroll
                    for (int held = 0; held < HELD; held++) {
                        float pair[2];
                        load_floats(pair, row + held * APART * ROW + 2 * (group + j));
                        y[held][j] = 0;
#pragma unroll
                        for (int s = 0; s < STATES; s++) {
                            h[held][s] = fast_exp2(pair[0] * decay[held][s]) * h[held][s] + pair[1] * in[s];
                            y[held][j] += through[s] * h[held][s];
                        }
                    }
                }
#pragma unroll
                for (int held = 0; held < HELD; held++) {
                    float sum = transposed_sum<GROUP, 1>(y[held]);
#pragma unroll
                    for (int bit = GROUP; bit < LANES; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
                    if (part < GROUP) row[held * APART * ROW + 2 * (group + summed_by<GROUP, 1>())] = sum;
                }
            }
        }
        __syncwarp();

#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            if (!piece.there) continue;
            float y[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                const int step = piece.time + (CHANNEL_LAST ? 0 : k);
                y[k] = rows[channel * ROW + 2 * step] + (CHANNEL_LAST ? skip[channel] : own_skip[i]) * now_u[i].get(k);
                if (z) {
                    const float gate = now_z[i].get(k);
                    y[k] *= gate * sigmoid(gate);
                }
            }
            outs.store(piece, tile, count, y);
        }
        __syncwarp();
    }
    if (final_state) {
#pragma unroll
        for (int held = 0; held < HELD; held++)
#pragma unroll
            for (int s = 0; s < STATES; s++)
                if (own + held * APART < channels_left && part * STATES + s < states)
                    final_state[state + held * APART * states + s] = h[held][s];
    }
}
