// The summary of a scan: the affine map of all its steps, which takes the state before the first one to the state after
// the last one. What the kernels of both layouts share.
//
// Each thread composes the maps of its own steps, and no state is written. Time is cut into segments, segments into
// shares, each of a warp or a slot of a CTA; all are numbered in the order of the scan, with time or against it. Where
// there is more than one segment, the CTA of each leaves its map in the workspace, and the last CTA of a group of lines
// to do so composes them, in order. Results are the same in every run.
//
// workspace, zeroed before the launch: a counter for each group of lines, padded to 16 bytes, then the maps. Null if
// there is one segment.
#pragma once
#include "../linear_scan/line.cuh"
#include "../linear_scan/step.cuh"

enum : int { THREADS = 32 * WARPS };

// Segments of `shares` shares, of `share` steps each. `against` says that the scan goes against time.
struct Cut {
    i64 share;
    unsigned shares, segments;
    bool against;
};

// Where summaries go: they lie as states do.
struct Summaries {
    State *final_gate, *final_state;

    __device__ void write(i64 at, const Affine& map) const {
        final_gate[at] = COMPENSATED ? map.scale + map.error_term : map.scale;
        final_state[at] = map.shift;
    }
};

__device__ inline Affine from_higher(Affine map, int distance) {
    return {from_higher(map.scale, distance), COMPENSATED ? from_higher(map.error_term, distance) : State(0),
            from_higher(map.shift, distance)};
}

// Maps of the workspace that a thread has on their way at once.
enum : int { AT_ONCE = sizeof(State) > 4 ? 2 : 8 };

// Composition of `count` maps that lie `step` apart, of which UNROLL are on their way at once.
template <int UNROLL = 1>
__device__ inline Affine compose_run(const Stored<>* maps, unsigned count, unsigned step) {
    Affine run;
#pragma unroll UNROLL
    for (; count > 0; count--, maps += step) run = compose(run, Affine(*maps));
    return run;
}

// The maps of segments, and how many of a group's are there.
struct Segments {
    unsigned* const arrived;
    Stored<>* const maps;

    __device__ Segments(void* workspace, unsigned groups)
        : arrived(static_cast<unsigned*>(workspace)),
          maps(reinterpret_cast<Stored<>*>(static_cast<char*>(workspace) + (groups * 4ll + 15) / 16 * 16)) {}

    // Whether this CTA is the last of the group: then it sees the maps of all others.
    __device__ bool complete(unsigned group, unsigned segments) const {
        __shared__ bool is_last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(arrived + group, 1u) + 1 == segments;
        __syncthreads();
        __threadfence();
        return is_last;
    }
};

// The part of the segments that falls to one of several readers: first, and how many.
struct Strip {
    unsigned first, count;

    __device__ Strip(unsigned segments, unsigned reader, unsigned readers) {
        const unsigned each = (segments + readers - 1) / readers;
        first = min(reader * each, segments);
        count = min(each, segments - first);
    }
    __device__ static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
};
