// One step of each sequence, in place of its state, for generation:
//
//     state = exp(size * A) * state + size * B * x
//     y     = sum over n of C[n] * state[n] + D * x, times silu(z) if there is a z
//
// with size = dt + bias, or its softplus. A row is a channel of a head; a batch's row of the state is in the slot of its own
// number, or in the one that `indices` names. Where that is no slot, the output is zero and no state changes.
//
// Traffic: the state twice; all else is small, and comes from the caches. Lanes, a power of two of them, share a row, and
// each has chunks of it: 16 bytes, or, unless ALIGNED, one state. A thread stays with its row for `steps` batches, of which
// UNROLL are under way at once, and reads A but once if the lanes' first chunks are all there is.
//
// Every tensor but the state has the dtype that `formats` says, two bits for each; they are no static parameter, since
// what they decide costs little beside the state.
#include "../common/activations.cuh"
#include "../common/element.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;

enum : int {
    THREADS = 32 * WARPS,
    VECTOR = ALIGNED ? 16 / int(sizeof(Storage)) : 1,
    UNROLL = 2,
};
enum Format : int { FLOAT32, BFLOAT16, FLOAT16 };
// Places of the tensors in `formats`.
enum Tensor : int { X, DT, A_, B_, C_, D_, Z, BIAS };
// Bits of the argument `flags`.
enum : i64 { SOFTPLUS = 1, WIDE_INDICES = 2 };

__device__ inline float widened(unsigned short bits, int format) {
    return format == BFLOAT16 ? bfloat16::widen(bits) : float16::widen(bits);
}
__device__ inline float read(const void* from, i64 index, int format) {
    if (format == FLOAT32) return static_cast<const float*>(from)[index];
    return widened(static_cast<const unsigned short*>(from)[index], format);
}
__device__ inline void write(void* to, i64 index, int format, float x) {
    if (format == FLOAT32) static_cast<float*>(to)[index] = x;
    else static_cast<unsigned short*>(to)[index] = format == BFLOAT16 ? bfloat16::narrow(x) : float16::narrow(x);
}

// Of A, B or C what belongs to a chunk of states. Where all states have one number, it is read once.
__device__ inline void read_chunk(float (&to)[VECTOR], const void* from, i64 at, i64 stride, int format) {
    if (VECTOR == 1 || stride == 0) {
        to[0] = read(from, at, format);
#pragma unroll
        for (int i = 1; i < VECTOR; i++) to[i] = to[0];
    } else if (ALIGNED && format == FLOAT32) {
#pragma unroll
        for (int i = 0; i < VECTOR; i += 4) {
            const auto four = get_words<float32, 4>(static_cast<const unsigned*>(from) + at + i);
#pragma unroll
            for (int j = 0; j < 4; j++) to[i + j] = four.get(j);
        }
    } else if constexpr (ALIGNED) {
        const auto first = static_cast<const unsigned short*>(from) + at;
        const auto chunk = get_words<bfloat16, VECTOR>(reinterpret_cast<const unsigned*>(first));
        if (format == BFLOAT16) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) to[i] = chunk.get(i);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) to[i] = float16::widen(chunk.bits(i));
        }
    }
}

__device__ inline Chunk<Element, VECTOR> read_states(const Storage* from) {
    if constexpr (ALIGNED) {
        return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(from));
    } else {
        Chunk<Element, VECTOR> chunk;
        chunk.put(0, *from);
        return chunk;
    }
}
__device__ inline void write_states(Storage* to, const float (&states)[VECTOR]) {
    if constexpr (ALIGNED) {
        Chunk<Element, VECTOR> chunk;
        chunk.set(states);
        put_words(to, chunk);
    } else {
        *to = Element::narrow(states[0]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
selective_state_update(Storage* state, const void* x, const void* dt, const void* A, const void* B, const void* C,
                    const void* D, const void* z, const void* bias, const void* indices, void* out, i64 batches,
                    i64 heads, i64 channels, i64 states, i64 group_rows, i64 slots, i64 lane_bits, i64 steps,
                    i64 formats, i64 flags, i64 state_slot, i64 state_head, i64 state_channel, i64 state_state,
                    i64 x_batch, i64 x_head, i64 x_channel, i64 dt_batch, i64 dt_head, i64 dt_channel, i64 z_batch,
                    i64 z_head, i64 z_channel, i64 out_batch, i64 out_head, i64 out_channel, i64 A_head, i64 A_channel,
                    i64 A_state, i64 B_batch, i64 B_group, i64 B_state, i64 C_batch, i64 C_group, i64 C_state,
                    i64 D_head, i64 D_channel, i64 bias_head, i64 bias_channel, i64 indices_batch) {
    const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
    const unsigned rows = unsigned(heads * channels), rows_of_cta = THREADS >> lane_bits;
    const unsigned ctas = (rows + rows_of_cta - 1) / rows_of_cta;
    const unsigned slice = blockIdx.x / ctas, row = (blockIdx.x % ctas) * rows_of_cta + (threadIdx.x >> lane_bits);
    // Lanes of rows that are not there take part in sums.
    const bool there = row < rows;
    const i64 head = there ? row / unsigned(channels) : 0, channel = there ? row % unsigned(channels) : 0;
    const i64 group = there ? row / unsigned(group_rows) : 0;
    const auto format = [&](Tensor tensor) { return int(formats >> (2 * tensor)) & 3; };

    const float skip = D ? read(D, head * D_head + channel * D_channel, format(D_)) : 0.f;
    const float shift = bias ? read(bias, head * bias_head + channel * bias_channel, format(BIAS)) : 0.f;
    Storage* const states_of_row = state + head * state_head + channel * state_channel;
    const i64 x_row = head * x_head + channel * x_channel, dt_row = head * dt_head + channel * dt_channel;
    const i64 z_row = head * z_head + channel * z_channel, out_row = head * out_head + channel * out_channel;
    const i64 A_row = head * A_head + channel * A_channel;

    const i64 first = lane * VECTOR, stride = lanes * VECTOR;
    const bool several = stride < states, tied = A_state == 0;
    float decay[VECTOR] = {};
    const auto read_decay = [&](i64 n) {
        read_chunk(decay, A, A_row + n * A_state, A_state, format(A_));
#pragma unroll
        for (int i = 0; i < VECTOR; i++) decay[i] *= LOG2_E;
    };
    if (there && first < states) read_decay(first);

    const i64 end = (slice + 1) * steps < batches ? (slice + 1) * steps : batches;
#pragma unroll 1
    for (i64 begin = slice * steps; begin < end; begin += UNROLL) {
        Storage* to[UNROLL];
        bool active[UNROLL];
        float input[UNROLL], size[UNROLL], sum[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const i64 batch = begin + u;
            active[u] = there && batch < end;
            i64 slot = batch;
            if (indices && active[u])
                slot = flags & WIDE_INDICES ? static_cast<const i64*>(indices)[batch * indices_batch]
                                            : static_cast<const int*>(indices)[batch * indices_batch];
            active[u] = active[u] && slot >= 0 && slot < slots;
            to[u] = states_of_row + (active[u] ? slot : 0) * state_slot;
            input[u] = active[u] ? read(x, batch * x_batch + x_row, format(X)) : 0.f;
            size[u] = (active[u] ? read(dt, batch * dt_batch + dt_row, format(DT)) : 0.f) + shift;
            sum[u] = 0.f;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) size[u] = flags & SOFTPLUS ? softplus(size[u]) : size[u];

#pragma unroll 1
        for (i64 n = first; n < states; n += stride) {
            Chunk<Element, VECTOR> held[UNROLL];
            float inward[UNROLL][VECTOR], outward[UNROLL][VECTOR];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (active[u]) held[u] = read_states(to[u] + n * state_state);
            if (several && there) read_decay(n);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (!active[u]) continue;
                const i64 batch = begin + u;
                read_chunk(inward[u], B, batch * B_batch + group * B_group + n * B_state, B_state, format(B_));
                read_chunk(outward[u], C, batch * C_batch + group * C_group + n * C_state, C_state, format(C_));
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (!active[u]) continue;
                const float scaled = size[u] * input[u], one = fast_exp2(size[u] * decay[0]);
                float now[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    const float gate = i == 0 || tied ? one : fast_exp2(size[u] * decay[i]);
                    now[i] = gate * held[u].get(i) + scaled * inward[u][i];
                    sum[u] += outward[u][i] * now[i];
                }
                write_states(to[u] + n * state_state, now);
            }
        }

#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < lanes) {
#pragma unroll
                for (int u = 0; u < UNROLL; u++) sum[u] += __shfl_xor_sync(0xffffffffu, sum[u], distance);
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const i64 batch = begin + u;
            if (lane != 0 || !there || batch >= end) continue;
            float y = sum[u] + skip * input[u];
            if (z && active[u]) {
                const float gate = read(z, batch * z_batch + z_row, format(Z));
                y *= gate * sigmoid(gate);
            }
            write(out, batch * out_batch + out_row, format(X), active[u] ? y : 0.f);
        }
    }
}
