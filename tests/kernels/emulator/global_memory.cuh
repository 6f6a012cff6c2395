// What kernels/common/global_memory.cuh says in PTX, for the emulator.
#pragma once
#include <mutex>

#include "../common/types.cuh"
#include "cuda.hpp"

template <class Words>
void store_global(void* to, Words words) {
    if (std::uintptr_t(to) % sizeof words) emulator::fail("a store is not aligned");
    std::memcpy(to, &words, sizeof words);
}

inline void store_relaxed(u64* to, u64 value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
// A thread that polls lets others run.
inline void emulated_turn() { emulator::turn(); }
template <class Word>
Word load_relaxed(const Word* from) {
    emulated_turn();
    return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline void load_relaxed(const u64* from, u64& first, u64& second) {
    first = load_relaxed(from), second = load_relaxed(from + 1);
}
inline std::mutex& emulated_lines() {
    static std::mutex lines;
    return lines;
}
inline void add_relaxed(unsigned* to, unsigned value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline void store_relaxed(uint4* to, uint4 value) {
    const std::lock_guard<std::mutex> lock(emulated_lines());
    *to = value;
}
inline uint4 load_relaxed(const uint4* from) {
    emulated_turn();
    const std::lock_guard<std::mutex> lock(emulated_lines());
    return *from;
}

inline void store_release(uint4* to, uint4 value) { store_relaxed(to, value); }
inline uint4 load_acquire(const uint4* from) { return load_relaxed(from); }

inline void store_words(unsigned* to, unsigned word) { __atomic_store_n(to, word, __ATOMIC_RELAXED); }
inline void store_words(unsigned* to, uint2 words) {
    store_words(to + 1, words.y);
    emulated_turn();
    store_words(to, words.x);
}
inline uint4 load_words(const uint4* from) {
    if (std::uintptr_t(from) % 16) emulator::fail("a load is not aligned");
    const unsigned* const words = reinterpret_cast<const unsigned*>(from);
    unsigned found[4];
    for (int i = 0; i < 4; i++) {
        if (i == 2) emulated_turn();
        found[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
    }
    return {found[0], found[1], found[2], found[3]};
}
inline void fence() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

inline void prefetch(const void*) {}
