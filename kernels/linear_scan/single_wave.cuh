// Few contiguous channels, moderate length: all tiles of a column are resident at once, in a single wave of CTAs.
//
// Each warp owns a run of consecutive time steps of the column:
//
//      part 0   warp 0   tiles 0 … n of its run    1. aggregates, in the order n … 1 0
//               warp 1   …                         2. exchange
//               …                                  3. states, in the order 0 1 … n
//      part 1   warp 0   …
//
// 1. A warp composes the affine maps (gate, token) of its run from the last tile to the first. Tile 0 and those after
//    it are then still in shared memory, and step 3 begins with them.
// 2. A CTA publishes the aggregate of its part, which is the runs of its warps, and composes the aggregates of all parts
//    before its own. One exchange tells every CTA all it needs.
// 3. A warp computes and writes its states. Tiles that have left shared memory are read again, from the L2.
//
// A CTA waits only for CTAs with lower CTA indices, which a GPU starts first. Traffic: 12 bytes per element in float32
// and 6 in 16 bits forward, 20 and 10 backward; what is read twice comes from the L2.
//
// workspace, zeroed inside the launch (workspace_init.cuh): a descriptor (tile_status.cuh) for each channel of each part
// but the last.
#pragma once
#include "../linear_scan/column_serial.cuh"
#include "../common/tile_status.cuh"
#include "../common/workspace_init.cuh"

enum : int {
    WORDS = 16 / sizeof(TileDescriptor::Word),  // descriptors in one load, of neighbouring channels
    LOOKS = (136 + WARPS - 1) / WARPS,          // loads in flight: enough for the parts of 132 SMs, in a slice for each warp
    ACROSS_BANKS = CHANNELS + 2,                // so that maps of one channel lie in different banks
};
static_assert(LANES_ACROSS == 32 && 32 % WARPS == 0 && WORDS == VECTOR && sizeof(State) == 4);
static_assert(!MISALIGNED && !VARLEN && CTAS_PER_COLUMN == 1);

// Which part of which column a CTA has, and which run a warp has of it. The grid is (columns side by side, batches,
// parts). Where there are several parts, z = 0 is one layer more, whose first CTA zeroes the workspace.
struct Part {
    const int number = only() ? 0 : int(blockIdx.z) - 1;
    const int run;  // time steps of a warp, in whole tiles

    __device__ explicit Part(i64 run) : run(int(run)) {}
    __device__ static unsigned column() { return blockIdx.y * gridDim.x + blockIdx.x; }
    __device__ static unsigned columns() { return gridDim.y * gridDim.x; }
    __device__ static bool only() { return gridDim.z == 1; }
    __device__ static unsigned published() { return gridDim.z - 2; }  // parts of a column that publish, if there are several
    __device__ static unsigned blocks() { return (gridDim.z - 1) * columns(); }
    __device__ bool last() const { return only() || number == published(); }
    // Time steps of the column before this warp's.
    __device__ int before() const { return (number * WARPS + int(threadIdx.x / 32)) * run; }
};

// The exchange between the runs of a column. Each thread composes maps of the VECTOR channels from `served` on, which need not be
// the channels that it scans. WARPS neighbouring lanes serve the same channels: lane `place` of them has the run of warp `place`, and
// slice `place` of the earlier parts. Maps of earlier parts are read so that neighbouring threads have neighbouring channels.
struct SingleWave {
    const Part part;
    const int lane = threadIdx.x % 32, place = lane % WARPS, served = first_served();
    const int looked = threadIdx.x * VECTOR % CHANNELS, slice = threadIdx.x * VECTOR / CHANNELS;
    const unsigned apart;         // descriptors, from part to part
    const WorkspaceInit workspace_init;
    TileDescriptor::Word* const words;  // of the column, in part 0
    const States initial, final;  // of the channels that are served
    unsigned seen = 0;            // CTAs that have seen the workspace's flag before this one

    __device__ SingleWave(const Part& part, void* workspace, const States& initial, const States& final)
        : part(part),
          apart(part.columns() * CHANNELS),
          workspace_init(workspace, int(part.published() * apart * sizeof(TileDescriptor::Word))),
          words(static_cast<TileDescriptor::Word*>(workspace_init.past_head()) + part.column() * CHANNELS),
          initial(initial),
          final(final) {}

    static __device__ int first_served() { return threadIdx.x / WARPS * VECTOR; }
    // Whether the CTA has no part; the first such CTA zeroes the workspace.
    __device__ bool initializes() const {
        if (part.number >= 0) return false;
        if (part.column() == 0) workspace_init.initialize();
        return true;
    }
    // One thread of each other CTA waits for the workspace.
    __device__ void await_workspace() {
        if (part.only() || threadIdx.x > 0) return;
        while (!workspace_init.is_ready()) {}
        seen = workspace_init.count_reader();
    }
    __device__ void leave() const {
        if (!part.only() && threadIdx.x == 0 && seen + 1 == part.blocks()) workspace_init.retract();
    }

    // Compose the aggregates of this thread's slice of the parts before, once they are published.
    __device__ void look(Affine (&all)[VECTOR]) const {
        const int each = (part.number + WARPS - 1) / WARPS, first = slice * each;
        const int end = first + each < part.number ? first + each : part.number;
#pragma unroll 1
        for (int at = first; at < end; at += LOOKS) {
            TileDescriptor descriptors[LOOKS][VECTOR] = {};
#pragma unroll 1
            for (bool missing = true; missing;) {
                missing = false;
#pragma unroll
                for (int i = 0; i < LOOKS; i++)
                    if (at + i < end) read_words(descriptors[i], words + (at + i) * apart + looked);
#pragma unroll
                for (int i = 0; i < LOOKS; i++)
#pragma unroll
                    for (int w = 0; w < VECTOR; w++) missing |= at + i < end && !descriptors[i][w].flag();
            }
#pragma unroll
            for (int i = 0; i < LOOKS; i++)
#pragma unroll
                for (int w = 0; w < VECTOR; w++)
                    if (at + i < end) all[w] = compose(all[w], descriptors[i][w]);
        }
    }
    // Composes maps of a channel, of all runs or slices, and returns the composition of those before `place`. Compensated maps take
    // so long to compose that lanes share the work.
    __device__ Affine composed(const Stored<> (&maps)[WARPS][ACROSS_BANKS], int channel, Affine& all) const {
        Affine before;
        if constexpr (COMPENSATED) {
            all = maps[place][channel];
            before = exclusive_scan<1, WARPS>(all, lane);
            all = from_lane(all, lane | WARPS - 1);
        } else {
            all = {};
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                if (w == place) before = all;
                all = compose(all, Affine(maps[w][channel]));
            }
        }
        return before;
    }
    // The states that enter this warp's run, whose aggregate is `own`. To be called by the whole CTA.
    __device__ void exchange(const Affine (&own)[VECTOR], State (&x)[VECTOR]) {
        __shared__ Stored<> runs[WARPS][ACROSS_BANKS], slices[WARPS][ACROSS_BANKS];
        __shared__ State entering[WARPS][CHANNELS];
        const int warp = threadIdx.x / 32;
        State carried[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; v++) runs[warp][lane * VECTOR + v] = own[v], carried[v] = initial.read(v);
        await_workspace();
        __syncthreads();
        Affine all[VECTOR], before[VECTOR], parts[VECTOR];  // of the CTA's runs, of those before `place`, of the parts before
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            before[v] = composed(runs, served + v, all[v]);
            if (place == WARPS - 1 && !part.last())
                store_relaxed(words + part.number * apart + served + v, TileDescriptor::of(all[v], 1).word);
        }
        look(parts);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) slices[slice][looked + v] = parts[v];
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VECTOR; v++) {
            composed(slices, served + v, parts[v]);
            carried[v] = parts[v](carried[v]);
            entering[place][served + v] = before[v](carried[v]);
            if (part.last() && place == WARPS - 1) final.write(v, all[v](carried[v]));
        }
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VECTOR; v++) x[v] = entering[warp][lane * VECTOR + v];
    }
};

// A warp's run: its tiles, by number. When all have been composed, the ring holds the first ones.
template <class Work>
struct Run {
    Work work;
    int count;
    int to_come;  // the tile to copy next, at which the input pointers are

    __device__ Run(const Work& of, const Part& part) : work(of) {
        const i64 rows = work.tiles.rows < part.run ? work.tiles.rows : part.run;  // less than 0 past the end
        count = rows > 0 ? int((rows + TIMES - 1) / TIMES) : 0;
        to_come = count - 1;
        work.move(to_come);
    }
    // Time steps from a tile to the column's end, as `counted` counts them.
    __device__ int left(int tile) const { return work.tiles.counted(work.tiles.rows - i64(tile) * TIMES); }
    __device__ void go(int tiles) { work.move(tiles), to_come += tiles; }

    // The aggregate of the run.
    __device__ void compose_run(Affine (&all)[VECTOR]) {
#pragma unroll 1
        for (int tile = count + STAGES - 2; tile >= 0; tile--) {
            if (to_come >= 0) work.fetch_for_map(left(to_come)), go(-1);
            commit_copies();
            work.tiles.turn();
            if (tile >= count) continue;  // the ring is not full yet
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // of all lanes
            typename Work::Held held;
            Affine maps[VECTOR];
            work.read(held);
            work.compose_tile(held, maps, left(tile));
#pragma unroll
            for (int v = 0; v < VECTOR; v++) all[v] = compose(maps[v], all[v]);
            __syncwarp();  // before others come in
        }
        go(1);
    }
    // Copy in what the outputs need beyond the aggregates, for the tiles in the ring. Tile 0 is the current one.
    __device__ void fetch_remaining() {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            if (to_come < count) work.fetch_for_output(left(to_come)), go(1);
            commit_copies();
            work.tiles.turn_back();
        }
    }
    __device__ void walk(State (&x)[VECTOR]) {
#pragma unroll 1
        for (int tile = 0; tile < count; tile++) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // of all lanes
            typename Work::Held held;
            work.read(held);
            work.finish(held, x, left(tile));
            work.leave(left(tile));
            __syncwarp();  // before others come in
            if (to_come < count) work.fetch_for_map(left(to_come)), work.fetch_for_output(left(to_come)), go(1);
            commit_copies();
            work.tiles.turn_back();
        }
        wait_for_copies<0>();
    }
};

template <class Work>
__device__ void run_single_wave(const Work& work, SingleWave wave) {
    if (wave.initializes()) return;
    Run<Work> run(work, wave.part);
    Affine all[VECTOR];
    State x[VECTOR];
    run.compose_run(all);
    run.fetch_remaining();
    wave.exchange(all, x);
    run.walk(x);
    wave.leave();
}
