// Several tokens of each sequence in one launch, for speculative decoding and for what a server's batch leaves of a prompt:
// as many steps as a sequence has tokens, from cu_seqlens[batch] to cu_seqlens[batch + 1], or one without cu_seqlens. step.cu
// says what a step is.
//
// A sequence starts from slot `batch`, or from the one that `indices` names: in column num_accepted - 1, if that is there.
// Its states stay in registers, as float32, from its first token to its last. Then they are written to the same slot, or to
// the one that `dst_indices` names; if EVERY_TOKEN, the states after token t are written to the slot that column t of
// `dst_indices` names, or of `indices` without it.
//
// Traffic of a state: its bytes once to be read, and once for each slot that it is written to. All else is small. What counts is
// instructions: a few tokens of a sequence take several times those of one, for the same bytes.
//
// A lane has the same CHUNKS chunks of each row of its unit (rows.cuh):
//
//     row 0 to ROWS - 1   lane 0 | lane 1 | … | lane 0 | lane 1 | …
//                             chunk 0             chunk 1
//
// A warp stays with its rows for `steps` sequences, one after the other, of which each lane finds out where one begins, ends and
// is written. It takes a group of TOKENS tokens at a time, or of one if the states after each token are written: it computes what a row
// needs once, steps through the tokens, adds up the sums of all rows and tokens at once, and writes the outputs. Meanwhile it loads
// what the next group reads: x, dt and z into registers, the rest to shared memory.
#include "rows.cuh"
#include "sequences.cuh"

enum : int {
    TOKENS = ALIGNED ? 4 : 1,
    SUMS = TOKENS * ROWS,
    PASSES = TOKENS,  // of a warp over its rows and tokens, at most
    CHUNK = Chunk<Input, VECTOR>::WORDS,  // words of B or C
};
// The words that a warp shares, and where they start.
enum : int {
    ROW_FACTORS = 0,                          // [token][row of the warp]: an Once
    ROW_OUTPUTS = ROW_FACTORS + PASSES * 64,  // [token][row of the warp]: an Output
    SUM = ROW_OUTPUTS + PASSES * 64,          // [token][row of the warp]
    PROJECTIONS = SUM + PASSES * 32,          // [token][B or C][lane]: chunks as they lie in memory
    STATES = PROJECTIONS + (ALIGNED ? TOKENS * 2 * 32 * CHUNK : 0),  // [row][lane]: the same
    WORDS = STATES + (ALIGNED ? ROWS * 32 * 4 : 0),
};
struct alignas(16) Shared {
    unsigned words[WORDS];
};
// Tokens of a sequence from one on, and which of the lanes' sequences it is.
struct Group {
    Sequence sequence;
    int number, token;
    bool is_first;
};
// A lane's states of one sequence.
using States = float[ROWS][CHUNKS][VECTOR];

struct TokensUpdate : Rows {
    const SharedAddress shared;

    // The first token for which the lane computes what its one row needs, and how many tokens are between those that it has.
    const int its_token = lane_of_warp / ROWS >> (5 - args.lane_bits), tokens_of_pass = lanes / ROWS;
    const int its_slot = lane_of_warp - its_row + its_place;  // in shared memory
    const bool every = args.flags & EVERY_TOKEN;
    const int at_once = every ? 1 : int(TOKENS);  // tokens of a group

    Chunk<float32, VECTOR> decay[TIED ? 1 : ROWS][TIED ? 1 : CHUNKS] = {};

    __device__ TokensUpdate(const Arguments& args, Shared& shared) : Rows(args), shared(shared_address(&shared)) {}

    __device__ void run() {
        const int begin = int(blockIdx.z * args.steps);
        const int end = begin + int(args.steps) < int(args.batches) ? begin + int(args.steps) : int(args.batches);
        if constexpr (!TIED)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int k = 0; k < CHUNKS; k++) load_decay(decay[r][k], r, first + k * stride);
#pragma unroll 1
        for (int first_batch = begin; first_batch < end; first_batch += BATCHES)
            run_batches(first_batch, first_batch + BATCHES < end ? first_batch + BATCHES : end);
    }
    __device__ void run_batches(int begin, int end) {
        const Sequence of_lane = load_sequence(args, begin + lane_of_warp, end);
        Group group = first_group(of_lane, 0);
        Inputs in[PASSES];
        load_inputs_of(in, group);
        copy_states(group);
        copy_projections(group);
        States states;
#pragma unroll 1
        while (begin + group.number < end) {
            const Sequence& sequence = group.sequence;
            const int token = group.token, rest = sequence.end - token, tokens = rest < at_once ? rest : at_once;
            const Group next = rest > at_once ? Group{sequence, group.number, token + at_once, false}
                                              : first_group(of_lane, group.number + 1);
            share_once(in, tokens);
            load_inputs_of(in, next);
            if constexpr (ALIGNED) wait_for_copies<0>();
            if (group.is_first) load_states(states, sequence.slot);
            __syncwarp();
            if (next.number != group.number) copy_states(next);
            float sums[SUMS] = {};
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (t < tokens) update(states, group, t, sums);
            copy_projections(next);
            const int dst_slot = every ? slot_after(args, begin + group.number, token - sequence.begin, sequence.slot)
                                 : rest <= at_once ? sequence.to : -1;
            if (dst_slot >= 0) write_all(states, dst_slot);
            share_sums(sums, shared + (SUM + unit_of_warp * ROWS) * FLOAT, rows_of_warp * FLOAT);
            __syncwarp();
            store_outputs(group, tokens);
            group = next;
        }
    }

    __device__ static Group first_group(const Sequence& of_lane, int number) {
        const Sequence sequence = sequence_of(of_lane, number);
        return {sequence, number, sequence.begin, true};
    }
    __device__ int rows_of(int slot, int n) const { return slot >= 0 && n < count ? unit_rows : 0; }
    // Where chunk k of row r lies, from the lane's first chunk on.
    __device__ i64 place_of(int r, int k) const { return r * state_row + offset(k * stride, args.state_state); }

    __device__ Storage* states_of(const StateTensor& tensor, int slot) const {
        return tensor.data + unsigned(slot) * tensor.slot + state_of_unit + offset(first, args.state_state);
    }

    __device__ SharedAddress place_of_states(int r) const { return shared + (STATES + (r * 32 + lane_of_warp) * 4) * FLOAT; }
    // Starts to copy the states from which a group's sequence starts.
    __device__ void copy_states(const Group& group) const {
        if constexpr (ALIGNED) {
            const int slot = group.sequence.slot;
            const Storage* const at = states_of(args.state, slot);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                copy_to_shared(place_of_states(r), at + place_of(r, 0), r < rows_of(slot, first));
            commit_copies();
        }
    }
    __device__ void load_states(States& states, int slot) const {
        const Storage* const at = states_of(args.state, slot);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                Chunk<Element, VECTOR> chunk = {};
                if constexpr (ALIGNED) load_shared(reinterpret_cast<unsigned(&)[4]>(chunk.word), place_of_states(r));
                else if (r < rows_of(slot, first + k * stride)) chunk.put(0, at[place_of(r, k)]);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) states[r][k][i] = chunk.get(i);
            }
    }
    // x, dt and z of a group's tokens.
    __device__ void load_inputs_of(Inputs (&in)[PASSES], const Group& group) const {
        const int last = group.sequence.end - 1;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int t = group.token + i * tokens_of_pass;
            if (t > last || i > 0 && t >= group.token + at_once) break;
            load_inputs(in[i], t + its_token < last ? t + its_token : last, group.sequence.slot >= 0);
        }
    }
    // What rows need of some tokens once, to shared memory.
    __device__ void share_once(const Inputs (&in)[PASSES], int tokens) const {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (i * tokens_of_pass >= tokens) break;
            Output output;
            const Once its_once = once_of(in[i], output);
            store_shared(shared + (ROW_FACTORS + (32 * i + its_slot) * 2) * FLOAT, {its_once.gate, its_once.scaled});
            store_shared(shared + (ROW_OUTPUTS + (32 * i + lane_of_warp) * 2) * FLOAT, {output.skipped, output.silu});
        }
    }
    __device__ SharedAddress place_of_chunk(int chunk) const { return shared + (PROJECTIONS + chunk * CHUNK) * FLOAT; }
    // Starts to copy B and C of a group's tokens: each lane's own chunks to itself.
    __device__ void copy_projections(const Group& group) const {
        if constexpr (ALIGNED) {
            const Sequence& sequence = group.sequence;
            const auto B = static_cast<const Input::Storage*>(args.B.data), C = static_cast<const Input::Storage*>(args.C.data);
            const int rest = sequence.end - group.token, tokens = sequence.slot < 0 ? 0 : rest < at_once ? rest : at_once;
            const Offset of_B = group.token * Offset(args.B.batch) + B_unit + first;
            const Offset of_C = group.token * Offset(args.C.batch) + C_unit + first;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const bool wanted = t < tokens && first < count;
                copy_often_read<CHUNK * FLOAT>(place_of_chunk(2 * t * 32 + lane_of_warp), B + of_B + t * Offset(args.B.batch), wanted);
                copy_often_read<CHUNK * FLOAT>(place_of_chunk((2 * t + 1) * 32 + lane_of_warp), C + of_C + t * Offset(args.C.batch), wanted);
            }
            commit_copies();
        }
    }
    // B or C of a token, as floats.
    __device__ void load_projection(float (&x)[CHUNKS][VECTOR], const Group& group, int t, bool is_C) const {
        const ProjectionTensor& tensor = is_C ? args.C : args.B;
        const Tensor which = is_C ? C_ : B_;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            Chunk<Input, VECTOR> chunk = {};
            if constexpr (ALIGNED)
                load_shared(reinterpret_cast<unsigned(&)[ALIGNED ? int(CHUNK) : 2]>(chunk.word),
                            place_of_chunk((2 * t + is_C) * 32 + lane_of_warp));
            else
                load_chunk(chunk, tensor.data,
                           group.token * Offset(tensor.batch) + (is_C ? C_unit : B_unit) + offset(first + k * stride, tensor.state),
                           format(which), group.sequence.slot >= 0 && first + k * stride < count);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) x[k][i] = number(chunk, i, format(which));
        }
    }
    __device__ void store_outputs(const Group& group, int tokens) const {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (i * tokens_of_pass >= tokens) break;
            const int t = its_token + i * tokens_of_pass;
            float sum[1], rest[2];
            load_shared(sum, shared + (SUM + 32 * i + its_slot) * FLOAT);
            load_shared(rest, shared + (ROW_OUTPUTS + (32 * i + lane_of_warp) * 2) * FLOAT);
            store_output(group.token + t, sum[0], {rest[0], rest[1]}, group.sequence.slot >= 0, t < tokens);
        }
    }
    __device__ void update(States& states, const Group& group, int t, float (&sums)[SUMS]) const {
        float B[CHUNKS][VECTOR], C[CHUNKS][VECTOR], of_rows[ROWS][2];
        load_projection(B, group, t, false), load_projection(C, group, t, true);
        load_once(of_rows, shared + (ROW_FACTORS + (t * rows_of_warp + unit_of_warp * ROWS) * 2) * FLOAT);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float factor = of_rows[r][0], scaled = of_rows[r][1];
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
            sums[t * ROWS + r] = !ALIGNED || first < count ? sum : 0.f;
        }
    }
    __device__ void write_all(const States& states, int dst_slot) const {
        Storage* const pool = args.dst_state.data ? args.dst_state.data : args.state.data;
        Storage* const at = states_of({pool, 0, args.dst_state.slot}, dst_slot);
        const bool at_random = sizeof(Storage) == 2 && args.seed;
        const i64 seed = at_random ? *args.seed : 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const unsigned row = first_of_section + first_of_warp + own + r * distance;
            const unsigned key = at_random ? random_key(seed, dst_slot, row) : 0;
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                const int n = first + k * stride;
                float now[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) now[i] = states[r][k][i];
                if (at_random) round_at_random(now, key, n);
                store_states(at + place_of(r, k), now, n < count && r < unit_rows);
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
