// What kernels/common/mma.cuh says in PTX, for the emulator.
#pragma once
#include "../common/convert.cuh"
#include "cuda.hpp"

// Of a warp's product: the 16 values of a row or a column of which four lanes hold two words each.
struct EmulatedWords {
    uint4 a;
    uint2 b;
};
template <class Take>
void emulated_mma(float (&acc)[4], EmulatedWords own, Take take) {
    const int lane = emulated_lane();
    emulator::meet(own, [&](const EmulatedWords* lanes) {
        const EmulatedWords *const rows = lanes + lane / 4 * 4, *const columns = lanes + lane % 4 * 8;
        for (int k = 0; k < 4; k++) {
            const uint4 a = rows[k].a;
            for (int i = 0; i < 2; i++) {
                const uint2 b = columns[4 * i + k].b;
                take(acc[i], a.x, b.x);
                take(acc[i], a.z, b.y);
                take(acc[2 + i], a.y, b.x);
                take(acc[2 + i], a.w, b.y);
            }
        }
    });
}
inline void mma_bfloat16(float (&acc)[4], uint4 a, uint2 b) {
    emulated_mma(acc, {a, b}, [](float& sum, unsigned a, unsigned b) {
        sum += __uint_as_float(a << 16) * __uint_as_float(b << 16);
        sum += __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
    });
}
inline void mma_float16(float (&acc)[4], uint4 a, uint2 b) {
    emulated_mma(acc, {a, b}, [](float& sum, unsigned a, unsigned b) {
        sum += from_float16((unsigned short)a) * from_float16((unsigned short)b);
        sum += from_float16((unsigned short)(a >> 16)) * from_float16((unsigned short)(b >> 16));
    });
}
// Tensor cores do not see the 13 last bits.
inline void mma_tf32(float (&acc)[4], uint4 a, uint2 b) {
    emulated_mma(acc, {a, b}, [](float& sum, unsigned a, unsigned b) {
        sum += __uint_as_float(a & 0xffffe000u) * __uint_as_float(b & 0xffffe000u);
    });
}
