// What the kernels share: where a CTA's channels and time steps lie, the pieces of a tile that a lane loads and stores,
// and what is computed of one element at a time.
//
// ELEMENT (float32, bfloat16, float16), ALIGNED, CHANNEL_LAST (0, 1) and WARPS come from the build, and INTERVAL: the
// steps from one state that is kept to the next. A file that includes this one defines CHANNELS of a warp, SPLIT, the
// warps that share those channels, TIMES of a tile and CAPACITY, the states that B and C are staged for at once.
#pragma once
#include "../common/activations.cuh"
#include "../common/compiler.cuh"
#include "../common/floats.cuh"
#include "../common/global_memory.cuh"
#include "../common/mma.cuh"
#include "../common/shared_memory.cuh"
#include "../common/warp.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;

// Pieces are 16 bytes, along time or along the channels of a warp, if there are as many.
enum : int {
    THREADS = 32 * WARPS,
    IN_16_BYTES = 16 / int(sizeof(Storage)),
    VALUES = CHANNEL_LAST && CHANNELS < IN_16_BYTES ? CHANNELS : IN_16_BYTES,
    NARROW = sizeof(Storage) == 2,
    PIECES = CHANNELS * TIMES / VALUES,
    SHARING = 32 * SPLIT,  // threads that share the channels
    PER_LANE = (PIECES + SHARING - 1) / SHARING,
};
static_assert(TIMES % 8 == 0);

using Values = Chunk<Element, VALUES>;

struct Strides3 {
    i64 batch, channel, time;
};
struct Strides4 {
    i64 batch, group, state, time;
};

// A CTA's share: channels [first, limit) of batch `batch` that are in group `group`, and steps [begin, end).
struct Place {
    int batch, group, block, sequence, part;
    int first, limit, begin, end;
};

__device__ inline Place place_of(int channels, int time, int group_channels, int sequences, int parts,
                                 const i64* offsets) {
    Place at;
    const unsigned per = WARPS / SPLIT * CHANNELS;
    const unsigned blocks = (unsigned(group_channels) + per - 1) / per, groups = unsigned(channels) / unsigned(group_channels);
    unsigned rest = blockIdx.x;
    at.block = rest % blocks, rest /= blocks;
    at.group = rest % groups, rest /= groups;
    at.part = rest % unsigned(parts), rest /= unsigned(parts);
    at.sequence = rest % unsigned(sequences), at.batch = rest / unsigned(sequences);
    at.first = at.group * group_channels + at.block * int(per);
    at.limit = (at.group + 1) * group_channels;
    at.begin = 0, at.end = time;
    if (offsets) {  // which may be anything
        const i64 begin = offsets[at.sequence], end = offsets[at.sequence + 1];
        at.begin = int(begin < 0 ? 0 : begin > time ? time : begin);
        at.end = int(end < at.begin ? at.begin : end > time ? time : end);
    }
    return at;
}

// Of the tile of warps that share channels, which starts at their first channel and at a step: the piece that is this
// thread's number `i`. A thread's pieces are APART from each other, along the dimension that pieces do not lie along.
enum : int {
    IN_A_ROW = CHANNEL_LAST ? CHANNELS / VALUES : TIMES / VALUES,
    APART = SHARING / IN_A_ROW,
};
static_assert(SHARING % IN_A_ROW == 0);

struct Piece {
    int channel, time;
    bool there;

    __device__ explicit Piece(int i) {
        const int number = int(threadIdx.x % SHARING), row = number / IN_A_ROW + APART * i;
        const int inside = number % IN_A_ROW * VALUES;
        there = PIECES % SHARING == 0 || number + SHARING * i < PIECES;
        channel = CHANNEL_LAST ? inside : row, time = CHANNEL_LAST ? row : inside;
    }

    // Its elements that are among the first `channels` and `times` of the tile: all or none where it is aligned.
    __device__ int count(int channels, int times) const {
        const int left = CHANNEL_LAST ? channels - channel : times - time;
        const bool in = there && channel < channels && time < times;
        if constexpr (ALIGNED) return in ? VALUES : 0;
        return in ? (left < VALUES ? left : VALUES) : 0;
    }
    static __device__ bool has(int count, int k) { return ALIGNED ? count > 0 : k < count; }
};

// As much of it as there is in a tile.
template <class Count>
__device__ inline int within(Count left, int most) {
    return left < 0 ? 0 : left < most ? int(left) : most;
}

// A tensor at the thread's first piece of the first tile of a sequence.
template <class Pointer>
struct Rows {
    Pointer first;
    i64 channel, time;

    __device__ Rows(Pointer start, Strides3 strides, int batch, int from_channel, int from_time)
        : first(nullptr), channel(CHANNEL_LAST && ALIGNED ? 1 : strides.channel),
          time(!CHANNEL_LAST && ALIGNED ? 1 : strides.time) {
        const Piece piece(0);
        if (start)
            first = start + batch * strides.batch + (from_channel + piece.channel) * channel +
                    (from_time + piece.time) * time;
    }

    template <class Step>
    __device__ Pointer at(int i, Step tile) const {
        return first + tile * time + i * APART * (CHANNEL_LAST ? time : channel);
    }
    __device__ i64 along() const { return CHANNEL_LAST ? channel : time; }

    // Zeros where there is nothing.
    template <class Step>
    __device__ Values load(int number, Step tile, int count) const {
        Values values;
#pragma unroll
        for (int i = 0; i < Values::WORDS; i++) values.word[i] = 0;
        if (first == nullptr || count <= 0) return values;
        const Pointer from = at(number, tile);
        if constexpr (ALIGNED) {
            values = get_words<Element, VALUES>(reinterpret_cast<const unsigned*>(from));
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                if (i < count) values.put(i, from[i * along()]);
        }
        return values;
    }
    template <class Step>
    __device__ void store(int number, Step tile, int count, const float (&x)[VALUES]) const {
        if (first == nullptr || count <= 0) return;
        Values values;
        values.set(x);
        const Pointer to = at(number, tile);
        if constexpr (ALIGNED) {
            put_words(to, values);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                if (i < count) to[i * along()] = values.bits(i);
        }
    }
};

// B or C: pieces along time, of a batch, a group and a sequence, at the thread's state.
struct Projection {
    const Storage* first;
    i64 state, time;
    bool whole;  // pieces lie in one and on 16 bytes

    __device__ Projection(const Storage* start, Strides4 strides, const Place& at, bool whole)
        : state(strides.state), time(whole ? 1 : strides.time), whole(whole) {
        first = start + at.batch * strides.batch + at.group * strides.group + at.begin * strides.time +
                threadIdx.x % CAPACITY * state;
    }
};

enum : int {
    STAGED_PIECES = TIMES / IN_16_BYTES,     // of a state
    STAGED_APART = THREADS / CAPACITY,  // those of a thread
    STAGED_PER_THREAD = (2 * STAGED_PIECES + STAGED_APART - 1) / STAGED_APART,
};
static_assert(THREADS % CAPACITY == 0);

// B and C of a tile, which become floats [step][state] in shared memory.
struct Staged {
    Chunk<Element, IN_16_BYTES> piece[STAGED_PER_THREAD];

    static __device__ int number(int i) { return int(threadIdx.x) / CAPACITY + STAGED_APART * i; }

    // Of states from `state` to `states`, and of `times` steps from `tile` on; zeros else.
    template <class Step>
    __device__ void load(const Projection& b, const Projection& c, int state, int states, Step tile, int times) {
        const bool in = state + int(threadIdx.x % CAPACITY) < states;
#pragma unroll
        for (int i = 0; i < STAGED_PER_THREAD; i++) {
            const int t = number(i) % STAGED_PIECES * IN_16_BYTES;
            const bool inward = number(i) < STAGED_PIECES;
#pragma unroll
            for (int word = 0; word < 4; word++) piece[i].word[word] = 0;
            if (!in || number(i) >= 2 * STAGED_PIECES || t >= times) continue;
            const Storage* const first = inward ? b.first + state * b.state : c.first + state * c.state;
            if ((inward ? b.whole : c.whole) && t + IN_16_BYTES <= times) {
                piece[i] = get_words<Element, IN_16_BYTES>(reinterpret_cast<const unsigned*>(first + tile + t));
            } else {
                const i64 along = inward ? b.time : c.time;
#pragma unroll
                for (int k = 0; k < IN_16_BYTES; k++)
                    if (t + k < times) piece[i].put(k, first[(tile + t + k) * along]);
            }
        }
    }

    // To [B, C][step][state].
    __device__ void store(float* to) const {
#pragma unroll
        for (int i = 0; i < STAGED_PER_THREAD; i++) {
            if (number(i) >= 2 * STAGED_PIECES) continue;
            float* const from = to + number(i) * IN_16_BYTES * CAPACITY + threadIdx.x % CAPACITY;
#pragma unroll
            for (int k = 0; k < IN_16_BYTES; k++) from[k * CAPACITY] = piece[i].get(k);
        }
    }
};

// 2^x, for a gate. The GPU's approximation errs by up to two units in the last place, and alike for like gates; a gate near
// 1 lets that add up over as many steps as a state lasts. So where the element is not narrow, the part of x that is in
// [-1/4, 0] goes through a polynomial, right to a unit, and the approximation gets the rest, mostly 0, of which it makes 1.
// What is left of its error adds up over 6 steps. A choice between the two would take as many instructions, and wait for
// a predicate, of which the compiler has one to spare.
__device__ inline float gate_of(float x) {
    if constexpr (NARROW) return fast_exp2(x);
    const float s = clamped_product(x, -4);
    float p = 3.481662133708596e-05f;
    p = p * s - 0.0008653732948005199f;
    p = p * s + 0.0150137422606349f;
    p = p * s - 0.1732867807149887f;
    return (1 + s * p) * fast_exp2(x + 0.25f * s);
}
