// How the CTAs of a cluster reach each other's shared memory. A cluster of several CTAs needs sm_90 or
// later; a cluster of one is a CTA, anywhere.
#pragma once
#include "../common/types.cuh"

// Where something lies in shared memory.
using Shared = unsigned;

__device__ inline Shared shared_address(const void* of) { return Shared(__cvta_generic_to_shared(of)); }
// Where CTA `rank` of the cluster has what this CTA has at `address`.
__device__ inline Shared address_in(unsigned rank, Shared address) {
    Shared there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// For all threads of all CTAs of a cluster.
__device__ inline void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

// A word in shared memory that tells when a number of bytes have come, time and again: each time it has
// to be told by one thread how many to expect.
__device__ inline void begin_arrivals(Shared arrivals) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(arrivals)
        : "memory");
}
__device__ inline void expect_bytes(Shared arrivals, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrivals), "r"(bytes)
                 : "memory");
}
// Until all have come; `odd` is 0 the first time, then 1, and so on in turns.
__device__ inline void await_bytes(Shared arrivals, unsigned odd) {
    asm volatile(
        "{ .reg .pred done;\n\t"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again; }" ::"r"(arrivals),
        "r"(odd)
        : "memory");
}
// 16 bytes to a CTA of the cluster, counted there once they are there.
__device__ inline void send(Shared to, uint4 words, Shared arrivals) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(arrivals)
        : "memory");
}
