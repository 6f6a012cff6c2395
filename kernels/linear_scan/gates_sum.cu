// linear_scan: the total of the sums that backward kernels leave of the gradient of gates that time steps share,
//
//     gates_grad = sum of sums  over all that the gates are broadcast along.
//
// What a total is of lies along two dimensions, what there are totals of along two others. A CTA adds up a part of one total, or
// several totals of few sums each:
//
//     blockIdx.x   the total, or the first THREADS / threads of them, and so on
//     blockIdx.y   its part, of as many as the grid has; parts are totals of their own, which a second launch adds up
//
// Each of a total's threads adds up every so many-th sum, and then warps and the CTA theirs, in a fixed order.
#include "../common/state.cuh"
#include "../common/affine.cuh"

enum : int { THREADS = 32 * WARPS, AT_ONCE = 8 };

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }
// In the first of so many lanes side by side, a power of two, the sum of theirs.
__device__ inline State sum_of_lanes(State x, int lanes = 32) {
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) x = x + from_higher(x, distance);
    return x;
}

template <class E>
__device__ inline void put(void* to, i64 at, State x) { static_cast<typename E::Storage*>(to)[at] = E::narrow(x); }
// A template, as compilers would refuse the body for complex sums.
template <class S>
__device__ inline void write(void* to, i64 at, S x, i64 flags) {
    if constexpr (sizeof(S) == 4) {
        if (flags == 1) return put<bfloat16>(to, at, x);
        if (flags == 2) return put<float16>(to, at, x);
    }
    put<Element>(to, at, x);
}

// flags: the dtype of gates_grad, 0 that of the sums, 1 bfloat16, 2 float16; and four times the lanes of a total, a power of two, 0 if
// it has the whole CTA. There are at most 2^31 - 1 of everything.
extern "C" __global__ void __launch_bounds__(THREADS) linear_scan_gates_sum(
    const Storage* __restrict__ sums, void* __restrict__ gates_grad, i64 totals, i64 kept, i64 outer, i64 inner, i64 part,
    i64 sums_kept_outer, i64 sums_kept, i64 sums_outer, i64 sums_inner, i64 flags) {
    const int lanes = int(flags >> 2), threads = lanes ? lanes : THREADS;
    const unsigned total = blockIdx.x * unsigned(THREADS / threads) + threadIdx.x / threads, of_outer = total / unsigned(kept);
    const int begin = int(blockIdx.y) * int(part), end = total < totals ? smaller(begin + int(part), int(inner)) : 0;
    sums += of_outer * sums_kept_outer + (total - of_outer * unsigned(kept)) * sums_kept;
    State sum = State(0);
#pragma unroll 1
    for (int o = 0; o < int(outer); o++, sums += sums_outer)
#pragma unroll AT_ONCE
        for (int i = begin + int(threadIdx.x % threads); i < end; i += threads) sum = sum + Element::widen(sums[i * sums_inner]);
    const i64 at = blockIdx.y * totals + total;
    if (lanes) {
        sum = sum_of_lanes(sum, lanes);
        if (threadIdx.x % lanes == 0 && total < totals) write(gates_grad, at, sum, flags & 3);
        return;
    }
    __shared__ State of_warps[WARPS];
    sum = sum_of_lanes(sum);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = sum_of_lanes(threadIdx.x < WARPS ? of_warps[threadIdx.x] : State(0));
    if (threadIdx.x == 0) write(gates_grad, at, sum, flags & 3);
}
