// One step of each sequence, in place of its state, for generation:
//
//     state = exp(size * A) * state + size * B * x
//     y     = sum over n of C[n] * state[n] + D * x, times silu(z) if there is a z
//
// with size = dt + bias, or its softplus. A row is a channel of a head; a batch's row of the state is in the slot of its own
// number, or in the one that `indices` names. Where that is no slot, the output is zero and no state changes.
//
// Traffic: the state twice; all else is small, and comes from the caches. Lanes, a power of two of them, share a row, and
// each has up to CHUNKS chunks of it at once: 16 bytes, or, unless ALIGNED, one state. A thread stays with its row for
// `steps` batches, one after the other, and reads A but once if its first chunks are all there is. Everything that a step
// reads is asked for before any of it is used, and few registers are taken, since many bytes have to be under way.
//
// An ALIGNED kernel takes B and C in INPUTS, and a float32 A; or, if TIED, an A of one number for all states of a row. All
// else but the state has the dtype that `formats` says, two bits for each tensor: that is chosen among numbers that are
// read, and not by branches.
#include "../common/activations.cuh"
#include "../common/compiler.cuh"
#include "../common/element.cuh"
#include "loads.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;
using Input = INPUTS;

enum : int { THREADS = 32 * WARPS, VECTOR = ALIGNED ? 16 / int(sizeof(Storage)) : 1 };
// Of all tensors but the state: those of an ALIGNED kernel have fewer than 2^31 elements.
template <bool SMALL>
struct OffsetOf {
    using Type = i64;
};
template <>
struct OffsetOf<true> {
    using Type = int;
};
using Offset = OffsetOf<bool(ALIGNED)>::Type;

enum Format : int { FLOAT32, BFLOAT16, FLOAT16 };
// Places of the tensors in `formats`.
enum Tensor : int { X, DT, A_, B_, C_, D_, Z, BIAS };
// Bits of the argument `flags`.
enum : i64 { SOFTPLUS = 1, WIDE_INDICES = 2 };

__device__ inline unsigned element(const void* from, i64 index, int format, bool wanted) {
    const bool wide = format == FLOAT32;
    return load_element(static_cast<const char*>(from) + (index << (wide ? 2 : 1)), wide, wanted);
}
__device__ inline float widened(unsigned bits, int format) {
    const float narrow = chosen(format == BFLOAT16, bfloat16::widen(bits), float16::widen(bits));
    return chosen(format == FLOAT32, float32::widen(bits), narrow);
}
__device__ inline void write(void* to, i64 index, int format, float x, bool wanted) {
    const unsigned narrow = format == BFLOAT16 ? bfloat16::narrow(x) : float16::narrow(x);
    const bool wide = format == FLOAT32;
    store_element(static_cast<char*>(to) + (index << (wide ? 2 : 1)), wide ? float32::narrow(x) : narrow, wide, wanted);
}

// Numbers of A, B or C that belong to a chunk of states.
template <class Of>
__device__ Chunk<Of, VECTOR> read_chunk(const void* from, i64 index, int format, bool wanted) {
    Chunk<Of, VECTOR> chunk = {};
    if constexpr (!ALIGNED) {
        chunk.word[0] = element(from, index, format, wanted);
    } else {
        enum : int { WORDS = Chunk<Of, VECTOR>::WORDS, AT_ONCE = WORDS < 4 ? WORDS : 4 };
        const auto at = static_cast<const typename Of::Storage*>(from) + index;
#pragma unroll
        for (int w = 0; w < WORDS; w += AT_ONCE)
            load_words(*reinterpret_cast<unsigned(*)[AT_ONCE]>(chunk.word + w),
                       reinterpret_cast<const unsigned*>(at) + w, wanted);
    }
    return chunk;
}
template <class Of>
__device__ float number(const Chunk<Of, VECTOR>& chunk, int i, int format) {
    return ALIGNED ? chunk.get(i) : widened(chunk.word[0], format);
}

__device__ inline Chunk<Element, VECTOR> read_states(const Storage* from, bool wanted) {
    Chunk<Element, VECTOR> chunk = {};
    if constexpr (ALIGNED) load_state(*reinterpret_cast<unsigned(*)[4]>(chunk.word), from, wanted);
    else if (wanted) chunk.put(0, *from);
    return chunk;
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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_state_update(Storage* state, const void* x, const void* dt, const void* A, const void* B, const void* C,
                       const void* D, const void* z, const void* bias, const void* indices, void* out, i64 batches,
                       i64 heads, i64 channels, i64 states, i64 group_rows, i64 slots, i64 lane_bits, i64 steps,
                       i64 formats, i64 flags, i64 state_slot, i64 state_head, i64 state_channel, i64 state_state,
                       i64 x_batch, i64 x_head, i64 x_channel, i64 dt_batch, i64 dt_head, i64 dt_channel, i64 z_batch,
                       i64 z_head, i64 z_channel, i64 out_batch, i64 out_head, i64 out_channel, i64 A_head,
                       i64 A_channel, i64 A_state, i64 B_batch, i64 B_group, i64 B_state, i64 C_batch, i64 C_group,
                       i64 C_state, i64 D_head, i64 D_channel, i64 bias_head, i64 bias_channel, i64 indices_batch) {
    const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
    const unsigned rows = unsigned(heads * channels), rows_of_cta = THREADS >> lane_bits;
    const unsigned ctas = (rows + rows_of_cta - 1) / rows_of_cta;
    const unsigned slice = blockIdx.x / ctas, own = (blockIdx.x % ctas) * rows_of_cta + (threadIdx.x >> lane_bits);
    // Lanes of rows that are not there take part in sums.
    const bool there = own < rows;
    const unsigned row = there ? own : 0;
    const int head = row / unsigned(channels), channel = row % unsigned(channels), group = row / unsigned(group_rows);
    const auto format = [&](Tensor tensor) { return int(formats >> (2 * tensor)) & 3; };

    const unsigned skip_bits = element(D, head * D_head + channel * D_channel, format(D_), D);
    const unsigned shift_bits = element(bias, head * bias_head + channel * bias_channel, format(BIAS), bias);
    Storage* const states_of_row = state + head * state_head + channel * state_channel;
    const Offset x_row = head * Offset(x_head) + channel * Offset(x_channel);
    const Offset dt_row = head * Offset(dt_head) + channel * Offset(dt_channel);
    const Offset z_row = head * Offset(z_head) + channel * Offset(z_channel);
    const Offset out_row = head * Offset(out_head) + channel * Offset(out_channel);
    const Offset A_row = head * Offset(A_head) + channel * Offset(A_channel);
    const Offset B_row = group * Offset(B_group), C_row = group * Offset(C_group);
    const int count = int(states), first = lane * VECTOR, stride = lanes * VECTOR, round = stride * CHUNKS;
    const bool several = round < count;
    // Where the number of a state lies; in chunks they are neighbours.
    const auto offset = [](int n, i64 distance) { return ALIGNED ? n : n * Offset(distance); };

    constexpr int DECAYS = TIED ? 1 : CHUNKS;
    float decay[DECAYS][TIED ? 1 : VECTOR];
    const auto read_decay = [&](int begin) {
        if constexpr (TIED) {
            decay[0][0] = LOG2_E * widened(element(A, A_row, format(A_), true), format(A_));
        } else {
            Chunk<float32, VECTOR> chunk[CHUNKS];
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = begin + k * stride;
                chunk[k] = read_chunk<float32>(A, A_row + offset(n, A_state), format(A_), n < count);
            }
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) decay[k][i] = LOG2_E * number(chunk[k], i, format(A_));
        }
    };

    const int begin = int(slice * steps), end = int(begin + steps < batches ? begin + steps : batches);
#pragma unroll 1
    for (int batch = begin; batch < end; batch++) {
        i64 slot = batch;
        if (indices) slot = load_index(indices, batch * indices_batch, flags & WIDE_INDICES);
        const bool active = there && slot >= 0 && slot < slots;
        Storage* const to = states_of_row + (active ? slot : 0) * state_slot;
        const unsigned x_bits = element(x, batch * Offset(x_batch) + x_row, format(X), active);
        const unsigned dt_bits = element(dt, batch * Offset(dt_batch) + dt_row, format(DT), active);
        const unsigned z_bits = element(z, batch * Offset(z_batch) + z_row, format(Z), z && active && lane == 0);
        const Offset B_at = batch * Offset(B_batch) + B_row, C_at = batch * Offset(C_batch) + C_row;

        float sum = 0;
#pragma unroll 1
        for (int n = first; n - first < count; n += round) {
            Chunk<Element, VECTOR> held[CHUNKS];
            Chunk<Input, VECTOR> inward[CHUNKS], outward[CHUNKS];
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int at = n + k * stride;
                const bool wanted = active && at < count;
                held[k] = read_states(to + offset(at, state_state), wanted);
                inward[k] = read_chunk<Input>(B, B_at + offset(at, B_state), format(B_), wanted);
                outward[k] = read_chunk<Input>(C, C_at + offset(at, C_state), format(C_), wanted);
            }
            // The next batch's states, unless an index would have to be waited for.
            if constexpr (ALIGNED) {
#pragma unroll
                for (int k = 0; k < CHUNKS; k++)
                    prefetch_state(to + state_slot + n + k * stride,
                                   there && !indices && batch + 1 < end && n + k * stride < count);
            }
            if ((!TIED && several) || batch == begin) read_decay(n);
            const float raised = widened(dt_bits, format(DT)) + widened(shift_bits, format(BIAS));
            const float size = chosen(flags & SOFTPLUS, softplus(raised), raised);
            const float scaled = size * widened(x_bits, format(X));
            const float tied_gate = TIED ? fast_exp2(size * decay[0][0]) : 0.f;
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                float now[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    const float gate = TIED ? tied_gate : fast_exp2(size * decay[TIED ? 0 : k][TIED ? 0 : i]);
                    now[i] = gate * held[k].get(i) + scaled * number(inward[k], i, format(B_));
                    sum += number(outward[k], i, format(C_)) * now[i];
                }
                if (active && n + k * stride < count) write_states(to + offset(n + k * stride, state_state), now);
            }
        }

#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < lanes) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const float y = sum + widened(skip_bits, format(D_)) * widened(x_bits, format(X));
        const float gate = widened(z_bits, format(Z)), gated = chosen(z != nullptr, y * (gate * sigmoid(gate)), y);
        write(out, batch * Offset(out_batch) + out_row, format(X), chosen(active, gated, 0.f), lane == 0 && there);
    }
}
