// What kernels/common/compiler.cuh says in PTX, for the emulator.
#pragma once

template <class T>
T chosen(bool first, T a, T b) {
    return first ? a : b;
}
inline unsigned opaque(unsigned word) { return word; }
