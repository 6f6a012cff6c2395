// Barriers of some warps of a CTA.
#pragma once

// Barrier 1 to 15 opens when whole warps with THREADS threads have arrived. Some of them wait until it opens; others only
// say that they have arrived, and go on.
template <int THREADS>
__device__ inline void meet_at(int barrier) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ inline void arrive_at(int barrier) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
