// The copies of scans, with or without a hint to the L2.
#pragma once
#include "../common/copy.cuh"

// Whether copies have the hint: not where NVRTC would give the hint a wrong register (linear_scan/notes/launching.md;
// ci/gates.py).
#if (MISALIGNED || SHORT_ROWS) && __CUDA_ARCH__ >= 1000
enum : bool { HINTED = false };
#else
enum : bool { HINTED = true };
#endif

__device__ inline void copy_async_first(void* to, const void* from, int bytes, bool wanted) {
    copy_async_first<HINTED>(to, from, bytes, wanted);
}
__device__ inline void copy_async(void* to, const void* from, bool wanted) { copy_async<HINTED>(to, from, wanted); }
