// What CTAs publish for a decoupled look-back: the aggregates (composed affine maps) of segments, for every dtype of the
// state.
//
// An aggregate takes MAP_LINES pieces of 16 bytes. Each piece holds three 32-bit words of data and a flag that is not
// zero, and travels in one atomic store and one atomic load, so no fence is needed. The memory is zeroed before, by the host or by the
// first CTA.
#pragma once
#include "../common/affine.cuh"
#include "../common/global_memory.cuh"

enum : int { STATE_WORDS = sizeof(State) / 4 };
enum : int { WORDS_IN_LINE = 3 };

__device__ constexpr int lines_for(int states) {
    return (states * STATE_WORDS + WORDS_IN_LINE - 1) / WORDS_IN_LINE;
}
enum : int { MAP_LINES = lines_for(COMPENSATED ? 3 : 2) };
// Pause between two polls of one address. A poll takes about a microsecond, and polls delay the stores they wait for.
enum : unsigned { POLLED_NS = 100 };

template <int LINES>
struct LineBuffer {
    unsigned word[LINES * WORDS_IN_LINE] = {};

    __device__ void put(int index, State x) {
        const auto bits = Element::Whole::narrow(x);
#pragma unroll
        for (int w = 0; w < STATE_WORDS; w++)
            word[index * STATE_WORDS + w] = unsigned(u64(bits) >> (32 * w));
    }
    __device__ State get(int index) const {
        u64 bits = 0;
#pragma unroll
        for (int w = 0; w < STATE_WORDS; w++)
            bits |= u64(word[index * STATE_WORDS + w]) << (32 * w);
        return Element::Whole::widen(typename Element::Whole::Storage(bits));
    }

    // Pieces of one map are `apart` in memory, so that those of successive threads are contiguous.
    __device__ void publish(uint4* to, i64 apart) const {
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            const unsigned* const w = word + l * WORDS_IN_LINE;
            store_relaxed(to + l * apart, make_uint4(w[0], w[1], w[2], 1));
        }
    }
    // Whether all pieces had been published.
    __device__ bool fetch(const uint4* from, i64 apart) {
        bool there = true;
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            const uint4 line = load_relaxed(from + l * apart);
            unsigned* const w = word + l * WORDS_IN_LINE;
            w[0] = line.x, w[1] = line.y, w[2] = line.z;
            there = there && line.w;
        }
        return there;
    }
};

__device__ inline void publish(uint4* to, i64 apart, const Affine& map) {
    LineBuffer<MAP_LINES> lines;
    lines.put(0, map.scale), lines.put(1, map.shift);
    if constexpr (COMPENSATED) lines.put(2, map.error_term);
    lines.publish(to, apart);
}
// Loads of up to MOST published maps that lie `stride` apart in memory.
template <int MOST>
struct PendingMaps {
    const uint4* from;
    i64 stride, apart;
    int count;
    unsigned missing = 0;
    LineBuffer<MAP_LINES> lines[MOST];

    __device__ void request(const uint4* first, i64 by, i64 lines_apart, int number) {
        from = first, stride = by, apart = lines_apart, count = number;
        missing = count >= MOST ? (1u << MOST) - 1 : count > 0 ? (1u << count) - 1 : 0;
        poll();
    }
    __device__ void poll() {
#pragma unroll
        for (int i = 0; i < MOST; i++)
            if (missing >> i & 1 && lines[i].fetch(from + i * stride, apart)) missing &= ~(1u << i);
    }
    // Wait for the first `count` maps; the others are the identity.
    __device__ void await(Affine (&maps)[MOST]) {
#pragma unroll 1
        for (; missing; poll()) __nanosleep(POLLED_NS);
#pragma unroll
        for (int i = 0; i < MOST; i++)
            maps[i] = i < count ? Affine{lines[i].get(0), COMPENSATED ? lines[i].get(2) : State(0), lines[i].get(1)}
                                : Affine{};
    }
};
