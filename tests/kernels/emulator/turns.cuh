// What kernels/common/turns.cuh says in PTX, for the emulator. A barrier counts how often its turn was passed on.
#pragma once
#include "cuda.hpp"

inline void init_turn(u64* barrier) { *barrier = 0; }
inline void pass_turn(u64* barriers, int number) {
    __syncwarp();
    if (emulated_lane() == 0) barriers[number]++;
}
inline void wait_for_turn(u64* barriers, int number, unsigned round) {
    emulator::wait([=] { return barriers[number] % 2 != round % 2; });
}
