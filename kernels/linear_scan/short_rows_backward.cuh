// Short rows of contiguous time, backward: what the pass over a thread's steps computes.
#pragma once
#include "short_rows.cuh"

// The gradients of a thread's steps, which take the place of gates and of states_grad in shared memory.
struct Finishing {
    const Tile& tile;
    const State initial;
    State h, sum = State(0);

    template <int N>
    __device__ void steps(char* cell, int left) {
        const Inputs<N> in(cell, tile.apart);
        State earlier[N];  // of the row's last step in the order of the scan it is not among the states
#pragma unroll
        for (int k = 0; k < N; k++) earlier[k] = element(cell + (k + 1) * tile.apart + 2 * AREA);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const auto to = BackwardStep::gradients(in.first[k], in.second[k], chosen(left == k + 1, initial, earlier[k]), h);
            put(cell + k * tile.apart, to.gate), put(cell + k * tile.apart + AREA, to.token);
            h = to.earlier, sum = sum + to.gate;
        }
    }
};

// Write the sum over a row's lanes.
__device__ inline void add_up(const Tile& tile, State sum, State* to) {
#pragma unroll 1
    for (int distance = 1; distance < tile.lanes; distance *= 2) sum = sum + from_lane(sum, threadIdx.x % 32 ^ distance);
    if (tile.lane == 0 && tile.own > 0) *to = sum;
}
