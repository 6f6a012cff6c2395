// What servers add to the steps of the rows that dense.cuh names: several tokens of a sequence, other slots to write to, and rounding.
// tokens.cu says how they go.
//
// A warp stays with its rows for every gridDim.z-th sequence, and takes TOKENS tokens at a time, or one if the states after each token are
// written. Meanwhile the next tokens' x, dt, z, B and C, and the next sequence's states, are copied to shared memory.
#include "dense.cuh"
#include "sequences.cuh"

enum : int {
    TOKENS = 4,
    PIECE = 8,                   // numbers of a copy of 16 bytes
    PIECES = WARP_ROWS / PIECE,  // of a token's x, dt or z
};
struct alignas(16) Shared {
    Storage states[ROWS][32][VECTOR];
    // Of this group of tokens and of the next one.
    Input::Storage dt[2][TOKENS][WARP_ROWS], x[2][TOKENS][WARP_ROWS], z[2][TOKENS][WARP_ROWS];
    Input::Storage projections[2][2][TOKENS][STATES];  // B and C
};
// Where they start, and bytes from one part to the next.
enum : int {
    HALF = sizeof(Input::Storage),
    OF_ROW = sizeof(Shared::states) / ROWS,
    OF_TOKEN = WARP_ROWS * HALF,
    OF_GROUP = TOKENS * OF_TOKEN,
    DT_AT = sizeof(Shared::states),
    X_AT = DT_AT + 2 * OF_GROUP,
    Z_AT = X_AT + 2 * OF_GROUP,
    PROJECTION_OF_TOKEN = STATES * HALF,
    PROJECTION_OF_GROUP = TOKENS * PROJECTION_OF_TOKEN,
    B_AT = Z_AT + 2 * OF_GROUP,
    PROJECTIONS_OF_GROUP = 2 * PROJECTION_OF_GROUP,
};
static_assert(TOKENS * PIECES <= 32 && 4 * TOKENS <= 32);

struct DenseTokens : DenseRows {
    const SharedAddress shared;

    const bool every = args.flags & EVERY_TOKEN;
    const int at_once = every ? 1 : int(TOKENS);  // tokens of a group
    float states[ROWS][VECTOR];

    __device__ DenseTokens(const Arguments& args, Shared& shared) : DenseRows(args), shared(shared_address(&shared)) {}

    __device__ void run() {
        const int batches = int(args.batches), step = int(gridDim.z);
        if (first_row >= args.channels) return;
#pragma unroll 1
        for (int first = int(blockIdx.z); first < batches; first += BATCHES * step) {
            const int rest = (batches - first + step - 1) / step;
            run_batches(first, rest < BATCHES ? rest : int(BATCHES));
        }
    }
    // `count` sequences, as many apart as there are slices of the batches.
    __device__ void run_batches(int first, int count) {
        const int step = int(gridDim.z), batches = int(args.batches);
        const Sequence of_lane = load_sequence(args, first + lane * step, lane < count ? batches : 0);
        Sequence sequence = sequence_of(of_lane, 0);
        int number = 0, token = sequence.begin, buffer = 0;
        bool is_first = true;
        copy_states(sequence.slot);
        copy_inputs(0, sequence, token);
        if (first == int(blockIdx.z)) load_constants();
#pragma unroll 1
        while (number < count) {
            const Sequence own = sequence;
            const int from = token, rest = own.end - token, tokens = rest < at_once ? rest : at_once;
            const bool is_last = rest <= at_once;
            const int batch = first + number * step;
            wait_for_copies<0>();
            __syncwarp();
            if (is_first) read_states();
            is_first = is_last;
            token += at_once;
            if (is_last) {
                sequence = sequence_of(of_lane, ++number);
                token = sequence.begin;
                copy_states(sequence.slot);
            }
            copy_inputs(buffer ^ 1, sequence, token);
            SharedAddress inputs = shared + buffer * OF_GROUP + first_own * HALF;
            SharedAddress projections = shared + B_AT + buffer * PROJECTIONS_OF_GROUP + part * VECTOR * HALF;
            Input::Storage* out = outputs_of(from);
#pragma unroll 1
            for (int t = 0; t < tokens; t++) {
                update(inputs, projections, out, own.slot >= 0);
                inputs += OF_TOKEN, projections += PROJECTION_OF_TOKEN, out += args.out_batch;
            }
            const int to = every ? slot_after(args, batch, from - own.begin, own.slot) : is_last ? own.to : -1;
            if (to >= 0) write_states(to);
            buffer ^= 1;
        }
        wait_for_copies<0>();  // zeros for the tokens of no sequence
    }

    // Starts to copy the states of a slot.
    __device__ void copy_states(int slot) const {
        const Storage* const at = states_of(args.state, slot < 0 ? 0 : slot);
#pragma unroll
        for (int r = 0; r < ROWS; r++) copy_or_clear(shared + r * OF_ROW + lane * 16, at + r * ROW_DISTANCE, slot >= 0);
    }
    __device__ void read_states() {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            Chunk<Element, VECTOR> chunk;
            load_shared(chunk.word, shared + r * OF_ROW + lane * 16);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) states[r][i] = chunk.get(i);
        }
    }
    // Starts to copy what the tokens of a group need, and closes the group of copies. Lanes beyond the pieces do the same as others.
    __device__ void copy_inputs(int buffer, const Sequence& sequence, int token) const {
        const int to = buffer * OF_GROUP;
        copy_rows(to + DT_AT, args.dt, sequence.end, token);
        copy_rows(to + X_AT, args.x, sequence.end, token);
        if (args.z.data) copy_rows(to + Z_AT, args.z, sequence.end, token);
        const int piece = lane % (4 * TOKENS), its_token = token + piece / 2 % TOKENS;
        const bool is_C = piece >= 2 * TOKENS;
        const int distance = int(is_C ? args.C.batch : args.B.batch);
        copy_or_clear(shared + B_AT + buffer * PROJECTIONS_OF_GROUP + piece * 16,
                      static_cast<const Input::Storage*>(is_C ? args.C.data : args.B.data) + (its_token * distance + piece % 2 * PIECE),
                      its_token < sequence.end);
        commit_copies();
    }
    __device__ void copy_rows(int to, const RowTensor& tensor, int end, int token) const {
        const int piece = lane % (TOKENS * PIECES), its_token = token + piece / PIECES;
        copy_or_clear(shared + to + piece * 16,
                      static_cast<const Input::Storage*>(tensor.data) +
                          (its_token * int(tensor.batch) + first_row + piece % PIECES * PIECE),
                      its_token < end);
    }

    // Takes a token, of which the lane's inputs are at two places of shared memory, and writes its outputs.
    __device__ void update(SharedAddress inputs, SharedAddress projections, Input::Storage* out, bool active) {
        TokenInputs in;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const SharedAddress its = inputs + j * UNITS * HALF;
            load_shared(in.dt[j], its + DT_AT), load_shared(in.x[j], its + X_AT), load_shared(in.z[j], its + Z_AT);
        }
        load_shared(in.B.word, projections), load_shared(in.C.word, projections + PROJECTION_OF_GROUP);
        const Token token = token_of(in);
        float B[VECTOR], C[VECTOR], sums[ROWS];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) B[i] = in.B.get(i), C[i] = in.C.get(i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[r] = step(states[r], r, token, B, C);
        store_outputs(out, sums, token, active);
    }
    // Two loops, as rounded states take registers of their own.
    __device__ void write_states(int slot) const {
        Storage* const pool = args.dst_state.data ? args.dst_state.data : args.state.data;
        Storage* const at = states_of({pool, 0, args.dst_state.slot}, slot);
        if (sizeof(Storage) == 2 && args.seed) {
            const i64 seed = *args.seed;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float rounded[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) rounded[i] = states[r][i];
                round_at_random(rounded, random_key(seed, slot, first_row + unit + r * UNITS), part * VECTOR);
                store_states(at + r * ROW_DISTANCE, rounded, true);
            }
        } else
#pragma unroll
            for (int r = 0; r < ROWS; r++) store_states(at + r * ROW_DISTANCE, states[r], true);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_state_update_dense_tokens(
    Storage* state, const void* x, const void* dt, const void* A, const void* B, const void* C, const void* D, const void* z,
    const void* bias, const void* indices, Storage* dst_state, const void* dst_indices, const i64* seed,
    const void* cu_seqlens, const void* num_accepted, void* out, i64 batches, i64 channels, i64 slots, i64 formats, i64 flags,
    i64 state_slot, i64 x_batch, i64 dt_batch, i64 z_batch, i64 out_batch, i64 B_batch, i64 C_batch, i64 D_channel,
    i64 bias_channel, i64 indices_batch, i64 dst_slots, i64 pad_slot, i64 tokens, i64 columns, i64 indices_token,
    i64 dst_indices_batch, i64 dst_indices_token, i64 dst_state_slot) {
    __shared__ Shared shared[WARPS];
    Arguments args{};
    args.state = {state, slots, state_slot}, args.dst_state = {dst_state, dst_slots, dst_state_slot};
    args.x = {x, x_batch}, args.dt = {dt, dt_batch}, args.z = {z, z_batch};
    args.A = A, args.B = {B, B_batch}, args.C = {C, C_batch};
    args.D = {D, 0, D_channel}, args.bias = {bias, 0, bias_channel};
    args.indices = {indices, indices_batch, indices_token};
    args.dst_indices = {dst_indices, dst_indices_batch, dst_indices_token};
    args.seed = seed, args.out = out, args.out_batch = out_batch;
    args.batches = batches, args.channels = channels, args.pad_slot = pad_slot, args.formats = formats, args.flags = flags;
    args.cu_seqlens = cu_seqlens, args.num_accepted = num_accepted, args.tokens = tokens, args.columns = columns;
    DenseTokens(args, shared[threadIdx.x / 32]).run();
}
