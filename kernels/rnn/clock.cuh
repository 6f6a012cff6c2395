// The clock of an SM.
#pragma once

// Cycles of the SM's clock, of which 32 bits come round in seconds.
__device__ inline unsigned clock_cycles() {
    unsigned cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}
