// What kernels/common/mma.cuh says in PTX, for the emulator.
#pragma once
#include "../common/convert.cuh"
#include "cuda.hpp"

// Of a warp's product: the 16 values of a row or a column of which four lanes hold two words each.
struct EmulatedWords {
    uint4 a;
    uint2 b;
};
// Four numbers of which all operations are of one element with one.
using EmulatedFloats [[gnu::vector_size(16)]] = float;
using EmulatedBits [[gnu::vector_size(16)]] = unsigned;

template <class Take>
void emulated_mma(float (&acc)[4], EmulatedWords own, Take take) {
    const int lane = emulated_lane();
    emulator::meet(own, [&](const EmulatedWords* lanes) {
        const EmulatedWords *const rows = lanes + lane / 4 * 4, *const columns = lanes + lane % 4 * 8;
        auto sums = EmulatedFloats{acc[0], acc[1], acc[2], acc[3]};
        for (int k = 0; k < 4; k++) {
            const uint4 a = rows[k].a;
            const uint2 b = columns[k].b, next = columns[4 + k].b;
            take(sums, EmulatedBits{a.x, a.x, a.y, a.y}, EmulatedBits{b.x, next.x, b.x, next.x});
            take(sums, EmulatedBits{a.z, a.z, a.w, a.w}, EmulatedBits{b.y, next.y, b.y, next.y});
        }
        for (int i = 0; i < 4; i++) acc[i] = sums[i];
    });
}
inline void mma_bfloat16(float (&acc)[4], uint4 a, uint2 b) {
    emulated_mma(acc, {a, b}, [](EmulatedFloats& sums, EmulatedBits a, EmulatedBits b) {
        sums += EmulatedFloats(a << 16) * EmulatedFloats(b << 16);
        sums += EmulatedFloats(a & 0xffff0000u) * EmulatedFloats(b & 0xffff0000u);
    });
}
inline void mma_float16(float (&acc)[4], uint4 a, uint2 b) {
    const auto floats = [](EmulatedBits x) {
        EmulatedFloats wide;
        for (int i = 0; i < 4; i++) wide[i] = from_float16((unsigned short)x[i]);
        return wide;
    };
    emulated_mma(acc, {a, b}, [&](EmulatedFloats& sums, EmulatedBits a, EmulatedBits b) {
        sums += floats(a) * floats(b);
        sums += floats(a >> 16) * floats(b >> 16);
    });
}
// Tensor cores do not see the 13 last bits.
inline void mma_tf32(float (&acc)[4], uint4 a, uint2 b) {
    emulated_mma(acc, {a, b}, [](EmulatedFloats& sums, EmulatedBits a, EmulatedBits b) {
        sums += EmulatedFloats(a & 0xffffe000u) * EmulatedFloats(b & 0xffffe000u);
    });
}
