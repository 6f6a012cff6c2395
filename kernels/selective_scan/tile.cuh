// What the kernels of the family share, in the order in which an element passes through them: the tensors of a launch, the
// channels and steps of a CTA, the pieces of a tile that a thread loads and stores, the tiles of B and C, and one gate.
//
// The build defines ELEMENT (float32, bfloat16, float16), ALIGNED, CHANNEL_LAST (0, 1), WARPS, TIMES, the steps of a tile, and
// INTERVAL, the steps between two checkpoints. A file that includes this one defines CHANNELS, those of a warp, SPLIT, the
// warps that share those channels, and CAPACITY, the states that B and C are staged for at once.
#pragma once
#include "../common/activations.cuh"
#include "../common/compiler.cuh"
#include "../common/floats.cuh"
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

// A tensor of channels, (batch, channel, time), and one of projections, (batch, group, state, time). A null pointer stands for
// an optional tensor that a call does not have.
template <class Pointer>
struct ChannelTensor {
    Pointer data;
    i64 batch, channel, time;  // strides
};
struct ProjectionTensor {
    const Storage* data;
    i64 batch, group, state, time;  // strides
    bool contiguous;                // along time, with 16-byte words on their boundaries
};

// Bits of the argument `flags`.
// FORWARDS is of adjoint.cu alone.
enum : i64 { SOFTPLUS = 1, B_CONTIGUOUS = 2, C_CONTIGUOUS = 4, FORWARDS = 8 };

// The sizes of a launch, which all kernels take.
struct Sizes {
    i64 batch, channels, time, states, group_channels, sequences, parts;
};

// What a CTA works on: channels [first, limit) of batch `batch` that are in group `group`, steps [begin, end) of one sequence,
// and, of that sequence, the tiles of INTERVAL steps [first_tile, end_tile) that are its part. Blocks are numbered (batch, sequence, part, group, block of channels), the last one fastest.
struct CtaRange {
    int batch, group, block, sequence, part;
    int first, limit, begin, end, first_tile, end_tile;

    // The tiles of part `number` of `parts`.
    __device__ void set_tiles(int number, int parts) {
        const int tiles = (end - begin + INTERVAL - 1) / INTERVAL, per_part = (tiles + parts - 1) / parts;
        first_tile = number * per_part < tiles ? number * per_part : tiles;
        end_tile = first_tile + per_part < tiles ? first_tile + per_part : tiles;
    }
};

__device__ inline CtaRange cta_range(const Sizes& sizes, int parts, const i64* cu_seqlens) {
    CtaRange range;
    const int time = int(sizes.time), group_channels = int(sizes.group_channels);
    const unsigned per_cta = WARPS / SPLIT * CHANNELS;
    const unsigned blocks = (unsigned(group_channels) + per_cta - 1) / per_cta;
    const unsigned groups = unsigned(int(sizes.channels)) / unsigned(group_channels);
    unsigned rest = blockIdx.x;
    range.block = rest % blocks, rest /= blocks;
    range.group = rest % groups, rest /= groups;
    range.part = rest % unsigned(parts), rest /= unsigned(parts);
    range.sequence = rest % unsigned(int(sizes.sequences)), range.batch = rest / unsigned(int(sizes.sequences));
    range.first = range.group * group_channels + range.block * int(per_cta);
    range.limit = (range.group + 1) * group_channels;
    range.begin = 0, range.end = time;
    if (cu_seqlens) {  // clamped: a wrong cu_seqlens must not lead outside of the tensors
        const i64 begin = cu_seqlens[range.sequence], end = cu_seqlens[range.sequence + 1];
        range.begin = int(begin < 0 ? 0 : begin > time ? time : begin);
        range.end = int(end < range.begin ? range.begin : end > time ? time : end);
    }
    range.set_tiles(range.part, parts);
    return range;
}

// The same in shared memory, where it takes no registers from the steps.
__device__ inline const CtaRange& shared_cta_range(const Sizes& sizes, int parts, const i64* cu_seqlens) {
    __shared__ CtaRange range;
    if (threadIdx.x == 0) range = cta_range(sizes, parts, cu_seqlens);
    __syncthreads();
    return range;
}

// Piece number `i` of this thread, in a tile of the warps that share channels. A thread's pieces are APART from each other,
// along the dimension that pieces do not lie along.
enum : int {
    IN_A_ROW = CHANNEL_LAST ? CHANNELS / VALUES : TIMES / VALUES,
    APART = SHARING / IN_A_ROW,
};
static_assert(SHARING % IN_A_ROW == 0);

struct Piece {
    int channel, time;  // of its first element, in the tile
    bool exists;

    __device__ explicit Piece(int i) {
        const int number = int(threadIdx.x % SHARING), row = number / IN_A_ROW + APART * i;
        const int inside = number % IN_A_ROW * VALUES;
        exists = PIECES % SHARING == 0 || number + SHARING * i < PIECES;
        channel = CHANNEL_LAST ? inside : row, time = CHANNEL_LAST ? row : inside;
    }

    // How many of its elements are among the first `channels` and `times` of the tile: all or none where it is aligned.
    __device__ int count(int channels, int times) const {
        const int left = CHANNEL_LAST ? channels - channel : times - time;
        const bool in = exists && channel < channels && time < times;
        if constexpr (ALIGNED) return in ? VALUES : 0;
        return in ? (left < VALUES ? left : VALUES) : 0;
    }
    static __device__ bool has(int count, int k) { return ALIGNED ? count > 0 : k < count; }
};

// `left`, but at least 0 and at most `most`: what of a tile lies inside of a tensor.
template <class Count>
__device__ inline int within(Count left, int most) {
    return left < 0 ? 0 : left < most ? int(left) : most;
}

// A piece of 16-bit elements that lie together, but on any boundary: three words of two elements, and the two elements that
// are left. Those are the first one and the last one if the piece starts in the middle of a word, else the last two.
struct MisalignedPiece {
    enum : bool { EXISTS = NARROW && VALUES == 8 };

    static __device__ bool in_word(const Storage* first) { return (reinterpret_cast<u64>(first) & 2) != 0; }

    static __device__ Values load(const Storage* from) {
        const bool odd = in_word(from);
        const unsigned* const words = reinterpret_cast<const unsigned*>(from + odd);
        const unsigned a = words[0], b = words[1], c = words[2], single = from[odd ? 0 : 6], last = from[7];
        Values values;
        values.word[0] = odd ? single | a << 16 : a;
        values.word[1] = odd ? a >> 16 | b << 16 : b;
        values.word[2] = odd ? b >> 16 | c << 16 : c;
        values.word[3] = (odd ? c >> 16 : single) | last << 16;
        return values;
    }
    static __device__ void store(Storage* to, const Values& values) {
        const bool odd = in_word(to);
        unsigned* const words = reinterpret_cast<unsigned*>(to + odd);
        const unsigned a = values.word[0], b = values.word[1], c = values.word[2], d = values.word[3];
        words[0] = odd ? a >> 16 | b << 16 : a;
        words[1] = odd ? b >> 16 | c << 16 : b;
        words[2] = odd ? c >> 16 | d << 16 : c;
        to[odd ? 0 : 6] = Storage(odd ? a : d);
        to[7] = Storage(d >> 16);
    }
};

// A tensor of channels, at the thread's first piece of the first tile of a sequence.
template <class Pointer>
struct Pieces {
    Pointer first;
    i64 channel, time;  // strides

    __device__ Pieces(const ChannelTensor<Pointer>& tensor, int batch, int from_channel, int from_time)
        : first(nullptr), channel(CHANNEL_LAST && ALIGNED ? 1 : tensor.channel),
          time(!CHANNEL_LAST && ALIGNED ? 1 : tensor.time) {
        const Piece piece(0);
        if (tensor.data)
            first = tensor.data + batch * tensor.batch + (from_channel + piece.channel) * channel +
                    (from_time + piece.time) * time;
    }

    template <class Step>
    __device__ Pointer at(int i, Step tile) const {
        return first + tile * time + i * APART * (CHANNEL_LAST ? time : channel);
    }
    __device__ i64 along() const { return CHANNEL_LAST ? channel : time; }

    // Piece `number` of the tile that begins at step `tile`. The elements from `count` on are zeros.
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
            if constexpr (MisalignedPiece::EXISTS)
                if (along() == 1 && count == VALUES) return MisalignedPiece::load(from);
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
            if constexpr (MisalignedPiece::EXISTS)
                if (along() == 1 && count == VALUES) return MisalignedPiece::store(to, values);
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                if (i < count) to[i * along()] = values.bits(i);
        }
    }
};

// B or C of a CTA's batch, group and sequence, at the thread's state.
struct Projection {
    const Storage* first;
    i64 state, time;  // strides
    bool contiguous;

    __device__ Projection(const ProjectionTensor& tensor, const CtaRange& range)
        : state(tensor.state), time(tensor.contiguous ? 1 : tensor.time), contiguous(tensor.contiguous) {
        first = tensor.data + range.batch * tensor.batch + range.group * tensor.group + range.begin * tensor.time +
                threadIdx.x % CAPACITY * state;
    }
};

enum : int {
    STAGED_PIECES = TIMES / IN_16_BYTES,  // of a state
    STAGED_APART = THREADS / CAPACITY,    // those of a thread
    STAGED_PER_THREAD = (2 * STAGED_PIECES + STAGED_APART - 1) / STAGED_APART,
};
static_assert(THREADS % CAPACITY == 0);

// A thread's pieces of B and C of a tile, on their way from global memory to floats [B, C][step][state] in shared memory.
struct ProjectionTile {
    Chunk<Element, IN_16_BYTES> piece[STAGED_PER_THREAD];

    static __device__ int number(int i) { return int(threadIdx.x) / CAPACITY + STAGED_APART * i; }

    // States [state, states) and `times` steps from `tile` on; zeros elsewhere.
    template <class Step>
    __device__ void load(const Projection& b, const Projection& c, int state, int states, Step tile, int times) {
        const bool in = state + int(threadIdx.x % CAPACITY) < states;
#pragma unroll
        for (int i = 0; i < STAGED_PER_THREAD; i++) {
            const int t = number(i) % STAGED_PIECES * IN_16_BYTES;
            const bool of_B = number(i) < STAGED_PIECES;
#pragma unroll
            for (int word = 0; word < 4; word++) piece[i].word[word] = 0;
            if (!in || number(i) >= 2 * STAGED_PIECES || t >= times) continue;
            const Storage* const first = of_B ? b.first + state * b.state : c.first + state * c.state;
            if ((of_B ? b.contiguous : c.contiguous) && t + IN_16_BYTES <= times) {
                piece[i] = get_words<Element, IN_16_BYTES>(reinterpret_cast<const unsigned*>(first + tile + t));
            } else {
                const i64 along = of_B ? b.time : c.time;
                if constexpr (MisalignedPiece::EXISTS && !ALIGNED)
                    if (along == 1 && t + IN_16_BYTES <= times) {
                        piece[i] = MisalignedPiece::load(first + tile + t);
                        continue;
                    }
#pragma unroll
                for (int k = 0; k < IN_16_BYTES; k++)
                    if (t + k < times) piece[i].put(k, first[(tile + t + k) * along]);
            }
        }
    }

    __device__ void store(float* shared) const {
#pragma unroll
        for (int i = 0; i < STAGED_PER_THREAD; i++) {
            if (number(i) >= 2 * STAGED_PIECES) continue;
            float* const to = shared + number(i) * IN_16_BYTES * CAPACITY + threadIdx.x % CAPACITY;
#pragma unroll
            for (int k = 0; k < IN_16_BYTES; k++) to[k * CAPACITY] = piece[i].get(k);
        }
    }
};

// 2^x, for a gate. float32 takes a polynomial for the part of x in [-1/4, 0] and the GPU's approximation for the rest, because
// the approximation errs alike for like gates, which adds up (notes/README.md, "float32 gradients of A").
__device__ inline float gate_of(float x) {
    if constexpr (NARROW) return fast_exp2(x);
    const float s = clamped_product(x, -4);
    float p = 3.481662133708596e-05f;
    p = p * s - 0.0008653732948005199f;
    p = p * s + 0.0150137422606349f;
    p = p * s - 0.1732867807149887f;
    return (1 + s * p) * fast_exp2(x + 0.25f * s);
}
