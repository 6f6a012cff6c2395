// Schedules the tiles of scans: whole columns, or segments of columns with a decoupled look-back.
//
// A column is a set of SCANS scans that run side by side in a warp; its tiles along time are numbered by `level`, in the
// order of the scan. PREFIX_LEAD 0 is for columns that are many enough to fill the GPU: a warp takes all tiles of a column
// one after the other, and the running prefix stays in its registers.
//
// PREFIX_LEAD > 0 is for few columns. Each column is cut into segments of TILE_WARPS tiles, one for each tile warp of a
// CTA. CTAs draw segments from a counter: the first segments of all columns, then the second ones, and so on. A turn of a
// CTA is the time in which it scans one segment. It numbers the segments that it drew by their turns. It keeps STAGES
// segments in shared memory. For the segment of turn t:
//
//     turn t - PREFIX_LEAD   tile warps compose each tile's affine maps (gate, token) into an aggregate. Then the
//                            look-back warps of turn t publish the segment's aggregate, and combine the aggregates of
//                            all segments of the column before it into the states that enter its tiles
//     turn t                 tile warps compute and write the tiles' states; their stage is free for the segment of turn
//                            t + STAGES
//
// Look-back warps do nothing else. The CTA has PREFIX_LEAD + 1 sets of them, which serve the turns in rotation, so that a
// look-back may take PREFIX_LEAD turns; most of that time it waits for the L2. A look-back does not read every aggregate:
// the last segment of each GROUP of a column also publishes the aggregate of the whole group. A look-back reads those of
// whole groups, and then those of the segments after the last whole group. CTAs publish aggregates only, never prefixes,
// and groups are aligned with the column, so the order of operations is fixed and results are the same in every run.
// For as many columns as it has room for, a CTA keeps the state after the last whole group that it has read, and goes on from
// that state. Of those columns it reads each group once, over all of its turns. Of others it reads all groups in each turn.
//
// No deadlock: a CTA composes and publishes a segment's aggregate after it has scanned the segment of PREFIX_LEAD + 1
// turns earlier (and a group's aggregate once those of the group's earlier segments are published), and a segment waits
// only for segments with lower numbers. So the segment with the lowest number whose aggregate is missing waits for none.
//
// Where the GPU has room for a CTA for each segment and one more, nothing is drawn: the first CTA zeroes the workspace
// (workspace_init.cuh), and each other one has the segment of its index. A GPU starts CTAs in the order of their indices.
//
// workspace, zeroed before the launch or by the first CTA: the head of WorkspaceInit, which has the counter in its first bytes,
// then the aggregates of all segments, then those of groups (tile_state.cuh).
#pragma once
#include "../common/barrier.cuh"
#include "../common/copy.cuh"
#include "../common/tile_state.cuh"
#include "../common/workspace_init.cuh"

struct Tile {
    unsigned level, column;
};

// Where sequences are packed, `warps` says how columns are scanned. If it is 0, columns are cut into segments, and CTAs look back.
// Otherwise the first `warps` tile warps of each CTA scan a whole column each, and no warp waits for another.
struct Grid {
    unsigned columns, levels;
#if VARLEN
    unsigned warps;
    __device__ bool is_cut() const { return warps == 0; }
#else
    static constexpr unsigned warps = 0;
    static __device__ bool is_cut() { return true; }
#endif
};

// `previous` is the level of the CTA's last segment of the column, if the CTA still has the state from that turn; else 0.
struct Segment : Tile {
    unsigned previous;
};

// Named barriers between tile warps and the look-back warps of a turn. Each says that something is in shared memory:
//   composed   the aggregates of the turn's tiles; the turn's look-back warps wait for it
//   combined   the states that enter the turn's tiles; tile warps wait for it
//   known      the state after the last whole group is kept; the look-back warps of the next turn wait for it
// Each of PREFIX_LEAD + 1 consecutive turns has three barriers of its own.
enum : int { TURNS = PREFIX_LEAD + 1, LOOKBACK_WARPS_OF_TURN = LOOKBACK_WARPS / TURNS };
enum : int { MEETING = 32 * (TILE_WARPS + LOOKBACK_WARPS_OF_TURN) };
__device__ inline void tell_composed(int turn) { arrive_at<MEETING>(1 + turn % TURNS); }
__device__ inline void await_composed(int turn) { meet_at<MEETING>(1 + turn % TURNS); }
__device__ inline void tell_combined(int turn) { arrive_at<MEETING>(1 + TURNS + turn % TURNS); }
__device__ inline void await_combined(int turn) { meet_at<MEETING>(1 + TURNS + turn % TURNS); }
__device__ inline void tell_known(int turn) { arrive_at<64 * LOOKBACK_WARPS_OF_TURN>(1 + 2 * TURNS + turn % TURNS); }
__device__ inline void await_known(int turn) { meet_at<64 * LOOKBACK_WARPS_OF_TURN>(1 + 2 * TURNS + turn % TURNS); }
static_assert(3 * TURNS < 15, "barriers, beside that of the tile warps");
__device__ inline void meet_tile_warps() { meet_at<32 * TILE_WARPS>(15); }

// What tile warps and look-back warps hand over in each turn, and the states of columns that look-back warps keep.
template <int SCANS>
struct SharedStorage {
    struct Turn {
        Stored<> tiles[TILE_WARPS][SCANS];
        State entering[TILE_WARPS][SCANS];
    };
    // The states after the last whole group before the CTA's last segment of a column. Columns whose numbers differ by a
    // multiple of COLUMNS share a place.
    enum : int { PARTS_OF_STATE = COMPENSATED ? 2 : 1, KEPT_BYTES = 3072 };
    enum : int { THAT_FIT = KEPT_BYTES / (SCANS * PARTS_OF_STATE * int(sizeof(State))) };
    enum : int { COLUMNS = THAT_FIT < 64 ? THAT_FIT : 64 };
    static __device__ State& kept(unsigned column, int scan, int part) {
        __shared__ State states[PARTS_OF_STATE][COLUMNS][SCANS];
        return states[part][column % COLUMNS][scan];
    }
    static __device__ RunningPrefix after_groups(unsigned column, int scan) {
        return {kept(column, scan, 0), COMPENSATED ? kept(column, scan, PARTS_OF_STATE - 1) : State(0)};
    }
    static __device__ void keep(unsigned column, int scan, const RunningPrefix& after_groups) {
        kept(column, scan, 0) = after_groups.x;
        if (COMPENSATED) kept(column, scan, PARTS_OF_STATE - 1) = after_groups.error_term;
    }
    static __device__ Turn& of(int turn) {
        __shared__ Turn turns[TURNS];
        return turns[turn % TURNS];
    }
};

// The segments that a CTA drew, by turn. An entry is written STAGES turns before its own, and read until the turn after.
struct Drawn {
    const Grid grid;
    const unsigned segments;  // of a column

    __device__ explicit Drawn(const Grid& grid)
        : grid(grid), segments((grid.levels + TILE_WARPS - 1) / TILE_WARPS) {}
    // Whether each CTA but the first has one segment.
    __device__ bool once() const { return grid.is_cut() && gridDim.x > segments * grid.columns; }
    static __device__ Segment& segment(int turn) {
        constexpr int KEPT = 16;
        static_assert(PREFIX_LEAD == 0 || (PREFIX_LEAD < STAGES && STAGES + 2 <= KEPT), "or one takes the place of another");
        __shared__ Segment drawn[KEPT];
        return drawn[turn % KEPT];
    }
    // The last segments that were drawn, by the place where the state of their column is kept. One thread reads and writes
    // them.
    template <int COLUMNS>
    static __device__ Tile& last(unsigned column) {
        __shared__ Tile tiles[COLUMNS];
        return tiles[column % COLUMNS];
    }
    template <int COLUMNS>
    static __device__ void start() {
        for (int i = 0; i < COLUMNS; i++) last<COLUMNS>(i) = {0, ~0u};
    }
    // One thread calls this, in the order of turns, so that the others need not divide.
    template <int COLUMNS>
    __device__ void keep(int turn, unsigned number) const {
        const Tile drawn{number / grid.columns, number % grid.columns};
        Tile& before = last<COLUMNS>(drawn.column);
        segment(turn) = {drawn, before.column == drawn.column ? before.level : 0};
        before = drawn;
    }
    __device__ bool there(int turn) const {
        if (!grid.is_cut()) return turn < int(grid.levels);
        return segment(turn).level < segments;
    }
};

// The least number of segments in a group: the host allocates for so many.
enum : int { LEAST_GROUP = 16 };

// A warp that looks back. Of SCANS scans side by side it has OWN, each with PLACES lanes. A lane has at most one tile of
// the segment, and reads LOOKS aggregates of a group.
template <class Work>
struct LookbackWarp {
    enum : int {
        SCANS = Work::SCANS,
        OWN = SCANS / LOOKBACK_WARPS_OF_TURN,
        PLACES = 32 / OWN,
    };
    static_assert(SCANS % LOOKBACK_WARPS_OF_TURN == 0 && 32 % OWN == 0 && PLACES >= TILE_WARPS, "a lane for each tile");
    // Between two turns of a CTA, all CTAs of an H100 (132) publish aggregates. With groups of 16 a look-back reads some
    // 25 of them for each scan, in two dependent trips to the L2. For a single scan larger groups, read in one trip, are
    // faster. With resets, compensated maps in eight looks would lie in local memory.
    enum : int {
        LOOKS = SCANS > 1 ? LEAST_GROUP / PLACES : STATE_WORDS > 1 || (COMPENSATED && MAY_RESET) ? 4 : 8,
        GROUP = PLACES * LOOKS,
        KNOWN = SCANS > 1 ? LOOKS : 1,  // loads in flight for groups
    };
    static_assert(GROUP >= LEAST_GROUP && LOOKS <= PLACES);

    const Work& work;
    const Drawn drawn;
    const WorkspaceInit workspace_init;
    uint4* const maps = static_cast<uint4*>(workspace_init.past_head());
    const int number = threadIdx.x / 32 - TILE_WARPS, lane = threadIdx.x % 32, place = lane / OWN;
    const int scan = number % LOOKBACK_WARPS_OF_TURN * OWN + lane % OWN;

    // Where the aggregate of a segment is, and that of its group.
    __device__ uint4* map_of(const Tile& segment) const {
        return maps + (i64(segment.level) * drawn.grid.columns + segment.column) * (MAP_LINES * SCANS) + scan;
    }
    __device__ uint4* group_of(const Tile& segment) const {
        return map_of({drawn.segments + segment.level / GROUP, segment.column});
    }
    __device__ void run() {
        if (drawn.once() && number < LOOKBACK_WARPS_OF_TURN && lane == 0)
            workspace_init.await((gridDim.x - 1) * LOOKBACK_WARPS_OF_TURN);
        __syncwarp();
        for (int turn = number / LOOKBACK_WARPS_OF_TURN;; turn += TURNS) {
            await_composed(turn);
            if (!drawn.there(turn)) {
                if (turn > 0 && drawn.there(turn - 1)) await_known(turn - 1);
                break;
            }
            auto& shared = SharedStorage<SCANS>::of(turn);
            const Segment segment = drawn.segment(turn);
            const bool publishes = place + 1 == PLACES && segment.level + 1 < drawn.segments;
            Affine map;
            if (place < TILE_WARPS) map = shared.tiles[place][scan];
            const Affine before = exclusive_scan<OWN>(map, lane);
            if (publishes) publish(map_of(segment), SCANS, map);
            // Even step: the state after the whole groups, which the next turn waits for. Odd step: the segments since these
            // groups. The even step comes first (0, 1). But where the segment completes a group, the odd step does (1, 2),
            // because it publishes the group's aggregate, and other CTAs wait for that. The loop is not unrolled, so that the
            // binary has the code of each step once.
            const bool completes = segment.level % GROUP == GROUP - 1;
            Affine since;
            RunningPrefix x;
#pragma unroll 1
            for (int step = completes; step < completes + 2; step++) {
                if (step % 2 == 0) {
                    x = after_groups(turn, segment);
                    tell_known(turn);
                } else {
                    since = since_groups(segment);
                    if (completes && publishes) publish(group_of(segment), SCANS, compose(since, map));
                }
            }
            x = since(x);
            if (place < TILE_WARPS) shared.entering[place][scan] = before(x.x);
            tell_combined(turn);
            if (place + 1 == PLACES && segment.level + 1 == drawn.segments)
                if (State* const after = work.after(segment.column, scan)) *after = map(x).x;
        }
    }

    // The state after all whole groups of the column before the segment's group.
    __device__ RunningPrefix after_groups(int turn, const Segment& segment) {
        const unsigned end = segment.level / GROUP;
        unsigned begin = segment.previous / GROUP;
        const bool goes_on = begin > 0;
        RunningPrefix x;
        bool entered = false;
#pragma unroll 1
        do {
            Affine groups[KNOWN];
            PendingMaps<KNOWN> pending = requested<KNOWN>(group_of({begin * GROUP, segment.column}), end - begin);
            pending.await(groups);
            if (!entered) {
                if (turn > 0) await_known(turn - 1);
                x = goes_on ? SharedStorage<SCANS>::after_groups(segment.column, scan) : before_column(segment.column);
                entered = true;
            }
#pragma unroll
            for (int i = 0; i < KNOWN; i++)
#pragma unroll 1
                for (int p = 0; p < PLACES && begin < end; p++, begin++)
                    x = from_lane(groups[i], p * OWN + lane % OWN)(x);
        } while (begin < end);
        __syncwarp();  // all lanes have read the kept state before one of them writes the next
        if (place == 0) SharedStorage<SCANS>::keep(segment.column, scan, x);
        return x;
    }
    __device__ RunningPrefix before_column(unsigned column) const {
        const State* const before = work.before(column, scan);
        return before ? *before : State(0);
    }
    // The aggregate of the segments of its group before this one.
    __device__ Affine since_groups(const Tile& segment) const {
        const unsigned count = segment.level % GROUP;
        const uint4* const first = map_of({segment.level - count, segment.column});
        if (LOOKS > 2 && count <= PLACES) return composed<1>(first, count);
        return composed<LOOKS>(first, count);
    }
    // Request `count` consecutive aggregates of a column, at most MOST for each lane; neighbouring lanes load neighbours.
    template <int MOST>
    __device__ PendingMaps<MOST> requested(const uint4* first, int count) const {
        const i64 apart = i64(drawn.grid.columns) * (MAP_LINES * SCANS);
        PendingMaps<MOST> pending;
        pending.request(first + place * apart, PLACES * apart, SCANS, (count - place + PLACES - 1) / PLACES);
        return pending;
    }
    template <int MOST>
    __device__ Affine composed(const uint4* first, int count) const {
        PendingMaps<MOST> pending = requested<MOST>(first, count);
        Affine maps[MOST];
        pending.await(maps);
        // A reduction by halves: two lanes exchange half of their maps and compose the rest, until each has one.
#pragma unroll
        for (int distance = OWN, looks = MOST; distance < 32; distance *= 2, looks = (looks + 1) / 2) {
            const bool later = lane & distance;
#pragma unroll
            for (int i = 0; i < (looks + 1) / 2; i++) {
                Affine own = maps[i], given = maps[i + looks / 2];
                if (looks > 1) swap_if(later, own, given);
                maps[i] = with_other(own, given, distance);
            }
        }
#pragma unroll
        for (int distance = OWN * MOST / 2; distance >= OWN; distance /= 2)
            maps[0] = with_other(maps[0], maps[0], distance);
        return maps[0];
    }
    // Compose this lane's map with the one that the lane at a distance gives, in the order of the lanes.
    __device__ Affine with_other(Affine own, const Affine& given, int distance) const {
        Affine other = from_lane(given, lane ^ distance);
        swap_if(lane & distance, own, other);
        return compose(own, other);
    }
    static __device__ void swap_if(bool wanted, Affine& a, Affine& b) {
        const Affine first = a;
        if (wanted) a = b, b = first;
    }
};

// Takes the tiles of a warp through its ring in shared memory. `work` has
//
//     TilePrefix, SCANS, HELD                  prefixes of a tile of SCANS scans; a lane keeps HELD of them, and lanes l
//                                              and l + SCANS / HELD keep the same
//     fetch(tile, stage)                       copies in
//     compose_tile(tile, stage, tile_prefix)   the aggregate of the tile, and the prefix of each thread within it
//     finish(tile, stage, tile_prefix)         the states, and the results
//     before, after(column, scan)              null, or where the state before or after the scan is
struct Schedule {
    const Grid grid;

    // Whole columns: all levels of one, and then the next.
    template <class Work>
    __device__ void run(Work work, unsigned first, unsigned stride) const {
        typename Work::TilePrefix tile_prefix;
        const auto there = [&](const Tile& tile) { return tile.column < grid.columns; };
        const auto advance = [&](Tile& tile) {
            if (++tile.level == grid.levels) tile.level = 0, tile.column += stride;
        };
        Tile coming{0, first}, tile = coming;
        for (unsigned round = 0;; round++) {
            __syncwarp();  // what the stage held has been read
            if (there(coming)) work.fetch(coming, round % STAGES), advance(coming);
            commit_copies();
            if (round + 1 < STAGES) continue;
            if (!there(tile)) break;
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            const unsigned stage = (round + 1) % STAGES;
            work.compose_tile(tile, stage, tile_prefix);
            work.finish(tile, stage, tile_prefix);
            advance(tile);
        }
    }

    // Segments: whether this warp looks back. The shuffle tells the compiler that the answer is the same in all lanes.
    // Otherwise it would add code for later shuffles in which not all lanes take part.
    static __device__ bool is_lookback() { return from_lane(threadIdx.x / 32, 0) >= TILE_WARPS; }
    template <class Work>
    __device__ void combine(const Work& work, void* workspace) const {
        LookbackWarp<Work>{work, Drawn(grid), WorkspaceInit(workspace, 0)}.run();
    }
    // Whether this CTA has no segment, and zeroes the workspace.
    template <class Work>
    __device__ bool initializes(void* workspace) const {
        const Drawn drawn(grid);
        if (blockIdx.x > 0 || !drawn.once()) return false;
        const unsigned maps = (drawn.segments + drawn.segments / LEAST_GROUP) * grid.columns;
        WorkspaceInit(workspace, int(maps * (MAP_LINES * Work::SCANS * 16))).initialize();
        return true;
    }
    template <class Work>
    __device__ void walk(const Work& work, void* workspace) const {
        using SharedStorage = ::SharedStorage<Work::SCANS>;
        const Drawn drawn(grid);
        unsigned* const counter = static_cast<unsigned*>(workspace);
        const int warp = threadIdx.x / 32, first_held = threadIdx.x % (Work::SCANS / Work::HELD) * Work::HELD;
        const bool is_cut = grid.is_cut();
        if (!is_cut && (warp >= int(grid.warps) || blockIdx.x * grid.warps + warp >= grid.columns)) return;
        const auto tile = [&](int turn) {
            if (!is_cut) return Tile{unsigned(turn), blockIdx.x * grid.warps + warp};
            const Segment segment = drawn.segment(turn);
            return Tile{segment.level * TILE_WARPS + warp, segment.column};
        };
        const bool once = drawn.once();
        // Of atomicAdd the compiler does not see that a single lane calls it: it would gather the lanes that do, and wait for the
        // result at once.
        const auto draw = [&] { return threadIdx.x > 0 || once ? ~0u : atomicInc(counter, ~0u >> 1); };
        if (threadIdx.x == 0) Drawn::start<SharedStorage::COLUMNS>();
        unsigned number = once ? blockIdx.x - 1 : is_cut ? draw() : 0;
        typename Work::TilePrefix tile_prefixes[TURNS];
        RunningPrefix running = State(0);  // before the turn's tile, of a column that is not cut
        int turn = -STAGES;
        for (; turn < 0 || drawn.there(turn); turn++) {
            const int leading = turn + PREFIX_LEAD, coming = turn + STAGES;
            if (leading >= 0) {
                if (drawn.there(leading)) {
                    wait_for_copies<STAGES - PREFIX_LEAD - 1>();
                    __syncwarp();
                    work.compose_tile(tile(leading), leading % STAGES, tile_prefixes[PREFIX_LEAD]);
#pragma unroll
                    for (int v = 0; v < Work::HELD; v++)
                        SharedStorage::of(leading).tiles[warp][first_held + v] = tile_prefixes[PREFIX_LEAD].tile[v];
                }
                if (is_cut) tell_composed(leading);
            }
            if (is_cut) {
                if (threadIdx.x == 0) drawn.keep<SharedStorage::COLUMNS>(coming, number);
                if (turn < 0) meet_tile_warps();
                else await_combined(turn);
                number = draw();
            }
            if (turn >= 0) {
#pragma unroll
                for (int v = 0; v < Work::HELD; v++)
                    if (is_cut) tile_prefixes[0].carried[v] = SharedStorage::of(turn).entering[warp][first_held + v];
                if constexpr (VARLEN)
                    if (!is_cut) tile_prefixes[0].carried[0] = running, running = tile_prefixes[0].tile[0](running);
                work.finish(tile(turn), turn % STAGES, tile_prefixes[0]);
                __syncwarp();  // what the stage held has been read
            }
            if (drawn.there(coming)) work.fetch(tile(coming), coming % STAGES);
            commit_copies();
#pragma unroll
            for (int k = 0; k < PREFIX_LEAD; k++) tile_prefixes[k] = tile_prefixes[k + 1];
        }
        if (is_cut) tell_composed(turn + PREFIX_LEAD);  // nothing was composed: it releases the last look-back warps, which then end
    }
};
