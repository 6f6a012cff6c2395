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
// A lane has the same CHUNKS chunks of each row of its unit (rows.cuh):
//
//     row 0 to ROWS - 1   lane 0 | lane 1 | … | lane 0 | lane 1 | …
//                             chunk 0             chunk 1
//
// A warp stays with its rows for `steps` sequences, one after the other. It takes TOKENS tokens at a time, or one if the states after
// each token are written: it loads all that they read, computes what a row needs once for each of its rows and tokens, steps
// through the tokens, adds up the sums of all rows and tokens at once, and writes the outputs. Meanwhile the next sequence's states
// come to the L2 cache.
#include "rows.cuh"

enum : int {
    TOKENS = ALIGNED ? 4 : 1,
    SUMS = TOKENS * ROWS,
    PASSES = TOKENS,  // of a warp over its rows and tokens, at most
};

struct Shared {
    Once once[TOKENS][32];  // [token][row of the warp]
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

struct TokensUpdate : Rows {
    Shared& shared;

    // The first token for which the lane computes what its one row needs, and how many tokens are between those that it has.
    const int its_token = lane_of_warp / unsigned(rows_of_warp), tokens_of_pass = 32 / unsigned(rows_of_warp);

    float states[ROWS][CHUNKS][VECTOR];  // after a load, the words that hold them, as they lie in memory
    Chunk<float32, VECTOR> decay[TIED ? 1 : ROWS][TIED ? 1 : CHUNKS] = {};

    __device__ TokensUpdate(const Arguments& args, Shared& shared) : Rows(args), shared(shared) {}

    __device__ void run() {
        const int at_once = args.flags & EVERY_TOKEN ? 1 : int(TOKENS);
        const int begin = int(blockIdx.z * args.steps);
        const int end = begin + int(args.steps) < int(args.batches) ? begin + int(args.steps) : int(args.batches);
        if constexpr (!TIED)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int k = 0; k < CHUNKS; k++) load_decay(decay[r][k], r, first + k * stride);
        Sequence next = load_sequence(begin);
#pragma unroll 1
        for (int batch = begin; batch < end; batch++) {
            const Sequence sequence = next;
            if (batch + 1 < end) next = load_sequence(batch + 1);
#pragma unroll 1
            for (int token = sequence.begin; token < sequence.end; token += at_once) {
                const int tokens = sequence.end - token < at_once ? sequence.end - token : at_once;
                const bool is_first = token == sequence.begin;
                if (is_first) load_states(sequence);
                const int dst_slot = destination(sequence, batch, token + tokens - 1);
                const Projections chunks = load_tokens(sequence, token, tokens);
                Output outputs[PASSES];
                share_once(sequence, token, tokens, outputs);
                if (is_first && batch + 1 < end) prefetch_states(next);
                if (is_first) widen_states();
                __syncwarp();
                float sums[SUMS] = {};
#pragma unroll
                for (int t = 0; t < TOKENS; t++)
                    if (t < tokens) update(chunks, t, sums);
                if (dst_slot >= 0) write_all(dst_slot);
                share_sums(sums, shared.sums + unit_of_warp * SUMS);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < PASSES; i++) {
                    const int t = its_token + i * tokens_of_pass;
                    if (i * tokens_of_pass >= tokens) break;
                    const float sum = shared.sums[its_row / ROWS * SUMS + (t < TOKENS ? t : 0) * ROWS + its_row % ROWS];
                    store_output(token + t, sum, outputs[i], sequence.slot >= 0, t < tokens);
                }
            }
        }
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

    __device__ const Storage* states_of(const Sequence& sequence) const {
        return args.state.data + state_of_unit + (sequence.slot < 0 ? 0 : sequence.slot) * args.state.slot;
    }
    __device__ int rows_of(const Sequence& sequence, int n) const { return sequence.slot >= 0 && n < count ? unit_rows : 0; }

    __device__ void prefetch_states(const Sequence& sequence) const {
        if constexpr (ALIGNED)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                prefetch_state(states_of(sequence) + r * args.state_channel + first, r < rows_of(sequence, first));
    }
    __device__ void load_states(const Sequence& sequence) {
        const Storage* const from = states_of(sequence);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = first + k * stride;
                Chunk<Element, VECTOR> chunk = {};
                ::load_states(chunk, from + r * args.state_channel + offset(n, args.state_state), r < rows_of(sequence, n));
#pragma unroll
                for (int w = 0; w < chunk.WORDS; w++) states[r][k][w] = __uint_as_float(chunk.word[w]);
            }
    }
    __device__ void widen_states() {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                Chunk<Element, VECTOR> chunk;
#pragma unroll
                for (int w = 0; w < chunk.WORDS; w++) chunk.word[w] = __float_as_uint(states[r][k][w]);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) states[r][k][i] = chunk.get(i);
            }
    }
    __device__ Projections load_tokens(const Sequence& sequence, int token, int tokens) const {
        Projections chunks = {};
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
                load_projections(chunks.B[t][k], chunks.C[t][k], token + t, first + k * stride, sequence.slot >= 0 && t < tokens);
        return chunks;
    }
    __device__ void share_once(const Sequence& sequence, int token, int tokens, Output (&outputs)[PASSES]) const {
        Inputs in[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int t = its_token + i * tokens_of_pass;
            if (i * tokens_of_pass >= tokens) break;
            load_inputs(in[i], token + t, sequence.slot >= 0 && t < tokens);
        }
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int t = its_token + i * tokens_of_pass;
            if (i * tokens_of_pass >= tokens) break;
            const Once once = once_of(in[i], outputs[i]);
            if (t < TOKENS) shared.once[t][its_row] = once;
        }
    }
    __device__ void update(const Projections& chunks, int t, float (&sums)[SUMS]) {
        const Once* const once = shared.once[t] + unit_of_warp * ROWS;
        float B[CHUNKS][VECTOR], C[CHUNKS][VECTOR];
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                B[k][i] = number(chunks.B[t][k], i, format(B_)), C[k][i] = number(chunks.C[t][k], i, format(C_));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float factor = once[r].gate, scaled = once[r].scaled;
            float sum = 0;
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    float& state = states[r][k][i];
                    const float gate =
                        TIED ? factor : fast_exp2(factor * number(decay[TIED ? 0 : r][TIED ? 0 : k], i, format(A_)));
                    state = gate * state + scaled * B[k][i];
                    sum += C[k][i] * state;
                }
            sums[t * ROWS + r] = sum;
        }
    }
    __device__ void write_all(int dst_slot) const {
        Storage* const pool = args.dst_state.data ? args.dst_state.data : args.state.data;
        Storage* const to = pool + dst_slot * args.dst_state.slot + state_of_unit;
        const bool at_random = sizeof(Storage) == 2 && args.seed;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const unsigned row = first_of_section + first_of_warp + own + r;
            const unsigned key = at_random ? random_key(*args.seed, dst_slot, row) : 0;
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = first + k * stride;
                float now[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) now[i] = states[r][k][i];
                if (at_random) round_at_random(now, key, n);
                store_states(to + r * args.state_channel + offset(n, args.state_state), now, n < count && r < unit_rows);
            }
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
