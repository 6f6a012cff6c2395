// Loads from global memory in instructions that do not wait for one another: left to itself, the compiler branches for each
// word.
#pragma once

// 16 bytes, if wanted; otherwise words may be anything.
__device__ inline void load_line(unsigned (&word)[4], const void* from, bool wanted) {
    asm("{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n\t"
        "@wanted ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
        : "l"(from), "r"(int(wanted)));
}
// The first bytes of 16, an even number from 2 to 14; words that have none of them keep their values.
__device__ inline void load_first(unsigned (&word)[4], const void* from, int bytes) {
    asm("{ .reg .pred first, second, third, a, b, c, d;\n\t"
        "setp.ge.s32 first, %5, 4; setp.ge.s32 second, %5, 8; setp.ge.s32 third, %5, 12;\n\t"
        "setp.eq.s32 a, %5, 2; setp.eq.s32 b, %5, 6; setp.eq.s32 c, %5, 10; setp.eq.s32 d, %5, 14;\n\t"
        "@first ld.global.nc.b32 %0, [%4];\n\t"
        "@second ld.global.nc.b32 %1, [%4 + 4];\n\t"
        "@third ld.global.nc.b32 %2, [%4 + 8];\n\t"
        "@a ld.global.nc.u16 %0, [%4];\n\t"
        "@b ld.global.nc.u16 %1, [%4 + 4];\n\t"
        "@c ld.global.nc.u16 %2, [%4 + 8];\n\t"
        "@d ld.global.nc.u16 %3, [%4 + 12]; }"
        : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
        : "l"(from), "r"(bytes));
}
