// The forward pass where a cluster holds a head, see clustered.cuh. Its CTAs run together by themselves,
// and work on as many heads and tiles of batches as there are, one after the other.
#pragma once
#include "clustered.cuh"

enum : int { PREFETCH_STEPS = 8 };

// What a step makes of a pair of units, stored while the next step waits for its product.
struct Made {
    Pair states[Cell::STATES], kept[at_least_one(Cell::KEPT)];
};

// Inputs of the CTA's units are brought to the L2 cache several steps ahead, a line by each of its
// first threads.
struct PrefetchLine {
    enum : unsigned { OF_LINE = 128 / sizeof(Storage) };
    enum : unsigned { LINES = (UNITS + OF_LINE - 1) / OF_LINE, ALL = LINES * TILE * Cell::INPUTS };
    static_assert(ALL <= THREADS, "a thread has one line");
    const unsigned batch = threadIdx.x / LINES % TILE, gate = threadIdx.x / (LINES * TILE);
    const unsigned unit = blockIdx.x % CLUSTER * UNITS + threadIdx.x % LINES * OF_LINE;
};

// initial, reset (batch, time) and cache may be null; no workspace is needed.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
rnn_sequence_forward(
    const Storage* __restrict__ inputs, const Storage* __restrict__ recurrent,
    const float* __restrict__ bias, const Storage* __restrict__ initial,
    const unsigned char* __restrict__ reset, Storage* __restrict__ states, Storage* __restrict__ cache, void*,
    i64 batch, i64 time, i64 heads, i64 dim, i64 forward_clip,
    i64 inputs_batch, i64 inputs_time, i64 states_state, i64 states_batch, i64 states_time,
    i64 cache_batch, i64 cache_time) {
    __shared__ Rounds::Memory memory;
    Rounds rounds(memory, unsigned(dim));
    const LanePosition at;
    const PrefetchLine line;
    const bool there = at.first < unsigned(dim);
    const unsigned tiles = (unsigned(batch) + TILE - 1) / TILE;
    const i64 block_of = heads * dim;  // elements of all heads' units
    const float clip = __uint_as_float(unsigned(forward_clip));
    Weights weights;

    for (unsigned work = blockIdx.x / CLUSTER; work < unsigned(heads) * tiles;
         work += gridDim.x / CLUSTER) {
        const unsigned head = work / tiles, first_batch = work % tiles * TILE;
        const unsigned batches = unsigned(batch) - first_batch, own_batch = first_batch + at.in_tile;
        const bool live = there && at.in_tile < batches;
        const i64 of_head = i64(head) * dim, offset = of_head + at.unit;
        weights.load(recurrent, at, head, unsigned(heads), unsigned(dim));
        rounds.fill(initial ? initial + first_batch * block_of + of_head : nullptr, batches, block_of,
                    unsigned(dim));
        if (!there) {  // A warp without units does nothing but to meet the others of a CTA that is alone.
            if (CLUSTER == 1)
                for (i64 t = 1; t < time; t++) rounds.exchange(Pair{}, false, at);
            continue;
        }

        const Storage* input = inputs + own_batch * inputs_batch + offset;
        const Storage* later = inputs + (first_batch + line.batch) * inputs_batch +
                               line.gate * block_of + of_head + line.unit + PREFETCH_STEPS * inputs_time;
        const bool brings = threadIdx.x < PrefetchLine::ALL && line.batch < batches && line.unit < unsigned(dim);
        Storage* state = states + own_batch * states_batch + offset;
        Storage* keep = cache ? cache + own_batch * cache_batch + offset : nullptr;
        float biases[2][Cell::GATES], carried[2][Cell::STATES];
#pragma unroll
        for (int g = 0; g < Cell::GATES; g++)
#pragma unroll
            for (int i = 0; i < 2; i++) biases[i][g] = live ? bias[g * block_of + offset + i] : 0.f;
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++) {
            float2 x = make_float2(0, 0);
            if (initial && live) x = load_pair(initial + (s * batch + own_batch) * block_of + offset);
            carried[0][s] = x.x;
            carried[1][s] = x.y;
        }
        Pair coming[Cell::INPUTS] = {};
        bool coming_anew = false;
        Made made;
        const auto fetch = [&](i64 t) {
            coming_anew = reset && reset[own_batch * time + t];
#pragma unroll
            for (int g = 0; g < Cell::INPUTS; g++)
                coming[g] = *reinterpret_cast<const Pair*>(input + g * block_of);
            input += inputs_time;
        };
        const auto store = [&] {
#pragma unroll
            for (int s = 0; s < Cell::STATES; s++)
                *reinterpret_cast<Pair*>(state + s * states_state) = made.states[s];
            state += states_time;
            if (!keep) return;
#pragma unroll
            for (int v = 0; v < Cell::KEPT; v++)
                *reinterpret_cast<Pair*>(keep + v * block_of) = made.kept[v];
            keep += cache_time;
        };
        if (live) fetch(0);

        for (i64 t = 0;; t++) {
            uint4 h[CHUNKS];
            rounds.read(h, at);
            if (t > 0 && live) store();
            float x[2][Cell::INPUTS], r[2][GATES], kept[2][at_least_one(Cell::KEPT)];
#pragma unroll
            for (int g = 0; g < Cell::INPUTS; g++) {
                const float2 pair = widen(coming[g]);
                x[0][g] = pair.x, x[1][g] = pair.y;
            }
            const bool more = t + 1 < time, anew = coming_anew;
            if (live && more) fetch(t + 1);
            if (brings && t + PREFETCH_STEPS < time) prefetch(later);
            later += inputs_time;

            weights.multiply(r, h, at, unsigned(dim));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (reset && anew) start_anew(r[i], carried[i]);
                Cell::forward(r[i], x[i], biases[i], carried[i], kept[i]);
                carried[i][0] = clipped(carried[i][0], clip);
            }
#pragma unroll
            for (int s = 0; s < Cell::STATES; s++)
                made.states[s] = Element::narrow(make_float2(carried[0][s], carried[1][s]));
#pragma unroll
            for (int v = 0; v < Cell::KEPT; v++)
                made.kept[v] = Element::narrow(make_float2(kept[0][v], kept[1][v]));
            if (!more) break;
            rounds.exchange(live ? made.states[0] : Pair{}, there, at);
        }
        if (live) store();
    }
    rounds.end();
}
