// Rows of a pool, gathered into states or scattered from them: states[row] = pool[slot], or the other way round, where `indices` has
// the slot of each row.
//
// Where an index stands for no slot, states are zeros, or nothing is written. Bytes are copied as they are, in units of 16, 4 or 2,
// which divide all of them and all distances. States lie without gaps. A slot consists of runs of `run` units, `stride` units
// from one to the next, and `run_stride` units from one run to the next.
//
// Traffic: each byte once to be read and once to be written. A CTA copies UNROLL × THREADS units of one row, and a thread UNROLL of
// them, whose loads are all under way before the first one is used.
#include "../common/types.cuh"

enum : int { THREADS = 32 * WARPS, UNROLL = 4 };
enum : i64 { SCATTER = 1, WIDE_INDICES = 2 };  // bits of the argument `flags`

struct Arguments {
    i64 units, run, stride, run_stride;
};

template <class Unit>
__device__ void copy_part(const Arguments& args, void* slot, void* state, bool there, bool scatter) {
    Unit *const in_slot = static_cast<Unit*>(slot), *const in_state = static_cast<Unit*>(state);
    const unsigned first = blockIdx.y * (UNROLL * THREADS) + threadIdx.x, run = unsigned(args.run);
    Unit units[UNROLL] = {};
    i64 places[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        const unsigned i = first + k * THREADS;
        places[k] = args.run == args.units && args.stride == 1 ? i : i / run * args.run_stride + i % run * args.stride;
        if (i < args.units && there) units[k] = scatter ? in_state[i] : in_slot[places[k]];
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        const unsigned i = first + k * THREADS;
        if (i >= args.units) continue;
        if (!scatter) in_state[i] = units[k];
        else if (there) in_slot[places[k]] = units[k];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
state_rows(char* pool, char* states, const void* indices, i64 units, i64 unit, i64 run, i64 stride, i64 run_stride,
           i64 slots, i64 slot_stride, i64 pad_slot, i64 flags) {
    const i64 row = blockIdx.x;
    const i64 index = flags & WIDE_INDICES ? static_cast<const i64*>(indices)[row] : i64(static_cast<const int*>(indices)[row]);
    const bool there = index >= 0 && index < slots && index != pad_slot, scatter = flags & SCATTER;
    void* const slot = pool + (there ? index : 0) * slot_stride * unit;
    void* const state = states + row * units * unit;
    const Arguments args{units, run, stride, run_stride};
    if (unit == 16) copy_part<uint4>(args, slot, state, there, scatter);
    else if (unit == 4) copy_part<unsigned>(args, slot, state, there, scatter);
    else copy_part<unsigned short>(args, slot, state, there, scatter);
}
