// Blocks whose columns lie side by side read and write neighbouring lines of the same rows, which memory serves faster
// the closer in time they come. So such blocks are a cluster, which meets before it asks for a tile.
//
// The build pins CLUSTER, the number of its blocks; there are clusters from sm_90 on. A grid is made of whole ones, and
// a block that is one too many leaves at once: nobody waits for it.
#pragma once
#include "ptx.cuh"

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
// To be called by the whole block.
__device__ inline void meet_neighbours() { arrive_in_cluster(), await_cluster(); }
#else
#define IN_CLUSTERS
__device__ inline void meet_neighbours() {}
#endif
