// The order in which a scan takes time steps (a walk), and where it starts and ends: the states before and after it, and
// the sequences that are packed along time.
//
// A walk takes time steps in order 0, 1, … time-1, forwards or backwards in time. Sequences are numbered in that
// order, too.
#pragma once
#include "../linear_scan/line.cuh"
#include "../linear_scan/step.cuh"

// The states of one line's sequences, before or after them; null where there are none.
struct Boundary {
    State* first;
    i64 stride;  // from sequence to sequence

    __device__ State read(i64 sequence) const {
        return first ? first[sequence * stride] : State(0);
    }
    __device__ void write(i64 sequence, State x) const {
        if (first) first[sequence * stride] = x;
    }
};

// Which steps of a run are the first and the last of their packed sequences: one bit each, and for
// those steps where in memory the states of that sequence are.
struct Places {
    int of_first, of_last;
};
struct Marks {
    unsigned starts = 0, ends = 0;
    const Places* places = nullptr;

    __device__ bool starts_at(int i) const { return starts >> i & 1; }
    __device__ bool ends_at(int i) const { return ends >> i & 1; }
};

struct Walk {
    i64 time;
    bool against;
    const i64* offsets;
    i64 count;  // of packed sequences; 0 if the walk is one scan

    __device__ Walk(i64 time, bool against, const i64* offsets, i64 count)
        : time(time), against(against), offsets(offsets), count(count) {}

    __device__ bool varlen() const { return VARLEN || (!ALIGNED && count > 0); }

    // Time of a step, and distance in memory from one step to the next.
    __device__ i64 at(i64 order) const { return against ? time - 1 - order : order; }
    __device__ i64 step(i64 stride) const { return against ? -stride : stride; }

    // Order of a sequence's first step; for `count`, the order after the last one's last.
    __device__ i64 begin(i64 number) const {
        return against ? time - offsets[count - number] : offsets[number];
    }

    // Number of the sequence that holds a step: the last that begins no later. Whatever the offsets
    // are, it is one of those there are.
    __device__ i64 number(i64 order) const {
        i64 low = 0, high = count;
#pragma unroll 1
        while (high - low > 1) {
            const i64 middle = low + (high - low) / 2;
            if (begin(middle) <= order) low = middle;
            else high = middle;
        }
        return low;
    }

    // Where in memory the states of a sequence are.
    __device__ int index(i64 number) const {
        return int(against ? count - 1 - number : number);
    }

    // The marks of the steps [order, order + steps), at most 32. `places` is room for as many, in
    // shared memory, which takes an index that registers do not; threads that share it agree.
    __device__ Marks marks(i64 order, int steps, Places* places) const {
        Marks found;
        if (!varlen()) return found;
        found.places = places;
        i64 n = number(order), first = begin(n);
#pragma unroll 1
        for (; n < count && first < order + steps; n++) {
            const i64 next = begin(n + 1), last = next - 1;
            if (first < next && first >= order) {
                found.starts |= 1u << (first - order);
                places[first - order].of_first = index(n);
            }
            if (first < next && last >= order && last < order + steps) {
                found.ends |= 1u << (last - order);
                places[last - order].of_last = index(n);
            }
            first = next;
        }
        return found;
    }
};

// The affine map of step i of a run. A packed sequence starts from the state before it (forward) or the gradient after it
// (backward), whatever the run's state is.
__device__ inline Step forward_map(State gate, State token, int i, const Marks& marks, const Boundary& before) {
    const Step step = ForwardStep::map(gate, token);
    if (marks.starts_at(i)) return {State(0), step.scale * before.read(marks.places[i].of_first) + step.shift};
    return step;
}
__device__ inline Step backward_map(State gate, State grad, int i, const Marks& marks, const Boundary& after_grad) {
    if (marks.starts_at(i)) {
        const State h = after_grad.read(marks.places[i].of_first);
        return {State(0), BackwardStep::gradients(gate, grad, State(0), h).earlier};
    }
    return BackwardStep::map(gate, grad);
}
