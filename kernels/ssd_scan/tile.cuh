// Tiles of 16-bit elements in shared memory: where their elements are, and how threads copy, load and store them.
#pragma once
#include "../common/copy.cuh"
#include "shared_words.cuh"
#include "tensors.cuh"

// Whether four warps multiply together (wgmma), which the code of sm_90a alone can.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BY_WARPGROUPS 1
#else
#define BY_WARPGROUPS 0
#endif

// HEIGHT rows of WIDTH elements, in blocks of 64 columns, whose rows of 128 bytes are swizzled as wgmma takes them: piece c of 16
// bytes of row r lies where piece c ^ (r % 8) would be. So row r + 8·i, piece c ^ d, for constant i and d, lies at the address
// of row r, piece c, XOR 16·d, plus a constant.
template <int HEIGHT, int WIDTH>
struct Tile {
    static_assert(HEIGHT % 8 == 0 && WIDTH % 64 == 0);
    enum : int { ROW = 128, BLOCK = HEIGHT * ROW, BYTES = 2 * HEIGHT * WIDTH };
    unsigned address;  // in shared memory

    // Of element `column` of a row.
    __device__ unsigned at(int row, int column) const {
        return address + column / 64 * BLOCK + row * ROW + ((column % 64 / PIECE ^ row % 8) * 16) + column % PIECE * 2;
    }
    // The address `row` rows below and `column` columns right of `address`. Both are multiples of 8, and `column` % 64 shares no
    // set bit with the column of `address`, so XOR adds them.
    static __device__ unsigned moved(unsigned address, int row, int column) {
        return (address ^ (column % 64 / PIECE * 16)) + row * ROW + column / 64 * BLOCK;
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
    __device__ Copier(const Storage* data, int stride, int columns) {
        const int piece = threadIdx.x % PIECES, own = threadIdx.x / PIECES;
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
            const unsigned own = APART % 8 ? first ^ (i * APART % 8 * 16) : first;
            const int bytes = row + i * APART < rows ? 16 : 0;
            const unsigned to = tile.address + own + i * APART * To::ROW;
            copy_piece(to, source, bytes);
        }
    }
};

__device__ inline void store_pair(unsigned address, float low, float high) {
    store_word(address, Element::narrow_two(low, high));
}
// Wait for all threads, and let the tensor cores see what they have stored in shared memory or waited for.
__device__ inline void meet() {
#if BY_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
}
