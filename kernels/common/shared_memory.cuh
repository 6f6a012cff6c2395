// Where the shared memory of a CTA lies.
#pragma once

// The CTA's shared memory whose size the launch gives.
__device__ inline char* dynamic_shared() {
    extern __shared__ uint4 dynamic[];
    return reinterpret_cast<char*>(dynamic);
}

// The same from where a row of banks starts. Asynchronous copies take up to twice as long to pieces that lie together
// in memory, but not in a row.
__device__ inline char* dynamic_rows() {
    extern __shared__ __align__(128) uint4 rows[];
    return reinterpret_cast<char*>(rows);
}
