// Copies of boxes of a tensor to shared memory by the tensor memory accelerator of sm_90, which swizzles rows of 128 bytes and writes
// zeros for what lies outside of the tensor. A tensor is described by a map in global memory, which a CTA makes for itself.
#pragma once
#include "../common/types.cuh"

enum : int { TENSOR_MAP = 128 };  // bytes, and what it is aligned to

template <int DIMENSION>
__device__ inline void set_dimension(u64 map, unsigned size, unsigned of_box) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"l"(map), "n"(DIMENSION), "r"(size) : "memory");
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"l"(map), "n"(DIMENSION), "r"(of_box) : "memory");
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], %1, 1;" ::"l"(map), "n"(DIMENSION) : "memory");
}
// Of the dimension after this one.
template <int DIMENSION>
__device__ inline void set_stride(u64 map, u64 bytes) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;" ::"l"(map), "n"(DIMENSION), "l"(bytes) : "memory");
}

// Make the map of a tensor of 16-bit elements with three dimensions, the first one without gaps: by a whole warp, of which `scratch`
// are 128 bytes in shared memory. A box has 64 elements, one of the second dimension and `rows` of the third. Strides are in bytes.
__device__ inline void make_tensor_map(void* map, unsigned scratch, const void* data, const unsigned (&sizes)[3], const u64 (&strides)[2],
                                       int rows) {
    const int lane = threadIdx.x % 32;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(scratch + 4 * lane), "r"(0) : "memory");
    __syncwarp();
    if (lane == 0) {
        const u64 at = scratch;
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"l"(at), "l"(data) : "memory");
        asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 2;" ::"l"(at) : "memory");  // less one
        asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 1;" ::"l"(at) : "memory");  // u16
        asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;" ::"l"(at) : "memory");
        asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 3;" ::"l"(at) : "memory");  // of 128 bytes
        asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" ::"l"(at) : "memory");  // zeros
        set_dimension<0>(at, sizes[0], 64), set_dimension<1>(at, sizes[1], 1), set_dimension<2>(at, sizes[2], rows);
        set_stride<0>(at, strides[0]), set_stride<1>(at, strides[1]);
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(map),
                 "r"(scratch) : "memory");
}
// Before a thread's first copy by the map.
__device__ inline void acquire_tensor_map(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// A barrier in shared memory on which copies arrive. It opens in turns when one thread has told it of all bytes and these are there.
__device__ inline void init_copy_barrier(unsigned barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
// COUNT barriers from `first` on, by one thread. A barrier of the CTA follows before other threads use them.
template <int COUNT>
__device__ inline void init_copy_barriers(unsigned first) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) init_copy_barrier(first + 8 * i);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void expect_bytes(unsigned barrier, int bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the barrier has opened once more than in turns of this parity, 0 at first.
__device__ inline void wait_for_bytes(unsigned barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
// Copy the box at (column, middle, row) by one thread.
__device__ inline void copy_box(unsigned to, const void* map, int column, int middle, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(middle), "r"(row), "r"(barrier) : "memory");
}
// And from shared memory, where the box lies within the tensor. What threads have stored must be visible to the accelerator.
__device__ inline void store_box(const void* map, int column, int middle, int row, unsigned from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(column), "r"(middle),
                 "r"(row), "r"(from) : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the memory that the thread's stores read is free; and until what they wrote is there.
__device__ inline void wait_for_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
