// What kernels/common/bulk_copy.cuh says in PTX, for the emulator. Threads that ask for copies also wait as they do for others.
#pragma once
#include "copy.cuh"

inline void init_bulk_barrier(void*) {}
inline void wait_for_bulk_copies(void*) {}
inline void copy_bulk(void* to, const void* from, int bytes, void*) {
    for (int i = 0; i < bytes; i += 16) emulator::copy_async(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, 16, 16);
}
// A barrier holds the number of the group that is awaited next.
inline void request_bulk_copy(void* to, const void* from, int bytes, void* barrier) {
    copy_bulk(to, from, bytes, nullptr);
    *static_cast<unsigned long long*>(barrier) = emulator::committed();
    commit_copies();
}
inline void await_bulk_copy(void* barrier, unsigned) {
    emulator::wait_for_copies(emulator::committed() - int(*static_cast<unsigned long long*>(barrier)) - 1);
}
inline void before_bulk_stores() {}
inline void store_bulk(void* to, const void* from, int bytes) {
    copy_bulk(to, from, bytes, nullptr);
    commit_copies();
}
template <int PENDING = 0>
void wait_for_bulk_stores_read() {
    wait_for_copies<PENDING>();
}
