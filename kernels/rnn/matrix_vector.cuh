// R·v for one sequence of one head, in float32 FMAs. On tensor cores a product of float32 takes three of TF32, R has to be
// split into high and low parts at every step, and seven of a tile's eight columns would be empty.
//
// SPLIT neighbouring lanes compute one hidden unit. They hold one row of R for each recurrent gate (backward: one column),
// whose words of four values they take in turns; with SPLIT 2:
//
//     word   0  1  2  3  4  5  …
//     lane   0  1  0  1  0  1  …
//
// The first 16 CHUNKS values of a row are in registers, the next 16 LAYERS in shared memory. The vector is in shared memory,
// where all units of a warp read the same words at the same time. Shuffles add up the lanes' partial sums, and then all lanes
// of a unit compute the same cell.
//
// The vector is double-buffered: a step reads one buffer and writes the other, so that one barrier a step is enough.
//
// Build constants: ROWS (units / 16), SPLIT, CHUNKS and LAYERS. BATCHES 0 selects this file.
#pragma once
#include "../common/global_memory.cuh"
#include "../common/shared_memory.cuh"
#include "cells.cuh"

enum : int { THREADS = 16 * ROWS * SPLIT, RECURRENT = Cell::RECURRENT };
enum : int { HELD = 4 * CHUNKS / SPLIT, STORED = 4 * LAYERS / SPLIT, WORDS = HELD + STORED };
enum : unsigned { CAPACITY = 16 * (CHUNKS + LAYERS) };  // values of a vector
static_assert(Element::EXACT && 4 % SPLIT == 0, "float32 only, and the four words of 16 values are dealt to SPLIT lanes");
static_assert(CAPACITY <= 16 * ROWS, "a unit exists for every value of a vector");

// A step's inputs are prefetched to the L2 some steps ahead, a sector of 32 bytes at a time, and loaded before its product.
// In small CTAs that is too short to hide the latency of the L2, so they are loaded one step earlier (STEP_AHEAD).
enum : int { PREFETCH_STEPS = 8, SECTOR = 32 / sizeof(Storage) };
enum : bool { STEP_AHEAD = ROWS <= 4 };

struct Lane {
    const unsigned unit = threadIdx.x / SPLIT, part = threadIdx.x % SPLIT;

    // Spreads work that is done once for a unit over its lanes: item i is lane i % SPLIT's.
    __device__ bool does(int i) const { return unsigned(i) % SPLIT == part; }
};

// Vectors of one step, zero from `dim` values on, as far as there is room.
template <int VECTORS>
struct Vectors {
    float4 words[VECTORS][CAPACITY / 4];

    __device__ float* of(int vector) { return reinterpret_cast<float*>(words[vector]); }
};

// The lane's words of R, and its products: of row n with vector n, or with the only vector.
struct Matrix {
    float4 in_registers[HELD][RECURRENT];

    __device__ static float4* stored(int word, int n) {
        return reinterpret_cast<float4*>(dynamic_shared()) + (word * RECURRENT + n) * THREADS + threadIdx.x;
    }
    // Whether a group of 16 values begins with this word that is beyond `dim`: neither it nor later words are used.
    __device__ static bool past_end(int word, unsigned dim) {
        return word > 0 && word * SPLIT % 4 == 0 && unsigned(4 * SPLIT * word) >= dim;
    }
    // Row n begins at `first` + n `rows`. Its values are contiguous if CONTIGUOUS, else `dim` apart.
    template <bool CONTIGUOUS>
    __device__ void load(const Storage* first, i64 rows, unsigned dim, const Lane& at) {
#pragma unroll
        for (int n = 0; n < RECURRENT; n++, first += rows) {
            const Storage* from = first + 4 * at.part * (CONTIGUOUS ? 1 : dim);
            const auto next = [&] {
                float x[4];
                if constexpr (CONTIGUOUS) {
                    const uint4 words = *reinterpret_cast<const uint4*>(from);
                    x[0] = Element::widen(words.x), x[1] = Element::widen(words.y);
                    x[2] = Element::widen(words.z), x[3] = Element::widen(words.w);
                    from += 4 * SPLIT;
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++, from += dim) x[i] = Element::widen(*from);
                    from += 4 * (SPLIT - 1) * dim;
                }
                return make_float4(x[0], x[1], x[2], x[3]);
            };
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                if (past_end(i, dim)) break;
                in_registers[i][n] = next();
            }
#pragma unroll 1
            for (int i = 0; i < STORED; i++) {
                if (past_end(HELD + i, dim)) break;
                *stored(i, n) = next();
            }
        }
    }
    // This lane's partial sum of each row with the first `dim` values; `total` adds up the lanes'.
    template <int VECTORS>
    __device__ void multiply(float (&sums)[RECURRENT], const Vectors<VECTORS>& vectors, unsigned dim,
                             const Lane& at) const {
        // Words read ahead from shared memory; none in large CTAs, where other warps hide the latency.
        constexpr int READ_AHEAD = !STEP_AHEAD ? 0 : VECTORS == 1 ? 2 : 1;
        // Independent sums of a row.
        constexpr int CHAINS = RECURRENT >= 3 ? 1 : 4;
        float4 coming[READ_AHEAD + 1][VECTORS];
        float parts[RECURRENT][CHAINS] = {};
        const auto read = [&](float4(&words)[VECTORS], int i) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) words[v] = vectors.words[v][i * SPLIT + at.part];
        };
        const auto add = [&](int n, float4 a, const float4(&words)[VECTORS]) {
            const float4 b = words[VECTORS == 1 ? 0 : n];
            parts[n][0] = fmaf(a.x, b.x, parts[n][0]);
            parts[n][1 % CHAINS] = fmaf(a.y, b.y, parts[n][1 % CHAINS]);
            parts[n][2 % CHAINS] = fmaf(a.z, b.z, parts[n][2 % CHAINS]);
            parts[n][3 % CHAINS] = fmaf(a.w, b.w, parts[n][3 % CHAINS]);
        };
#pragma unroll
        for (int i = 0; i < READ_AHEAD && i < HELD; i++) read(coming[i], i);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (past_end(i, dim)) break;
            if (i + READ_AHEAD < HELD) read(coming[(i + READ_AHEAD) % (READ_AHEAD + 1)], i + READ_AHEAD);
#pragma unroll
            for (int n = 0; n < RECURRENT; n++) add(n, in_registers[i][n], coming[i % (READ_AHEAD + 1)]);
        }
#pragma unroll 1
        for (int i = 0; i < STORED; i++) {
            if (past_end(HELD + i, dim)) break;
            float4 words[VECTORS];
            read(words, HELD + i);
#pragma unroll
            for (int n = 0; n < RECURRENT; n++) add(n, *stored(i, n), words);
        }
#pragma unroll
        for (int n = 0; n < RECURRENT; n++) {
            sums[n] = parts[n][0];
#pragma unroll
            for (int chain = 1; chain < CHAINS; chain++) sums[n] += parts[n][chain];
        }
    }
};

// The sum over the lanes of a unit, in all of them.
__device__ inline float total(float part) {
#pragma unroll
    for (int other = 1; other < SPLIT; other *= 2) part += __shfl_xor_sync(~0u, part, other);
    return part;
}
