// One step of each sequence, in place of its state, of the rows that dense.cuh names. step.cu says what a step is.
//
// A warp stays with its rows for every gridDim.z-th batch. A register that a row has used is loaded for the next batch at once. Loads
// of states are not even predicated, as a register that may keep what it held is copied, and the copy waits for the load: behind the last
// batch, and in place of states of no slot, a warp loads again what it has just read.
#include "dense.cuh"

struct DenseStep : DenseRows {
    Chunk<Element, VECTOR> states[ROWS];
    TokenInputs in;

    __device__ explicit DenseStep(const Arguments& args) : DenseRows(args) {}

    __device__ void run() {
        if (first_row >= args.channels) return;
        const int batches = int(args.batches), stride = int(gridDim.z);
        int batch = int(blockIdx.z), of_lanes = slot_of(batch + lane * stride);
        int slot = __shfl_sync(0xffffffffu, of_lanes, 0), next_slot = __shfl_sync(0xffffffffu, of_lanes, 1);
        Storage* at = states_of(args.state, slot < 0 ? 0 : slot);
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_state(states[r].word, at + r * ROW_DISTANCE, true);
        load_inputs(batch);
        load_constants();
#pragma unroll 1
        for (int turn = 2; batch < batches; turn++) {
            const int next = batch + stride;
            Storage* const next_at = next_slot < 0 ? at : states_of(args.state, next_slot);
            const Token token = token_of(in);
            float B[VECTOR], C[VECTOR], sums[ROWS];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) B[i] = in.B.get(i), C[i] = in.C.get(i);
            if (next < batches) load_inputs(next);  // a branch, so that these loads start here: else the compiler puts them off
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float now[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) now[i] = states[r].get(i);
                sums[r] = step(now, r, token, B, C);
                store_states(at + r * ROW_DISTANCE, now, slot >= 0);
                load_state(states[r].word, next_at + r * ROW_DISTANCE, true);
            }
            store_outputs(outputs_of(batch), sums, token, slot >= 0);
            if (turn % 32 == 0) of_lanes = slot_of(next + (1 + lane) * stride);
            batch = next, slot = next_slot, at = next_at;
            next_slot = __shfl_sync(0xffffffffu, of_lanes, turn % 32);
        }
    }

    // Lanes look up the slots of 32 batches, so that no batch waits for its own. -1: none.
    __device__ int slot_of(int batch) const {
        if (batch >= args.batches) return -1;
        if (!args.indices.data) return batch;
        const i64 slot = load_index(args.indices.data, batch * args.indices.batch, args.flags & WIDE_INDICES);
        return u64(slot) < u64(args.state.slots) ? int(slot) : -1;
    }
    __device__ void load_inputs(int batch) {
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            load_row(in.dt[j], args.dt.data, args.dt.batch, batch, j);
            load_row(in.x[j], args.x.data, args.x.batch, batch, j);
            load_row(in.z[j], args.z.data ? args.z.data : args.x.data, args.z.batch, batch, j);
        }
        load_projection(in.B, args.B, batch);
        load_projection(in.C, args.C, batch);
    }
    __device__ void load_row(unsigned& bits, const void* data, i64 distance, int batch, int j) const {
        const auto from = static_cast<const Input::Storage*>(data) + (batch * int(distance) + first_row + first_own);
        load_bits(bits, from + j * UNITS, false, true);
    }
    __device__ void load_projection(Chunk<Input, VECTOR>& chunk, const ProjectionTensor& tensor, int batch) const {
        const auto from = static_cast<const Input::Storage*>(tensor.data) + (batch * int(tensor.batch) + part * VECTOR);
        load_words(chunk.word, from, true);
    }
};

// The pointers after `indices` are null but for `out`: they are of the kernel of several tokens.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_state_update_dense_step(Storage* state, const void* x, const void* dt, const void* A, const void* B, const void* C,
                                  const void* D, const void* z, const void* bias, const void* indices, Storage*,
                                  const void*, const i64*, const void*, const void*, void* out, i64 batches, i64 channels,
                                  i64 slots, i64 formats, i64 flags, i64 state_slot, i64 x_batch, i64 dt_batch, i64 z_batch,
                                  i64 out_batch, i64 B_batch, i64 C_batch, i64 D_channel, i64 bias_channel, i64 indices_batch) {
    Arguments args{};
    args.state = {state, slots, state_slot};
    args.x = {x, x_batch}, args.dt = {dt, dt_batch}, args.z = {z, z_batch};
    args.A = A, args.B = {B, B_batch}, args.C = {C, C_batch};
    args.D = {D, 0, D_channel}, args.bias = {bias, 0, bias_channel};
    args.indices = {indices, indices_batch}, args.out = out, args.out_batch = out_batch;
    args.batches = batches, args.channels = channels, args.formats = formats, args.flags = flags;
    DenseStep(args).run();
}
