// A recurrent network over a whole sequence, in one launch: for each head, batch and time
//     h[t], … = cell(inputs[t], R·h[t-1] + b, …)
//
// R stays where a CTA keeps its part of it, see block.cuh; what the CTAs of a group tell each other is
// h, see hidden_state_exchange.cuh: in a step, a warp waits for the words of h[t-1] that meet its part of R,
// multiplies, and the owners of the slots add up, compute h[t] of their units and publish it. Inputs
// come a step ahead from the L2 cache and several steps ahead from memory. All CTAs have to be running
// at the same time; they work on as many groups as there are, one after the other.
//
// Where `reset` has a byte that is not 0, the states of its batch start from zeros at its step. The product with
// R is made all the same, and of no account: a batch's terms come from its own h alone.
//
// Where a cluster of CTAs holds a whole head, all that is in clustered_forward.cuh; where a CTA works on one sequence, in
// matrix_vector_forward.cuh.
#if BATCHES == 0
#include "matrix_vector_forward.cuh"
#elif CLUSTER
#include "clustered_forward.cuh"
#else
#include "block.cuh"
#include "cells.cuh"

enum : int { GATES = Cell::RECURRENT, PREFETCH_STEPS = 8 };
using Matrix = Weights<GATES, CHUNKS, LAYERS>;

// A row of R: words of consecutive previous units.
struct Rows {
    const Storage* recurrent;
    const Group& group;
    const Place& at;

    __device__ void operator()(int chunk, int gate, uint4& top, uint4& bottom) const {
        const unsigned unit = group.first_unit + 16 * at.row + 2 * at.quad;
        const unsigned value = (at.part + SPLIT * chunk) * CHUNK + at.in_quad * PER;
        top = bottom = make_uint4(0, 0, 0, 0);
        if (unit >= group.dim || value >= group.dim) return;
        const i64 row = (i64(gate) * group.heads + group.head) * group.dim + unit;
        const Storage* const from = recurrent + row * group.dim + value;
        top = words(reinterpret_cast<const unsigned*>(from));
        bottom = words(reinterpret_cast<const unsigned*>(from + group.dim));
    }
    // One by one: were they loaded at once, the registers would be in the wrong order for the tensor
    // cores, and be put in order at every step.
    __device__ static uint4 words(const unsigned* from) {
        return make_uint4(from[0], from[1], from[2], from[3]);
    }
};

// What a thread has of one of its slots.
struct Unit : Slot {
    const Storage* inputs;
    Storage *states, *cache;
    Pair coming[Cell::INPUTS];
    bool anew;  // at the step whose inputs are coming
    float bias[2][Cell::GATES];
    float carried[2][Cell::STATES];
};

// initial, reset (batch, time), cache and workspace may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_sequence_forward(
    const Storage* __restrict__ inputs, const Storage* __restrict__ recurrent,
    const float* __restrict__ bias, const Storage* __restrict__ initial,
    const unsigned char* __restrict__ reset, Storage* __restrict__ states, Storage* __restrict__ cache, void* workspace,
    i64 batch, i64 time, i64 heads, i64 dim, i64 forward_clip,
    i64 inputs_batch, i64 inputs_time, i64 states_state, i64 states_batch, i64 states_time,
    i64 cache_batch, i64 cache_time) {
    const Place at;
    Group group{unsigned(dim), unsigned(heads), unsigned(batch)};
    const bool alone = group.alone();
    const i64 block_of = heads * dim;  // elements of all heads' units
    const float clip = __uint_as_float(unsigned(forward_clip));
    Ring ring(workspace, group.number, TILE * group.dim);
    unsigned round = 0;
    Matrix weights;
    Unit units[OWN];
    AdaptiveBackoff backoff;

    const auto fetch = [&](Unit& unit, i64 t) {
        unit.anew = reset && reset[unit.batch * time + t];
#pragma unroll
        for (int g = 0; g < Cell::INPUTS; g++)
            unit.coming[g] = *reinterpret_cast<const Pair*>(unit.inputs + g * block_of);
    };

    for (; group.begins(); group.advance()) {
        weights.load(Rows{recurrent, group, at});
#pragma unroll
        for (int k = 0; k < OWN; k++) {
            Unit& unit = units[k];
            unit.place(at, group, k);
            unit.inputs = inputs + unit.batch * inputs_batch + unit.offset;
            unit.states = states + unit.batch * states_batch + unit.offset;
            unit.cache = cache ? cache + unit.batch * cache_batch + unit.offset : nullptr;
#pragma unroll
            for (int g = 0; g < Cell::GATES; g++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    unit.bias[i][g] = unit.live ? bias[g * block_of + unit.offset + i] : 0.f;
#pragma unroll
            for (int s = 0; s < Cell::STATES; s++) {
                float2 x = make_float2(0, 0);
                if (initial && unit.live)
                    x = load_pair(initial + (s * batch + unit.batch) * block_of + unit.offset);
                unit.carried[0][s] = x.x;
                unit.carried[1][s] = x.y;
            }
            if (LOAD_AHEAD && unit.live) fetch(unit, 0);
        }
        Factor factor{initial + group.first_batch * block_of + group.head * dim, unsigned(block_of),
                      false};

        for (i64 t = 0; t < time; t++, round++) {
            Product<GATES, CHUNKS, LAYERS> product;
            product.clear();
            if (t > 0 || initial)
                product.add(weights, factor, group.dim, group.batch - group.first_batch, backoff, at);
            float2 terms[OWN][GATES];
            product.gather(terms, round, at, alone);
            backoff.begin();

            const bool more = t + 1 < time;
            if (alone) factor = {Local<UNITS>::at(round), Local<UNITS>::STRIDE, false};
            else factor = {ring.at(ring.published), group.dim, true};
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                Unit& unit = units[k];
                if (!unit.live) continue;
                if (!LOAD_AHEAD) fetch(unit, t);
                float x[2][Cell::INPUTS], r[2][GATES], kept[2][at_least_one(Cell::KEPT)];
#pragma unroll
                for (int g = 0; g < Cell::INPUTS; g++) {
                    const float2 pair = widen(unit.coming[g]);
                    x[0][g] = pair.x, x[1][g] = pair.y;
                }
#pragma unroll
                for (int g = 0; g < GATES; g++)
                    r[0][g] = terms[k][g].x, r[1][g] = terms[k][g].y;
                if (reset && unit.anew)
#pragma unroll
                    for (int i = 0; i < 2; i++) start_anew(r[i], unit.carried[i]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float(&s)[Cell::STATES] = unit.carried[i];
                    Cell::forward(r[i], x[i], unit.bias[i], s, kept[i]);
                    s[0] = clipped(s[0], clip);
                }
                const Pair h = Element::narrow(make_float2(unit.carried[0][0], unit.carried[1][0]));
                if (more) {
                    Storage* const to =
                        const_cast<Storage*>(factor.first) + (unit.in_tile * factor.stride + unit.unit);
                    if (alone) *reinterpret_cast<Pair*>(to) = h;
                    else publish(to, h);
                }
#pragma unroll
                for (int s = 0; s < Cell::STATES; s++)
                    store_pair(unit.states + s * states_state,
                               make_float2(unit.carried[0][s], unit.carried[1][s]));
                unit.states += states_time;
                if (unit.cache) {
#pragma unroll
                    for (int v = 0; v < Cell::KEPT; v++)
                        store_pair(unit.cache + v * block_of, make_float2(kept[0][v], kept[1][v]));
                    unit.cache += cache_time;
                }
                unit.inputs += inputs_time;
                if (LOAD_AHEAD && more) fetch(unit, t + 1);
                if (at.quad == 0 && t + PREFETCH_STEPS < time)
#pragma unroll
                    for (int g = 0; g < Cell::INPUTS; g++)
                        prefetch(unit.inputs + g * block_of + (PREFETCH_STEPS - 1) * inputs_time);
            }
            if (alone) __syncthreads();
            else if (more)
                ring.advance([&](Storage* slot) {
#pragma unroll
                    for (int k = 0; k < OWN; k++)
                        if (units[k].there)
                            withdraw(slot + units[k].in_tile * dim + units[k].unit);
                });
        }
    }
}
#endif
