// A column that CTAS_PER_COLUMN blocks walk together: each takes every CTAS_PER_COLUMN-th tile. So rows may be wide where columns are few,
// and more multiprocessors have something to do.
//
//      tile 0      block 0    composed AGGREGATE_LEAD turns before it is walked; its map goes to the other blocks then
//      tile 1      block 1
//      …                      what a block knows, the state after its last tile, goes through the maps of the
//      tile CTAS_PER_COLUMN  block 0    CTAS_PER_COLUMN - 1 tiles between, which are requested for a turn before they are needed
//
// A thread looks after one of the column's channels, whatever it walks. Nobody waits for a state of others, only for
// maps, which wait for nothing but states that came AGGREGATE_LEAD turns before. Blocks draw their numbers, so that of those that
// share a column the rest begins as soon as there is room: of a launch at most CTAS_PER_COLUMN - 1 wait for one that has not begun.
//
// workspace, zeroed before the launch: a counter, and for each column a ring of TURNS × CTAS_PER_COLUMN tiles with a word for
// each channel. A word says which round of the ring it is of, so that it travels in one store and one load, and
// nothing needs a fence. A tile takes the place of another once all have used that: a block that tells turn t has
// entered turn t - AGGREGATE_LEAD, with maps of turn t - AGGREGATE_LEAD - 1 or later, and who told them had entered t - 2 AGGREGATE_LEAD - 1.
#pragma once
#include "column_serial.cuh"
#include "tile_status.cuh"

enum : int {
    SLOTS = AGGREGATE_LEAD + 1,  // turns whose maps a block keeps
    TURNS = 2 * SLOTS,  // turns that are told of
};
static_assert(CTAS_PER_COLUMN > 1 && AGGREGATE_LEAD > 1 && STAGES > SLOTS && CHANNELS <= THREADS && CHANNELS % 32 == 0 && LANES_ACROSS == 32);
static_assert(!COMPENSATED && !MISALIGNED && !VARLEN);
// A look takes about a microsecond.
enum : unsigned { LOOK_AGAIN_NS = 40 };
enum : int { COUNTER = 256 };  // bytes before the words, so that a warp's are in whole lines

// Which block this is: its column, and its number among the blocks that share that.
struct CtaRank {
    unsigned column;
    int rank, count;

    // The number is drawn for the whole block.
    __device__ explicit CtaRank(void* workspace) : count(CTAS_PER_COLUMN) {
        __shared__ unsigned drawn;
        if (threadIdx.x == 0) drawn = atomicAdd(static_cast<unsigned*>(workspace), 1u);
        __syncthreads();
        column = drawn / unsigned(count), rank = int(drawn % unsigned(count));
    }
};

// What a block has to do with the others of its column.
struct ColumnCta {
    const CtaRank cta;
    const int channel = own_channel();
    const bool has_channel = channel < CHANNELS;  // the whole warp has, or has not
    u64* const words;    // of that channel
    const States final;  // where its last state goes
    RunningPrefix carried;     // its state after this block's last tile
    TileDescriptor descriptors[CTAS_PER_COLUMN - 1];

    static __device__ int own_channel() { return threadIdx.x / 32 * 32 + threadIdx.x % 32; }
    __device__ ColumnCta(const CtaRank& cta, void* workspace, const States& before, const States& after)
        : cta(cta),
          words(reinterpret_cast<u64*>(static_cast<char*>(workspace) + COUNTER) +
                i64(cta.column) * CHANNELS * TURNS * cta.count + channel),
          final(after),
          carried(before.read(0)) {}
    __device__ u64* word(int tile) const { return words + tile * CHANNELS; }

    // Of the groups of a tile, and last of the tile; those of the groups before, once the block has met.
    static __device__ Stored<>& map(int turn, int group, int channel) {
        __shared__ Stored<> maps[SLOTS][CHANNELS * (GROUPS + 1)];
        return maps[turn % SLOTS][channel + group * CHANNELS];
    }
    static __device__ State& entering(int turn, int group, int channel) {
        __shared__ State entering[2][CHANNELS * (GROUPS + 1)];
        return entering[turn % 2][channel + group * CHANNELS];
    }
    // 1 to 3: never that of the rounds before and after, nor of memory that was zeroed.
    __device__ static unsigned round(int turn) { return unsigned(turn) / TURNS % 3 + 1; }

    // Tell the others the map of a tile whose groups' maps are there.
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
    // The i-th tile after the block's last one: its place among those of a turn and the one before, and whether
    // there is one that matters.
    __device__ int after_last(int i) const { return cta.rank + 1 + i; }
    __device__ bool matters(int turn, int at) const {
        return at < cta.count + cta.rank && (turn > 0 || at >= cta.count);
    }
    // Of those tiles, which ones nothing is known of, a bit for each.
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
    // For their maps, which are on their way then.
    __device__ void ask(int turn, unsigned wanted) {
        const int before = int(unsigned(turn + TURNS - 1) % TURNS) * cta.count, ring = TURNS * cta.count;
#pragma unroll
        for (int i = 0; i < CTAS_PER_COLUMN - 1; i++) {
            const int index = before + after_last(i);
            if (wanted >> i & 1 && matters(turn, after_last(i)))
                descriptors[i].word = load_relaxed(word(index < ring ? index : index - ring));
        }
    }
    // SingleWave they have come, the states that enter the groups of this turn.
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

    template <class Work>
    __device__ void run(Work work, i64 time) {
        auto& tiles = work.tiles;
        // All blocks take as many turns, whatever their numbers, so that the compiler knows which way they go: a
        // tile past the end leaves states as they are.
        const i64 turn_rows = i64(cta.count) * TIMES;
        const int turns = int((time + turn_rows - 1) / turn_rows), group = threadIdx.x / LANES_ACROSS;
        int filled = 0, composed = 0, walks = 0;  // stages
        i64 to_come = tiles.rows, to_compose = tiles.rows, left = tiles.rows;
        const auto after = [](int stage) { return stage + 1 < STAGES ? stage + 1 : 0; };
        const auto next = [&](int turn) {
            tiles.stage = filled, filled = after(filled);
            if (turn < turns) work.fetch(tiles.counted(to_come));
            commit_copies();
            to_come -= turn_rows;
        };
        typename Work::Held held;
#pragma unroll 1
        for (int turn = 0; turn < STAGES - SLOTS; turn++) next(turn);
#pragma unroll 1
        for (int turn = -AGGREGATE_LEAD; turn < turns; turn++) {
            const bool goes_on = turn >= -1 && turn + 1 < turns, composes = turn + AGGREGATE_LEAD < turns;
            if (goes_on && has_channel) ask(turn + 1, ~0u);
            next(turn + STAGES - 1);
            wait_for_copies<STAGES - SLOTS>();
            __syncwarp();  // of all lanes
            if (composes) {
                Affine maps[VECTOR];
                tiles.stage = composed, composed = after(composed);
                work.read(held);
                work.compose_tile(held, maps, tiles.counted(to_compose));
#pragma unroll
                for (int v = 0; v < VECTOR; v++) map(turn + AGGREGATE_LEAD, group, number_of(v)) = maps[v];
            }
            __syncthreads();  // one a turn
            if (composes && has_channel) tell(turn + AGGREGATE_LEAD);
            to_compose -= turn_rows;
            if (turn >= 0) {
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
            if (goes_on && has_channel) enter(turn + 1);
        }
        if (has_channel && cta.rank + 1 == cta.count) final.write(0, carried.x);
    }
};
