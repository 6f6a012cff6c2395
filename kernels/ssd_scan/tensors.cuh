// What the kernels of the family share: element types, tensors and sizes.
//
// The build defines ELEMENT (bfloat16, float16, float32), STATES, the columns of a tile of B, C and states, STAGES, the chunks or head tiles
// that shared memory has at once, and for some kernels CTAS, those of an SM, and REVERSE.
#pragma once
#include "../common/activations.cuh"
#include "../common/floats.cuh"
#include "../common/warp.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;

// WIDE: whether elements have 32 bits; a macro, since ELEMENT is one, too.
#define bfloat16_IS_WIDE 0
#define float16_IS_WIDE 0
#define float32_IS_WIDE 1
#define JOINED(a, b) a##b
#define OF_ELEMENT(element, suffix) JOINED(element, suffix)
#define WIDE OF_ELEMENT(ELEMENT, _IS_WIDE)

enum : int {
    SIZE = 64,  // channels of a head that a tile has; a larger head has several tiles
    ELEMENT_BYTES = sizeof(Storage),
    PIECE = 16 / ELEMENT_BYTES,  // elements in 16 bytes
};
// Bits of the argument `flags`.
enum : i64 { SOFTPLUS = 1, WIDE_STEPS = 2 };

__device__ inline int smaller(i64 a, int b) { return a < 0 ? 0 : a < b ? int(a) : b; }

// A tensor of (batch, step, head or group, number), whose numbers lie without gaps; strides of the others, in elements. Those
// of steps and heads are below 2^25.
struct Strided {
    const Storage* data;
    i64 batch;
    int time, head;

    __device__ Strided(const Storage* data, i64 batch, i64 time, i64 head)
        : data(data), batch(batch), time(int(time)), head(int(head)) {}
    __device__ const Storage* at(i64 b, int t, int h) const { return data + b * batch + i64(t) * time + i64(h) * head; }
};

struct Sizes {
    i64 batch, time, heads, groups, head_size, state_size, sequences, slots;
};

// What a CTA that walks along a sequence works on. CTAs are numbered (batch, sequence, head, tile), the last one fastest, so that
// heads that share B and C run at the same time.
struct Walk {
    int batch, sequence, head, tile;

    // `heads`: of a CTA, which begin at `head`.
    __device__ Walk(const Sizes& sizes, int tiles, int heads = 1) {
        unsigned rest = blockIdx.x;
        tile = int(rest % unsigned(tiles)), rest /= unsigned(tiles);
        const unsigned ctas = unsigned(sizes.heads) / heads;
        head = int(rest % ctas) * heads, rest /= ctas;
        sequence = int(rest % unsigned(sizes.sequences)), batch = int(rest / unsigned(sizes.sequences));
    }
};
