// How the CTAs of a group exchange the hidden state after each time step, through the L2: a ring of slots in
// global memory, whose 32-bit words carry data and readiness at once.
//
// 0 stands for "not there yet". A word is written inverted, and its inverse is never 0: the word would have to be
// a NaN (or two) that no conversion makes. So there are no flags and no fences on the way, and a step costs the
// latency of one store and one load; it moves TILE × dim elements from L2 to every CTA of the group.
// Publication number p, counted from 0 over all that a group of CTAs works on, has slot p % RING, with values in
// the order [batch][value].
//
// Every PERIOD publications, after publication p, each thread empties its own words of publications up to p − 2, then executes
// a fence, as all threads do. notes/hidden_state_exchange.md shows that this is early and late enough.
#pragma once
#include "../common/global_memory.cuh"
#include "clock.cuh"
#include "element.cuh"

enum : unsigned { RING = 16, PERIOD = 7 };
static_assert(RING >= 2 * PERIOD + 2, "a slot could be read before all know it as empty");

// Where some 32-bit words are not there yet.
__device__ inline bool lacks(uint4 words) {
    const unsigned x = words.x < words.y ? words.x : words.y, z = words.z < words.w ? words.z : words.w;
    return (x < z ? x : z) == 0;
}
__device__ inline uint4 inverted(uint4 words) {
    return make_uint4(~words.x, ~words.y, ~words.z, ~words.w);
}
__device__ inline unsigned present(unsigned word) { return word == ~0u ? 0x80000000u : ~word; }
__device__ inline uint2 present(uint2 words) {
    return make_uint2(present(words.x), present(words.y));
}

struct Ring {
    Storage* const first;
    const unsigned slot;     // elements of one
    unsigned published = 0;  // so far
    unsigned since = 0;      // the slots were last emptied

    __device__ Ring(void* workspace, unsigned group, unsigned slot)
        : first(static_cast<Storage*>(workspace) + i64(group) * RING * slot), slot(slot) {}

    __device__ Storage* at(unsigned publication) const {
        return first + i64(publication % RING) * slot;
    }
    __device__ Storage* latest() const { return at(published - 1); }

    // Once a step, after a barrier and when the thread has published what it has; `empty` is called
    // with the slots in which the thread's words are to be emptied.
    template <class Empty>
    __device__ void advance(Empty empty) {
        published++;
        if (++since < PERIOD) return;
        since = 0;
#pragma unroll 1
        for (unsigned back = 3; back < 3 + PERIOD; back++)
            if (published >= back) empty(at(published - back));
        fence();
    }
};

__device__ inline void publish(Storage* to, Pair pair) {
    store_words(reinterpret_cast<unsigned*>(to), present(pair));
}
__device__ inline void withdraw(Storage* to) {
    if constexpr (sizeof(Pair) == 4) store_words(reinterpret_cast<unsigned*>(to), 0u);
    else store_words(reinterpret_cast<unsigned*>(to), make_uint2(0, 0));
}

// Words of 16 bytes that are STRIDE of them apart, the first `count` of COUNT; the others are zeros.
template <int COUNT, int STRIDE>
__device__ void read(uint4 (&words)[COUNT], const uint4* from, int count) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        words[i] = i < count ? from[i * STRIDE] : make_uint4(0, 0, 0, 0);
}
// How long a warp waits after its CTA's product before it polls for words. Polls that come too early take L2
// bandwidth from the stores they wait for: with 48 CTAs they made a step half as long again. The pause adapts: it
// grows after a poll that came too early, and shrinks slightly after one that did not.
struct AdaptiveBackoff {
    enum : unsigned { LONGER = 64, SHORTER = 4, MOST = 4000 };  // cycles
    unsigned begun = 0, cycles = 0;

    __device__ void begin() { begun = clock_cycles(); }
    __device__ void wait() const {
        while (clock_cycles() - begun < cycles) {}
    }
    // To be called by whole warps.
    __device__ void learn(bool early) {
        if (__any_sync(~0u, early)) cycles = cycles + LONGER < MOST ? cycles + LONGER : MOST;
        else cycles = cycles > SHORTER ? cycles - SHORTER : 0;
    }
};

// Likewise words that other CTAs publish, once all of them are there. To be called by whole warps.
template <int COUNT, int STRIDE>
__device__ void await(uint4 (&words)[COUNT], const uint4* from, int count, AdaptiveBackoff& backoff) {
    bool lacking, early = false;
    backoff.wait();
    do {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            words[i] = i < count ? load_words(from + i * STRIDE) : make_uint4(~0u, ~0u, ~0u, ~0u);
        lacking = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) lacking |= lacks(words[i]);
        early |= lacking;
    } while (lacking);
    backoff.learn(early);
#pragma unroll
    for (int i = 0; i < COUNT; i++) words[i] = inverted(words[i]);
}
