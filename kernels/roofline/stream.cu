// Streaming: reads READS tensors and writes WRITES, all of count floats, once each and in order.
//
// It computes next to nothing. Its time is the bandwidth roofline for kernels that move as many bytes
// between as many tensors. Traffic: 4 × (READS + WRITES) bytes per element.
//
// A CTA owns UNROLL × THREADS vectors of 16 bytes of every tensor, and a thread UNROLL of them,
// THREADS apart. All of a thread's loads are under way before the first is used:
//
//     CTA 0:    | THREADS vectors | THREADS vectors | …  UNROLL times
//     CTA 1:    …
//
// What is read leaves the L2 last, as in other kernels, which makes room for what is written sooner. HINTED 1 marks
// what is written as of no further use to the caches.
// The last count % 4 floats are moved one by one.
typedef long long i64;

enum : int { THREADS = 32 * WARPS };
static_assert(1 <= READS && READS <= 3 && 1 <= WRITES && WRITES <= 2, "three inputs, two outputs");

__device__ inline float4 load(const float4* from) {
    float4 x;
    asm volatile(
        "{ .reg .b64 last; createpolicy.fractional.L2::evict_last.b64 last, 1.0;\n\t"
        "ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], last; }"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "l"(from));
    return x;
}

__device__ inline void store(float4* to, float4 x) {
    if constexpr (HINTED)
        __stcs(to, x);
    else
        *to = x;
}

__device__ inline float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

extern "C" __global__ void __launch_bounds__(THREADS)
stream(const float* a, const float* b, const float* c, float* sum, float* copy, i64 count) {
    const float* in[] = {a, b, c};
    const i64 vectors = count / 4;
    const i64 first = i64(blockIdx.x) * (UNROLL * THREADS) + threadIdx.x;

    float4 held[READS][UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++)
#pragma unroll
        for (int r = 0; r < READS; r++)
            if (first + k * THREADS < vectors)
                held[r][k] = load(reinterpret_cast<const float4*>(in[r]) + first + k * THREADS);

#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        if (first + k * THREADS >= vectors) break;
        float4 total = held[0][k];
#pragma unroll
        for (int r = 1; r < READS; r++) total = total + held[r][k];
        store(reinterpret_cast<float4*>(sum) + first + k * THREADS, total);
        if constexpr (WRITES == 2)
            store(reinterpret_cast<float4*>(copy) + first + k * THREADS, held[0][k]);
    }

    const i64 i = 4 * vectors + threadIdx.x;
    if (blockIdx.x == 0 && i < count) {
        float total = in[0][i];
        for (int r = 1; r < READS; r++) total += in[r][i];
        sum[i] = total;
        if (WRITES == 2) copy[i] = in[0][i];
    }
}
