// One step of the recurrence is an affine map of the state, x -> scale * x + shift, and so is any
// run of steps: composing maps is the associative operator that makes the scan parallel.
#pragma once
#include "element.cuh"

struct Affine {
    State scale = State(1), shift = State(0);

    __device__ State operator()(State x) const { return scale * x + shift; }
};

__device__ inline Affine then(Affine first, Affine second) {
    return {first.scale * second.scale, second(first.shift)};
}

constexpr unsigned FULL_WARP = 0xffffffffu;

__device__ inline Affine from_lane(Affine map, int lane) {
    return {__shfl_sync(FULL_WARP, map.scale, lane), __shfl_sync(FULL_WARP, map.shift, lane)};
}

// Composition of the maps of all lower lanes that are congruent to this one modulo STRIDE;
// `map` becomes the composition that includes this lane's own.
template <int STRIDE = 1>
__device__ inline Affine exclusive_scan(Affine& map, int lane) {
#pragma unroll
    for (int distance = STRIDE; distance < 32; distance *= 2) {
        const Affine lower = {__shfl_up_sync(FULL_WARP, map.scale, distance),
                              __shfl_up_sync(FULL_WARP, map.shift, distance)};
        if (lane >= distance) map = then(lower, map);
    }
    Affine before = {__shfl_up_sync(FULL_WARP, map.scale, STRIDE),
                     __shfl_up_sync(FULL_WARP, map.shift, STRIDE)};
    if (lane < STRIDE) before = Affine{};
    return before;
}
