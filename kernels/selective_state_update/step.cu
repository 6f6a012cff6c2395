// One step of each sequence, in place of its state, for generation:
//
//     state = exp(size * A) * state + size * B * x
//     y     = sum over n of C[n] * state[n] + D * x, times silu(z) if there is a z
//
// with size = dt + bias, or its softplus. A row is a channel of a head; a batch's row of the state is in the slot of its own
// number, or in the one that `indices` names. Where that is no slot, the output is zero and no state changes.
//
// Traffic of a state: its bytes twice. All else is small, and comes from the caches.
//
// 2^lane_bits lanes share a row, and each has up to CHUNKS chunks of it at once: 16 bytes, or, unless ALIGNED, one state.
//
//     row   lane 0 | lane 1 | … | lane 0 | lane 1 | …      a round: CHUNKS chunks of each lane
//             chunk 0               chunk 1
//
// A thread stays with its row for `steps` batches, one after the other, and reads A once if one round is all there is. A batch
// loads its inputs, then in each round loads chunks, updates and stores them, and at its end sums over lanes and stores y. A
// round starts all its loads before it uses any of them, and takes few registers, since many bytes have to be under way.
#include "tensors.cuh"

// What one batch has for a row: where its states are, and its inputs as they lie in memory.
struct Inputs {
    Storage* states;
    bool active;  // it has a slot
    unsigned x, dt, z;
    Offset B, C;
};
// A round's chunks of a lane.
struct Chunks {
    Chunk<Element, VECTOR> state[CHUNKS];
    Chunk<Input, VECTOR> B[CHUNKS], C[CHUNKS];
};

struct StateUpdate {
    const Arguments& args;

    const int lanes = 1 << args.lane_bits, lane = threadIdx.x & (lanes - 1);
    const unsigned rows = unsigned(args.heads * args.channels), rows_of_cta = THREADS >> args.lane_bits;
    const unsigned ctas = (rows + rows_of_cta - 1) / rows_of_cta;
    const unsigned slice = blockIdx.x / ctas;
    const unsigned own = (blockIdx.x % ctas) * rows_of_cta + (threadIdx.x >> args.lane_bits);
    // Lanes of rows that do not exist take part in sums.
    const bool exists = own < rows;
    const unsigned row = exists ? own : 0;
    const int head = row / unsigned(args.channels), channel = row % unsigned(args.channels);
    const int group = row / unsigned(args.group_rows);

    const unsigned skip = element(args.D.data, head * args.D.head + channel * args.D.channel, format(D_), args.D.data);
    const unsigned shift =
        element(args.bias.data, head * args.bias.head + channel * args.bias.channel, format(BIAS), args.bias.data);
    Storage* const states_of_row = args.state.data + head * args.state_head + channel * args.state_channel;
    const Offset x_row = row_offset(args.x), dt_row = row_offset(args.dt), z_row = row_offset(args.z);
    const Offset out_row = head * Offset(args.out_head) + channel * Offset(args.out_channel);
    const Offset A_row = head * Offset(args.A_head) + channel * Offset(args.A_channel);
    const Offset B_row = group * Offset(args.B.group), C_row = group * Offset(args.C.group);

    // The lane's states: VECTOR from `first` on, then `stride` further, CHUNKS times in a round.
    const int count = int(args.states), first = lane * VECTOR, stride = lanes * VECTOR, round = stride * CHUNKS;
    const bool several = round < count;
    const int begin = int(slice * args.steps);
    const int end = int(begin + args.steps < args.batches ? begin + args.steps : args.batches);
    float decay[TIED ? 1 : CHUNKS][TIED ? 1 : VECTOR];

    __device__ explicit StateUpdate(const Arguments& args) : args(args) {}

    __device__ void run() {
#pragma unroll 1
        for (int batch = begin; batch < end; batch++) {
            const Inputs in = load_inputs(batch);
            float sum = 0;
#pragma unroll 1
            for (int n = first; n - first < count; n += round) {
                Chunks chunks;
                load(chunks, in, n);
                if constexpr (ALIGNED) prefetch_next(in, batch, n);
                if ((!TIED && several) || batch == begin) load_decay(n);
                update(chunks, in, n, sum);
            }
            store_output(in, batch, sum);
        }
    }

    __device__ int format(Tensor tensor) const { return int(args.formats >> (2 * tensor)) & 3; }
    __device__ Offset row_offset(const RowTensor& tensor) const {
        return head * Offset(tensor.head) + channel * Offset(tensor.channel);
    }
    // Where the number of a state lies; in chunks they are neighbours.
    __device__ static auto offset(int n, i64 distance) { return ALIGNED ? n : n * Offset(distance); }

    __device__ Inputs load_inputs(int batch) const {
        Inputs in;
        i64 slot = batch;
        if (args.indices.data) slot = load_index(args.indices.data, batch * args.indices.batch, args.flags & WIDE_INDICES);
        in.active = exists && slot >= 0 && slot < args.state.slots;
        in.states = states_of_row + (in.active ? slot : 0) * args.state.slot;
        in.x = element(args.x.data, batch * Offset(args.x.batch) + x_row, format(X), in.active);
        in.dt = element(args.dt.data, batch * Offset(args.dt.batch) + dt_row, format(DT), in.active);
        in.z = element(args.z.data, batch * Offset(args.z.batch) + z_row, format(Z),
                       args.z.data && in.active && lane == 0);
        in.B = batch * Offset(args.B.batch) + B_row, in.C = batch * Offset(args.C.batch) + C_row;
        return in;
    }

    __device__ void load(Chunks& chunks, const Inputs& in, int n) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            const int at = n + k * stride;
            const bool wanted = in.active && at < count;
            chunks.state[k] = read_states(in.states + offset(at, args.state_state), wanted);
            chunks.B[k] = read_chunk<Input>(args.B.data, in.B + offset(at, args.B.state), format(B_), wanted);
            chunks.C[k] = read_chunk<Input>(args.C.data, in.C + offset(at, args.C.state), format(C_), wanted);
        }
    }
    // The next batch's states, unless an index would have to be waited for.
    __device__ void prefetch_next(const Inputs& in, int batch, int n) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
            prefetch_state(in.states + args.state.slot + n + k * stride,
                           exists && !args.indices.data && batch + 1 < end && n + k * stride < count);
    }
    __device__ void load_decay(int n) {
        if constexpr (TIED) {
            decay[0][0] = LOG2_E * widened(element(args.A, A_row, format(A_), true), format(A_));
        } else {
            Chunk<float32, VECTOR> chunk[CHUNKS];
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int at = n + k * stride;
                chunk[k] = read_chunk<float32>(args.A, A_row + offset(at, args.A_state), format(A_), at < count);
            }
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) decay[k][i] = LOG2_E * number(chunk[k], i, format(A_));
        }
    }

    __device__ void update(const Chunks& chunks, const Inputs& in, int n, float& sum) const {
        const float raised = widened(in.dt, format(DT)) + widened(shift, format(BIAS));
        const float size = chosen(args.flags & SOFTPLUS, softplus(raised), raised);
        const float scaled = size * widened(in.x, format(X));
        const float tied_gate = TIED ? fast_exp2(size * decay[0][0]) : 0.f;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            float now[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const float gate = TIED ? tied_gate : fast_exp2(size * decay[TIED ? 0 : k][TIED ? 0 : i]);
                now[i] = gate * chunks.state[k].get(i) + scaled * number(chunks.B[k], i, format(B_));
                sum += number(chunks.C[k], i, format(C_)) * now[i];
            }
            const int at = n + k * stride;
            if (in.active && at < count) write_states(in.states + offset(at, args.state_state), now, nullptr, 0, 0);
        }
    }

    __device__ void store_output(const Inputs& in, int batch, float sum) const {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < lanes) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const float y = sum + widened(skip, format(D_)) * widened(in.x, format(X));
        const float gate = widened(in.z, format(Z));
        const float gated = chosen(args.z.data != nullptr, y * (gate * sigmoid(gate)), y);
        write(args.out, batch * Offset(args.out_batch) + out_row, format(X), chosen(in.active, gated, 0.f),
              lane == 0 && exists);
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
                 batches, heads, channels, states, group_rows, -1, lane_bits, formats, flags, steps})
        .run();
}
