// CUDA C++ on the CPU: what a kernel's source takes for granted, for one kernel per library.
//
// A block runs in one thread of the system, its threads as coroutines of which one runs at a time,
// until it has to wait; who runs next is drawn. Several blocks run at once, and start in an order
// that is drawn, so whatever CUDA leaves open is tried. The blocks of a cluster run at the same time. Shared
// memory starts as garbage.
//
// It is compiled once for all kernels, so nothing in it may look at a kernel's macros.
#pragma once
#define EMULATED  // that this was read, ahead or now
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

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
inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;

namespace emulator {

extern const unsigned blocks_of_cluster;  // the kernel's
constexpr unsigned MOST_OF_CLUSTER = 16;
constexpr int WARP = 32;
constexpr std::size_t STACK = 256 << 10, VALUE = 32;

[[noreturn]] inline void fail(const char* reason) {
    std::fprintf(stderr, "emulator: %s\n", reason);
    std::fflush(stderr);
    std::_Exit(70);
}

// An asynchronous copy, which may be carried out at any time before it is waited for.
struct Copy {
    void* to;
    const void* from;
    std::size_t bytes, read;  // and zeros for what is not read
    int group;
};

struct Thread {
    ucontext_t context;  // to begin with; after that, `place` is where it goes on
    jmp_buf place;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool begun = false, done = false;
    long exchanges = 0, barriers = 0, meetings = 0;  // that it has arrived at: of a warp, a block, a cluster
    int groups = 0;                                  // of copies that it has committed
    std::vector<Copy> copies;
};

// A barrier that some threads of a block arrive at, and how often it opened.
struct Barrier {
    int arrived = 0;
    long opened = 0;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<char> dynamic;
    std::vector<char> slots;  // of each thread two values of at most VALUE bytes, on their way to a warp
    std::function<void()> kernel;
    std::mt19937 random;
    jmp_buf outside;
    Barrier numbered[16];
    int running = 0;
    long steps_in_vain = 0;

    Block(int count, std::size_t shared, unsigned seed)
        : threads(count), dynamic(shared + 16), slots(count * 2 * VALUE), random(seed) {}

    void run(Index index) {
        blockIdx = index;
        for (auto& byte : dynamic) byte = char(random());
        for (auto& thread : threads) {
            thread.begun = thread.done = false;
            thread.exchanges = thread.barriers = thread.meetings = 0;
            thread.groups = 0;
            thread.copies.clear();
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = STACK;
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, reinterpret_cast<void (*)()>(enter), 0);
        }
        for (int next = pick(-1); next >= 0; next = pick(-1))
            if (!_setjmp(outside)) resume(next);
        for (const Barrier& barrier : numbered)
            if (barrier.arrived) fail("a block left with threads at a barrier");
    }

    static Block*& current() {
        static thread_local Block* block;
        return block;
    }
    static void enter() {
        Block& block = *current();
        block.kernel();
        Thread& thread = block.threads[block.running];
        if (!thread.copies.empty()) fail("a thread left with copies under way");
        thread.done = true;
        _longjmp(block.outside, 1);
    }

    [[noreturn]] void resume(int number) {
        running = number;
        threadIdx = {unsigned(number), 0, 0};
        Thread& thread = threads[number];
        if (thread.begun) _longjmp(thread.place, 1);
        thread.begun = true;
        setcontext(&thread.context);
        fail("a thread could not begin");
    }

    // A thread that is not done, other than `but` if there is one; -1 if there is none.
    int pick(int but) {
        const int count = int(threads.size()), begin = int(random() % count);
        for (int i = 0; i < count; i++) {
            const int number = (begin + i) % count;
            if (!threads[number].done && number != but) return number;
        }
        return but >= 0 && !threads[but].done ? but : -1;
    }

    // Let others run until `ready`.
    template <class Ready>
    void wait(Ready ready) {
        while (!ready()) {
            const int self = running, next = pick(self);
            if (++steps_in_vain % (long(threads.size()) * 4) == 0) std::this_thread::yield();
            if (steps_in_vain > 200000000) fail("nobody gets on: threads wait for what never comes");
            if (next != self && !_setjmp(threads[self].place)) resume(next);
        }
        steps_in_vain = 0;
    }

    Thread& self() { return threads[running]; }
};

inline void arrive(Barrier& at, int threads) {
    if (++at.arrived == threads) at.arrived = 0, at.opened++;
}

inline Block& block() { return *Block::current(); }

// How often threads of each block of a cluster have come to its barrier, and which blocks have ended.
struct Cluster {
    std::atomic<long> arrived[MOST_OF_CLUSTER]{};
    std::atomic<bool> ended[MOST_OF_CLUSTER]{};
};
inline std::vector<Cluster> clusters;  // of the launch
inline Cluster& cluster() { return clusters[blockIdx.x / blocks_of_cluster]; }
inline unsigned rank() { return blockIdx.x % blocks_of_cluster; }
inline void arrive_in_cluster() {
    block().self().meetings++;
    cluster().arrived[rank()]++;
}
// Nobody arrives again before all have arrived.
inline void await_cluster() {
    const long awaited = block().self().meetings * long(blockDim.x);
    block().wait([&] {
        for (unsigned i = 0; i < blocks_of_cluster; i++)
            if (cluster().arrived[i] < awaited && !cluster().ended[i]) return false;
        return true;
    });
}

// Meet the other threads of the warp; `read` is called with the values that all of them brought, which
// stay as they are until this thread meets them again.
template <class T, class Read>
void meet(T mine, Read read) {
    static_assert(sizeof(T) <= VALUE);
    Block& b = block();
    const int first = b.running / WARP * WARP;
    const long number = ++b.self().exchanges;
    T* const slots = reinterpret_cast<T*>(b.slots.data() + (number & 1) * b.threads.size() * VALUE +
                                          first * VALUE);
    std::memcpy(slots + b.running - first, &mine, sizeof mine);
    b.wait([&] {
        for (int lane = first; lane < first + WARP; lane++) {
            if (b.threads[lane].exchanges >= number) continue;
            if (b.threads[lane].done) fail("a warp exchanges values without a lane that has left");
            return false;
        }
        return true;
    });
    read(slots);
}

// The value that the thread `source` of the warp brought.
template <class T>
T exchange(T mine, int source) {
    T theirs;
    meet(mine, [&](const T* all) { std::memcpy(&theirs, all + source, sizeof theirs); });
    return theirs;
}

inline void copy_now(const Copy& copy) {
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.read);
}

inline void copy_async(void* to, const void* from, std::size_t bytes, std::size_t read) {
    if (std::uintptr_t(to) % bytes || std::uintptr_t(from) % bytes) fail("a copy is not aligned");
    if (read > bytes) fail("a copy reads more than it writes");
    Block& b = block();
    const Copy copy{to, from, bytes, read, b.self().groups};
    if (b.random() & 1) copy_now(copy);
    else b.self().copies.push_back(copy);
}

inline void commit() { block().self().groups++; }

// Until at most `pending` of the groups that this thread committed are under way.
inline void wait_for_copies(int pending) {
    Thread& self = block().self();
    std::vector<Copy> later;
    for (const Copy& copy : self.copies)
        if (copy.group < self.groups - pending) copy_now(copy);
        else later.push_back(copy);
    self.copies = std::move(later);
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}

template <class... A>
void launch(void (*kernel)(A...), void** arguments, const unsigned* grid, unsigned threads,
            unsigned shared, unsigned blocks_at_once, unsigned seed) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    const std::size_t blocks = std::size_t(grid[0]) * grid[1] * grid[2];
    const std::size_t together = blocks_of_cluster;
    if (together > MOST_OF_CLUSTER) fail("a cluster has more blocks than there is room for");
    if (blocks % together) fail("a cluster has too few blocks");
    blocks_at_once = std::max(blocks_at_once, blocks_of_cluster);
    clusters = std::vector<Cluster>(blocks / together);
    std::vector<std::size_t> order(blocks);
    for (std::size_t i = 0; i < blocks; i++) order[i] = i;
    std::mt19937 random(seed);
    for (std::size_t i = blocks / together; i > 1; i--)
        std::swap_ranges(order.begin() + (i - 1) * together, order.begin() + i * together,
                         order.begin() + random() % i * together);
    for (std::size_t i = 0; i < blocks; i += together)
        std::shuffle(order.begin() + i, order.begin() + i + together, random);

    std::atomic<std::size_t> next{0};
    const auto work = [&](unsigned number) {
        Block block(int(threads), shared, seed * 977 + number);
        Block::current() = &block;
        block.kernel = [&] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
        for (std::size_t i = next++; i < blocks; i = next++) {
            const auto at = order[i];
            block.run({unsigned(at % grid[0]), unsigned(at / grid[0] % grid[1]),
                       unsigned(at / grid[0] / grid[1])});
            cluster().ended[rank()] = true;
        }
    };
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < blocks_at_once && i < blocks; i++) workers.emplace_back(work, i);
    for (auto& worker : workers) worker.join();
}

}  // namespace emulator

inline void __syncthreads() {
    auto& b = emulator::block();
    const long number = ++b.self().barriers;
    b.wait([&] {
        for (const auto& thread : b.threads)
            if (!thread.done && thread.barriers < number) return false;
        return true;
    });
}
inline void __syncwarp() { emulator::exchange(0, 0); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) {}

inline bool __any_sync(unsigned, bool x) {
    bool any = false;
    emulator::meet(x, [&](const bool* all) { any = std::any_of(all, all + emulator::WARP, [](bool b) { return b; }); });
    return any;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    unsigned bits = 0;
    emulator::meet(x, [&](const bool* all) {
        for (int lane = 0; lane < emulator::WARP; lane++) bits |= unsigned(all[lane]) << lane;
    });
    return bits;
}

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
