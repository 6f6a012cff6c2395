// What kernels/common/shared_memory.cuh says in PTX, for the emulator.
#pragma once
#include "cuda.hpp"

inline char* dynamic_shared() { return emulator::dynamic_shared(); }
inline char* dynamic_rows() { return dynamic_shared(); }
