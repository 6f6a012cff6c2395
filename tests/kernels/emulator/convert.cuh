// What kernels/common/convert.cuh says in PTX, for the emulator.
#pragma once

inline unsigned short emulated_bfloat16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline unsigned bfloat16_pair(float low, float high) {
    return unsigned(emulated_bfloat16(high)) << 16 | emulated_bfloat16(low);
}
inline unsigned float16_pair(float low, float high) {
    return unsigned(emulated_bits<unsigned short>(_Float16(high))) << 16 |
           emulated_bits<unsigned short>(_Float16(low));
}
inline float from_float16(unsigned short bits) { return float(emulated_bits<_Float16>(bits)); }
