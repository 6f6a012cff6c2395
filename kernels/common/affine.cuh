// One step of a linear recurrence is an affine map of the state, x -> scale * x + shift, and so is any run of steps.
// Composing maps is the associative operator that makes the scan parallel.
//
// MAY_RESET comes from the build: 1 if a step may start a new sequence, 2 if only the map of a run may, 0 if neither.
#pragma once
#include "../common/state.cuh"
#include "../common/warp.cuh"

// a * b with its rounding error added to `error`.
__device__ inline float exact_product(float a, float b, float& error) {
    const float product = __fmul_rn(a, b);
    error += __fmaf_rn(a, b, -product);
    return product;
}
__device__ inline double exact_product(double a, double b, double& error) {
    const double product = __dmul_rn(a, b);
    error += __fma_rn(a, b, -product);
    return product;
}
// Likewise a + b.
__device__ inline float exact_sum(float a, float b, float& error) {
    const float sum = __fadd_rn(a, b), back = __fadd_rn(sum, -a);
    error += __fadd_rn(a, -__fadd_rn(sum, -back)) + __fadd_rn(b, -back);
    return sum;
}
__device__ inline double exact_sum(double a, double b, double& error) {
    const double sum = __dadd_rn(a, b), back = __dadd_rn(sum, -a);
    error += __dadd_rn(a, -__dadd_rn(sum, -back)) + __dadd_rn(b, -back);
    return sum;
}
__device__ inline Complex exact_sum(Complex a, Complex b, Complex& error) {
    return {exact_sum(a.re, b.re, error.re), exact_sum(a.im, b.im, error.im)};
}
__device__ inline Complex exact_product(Complex a, Complex b, Complex& error) {
    const float re = exact_product(a.re, b.re, error.re), im = exact_product(a.re, b.im, error.im);
    const float re2 = exact_product(-a.im, b.im, error.re), im2 = exact_product(a.im, b.re, error.im);
    return {exact_sum(re, re2, error.re), exact_sum(im, im2, error.im)};
}

// Where sequences are packed, the first step of each does not depend on the state before it. Its map has scale 0, and
// even an infinite state has to vanish in it.
__device__ inline bool forgets(State scale) { return MAY_RESET && scale == State(0); }

// One step's map, exact.
struct Step {
    State scale, shift;

    __device__ bool forgets() const { return MAY_RESET == 1 && ::forgets(scale); }
    __device__ State operator()(State x) const { return forgets() ? shift : scale * x + shift; }
};

// A run's map. Its scale is a product of many gates, and where they are all alike, so are its
// rounding errors, which then add up in proportion to the length of the run. `error_term` keeps them (a
// compensated product), unless the states are stored too coarsely for that to show.
enum : bool { COMPENSATED = sizeof(Storage) >= 4 };
// How far to unroll what composes maps: one of complex numbers is a hundred instructions.
enum : int { UNROLLED = sizeof(State) > 4 ? 1 : 32 };

// The state that goes from tile to tile, with what rounding took from it: where gates are close to
// one, what is lost there stays lost.
struct RunningPrefix {
    State x, error_term;

    __device__ RunningPrefix(State x = State(0), State error_term = State(0)) : x(x), error_term(error_term) {}
};

struct Affine {
    State scale = State(1), error_term = State(0), shift = State(0);

    __device__ State operator()(State x) const {
        if (forgets(scale)) return shift;
        if constexpr (COMPENSATED) return scale * x + (error_term * x + shift);
        else return scale * x + shift;
    }

    __device__ RunningPrefix operator()(RunningPrefix carried) const {
        if (forgets(scale)) return shift;
        if constexpr (!COMPENSATED) return scale * carried.x + shift;
        State small = error_term * carried.x + scale * carried.error_term, error = State(0);
        const State product = exact_product(scale, carried.x, small);
        const State sum = exact_sum(product, shift, small);
        const State x = exact_sum(sum, small, error);
        return {x, error};
    }
};

__device__ inline Affine compose(Affine first, Affine second) {
    if (forgets(second.scale)) return {State(0), State(0), second.shift};
    if constexpr (!COMPENSATED)
        return {first.scale * second.scale, State(0), second(first.shift)};
    State error_term = first.error_term * second.scale + first.scale * second.error_term;
    const State scale = exact_product(first.scale, second.scale, error_term);
    return {scale, error_term, second(first.shift)};
}

__device__ inline Affine compose(Affine first, Step second) {
    if (second.forgets()) return {State(0), State(0), second.shift};
    if constexpr (!COMPENSATED)
        return {first.scale * second.scale, State(0), second(first.shift)};
    State error_term = first.error_term * second.scale;
    const State scale = exact_product(first.scale, second.scale, error_term);
    return {scale, error_term, second(first.shift)};
}

// A map in shared memory, without what is always zero.
template <bool = COMPENSATED>
struct Stored {
    Affine map;

    __device__ Stored& operator=(const Affine& other) { return map = other, *this; }
    __device__ operator Affine() const { return map; }
};
template <>
struct alignas(2 * sizeof(State)) Stored<false> {
    State scale, shift;

    __device__ Stored& operator=(const Affine& map) { return scale = map.scale, shift = map.shift, *this; }
    __device__ operator Affine() const { return {scale, State(0), shift}; }
};

__device__ inline Complex from_lane(Complex x, int lane) {
    return {from_lane(x.re, lane), from_lane(x.im, lane)};
}
__device__ inline Complex from_lower(Complex x, int distance) {
    return {from_lower(x.re, distance), from_lower(x.im, distance)};
}
__device__ inline Complex from_higher(Complex x, int distance) {
    return {from_higher(x.re, distance), from_higher(x.im, distance)};
}
__device__ inline Affine from_lane(Affine map, int lane) {
    return {from_lane(map.scale, lane), COMPENSATED ? from_lane(map.error_term, lane) : State(0),
            from_lane(map.shift, lane)};
}
__device__ inline Affine from_lower(Affine map, int distance) {
    return {from_lower(map.scale, distance), COMPENSATED ? from_lower(map.error_term, distance) : State(0),
            from_lower(map.shift, distance)};
}

// Composition of the maps of all lower lanes that are congruent to this one modulo STRIDE, within
// runs of WIDTH lanes; `map` becomes the composition that includes this lane's own.
template <int STRIDE = 1, int WIDTH = 32>
__device__ inline Affine exclusive_scan(Affine& map, int lane) {
    const int place = lane % WIDTH;
#pragma unroll(UNROLLED)
    for (int distance = STRIDE; distance < WIDTH; distance *= 2) {
        const Affine lower = from_lower(map, distance);
        if (place >= distance) map = compose(lower, map);
    }
    if constexpr (STRIDE >= WIDTH) return {};
    Affine before = from_lower(map, STRIDE % 32);
    if (place < STRIDE) before = Affine{};
    return before;
}
