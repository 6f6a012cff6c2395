// A warp's run of time steps, and the chunks of it in shared memory. The picture is in resident.cuh.
#pragma once
enum : int { THREADS = 32 * WARPS };
#include "../common/bulk_copy.cuh"
#include "../common/compiler.cuh"
#include "../common/shared_memory.cuh"
#include "../common/tile_state.cuh"
#include "../common/workspace_init.cuh"
#include "../linear_scan/gate_power.cuh"

enum : int {
    PIECE = 16,
    EARLIER = BACKWARD,                                   // chunks of the states before, of which a warp has one
    BANKS = 128,                                          // bytes of a row of banks
    AREA = 32 * STEPS * int(sizeof(Storage)) + BANKS,     // bytes of a chunk, wherever it begins
    LEVELS = 6,                                           // of slots, from 1 to 32, by powers of two
    SLICES = 32,                                          // of the CTAs before, at most
    GROUP = STEPS / 3,                                    // rows that a lane reads at once
    LOOKS = 8,                                            // shifts that a thread reads at once
};
// The rows of neighbouring slots begin in neighbouring banks then.
static_assert(STEPS % 32 == 1 && AREA % BANKS == 0);

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }

// Rows side by side in memory.
struct Stretch {
    const Storage* first;
    int rows, elements;  // in all

    __device__ u64 begin() const { return u64(first) / PIECE * PIECE; }
    __device__ u64 end() const { return (u64(first + elements) + PIECE - 1) / PIECE * PIECE; }
    // Where its first element lies in the memory of a chunk: copies are faster to the place of their first byte in a row of banks.
    __device__ Storage* in(char* area) const { return reinterpret_cast<Storage*>(area + u64(first) % BANKS); }
};

// A warp's run, and a lane's channel and slot. What the launch says is in bits of `flags` (resident.py).
struct Run {
    const bool against;
    const int channels, time;
    const int most;                 // chunks of a run
    const int runs;                 // of a batch: a power of two up to WARPS, or a multiple of WARPS
    const int warp, lane, slot, channel;
    int slots;
    bool has_channel, exists;       // whether the batch has the run
    int cta, batch, place;          // the CTA's number among those with runs; of the run, its batch, and its number in the batch
    int row;                        // of contiguous time: which of the batch's
    int begin, count, chunks;       // order of the first time step; how many there are

    // `rows` of contiguous time in each of `batches`; 1 of contiguous channels.
    __device__ Run(i64 batches, i64 rows, i64 channels, i64 time, bool against, i64 flags)
        : against(against),
          channels(int(channels)),
          time(int(time)),
          most(int(flags >> 2) & 0xffffff),
          runs(int(flags >> 26)),
          warp(int(threadIdx.x / 32)),
          lane(int(threadIdx.x % 32)),
          slot(lane / int(channels)),
          channel(lane - slot * int(channels)),
          slots(1) {
#pragma unroll
        for (int level = 1; level < LEVELS; level++)
            if (this->channels << level <= 32) slots = 1 << level;
        cta = int(blockIdx.x) - shared();
        const int number = cta * WARPS + warp;
        const int scan = number / runs;
        batch = scan / int(rows), row = scan - batch * int(rows), place = number - scan * runs;
        begin = place * most * times();
        exists = batch < int(batches);
        has_channel = exists && slot < slots;
        count = exists && begin < this->time ? smaller(this->time - begin, most * times()) : 0;
        chunks = (count + times() - 1) / times();
    }
    __device__ i64 offset(i64 by_batch, i64 by_row = 0) const { return batch * by_batch + row * by_row; }
    __device__ int times() const { return slots * STEPS; }   // time steps of a chunk
    __device__ bool shared() const { return runs > WARPS; }  // whether CTAs share a batch
    __device__ int parts() const { return runs / WARPS; }    // CTAs that do
    __device__ int stage(int chunk) const { return (chunks - 1 - chunk) % CHUNKS; }

    // The rows of a chunk in a tensor of the batch; `later` of the rows that follow them, as far as there are any.
    __device__ Stretch stretch(const Storage* batch, int chunk, int later = 0) const {
        const int order = begin + chunk * times() + later;
        int steps = smaller(count - chunk * times(), times());
        if (order + steps > time) steps = time - order;
        return {batch + i64(against ? time - order - steps : order) * channels, steps, steps * channels};
    }
};

// The lane's rows in a chunk.
struct Rows {
    Storage* row;
    int apart, own;

    __device__ Rows(char* area, const Stretch& of, const Run& run) {
        const int before = run.slot * STEPS;
        own = run.has_channel ? smaller(of.rows - before, STEPS) : 0;
        row = of.in(area) + (run.against ? of.rows - 1 - before : before) * run.channels + run.channel;
        apart = run.against ? -run.channels : run.channels;
    }
    // Of GROUP rows from the k-th on: zeros past its end.
    __device__ void load(int k, State (&x)[GROUP]) const {
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = k + i < own ? Element::widen(row[(k + i) * apart]) : State(0);
    }
};

// A warp's chunks in shared memory, and the copies into them.
struct Ring {
    const Run& run;
    char* const areas;
    u64* const barriers;
    unsigned phases = 0;  // bit i: the phase of barrier i

    static __device__ u64* barriers_of(int warp) {
        __shared__ u64 all[WARPS][CHUNKS + EARLIER];
        return all[warp];
    }
    __device__ explicit Ring(const Run& run)
        : run(run), areas(dynamic_rows() + run.warp * (CHUNKS + EARLIER) * AREA), barriers(barriers_of(run.warp)) {
        if (run.lane == 0)
#pragma unroll
            for (int i = 0; i < CHUNKS + EARLIER; i++) init_bulk_barrier(barriers + i);
        __syncwarp();
    }
    __device__ char* area(int stage) const { return areas + stage * AREA; }
    __device__ void request(int stage, const Stretch& from) const {
        if (run.lane == 0 && from.rows > 0)
            request_bulk_copy(area(stage) + from.begin() % BANKS, reinterpret_cast<const void*>(from.begin()),
                              int(from.end() - from.begin()), barriers + stage);
    }
    __device__ void await(int stage) {
        if (run.lane == 0) await_bulk_copy(barriers + stage, phases >> stage & 1);
        phases ^= 1u << stage;
        __syncwarp();
    }
    // What lanes have written from `from` on, as many elements as `to` has. Pieces of which it is a part are stored by elements.
    __device__ void store(const Storage* from, const Stretch& to) const {
        before_bulk_stores();
        __syncwarp();
        const u64 first = u64(to.first), last = u64(to.first + to.elements);
        const u64 begin = (first + PIECE - 1) / PIECE * PIECE, end = last / PIECE * PIECE;
        const int head = begin < end ? int(begin - first) / int(sizeof(Storage)) : to.elements;
        const int tail = begin < end ? int(last - end) / int(sizeof(Storage)) : 0;
        if (run.lane == 0 && begin < end) store_bulk(reinterpret_cast<void*>(begin), from + head, int(end - begin));
        Storage* const memory = const_cast<Storage*>(to.first);
#pragma unroll 1
        for (int i = run.lane; i < head + tail; i += 32) {
            const int at = i < head ? i : to.elements - tail + (i - head);
            memory[at] = from[at];
        }
    }
    // Until at most PENDING stores still read shared memory.
    template <int PENDING>
    __device__ void await_stores() const {
        if (run.lane == 0) wait_for_bulk_stores_read<PENDING>();
        __syncwarp();
    }
};
