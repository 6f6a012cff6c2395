// Adds up the sums of a backward kernel in a fixed order: weight_grad and bias_grad from `partials` (pieces, width + 1,
// channels), float32, in which first come the taps, from the step itself backwards in time, and then the bias.
//
// A CTA has 32 neighbours of the last two dimensions, one for each lane. Its warps take the pieces in turns. `format` is 0
// for gradients in float32, 1 for bfloat16, 2 for float16.
#include "../common/element.cuh"

enum : int { THREADS = 32 * WARPS, UNROLL = 8 };

template <class E>
__device__ void put(void* to, i64 index, float x) {
    static_cast<typename E::Storage*>(to)[index] = E::narrow(x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv1d_reduction(const float* partials, void* weight_grad, void* bias_grad, i64 pieces, i64 channels,
                        i64 width, i64 format) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 sums = (width + 1) * channels, own = i64(blockIdx.x) * 32 + lane;
    float sum = 0;
    if (own < sums) {
#pragma unroll(UNROLL)
        for (i64 p = warp; p < pieces; p += WARPS) sum += partials[p * sums + own];
    }
    __shared__ float shared[WARPS][32];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || own >= sums) return;
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w][lane];

    const i64 j = own / channels, channel = own % channels;
    void* const to = j < width ? weight_grad : bias_grad;
    if (!to) return;
    const i64 index = j < width ? channel * width + width - 1 - j : channel;
    if (format == 0) put<float32>(to, index, sum);
    else if (format == 1) put<bfloat16>(to, index, sum);
    else put<float16>(to, index, sum);
}
