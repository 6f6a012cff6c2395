// What the kernels of the family share: the chunk of a CTA, tiles in shared memory and their pieces as tensor cores take
// them, and the step sizes and decays of a chunk.
//
// The build defines ELEMENT (bfloat16, float16), STATES, the columns of a tile of B, C and states, and STAGES, the tiles that
// are in shared memory at once.
#pragma once
#include "../common/activations.cuh"
#include "../common/copy.cuh"
#include "../common/floats.cuh"
#include "../common/mma.cuh"
#include "../common/shared_memory.cuh"
#include "../common/warp.cuh"

using Element = ELEMENT;
using Storage = Element::Storage;

// Whether four warps multiply together (wgmma), which the code of sm_90a alone can.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BY_WARPGROUPS 1
#else
#define BY_WARPGROUPS 0
#endif

enum : int {
    SIZE = 64,   // numbers of a head that a tile has; a larger head has several tiles
    PIECE = 8,   // elements in 16 bytes
};
// Bits of the argument `flags`.
enum : i64 { SOFTPLUS = 1, WIDE_STEPS = 2 };

__device__ inline int smaller(i64 a, int b) { return a < 0 ? 0 : a < b ? int(a) : b; }

// A tensor of (batch, step, head or group, number), whose numbers lie without gaps; strides of the others, in elements. Those
// of steps and heads are below 2^27.
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

// --- The steps of a chunk ----------------------------------------------------------------------

// One of the chunks that each sequence is cut into: `steps` of them from `begin` on, none if the slot is not used.
struct ChunkRange {
    int begin, steps, sequence_begin;
};
struct SequenceRange {
    int begin, end, slot;  // the slot of its first chunk
};

template <int CHUNK>
__device__ inline SequenceRange sequence_range(const Sizes& sizes, const int* cu_seqlens, int sequence) {
    const int time = int(sizes.time);
    if (!cu_seqlens) return {0, time, 0};
    const int first = cu_seqlens[sequence], last = cu_seqlens[sequence + 1];
    // Clamped: a wrong cu_seqlens must not lead outside of the tensors.
    const int begin = smaller(first, time), end = smaller(last, time);
    return {begin, end < begin ? begin : end, begin / CHUNK + sequence};
}

template <int CHUNK>
__device__ inline ChunkRange chunk_range(const Sizes& sizes, const int* cu_seqlens, int slot) {
    int low = 0, high = int(sizes.sequences);  // the sequence is in [low, high)
    if (cu_seqlens)
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (sequence_range<CHUNK>(sizes, cu_seqlens, middle).slot <= slot) low = middle;
            else high = middle;
        }
    const SequenceRange sequence = sequence_range<CHUNK>(sizes, cu_seqlens, low);
    const int begin = sequence.begin + (slot - sequence.slot) * CHUNK;
    return {begin, smaller(i64(sequence.end) - begin, CHUNK), sequence.begin};
}

// The number of the thread's warp, of which the compiler knows that its lanes agree.
__device__ inline int warp_number() { return from_lane(int(threadIdx.x) / 32, 0); }

// What decays and step sizes are computed of.
struct StepInputs {
    const void* dt;  // of the elements' type or, with WIDE_STEPS, float32
    i64 batch, time, head;
    const float *A, *bias;
    const int* seq_idx;  // of (batch, step), or null
    i64 seq_idx_batch;
    i64 flags;
    float low, high;  // limits of step sizes

    // The bits of an element of `dt`, and its value: apart, so that nothing waits for the element until it is wanted.
    __device__ unsigned bits(i64 b, i64 t, i64 h) const {
        const i64 at = b * batch + t * time + h * head;
        if (flags & WIDE_STEPS) return static_cast<const unsigned*>(dt)[at];
        return static_cast<const Storage*>(dt)[at];
    }
    __device__ float value(unsigned bits) const {
        return flags & WIDE_STEPS ? __uint_as_float(bits) : Element::widen(Storage(bits));
    }
    // Whether another sequence starts at step t, which has one before it.
    __device__ bool starts(i64 b, i64 t) const {
        const int* const of_batch = seq_idx + b * seq_idx_batch;
        return of_batch[t] != of_batch[t - 1];
    }
    __device__ float bias_of(int h) const { return bias ? bias[h] : 0; }
    __device__ float unlimited(float raw) const { return flags & SOFTPLUS ? softplus(raw) : raw; }
    __device__ float limited(float size) const { return fminf(fmaxf(size, low), high); }
};

// The logarithm to base 2 of the decay at a step where another sequence starts: 0 in float32.
#define LOG_NOTHING -200.f

// Of the steps of a chunk a lane has N: N · lane and the next ones. `sum` is that of the decays' logarithms to base 2 over the
// chunk's steps up to this one, so what is left of step j at step i is exp2(sum_i - sum_j).
template <int N>
struct LaneSteps {
    float size[N], sum[N], total;
    unsigned bits[N];
    bool starts[N];

    // `first` is where the sequence begins.
    __device__ void load(const StepInputs& inputs, i64 batch, int first, int begin, int steps, int head) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int step = N * lane + k;
            bits[k] = step < steps ? inputs.bits(batch, begin + step, head) : 0;
            starts[k] = inputs.seq_idx && step < steps && begin + step > first && inputs.starts(batch, begin + step);
        }
    }
    // After `load`: what is loaded becomes sizes and sums.
    __device__ void add_up(const StepInputs& inputs, int steps, float A, float bias) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float limited = inputs.limited(inputs.unlimited(inputs.value(bits[k]) + bias));
            size[k] = N * lane + k < steps ? limited : 0;
            sum[k] = starts[k] ? LOG_NOTHING : size[k] * A * LOG2_E;
            if (k) sum[k] += sum[k - 1];
        }
        float through = sum[N - 1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = from_lower(through, distance);
            if (lane >= distance) through += before;
        }
        const float before = from_lower(through, 1);
#pragma unroll
        for (int k = 0; k + 1 < N; k++) sum[k] += lane ? before : 0;
        sum[N - 1] = through;
        total = from_lane(through, 31);
    }
};

// --- Tiles in shared memory --------------------------------------------------------------------

// All of the CTA's; tensor cores take tiles from where address bits 0 to 9 are 0.
__device__ inline char* tile_memory() {
    extern __shared__ __align__(1024) uint4 tiles[];
    return reinterpret_cast<char*>(tiles);
}
__device__ inline unsigned shared_address(const void* data) { return unsigned(__cvta_generic_to_shared(data)); }

// HEIGHT rows of WIDTH elements, 64 columns after the other. Pieces of 16 bytes are permuted within the 128 bytes of a row, as
// tensor cores have it, so that eight rows' pieces of the same number lie in different banks: piece c of row r is where c ^
// (r % 8) would be. So a lane's address in rows r + 8·i and pieces c ^ d of constant i and d is its address in row r and piece
// c, but for one instruction that all rows share.
template <int HEIGHT, int WIDTH>
struct Tile {
    static_assert(HEIGHT % 8 == 0 && WIDTH % 64 == 0);
    enum : int { ROW = 128, BLOCK = HEIGHT * ROW, BYTES = 2 * HEIGHT * WIDTH };
    unsigned address;  // in shared memory

    // Of element `column` of a row.
    __device__ unsigned at(int row, int column) const {
        return address + column / 64 * BLOCK + row * ROW + ((column % 64 / PIECE ^ row % 8) * 16) + column % PIECE * 2;
    }
    // `row` rows, a multiple of 8, and `column` columns, a multiple of 8 that has no bit in common with the columns there, from
    // where `address` says.
    static __device__ unsigned moved(unsigned address, int row, int column) {
        return (address ^ (column % 64 / PIECE * 16)) + row * ROW + column / 64 * BLOCK;
    }
    // Where the pair of elements is that a lane has of a tile of 16 × 8 sums.
    __device__ unsigned lane_of_sums(int row) const { return at(row + threadIdx.x % 32 / 4, threadIdx.x % 4 * 2); }
};

// A thread's part in copying to a tile: pieces of one number, in rows that are APART from each other.
template <int HEIGHT, int WIDTH, int THREADS>
struct Copier {
    using To = Tile<HEIGHT, WIDTH>;
    enum : int { PIECES = WIDTH / PIECE, APART = THREADS / PIECES };
    static_assert(THREADS % PIECES == 0 && HEIGHT % APART == 0);
    const Storage* from;
    int apart;       // elements
    int row;         // of the thread's first piece, or one beyond all if its columns are not there
    unsigned first;  // where in the tile

    // Rows from `data` on, `stride` elements from each other, of `columns` numbers.
    __device__ Copier(const Storage* data, int stride, int columns) {
        const int piece = threadIdx.x % PIECES, own = threadIdx.x / PIECES;
        from = data + (i64(own) * stride + piece * PIECE);
        apart = APART * stride;
        row = piece * PIECE < columns ? own : HEIGHT;
        first = To{0}.at(own, piece * PIECE);
    }
    // `rows` rows, zeros beyond, from `distance` elements further on.
    __device__ void copy(To tile, i64 distance, int rows) const {
        const Storage* source = from + distance;
#pragma unroll
        for (int i = 0; i < HEIGHT / APART; i++, source += apart) {
            const unsigned own = APART % 8 ? first ^ (i * APART % 8 * 16) : first;
            const int bytes = row + i * APART < rows ? 16 : 0;
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(tile.address + own + i * APART * To::ROW),
                         "l"(source), "r"(bytes)
                         : "memory");
        }
    }
};

__device__ inline unsigned load_pair(unsigned address) {
    unsigned pair;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address) : "memory");
    return pair;
}
__device__ inline void store_pair(unsigned address, float low, float high) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(Element::narrow_two(low, high)) : "memory");
}
__device__ inline uint4 load_piece(unsigned address) {
    uint4 m;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(address) : "memory");
    return m;
}
// Wait for all threads, and let the tensor cores see what they have stored in shared memory or waited for.
__device__ inline void meet() {
#if BY_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
}

// --- Products of matrices ----------------------------------------------------------------------

// Four warps compute 64 rows and 8 · N columns of a product, 16 rows each: a lane has, of each 8 columns, columns `lane_column()`
// and the next of rows `lane_row()` and eight further. K is the dimension that is summed over. An operand is a part of a
// tile, whose rows are the product's rows or columns (ALONG_K: a row's elements lie along K), or whose rows are K (ACROSS_K).
__device__ inline int lane_row() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_column() { return threadIdx.x % 4 * 2; }

enum Lies : int { ALONG_K = 0, ACROSS_K = 1 };

// The part from `start` on, the product's row or column 0 and K = 0.
template <Lies LIES, class T>
struct Operand {
    T tile;
    int start = 0;

    // A descriptor of the part from `k` on: its address, the distance of 64 columns where these are the product's, and that of
    // eight rows, all in 16 bytes; and the permutation of 128 bytes.
    __device__ u64 described(int k) const {
        const unsigned address = LIES == ALONG_K ? tile.address + start * T::ROW + k / 64 * T::BLOCK + k % 64 * 2
                                                 : tile.address + start / 64 * T::BLOCK + start % 64 * 2 + k * T::ROW;
        return u64(1) << 62 | u64(8 * T::ROW / 16) << 32 | u64(T::BLOCK / 16) << 16 | address / 16;
    }

    // Four matrices of 8 × 8 elements in the order of an operand A, 16 rows from `row` on and 16 of K from `k` on; or of B: x and
    // y for 8 columns, z and w for the next.
    __device__ unsigned lane_of_A(int row) const { return lane(LIES == ALONG_K, row); }
    __device__ unsigned lane_of_B() const { return lane(LIES == ACROSS_K, 0); }
    __device__ uint4 load_A(unsigned lane, int k) const { return load(LIES == ACROSS_K, lane, 0, k); }
    __device__ uint4 load_B(unsigned lane, int column, int k) const { return load(LIES == ACROSS_K, lane, column, k); }

private:
    // The first matrix' neighbour is below it (then lanes 0 to 15 have rows), or beside it.
    __device__ unsigned lane(bool below, int first) const {
        const int number = threadIdx.x % 32, eight = number / 8, in_eight = number % 8;
        const int row = in_eight + 8 * (below ? eight % 2 : eight / 2), column = PIECE * (below ? eight / 2 : eight % 2);
        return LIES == ALONG_K ? tile.at(start + first + row, column) : tile.moved(tile.at(row, column), 0, start + first);
    }
    __device__ static uint4 load(bool transposed, unsigned lane, int product, int k) {
        const unsigned row = LIES == ALONG_K ? T::moved(lane, product, k) : T::moved(lane, k, product);
        uint4 m;
        if (transposed)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(row) : "memory");
        else
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(row) : "memory");
        return m;
    }
};
template <class T>
__device__ Operand<ALONG_K, T> along_k(T tile, int start = 0) { return {tile, start}; }
template <class T>
__device__ Operand<ACROSS_K, T> across_k(T tile, int start = 0) { return {tile, start}; }

template <int N>
__device__ inline void clear(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums[n][k] = 0;
}

#if BY_WARPGROUPS
// TYPE is the element type's name in PTX, which a string of assembly cannot take from a template.
#define bfloat16_TYPES "bf16.bf16"
#define float16_TYPES "f16.f16"
#define JOINED(a, b) a##b
#define TYPES_OF(element) JOINED(element, _TYPES)
#define TYPES TYPES_OF(ELEMENT)

template <Lies A_LIES, Lies B_LIES>
__device__ inline void multiply_together(float (&s)[4][4], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %18, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, more, 1, 1, %19, %20; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3])
        : "l"(a), "l"(b), "r"(more), "n"(int(A_LIES)), "n"(int(B_LIES))
        : "memory");
}

template <Lies B_LIES>
__device__ inline void multiply_together(float (&s)[4][4], uint4 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %21, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, more, 1, 1, %22; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more), "n"(int(B_LIES))
        : "memory");
}

template <Lies A_LIES, Lies B_LIES>
__device__ inline void multiply_together(float (&s)[8][4], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %34, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, more, 1, 1, %35, %36; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3]),
          "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]),
          "+f"(s[5][0]), "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]),
          "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
          "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
        : "l"(a), "l"(b), "r"(more), "n"(int(A_LIES)), "n"(int(B_LIES))
        : "memory");
}

template <Lies B_LIES>
__device__ inline void multiply_together(float (&s)[8][4], uint4 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, more, 1, 1, %38; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3]),
          "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]),
          "+f"(s[5][0]), "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]),
          "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
          "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more), "n"(int(B_LIES))
        : "memory");
}

// Products run while the warps go on. Sums and operands of them are not touched from `begin_products` until `wait_for_products`
// says that all but LEFT groups are done, which `close_products` ends.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT, int N>
__device__ inline void wait_for_products(float (&sums)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int n = 0; n < N; n++)  // so that the compiler reads no sum earlier
        asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
}
// sums = A·B, or with MORE sums += A·B.
template <int K, bool MORE, Lies A_LIES, Lies B_LIES, class TA, class TB, int N>
__device__ void multiply(float (&sums)[N][4], Operand<A_LIES, TA> a, Operand<B_LIES, TB> b) {
#pragma unroll
    for (int k = 0; k < K; k += 16)
        multiply_together<A_LIES, B_LIES>(sums, a.described(k), b.described(k), MORE || k);
}
// sums += A·B, where a lane has its part of 16 of K of A in registers.
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], uint4 a, Operand<B_LIES, TB> b, int k) {
    multiply_together<B_LIES>(sums, a, b.described(k), 1);
}
#else
__device__ inline void begin_products() {}
__device__ inline void close_products() {}
template <int LEFT, int N>
__device__ inline void wait_for_products(float (&)[N][4]) {}
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], uint4 a, Operand<B_LIES, TB> b, int k) {
    const unsigned lane = b.lane_of_B();
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const uint4 columns = b.load_B(lane, 8 * n, k);
        if constexpr (Element::ONE == 0x3f80u) {
            mma_bfloat16(sums[n], a, make_uint2(columns.x, columns.y));
            mma_bfloat16(sums[n + 1], a, make_uint2(columns.z, columns.w));
        } else {
            mma_float16(sums[n], a, make_uint2(columns.x, columns.y));
            mma_float16(sums[n + 1], a, make_uint2(columns.z, columns.w));
        }
    }
}
template <int K, bool MORE, Lies A_LIES, Lies B_LIES, class TA, class TB, int N>
__device__ void multiply(float (&sums)[N][4], Operand<A_LIES, TA> a, Operand<B_LIES, TB> b) {
    if constexpr (!MORE) clear(sums);
    const unsigned lane = a.lane_of_A(threadIdx.x / 32 % 4 * 16);
#pragma unroll
    for (int k = 0; k < K; k += 16) multiply_registers(sums, a.load_A(lane, k), b, k);
}
#endif

__device__ inline float low_of(unsigned pair) { return Element::widen(Storage(pair)); }
__device__ inline float high_of(unsigned pair) {
    if constexpr (Element::ONE == 0x3f80u) return __uint_as_float(pair & 0xffff0000u);
    else return Element::widen(Storage(pair >> 16));
}
__device__ inline unsigned scaled(unsigned pair, float2 factors) {
    return Element::narrow_two(low_of(pair) * factors.x, high_of(pair) * factors.y);
}
