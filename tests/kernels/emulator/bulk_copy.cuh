// What kernels/common/bulk_copy.cuh says in PTX, for the emulator. Copies are there at once.
#pragma once
#include "copy.cuh"

inline void init_bulk_barrier(void*) {}
inline void wait_for_bulk_copies(void*) {}
inline void copy_bulk(void* to, const void* from, int bytes, void*) {
    for (int i = 0; i < bytes; i += 16) emulator::copy_async(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, 16, 16);
}
inline void before_bulk_stores() {}
inline void store_bulk(void* to, const void* from, int bytes) { memcpy(to, from, bytes); }
inline void wait_for_bulk_stores_read() {}
