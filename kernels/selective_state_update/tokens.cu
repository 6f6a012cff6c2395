// Several tokens of each sequence in one launch, for speculative decoding and for what a server's batch leaves of a prompt:
// as many steps as a sequence has tokens, from cu_seqlens[batch] to cu_seqlens[batch + 1], or one without cu_seqlens. step.cu
// says what a step is.
//
// A sequence starts from slot `batch`, or from the one that `indices` names: in column num_accepted - 1, if that is there.
// Its states stay in registers, as float32, from its first token to its last. Then they are written to the same slot, or to
// the one that `dst_indices` names; if EVERY_TOKEN, the states after token t are written to the slot that column t of
// `dst_indices` names, or of `indices` without it.
//
// Traffic of a state: its bytes once to be read, and once for each slot that it is written to. All else is small, and comes from
// the caches. What counts is instructions: a few tokens of a sequence take several times those of one, for the same bytes.
//
// A warp has rows_of_warp neighbouring rows, at most 32, for `steps` batches, one after the other. 2^lane_bits lanes share ROWS
// of its rows, and a lane has the same CHUNKS chunks of each, so that what it reads of B and C serves all of them:
//
//     row 0 to ROWS - 1   lane 0 | lane 1 | … | lane 0 | lane 1 | …
//                             chunk 0             chunk 1
//
// TOKENS tokens at a time, or one if the states after each token are written. First a lane computes for one row, which it keeps,
// and for some of the tokens what all lanes of the row need: the step size and the gates, which go to shared memory. Then each
// lane steps through the tokens. Then sums of all its rows and tokens go over the lanes at once, and each lane writes outputs
// of the row and tokens that it had at first.
#include "tensors.cuh"

enum : int { TOKENS = ALIGNED ? 4 : 1, SUMS = TOKENS * ROWS };

// What lanes of a row need of one token.
struct Once {
    float gate;    // of the states, if TIED; else what A is multiplied by
    float scaled;  // the step size times x
    float skip, silu;
};
struct Shared {
    Once once[TOKENS][32];  // [token][row]
    float sums[32 * TOKENS];
};
// Chunks of a lane's B and C for all tokens.
struct Projections {
    Chunk<Input, VECTOR> B[TOKENS][CHUNKS], C[TOKENS][CHUNKS];
};
// One batch: the slot that it starts from, -1 for none, and its tokens.
struct Sequence {
    int slot, begin, end;
};

struct TokensUpdate {
    const Arguments& args;
    Shared& shared;

    const int lanes = 1 << args.lane_bits, lane_of_warp = threadIdx.x % 32, lane = lane_of_warp & (lanes - 1);
    const unsigned rows = unsigned(args.heads * args.channels);
    const int rows_of_warp = (32 >> args.lane_bits) * ROWS;
    const unsigned ctas = (rows + WARPS * rows_of_warp - 1) / (WARPS * rows_of_warp);
    const int slice = blockIdx.x / ctas;
    const int first_row = (blockIdx.x - slice * ctas) * WARPS * rows_of_warp + threadIdx.x / 32 * rows_of_warp;

    // The lane's ROWS rows, which are neighbours in one head. Lanes of rows that do not exist take part in sums.
    const int sharing = lane_of_warp >> args.lane_bits, own = first_row + sharing * ROWS;
    const bool exists = unsigned(own) < rows;
    const unsigned row = exists ? own : 0;
    const int head = row / unsigned(args.channels), channel = row - head * unsigned(args.channels);
    const int group = row / unsigned(args.group_rows);
    const i64 state_row = head * args.state_head + channel * args.state_channel;
    const int count = int(args.states), first = lane * VECTOR, stride = lanes * VECTOR;

    // The one row for which the lane computes what is needed once a token, and its first token.
    const int its_row = lane_of_warp % rows_of_warp, its_token = lane_of_warp / rows_of_warp;
    const int tokens_at_once = 32 / rows_of_warp;
    const bool its_exists = unsigned(first_row + its_row) < rows;
    const unsigned once_row = its_exists ? first_row + its_row : 0;
    const int once_head = once_row / unsigned(args.channels), once_channel = once_row - once_head * unsigned(args.channels);
    const Offset x_row = offset_of(args.x), dt_row = offset_of(args.dt), z_row = offset_of(args.z);
    const Offset out_row = once_head * Offset(args.out_head) + once_channel * Offset(args.out_channel);
    const float skip = number_of({args.D, D_}), shift = number_of({args.bias, BIAS});
    const float tied_decay =
        TIED ? LOG2_E * number_of({{args.A, args.A_head, args.A_channel}, A_}) : 0.f;

    float states[ROWS][CHUNKS][VECTOR];
    float decay[TIED ? 1 : ROWS][TIED ? 1 : CHUNKS][TIED ? 1 : VECTOR];

    __device__ TokensUpdate(const Arguments& args, Shared& shared) : args(args), shared(shared) {}

    __device__ void run() {
        const int at_once = args.flags & EVERY_TOKEN ? 1 : int(TOKENS);
        const i64 end = (slice + 1) * args.steps < args.batches ? (slice + 1) * args.steps : args.batches;
        load_decay();
#pragma unroll 1
        for (int batch = int(slice * args.steps); batch < end; batch++) {
            const Sequence sequence = load_sequence(batch);
#pragma unroll 1
            for (int token = sequence.begin; token < sequence.end; token += at_once) {
                const int tokens = sequence.end - token < at_once ? sequence.end - token : at_once;
                if (token == sequence.begin) load_states(sequence);
                Projections chunks;
                load_projections(chunks, token, tokens);
                const int dst_slot = destination(sequence, batch, token + tokens - 1);
                share_once(sequence, token, tokens);
                __syncwarp();
                float sums[SUMS] = {};
#pragma unroll
                for (int t = 0; t < TOKENS; t++)
                    if (t < tokens) update(chunks, t, sums);
                if (exists && dst_slot >= 0) store_states(dst_slot);
                share_sums(sums);
                __syncwarp();
                store_outputs(sequence, token, tokens);
            }
        }
    }

    struct RowNumber {
        SharedTensor tensor;
        Tensor which;
    };
    __device__ int format(Tensor tensor) const { return int(args.formats >> (2 * tensor)) & 3; }
    __device__ static auto offset(int n, i64 distance) { return ALIGNED ? n : n * Offset(distance); }
    __device__ Offset offset_of(const RowTensor& tensor) const {
        return once_head * Offset(tensor.head) + once_channel * Offset(tensor.channel);
    }
    __device__ float number_of(const RowNumber& of) const {
        const Offset at = once_head * Offset(of.tensor.head) + once_channel * Offset(of.tensor.channel);
        return widened(element(of.tensor.data, at, format(of.which), of.tensor.data), format(of.which));
    }

    __device__ Sequence load_sequence(int batch) const {
        i64 slot = batch, begin = batch, end = batch + 1;
        if (args.indices.data) {
            i64 column = 0;
            if (args.num_accepted) {
                column = load_index(args.num_accepted, batch, args.flags & WIDE_ACCEPTED) - 1;
                column = column < 0 ? 0 : column < args.columns ? column : args.columns - 1;
            }
            slot = load_index(args.indices.data, batch * args.indices.batch + column * args.indices.token,
                              args.flags & WIDE_INDICES);
        }
        if (args.cu_seqlens) {
            begin = load_index(args.cu_seqlens, batch, args.flags & WIDE_CU_SEQLENS);
            end = load_index(args.cu_seqlens, batch + 1, args.flags & WIDE_CU_SEQLENS);
            begin = begin < 0 ? 0 : begin < args.tokens ? begin : args.tokens;
            end = end < args.tokens ? end : args.tokens;
        }
        return {is_slot(slot, args.state.slots, args.pad_slot) ? int(slot) : -1, int(begin), int(end)};
    }
    // The slot of the states after a token; -1: they are not written.
    __device__ int destination(const Sequence& sequence, int batch, int token) const {
        const bool every = args.flags & EVERY_TOKEN;
        const int column = every ? token - sequence.begin : 0;
        if (sequence.slot < 0 || !(every ? column < args.columns : token + 1 == sequence.end)) return -1;
        if (!every && !args.dst_indices.data) return sequence.slot < args.dst_state.slots ? sequence.slot : -1;
        const SlotTensor& indices = args.dst_indices.data ? args.dst_indices : args.indices;
        const i64 to = load_index(indices.data, batch * indices.batch + column * indices.token,
                                  args.flags & (args.dst_indices.data ? WIDE_DST_INDICES : WIDE_INDICES));
        return is_slot(to, args.dst_state.slots, args.pad_slot) ? int(to) : -1;
    }

    __device__ void load_decay() {
        if constexpr (!TIED) {
            const Offset from = head * Offset(args.A_head) + channel * Offset(args.A_channel);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int k = 0; k < CHUNKS; k++) {
                    const int n = first + k * stride;
                    const Offset at = from + r * Offset(args.A_channel) + offset(n, args.A_state);
                    const auto chunk = read_chunk<float32>(args.A, at, format(A_), n < count);
#pragma unroll
                    for (int i = 0; i < VECTOR; i++) decay[r][k][i] = number(chunk, i, format(A_));
                }
        }
    }
    __device__ void load_states(const Sequence& sequence) {
        const bool active = exists && sequence.slot >= 0;
        const Storage* const from = args.state.data + state_row + (active ? sequence.slot : 0) * args.state.slot;
        Chunk<Element, VECTOR> chunks[ROWS][CHUNKS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = first + k * stride;
                chunks[r][k] = read_states(from + r * args.state_channel + offset(n, args.state_state), active && n < count);
            }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) states[r][k][i] = chunks[r][k].get(i);
    }
    __device__ void load_projections(Projections& chunks, int token, int tokens) const {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const Offset B = (token + t) * Offset(args.B.batch) + group * Offset(args.B.group);
            const Offset C = (token + t) * Offset(args.C.batch) + group * Offset(args.C.group);
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = first + k * stride;
                const bool wanted = t < tokens && n < count;
                chunks.B[t][k] = read_chunk<Input>(args.B.data, B + offset(n, args.B.state), format(B_), wanted);
                chunks.C[t][k] = read_chunk<Input>(args.C.data, C + offset(n, args.C.state), format(C_), wanted);
            }
        }
    }

    __device__ void share_once(const Sequence& sequence, int token, int tokens) const {
        const bool active = its_exists && sequence.slot >= 0;
#pragma unroll 1
        for (int t = its_token; t < tokens; t += tokens_at_once) {
            const unsigned x_bits = element(args.x.data, (token + t) * Offset(args.x.batch) + x_row, format(X), active);
            const unsigned dt_bits = element(args.dt.data, (token + t) * Offset(args.dt.batch) + dt_row, format(DT), active);
            const unsigned z_bits =
                element(args.z.data, (token + t) * Offset(args.z.batch) + z_row, format(Z), active && args.z.data);
            const float raised = widened(dt_bits, format(DT)) + shift;
            const float size = chosen(args.flags & SOFTPLUS, softplus(raised), raised);
            const float x = widened(x_bits, format(X)), z = widened(z_bits, format(Z));
            const float gate = TIED ? fast_exp2(size * tied_decay) : LOG2_E * size;
            shared.once[t][its_row] = {gate, size * x, skip * x, chosen(args.z.data != nullptr, z * sigmoid(z), 1.f)};
        }
    }
    __device__ void update(const Projections& chunks, int t, float (&sums)[SUMS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Once& once = shared.once[t][sharing * ROWS + r];
            const float gate = once.gate, scaled = once.scaled;
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    float& state = states[r][k][i];
                    const float kept = TIED ? gate : fast_exp2(gate * decay[TIED ? 0 : r][TIED ? 0 : k][TIED ? 0 : i]);
                    state = kept * state + scaled * number(chunks.B[t][k], i, format(B_));
                    sums[t * ROWS + r] += number(chunks.C[t][k], i, format(C_)) * state;
                }
        }
    }
    __device__ void store_states(int dst_slot) const {
        Storage* const pool = args.dst_state.data ? args.dst_state.data : args.state.data;
        Storage* const to = pool + dst_slot * args.dst_state.slot + state_row;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const unsigned key = sizeof(Storage) == 2 && args.seed ? random_key(*args.seed, dst_slot, row + r) : 0;
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = first + k * stride;
                float now[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) now[i] = states[r][k][i];
                if (n < count)
                    write_states(to + r * args.state_channel + offset(n, args.state_state), now, args.seed, key, n);
            }
        }
    }

    // Each sum over the lanes of a row. While lanes have several, a lane gives half of them away for the other half of its
    // neighbour's.
    __device__ void share_sums(float (&sums)[SUMS]) const {
        int number = 0, left = SUMS;
#pragma unroll
        for (int half = SUMS / 2; half > 0; half /= 2) {
            const int distance = SUMS / 2 / half;
            if (distance < lanes) {
                const bool upper = lane & distance;
#pragma unroll
                for (int i = 0; i < half; i++) {
                    const float away = upper ? sums[i] : sums[i + half];
                    sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(0xffffffffu, away, distance);
                }
                number += upper ? half : 0;
                left = half;
            }
        }
#pragma unroll
        for (int distance = SUMS; distance < 32; distance *= 2)
            if (distance < lanes) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
        float* const to = shared.sums + sharing * SUMS + number;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (i < left && lane < SUMS) to[i] = sums[i];
    }
    __device__ void store_outputs(const Sequence& sequence, int token, int tokens) const {
#pragma unroll 1
        for (int t = its_token; t < tokens; t += tokens_at_once) {
            const float sum = shared.sums[its_row / ROWS * SUMS + t * ROWS + its_row % ROWS];
            const float y = (sum + shared.once[t][its_row].skip) * shared.once[t][its_row].silu;
            write(args.out, (token + t) * Offset(args.out_batch) + out_row, format(X), chosen(sequence.slot >= 0, y, 0.f),
                  its_exists);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_state_update_tokens(
    Storage* state, const void* x, const void* dt, const void* A, const void* B, const void* C, const void* D, const void* z,
    const void* bias, const void* indices, Storage* dst_state, const void* dst_indices, const i64* seed,
    const void* cu_seqlens, const void* num_accepted, void* out, i64 batches, i64 heads, i64 channels, i64 states,
    i64 group_rows, i64 slots, i64 dst_slots, i64 pad_slot, i64 tokens, i64 columns, i64 lane_bits, i64 steps, i64 formats, i64 flags,
    i64 state_slot, i64 state_head, i64 state_channel, i64 state_state, i64 x_batch, i64 x_head, i64 x_channel, i64 dt_batch,
    i64 dt_head, i64 dt_channel, i64 z_batch, i64 z_head, i64 z_channel, i64 out_batch, i64 out_head, i64 out_channel,
    i64 A_head, i64 A_channel, i64 A_state, i64 B_batch, i64 B_group, i64 B_state, i64 C_batch, i64 C_group, i64 C_state,
    i64 D_head, i64 D_channel, i64 bias_head, i64 bias_channel, i64 indices_batch, i64 indices_token, i64 dst_indices_batch,
    i64 dst_indices_token, i64 dst_state_slot) {
    __shared__ Shared shared[WARPS];
    TokensUpdate({{state, slots, state_slot}, state_head, state_channel, state_state,
                  {dst_state, dst_slots, dst_state_slot},
                  {x, x_batch, x_head, x_channel},
                  {dt, dt_batch, dt_head, dt_channel},
                  {z, z_batch, z_head, z_channel},
                  A, A_head, A_channel, A_state,
                  {B, B_batch, B_group, B_state},
                  {C, C_batch, C_group, C_state},
                  {D, D_head, D_channel},
                  {bias, bias_head, bias_channel},
                  {indices, indices_batch, indices_token}, {dst_indices, dst_indices_batch, dst_indices_token}, seed,
                  out, out_batch, out_head, out_channel,
                  batches, heads, channels, states, group_rows, pad_slot, lane_bits, formats, flags, steps,
                  cu_seqlens, num_accepted, tokens, columns},
                 shared[threadIdx.x / 32])
        .run();
}
