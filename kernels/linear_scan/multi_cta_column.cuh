// Columns of channels that are too few for the GPU: CTAS_PER_COLUMN CTAs share one, and take its tiles in turn.
//
//      tile 0                     CTA 0 of the column     turn 0
//      tile 1                     CTA 1
//      …
//      tile CTAS_PER_COLUMN       CTA 0                   turn 1
//
// AGGREGATE_LEAD turns before a CTA scans a tile, it composes the tile's affine maps (gate, token) into one aggregate,
// and publishes it: 8 bytes for each channel. To get the state that enters its next tile, a CTA applies the aggregates of
// the CTAS_PER_COLUMN - 1 tiles between to the state after its own last tile. It requests them one turn before it needs
// them. A thread does this for one channel of the column, whichever channels it scans.
//
// CTAs exchange aggregates only, no states. An aggregate depends on nothing but states that its CTA had AGGREGATE_LEAD
// turns before. CTAs draw their ranks from a counter, so that CTAs of one column start together: of a launch at most
// CTAS_PER_COLUMN - 1 CTAs wait for one that has not started.
//
// Traffic, of 16-bit elements only: 6 bytes per element forward, 10 backward.
//
// Of misaligned rows, CTAS_PER_COLUMN is the most CTAs that may share a column, and the launch says how many do.
//
// workspace, zeroed before the launch: a counter, and for each column a ring of TURNS × CTAS_PER_COLUMN tiles with a
// descriptor (tile_status.cuh) for each channel. Its flag is the ring's round, so a descriptor travels in one store and
// one load, without a fence. A slot is written again only after all CTAs have read it: a CTA that publishes turn t has
// entered turn t - AGGREGATE_LEAD, with aggregates of turn t - AGGREGATE_LEAD - 1 or later, whose publishers had entered
// turn t - 2 AGGREGATE_LEAD - 1.
#pragma once
#include "../common/tile_status.cuh"
#include "../linear_scan/column_serial.cuh"

enum : int {
    SLOTS = AGGREGATE_LEAD + 1,  // turns whose maps a CTA keeps
    TURNS = 2 * SLOTS,           // turns in the ring of descriptors
};
static_assert(CTAS_PER_COLUMN > 1 && AGGREGATE_LEAD > 1 && STAGES > SLOTS);
static_assert(CHANNELS % 32 == 0 && LANES_ACROSS == 32);
static_assert(!COMPENSATED && !VARLEN);
// Pause between two polls of one address; a poll takes about a microsecond.
enum : unsigned { LOOK_AGAIN_NS = 40 };
enum : int { MOST_LOOKS = 8 };  // polls of the columns beside: bounded, as their CTAs may not have started
enum : int { COUNTER = 256 };  // bytes before the descriptors, so that a warp's are in whole 128-byte lines

// The CTA's column, and its rank among the CTAs that share the column.
struct CtaRank {
    unsigned column;
    int rank, count;

    // One thread draws a number for the whole CTA.
    __device__ explicit CtaRank(void* workspace, int ctas = CTAS_PER_COLUMN) : count(MISALIGNED ? ctas : CTAS_PER_COLUMN) {
        __shared__ unsigned drawn;
        if (threadIdx.x == 0) drawn = atomicAdd(static_cast<unsigned*>(workspace), 1u);
#if MISALIGNED
        if (threadIdx.x == 0) tiles_apart() = ctas;
#endif
        __syncthreads();
        column = drawn / unsigned(count), rank = int(drawn % unsigned(count));
    }
};

// A CTA's part in the exchange with the other CTAs of its column.
struct ColumnCta {
    const CtaRank cta;
    const int channel = own_channel();
    const bool exchanges = channel < CHANNELS;  // the whole warp does, or has tiles
    const int columns_across;  // in a row of memory, if it waits for the columns beside its own; or 0
    u64* const words;    // descriptors of that channel
    const States final;  // where its last state goes
    RunningPrefix carried;  // its state after this CTA's last tile
    TileDescriptor descriptors[CTAS_PER_COLUMN - 1];

    // CHANNELS for threads that have tiles.
    static __device__ int own_channel() {
        const int thread = int(threadIdx.x) - 32 * WARPS;
        return thread < 0 ? CHANNELS : thread;
    }
    __device__ ColumnCta(const CtaRank& cta, void* workspace, const States& before, const States& after, int columns_across = 0)
        : cta(cta),
          columns_across(columns_across),
          words(reinterpret_cast<u64*>(static_cast<char*>(workspace) + COUNTER) +
                i64(cta.column) * CHANNELS * TURNS * cta.count + channel),
          final(after),
          carried(before.read(0)) {}
    __device__ u64* word(int tile) const { return words + tile * CHANNELS; }

    // Maps of a tile's groups, and in place GROUPS of the whole tile. After `tell` they are exclusive prefixes.
    static __device__ Stored<>& map(int turn, int group, int channel) {
        __shared__ Stored<> maps[SLOTS][CHANNELS * (GROUPS + 1)];
        return maps[turn % SLOTS][channel + group * CHANNELS];
    }
    static __device__ State& entering(int turn, int group, int channel) {
        __shared__ State entering[2][CHANNELS * (GROUPS + 1)];
        return entering[turn % 2][channel + group * CHANNELS];
    }
    // The flag of a turn, 1 to 3: that of no neighbouring round, and not 0.
    __device__ static unsigned round(int turn) { return unsigned(turn) / TURNS % 3 + 1; }

    // Publish the aggregate of a tile whose groups' maps are in shared memory.
    __device__ void tell(int turn) const {
        Affine own[GROUPS], all;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) own[g] = map(turn, g, channel), all = compose(all, own[g]);
        Affine before;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            map(turn, g, channel) = before;
            before = compose(before, own[g]);
        }
        map(turn, GROUPS, channel) = all;
        store_relaxed(word(unsigned(turn) % TURNS * cta.count + cta.rank), TileDescriptor::of(all, round(turn)).word);
    }
    // The i-th tile after the CTA's last one: its place among the tiles of a turn and the turn before, and whether the
    // column has it.
    __device__ int after_last(int i) const { return cta.rank + 1 + i; }
    __device__ bool matters(int turn, int at) const {
        return at < cta.count + cta.rank && (turn > 0 || at >= cta.count);
    }
    // Which of those tiles' aggregates are still missing, a bit for each.
    __device__ unsigned missing(int turn) const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < CTAS_PER_COLUMN - 1; i++) {
            const int at = after_last(i);
            const bool there = descriptors[i].flag() == round(turn - (at < cta.count));
            bits |= unsigned(matters(turn, at) && !there) << i;
        }
        return bits;
    }
    // Load the descriptors of the wanted tiles.
    __device__ void ask(int turn, unsigned wanted) {
        const int before = int(unsigned(turn + TURNS - 1) % TURNS) * cta.count, ring = TURNS * cta.count;
#pragma unroll
        for (int i = 0; i < CTAS_PER_COLUMN - 1; i++) {
            const int index = before + after_last(i);
            if (wanted >> i & 1 && matters(turn, after_last(i)))
                descriptors[i].word = load_relaxed(word(index < ring ? index : index - ring));
        }
    }
    // Wait for those aggregates, and compute the states that enter the groups of this turn's tile.
    __device__ void enter(int turn) {
#pragma unroll 1
        for (unsigned wanted = missing(turn); __any_sync(FULL_WARP, wanted != 0); wanted = missing(turn)) {
            __nanosleep(LOOK_AGAIN_NS);
            ask(turn, wanted);
        }
        Affine maps[CTAS_PER_COLUMN - 1];
#pragma unroll
        for (int i = 0; i < CTAS_PER_COLUMN - 1; i++)
            if (matters(turn, after_last(i))) maps[i] = descriptors[i];
#pragma unroll
        for (int i = 0; i < CTAS_PER_COLUMN - 1; i++) carried = maps[i](carried);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            entering(turn, g, channel) = Affine(map(turn, g, channel))(carried.x);
        carried = Affine(map(turn, GROUPS, channel))(carried);
    }

    // Columns beside one another share sectors of memory. If their CTAs drift apart, memory reads and writes those twice. So a CTA
    // waits a while for those of its rank in the columns beside to publish a turn.
    __device__ void await_beside(int turn) const {
        const int side = channel == 0 ? -1 : 1, column = int(cta.column % unsigned(columns_across)) + side;
        const bool looks = channel < 2 && column >= 0 && column < columns_across;
        const u64* const beside =
            word(unsigned(turn) % TURNS * cta.count + cta.rank) - channel + side * CHANNELS * TURNS * cta.count;
#pragma unroll 1
        for (int look = 0; look < MOST_LOOKS; look++) {
            const unsigned flag = looks ? TileDescriptor{load_relaxed(beside)}.flag() : round(turn);
            const bool behind = flag != round(turn) && flag != round(turn + TURNS);
            if (!__any_sync(FULL_WARP, behind)) break;
            __nanosleep(LOOK_AGAIN_NS);
        }
    }

    template <class Work>
    __device__ void run(Work work, i64 time) {
        auto& tiles = work.tiles;
        // All CTAs take the same number of turns, whatever their ranks, so that branches are uniform: a tile past the
        // end is the identity.
        const i64 turn_rows = i64(cta.count) * TIMES;
        const int turns = int((time + turn_rows - 1) / turn_rows), group = threadIdx.x / LANES_ACROSS;
        int filled = 0, composed = 0, walks = 0;  // stages
        i64 to_come = tiles.rows, to_compose = tiles.rows, left = tiles.rows;
        const auto after = [](int stage) { return stage + 1 < STAGES ? stage + 1 : 0; };
        const auto next = [&](int turn) {
            tiles.stage = filled, filled = after(filled);
            if (MISALIGNED) tiles.inner = to_come < tiles.rows && to_come > TIMES + 1;
            if (turn < turns) work.fetch(tiles.counted(to_come));
            commit_copies();
            to_come -= turn_rows;
        };
        typename Work::Held held;
        if (!exchanges) {
#pragma unroll 1
            for (int turn = 0; turn < STAGES - SLOTS; turn++) next(turn);
        }
#pragma unroll 1
        for (int turn = -AGGREGATE_LEAD; turn < turns; turn++) {
            const int composing = turn + AGGREGATE_LEAD;
            if (exchanges) {
                if (turn >= 0) enter(turn);
                if (columns_across && channel < 32 && composing > 0 && composing <= turns) await_beside(composing - 1);
            } else {
                next(turn + STAGES - 1);
                wait_for_copies<STAGES - SLOTS>();
                __syncwarp();  // of all lanes
                if (composing < turns) {
                    Affine maps[VECTOR];
                    tiles.stage = composed, composed = after(composed);
                    work.read(held);
                    work.compose_tile(held, maps, tiles.counted(to_compose));
#pragma unroll
                    for (int v = 0; v < VECTOR; v++) map(composing, group, number_of(v)) = maps[v];
                }
                to_compose -= turn_rows;
            }
            __syncthreads();  // one a turn
            if (exchanges) {
                if (composing < turns) tell(composing);
                if (turn >= -1 && turn + 1 < turns) ask(turn + 1, ~0u);
            } else if (turn >= 0) {
                State x[VECTOR];
                const int rows = tiles.counted(left);
                tiles.stage = walks, walks = after(walks);
                work.read(held);
#pragma unroll
                for (int v = 0; v < VECTOR; v++) x[v] = entering(turn, group, number_of(v));
                work.finish(held, x, rows);
                tiles.hand_out(work, rows);
                left -= turn_rows;
            }
        }
        if (exchanges && cta.rank + 1 == cta.count) final.write(0, carried.x);
    }
};
