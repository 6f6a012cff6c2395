// How a cluster of CTAs, or a CTA alone, holds a whole head: what a lane has of it, its part of the
// product with R, and h, which goes from shared memory to shared memory.
//
// The CLUSTER CTAs have 16 ROWS units each, for TILE batches. A warp has whole rows of R of 8 units in
// registers, so that no sums cross warps. Of a tile of 16 rows the tensor cores leave a lane rows lane / 4
// and 8 + lane / 4 ("top" and "bottom") for batches 2 (lane % 4) and the next. Lanes below 16 are low
// here, the others high; a low one and the high one 16 above it have rows of the same two units,
// 2 (lane / 4 % 4) and the next of the warp's. These have 2 GATES values, unit by unit:
//
//     values 4 m … 4 m + 3, in tile m:  low top, high top, low bottom, high bottom
//
// The two lanes exchange, and each then has all values of the two units in one batch.
//
// ROWS, CLUSTER and CHUNKS, which R's rows have room for, come from the build; SPLIT is 2, warps that have
// a row of 16 units, BATCHES 1 and LAYERS 0.
#pragma once
#include "../common/global_memory.cuh"
#include "cells.cuh"
#include "cluster.cuh"

enum : int { WARPS = ROWS * SPLIT, THREADS = 32 * WARPS };
enum : unsigned { UNITS = 16 * ROWS, TILE = 8 };
enum : int { GATES = Cell::RECURRENT, TILES = (2 * GATES + 3) / 4 };
static_assert(SPLIT == 2 && BATCHES == 1 && LAYERS == 0, "the only way that it is written for");

struct LanePosition {
    const unsigned rank = blockIdx.x % CLUSTER;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned quad = lane / 4, in_quad = lane % 4, pair = quad % 4;
    const unsigned high = lane / 16;
    const unsigned first = rank * UNITS + 8 * warp, unit = first + 2 * pair;
    const unsigned in_tile = 2 * in_quad + high;
};

// Whole rows of R.
struct Weights {
    uint4 in_registers[CHUNKS][TILES][2];

    __device__ void load(const Storage* recurrent, const LanePosition& at, unsigned head, unsigned heads,
                         unsigned dim) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const auto words = [&](int value) {
                    const unsigned previous = c * CHUNK + at.in_quad * PER, unit = value >= GATES;
                    if (value >= 2 * GATES || at.first >= dim || previous >= dim)
                        return make_uint4(0, 0, 0, 0);
                    const unsigned gate = value - unit * GATES;
                    const i64 row = (i64(gate) * heads + head) * dim + at.unit + unit;
                    // One by one: were they loaded at once, the registers would be in the wrong order.
                    const unsigned* const from =
                        reinterpret_cast<const unsigned*>(recurrent + row * dim + previous);
                    return make_uint4(from[0], from[1], from[2], from[3]);
                };
                const uint4 top = words(4 * m + int(at.high)), bottom = words(4 * m + 2 + int(at.high));
                in_registers[c][m][0] = make_uint4(top.x, bottom.x, top.y, bottom.y);
                in_registers[c][m][1] = make_uint4(top.z, bottom.z, top.w, bottom.w);
            }
    }

    // The terms of the lane's units, unit by unit, in its batch.
    __device__ void multiply(float (&terms)[2][GATES], const uint4 (&h)[CHUNKS], const LanePosition& at) const {
        constexpr int CHAINS = CHUNKS >= 2 ? 4 : 2;  // sums that do not wait for each other
        float sums[CHAINS][TILES][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                Element::multiply(sums[2 * c % CHAINS][m], in_registers[c][m][0], make_uint2(h[c].x, h[c].y));
                Element::multiply(sums[(2 * c + 1) % CHAINS][m], in_registers[c][m][1],
                                  make_uint2(h[c].z, h[c].w));
            }
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[i] = sums[0][m][i] + sums[1][m][i];
                if (CHAINS == 4) sum[i] += sums[CHAINS - 2][m][i] + sums[CHAINS - 1][m][i];
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int value = 4 * m + 2 * half;
                if (value >= 2 * GATES) continue;
                const float even = sum[2 * half], odd = sum[2 * half + 1];  // batches
                const float own = at.high ? odd : even;
                const float other = __shfl_xor_sync(~0u, at.high ? even : odd, 16);
                terms[value / GATES][value % GATES] = at.high ? other : own;
                if (value + 1 < 2 * GATES)
                    terms[(value + 1) / GATES][(value + 1) % GATES] = at.high ? own : other;
            }
        }
    }
};

// h of all units, in two rounds: whoever is a round ahead does not write what others still read, since it
// has h of all units, and who has sent his has read the round before. In a cluster of several CTAs, warps
// without units take no part: nobody would wait for them, and they would lose count.
struct Rounds {
    enum : unsigned { CAPACITY = CHUNKS * CHUNK };
    // An odd number of half cache lines: two rows side by side are in different banks.
    enum : unsigned { STRIDE = (CAPACITY + 8 * PER - 1) / (8 * PER) * (8 * PER) + 4 * PER };
    enum : unsigned { WORDS = TILE * STRIDE / PER };
    struct Memory {
        uint4 rows[2][WORDS];
        u64 arrivals[2];
    };
    Memory& memory;
    const unsigned bytes, blocks;  // of a round; that have units
    unsigned number = 0;   // of rounds so far

    __device__ Rounds(Memory& memory, unsigned dim)
        : memory(memory), bytes(TILE * dim * unsigned(sizeof(Storage))),
          blocks((dim + UNITS - 1) / UNITS) {
        if constexpr (CLUSTER > 1) {
            if (threadIdx.x == 0)
                for (u64& arrivals : memory.arrivals) {
                    begin_arrivals(shared_address(&arrivals));
                    expect_bytes(shared_address(&arrivals), bytes);
                }
            cluster_barrier();
        }
    }
    // No CTA leaves while others may send to it.
    __device__ void end() const {
        if constexpr (CLUSTER > 1) cluster_barrier();
    }

    // The latest round, of the words that meet R's in this lane.
    __device__ void read(uint4 (&h)[CHUNKS], const LanePosition& at) const {
        const uint4* const from = memory.rows[number % 2] + at.quad * (STRIDE / PER) + at.in_quad;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) h[c] = from[4 * c];
    }
    // Make the latest round that of the initial state, or null for zeros, of `batches` batches that are
    // `stride` apart.
    __device__ void fill(const Storage* initial, unsigned batches, i64 stride, unsigned dim) {
        __syncthreads();
        for (unsigned i = threadIdx.x; i < WORDS; i += THREADS) {
            const unsigned in_tile = i / (STRIDE / PER), unit = i % (STRIDE / PER) * PER;
            const bool there = unit < dim;
            memory.rows[number % 2][i] =
                initial && there && in_tile < batches
                    ? *reinterpret_cast<const uint4*>(initial + in_tile * stride + unit)
                    : make_uint4(0, 0, 0, 0);
            if (!there) memory.rows[1 - number % 2][i] = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }
    // The next round, once every warp has given h of its units, in all batches, if `there` are any.
    __device__ void exchange(Pair h, bool there, const LanePosition& at) {
        number++;
        uint4* const rows = memory.rows[number % 2];
#if CLUSTER == 1
        if (there) reinterpret_cast<Pair*>(rows)[(at.in_tile * STRIDE + at.unit) / 2] = h;
        __syncthreads();
#else
        static_assert(sizeof(Pair) == 4, "four lanes have a word of 16 bytes");
        const Shared arrivals = shared_address(&memory.arrivals[number % 2]);
        const unsigned first = at.lane & ~12u;
        const uint4 words = make_uint4(__shfl_sync(~0u, h, first), __shfl_sync(~0u, h, first + 4),
                                       __shfl_sync(~0u, h, first + 8), __shfl_sync(~0u, h, first + 12));
        const Shared to = shared_address(rows + (at.in_tile * STRIDE + at.first) / PER);
#pragma unroll
        for (unsigned rank = at.pair; rank < CLUSTER; rank += 4)
            if (rank < blocks) send(address_in(rank, to), words, address_in(rank, arrivals));
        await_bytes(arrivals, (number - 1) / 2 % 2);
        if (threadIdx.x == 0) expect_bytes(arrivals, bytes);
#endif
    }
};
