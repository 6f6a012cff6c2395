// Packed sequences in the tiles of warps: which steps of a tile are the first and the last of a sequence.
//
// TILE_WARPS is how many warps of a CTA have tiles, and a lane has ITEMS elements of one.
#pragma once
#include "../common/compiler.cuh"
#include "../linear_scan/sequences.cuh"

// Where 32 successive sequences begin. A warp keeps this in shared memory from tile to tile, since most tiles find there what
// begins in them, and a load from global memory takes almost as long as a tile.
struct Nearby {
    i64 begins[32];
    i64 number;  // of the first; negative before the first tile

    static __device__ Nearby& of_warp() {
        __shared__ Nearby warps[TILE_WARPS];
        return warps[threadIdx.x / 32];
    }
    // Each warp that has tiles calls this first.
    static __device__ void begin() {
        of_warp().number = -1;
        __syncwarp();
    }
    // Whether a sequence is among these.
    __device__ bool has(i64 other) const { return u64(other - number) < 32; }
    __device__ i64 begin_of(const Walk& walk, i64 other) const {
        return has(other) ? begins[other - number] : walk.begin(other);
    }
    // The number of the sequence that holds a step.
    __device__ i64 number_of(const Walk& walk, i64 order) const {
        if (begins[0] > order || (number + 31 < walk.count && begins[31] <= order)) return walk.number(order);
        int low = 0;
#pragma unroll 1
        for (int step = 16; step > 0; step /= 2)
            if (number + low + step < walk.count && begins[low + step] <= order) low += step;
        return number + low;
    }
};

// For the sequences that start or end at the steps [order, order + steps): calls start(place, number) and end(place), each in some lane.
// Returns whether there are any. All lanes of the warp take part.
template <class Start, class End>
__device__ bool find_ends(const Walk& walk, i64 order, int steps, const Start& start, const End& end) {
    const int lane = threadIdx.x % 32;
    Nearby& nearby = Nearby::of_warp();
    i64 number = nearby.number;
    // What begins in the tile may come before these sequences, or long after them. The votes tell the compiler that all lanes agree,
    // and also that all have read this.
    bool loads = __any_sync(FULL_WARP, number < 0 || (number > 0 && nearby.begins[0] >= order) ||
                                           (number + 31 < walk.count && nearby.begins[31] < order));
    if (loads) number = from_lane(walk.number(order - 1), 0);
    bool any = false;
#pragma unroll 1
    do {
        if (loads) {
            nearby.begins[lane] = number + lane <= walk.count ? walk.begin(number + lane) : -1;
            nearby.number = number;
            __syncwarp();
        }
        const i64 mine = nearby.begins[lane];
        const u64 distance = u64(mine - order);
        const bool starts = distance < u64(steps) && number + lane < walk.count;
        const bool ends = distance - 1 < u64(steps) && mine > 0;
        any |= __any_sync(FULL_WARP, starts || ends);
        if (starts) start(int(distance), number + lane);
        if (ends) end(int(distance) - 1);
        loads = __any_sync(FULL_WARP, number + 31 < walk.count && nearby.begins[31] <= order + steps);
        number += 32;
    } while (loads);
    __syncwarp();  // what `start` and `end` have written is there
    return any;
}

// The sequences that successive steps are of.
struct Cursor {
    const Walk& walk;
    i64 order, number, first, next;  // order of the step, of its sequence's first step, and of the next sequence's

    __device__ Cursor(const Walk& walk, i64 order) : walk(walk), order(order) {
        const Nearby& nearby = Nearby::of_warp();
        number = nearby.number_of(walk, order);
        first = nearby.begin_of(walk, number), next = nearby.begin_of(walk, number + 1);
    }
    __device__ void advance(int steps = 1) {
        order += steps;
#pragma unroll 1
        while (next <= order && number + 1 < walk.count) number++, first = next, next = walk.begin(number + 1);
    }
    __device__ bool starts() const { return first == order && order < next; }  // the last sequences may be empty
    __device__ bool ends() const { return next == order + 1 && first <= order; }  // a misaligned row has steps before its first
    // Whether a sequence starts or ends among so many steps.
    __device__ bool changes(int steps) const { return first >= order || next <= order + steps; }
    __device__ i64 index() const { return walk.index(number); }
};

// Which of a lane's elements are the first and the last of a sequence: a bit for each.
struct LaneEnds {
    unsigned starts = 0, ends = 0;

    __device__ LaneEnds(const Walk& walk, i64 order) {
        static_assert(ITEMS <= 32, "bits");
        Cursor cursor(walk, order);
#pragma unroll 1
        for (;; cursor.advance(int(cursor.next - cursor.order))) {
            const i64 first = cursor.first - order, end = cursor.next - order;
            if (first < end && u64(first) < ITEMS) starts |= 1u << int(first);
            if (first < end && u64(end - 1) < ITEMS) ends |= 1u << int(end - 1);
            if (end >= ITEMS || cursor.number + 1 >= walk.count) break;
        }
    }
    __device__ bool any() const { return starts || ends; }
};

// Element i of several in registers, where i is known only here.
template <int N>
__device__ State element_of(const State (&x)[N], int i) {
    State one = x[0];
#pragma unroll
    for (int k = 1; k < N; k++) one = chosen(i == k, x[k], one);
    return one;
}

// Whether it is neither infinite nor no number.
__device__ inline bool is_finite(State x) { return x - x == State(0); }
// A gate that lets nothing pass. It is no number where the gate is not finite, as times a state of zero such a gate is none.
__device__ inline Storage closed(Storage gate) {
    const State x = Element::widen(gate);
    return Element::narrow(x - x);
}
