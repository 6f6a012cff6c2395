// What lanes of a warp exchange and sum.
#pragma once

enum : unsigned { FULL_WARP = 0xffffffffu };

template <class T>
__device__ T from_lane(T x, int lane) {
    return __shfl_sync(FULL_WARP, x, lane);
}
template <class T>
__device__ T from_lower(T x, int distance) {
    return __shfl_up_sync(FULL_WARP, x, distance);
}
template <class T>
__device__ T from_higher(T x, int distance) {
    return __shfl_down_sync(FULL_WARP, x, distance);
}

// Of N values that each of N lanes has, whose numbers differ in the bits from FIRST on, the sum over the lanes of one
// value: of that whose number `transposed_index` gives.
template <int N, int FIRST, class T>
__device__ T transposed_sum(T (&v)[N]) {
    const int lane = threadIdx.x % 32;
    int bit = FIRST;
#pragma unroll
    for (int width = N / 2; width >= 1; width /= 2, bit *= 2) {
        const bool high = lane & bit;
#pragma unroll
        for (int i = 0; i < width; i++) {
            const T kept = high ? v[i + width] : v[i], sent = high ? v[i] : v[i + width];
            v[i] = kept + __shfl_xor_sync(~0u, sent, bit);
        }
    }
    return v[0];
}
template <int N, int FIRST>
__device__ inline int transposed_index() {
    const int lane = threadIdx.x % 32;
    int index = 0, bit = FIRST;
#pragma unroll
    for (int width = N / 2; width >= 1; width /= 2, bit *= 2)
        if (lane & bit) index += width;
    return index;
}
