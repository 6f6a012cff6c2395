// What kernels/common/ptx.cuh says in PTX, for the emulator.
#pragma once
#include <mutex>

#include "cuda.hpp"

using i64 = long long;
using u64 = unsigned long long;

inline unsigned short emulated_bfloat16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline unsigned bfloat16_pair(float low, float high) {
    return unsigned(emulated_bfloat16(high)) << 16 | emulated_bfloat16(low);
}
inline unsigned float16_pair(float low, float high) {
    return unsigned(emulated_bits<unsigned short>(_Float16(high))) << 16 |
           emulated_bits<unsigned short>(_Float16(low));
}
inline float from_float16(unsigned short bits) { return float(emulated_bits<_Float16>(bits)); }

template <class T>
T chosen(bool first, T a, T b) {
    return first ? a : b;
}

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

template <int THREADS>
void arrive_at(int barrier) {
    emulator::arrive_at(barrier, THREADS);
}
template <int THREADS>
void meet_at(int barrier) {
    emulator::meet_at(barrier, THREADS);
}

inline char* dynamic_shared() { return emulator::dynamic_shared(); }
inline char* dynamic_rows() { return dynamic_shared(); }
inline void copy_async(void* to, const void* from, bool wanted) {
    if (wanted) emulator::copy_async(to, from, 16, 16);
}
inline void copy_async_first(void* to, const void* from, int bytes, bool wanted) {
    if (wanted) emulator::copy_async(to, from, 16, bytes);
}
inline void commit_copies() { emulator::commit(); }
template <int PENDING>
void wait_for_copies() {
    emulator::wait_for_copies(PENDING);
}
