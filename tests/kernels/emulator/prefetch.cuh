// What kernels/common/prefetch.cuh says in PTX, for the emulator, where it has no effect.
#pragma once

inline void prefetch(const void*) {}
