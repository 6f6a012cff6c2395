// CUDA C++ on the CPU: what a kernel's source takes for granted, for one kernel per library.
//
// A block runs in one thread of the system, its threads as coroutines of which one runs at a time,
// until it has to wait; who runs next is drawn. Several blocks run at once, and start in an order
// that is drawn, so whatever CUDA leaves open is tried. The blocks of a cluster run at the same time. Shared
// memory starts as garbage.
//
// It is compiled once for all kernels, and so is emulator.cpp, which runs the threads: nothing in them may look
// at a kernel's macros.
#pragma once
#define EMULATED  // that this was read, ahead or now
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
    unsigned x, y, z;
};
extern __thread Index threadIdx, blockIdx;
extern Index blockDim, gridDim;

namespace emulator {

extern const unsigned blocks_of_cluster;  // the kernel's
extern const bool starts_in_order;         // whether a block starts after all with lower numbers
constexpr unsigned MOST_OF_CLUSTER = 16;
constexpr int WARP = 32;
constexpr std::size_t VALUE = 32;

// Memory for the stacks of all threads that run at once, which is the same for all launches: most of it is never touched.
struct Stacks {
    char* memory;
    std::size_t bytes;  // of each thread
};

[[noreturn]] void fail(const char* reason);

// Let another thread go on, if one can.
void turn();
// Let others go on until `ready`, which other blocks bring about.
template <class Ready>
void wait(Ready ready) {
    while (!ready()) turn();
}

// Barriers of a block, of which those with a number are for `count` threads; and of a cluster.
void meet_block();
void meet_at(int barrier, int count);
void arrive_at(int barrier, int count);
void meet_in_cluster();
inline unsigned rank() { return blockIdx.x % blocks_of_cluster; }

// Meet the other threads of the warp: the values that all of them brought, which stay as they are until
// this thread meets them again.
const void* meet_warp(const void* mine, std::size_t bytes);
template <class T, class Read>
void meet(T mine, Read read) {
    static_assert(sizeof(T) <= VALUE);
    read(static_cast<const T*>(meet_warp(&mine, sizeof mine)));
}

// The value that the thread `source` of the warp brought.
template <class T>
T exchange(T mine, int source) {
    T theirs;
    meet(mine, [&](const T* all) { std::memcpy(&theirs, all + source, sizeof theirs); });
    return theirs;
}

char* dynamic_shared();

// Copies that may be carried out at any time before they are waited for: until at most `pending` of the groups that this
// thread committed are under way.
void copy_async(void* to, const void* from, std::size_t bytes, std::size_t read);
void commit();
int committed();  // groups of this thread
void wait_for_copies(int pending);

template <class... A>
constexpr unsigned parameters(void (*)(A...)) {
    return sizeof...(A);
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}

// What each thread calls, and with what.
struct Launch {
    void (*kernel)(void* given);
    void* given;
    const unsigned* grid;
    unsigned threads, shared, blocks_at_once, seed;
    Stacks stacks;
};
void launch(const Launch& launch);

template <class... A>
void launch(void (*kernel)(A...), void** arguments, const unsigned* grid, unsigned threads,
            unsigned shared, unsigned blocks_at_once, unsigned seed, Stacks stacks) {
    using Given = std::pair<void (*)(A...), void**>;
    Given given{kernel, arguments};
    const auto start = [](void* given) {
        const auto& [kernel, arguments] = *static_cast<Given*>(given);
        call(kernel, arguments, std::index_sequence_for<A...>{});
    };
    launch({start, &given, grid, threads, shared, blocks_at_once, seed, stacks});
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet_block(); }
inline void __syncwarp() { emulator::exchange(0, 0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) {}

inline bool __any_sync(unsigned, bool x) {
    bool any = false;
    emulator::meet(x, [&](const bool* all) {
        for (int lane = 0; lane < emulator::WARP; lane++) any |= all[lane];
    });
    return any;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    unsigned bits = 0;
    emulator::meet(x, [&](const bool* all) {
        for (int lane = 0; lane < emulator::WARP; lane++) bits |= unsigned(all[lane]) << lane;
    });
    return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }

inline int emulated_lane() { return int(threadIdx.x % emulator::WARP); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
    return emulator::exchange(x, lane & 31);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
    const int lane = emulated_lane();
    return emulator::exchange(x, lane < distance ? lane : lane - distance);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int distance) {
    const int lane = emulated_lane();
    return emulator::exchange(x, lane + distance > 31 ? lane : lane + distance);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return emulator::exchange(x, emulated_lane() ^ mask);
}

inline unsigned atomicAdd(unsigned* to, unsigned value) {
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
inline unsigned atomicInc(unsigned* to, unsigned) { return atomicAdd(to, 1u); }

template <class To, class From>
To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
