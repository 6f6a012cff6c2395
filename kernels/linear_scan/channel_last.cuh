// Channels contiguous: what the forward and the backward kernel share.
//
// The build pins WARPS (per block), LANES (threads side by side along the channels), VECTOR
// (channels per thread) and STEPS. A block takes one tile, which it holds in registers, so that time
// is split over many blocks:
//
//               channels ->   LANES × VECTOR
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               SLOTS = 32 × WARPS / LANES
//
// Order runs with time in the forward scan and against it in the backward scan. Along it, a thread
// composes its rows' maps, a warp scans its slots, and the first threads of the block (the spine,
// one per channel) chain the warps' totals onto the state that the tile before published. The tile
// index comes from a counter, so a tile's predecessor is always running or done.
//
// workspace, zeroed before the launch: a counter in its first 16 bytes, then for each tile in time
// and each channel of each column one word: the state that leaves the tile, and a mark above it.
// Value and mark travel in one 8-byte store, so they need no fence. A problem of one tile in time
// passes null.
#pragma once
#include "affine.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int SLOTS_PER_WARP = 32 / LANES;
constexpr int CHANNELS = LANES * VECTOR;
constexpr int TIMES = WARPS * SLOTS_PER_WARP * STEPS;
static_assert(32 % LANES == 0 && CHANNELS <= THREADS, "a channel needs a thread of the spine");

struct Position {
    i64 index;    // of the tile along its order
    i64 column;   // of tiles: batch * column tiles + column tile
    i64 batch;
    i64 channel;  // first one of this thread
    i64 first;    // order of this thread's first row
    int warp, lane;

    __device__ Position(u64* workspace, i64 batches, i64 channels) {
        i64 tile = blockIdx.x;
        if (workspace) {
            __shared__ unsigned ticket;
            if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(workspace), 1u);
            __syncthreads();
            tile = ticket;
        }
        const i64 across = (channels + CHANNELS - 1) / CHANNELS;
        index = tile / (batches * across);
        column = tile % (batches * across);
        batch = column / across;
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        channel = column % across * CHANNELS + lane % LANES * VECTOR;
        first = index * TIMES + (warp * SLOTS_PER_WARP + lane / LANES) * STEPS;
    }
};

struct Spine {
    Affine total[WARPS][CHANNELS];
    State entering[WARPS][CHANNELS];
};

__device__ inline void publish(u64* word, State x) {
    const u64 value = (u64(1) << 32) | __float_as_uint(x);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline State await(const u64* word) {
    u64 value;
    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    } while (value >> 32 == 0);
    return __uint_as_float(unsigned(value));
}

// The state that enters this thread's rows, for each of its channels. `rows` holds the maps of the
// thread's own rows, `initial` (null or one per batch and channel) the state before all tiles, and
// `last` (null or likewise) takes the state after them.
__device__ inline void enter_rows(Affine (&rows)[VECTOR], State (&entering)[VECTOR],
                                  const Position& at, u64* workspace, i64 batches, i64 channels,
                                  i64 time, const Storage* initial, Storage* last) {
    __shared__ Spine spine;
    Affine before[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        before[v] = exclusive_scan<LANES>(rows[v], at.lane);
        if (at.lane >= 32 - LANES) spine.total[at.warp][at.lane % LANES * VECTOR + v] = rows[v];
    }
    __syncthreads();

    if (threadIdx.x < CHANNELS) {
        const i64 across = (channels + CHANNELS - 1) / CHANNELS;
        const i64 c = at.column % across * CHANNELS + threadIdx.x;
        const i64 state_index = at.batch * channels + c;
        u64* const words = workspace + 2 + at.column * CHANNELS + threadIdx.x;
        const i64 pitch = batches * across * CHANNELS;

        Affine total;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total = then(total, spine.total[w][threadIdx.x]);
        State x = State(0);
        if (at.index > 0) x = await(words + (at.index - 1) * pitch);
        else if (initial && c < channels) x = Element::widen(initial[state_index]);

        const bool is_last = (at.index + 1) * TIMES >= time;
        if (!is_last) publish(words + at.index * pitch, total(x));
        else if (last && c < channels) last[state_index] = narrow(total(x));
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            spine.entering[w][threadIdx.x] = x;
            x = spine.total[w][threadIdx.x](x);
        }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VECTOR; v++)
        entering[v] = before[v](spine.entering[at.warp][at.lane % LANES * VECTOR + v]);
}
