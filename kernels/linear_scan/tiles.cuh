// The tiles that a block works on, one after the other, and the state that goes from tile to tile.
//
// A column is a set of scans that run side by side, its levels are the tiles along it, in the order of
// the walk. Where there are enough columns to fill the GPU, a column's tiles are all worked on in one
// place and the state stays there; workspace is null. Else columns are split: blocks draw tiles from a
// counter, all of the first level before those of the second. A tile's entering state is that of its
// group of levels, then the maps of the tiles before it in the group, which their blocks publish before
// they wait for anything; the last tile of a group publishes the state that leaves it. So the chain of
// those who wait for one another is as long as there are groups, and sums are in a fixed order. A tile
// waits only for tiles drawn before it, which are running or done.
//
// workspace, zeroed before the launch: the counter in its first 16 bytes, then the maps of all tiles,
// then the states that leave the groups.
#pragma once
#include "exchange.cuh"

struct Tile {
    unsigned level, column;
    bool there;  // false when there are no more
};

struct Grid {
    unsigned columns, levels;
};

// The tiles of one place, in order. Of those to come it knows the next STAGES.
struct Schedule {
    struct Cursor {
        unsigned count, level, column;
    };

    const Grid grid;
    unsigned* const counter;  // null if columns are not split
    const unsigned stride;    // from one of this place's columns to the next
    Cursor current, coming;

    static constexpr unsigned DRAWN = STAGES + 1;
    static constexpr int PATIENCE = 32;  // looks at the counter
    __device__ static unsigned* drawn() {
        __shared__ unsigned tickets[DRAWN];
        return tickets;
    }

    __device__ Schedule(const Grid& grid, void* workspace, unsigned first, unsigned stride)
        : grid(grid),
          counter(static_cast<unsigned*>(workspace)),
          stride(stride),
          current{0, 0, first},
          coming(current) {
        begin(0);
    }

    // Draw the tile of that number before there is a current one. A block that drew several at once
    // would hold up all others, which need the maps of the last while it waits for what the first
    // needs; so it waits a little for the others to have drawn as many.
    __device__ void begin(unsigned number) const {
        if (!counter) return;
        if (threadIdx.x == 0) {
            for (int turn = 0; turn < PATIENCE; turn++)
                if (load_relaxed(counter) >= number * gridDim.x) break;
            drawn()[number] = atomicAdd(counter, 1u);
        }
        __syncthreads();
    }

    __device__ Tile at(const Cursor& cursor) const {
        if (!counter) return {cursor.level, cursor.column, cursor.column < grid.columns};
        const unsigned ticket = drawn()[cursor.count % DRAWN];
        const unsigned level = ticket / grid.columns;
        return {level, ticket - level * grid.columns, level < grid.levels};
    }
    __device__ void advance(Cursor& cursor) const {
        cursor.count++;
        if (++cursor.level == grid.levels) cursor.level = 0, cursor.column += stride;
    }

    // Draw the tile that is STAGES ahead of the current one: once a tile, before a barrier.
    __device__ void draw() const {
        if (counter && threadIdx.x == 0)
            drawn()[(current.count + STAGES) % DRAWN] = atomicAdd(counter, 1u);
    }
};

// How the states that enter a tile's warps are found, for each of the tile's SCANS side by side. The
// first threads of the block, one per scan, are the spine.
template <int SCANS>
struct Crossing {
    // Threads that fetch maps of earlier tiles of the group for the same scan, and how many each.
    static constexpr int LOOK = 4;
    static constexpr int SLICES = 32 * WARPS / SCANS;
    static constexpr unsigned GROUP = SLICES * LOOK;
    // What these make of them: one map of each warp, or of each slice if that takes several.
    static constexpr int PARTS = SCANS < 32 ? WARPS : SLICES;
    static_assert(32 * WARPS % SCANS == 0, "a scan needs a thread of the spine");

    struct Shared {
        Affine total[WARPS][SCANS];     // of each warp's part of the tile
        State entering[WARPS][SCANS];
        Affine group[PARTS][SCANS];  // of the earlier tiles of the group
    };
    __device__ static Shared& shared() {
        __shared__ Shared all;
        return all;
    }

    const Schedule& schedule;
    uint4* const lines;  // of the maps; null where columns are not split
    Carried carried = State(0);  // a thread of the spine's, from tile to tile of a column

    __device__ Crossing(const Schedule& schedule, void* workspace)
        : schedule(schedule), lines(workspace ? static_cast<uint4*>(workspace) + 1 : nullptr) {}

    __device__ uint4* map(unsigned level, unsigned column) const {
        return lines + (i64(level) * schedule.grid.columns + column) * (MAP_LINES * SCANS);
    }
    __device__ uint4* leaving(unsigned group, unsigned column) const {
        return map(schedule.grid.levels, 0) +
               (i64(group) * schedule.grid.columns + column) * (STATE_LINES * SCANS);
    }

    // To be called by the whole block, when shared().total is filled in; then shared().entering is.
    // `before` and `after`: of the state of the spine's scan before and after the walk; may be null.
    __device__ void chain(const Tile& tile, const State* before, State* after) {
        Shared& all = shared();
        schedule.draw();
        __syncthreads();
        const bool in_spine = threadIdx.x < SCANS;
        const unsigned own = threadIdx.x % SCANS, in_group = tile.level % GROUP;
        Affine total;
        if (in_spine) {
#pragma unroll(UNROLLED)
            for (int w = 0; w < WARPS; w++) total = then(total, all.total[w][own]);
            if (lines && in_group < GROUP - 1)
                publish(map(tile.level, tile.column) + own, SCANS, total);
        }
        if (lines && in_group > 0) look_back(tile, in_group, own);
        if (in_spine) {
            if (tile.level < (lines ? GROUP : 1)) carried = before ? *before : State(0);
            else if (lines)
                carried = await_state(leaving(tile.level / GROUP - 1, tile.column) + own, SCANS);
            if (lines)
#pragma unroll 1
                for (int part = 0; part < PARTS && in_group > 0; part++)
                    carried = all.group[part][own](carried);
            State x = carried.x;
            carried = total(carried);
            if (tile.level + 1 == schedule.grid.levels) {
                if (after) *after = carried.x;
            } else if (lines && in_group == GROUP - 1) {
                publish(leaving(tile.level / GROUP, tile.column) + own, SCANS, carried);
            }
#pragma unroll(UNROLLED)
            for (int w = 0; w < WARPS; w++) {
                all.entering[w][own] = x;
                x = all.total[w][own](x);
            }
        }
        __syncthreads();
    }

    // Compose the maps of the `in_group` tiles before this one.
    __device__ void look_back(const Tile& tile, unsigned in_group, unsigned own) const {
        const int slice = threadIdx.x / SCANS, first = slice * LOOK;
        const uint4* const from = map(tile.level - in_group + first, tile.column) + own;
        const i64 stride = i64(schedule.grid.columns) * (MAP_LINES * SCANS);
        Affine maps = await_maps<LOOK>(from, stride, SCANS, int(in_group) - first);
        constexpr int APART = SCANS < 32 ? SCANS : 32;
        exclusive_scan<APART>(maps, threadIdx.x % 32);
        if (int(threadIdx.x % 32) >= 32 - APART) shared().group[slice * PARTS / SLICES][own] = maps;
        __syncthreads();
    }
};
