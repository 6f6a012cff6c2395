// What kernels/common/copy.cuh says in PTX, for the emulator.
#pragma once
#include "cuda.hpp"

template <bool>
void copy_async(void* to, const void* from, bool wanted) {
    if (wanted) emulator::copy_async(to, from, 16, 16);
}
template <bool>
void copy_async_first(void* to, const void* from, int bytes, bool wanted) {
    if (wanted) emulator::copy_async(to, from, 16, bytes);
}
inline void copy_word_async(void* to, const void* from, bool wanted) {
    if (wanted) emulator::copy_async(to, from, 4, 4);
}
inline void commit_copies() { emulator::commit(); }
template <int PENDING>
void wait_for_copies() {
    emulator::wait_for_copies(PENDING);
}
