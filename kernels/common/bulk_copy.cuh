// Copies of whole runs of 16-byte pieces by the copy engine of sm_90: one thread asks for them, and goes on.
#pragma once
#include "../common/copy.cuh"

// An mbarrier for one use, in phase 0: it completes when one thread has arrived and all bytes asked for are there. One thread
// initialises it before a __syncthreads().
__device__ inline void init_bulk_barrier(u64* barrier) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
        "fence.mbarrier_init.release.cluster;" ::"r"(unsigned(__cvta_generic_to_shared(barrier)))
        : "memory");
}
// The thread that asked for the copies calls this, once. Other threads see the bytes after the next __syncthreads().
__device__ inline void wait_for_bulk_copies(u64* barrier) {
    asm volatile(
        "{ .reg .pred done; .reg .b64 state;\n"
        "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again; }" ::"r"(unsigned(__cvta_generic_to_shared(barrier)))
        : "memory");
}
__device__ inline void copy_bulk(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%3], %2;\n\t"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            unsigned(__cvta_generic_to_shared(to))),
        "l"(from), "r"(bytes), "r"(unsigned(__cvta_generic_to_shared(barrier))), "l"(leaves_last())
        : "memory");
}
// Barriers for copies one after the other: phase n of a barrier completes when what was asked for the n-th time is there, from 0 on.
// The thread that asked waits; other threads see the bytes when they have met it.
__device__ inline void request_bulk_copy(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(barrier))), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     unsigned(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(bytes), "r"(unsigned(__cvta_generic_to_shared(barrier)))
                 : "memory");
}
__device__ inline void await_bulk_copy(u64* barrier, unsigned phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(unsigned(__cvta_generic_to_shared(barrier))),
        "r"(phase & 1)
        : "memory");
}
// To global memory. All threads that wrote the bytes to shared memory first call `before_bulk_stores`, and then __syncthreads().
__device__ inline void before_bulk_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void store_bulk(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(to),
                 "r"(unsigned(__cvta_generic_to_shared(from))), "r"(bytes)
                 : "memory");
}
// Waits until at most PENDING of the thread's stores are still to read shared memory: a CTA may not end before all have.
template <int PENDING = 0>
__device__ inline void wait_for_bulk_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
