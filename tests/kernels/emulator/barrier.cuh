// What kernels/common/barrier.cuh says in PTX, for the emulator.
#pragma once
#include "cuda.hpp"

template <int THREADS>
void arrive_at(int barrier) {
    emulator::arrive_at(barrier, THREADS);
}
template <int THREADS>
void meet_at(int barrier) {
    emulator::meet_at(barrier, THREADS);
}
