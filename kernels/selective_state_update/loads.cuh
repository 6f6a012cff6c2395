// Loads and stores that are predicated, where the compiler would branch, and then wait for each load before it starts the
// next.
//
// What is not wanted stays as it was. All but those of the state read what no thread writes.
#pragma once
#include "../common/copy.cuh"
#include "../common/types.cuh"

// One element: 4 bytes if wide, else 2.
__device__ inline unsigned load_element(const void* from, bool wide, bool wanted) {
    unsigned bits = 0;
    asm("{ .reg .pred wanted, wide, narrow; .reg .b16 half;\n\t"
        "setp.ne.b32 wanted, %3, 0; setp.ne.and.b32 wide|narrow, %2, 0, wanted;\n\t"
        "@wide ld.global.nc.b32 %0, [%1];\n\t"
        "@narrow ld.global.nc.b16 half, [%1];\n\t"
        "@narrow cvt.u32.u16 %0, half; }"
        : "+r"(bits)
        : "l"(from), "r"(int(wide)), "r"(int(wanted)));
    return bits;
}

// The same into bits that stay as they are where the element is not wanted: a register that a load goes on to fill while others
// are computed.
__device__ inline void load_bits(unsigned& bits, const void* from, bool wide, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted, wide, narrow;\n\t"
        "setp.ne.b32 wanted, %3, 0; setp.ne.and.b32 wide|narrow, %2, 0, wanted;\n\t"
        "@wide ld.global.nc.b32 %0, [%1];\n\t"
        "@narrow ld.global.nc.u16 %0, [%1]; }"
        : "+r"(bits)
        : "l"(from), "r"(int(wide)), "r"(int(wanted)));
}

// 16 or 8 bytes.
__device__ inline void load_words(unsigned (&to)[4], const void* from, bool wanted) {
    asm("{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n\t"
        "@wanted ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(int(wanted)));
}
__device__ inline void load_words(unsigned (&to)[2], const void* from, bool wanted) {
    asm("{ .reg .pred wanted; setp.ne.b32 wanted, %3, 0;\n\t"
        "@wanted ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(int(wanted)));
}

// 16 bytes of the state, which nobody writes before they are used. Volatile, so that the load starts where it is written, and not
// where it is used.
__device__ inline void load_state(unsigned (&to)[4], const void* from, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n\t"
        "@wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(int(wanted)));
}

__device__ inline void store_state(void* to, const unsigned (&from)[4], bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n\t"
        "@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
        "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "r"(int(wanted))
        : "memory");
}

// An integer, of 8 bytes if wide, else of 4.
__device__ inline i64 load_index(const void* from, i64 index, bool wide) {
    i64 found;
    asm("{ .reg .pred wide; .reg .b32 narrow;\n\t"
        "setp.ne.b32 wide, %2, 0;\n\t"
        "@wide ld.global.nc.b64 %0, [%1];\n\t"
        "@!wide ld.global.nc.b32 narrow, [%1];\n\t"
        "@!wide cvt.s64.s32 %0, narrow; }"
        : "=l"(found)
        : "l"(static_cast<const char*>(from) + (index << (wide ? 3 : 2))), "r"(int(wide)));
    return found;
}

// One element: all bits if wide, else the first 16.
__device__ inline void store_element(void* to, unsigned bits, bool wide, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted, wide, narrow; .reg .b16 half;\n\t"
        "setp.ne.b32 wanted, %3, 0; setp.ne.and.b32 wide|narrow, %2, 0, wanted;\n\t"
        "cvt.u16.u32 half, %1;\n\t"
        "@wide st.global.b32 [%0], %1;\n\t"
        "@narrow st.global.b16 [%0], half; }" ::"l"(to),
        "r"(bits), "r"(int(wide)), "r"(int(wanted))
        : "memory");
}

// Shared memory by an address in a register. From a pointer, the compiler would compute the address anew for each access, in five
// instructions.
using SharedAddress = unsigned;

__device__ inline SharedAddress shared_address(const void* data) {
    unsigned address = unsigned(__cvta_generic_to_shared(data));
    asm volatile("" : "+r"(address));
    return address;
}
__device__ inline void load_shared(float (&to)[2], SharedAddress from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(from) : "memory");
}
__device__ inline void load_shared(float (&to)[4], SharedAddress from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from) : "memory");
}
__device__ inline void load_shared(float (&to)[1], SharedAddress from) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[0]) : "r"(from) : "memory");
}
__device__ inline void store_shared(SharedAddress to, const float (&from)[1]) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(from[0]) : "memory");
}
__device__ inline void store_shared(SharedAddress to, const float (&from)[2]) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(from[0]), "f"(from[1]) : "memory");
}
__device__ inline void store_shared(SharedAddress to, const float (&from)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3])
                 : "memory");
}

// Copy 16 bytes while the thread does other work.
__device__ inline void copy_to_shared(SharedAddress to, const void* from, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
        "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(to), "l"(from), "r"(int(wanted))
        : "memory");
}
// The same, or 16 zeros. It does not branch, as a copy that a thread may leave out does.
__device__ inline void copy_or_clear(SharedAddress to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
// Copy 16 or 8 bytes that other warps read, too, through the L1 cache.
template <int BYTES>
__device__ void copy_often_read(SharedAddress to, const void* from, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
        "@wanted cp.async.ca.shared.global [%0], [%1], %3; }" ::"r"(to), "l"(from), "r"(int(wanted)), "n"(BYTES)
        : "memory");
}
__device__ inline void load_shared(unsigned (&to)[2], SharedAddress from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}
__device__ inline void load_shared(unsigned (&to)[4], SharedAddress from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
// An element of 16 bits.
__device__ inline void load_shared(unsigned& to, SharedAddress from) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
}
