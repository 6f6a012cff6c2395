// linear_scan: the total of the sums that backward kernels leave of the gradient of gates that time steps share,
//
//     gates_grad = sum of sums  over all that the gates are broadcast along.
//
// There are totals of what lies along two dimensions, and each is of what lies along two others, which are called rows and columns.
//
//     blockIdx.x   the first `across` totals, a power of two, and so on
//     blockIdx.y   a part of their rows, of as many as the grid has
//
// Of a total's threads, `wide` side by side, a power of two, have one column after the other, and as many as there are of those, in
// all parts together, take turns at the rows. Then the CTA adds up what its threads have.
//
// The CTA of the last part finishes the total. The others leave theirs in the workspace, which nobody zeroes first: a tag lies
// beside each, for which the last CTA waits, and which it takes away for the next launch. It waits for no CTA that has not
// started, as a GPU starts CTAs in the order of their indices. The order of all additions is fixed.
#include "../common/affine.cuh"
#include "../common/global_memory.cuh"
#include "../common/state.cuh"

// AT_ONCE: loads that a thread has under way. PARTIALS: sums that it keeps, as one alone is less exact.
enum : int { THREADS = 32 * WARPS, AT_ONCE = 16, PARTIALS = 4 };

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }

using Partials = State[PARTIALS];

// Adds every step-th of `count` elements that lie so far apart, from number `first` on.
__device__ inline void add(
    Partials& partials, const Storage* __restrict__ elements, unsigned first, unsigned step, unsigned count, unsigned stride) {
    unsigned at = first * stride;
    stride *= step;
#pragma unroll 1
    while (first < count) {
        Storage loaded[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++, first += step, at += stride) loaded[n] = first < count ? elements[at] : Storage(0);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) partials[n % PARTIALS] = partials[n % PARTIALS] + Element::widen(loaded[n]);
    }
}

// In each of the first `across` threads, the sum over those whose index differs by a multiple of `across`.
__device__ inline State sum_of_threads(State x, int across) {
    __shared__ State of_warps[THREADS];
    const int thread = threadIdx.x, lanes = smaller(across, 32), rows = smaller(WARPS, THREADS / across);
#pragma unroll 1
    for (int distance = 16; distance >= across; distance /= 2) x = x + from_higher(x, distance);
    if (thread % 32 < lanes) of_warps[thread / 32 * lanes + thread % 32] = x;
    __syncthreads();
    if (thread >= across) return x;
    x = of_warps[thread];
#pragma unroll 4
    for (int row = 1; row < rows; row++) x = x + of_warps[row * across + thread];
    return x;
}

// What a part's CTA leaves of a total, with a tag that depends on the address. Memory that holds anything else has no tag.
struct PartOfTotal {
    enum : int { AT_ONCE = 4 };
    static __device__ uint4 tagged(const uint4* at, State x) {
        const u64 bits = Element::narrow(x);
        return {unsigned(bits), unsigned(bits >> 32), unsigned(u64(at)) ^ 0x9e3779b9u, unsigned(u64(at) >> 32) ^ 0x85ebca6bu};
    }
    static __device__ bool is_tagged(const uint4* at, uint4 line) {
        const uint4 expected = tagged(at, State(0));
        return line.z == expected.z && line.w == expected.w;
    }
    // The sum over every step-th part from number `first` on, once they are there; takes their tags away.
    static __device__ State await(uint4* parts, unsigned first, unsigned step, unsigned count, unsigned stride) {
        State sum = State(0);
#pragma unroll 1
        for (; first < count; first += AT_ONCE * step) {
            uint4 lines[AT_ONCE];
            bool all;
            do {
                all = true;
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
                    if (first + n * step < count) lines[n] = load_relaxed(parts + i64(first + n * step) * stride);
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
                    if (first + n * step < count) all &= is_tagged(parts + i64(first + n * step) * stride, lines[n]);
            } while (!all);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (first + n * step < count) {
                    store_relaxed(parts + i64(first + n * step) * stride, uint4{});
                    sum = sum + Element::widen(Storage(u64(lines[n].y) << 32 | lines[n].x));
                }
        }
        return sum;
    }
};

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

// flags: the dtype of gates_grad, 0 that of the sums, 1 bfloat16, 2 float16; from bit 2 on the logarithm of `across`, and from bit 8 on
// that of `wide`. There are less than 2^31 sums in all.
extern "C" __global__ void __launch_bounds__(THREADS) linear_scan_gates_sum(
    const Storage* __restrict__ sums, void* __restrict__ gates_grad, uint4* __restrict__ workspace, i64 totals, i64 kept, i64 rows,
    i64 columns, i64 kept_outer_stride, i64 kept_stride, i64 row_stride, i64 column_stride, i64 flags) {
    const int shift = flags >> 2 & 63, wide = int(flags >> 8), across = 1 << shift;
    const unsigned total = blockIdx.x * across + (threadIdx.x & (across - 1)), of_outer = kept < totals ? total / unsigned(kept) : 0;
    const unsigned thread = threadIdx.x >> shift, along = THREADS >> shift, others = gridDim.y - 1;
    Partials partials = {};
    State sum = State(0);
    if (total < totals) {
        sums += of_outer * unsigned(kept_outer_stride) + (total - of_outer * unsigned(kept)) * unsigned(kept_stride);
        const unsigned first = blockIdx.y * along + thread;
#pragma unroll 1
        for (unsigned column = first & ((1 << wide) - 1); column < columns; column += 1 << wide)
            add(partials, sums + column * unsigned(column_stride), first >> wide, gridDim.y * along >> wide, unsigned(rows), unsigned(row_stride));
        if (blockIdx.y == others) sum = PartOfTotal::await(workspace + total, thread, along, others, unsigned(totals));
    }
    sum = sum_of_threads(sum + ((partials[0] + partials[1]) + (partials[2] + partials[3])), across);
    if (threadIdx.x >= across || total >= totals) return;
    uint4* const part = workspace + i64(blockIdx.y) * totals + total;
    if (blockIdx.y == others) write(gates_grad, total, sum, flags & 3);
    else store_relaxed(part, PartOfTotal::tagged(part, sum));
}
