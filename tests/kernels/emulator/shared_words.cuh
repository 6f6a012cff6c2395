// What kernels/ssd_scan/shared_words.cuh says in PTX, for the emulator. Addresses are those of shared memory from its start on.
#pragma once
#include "cuda.hpp"

inline char* tile_memory() { return emulator::dynamic_shared(); }
inline unsigned shared_address(const void* data) { return unsigned(static_cast<const char*>(data) - tile_memory()); }

inline void copy_piece(unsigned to, const void* from, int bytes) {
    emulator::copy_async(tile_memory() + to, from, 16, bytes);
}

template <class T>
T emulated_load(unsigned address) {
    T value;
    std::memcpy(&value, tile_memory() + address, sizeof value);
    return value;
}
inline unsigned load_word(unsigned address) { return emulated_load<unsigned>(address); }
inline uint2 load_two_words(unsigned address) { return emulated_load<uint2>(address); }
inline uint4 load_piece(unsigned address) { return emulated_load<uint4>(address); }
inline void store_word(unsigned address, unsigned word) { std::memcpy(tile_memory() + address, &word, sizeof word); }
inline void store_two_words(unsigned address, uint2 words) { std::memcpy(tile_memory() + address, &words, sizeof words); }

inline uint4 load_matrices(bool transposed, unsigned row) {
    struct Row {
        unsigned short elements[8];
    };
    unsigned words[4];
    emulator::meet(emulated_load<Row>(row), [&](const Row* rows) {
        const int first = emulated_lane() / 4, second = emulated_lane() % 4 * 2;
        for (int i = 0; i < 4; i++) {
            const auto element = [&](int r, int c) { return unsigned(rows[8 * i + r].elements[c]); };
            words[i] = transposed ? element(second, first) | element(second + 1, first) << 16
                                  : element(first, second) | element(first, second + 1) << 16;
        }
    });
    return {words[0], words[1], words[2], words[3]};
}
