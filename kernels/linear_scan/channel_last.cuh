// Channels contiguous: what the forward and the backward kernel share.
//
// The build pins WARPS (per CTA), LANES (threads side by side along the channels), VECTOR
// (channels per thread) and STEPS. A CTA takes one tile, which it holds in registers, so that time
// is split over many CTAs:
//
//               channels ->   LANES × VECTOR
//      order  slot 0          | STEPS rows, one after the other in a thread |
//        |    slot 1          | STEPS rows                                  |
//        v    …               SLOTS = 32 × WARPS / LANES
//
// Order runs in the direction of the scan, with time or against it. A thread composes the affine maps of its rows, a
// warp scans its slots, and the first threads of the CTA (the spine, one per channel) apply the
// warps' totals to the state that the tile before published. The tile index comes from a counter,
// so a tile's predecessor is always running or done.
//
// workspace, zeroed before the launch: a counter in its first 16 bytes, then two halves, one for even and one for odd
// tiles in time. A half holds, for each channel of each column, the state that leaves such a tile, and its error term. Each
// 32 bits of them have a 64-bit word, whose upper half is the tile's number. Value and number are written by one 8-byte
// store, so they need no fence. Tile n writes over the state of tile n - 2. By then tile n - 1 has read that state: it read
// it before it published its own, and tile n has waited for that. A problem of one tile in time passes null.
#pragma once
#include "../common/global_memory.cuh"
#include "../linear_scan/sequences.cuh"

enum : int {
    THREADS = 32 * WARPS,
    SLOTS_PER_WARP = 32 / LANES,
    CHANNELS = LANES * VECTOR,
    TIMES = WARPS * SLOTS_PER_WARP * STEPS,
    BLOCKS = LEAST_BLOCKS,
    STATE_WORDS = sizeof(State) / 4,
    CARRIED_WORDS = (COMPENSATED ? 2 : 1) * STATE_WORDS,
};
static_assert(32 % LANES == 0 && CHANNELS <= THREADS, "a channel needs a thread of the spine");

struct Position {
    i64 index;    // of the tile along its order
    i64 column;   // of tiles: (outer * batch) * column tiles + column tile
    i64 outer, batch;
    i64 tile_channel, channel;  // first one of the tile, and of this thread
    i64 first;    // order of this thread's first row
    i64 columns;  // how many there are
    int warp, lane;

    __device__ Position(u64* workspace, i64 outers, i64 batches, i64 channels) {
        i64 tile = blockIdx.x;
        if (workspace) {
            __shared__ unsigned ticket;
            if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(workspace), 1u);
            __syncthreads();
            tile = ticket;
        }
        const i64 columns_across = (channels + CHANNELS - 1) / CHANNELS;
        columns = outers * batches * columns_across;
        index = tile / columns;
        column = tile % columns;
        outer = 0;
        batch = column / columns_across;
        if constexpr (!ALIGNED) outer = batch / batches, batch %= batches;
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        tile_channel = column % columns_across * CHANNELS;
        channel = tile_channel + lane % LANES * VECTOR;
        first = index * TIMES + (warp * SLOTS_PER_WARP + lane / LANES) * STEPS;
    }

    // Of this batch in a tensor with these strides.
    __device__ i64 offset(i64 by_outer, i64 by_batch) const {
        return outer * by_outer + batch * by_batch;
    }
};

// A thread's rows of a tensor: VECTOR channels at each of the orders first, first + 1, …
template <class E>
struct Rows {
    typename E::Storage* row;  // the first one
    i64 to_next, by_channel, channel, channels;
    i64 count;  // rows before the walk's end

    __device__ Rows(const typename E::Storage* batch, i64 by_channel, i64 by_time, i64 channels,
                    const Position& at, const Walk& walk)
        : row(const_cast<typename E::Storage*>(batch) + walk.at(at.first) * by_time),
          to_next(walk.step(by_time)),
          by_channel(ALIGNED ? 1 : by_channel),
          channel(at.channel),
          channels(channels),
          count(walk.time - at.first) {}

    __device__ Chunk<E, VECTOR> load(int k, typename E::Storage outside) const {
        return ::load<VECTOR>(Line<E>{row + k * to_next, by_channel}, channel,
                              k < count ? channels : 0, outside);
    }

    __device__ void store(int k, const Chunk<E, VECTOR>& chunk) const {
        ::store(Line<E>{row + k * to_next, by_channel}, channel, k < count ? channels : 0, chunk);
    }
};

// Where the marks of a thread's rows are kept. The threads of a slot have the same rows, and share these places.
__device__ inline Places* own_places() {
    if constexpr (ALIGNED) return nullptr;
    __shared__ Places places[ALIGNED ? 1 : TIMES];
    return places + (threadIdx.x / LANES) * STEPS;
}

struct Spine {
    Affine total[WARPS][CHANNELS];
    State entering[WARPS][CHANNELS];
};

__device__ inline void publish(u64* words, unsigned tile, State x) {
    const auto bits = Element::Whole::narrow(x);
#pragma unroll
    for (int w = 0; w < STATE_WORDS; w++) {
        const u64 value = u64(tile) << 32 | unsigned(u64(bits) >> (32 * w));
        store_relaxed(words + w, value);
    }
}

// All tiles of a column watch the same words. Those whose turn is far off look rarely: the looks of a
// thousand CTAs at one line would take a hundred times longer than a tile.
__device__ inline u64 await_word(const u64* word, unsigned tile) {
    while (true) {
        const u64 value = load_relaxed(word);
        const unsigned before = tile - unsigned(value >> 32);
        if (before == 0) return value;
        if (before > 2) __nanosleep(256 * (before < 200 ? before : 200));
    }
}

__device__ inline State await(const u64* words, unsigned tile) {
    u64 bits = 0;
#pragma unroll
    for (int w = 0; w < STATE_WORDS; w++) {
        const u64 value = await_word(words + w, tile);
        bits |= u64(unsigned(value)) << (32 * w);
    }
    return Element::Whole::widen(typename Element::Whole::Storage(bits));
}

__device__ inline void publish(u64* words, unsigned tile, RunningPrefix carried) {
    publish(words, tile, carried.x);
    if constexpr (COMPENSATED) publish(words + STATE_WORDS, tile, carried.error_term);
}

__device__ inline RunningPrefix await_carried(const u64* words, unsigned tile) {
    const State x = await(words, tile);
    if constexpr (!COMPENSATED) return x;
    return {x, await(words + STATE_WORDS, tile)};
}

// The state that enters this thread's rows, for each of its channels. `rows` holds the maps of the
// thread's own rows. Unless sequences are packed, `before` (null or one per channel) is the state
// before all tiles, and `after` (null or likewise) takes the state after them.
__device__ inline void enter_rows(Affine (&rows)[VECTOR], State (&entering)[VECTOR],
                                  const Position& at, const Walk& walk, u64* workspace,
                                  i64 channels, const State* before, State* after,
                                  i64 state_channel) {
    __shared__ Spine spine;
    Affine before_slot[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        before_slot[v] = exclusive_scan<LANES>(rows[v], at.lane);
        if (at.lane >= 32 - LANES) spine.total[at.warp][at.lane % LANES * VECTOR + v] = rows[v];
    }
    __syncthreads();

    if (threadIdx.x < CHANNELS) {
        const i64 c = at.tile_channel + threadIdx.x;
        const bool with_state = c < channels && !walk.varlen();
        u64* const words = workspace + 2 + (at.column * CHANNELS + threadIdx.x) * CARRIED_WORDS;
        const i64 slot = at.columns * CHANNELS * CARRIED_WORDS;
        const unsigned tile = unsigned(at.index) + 1;  // its number: a slot holds 0 before the first

        Affine total;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total = compose(total, spine.total[w][threadIdx.x]);
        RunningPrefix carried;
        if (at.index > 0) carried = await_carried(words + (tile & 1) * slot, tile - 1);
        else if (before && with_state) carried = before[c * state_channel];

        const bool is_last = (at.index + 1) * TIMES >= walk.time;
        if (!is_last) publish(words + (~tile & 1) * slot, tile, total(carried));
        else if (after && with_state) after[c * state_channel] = total(carried).x;
        State x = carried.x;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            spine.entering[w][threadIdx.x] = x;
            x = spine.total[w][threadIdx.x](x);
        }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VECTOR; v++)
        entering[v] = before_slot[v](spine.entering[at.warp][at.lane % LANES * VECTOR + v]);
}
