// What runs the threads of a kernel; see cuda.hpp.
#include "cuda.hpp"

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

__thread Index threadIdx, blockIdx;
Index blockDim, gridDim;

namespace emulator {

void fail(const char* reason) {
    std::fprintf(stderr, "emulator: %s\n", reason);
    std::fflush(stderr);
    std::_Exit(70);
}

namespace {

// An asynchronous copy, which may be carried out at any time before it is waited for.
struct Copy {
    void* to;
    const void* from;
    std::size_t bytes, read;  // and zeros for what is not read
    int group;
};

// A place to go on at. GCC's own, as setjmp would take several times as long: threads take turns millions of times.
using Place = void*[5];

struct Thread {
    Place start, place;  // where it begins with a block, and where it goes on
    bool made = false, begun = false;
    int groups = 0;  // of copies that it has committed
    std::vector<Copy> copies;
};

// Where some threads of a block meet: how many have come, who waits for the others, and how often it opened.
struct Barrier {
    int arrived = 0;
    long opened = 0;
    std::vector<int> waiting;
    std::vector<long> turn_of;  // of each thread, the turn in which it came last; barriers with numbers
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

constexpr std::uint64_t UNTOUCHED = 0x5ca9ab1e0ddba115;  // at the end of a stack

constexpr std::size_t YIELDS = 128;  // after one of so many turns of threads, another block may go on

struct Block {
    std::vector<Thread> threads;
    std::vector<char> dynamic;
    std::vector<char> slots;  // of each thread two values of at most VALUE bytes, on their way to a warp
    const Launch& launch;
    char* stacks;
    Random random;
    Place outside;
    Barrier numbered[16], whole, in_cluster;
    std::vector<Barrier> warps;
    std::vector<int> left;   // threads of each warp that are done
    std::vector<int> ready;  // threads that can go on, other than the running one
    int running = 0, living = 0;
    int slow = -1;  // with an odd seed, a warp whose threads run almost only when no other can
    long turns = 0;

    Block(const Launch& launch, unsigned number)
        : threads(launch.threads), dynamic(launch.shared + 16), slots(launch.threads * 2 * VALUE), launch(launch),
          stacks(launch.stacks.memory + std::size_t(number) * launch.threads * launch.stacks.bytes),
          random{launch.seed * 977 + number}, warps((launch.threads + WARP - 1) / WARP), left(warps.size()) {}

    void run(Index index) {
        blockIdx = index;
        for (std::size_t i = 0; i < dynamic.size(); i += 8) {
            const std::uint64_t bytes = random();
            std::memcpy(&dynamic[i], &bytes, std::min<std::size_t>(8, dynamic.size() - i));
        }
        std::fill(left.begin(), left.end(), 0);
        living = int(threads.size());
        slow = launch.seed % 2 ? int(random.below(warps.size())) : -1;
        turns = 0;
        for (int i = 0; i < living; i++) {
            threads[i].begun = false;
            threads[i].groups = 0;
            ready.push_back(i);
        }
        while (living)
            if (!__builtin_setjmp(outside)) resume(take());
        for (const Barrier& barrier : numbered)
            if (barrier.arrived) fail("a block left with threads at a barrier");
    }

    static Block*& current() {
        static thread_local Block* block;
        return block;
    }
    // Blocks have a stack one after the other, and each may be run by another thread of the system.
    static void enter() {
        __builtin_setjmp(current()->self().start);
        within();
    }
    [[gnu::noinline]] static void within() {
        Block& block = *current();
        block.launch.kernel(block.launch.given);
        block.leave();
    }
    [[noreturn, gnu::noinline]] void leave() {
        if (!self().copies.empty()) fail("a thread left with copies under way");
        if (std::memcmp(end_of_stack(running), &UNTOUCHED, sizeof UNTOUCHED)) fail("a thread needs a larger stack");
        const int warp = running / WARP;
        left[warp]++;
        if (warps[warp].arrived) fail("a warp exchanges values without a lane that has left");
        if (--living && whole.arrived == living) open(whole);
        __builtin_longjmp(outside, 1);
    }

    [[noreturn, gnu::noinline]] void resume(int number) {
        running = number;
        threadIdx = {unsigned(number), 0, 0};
        Thread& thread = threads[number];
        if (thread.begun) __builtin_longjmp(thread.place, 1);
        thread.begun = true;
        if (thread.made) __builtin_longjmp(thread.start, 1);
        thread.made = true;
        ucontext_t context;
        getcontext(&context);
        std::memcpy(end_of_stack(number), &UNTOUCHED, sizeof UNTOUCHED);
        context.uc_stack.ss_sp = end_of_stack(number);
        context.uc_stack.ss_size = launch.stacks.bytes;
        context.uc_link = nullptr;
        makecontext(&context, reinterpret_cast<void (*)()>(enter), 0);
        setcontext(&context);
        fail("a thread could not begin");
    }

    // Which a thread reaches last.
    char* end_of_stack(int number) { return stacks + number * launch.stacks.bytes; }

    // A thread that can go on, which is the running one from now on.
    int take() {
        if (ready.empty()) fail("nobody gets on: threads wait for what never comes");
        // Or blocks would change places where they wait for each other, and nowhere else.
        if (random.below(YIELDS) == 0) std::this_thread::yield();
        std::size_t drawn = random.below(ready.size());
        for (int again = 0; ready[drawn] / WARP == slow && again < 8; again++) drawn = random.below(ready.size());
        const int next = ready[drawn];
        ready[drawn] = ready.back();
        ready.pop_back();
        return next;
    }

    // Let another go on, if one can. A block that works takes far fewer turns than MOST. One that waits for another block
    // may take more on a busy machine, which lets the other one wait for a core: so it sleeps a millisecond at a time.
    void turn() {
        constexpr long MOST = 5000000, NAP = 1000, NAPS = 20000;
        if (++turns % (4 * long(ready.size() + 1)) == 0) std::this_thread::yield();
        if (turns > MOST && turns % NAP == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (turns > MOST + NAP * NAPS) fail("nobody gets on: threads wait for what never comes");
        if (ready.empty()) return;
        int& drawn = ready[random.below(ready.size())];
        const int next = drawn;
        drawn = running;
        if (!__builtin_setjmp(self().place)) resume(next);
    }
    void open(Barrier& at) {
        at.arrived = 0, at.opened++;
        ready.insert(ready.end(), at.waiting.begin(), at.waiting.end());
        at.waiting.clear();
    }
    // Until the barrier opens.
    void wait_at(Barrier& at) {
        at.waiting.push_back(running);
        if (!__builtin_setjmp(self().place)) resume(take());
    }
    // A thread that comes again before the barrier has opened would be counted for another one.
    void come(Barrier& at) {
        at.turn_of.resize(threads.size());
        long& turn = at.turn_of[running];
        if (turn == at.opened + 1) fail("a thread comes to a barrier twice before it opens");
        turn = at.opened + 1;
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

// How often each block of a cluster has come to its barrier, and which blocks have ended.
struct Cluster {
    std::atomic<long> arrived[MOST_OF_CLUSTER]{};
    std::atomic<bool> ended[MOST_OF_CLUSTER]{};
};
std::vector<Cluster> clusters;  // of the launch
Cluster& cluster() { return clusters[blockIdx.x / blocks_of_cluster]; }
}  // namespace

void turn() { Block::current()->turn(); }

void meet_block() {
    Block& b = *Block::current();
    b.meet(b.whole, b.living);
}
void meet_at(int barrier, int count) {
    Block& b = *Block::current();
    b.come(b.numbered[barrier]);
    b.meet(b.numbered[barrier], count);
}
void arrive_at(int barrier, int count) {
    Block& b = *Block::current();
    b.come(b.numbered[barrier]);
    b.arrive(b.numbered[barrier], count);
    b.turn();  // others may come first to what follows
}
// The last thread of a block that comes waits for the other blocks.
void meet_in_cluster() {
    Block& b = *Block::current();
    if (++b.in_cluster.arrived < int(blockDim.x)) return b.wait_at(b.in_cluster);
    const long awaited = ++cluster().arrived[rank()];
    wait([&] {
        for (unsigned i = 0; i < blocks_of_cluster; i++)
            if (cluster().arrived[i] < awaited && !cluster().ended[i]) return false;
        return true;
    });
    b.open(b.in_cluster);
}

const void* meet_warp(const void* mine, std::size_t bytes) {
    Block& b = *Block::current();
    const int warp = b.running / WARP, lane = b.running % WARP;
    if (b.left[warp]) fail("a warp exchanges values without a lane that has left");
    Barrier& at = b.warps[warp];
    char* const slots = b.slots.data() + ((at.opened & 1) * b.threads.size() + warp * WARP) * VALUE;
    std::memcpy(slots + lane * bytes, mine, bytes);
    b.meet(at, WARP);
    return slots;
}

char* dynamic_shared() {
    char* const found = Block::current()->dynamic.data();
    return found + -std::uintptr_t(found) % 16;
}

static void copy_now(const Copy& copy) {
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.read);
}

void copy_async(void* to, const void* from, std::size_t bytes, std::size_t read) {
    if (std::uintptr_t(to) % bytes || std::uintptr_t(from) % bytes) fail("a copy is not aligned");
    if (read > bytes) fail("a copy reads more than it writes");
    Block& b = *Block::current();
    const Copy copy{to, from, bytes, read, b.self().groups};
    if (b.random() & 1) copy_now(copy);
    else b.self().copies.push_back(copy);
}

void commit() { Block::current()->self().groups++; }
int committed() { return Block::current()->self().groups; }

// Until at most `pending` of the groups that this thread committed are under way.
void wait_for_copies(int pending) {
    Thread& self = Block::current()->self();
    std::vector<Copy> later;
    for (const Copy& copy : self.copies)
        if (copy.group < self.groups - pending) copy_now(copy);
        else later.push_back(copy);
    self.copies = std::move(later);
}

void launch(const Launch& launch) {
    const unsigned* const grid = launch.grid;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {launch.threads, 1, 1};
    const std::size_t blocks = std::size_t(grid[0]) * grid[1] * grid[2];
    const std::size_t together = blocks_of_cluster;
    if (together > MOST_OF_CLUSTER) fail("a cluster has more blocks than there is room for");
    if (blocks % together) fail("a cluster has too few blocks");
    clusters = std::vector<Cluster>(blocks / together);
    std::vector<std::size_t> order(blocks);
    for (std::size_t i = 0; i < blocks; i++) order[i] = i;
    Random random{launch.seed};
    for (std::size_t i = blocks / together; i > 1 && !starts_in_order; i--) {
        const std::size_t drawn = random.below(i);
        if (drawn == i - 1) continue;
        std::swap_ranges(order.begin() + (i - 1) * together, order.begin() + i * together,
                         order.begin() + drawn * together);
    }
    for (std::size_t i = 0; i < blocks; i += together)
        std::shuffle(order.begin() + i, order.begin() + i + together, random);

    std::atomic<std::size_t> next{0};
    const auto work = [&](unsigned number) {
        Block block(launch, number);
        Block::current() = &block;
        for (std::size_t i = next++; i < blocks; i = next++) {
            const auto at = order[i];
            block.run({unsigned(at % grid[0]), unsigned(at / grid[0] % grid[1]),
                       unsigned(at / grid[0] / grid[1])});
            cluster().ended[rank()] = true;
        }
    };
    const unsigned at_once = std::max(launch.blocks_at_once, blocks_of_cluster);
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < at_once && i < blocks; i++) workers.emplace_back(work, i);
    for (auto& worker : workers) worker.join();
}

}  // namespace emulator
