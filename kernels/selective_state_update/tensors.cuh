// What all kernels of the family share: how they read and write tensors whose dtypes are arguments of the launch.
//
// An ALIGNED kernel takes B and C in INPUTS, and a float32 A; or, if TIED, an A of one number for all states of a row. All
// else but the state has the dtype that `formats` says, two bits for each tensor: that is chosen among numbers that are
// read, and not by branches.
#pragma once
#include "../common/activations.cuh"
#include "../common/compiler.cuh"
#include "../common/element.cuh"
#include "loads.cuh"
#include "rounding.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;
using Input = INPUTS;

enum : int { THREADS = 32 * WARPS, VECTOR = ALIGNED ? 16 / int(sizeof(Storage)) : 1, FLOAT = sizeof(float) };
// The type of offsets in tensors but the state: tensors of an ALIGNED kernel have fewer than 2^31 elements.
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
template <class E>
struct FormatOf {
    enum : int { VALUE = FLOAT32 };
};
template <>
struct FormatOf<bfloat16> {
    enum : int { VALUE = BFLOAT16 };
};
template <>
struct FormatOf<float16> {
    enum : int { VALUE = FLOAT16 };
};
enum : int { FORMAT_OF_INPUTS = FormatOf<Input>::VALUE };
// Places of the tensors in `formats`.
enum Tensor : int { X, DT, A_, B_, C_, D_, Z, BIAS };
enum : int { MOST_STATES = 256 };  // of a row
// Bits of the argument `flags`.
enum : i64 {
    SOFTPLUS = 1,
    WIDE_INDICES = 2,
    WIDE_DST_INDICES = 4,
    WIDE_CU_SEQLENS = 8,
    WIDE_ACCEPTED = 16,
    EVERY_TOKEN = 32,
};

__device__ inline unsigned element(const void* from, i64 index, int format, bool wanted) {
    const bool wide = format == FLOAT32;
    return load_element(static_cast<const char*>(from) + (index << (wide ? 2 : 1)), wide, wanted);
}
// The same into bits that stay as they are where it is not wanted.
__device__ inline void load_element(unsigned& bits, const void* from, i64 index, int format, bool wanted) {
    const bool wide = format == FLOAT32;
    load_bits(bits, static_cast<const char*>(from) + (index << (wide ? 2 : 1)), wide, wanted);
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

// Numbers of A, B or C that belong to a chunk of states. What is not wanted stays as it was.
template <class Of>
__device__ void load_chunk(Chunk<Of, VECTOR>& chunk, const void* from, i64 index, int format, bool wanted) {
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
}
template <class Of>
__device__ float number(const Chunk<Of, VECTOR>& chunk, int i, int format) {
    return ALIGNED ? chunk.get(i) : widened(chunk.word[0], format);
}

// What is not wanted stays as it was.
__device__ inline void load_states(Chunk<Element, VECTOR>& chunk, const Storage* from, bool wanted) {
    if constexpr (ALIGNED) load_state(*reinterpret_cast<unsigned(*)[4]>(chunk.word), from, wanted);
    else if (wanted) chunk.put(0, *from);
}
__device__ inline void store_states(Storage* to, const float (&states)[VECTOR], bool wanted) {
    Chunk<Element, VECTOR> chunk;
    chunk.set(states);
    if constexpr (ALIGNED) store_state(to, *reinterpret_cast<unsigned(*)[4]>(chunk.word), wanted);
    else if (wanted) *to = Storage(chunk.bits(0));
}
// `key` is that of the row, and n the number of the first state.
__device__ inline void round_at_random(float (&states)[VECTOR], unsigned key, int n) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const unsigned word = random_word(key, n / 2 + i / 2);
        states[i] = rounded_at_random<Element>(states[i], (ALIGNED ? i : n) % 2 ? word >> 16 : word & 0xffffu);
    }
}

// The tensors but A and the output, each with its strides: of a slot's rows, of a row, of a group's projection, of a row that all batches
// share, and of a batch's slots.
struct StateTensor {
    Storage* data;
    i64 slots, slot;
};
struct RowTensor {
    const void* data;
    i64 batch, head, channel;
};
struct ProjectionTensor {
    const void* data;
    i64 batch, group, state;
};
struct SharedTensor {
    const void* data;
    i64 head, channel;
};
struct SlotTensor {
    const void* data;
    i64 batch, token;
};

struct Arguments {
    StateTensor state;
    i64 state_head, state_channel, state_state;
    StateTensor dst_state;  // no data: the state
    RowTensor x, dt, z;
    const void* A;
    i64 A_head, A_channel, A_state;
    ProjectionTensor B, C;
    SharedTensor D, bias;
    SlotTensor indices, dst_indices;
    const i64* seed;
    void* out;
    i64 out_batch, out_head, out_channel;
    i64 batches, heads, channels, states, group_rows, pad_slot, lane_bits, formats, flags;
    i64 steps;  // batches of a thread
    const void *cu_seqlens, *num_accepted;  // of the kernel of several tokens, like the next ones
    i64 tokens, columns;
};

__device__ inline bool is_slot(i64 slot, i64 slots, i64 pad_slot) { return slot >= 0 && slot < slots && slot != pad_slot; }

// The format of a tensor, which is that of INPUTS in an ALIGNED kernel, but for A, D and the bias.
__device__ inline int format_of(const Arguments& args, Tensor tensor) {
    if (ALIGNED && tensor != A_ && tensor != D_ && tensor != BIAS) return FORMAT_OF_INPUTS;
    return int(args.formats >> (2 * tensor)) & 3;
}
