// The tiles that a block works on, one after the other, and the state that goes from tile to tile.
//
// A column is a set of scans that run side by side, its levels are the tiles along it, in the order of
// the walk. Where there are enough columns to fill the GPU, a column's tiles are all worked on in one
// place and the state stays there; workspace is null. Else columns are split: blocks draw a column's
// levels from its counter. In each round a block has three tiles in hand, or two if SKEW is 0:
//
//     fetch    tile n                       its copies are under way for STAGES - 1 - SKEW rounds
//     compose  tile n - (STAGES - 1 - SKEW) one map of the whole tile, which is published
//     finish   tile n - (STAGES - 1)        the state that enters it is found, and it is walked again
//
// The state that enters a tile is that before its group of GROUP levels, which a block finds for itself
// by folding the maps of all groups before, and then the maps of the group's tiles before it. So nobody
// hands a state on, and sums are in a fixed order. With a SKEW of 1, the maps that a tile needs are those
// that others published about a round ago. A tile waits only for levels drawn before its own, and a map
// is published before its block waits for any level as high, so nobody waits for ever.
//
// workspace, zeroed before the launch: a counter for each column, in whole lines of 16 bytes, then the
// maps of all tiles.
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
    const unsigned first;     // this place's only column, if columns are split, or the first
    const unsigned stride;    // from one of this place's columns to the next
    unsigned* const counter;  // null if columns are not split

    static constexpr unsigned DRAWN = STAGES + 1;
    static constexpr int PATIENCE = 32;  // looks at the counter
    __device__ static unsigned* drawn() {
        __shared__ unsigned levels[DRAWN];
        return levels;
    }

    __device__ Schedule(const Grid& grid, void* workspace, unsigned place, unsigned places)
        : grid(grid),
          first(workspace ? place % grid.columns : place),
          stride(places),
          counter(workspace ? static_cast<unsigned*>(workspace) + first : nullptr) {}

    // Draw the tile of that number before there is one to be finished. A block that drew several at once
    // would hold up all others, which need the maps of the last while it waits for what the first
    // needs; so it waits a little for the others to have drawn as many.
    __device__ void begin(unsigned number) const {
        if (!counter) return;
        if (threadIdx.x == 0) {
            const unsigned sharing = (gridDim.x - first + grid.columns - 1) / grid.columns;
            for (int turn = 0; turn < PATIENCE; turn++)
                if (load_relaxed(counter) >= number * sharing) break;
            drawn()[number] = atomicAdd(counter, 1u);
        }
        __syncthreads();
    }

    __device__ Tile at(const Cursor& cursor) const {
        if (!counter) return {cursor.level, cursor.column, cursor.column < grid.columns};
        const unsigned level = drawn()[cursor.count % DRAWN];
        return {level, first, level < grid.levels};
    }
    __device__ Cursor begin() const { return {0, 0, first}; }
    __device__ void advance(Cursor& cursor) const {
        cursor.count++;
        if (++cursor.level == grid.levels) cursor.level = 0, cursor.column += stride;
    }

    // Draw the tile that is STAGES ahead of the one to be finished: once a round, before a barrier.
    __device__ void draw(const Cursor& current) const {
        if (counter && threadIdx.x == 0)
            drawn()[(current.count + STAGES) % DRAWN] = atomicAdd(counter, 1u);
    }

    // Work off all tiles. `work` takes each through `fetch`, `compose` and `finish`, with the stage of the
    // ring that it is in; `turn` precedes the composition of each, and `look` comes a while before `finish`.
    template <class Work>
    __device__ void run(Work work) const {
        constexpr unsigned FILLED = STAGES - 1 - SKEW;  // rounds before there is a tile to compose
        Cursor coming = begin(), composed = coming, current = coming;
        begin(0);
        for (unsigned round = 0;; round++) {
            const Tile next = at(coming);
            __syncwarp();  // what the stage held has been read
            if (next.there) work.fetch(next, round % STAGES);
            commit_copies();
            advance(coming);
            if (round + 1 < STAGES) begin(round + 1);
            if (round < FILLED) continue;

            const Tile tile = at(composed), last = at(current);
            const bool finishes = round + 1 >= STAGES;
            if (finishes && !last.there) break;
            if (finishes) work.look(last), draw(current);
            work.turn();
            wait_for_copies<FILLED>();
            __syncwarp();
            if (tile.there) work.compose(tile, (round - FILLED) % STAGES);
            else if (counter) __syncthreads();  // once a round, so that all know what was drawn
            advance(composed);
            if (!finishes) continue;
            work.finish(last, (round + 1 - STAGES) % STAGES);
            advance(current);
        }
    }
};

// How the states that enter a tile's warps are found, for each of the tile's SCANS side by side. Lane l of
// every warp keeps what belongs to scan l % SCANS.
template <int SCANS>
struct Crossing {
    static_assert(32 % SCANS == 0, "a scan needs a lane");
    static constexpr int PLACES = 32 / SCANS;  // lanes of a warp for a scan
    static constexpr int SLICES = WARPS * PLACES;
    // Maps of earlier tiles that a thread fetches at once.
    static constexpr int MOST_LOOKS = STATE_WORDS > 1 ? 4 : 8;
    static constexpr int LOOKS = SLICES >= 128 ? 1 : 128 / SLICES < MOST_LOOKS ? 128 / SLICES : MOST_LOOKS;
    static constexpr unsigned GROUP = SLICES * LOOKS;

    struct Shared {
        Affine total[2][WARPS][SCANS];    // of each warp's part of a tile
        Affine earlier[2][WARPS][SCANS];  // what each warp made of the maps it fetched
    };
    __device__ static Shared& shared() {
        __shared__ Shared all;
        return all;
    }

    // What a tile's composition leaves for its end.
    struct Composed {
        Affine before, all;  // of the tile's warps before this one, and of all
    };

    const Schedule& schedule;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, scan = lane % SCANS;
    uint4* const lines;  // of the maps; null where columns are not split
    int now = 0, earlier = 0;         // the part of shared() that is to be filled in
    Composed composed, kept;          // of the tile just composed, and of the one before
    Carried carried = State(0);       // the state before the group `folded`, or before the next tile
    unsigned folded = 0;              // groups before it
    Maps<LOOKS> looked;

    __device__ Crossing(const Schedule& schedule, void* workspace)
        : schedule(schedule),
          lines(workspace ? static_cast<uint4*>(workspace) + (schedule.grid.columns + 3) / 4 : nullptr) {}

    __device__ uint4* map(unsigned level, unsigned column) const {
        return lines + (i64(level) * schedule.grid.columns + column) * (MAP_LINES * SCANS) + scan;
    }

    // Chain maps[0], maps[1], … of this lane's scan. Each lane takes SHARE of them; `mine` becomes the
    // composition of all before those.
    static constexpr int SHARE = (WARPS + PLACES - 1) / PLACES;
    __device__ Affine chain(const Affine (&maps)[WARPS][SCANS], Affine& mine) const {
        const int first = lane / SCANS * SHARE;
        Affine all;
#pragma unroll(UNROLLED)
        for (int i = 0; i < SHARE; i++)
            if (first + i < WARPS) all = then(all, maps[first + i][scan]);
        mine = exclusive_scan<SCANS>(all, lane);
        return from_lane(all, 32 - SCANS + scan);
    }

    __device__ void turn() { kept = composed, now ^= 1; }
    // Where this warp's total is expected.
    __device__ Affine* total() const { return shared().total[now][warp]; }

    // To be called by the whole block, when every warp's total is there.
    __device__ void compose(const Tile& tile) {
        __syncthreads();
        const auto& totals = shared().total[now];
        const int first = lane / SCANS * SHARE;
        Affine before;
        composed.all = chain(totals, before);
        if (lines && warp == 0 && lane < SCANS && tile.level + 1 < schedule.grid.levels)
            publish(map(tile.level, tile.column), SCANS, composed.all);
#pragma unroll(UNROLLED)
        for (int i = 0; i + 1 < SHARE; i++)
            if (first + i < warp) before = then(before, totals[first + i][scan]);
        composed.before = from_lane(before, warp / SHARE * SCANS + scan);
    }
    __device__ const Composed& last() const { return SKEW ? kept : composed; }

    // Have the maps fetched that `enter` will want first.
    __device__ void look(const Tile& tile) {
        if (!lines) return;
        const int first = (warp * PLACES + lane / SCANS) * LOOKS;
        const unsigned level = folded * GROUP, missing = tile.level - level;
        const i64 apart = i64(schedule.grid.columns) * (MAP_LINES * SCANS);
        looked.ask(map(level + first, tile.column), apart, SCANS,
                   int(missing < GROUP ? missing : GROUP) - first);
    }

    // The state that enters the tile, in every lane. To be called by the whole block. `before` and `after`:
    // of this lane's scan before and after the walk; may be null.
    __device__ State enter(const Tile& tile, const State* before, State* after) {
        if (lines ? folded == 0 : tile.level == 0) carried = before ? *before : State(0);
        Carried entering = carried;
        while (lines) {
            const unsigned missing = tile.level - folded * GROUP;
            if (missing == 0) break;
            entering = fold()(carried);
            if (missing < GROUP) break;
            carried = entering, folded++;
            look(tile);
        }
        const Carried leaving = last().all(entering);
        if (!lines) carried = leaving;
        if (after && warp == 0 && lane < SCANS && tile.level + 1 == schedule.grid.levels)
            *after = leaving.x;
        return entering.x;
    }

    // Compose the maps asked for, all of the block's.
    __device__ Affine fold() {
        Affine maps = looked.await(), unused;
        exclusive_scan<SCANS>(maps, lane);
        auto& parts = shared().earlier[earlier];
        if (lane >= 32 - SCANS) parts[warp][scan] = maps;
        earlier ^= 1;  // so that nobody has to wait until these have been read
        __syncthreads();
        return chain(parts, unused);
    }
};
