// One step of each sequence, in place of its state, for generation:
//
//     state = exp(size * A) * state + size * B * x
//     y     = sum over n of C[n] * state[n] + D * x, times silu(z) if there is a z
//
// with size = dt + bias, or its softplus. A row is a channel of a head; a batch's row of the state is in the slot of its own
// number, or in the one that `indices` names. Where that is no slot, the output is zero and no state changes.
//
// Traffic of a state: its bytes twice. All else is small.
//
// A unit's rows, which rows.cuh says more of:
//
//     row 0 to ROWS - 1   lane 0 | lane 1 | …      a round; rows of more states than lanes have take several
//
// A warp stays with its rows for `steps` batches, one after the other, and reads A once if one round is all there is. A register
// that a round has used is loaded for the next round at once.
#include "rows.cuh"

static_assert(ALIGNED, "other problems are for the kernel of several tokens");

struct alignas(16) Shared {
    Once once[32];  // [row of the warp]
    float sums[32];
};
// A round's chunks of a lane.
struct Chunks {
    Chunk<Element, VECTOR> state[ROWS];
    Chunk<Input, VECTOR> B, C;
};
// One round: the states from n on of a batch.
struct Round {
    int batch, n;
    bool active;  // the batch has a slot
    Storage* states;
};

struct StateUpdate : Rows {
    Shared& shared;
    Once* const once = shared.once + unit_of_warp * ROWS;
    float* const sums_of_unit = shared.sums + unit_of_warp * ROWS;

    Storage* const states_of_unit = args.state.data + state_of_unit + first;
    const bool several = 32 * VECTOR < MOST_STATES && stride < count;  // rounds
    const int begin = int(blockIdx.z * args.steps);
    const int end = begin + int(args.steps) < int(args.batches) ? begin + int(args.steps) : int(args.batches);
    Chunk<float32, VECTOR> decay[TIED ? 1 : ROWS] = {};
    Chunks chunks = {};

    __device__ StateUpdate(const Arguments& args, Shared& shared) : Rows(args), shared(shared) {}

    __device__ void run() {
        Round round = first_round(begin, slot_of(begin));
        i64 next_slot = slot_of(begin + 1);
        load(round);
        Inputs in;
        load_inputs(in, begin, round.active);
        load_decays(first);
        float sums[ROWS] = {};
        Output output;
#pragma unroll 1
        while (round.batch < end) {
            const bool is_last = !several || round.n - first + stride >= count;
            Round next{round.batch, round.n + stride, round.active, round.states + stride};
            if (is_last) {
                next = first_round(round.batch + 1, next_slot);
                next_slot = slot_of(round.batch + 2);
            }
            if (round.n == first) {
                const Once own_once = once_of(in, output);
                if (lane_of_warp < rows_of_warp) shared.once[its_place] = own_once;
                __syncwarp();
            }
            if (is_last) load_inputs(in, next.batch, next.active);
            update(round, next, sums);
            if (several) load_decays(next.n);
            if (is_last) {
                share_sums(sums, shared_address(sums_of_unit));
                __syncwarp();
                store_output(round.batch, shared.sums[its_place], output, round.active, lane_of_warp < rows_of_warp);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r] = 0;
            }
            round = next;
        }
    }

    __device__ i64 slot_of(int batch) const {
        if (batch >= end) return -1;
        if (!args.indices.data) return batch;
        return load_index(args.indices.data, batch * args.indices.batch, args.flags & WIDE_INDICES);
    }
    __device__ Round first_round(int batch, i64 slot) const {
        const bool active = u64(slot) < u64(args.state.slots);
        return {batch, first, active, states_of_unit + (active ? unsigned(slot) : 0u) * args.state.slot};
    }
    // How many rows of a round there are.
    __device__ int rows_of(const Round& round) const { return round.active && round.n < count ? unit_rows : 0; }

    __device__ void load(const Round& round) {
        load_projections(chunks.B, chunks.C, round.batch, round.n, round.active);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            load_states(chunks.state[r], round.states + r * state_row, r < rows_of(round));
    }
    __device__ void load_decays(int n) {
        if constexpr (!TIED)
#pragma unroll
            for (int r = 0; r < ROWS; r++) load_decay(decay[r], r, n);
    }

    // Computes a round, and loads the next one.
    __device__ void update(const Round& round, const Round& next, float (&sums)[ROWS]) {
        const int rows = rows_of(round), next_rows = rows_of(next);
        float B[VECTOR], C[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) B[i] = number(chunks.B, i, format(B_)), C[i] = number(chunks.C, i, format(C_));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float factor = once[r].gate, scaled = once[r].scaled;
            float now[VECTOR], sum = 0;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const float gate = TIED ? factor : fast_exp2(factor * number(decay[TIED ? 0 : r], i, format(A_)));
                now[i] = gate * chunks.state[r].get(i) + scaled * B[i];
                sum += C[i] * now[i];
            }
            store_states(round.states + r * state_row, now, r < rows);
            sums[r] += round.n < count ? sum : 0.f;
            load_states(chunks.state[r], next.states + r * state_row, r < next_rows);
        }
        load_projections(chunks.B, chunks.C, next.batch, next.n, next.active);
    }
};

// The pointers after `indices` are null but for `out`: they are of the kernel of several tokens.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_state_update(Storage* state, const void* x, const void* dt, const void* A, const void* B, const void* C,
                       const void* D, const void* z, const void* bias, const void* indices, Storage*, const void*,
                       const i64*, const void*, const void*, void* out, i64 batches, i64 heads, i64 channels, i64 states,
                       i64 group_rows, i64 slots, i64 lane_bits, i64 steps, i64 formats, i64 flags, i64 state_slot,
                       i64 state_head, i64 state_channel, i64 state_state, i64 x_batch, i64 x_head, i64 x_channel,
                       i64 dt_batch, i64 dt_head, i64 dt_channel, i64 z_batch, i64 z_head, i64 z_channel, i64 out_batch,
                       i64 out_head, i64 out_channel, i64 A_head, i64 A_channel, i64 A_state, i64 B_batch, i64 B_group,
                       i64 B_state, i64 C_batch, i64 C_group, i64 C_state, i64 D_head, i64 D_channel, i64 bias_head,
                       i64 bias_channel, i64 indices_batch) {
    __shared__ Shared shared[WARPS];
    StateUpdate({{state, slots, state_slot}, state_head, state_channel, state_state, {},
                 {x, x_batch, x_head, x_channel},
                 {dt, dt_batch, dt_head, dt_channel},
                 {z, z_batch, z_head, z_channel},
                 A, A_head, A_channel, A_state,
                 {B, B_batch, B_group, B_state},
                 {C, C_batch, C_group, C_state},
                 {D, D_head, D_channel},
                 {bias, bias_head, bias_channel},
                 {indices, indices_batch}, {}, nullptr, out, out_batch, out_head, out_channel,
                 batches, heads, channels, states, group_rows, -1, lane_bits, formats, flags, steps},
                shared[threadIdx.x / 32])
        .run();
}
