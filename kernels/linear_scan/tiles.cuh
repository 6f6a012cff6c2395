// The tiles that a warp works on, one after the other, and the state that goes from tile to tile.
//
// A column is a set of scans that run side by side in a warp, its levels are the tiles along it, in the order
// of the walk. Where there are enough columns to fill the GPU, a warp takes whole ones, and the state stays
// with it. Variants with LEVELS are for few columns, which are cut into segments of WALKERS × LEVELS tiles,
// LEVELS in succession for each warp of a block. Blocks draw them from a counter: the first segments of all
// columns, then the second ones, and so on. A warp goes through its part twice:
//
//     against the walk   it composes one map of all its tiles. The block publishes that of the segment, and
//                        folds those of all segments of the column before: the state that enters it
//     along the walk     from the state that enters its part, to the results
//
// So what was read last is read again first: the ring still holds STAGES tiles, and the L2 much of the rest.
// Nobody hands a state on, and sums are in a fixed order. A map is published before its block waits for
// any, and it waits only for segments that were drawn before its own, so nobody waits for ever.
//
// workspace, zeroed before the launch: the counter, in a line of 16 bytes, then the maps of all segments.
#pragma once
#include "exchange.cuh"

struct Tile {
    unsigned level, column;
};

struct Grid {
    unsigned columns, levels;
};

// How the tiles of a warp are taken through its ring. `work` has
//
//     fetch(tile, stage, again)   copies in; `again`: what a composition needs is there already
//     fetch_maps(tile, stage)     copies in what a composition needs, and no more
//     compose(tile, stage)        from what enters the tile to what enters each thread's part
//     finish(tile, stage)         the walk itself, and the results
//     clear(), precede()          the map of no tiles; the tile just composed precedes those of the map
//     cross(maps, column, …)      has the state found that enters the warp's part of a segment
struct Schedule {
    const Grid grid;

    template <class Work>
    __device__ void run(Work work, unsigned first, unsigned stride) const {
        walk(work, {0, first}, {0, grid.columns}, stride, false);
    }

    // Along the walk, from one tile up to another: level by level, and then the next column.
    template <class Work>
    __device__ void walk(Work& work, Tile coming, Tile end, unsigned stride, bool again) const {
        const auto there = [&](const Tile& tile) {
            return LEVELS ? tile.level < end.level : tile.column < end.column;
        };
        const auto advance = [&](Tile& tile) {
            if (++tile.level == grid.levels && !LEVELS) tile.level = 0, tile.column += stride;
        };
        Tile tile = coming;
        for (unsigned round = 0;; round++) {
            __syncwarp();  // what the stage held has been read
            if (there(coming)) work.fetch(coming, round % STAGES, again && round < STAGES), advance(coming);
            commit_copies();
            if (round + 1 < STAGES) continue;
            if (!there(tile)) break;
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            const unsigned stage = (round + 1) % STAGES;
            work.compose(tile, stage);
            work.finish(tile, stage);
            advance(tile);
        }
    }

    // Against the walk: compose a map. Each tile is in the stage that it will be in along the walk.
    template <class Work>
    __device__ void walk_back(Work& work, unsigned column, unsigned begin, unsigned end) const {
        unsigned coming = end, level = end;
        work.clear();
        for (unsigned round = 0;; round++) {
            __syncwarp();
            if (coming > begin) coming--, work.fetch_maps({coming, column}, (coming - begin) % STAGES);
            commit_copies();
            if (round + 1 < STAGES) continue;
            if (level == begin) break;
            level--;
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            work.compose({level, column}, (level - begin) % STAGES);
            work.precede();
        }
    }

    template <class Work>
    __device__ void run_segments(Work work, void* workspace) const {
        constexpr unsigned SEGMENT = LEVELS ? WALKERS * LEVELS : 1;
        __shared__ unsigned drawn;
        const unsigned segments = (grid.levels + SEGMENT - 1) / SEGMENT, all = grid.columns * segments;
        uint4* const maps = static_cast<uint4*>(workspace) + 1;
        for (;;) {
            if (threadIdx.x == 0) drawn = atomicAdd(static_cast<unsigned*>(workspace), 1u);
            __syncthreads();
            const unsigned number = drawn, column = number % grid.columns, segment = number / grid.columns;
            if (number >= all) break;
            const auto level = [&](unsigned part) {
                const unsigned found = segment * SEGMENT + part * LEVELS;
                return found < grid.levels ? found : grid.levels;
            };
            const unsigned begin = level(threadIdx.x / 32), end = level(threadIdx.x / 32 + 1);
            walk_back(work, column, begin, end);
            work.cross(maps, grid.columns, column, segment, segment + 1 == segments);
            walk(work, {begin, column}, {end, column}, 1, true);
        }
    }
};

// How warps of cut columns learn which state enters their parts. A lane keeps HELD of the SCANS that run side by
// side; lanes l and l + SCANS / HELD keep the same.
template <int SCANS, int HELD>
struct Crossing {
    static_assert(32 % SCANS == 0 && SCANS % HELD == 0);
    // Each of FOLDERS warps folds maps of OWN scans: PLACES lanes for a scan, which fetch LOOKS maps at once.
    static constexpr int FOLDERS = SCANS < WALKERS ? SCANS : WALKERS;
    static constexpr int OWN = SCANS / FOLDERS;
    static constexpr int PLACES = 32 / OWN;
    static constexpr int LOOKS = STATE_WORDS > 1 ? 4 : 8;
    static constexpr unsigned GROUP = PLACES * LOOKS;

    // The maps of a column's segments, or of all if there is but one.
    struct Maps {
        uint4* lines;
        i64 apart;

        __device__ uint4* at(unsigned segment, int scan) const { return lines + segment * apart + scan; }
    };
    static __device__ Maps maps_of(uint4* all, unsigned columns, unsigned column) {
        return {all + i64(column) * (MAP_LINES * SCANS), i64(columns) * (MAP_LINES * SCANS)};
    }

    // From the map of this warp's part, for this lane's scans, to the state that enters it. `initial`, of a scan, is
    // null or points to its state before the walk. To be called by the whole block.
    template <class Initial>
    static __device__ void cross(const Maps& maps, unsigned segment, bool is_last, const Initial& initial,
                                 const Affine (&part)[HELD], Carried (&entering)[HELD]) {
        __shared__ Affine parts[WALKERS][SCANS];
        __shared__ Carried before[SCANS];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = lane % (SCANS / HELD) * HELD;
#pragma unroll
        for (int v = 0; v < HELD; v++) parts[warp][first + v] = part[v];
        __syncthreads();
        if (warp < FOLDERS) {
            const int scan = warp * OWN + lane % OWN;
            if (lane < OWN && !is_last) {
                Affine all;
#pragma unroll 1
                for (int w = 0; w < WALKERS; w++) all = then(all, parts[w][scan]);
                publish(maps.at(segment, scan), SCANS, all);
            }
            const Carried x = fold(maps, segment, scan, initial(scan));
            if (lane < OWN) before[scan] = x;
        }
        __syncthreads();
#pragma unroll
        for (int v = 0; v < HELD; v++) {
            entering[v] = before[first + v];
#pragma unroll 1
            for (int w = 0; w < warp; w++) entering[v] = parts[w][first + v](entering[v]);
        }
    }

    // The state after the segments before this one.
    static __device__ Carried fold(const Maps& maps, unsigned segment, int scan, const State* initial) {
        const int lane = threadIdx.x % 32;
        Carried x = initial ? *initial : State(0);
#pragma unroll 1
        for (unsigned group = 0; group < segment; group += GROUP) {
            const unsigned wanted = group + lane / OWN * LOOKS;
            Fetched<LOOKS> fetched;
            fetched.ask(maps.at(wanted, scan), maps.apart, SCANS, wanted < segment ? int(segment - wanted) : 0);
            Affine folded = fetched.await();
            exclusive_scan<OWN>(folded, lane);
            x = from_lane(folded, 32 - OWN + lane % OWN)(x);
        }
        return x;
    }
};
