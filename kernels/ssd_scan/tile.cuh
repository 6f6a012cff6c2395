// Tiles of elements in shared memory: where their elements are, and how threads copy, load and store them.
#pragma once
#include "../common/copy.cuh"
#include "shared_words.cuh"
#include "tensors.cuh"

// Whether four warps multiply together (wgmma), which the code of sm_90a alone can, for elements of 16 bits.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !WIDE
#define BY_WARPGROUPS 1
#else
#define BY_WARPGROUPS 0
#endif

// Let each thread of a warpgroup, which had BEFORE registers, have AFTER, if others leave them or want them.
template <int BEFORE, int AFTER>
__device__ inline void set_registers() {
#if BY_WARPGROUPS
    if constexpr (AFTER > BEFORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(AFTER));
    if constexpr (AFTER < BEFORE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(AFTER));
#endif
}

// HEIGHT rows of WIDTH elements, in blocks whose rows have 128 bytes and are swizzled: piece c of 16 bytes of row r lies where piece
// c ^ swizzle(r) would be. Elements of 16 bits are swizzled as wgmma takes them. Those of 32 bits are swizzled so that no bank
// conflicts where a warp loads a piece of each of eight rows, or a word of each of eight columns, of rows 0 to 3, 4 to 7, 0, 2, 4, 6
// or 1, 3, 5, 7. Both swizzles are linear: swizzle(a ^ b) is swizzle(a) ^ swizzle(b).
template <int HEIGHT, int WIDTH>
struct Tile {
    static_assert(HEIGHT % 8 == 0 && WIDTH % 64 == 0);
    enum : int { ROW = 128, COLUMNS = ROW / ELEMENT_BYTES, BLOCK = HEIGHT * ROW, BYTES = ELEMENT_BYTES * HEIGHT * WIDTH };
    unsigned address;  // in shared memory

    static __device__ int swizzle(int row) { return WIDE ? (2 * row & 6) ^ (row / 4 % 2 * 3) : row % 8; }
    // Of element `column` of a row.
    __device__ unsigned at(int row, int column) const {
        return address + column / COLUMNS * BLOCK + row * ROW + ((column % COLUMNS / PIECE ^ swizzle(row)) * 16) +
               column % PIECE * ELEMENT_BYTES;
    }
    // The address `row` rows below and `column` columns right of `address`. `row` shares no set bit with the row of `address`, and
    // `column` % COLUMNS, a multiple of PIECE, none with its column, so XOR adds them.
    static __device__ unsigned moved(unsigned address, int row, int column) {
        return (address ^ ((column % COLUMNS / PIECE ^ swizzle(row)) * 16)) + row * ROW + column / COLUMNS * BLOCK;
    }
    // Where the pair of elements is that a lane has of a tile of 16 × 8 sums.
    __device__ unsigned lane_of_sums(int row) const { return at(row + threadIdx.x % 32 / 4, threadIdx.x % 4 * 2); }
};

// A thread's part of a copy to a tile: the same 16 bytes' column of every APART-th row.
template <int HEIGHT, int WIDTH, int THREADS>
struct Copier {
    using To = Tile<HEIGHT, WIDTH>;
    enum : int { PIECES = WIDTH / PIECE, APART = THREADS / PIECES };
    static_assert(THREADS % PIECES == 0 && HEIGHT % APART == 0);
    const Storage* from;
    int apart;       // elements
    int row;         // of the thread's first piece; HEIGHT if its columns lie beyond those that are there
    unsigned first;  // where in the tile

    // Rows from `data` on, `stride` elements from each other, of `columns` numbers.
    __device__ Copier(const Storage* data, int stride, int columns, unsigned thread = threadIdx.x) {
        const int piece = thread % PIECES, own = thread / PIECES;
        from = data + (i64(own) * stride + piece * PIECE);
        apart = APART * stride;
        row = piece * PIECE < columns ? own : HEIGHT;
        first = To{0}.at(own, piece * PIECE);
    }
    // At most `rows` rows, zeros beyond, from `distance` elements further on.
    __device__ void copy(To tile, i64 distance, int rows) const {
        const Storage* source = from + distance;
        rows = rows < HEIGHT ? rows : HEIGHT;  // so that columns that are not there stay zeros
#pragma unroll
        for (int i = 0; i < HEIGHT / APART; i++, source += apart) {
            const unsigned own = APART % 8 ? first ^ (To::swizzle(i * APART) * 16) : first;
            const int bytes = row + i * APART < rows ? 16 : 0;
            const unsigned to = tile.address + own + i * APART * To::ROW;
            copy_piece(to, source, bytes);
        }
    }
};

// Two neighbouring elements of a row.
#if WIDE
using Pair = uint2;
__device__ inline Pair load_pair(unsigned address) { return load_two_words(address); }
__device__ inline void store_pair(unsigned address, Pair pair) { store_two_words(address, pair); }
__device__ inline Pair pair_of(float low, float high) { return make_uint2(__float_as_uint(low), __float_as_uint(high)); }
__device__ inline float low_of(Pair pair) { return __uint_as_float(pair.x); }
__device__ inline float high_of(Pair pair) { return __uint_as_float(pair.y); }
#else
using Pair = unsigned;
__device__ inline Pair load_pair(unsigned address) { return load_word(address); }
__device__ inline void store_pair(unsigned address, Pair pair) { store_word(address, pair); }
__device__ inline Pair pair_of(float low, float high) { return Element::narrow_two(low, high); }
__device__ inline float low_of(Pair pair) { return Element::widen(Storage(pair)); }
__device__ inline float high_of(Pair pair) {
    if constexpr (Element::ONE == 0x3f80u) return __uint_as_float(pair & 0xffff0000u);
    else return Element::widen(Storage(pair >> 16));
}
#endif
__device__ inline void store_pair(unsigned address, float low, float high) { store_pair(address, pair_of(low, high)); }

// Let the tensor cores see what the thread has stored in shared memory or waited for.
__device__ inline void show_tensor_cores() {
#if BY_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Wait for all threads, whose stores and copies the tensor cores then see.
__device__ inline void meet() {
    show_tensor_cores();
    __syncthreads();
}
