// What kernels/linear_scan/load_first.cuh says in PTX, for the emulator.
#pragma once

inline void load_line(unsigned (&word)[4], const void* from, bool wanted) {
    if (!wanted) return void(std::memset(word, 0xff, sizeof word));  // not a number
    if (std::uintptr_t(from) % sizeof word) emulator::fail("a load is not aligned");
    std::memcpy(word, from, sizeof word);
}
inline void load_first(unsigned (&word)[4], const void* from, int bytes) {
    if (std::uintptr_t(from) % sizeof word) emulator::fail("a load is not aligned");
    for (int w = 0; 4 * w < bytes; w++) {
        word[w] = 0;
        std::memcpy(word + w, static_cast<const char*>(from) + 4 * w, bytes - 4 * w < 4 ? 2 : 4);
    }
}
