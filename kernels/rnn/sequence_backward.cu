// The gradients of a recurrent network, over a whole sequence in one launch, from the last step to the
// first: for each head, batch and time, with all that enters h[t] as dh[t],
//     gates_grad[t] = cell'(dh[t], …);  dh[t-1] = states_grad[t-1] + Rᵀ·gates_grad[t] + …
//
// Forward's scheme, see there: what the CTAs of a group tell each other is gates_grad, as far as R feeds
// those gates, and a CTA keeps its units' columns of R. What a step gives to the one before it, by R, too, is
// of no account where `reset` has a byte that is not 0. Where a CTA works on one sequence, all that is in
// matrix_vector_backward.cuh.
#if BATCHES == 0
#include "matrix_vector_backward.cuh"
#else
#include "block.cuh"
#include "cells.cuh"

enum : int { RECURRENT = Cell::RECURRENT, PREFETCH_STEPS = 8 };
using Matrix = Weights<1, RECURRENT * CHUNKS, RECURRENT * LAYERS>;
using Terms = Product<1, RECURRENT * CHUNKS, RECURRENT * LAYERS>;
using Rows = Local<RECURRENT * UNITS>;

// Columns of R: words of consecutive gates × new units.
struct Columns {
    const Storage* recurrent;
    const Group& group;
    const Place& at;

    __device__ void operator()(int chunk, int, uint4& top, uint4& bottom) const {
        const unsigned unit = group.first_unit + 16 * at.row + 2 * at.quad;
        const unsigned value = (at.part + SPLIT * chunk) * CHUNK + at.in_quad * PER;
        top = bottom = make_uint4(0, 0, 0, 0);
        if (unit >= group.dim || value >= RECURRENT * group.dim) return;
        unsigned gate = 0, other = value;
#pragma unroll
        for (int g = 1; g < RECURRENT; g++)
            if (other >= group.dim) other -= group.dim, gate++;
        const i64 row = (i64(gate) * group.heads + group.head) * group.dim + other;
        const Storage* const from = recurrent + row * group.dim + unit;
        Pair pairs[PER];
#pragma unroll
        for (unsigned i = 0; i < PER; i++)
            pairs[i] = *reinterpret_cast<const Pair*>(from + i64(i) * group.dim);
        top = make_uint4(firsts(pairs, 0), firsts(pairs, 1), firsts(pairs, 2), firsts(pairs, 3));
        bottom = make_uint4(seconds(pairs, 0), seconds(pairs, 1), seconds(pairs, 2), seconds(pairs, 3));
    }
    // A word of one column.
    __device__ static unsigned firsts(const Pair (&pairs)[PER], int word) {
        if constexpr (PER == 4) return first_of(pairs[word]);
        else return first_of(pairs[2 * word]) | unsigned(first_of(pairs[2 * word + 1])) << 16;
    }
    __device__ static unsigned seconds(const Pair (&pairs)[PER], int word) {
        if constexpr (PER == 4) return second_of(pairs[word]);
        else return second_of(pairs[2 * word]) | unsigned(second_of(pairs[2 * word + 1])) << 16;
    }
};

// What a step needs of a pair of units, as it lies in memory.
struct Known {
    Pair kept[at_least_one(Cell::KEPT)], before[Cell::TRACKED], given[Cell::STATES];
    bool anew;  // at this step the states started from zeros, and not from those before
};

// What a thread has of one of its slots; the pointers are to the step that is fetched next.
struct Unit : Slot {
    const Storage *cache, *before, *given;
    Storage* gates_grad;
    Known coming;
    float after[2][Cell::TRACKED], grads[2][Cell::STATES];
    bool blocked;  // the step before had a reset, which the gradients do not pass
};

// A gradient for each state, (states, batch, heads, dim); null: zeros.
__device__ inline void receive_all(Unit& unit, const Storage* from, i64 stride, int states) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float given[Cell::STATES];
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++) {
            const float2 x = s < states ? load_pair(from + s * stride) : make_float2(0, 0);
            given[s] = i ? x.y : x.x;
        }
        receive(unit.grads[i], given, unit.after[i]);
    }
}

// initial, reset (batch, time), final_grad, initial_grad and workspace may be null. recurrent_clip 0: nothing goes through R.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_sequence_backward(
    const Storage* __restrict__ recurrent, const Storage* __restrict__ states,
    const Storage* __restrict__ initial, const unsigned char* __restrict__ reset,
    const Storage* __restrict__ cache, const Storage* __restrict__ states_grad,
    const Storage* __restrict__ final_grad,
    Storage* __restrict__ gates_grad, Storage* __restrict__ initial_grad, void* workspace,
    i64 batch, i64 time, i64 heads, i64 dim, i64 graded, i64 recurrent_clip,
    i64 states_state, i64 states_batch, i64 states_time, i64 cache_batch, i64 cache_time,
    i64 states_grad_state, i64 states_grad_batch, i64 states_grad_time,
    i64 gates_grad_batch, i64 gates_grad_time) {
    const Place at;
    Group group{unsigned(dim), unsigned(heads), unsigned(batch)};
    const bool alone = group.alone();
    const i64 block_of = heads * dim, of_state = batch * block_of;
    const unsigned values = RECURRENT * group.dim;
    const float clip = __uint_as_float(unsigned(recurrent_clip));
    Ring ring(workspace, group.number, TILE * values);
    unsigned round = 0;
    Matrix weights;
    Unit units[OWN];
    AdaptiveBackoff backoff;

    const auto fetch = [&](Unit& unit, i64 t) {
        unit.coming.anew = reset && reset[unit.batch * time + t];
#pragma unroll
        for (int v = 0; v < Cell::KEPT; v++)
            unit.coming.kept[v] = *reinterpret_cast<const Pair*>(unit.cache + v * block_of);
#pragma unroll
        for (int s = 0; s < Cell::TRACKED; s++) {
            const i64 state = s + Cell::FIRST;
            const Storage* from = unit.before + state * states_state;
            if (t == 0)
                from = initial ? initial + state * of_state + i64(unit.batch) * block_of + unit.offset
                               : nullptr;
            unit.coming.before[s] = from ? *reinterpret_cast<const Pair*>(from) : Pair{};
        }
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++)
            if (s < graded)
                unit.coming.given[s] =
                    *reinterpret_cast<const Pair*>(unit.given + s * states_grad_state);
    };
    const auto prefetch_later = [&](const Unit& unit) {
#pragma unroll
        for (int v = 0; v < Cell::KEPT; v++)
            prefetch(unit.cache + v * block_of - PREFETCH_STEPS * cache_time);
#pragma unroll
        for (int s = 0; s < Cell::TRACKED; s++)
            prefetch(unit.before + (s + Cell::FIRST) * states_state - PREFETCH_STEPS * states_time);
#pragma unroll
        for (int s = 0; s < Cell::STATES; s++)
            if (s < graded) prefetch(unit.given + s * states_grad_state - PREFETCH_STEPS * states_grad_time);
    };

    for (; group.begins(); group.advance()) {
        if (clip > 0) weights.load(Columns{recurrent, group, at});
#pragma unroll
        for (int k = 0; k < OWN; k++) {
            Unit& unit = units[k];
            unit.place(at, group, k);
            unit.blocked = false;
            if (!unit.live) continue;
            const i64 last = time - 1;
            unit.cache = cache + unit.batch * cache_batch + last * cache_time + unit.offset;
            unit.before = states + unit.batch * states_batch + (last - 1) * states_time + unit.offset;
            unit.given = states_grad + unit.batch * states_grad_batch + last * states_grad_time +
                         unit.offset;
            unit.gates_grad = gates_grad + unit.batch * gates_grad_batch + last * gates_grad_time +
                              unit.offset;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int s = 0; s < Cell::STATES; s++) unit.grads[i][s] = 0;
#pragma unroll
            for (int s = 0; s < Cell::TRACKED; s++) {
                const i64 state = s + Cell::FIRST;
                const float2 x = load_pair(unit.before + states_time + state * states_state);
                unit.after[0][s] = x.x;
                unit.after[1][s] = x.y;
            }
            if (final_grad)
                receive_all(unit, final_grad + i64(unit.batch) * block_of + unit.offset, of_state,
                            Cell::STATES);
            if (LOAD_AHEAD) fetch(unit, last);
        }
        Factor factor{};

        for (i64 t = time - 1;; t--, round++) {
            float2 terms[OWN][1];
            if (t < time - 1 && clip > 0) {
                Terms product;
                product.clear();
                product.add(weights, factor, values, group.batch - group.first_batch, backoff, at);
                product.gather(terms, round, at, alone);
                backoff.begin();
#pragma unroll
                for (int k = 0; k < OWN; k++) {
                    units[k].grads[0][0] += clipped(terms[k][0].x, clip);
                    units[k].grads[1][0] += clipped(terms[k][0].y, clip);
                }
            }
            if (reset)
#pragma unroll
                for (int k = 0; k < OWN; k++)
                    if (units[k].blocked)
#pragma unroll
                        for (int s = 0; s < Cell::STATES; s++)
                            units[k].grads[0][s] = units[k].grads[1][s] = 0;
            if (t < 0) break;
            if (alone) factor = {Rows::at(round), Rows::STRIDE, false};
            else factor = {ring.at(ring.published), values, true};
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                Unit& unit = units[k];
                if (!unit.live) continue;
                if (!LOAD_AHEAD) fetch(unit, t);
                float gates[2][Cell::GATES];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float kept[at_least_one(Cell::KEPT)], before[Cell::TRACKED], given[Cell::STATES];
#pragma unroll
                    for (int v = 0; v < Cell::KEPT; v++) kept[v] = half(unit.coming.kept[v], i);
#pragma unroll
                    for (int s = 0; s < Cell::TRACKED; s++) before[s] = half(unit.coming.before[s], i);
#pragma unroll
                    for (int s = 0; s < Cell::STATES; s++)
                        given[s] = s < graded ? half(unit.coming.given[s], i) : 0.f;
                    receive(unit.grads[i], given, unit.after[i]);
                    float from[Cell::TRACKED];
#pragma unroll
                    for (int s = 0; s < Cell::TRACKED; s++)
                        from[s] = reset && unit.coming.anew ? 0.f : before[s];
                    Cell::backward(kept, from, unit.after[i], unit.grads[i], gates[i]);
#pragma unroll
                    for (int s = 0; s < Cell::TRACKED; s++) unit.after[i][s] = before[s];
                }
                unit.blocked = unit.coming.anew;
                Pair pairs[Cell::GATES];
                Storage* const to =
                    const_cast<Storage*>(factor.first) + (unit.in_tile * factor.stride + unit.unit);
#pragma unroll
                for (int g = 0; g < Cell::GATES; g++) {
                    pairs[g] = Element::narrow(make_float2(gates[0][g], gates[1][g]));
                    if (g >= RECURRENT || !(clip > 0)) continue;
                    if (alone) *reinterpret_cast<Pair*>(to + g * group.dim) = pairs[g];
                    else publish(to + g * group.dim, pairs[g]);
                }
#pragma unroll
                for (int g = 0; g < Cell::GATES; g++)
                    *reinterpret_cast<Pair*>(unit.gates_grad + g * block_of) = pairs[g];
                unit.gates_grad -= gates_grad_time;
                unit.cache -= cache_time;
                unit.before -= states_time;
                unit.given -= states_grad_time;
                if (LOAD_AHEAD && t > 0) fetch(unit, t - 1);
                if (at.quad == 0 && t > PREFETCH_STEPS + 1) prefetch_later(unit);
            }
            if (clip > 0) {
                if (alone) __syncthreads();
                else
                    ring.advance([&](Storage* slot) {
#pragma unroll
                        for (int k = 0; k < OWN; k++) {
                            if (!units[k].there) continue;
                            Storage* const own = slot + units[k].in_tile * values + units[k].unit;
#pragma unroll
                            for (int g = 0; g < RECURRENT; g++) withdraw(own + g * dim);
                        }
                    });
            }
        }
#pragma unroll
        for (int k = 0; k < OWN; k++) {
            Unit& unit = units[k];
            if (!unit.live || !initial_grad) continue;
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (!unit.blocked) release(unit.grads[i], unit.after[i]);
#pragma unroll
            for (int s = 0; s < Cell::STATES; s++)
                store_pair(initial_grad + s * of_state + i64(unit.batch) * block_of + unit.offset,
                           make_float2(unit.grads[0][s], unit.grads[1][s]));
        }
    }
}
#endif
