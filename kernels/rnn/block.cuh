// How a CTA is divided, what it keeps of R, and its share of a product with R.
//
// The CTAs of a group work on one head and TILE batches, through the whole sequence. Each has UNITS
// hidden units, ROWS times 16 of them, and keeps the part of R that they need: `CHUNKS` chunks of every
// row in registers, `LAYERS` more in shared memory. A row is split among SPLIT warps, which take turns:
//
//                     K: previous units (backward: gates × units)
//                 chunk 0  chunk 1  …  chunk SPLIT  …
//     units  0–15  warp 0   warp ROWS    warp 0              × gates (backward: one)
//     units 16–31  warp 1   warp ROWS+1  warp 1
//
// A product's other factor, TILE rows of K values, one for each batch, is read from where it lies, a word
// of 16 bytes by each lane: batch lane / 4, and a quarter of the chunk by lane % 4. Since a product does
// not mind in which order its terms come, the words of R are those of the same lanes.
//
// In the warp's product a lane has a square of two units, 2 (lane / 4) and the next (which are rows
// lane / 4 and 8 + lane / 4 of the tensor cores' A), and two batches, 2 (lane % 4) and the next. The sums
// over a row's warps are made slot by slot: a slot is 16 units by every other batch of 8, so that a lane
// has a pair of units of one batch. Its owner, a warp, does with it what comes after the product.
//
// ROWS, SPLIT, BATCHES (times 8), CHUNKS, LAYERS and CLUSTER come from the build. If the last is 1, a CTA is
// always alone, which spares all that is needed to wait for others.
#pragma once
#include "../common/shared_memory.cuh"
#include "hidden_state_exchange.cuh"

enum : int { WARPS = ROWS * SPLIT, THREADS = 32 * WARPS };
enum : unsigned { UNITS = 16 * ROWS, TILE = 8 * BATCHES };
enum : int { SLOTS = ROWS * BATCHES * 2 };
// Whether what a step needs of memory is loaded a step ahead; else, when it is needed, from the L2 cache.
enum : bool { LOAD_AHEAD = !Element::EXACT };
enum : int { OWN = SPLIT == 1 ? 2 * BATCHES : (SLOTS + WARPS - 1) / WARPS };

struct Place {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned quad = lane / 4, in_quad = lane % 4;
    const unsigned row = warp % ROWS, part = warp / ROWS;

    // The number of the k-th slot that the warp owns; SLOTS or more for none.
    __device__ unsigned slot(int k) const { return SPLIT == 1 ? warp * OWN + k : warp + WARPS * k; }
};

// A group of CTAs, and what it works on.
struct Group {
    const unsigned dim, heads, batch;
    const unsigned members = (dim + UNITS - 1) / UNITS, tiles = (batch + TILE - 1) / TILE;
    const unsigned number = blockIdx.x / members, at_once = gridDim.x / members;
    const unsigned first_unit = blockIdx.x % members * UNITS;
    unsigned work = number, head = 0, first_batch = 0;

    __device__ bool alone() const { return CLUSTER == 1 || (ROWS > 1 && members == 1); }
    // Whether there is more to work on.
    __device__ bool begins() {
        if (work >= heads * tiles) return false;
        head = work / tiles;
        first_batch = work % tiles * TILE;
        return true;
    }
    __device__ void advance() { work += at_once; }
};

// One of the slots that a thread's warp owns: its lane's pair of units, and its batch.
struct Slot {
    bool there, live;       // has units, the same for the warp; and a batch
    unsigned unit, in_tile, batch;
    unsigned offset;        // of the pair in (heads, dim)

    __device__ void place(const Place& at, const Group& group, int k) {
        const unsigned slot = at.slot(k);
        const unsigned row = slot / (2 * BATCHES);
        in_tile = slot / 2 % BATCHES * 8 + 2 * at.in_quad + slot % 2;
        there = slot < SLOTS && group.first_unit + 16 * row < group.dim;
        unit = group.first_unit + 16 * row + 2 * at.quad;
        batch = group.first_batch + in_tile;
        live = there && batch < group.batch;
        offset = group.head * group.dim + unit;
    }
};

// The part of R that a thread keeps: of each chunk, and each of TILES tiles of 16 rows, a word of 16 bytes
// of two rows, as the tensor cores take them.
template <int TILES, int HELD, int STORED>
struct Weights {
    uint4 in_registers[HELD][TILES][2];

    __device__ static uint4* stored(int chunk, int tile, int half) {
        return reinterpret_cast<uint4*>(dynamic_shared()) +
               ((chunk * TILES + tile) * 2 + half) * THREADS + threadIdx.x;
    }
    __device__ uint4 operand(int chunk, int tile, int half) const {
        return chunk < HELD ? in_registers[chunk < HELD ? chunk : 0][tile][half]
                            : *stored(chunk - HELD, tile, half);
    }
    // `load` is called with a chunk's number, a tile and the words of two rows to fill in.
    template <class Load>
    __device__ void load(Load load) {
        uint4 top, bottom;
#pragma unroll
        for (int c = 0; c < HELD; c++)
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                load(c, m, top, bottom);
                in_registers[c][m][0] = make_uint4(top.x, bottom.x, top.y, bottom.y);
                in_registers[c][m][1] = make_uint4(top.z, bottom.z, top.w, bottom.w);
            }
#pragma unroll 1
        for (int c = 0; c < STORED; c++)
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                load(HELD + c, m, top, bottom);
                *stored(c, m, 0) = make_uint4(top.x, bottom.x, top.y, bottom.y);
                *stored(c, m, 1) = make_uint4(top.z, bottom.z, top.w, bottom.w);
            }
    }
};

// The other factor of a product.
struct Factor {
    const Storage* first;  // of the group's first batch
    unsigned stride;       // from batch to batch
    bool awaited;          // published by other CTAs

    __device__ const uint4* words(unsigned batch, unsigned value) const {
        return reinterpret_cast<const uint4*>(first + i64(batch) * stride + value);
    }
};

// A warp's share of the product, in CHAINS sums that do not wait for each other.
template <int TILES, int HELD, int STORED>
struct Product {
    enum : int {
        CHAINS = TILES >= 3 ? 1 : 4 / TILES,
        // Words under way at a time: as many as there are registers for.
        MOST = (Element::EXACT ? (TILES > 1 ? 4 : 6) : ROWS > 1 ? 8 : 12) / BATCHES,
        COUNT = HELD + STORED,
        WINDOW = COUNT < MOST ? COUNT : MOST,
        STRIDE = SPLIT * 4,  // of them from one chunk to the next
    };
    float sums[CHAINS][BATCHES][TILES][4];

    __device__ void clear() {
#pragma unroll
        for (int chain = 0; chain < CHAINS; chain++)
#pragma unroll
            for (int n = 0; n < BATCHES; n++)
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[chain][n][m][i] = 0;
    }

    // `values` of each row of `factor`, of which there are `batches`, awaited with `backoff`.
    __device__ void add(const Weights<TILES, HELD, STORED>& weights, const Factor& factor,
                        unsigned values, unsigned batches, AdaptiveBackoff& backoff,
                        const Place& at) {
        const int mine = int(values) - int(at.part * CHUNK);
        const int chunks = chunks_in(mine), words = chunks_in(mine - int(at.in_quad * PER));
#pragma unroll
        for (int first = 0; first < COUNT; first += WINDOW) {
            if (first > 0 && first >= chunks) break;
            uint4 columns[BATCHES][WINDOW];
#pragma unroll
            for (int n = 0; n < BATCHES; n++) {
                const unsigned batch = 8 * n + at.quad;
                const uint4* const from =
                    factor.words(batch, at.part * CHUNK + at.in_quad * PER) + first * STRIDE;
                const int count = batch < batches ? words - first : 0;
                if (CLUSTER == 0 && factor.awaited) await<WINDOW, STRIDE>(columns[n], from, count, backoff);
                else read<WINDOW, STRIDE>(columns[n], from, count);
            }
#pragma unroll
            for (int c = first; c < first + WINDOW && c < COUNT; c++) {
                if (c >= chunks) break;
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const uint4 first_half = weights.operand(c, m, 0);
                    const uint4 second_half = weights.operand(c, m, 1);
#pragma unroll
                    for (int n = 0; n < BATCHES; n++) {
                        const uint4 column = columns[n][c - first];
                        Element::multiply(sums[2 * c % CHAINS][n][m], first_half,
                                          make_uint2(column.x, column.y));
                        Element::multiply(sums[(2 * c + 1) % CHAINS][n][m], second_half,
                                          make_uint2(column.z, column.w));
                    }
                }
            }
        }
    }

    // The sums over all warps of a row, for the slots that this one owns. `round` counts the calls. A
    // barrier for the CTA, unless it would be of no use to one that is alone.
    __device__ void gather(float2 (&total)[OWN][TILES], unsigned round, const Place& at, bool alone) {
        if constexpr (SPLIT == 1) {
            if (!alone) __syncthreads();
#pragma unroll
            for (int k = 0; k < OWN; k++)
#pragma unroll
                for (int m = 0; m < TILES; m++) total[k][m] = pair(k / 2, m, k % 2);
        } else {
            // Of two rounds: whoever is a round ahead of a warp that still reads is held up by the barrier.
            __shared__ float2 parts[2][SPLIT][SLOTS][TILES][32];
#pragma unroll
            for (int n = 0; n < BATCHES; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int m = 0; m < TILES; m++)
                        parts[round % 2][at.part][(at.row * BATCHES + n) * 2 + i][m][at.lane] =
                            pair(n, m, i);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                if (at.slot(k) >= SLOTS) continue;
                const auto of = [&](int part, int m) {
                    return parts[round % 2][part][at.slot(k)][m][at.lane];
                };
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    total[k][m] = of(0, m);
#pragma unroll
                    for (int part = 1; part < SPLIT; part++) {
                        const float2 x = of(part, m);
                        total[k][m] = make_float2(total[k][m].x + x.x, total[k][m].y + x.y);
                    }
                }
            }
        }
    }

private:
    // How many of the row's chunks that this warp has begin before `values` of its part.
    __device__ static int chunks_in(int values) {
        return values <= 0 ? 0 : (values + int(SPLIT * CHUNK) - 1) / int(SPLIT * CHUNK);
    }
    __device__ float2 pair(int n, int m, int i) const {
        float2 x = make_float2(sums[0][n][m][i], sums[0][n][m][i + 2]);
#pragma unroll
        for (int chain = 1; chain < CHAINS; chain++) {
            x.x += sums[chain][n][m][i];
            x.y += sums[chain][n][m][i + 2];
        }
        return x;
    }
};

// Where the values of a lone CTA's rows are: in its shared memory, of two rounds. A CTA of 16 units is
// never said to be alone, but reads what it publishes: there is no room for it to be any better.
template <int VALUES>
struct Local {
    // An odd number of half cache lines: two rows side by side are in different banks.
    enum : unsigned { STRIDE = (VALUES + 8 * PER - 1) / (8 * PER) * (8 * PER) + 4 * PER };

    __device__ static Storage* at(unsigned round) {
        __shared__ uint4 rows[2][TILE * STRIDE / PER];
        return reinterpret_cast<Storage*>(rows[round % 2]);
    }
};
