// What kernels/rnn/clock.cuh says in PTX, for the emulator.
#pragma once

inline unsigned clock_cycles() {
    static thread_local unsigned cycles = 0;
    return cycles += 100;
}
