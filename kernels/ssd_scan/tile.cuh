// Tiles of 16-bit elements in shared memory: where their elements are, and how threads copy, load and store them.
#pragma once
#include "../common/copy.cuh"
#include "tensors.cuh"

// Whether four warps multiply together (wgmma), which the code of sm_90a alone can.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BY_WARPGROUPS 1
#else
#define BY_WARPGROUPS 0
#endif

// All of the CTA's; tensor cores take tiles from where address bits 0 to 9 are 0.
__device__ inline char* tile_memory() {
    extern __shared__ __align__(1024) uint4 tiles[];
    return reinterpret_cast<char*>(tiles);
}
__device__ inline unsigned shared_address(const void* data) { return unsigned(__cvta_generic_to_shared(data)); }

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

// 16 bytes to shared memory, of which the first `bytes` are copied and the others become zeros.
__device__ inline void copy_piece(unsigned to, const Storage* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

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
