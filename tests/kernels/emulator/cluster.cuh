// What kernels/rnn/cluster.cuh says in PTX, for the emulator. Of shared memory, each block has what its
// thread of the system has for itself: the same things, as far from the same mark.
#pragma once
#include <array>
#include <map>
#include <mutex>

#include "../common/global_memory.cuh"

using Shared = i64;

inline thread_local char emulated_mark;

struct EmulatedArrivals {
    long awaited = 0, phase = 0;
    bool expected = false;
};
struct EmulatedCluster {
    std::array<char*, emulator::MOST_OF_CLUSTER> marks{};
};
// All that blocks of a cluster share, and who looks at it holds the lock.
struct EmulatedClusters {
    std::mutex lock;
    std::map<unsigned, EmulatedCluster> of;
    std::map<char*, EmulatedArrivals> arrivals;
};
inline EmulatedClusters& emulated_clusters() {
    static EmulatedClusters clusters;
    return clusters;
}
template <class Do>
auto emulated_cluster(Do what) {
    EmulatedClusters& all = emulated_clusters();
    const std::lock_guard<std::mutex> lock(all.lock);
    return what(all, all.of[blockIdx.x / emulator::blocks_of_cluster]);
}

// The rank, and beyond 2^40 of it how far from the mark.
inline Shared emulated_address(unsigned rank, i64 offset) { return (i64(rank) << 40) + offset + (1ll << 39); }
inline Shared shared_address(const void* of) {
    return emulated_address(emulator::rank(), static_cast<const char*>(of) - &emulated_mark);
}
inline Shared address_in(unsigned rank, Shared address) {
    if (rank >= emulator::blocks_of_cluster) emulator::fail("a cluster has no such block");
    return (address & ((1ll << 40) - 1)) | i64(rank) << 40;
}
inline char* emulated_memory(EmulatedCluster& cluster, Shared address) {
    return cluster.marks[address >> 40] + ((address & ((1ll << 40) - 1)) - (1ll << 39));
}

inline void cluster_barrier() {
    emulated_cluster([&](EmulatedClusters&, EmulatedCluster& cluster) {
        cluster.marks[emulator::rank()] = &emulated_mark;
    });
    emulator::meet_in_cluster();
}

inline void begin_arrivals(Shared arrivals) {
    emulated_cluster([&](EmulatedClusters& all, EmulatedCluster& cluster) {
        cluster.marks[emulator::rank()] = &emulated_mark;
        all.arrivals[emulated_memory(cluster, arrivals)] = {};
    });
}
inline void emulated_arrival(EmulatedArrivals& arrivals) {
    if (!arrivals.expected || arrivals.awaited) return;
    arrivals.expected = false;
    arrivals.phase++;
}
inline void expect_bytes(Shared arrivals, unsigned bytes) {
    emulated_cluster([&](EmulatedClusters& all, EmulatedCluster& cluster) {
        EmulatedArrivals& found = all.arrivals.at(emulated_memory(cluster, arrivals));
        if (found.expected) emulator::fail("bytes are expected twice");
        found.expected = true;
        found.awaited += bytes;
        emulated_arrival(found);
    });
}
inline void await_bytes(Shared arrivals, unsigned odd) {
    emulator::wait([&] {
        return emulated_cluster([&](EmulatedClusters& all, EmulatedCluster& cluster) {
            return (all.arrivals.at(emulated_memory(cluster, arrivals)).phase & 1) != odd;
        });
    });
}
inline void send(Shared to, uint4 words, Shared arrivals) {
    emulated_turn();
    emulated_cluster([&](EmulatedClusters& all, EmulatedCluster& cluster) {
        char* const there = emulated_memory(cluster, to);
        if (std::uintptr_t(there) % 16) emulator::fail("a word is not aligned");
        std::memcpy(there, &words, sizeof words);
    });
    emulated_turn();
    emulated_cluster([&](EmulatedClusters& all, EmulatedCluster& cluster) {
        EmulatedArrivals& found = all.arrivals.at(emulated_memory(cluster, arrivals));
        found.awaited -= sizeof words;
        emulated_arrival(found);
    });
}
