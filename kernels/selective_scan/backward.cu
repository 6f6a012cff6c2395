// The backward pass of a selective scan: with y, δ and h as in forward.cu, dy = out_grad·silu(z) and, from the last
// step to the first,
//     g[t] = dy[t]·C[t] + exp(δ[t+1]·A)·g[t+1],  q[t] = g[t]·exp(δ[t]·A)·h[t-1]
//     dC = Σ_d dy·h,  dB = Σ_d g·δ·u,  dA = Σ_t q·δ,  d(δ·u) = Σ_n g·B,  dδ = Σ_n q·A + u·d(δ·u)
//
// A warp has 8 channels and 16 states, and a lane one channel with 4 of the states: lane % 4 and lane / 16 give the
// channel, lane / 4 % 4 the states. A CTA has WARPS warps of one batch and group. A tile is TIMES steps, and the forward
// pass has left the state before each. Tiles come last first:
//
//     1  for each element, δ, δ·u and dy to a row of shared memory
//     2  from the state before the tile, that before every fourth step, to shared memory
//     3  four steps at a time, the last first: states again, kept in registers with the decays; then the steps back
//     4  du, dδ and dz of each element
//
// Sums over states, y, d(δ·u) and dδ, are over four lanes, by shuffles of four steps at a time. Sums over channels, dB
// and dC, are products with a matrix that picks a column, on the tensor cores: rows are 8 lanes' states, what is summed
// are four channels at each of two steps, and columns are 8 steps. A CTA adds up its warps' in shared memory and
// writes its partial sum; those of all CTAs are summed in order later. float32 goes in two parts, so nothing is lost.
//
// More than 16 states go one block of 16 after the other, through steps 2 and 3, with what is carried in `carries`.
//
// Sequences can be cut into parts, with CTAs of their own; then `adjoints` and `sizes` hold, of each part, g before its
// first step if none comes in at its end, and the sum of δ, from which the later parts' g is made.
//
// Work for each state of an element: two exponentials and some 25 instructions; besides 5 exponentials for an element.
#define CHANNELS 8
#define CAPACITY 16
#include "tile.cuh"

enum : int {
    // Floats of a channel: four for each step, and four more for each eight of them, for the banks.
    ROW = 4 * TIMES + TIMES / 2 - 4,
    MINE = 4,  // states of a lane
    SHARED_ROWS = WARPS * CHANNELS * ROW,
    SHARED_STATES = THREADS * TIMES,  // four floats of each thread for every four steps
    SHARED_STAGE = 2 * CAPACITY * TIMES,
    OUTPUTS = 2 * CAPACITY * 8,  // of eight steps
    SHARED_SLAB = WARPS * 2 * OUTPUTS,
};

__device__ inline int element_at(int channel, int step) { return channel * ROW + 4 * step + step / 8 * 4; }

// acc += the products' columns; of float32 in two parts, of which each is seen whole.
__device__ inline void add_columns(float (&acc)[4], float a, float b, float c, float d, uint2 columns) {
    const uint4 all = make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
    mma_tf32(acc, all, columns);
    if constexpr (sizeof(Storage) == 4) {
        const auto low = [](float x) {
            return __float_as_uint(x - __uint_as_float(__float_as_uint(x) & 0xffffe000u));
        };
        mma_tf32(acc, make_uint4(low(a), low(b), low(c), low(d)), columns);
    }
}

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
    float* const slabs = stage + SHARED_STAGE;
    float* const biases = slabs + 2 * SHARED_SLAB;
    float* const skips = biases + WARPS * CHANNELS;
    float* const all_sums = BLOCKS > 1 ? skips + WARPS * CHANNELS : all_rows;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Place at = place_of(channels, time, group_channels, sequences, parts, offsets);
    const bool smooth = flags & 1;
    const i64 first = at.first + warp * CHANNELS;
    const int left = within(at.limit - first, CHANNELS);
    const Rows<const Storage*> us(u, {u_batch, u_channel, u_time}, at.batch, first, at.begin);
    const Rows<const Storage*> deltas(delta, {delta_batch, delta_channel, delta_time}, at.batch, first, at.begin);
    const Rows<const Storage*> zs(z, {z_batch, z_channel, z_time}, at.batch, first, at.begin);
    const Rows<const Storage*> grads(out_grad, {grad_batch, grad_channel, grad_time}, at.batch, first, at.begin);
    const Strides3 new_strides{u_grad_batch, u_grad_channel, u_grad_time};
    const Rows<Storage*> u_grads(u_grad, new_strides, at.batch, first, at.begin);
    const Rows<Storage*> delta_grads(delta_grad, new_strides, at.batch, first, at.begin);
    const Rows<Storage*> z_grads(z_grad, new_strides, at.batch, first, at.begin);
    const Projection b(B, {B_batch, B_group, B_state, B_time}, at, flags & 2);
    const Projection c(C, {C_batch, C_group, C_state, C_time}, at, flags & 4);
    const i64 length = at.end - at.begin;

    for (int i = lane; i < CHANNELS; i += 32) {
        const bool in = i < left;
        biases[warp * CHANNELS + i] = in && delta_bias ? delta_bias[first + i] : 0;
        skips[warp * CHANNELS + i] = in && D ? D[first + i] : 0;
    }
    __syncwarp();
    const float* const bias = biases + warp * CHANNELS;
    const float* const skip = skips + warp * CHANNELS;
    float* const rows = all_rows + warp * CHANNELS * ROW;
    float* const sums = all_sums + warp * CHANNELS * ROW;
    float* const before = all_states + 4 * threadIdx.x;  // every fourth step, 4 · THREADS floats on

    const int own = lane / 16 * 4 + lane % 4, quarter = lane / 4 % 4;
    const bool mine = own < left;
    const float* const row = rows + own * ROW;
    float* const sum_row = sums + own * ROW;
    const int summed = summed_by<4, 4>();
    const i64 of_state = (at.batch * sequences + at.sequence) * channels + first + own;
    const int blocks = BLOCKS > 1 ? int((states + CAPACITY - 1) / CAPACITY) : 1;
    const i64 slots = time / INTERVAL + sequences;
    const i64 slot = at.batch * slots + at.begin / INTERVAL + at.sequence;
    const i64 tiles = (length + TIMES - 1) / TIMES, per_part = (tiles + parts - 1) / parts;
    const i64 first_tile = at.part * per_part < tiles ? at.part * per_part : tiles;
    const i64 end_tile = first_tile + per_part < tiles ? first_tile + per_part : tiles;

    float decay[MINE], carry[MINE], decay_grad[MINE];
    // Of a block of states: A, and what comes in at the end.
    const auto begin_block = [&](int block, bool entering) {
#pragma unroll
        for (int s = 0; s < MINE; s++) {
            const int n = block * CAPACITY + quarter * MINE + s;
            const bool in = mine && n < states;
            decay[s] = in ? A[(first + own) * states + n] * LOG2_E : 0;
            if (!entering) continue;
            decay_grad[s] = 0;
            carry[s] = in && final_grad ? final_grad[of_state * states + n] : 0;
            for (i64 later = parts - 1; later > at.part; later--) {
                const i64 of_part = ((at.batch * sequences + at.sequence) * parts + later) * channels + first + own;
                if (in) carry[s] = adjoints[of_part * states + n] + fast_exp2(decay[s] * sizes[of_part]) * carry[s];
            }
        }
    };
    float* const kept = carries + (i64(blockIdx.x) * blocks * THREADS + threadIdx.x) * 8;
    const auto recall = [&](int block) {
        if constexpr (BLOCKS > 1) load_floats(carry, kept + i64(block) * THREADS * 8), load_floats(decay_grad, kept + i64(block) * THREADS * 8 + 4);
    };
    const auto keep = [&](int block) {
        if constexpr (BLOCKS > 1) store_floats(kept + i64(block) * THREADS * 8, carry), store_floats(kept + i64(block) * THREADS * 8 + 4, decay_grad);
    };
    for (int block = 0; block < blocks; block++) begin_block(block, true), keep(block);

    // Sums over time for D and delta_bias: of each piece's channel, or of one channel and half of the steps.
    float skip_sum[PER_LANE], bias_sum[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) skip_sum[i] = bias_sum[i] = 0;
    int slab_side = 0;

    for (i64 number = end_tile - 1; number >= first_tile; number--) {
        const i64 tile = number * TIMES;
        const int times = within(length - tile, TIMES);
        // All that is read for the tile is on its way before any of it is needed.
        Staged staged;
        float h[MINE];
        const auto fetch = [&](int block) {
            staged.load(b, c, block * CAPACITY, int(states), tile, times);
#pragma unroll
            for (int s = 0; s < MINE; s++) {
                const int n = block * CAPACITY + quarter * MINE + s;
                h[s] = mine && n < states ? checkpoints[((slot + number) * channels + first + own) * states + n] : 0;
            }
        };
        if constexpr (BLOCKS == 1) fetch(0);
        const i64 earlier = tile - TIMES;
        const auto bring = [&](const Rows<const Storage*>& rows_of, const Piece& piece) {
            if (rows_of.first) prefetch(rows_of.at(piece, earlier));
        };
        if (ALIGNED && number > first_tile) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const Piece piece(i);
                if (piece.count(left, TIMES) > 0)
                    bring(us, piece), bring(deltas, piece), bring(zs, piece), bring(grads, piece);
            }
            if (BLOCKS == 1 && mine)
                prefetch(checkpoints + ((slot + number - 1) * channels + first + own) * states + quarter * MINE);
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            const Values u_now = us.load(piece, tile, count), delta_now = deltas.load(piece, tile, count);
            const Values z_now = zs.load(piece, tile, count), grad_now = grads.load(piece, tile, count);
            if (!piece.there) continue;
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                const int step = piece.time + (CHANNEL_LAST ? 0 : k);
                float size = delta_now.get(k) + bias[channel], grad = grad_now.get(k);
                if (smooth) size = softplus(size);
                if (!Piece::has(count, k)) size = 0;
                if (z) grad *= z_now.get(k) * sigmoid(z_now.get(k));
                store_float4(rows + element_at(channel, step), size, size * u_now.get(k), grad, 0);
            }
        }

        for (int block = 0; block < blocks; block++) {
            if constexpr (BLOCKS > 1) begin_block(block, false), recall(block);
            if constexpr (BLOCKS > 1) fetch(block);
            __syncthreads();  // nobody reads what was staged before
            staged.store(stage);
            __syncthreads();
            for (int t = 0; t < TIMES; t += 4) {
                store_floats(before + t * THREADS, h);
                if (t + 4 == TIMES) break;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float pair[2], in[MINE];
                    load_floats(pair, row + element_at(0, t + j));
                    load_floats(in, stage + (t + j) * CAPACITY + quarter * MINE);
#pragma unroll
                    for (int s = 0; s < MINE; s++)
                        h[s] = fast_exp2(pair[0] * decay[s]) * h[s] + pair[1] * in[s];
                }
            }

#pragma unroll 1
            for (int eight = TIMES - 8; eight >= 0; eight -= 8) {
                const float* const pairs = row + element_at(0, eight);
                const float* const ins = stage + eight * CAPACITY + quarter * MINE;
                const float* const throughs = ins + TIMES * CAPACITY;
                float in_acc[2][4] = {}, out_acc[2][4] = {};
#pragma unroll
                for (int half = 4; half >= 0; half -= 4) {
                    const int t = half;  // in the eight
                    float start[MINE], gate[4][MINE], state[4][MINE], y[4], product[4], size_grad[4];
                    float in[4][MINE], through[4][MINE], element[4][4];
                    load_floats(start, before + (eight + t) * THREADS);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        load_floats(element[j], pairs + 4 * (t + j));
                        load_floats(in[j], ins + (t + j) * CAPACITY);
                        load_floats(through[j], throughs + (t + j) * CAPACITY);
                        y[j] = 0;
#pragma unroll
                        for (int s = 0; s < MINE; s++) {
                            gate[j][s] = fast_exp2(element[j][0] * decay[s]);
                            state[j][s] =
                                gate[j][s] * (j ? state[j ? j - 1 : 0][s] : start[s]) + element[j][1] * in[j][s];
                            y[j] += through[j][s] * state[j][s];
                        }
                    }
#pragma unroll
                    for (int two = 2; two >= 0; two -= 2) {
                        float in_term[2][MINE], out_term[2][MINE];
#pragma unroll
                        for (int j = two + 1; j >= two; j--) {
                            if constexpr (THREADS * CTAS > 384) {  // fewer registers than keep them
                                load_floats(element[j], pairs + 4 * (t + j));
                                load_floats(in[j], ins + (t + j) * CAPACITY);
                                load_floats(through[j], throughs + (t + j) * CAPACITY);
                            }
                            product[j] = size_grad[j] = 0;
#pragma unroll
                            for (int s = 0; s < MINE; s++) {
                                const float g = element[j][2] * through[j][s] + carry[s];
                                in_term[j - two][s] = g * element[j][1];
                                out_term[j - two][s] = element[j][2] * state[j][s];
                                product[j] += g * in[j][s];
                                carry[s] = g * gate[j][s];
                                const float q = carry[s] * (j ? state[j ? j - 1 : 0][s] : start[s]);
                                size_grad[j] += q * decay[s];
                                decay_grad[s] += q * element[j][0];
                            }
                        }
                        const float one = 1.0f;
                        const unsigned picks = __float_as_uint(one);
                        const uint2 columns = make_uint2(lane / 4 == half + two ? picks : 0u, lane / 4 == half + two + 1 ? picks : 0u);
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            add_columns(in_acc[k], in_term[0][2 * k], in_term[0][2 * k + 1], in_term[1][2 * k],
                                        in_term[1][2 * k + 1], columns);
                            add_columns(out_acc[k], out_term[0][2 * k], out_term[0][2 * k + 1], out_term[1][2 * k],
                                        out_term[1][2 * k + 1], columns);
                        }
                    }
                    const float of_y = transposed_sum<4, 4>(y), of_product = transposed_sum<4, 4>(product);
                    const float of_size = transposed_sum<4, 4>(size_grad);
                    float* const to = sum_row + element_at(0, eight) + 4 * (t + summed);
                    if (BLOCKS > 1 && block > 0) {
                        to[1] += of_product, to[2] += of_size, to[3] += of_y;
                    } else {
                        to[1] = of_product;
                        store_float2(to + 2, of_size, of_y);
                    }
                }
                // What the lanes of a warp have summed: of 16 states and 8 steps, for each half of the channels.
                float* const slab = slabs + slab_side * SHARED_SLAB;
                float* const of_lane = slab + (warp * 2 + lane / 16) * OUTPUTS + quarter * MINE * 8 + lane % 4 * 2;
#pragma unroll
                for (int s = 0; s < MINE; s++) {
                    store_float2(of_lane + s * 8, in_acc[s / 2][s % 2 * 2], in_acc[s / 2][s % 2 * 2 + 1]);
                    store_float2(of_lane + OUTPUTS / 2 + s * 8, out_acc[s / 2][s % 2 * 2], out_acc[s / 2][s % 2 * 2 + 1]);
                }
                __syncthreads();
                for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
                    float sum = 0;
#pragma unroll
                    for (int k = 0; k < 2 * WARPS; k++) sum += slab[k * OUTPUTS + i];
                    const int n = block * CAPACITY + i / 8 % CAPACITY;
                    const i64 step = tile + eight + i % 8;
                    float* const to = i < OUTPUTS / 2 ? B_grad : C_grad;
                    if (n < states && step < length)
                        to[(((at.block * batch + at.batch) * (channels / group_channels) + at.group) * states + n) * time + at.begin + step] = sum;
                }
                slab_side ^= 1;
            }
            keep(block);
        }
        __syncwarp();

#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(left, times);
            const Values u_now = us.load(piece, tile, count), delta_now = deltas.load(piece, tile, count);
            const Values z_now = zs.load(piece, tile, count), grad_now = grads.load(piece, tile, count);
            if (!piece.there) continue;
            float of_u[VALUES], of_delta[VALUES], of_z[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                const int channel = piece.channel + (CHANNEL_LAST ? k : 0);
                const int step = piece.time + (CHANNEL_LAST ? 0 : k);
                float size[1], found[4];
                load_floats(size, rows + element_at(channel, step));
                load_floats(found, sums + element_at(channel, step));
                const float wide = u_now.get(k), grad = grad_now.get(k);
                float inner = grad;
                if (z) {
                    const float gate = z_now.get(k), open = sigmoid(gate);
                    inner *= gate * open;
                    of_z[k] = grad * (found[3] + skip[channel] * wide) * open * (1 + gate * (1 - open));
                }
                of_u[k] = size[0] * found[1] + skip[channel] * inner;
                of_delta[k] = LN_2 * found[2] + wide * found[1];
                if (smooth) {
                    const float raw = delta_now.get(k) + bias[channel];
                    if (raw <= 20) of_delta[k] *= sigmoid(raw);
                }
                if (!Piece::has(count, k)) of_delta[k] = 0;
                if constexpr (CHANNEL_LAST) {
                    store_float2(rows + element_at(channel, step), inner * wide, of_delta[k]);
                } else {
                    skip_sum[i] += inner * wide, bias_sum[i] += of_delta[k];
                }
            }
            u_grads.store(piece, tile, count, of_u);
            delta_grads.store(piece, tile, count, of_delta);
            if (z) z_grads.store(piece, tile, count, of_z);
        }
        __syncwarp();
        if constexpr (CHANNEL_LAST) {
            for (int step = lane / 8; step < TIMES; step += 4) {
                const float* const from = rows + element_at(lane % 8, step);
                skip_sum[0] += from[0], bias_sum[0] += from[1];
            }
            __syncwarp();
        }
    }

    const i64 of_part = ((at.batch * sequences + at.sequence) * parts + at.part) * channels + first;
    for (int block = 0; block < blocks; block++) {
        recall(block);
#pragma unroll
        for (int s = 0; s < MINE; s++) {
            const int n = block * CAPACITY + quarter * MINE + s;
            if (!mine || n >= states) continue;
            A_grad[(of_part + own) * states + n] = decay_grad[s];
            if (initial_grad && at.part == 0) initial_grad[of_state * states + n] = carry[s];
        }
    }
#pragma unroll
    for (int i = 0; i < (CHANNEL_LAST ? 1 : PER_LANE); i++) {
        const Piece piece(i);
        enum : int { ALIKE = CHANNEL_LAST ? 4 : TIMES / VALUES };
#pragma unroll
        for (int k = 1; k < ALIKE; k *= 2) {
            const int bit = CHANNEL_LAST ? 8 * k : k;
            skip_sum[i] += __shfl_xor_sync(~0u, skip_sum[i], bit);
            bias_sum[i] += __shfl_xor_sync(~0u, bias_sum[i], bit);
        }
        const int channel = CHANNEL_LAST ? lane % 8 : piece.channel;
        const bool writes = CHANNEL_LAST ? lane < 8 : piece.there && piece.time == 0;
        if (writes && channel < left) {
            if (D_grad) D_grad[of_part + channel] = skip_sum[i];
            if (bias_grad) bias_grad[of_part + channel] = bias_sum[i];
        }
    }
}
