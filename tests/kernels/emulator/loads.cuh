// What kernels/selective_state_update/loads.cuh says in PTX, for the emulator.
#pragma once
#include "../common/types.cuh"
#include "copy.cuh"
#include "cuda.hpp"

template <class Words>
Words emulated_load(const void* from) {
    if (std::uintptr_t(from) % sizeof(Words)) emulator::fail("a load is not aligned");
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
inline unsigned load_element(const void* from, bool wide, bool wanted) {
    if (!wanted) return 0;
    return wide ? emulated_load<unsigned>(from) : emulated_load<unsigned short>(from);
}
inline void load_bits(unsigned& bits, const void* from, bool wide, bool wanted) {
    if (wanted) bits = load_element(from, wide, true);
}
template <int N>
void load_words(unsigned (&to)[N], const void* from, bool wanted) {
    if (!wanted) return;
    if (std::uintptr_t(from) % sizeof to) emulator::fail("a load is not aligned");
    std::memcpy(to, from, sizeof to);
}
inline void load_state(unsigned (&to)[4], const void* from, bool wanted) { load_words(to, from, wanted); }
inline void store_state(void* to, const unsigned (&from)[4], bool wanted) {
    if (!wanted) return;
    if (std::uintptr_t(to) % sizeof from) emulator::fail("a store is not aligned");
    std::memcpy(to, from, sizeof from);
}
inline i64 load_index(const void* from, i64 index, bool wide) {
    return wide ? static_cast<const i64*>(from)[index] : static_cast<const int*>(from)[index];
}
inline void store_element(void* to, unsigned bits, bool wide, bool wanted) {
    if (!wanted) return;
    if (wide) *static_cast<unsigned*>(to) = bits;
    else *static_cast<unsigned short*>(to) = (unsigned short)bits;
}
using SharedAddress = std::uintptr_t;
inline SharedAddress shared_address(const void* data) { return SharedAddress(data); }
inline void copy_to_shared(SharedAddress to, const void* from, bool wanted) {
    if (wanted) emulator::copy_async(reinterpret_cast<void*>(to), from, 16, 16);
}
inline void copy_or_clear(SharedAddress to, const void* from, bool wanted) {
    emulator::copy_async(reinterpret_cast<void*>(to), from, 16, wanted ? 16 : 0);
}
template <int BYTES>
void copy_often_read(SharedAddress to, const void* from, bool wanted) {
    if (wanted) emulator::copy_async(reinterpret_cast<void*>(to), from, BYTES, BYTES);
}
template <class T, int N>
void load_shared(T (&to)[N], SharedAddress from) {
    if (from % sizeof to) emulator::fail("a load is not aligned");
    std::memcpy(to, reinterpret_cast<const void*>(from), sizeof to);
}
inline void load_shared(unsigned& to, SharedAddress from) { to = *reinterpret_cast<const unsigned short*>(from); }
template <int N>
void store_shared(SharedAddress to, const float (&from)[N]) {
    if (to % sizeof from) emulator::fail("a store is not aligned");
    std::memcpy(reinterpret_cast<void*>(to), from, sizeof from);
}
