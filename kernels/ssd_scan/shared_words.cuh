// Shared memory by 32-bit addresses, in PTX. Tests on a CPU have these functions in C++ (tests/kernels/emulator/shared_words.cuh).
#pragma once
#include "../common/types.cuh"

// All of the CTA's; tensor cores take tiles from where address bits 0 to 9 are 0.
__device__ inline char* tile_memory() {
    extern __shared__ __align__(1024) uint4 tiles[];
    return reinterpret_cast<char*>(tiles);
}
__device__ inline unsigned shared_address(const void* data) { return unsigned(__cvta_generic_to_shared(data)); }

// Copy 16 bytes while the thread does other work. Only the first `bytes` of them are read, and the others are zeros.
__device__ inline void copy_piece(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline unsigned load_word(unsigned address) {
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ inline uint2 load_two_words(unsigned address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
    return words;
}
__device__ inline void store_word(unsigned address, unsigned word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ inline void store_two_words(unsigned address, uint2 words) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(words.x), "r"(words.y) : "memory");
}
__device__ inline uint4 load_piece(unsigned address) {
    uint4 m;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(address) : "memory");
    return m;
}

// Four matrices of 8 × 8 elements of 16 bits, by a warp: lanes 8·i to 8·i + 7 have the addresses of the rows of matrix i. A lane
// gets of each matrix the pair of row lane / 4 and columns 2 · (lane % 4) and the next; of the transposed matrix if `transposed`.
__device__ inline uint4 load_matrices(bool transposed, unsigned row) {
    uint4 m;
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(row) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(row) : "memory");
    return m;
}
// Store four matrices of 8 × 8 elements of 16 bits, laid out in registers and addressed as `load_matrices` has them. From sm_90 on.
__device__ inline void store_matrices(unsigned row, uint4 m) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m.x), "r"(m.y), "r"(m.z),
                 "r"(m.w) : "memory");
}
