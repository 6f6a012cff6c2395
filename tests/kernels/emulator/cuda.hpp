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
#include <mutex>
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
constexpr std::size_t VALUE = 32;

// Memory for the stacks of all threads that run at once, which is the same for all launches: most of it is never touched.
struct Stacks {
    char* memory;
    std::size_t bytes;  // of each thread
};

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
    jmp_buf start, place;  // where it begins with a block, and where it goes on
    bool made = false, begun = false;
    int groups = 0;  // of copies that it has committed
    std::vector<Copy> copies;
};

// Where some threads of a block meet: how many have come, who waits for the others, and how often it opened.
struct Barrier {
    int arrived = 0;
    long opened = 0;
    std::vector<int> waiting;
};

// Numbers that are drawn.
struct Random {
    using result_type = std::uint64_t;
    std::uint64_t state;

    static constexpr result_type min() { return 0; }
    static constexpr result_type max() { return ~result_type(0); }
    result_type operator()() {  // SplitMix64
        std::uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    }
    std::size_t below(std::size_t count) { return ((*this)() >> 32) * count >> 32; }
};

struct Block {
    std::vector<Thread> threads;
    std::vector<char> dynamic;
    std::vector<char> slots;  // of each thread two values of at most VALUE bytes, on their way to a warp
    Stacks stacks;
    void (*kernel)(void* given);
    void* given;
    Random random;
    jmp_buf outside;
    Barrier numbered[16], whole, in_cluster;
    std::vector<Barrier> warps;
    std::vector<int> left;   // threads of each warp that are done
    std::vector<int> ready;  // threads that can go on, other than the running one
    int running = 0, living = 0;
    long turns_in_vain = 0;

    Block(int count, std::size_t shared, unsigned seed, Stacks stacks)
        : threads(count), dynamic(shared + 16), slots(count * 2 * VALUE), stacks(stacks), random{seed},
          warps(count / WARP), left(count / WARP) {}

    void run(Index index) {
        blockIdx = index;
        for (std::size_t i = 0; i < dynamic.size(); i += 8) {
            const std::uint64_t bytes = random();
            std::memcpy(&dynamic[i], &bytes, std::min<std::size_t>(8, dynamic.size() - i));
        }
        std::fill(left.begin(), left.end(), 0);
        living = int(threads.size());
        for (int i = 0; i < living; i++) {
            threads[i].begun = false;
            threads[i].groups = 0;
            ready.push_back(i);
        }
        while (living)
            if (!_setjmp(outside)) resume(take());
        for (const Barrier& barrier : numbered)
            if (barrier.arrived) fail("a block left with threads at a barrier");
    }

    static Block*& current() {
        static thread_local Block* block;
        return block;
    }
    // Blocks have a stack one after the other, and each may be run by another thread of the system.
    static void enter() {
        _setjmp(current()->self().start);
        within();
    }
    [[gnu::noinline]] static void within() {
        Block& block = *current();
        block.kernel(block.given);
        block.leave();
    }
    [[noreturn]] void leave() {
        if (!self().copies.empty()) fail("a thread left with copies under way");
        const int warp = running / WARP;
        left[warp]++;
        if (warps[warp].arrived) fail("a warp exchanges values without a lane that has left");
        if (--living && whole.arrived == living) open(whole);
        _longjmp(outside, 1);
    }

    [[noreturn]] void resume(int number) {
        running = number;
        threadIdx = {unsigned(number), 0, 0};
        Thread& thread = threads[number];
        if (thread.begun) _longjmp(thread.place, 1);
        thread.begun = true;
        if (thread.made) _longjmp(thread.start, 1);
        thread.made = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks.memory + number * stacks.bytes;
        context.uc_stack.ss_size = stacks.bytes;
        context.uc_link = nullptr;
        makecontext(&context, reinterpret_cast<void (*)()>(enter), 0);
        setcontext(&context);
        fail("a thread could not begin");
    }

    // A thread that can go on, which is the running one from now on.
    int take() {
        if (ready.empty()) fail("nobody gets on: threads wait for what never comes");
        const std::size_t drawn = random.below(ready.size());
        const int next = ready[drawn];
        ready[drawn] = ready.back();
        ready.pop_back();
        return next;
    }

    // Let another go on, if one can.
    void turn() {
        if (++turns_in_vain % (4 * long(ready.size() + 1)) == 0) std::this_thread::yield();
        if (turns_in_vain > 200000000) fail("nobody gets on: threads wait for what never comes");
        if (ready.empty()) return;
        int& drawn = ready[random.below(ready.size())];
        const int next = drawn;
        drawn = running;
        if (!_setjmp(self().place)) resume(next);
    }
    // Let others go on until `ready`, which other blocks bring about.
    template <class Ready>
    void wait(Ready ready) {
        while (!ready()) turn();
        turns_in_vain = 0;
    }

    void open(Barrier& at) {
        at.arrived = 0, at.opened++;
        ready.insert(ready.end(), at.waiting.begin(), at.waiting.end());
        at.waiting.clear();
        turns_in_vain = 0;
    }
    // Until the barrier opens.
    void wait_at(Barrier& at) {
        at.waiting.push_back(running);
        if (!_setjmp(self().place)) resume(take());
    }
    // Whether the barrier opened for `count` threads, of which this is the last.
    bool arrive(Barrier& at, int count) {
        if (++at.arrived < count) return false;
        open(at);
        return true;
    }
    void meet(Barrier& at, int count) {
        if (!arrive(at, count)) wait_at(at);
    }

    Thread& self() { return threads[running]; }
};

inline Block& block() { return *Block::current(); }

// How often each block of a cluster has come to its barrier, and which blocks have ended.
struct Cluster {
    std::atomic<long> arrived[MOST_OF_CLUSTER]{};
    std::atomic<bool> ended[MOST_OF_CLUSTER]{};
};
inline std::vector<Cluster> clusters;  // of the launch
inline Cluster& cluster() { return clusters[blockIdx.x / blocks_of_cluster]; }
inline unsigned rank() { return blockIdx.x % blocks_of_cluster; }
// The last thread of a block that comes waits for the other blocks.
inline void meet_in_cluster() {
    Block& b = block();
    if (++b.in_cluster.arrived < int(blockDim.x)) return b.wait_at(b.in_cluster);
    const long awaited = ++cluster().arrived[rank()];
    b.wait([&] {
        for (unsigned i = 0; i < blocks_of_cluster; i++)
            if (cluster().arrived[i] < awaited && !cluster().ended[i]) return false;
        return true;
    });
    b.open(b.in_cluster);
}

// Meet the other threads of the warp; `read` is called with the values that all of them brought, which
// stay as they are until this thread meets them again.
template <class T, class Read>
void meet(T mine, Read read) {
    static_assert(sizeof(T) <= VALUE);
    Block& b = block();
    const int warp = b.running / WARP, lane = b.running % WARP;
    if (b.left[warp]) fail("a warp exchanges values without a lane that has left");
    Barrier& at = b.warps[warp];
    T* const slots = reinterpret_cast<T*>(b.slots.data() + (at.opened & 1) * b.threads.size() * VALUE +
                                          warp * WARP * VALUE);
    std::memcpy(slots + lane, &mine, sizeof mine);
    b.meet(at, WARP);
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
            unsigned shared, unsigned blocks_at_once, unsigned seed, Stacks stacks) {
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
    Random random{seed};
    for (std::size_t i = blocks / together; i > 1; i--)
        std::swap_ranges(order.begin() + (i - 1) * together, order.begin() + i * together,
                         order.begin() + random.below(i) * together);
    for (std::size_t i = 0; i < blocks; i += together)
        std::shuffle(order.begin() + i, order.begin() + i + together, random);

    using Given = std::pair<void (*)(A...), void**>;
    Given given{kernel, arguments};
    std::atomic<std::size_t> next{0};
    const auto work = [&](unsigned number) {
        const Stacks own{stacks.memory + std::size_t(number) * threads * stacks.bytes, stacks.bytes};
        Block block(int(threads), shared, seed * 977 + number, own);
        Block::current() = &block;
        block.kernel = [](void* given) {
            const auto& [kernel, arguments] = *static_cast<Given*>(given);
            call(kernel, arguments, std::index_sequence_for<A...>{});
        };
        block.given = &given;
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
    b.meet(b.whole, b.living);
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
