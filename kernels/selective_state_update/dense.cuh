// Rows of 16 states that have numbers of A of their own, as Mamba's have, where all rows of a slot, of A and of a token lie one
// after the other without gaps: how they are spread over a warp, and one token of them.
//
// LANES lanes, of which each has 16 bytes of a row's states, share a unit of ROWS rows. Row 0 of all units lies before row 1 of them, so
// that what a warp reads at once lies in whole lines. What a row needs once a token, one lane of its unit computes, for OWN rows; the
// others get it by shuffles. With so little to look up, a row of bfloat16 states takes two thirds of step.cu's instructions.
#pragma once
#include "tensors.cuh"

static_assert(ALIGNED && !TIED && sizeof(Input::Storage) == 2, "other problems are for other kernels");

enum : int {
    STATES = 16,
    LANES = STATES / VECTOR,
    UNITS = 32 / LANES,
    OWN = ROWS / LANES,
    WARP_ROWS = UNITS * ROWS,
    ROW_DISTANCE = UNITS * STATES,  // from one row of a unit to the next, in a slot and in A
};
static_assert(ROWS % LANES == 0);

// What a lane needs of a token: of its own rows, and of its states.
struct TokenInputs {
    unsigned dt[OWN], x[OWN], z[OWN];
    Chunk<Input, VECTOR> B, C;
};
// A token of a lane's own rows: what A and B are multiplied by, and the output, (sum + skipped) * silu.
struct Token {
    float gate[OWN], scaled[OWN], skipped[OWN], silu[OWN];
};

struct DenseRows {
    const Arguments& args;

    const int lane = threadIdx.x % 32, unit = lane / LANES, part = lane % LANES;
    const int first_row = int(blockIdx.x * WARPS + threadIdx.x / 32) * WARP_ROWS;
    const int first_own = part * OWN * UNITS + unit;  // of the warp's rows; the others follow UNITS rows apart
    const int first_state = (first_row + unit) * STATES + part * VECTOR;
    float decay[ROWS][VECTOR], skip[OWN], shift[OWN];

    __device__ explicit DenseRows(const Arguments& args) : args(args) {}

    // What batches and tokens share.
    __device__ void load_constants() {
        const float* const A = static_cast<const float*>(args.A) + first_state;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int i = 0; i < VECTOR; i += 4)
                load_words(reinterpret_cast<unsigned(&)[4]>(decay[r][i]), A + r * ROW_DISTANCE + i, true);
        // Branches, behind which the compiler does not put off other loads until these have come.
        unsigned of_bias[OWN] = {}, of_D[OWN] = {};
        if (args.bias.data) load_numbers(of_bias, args.bias, BIAS);
        if (args.D.data) load_numbers(of_D, args.D, D_);
#pragma unroll
        for (int j = 0; j < OWN; j++)
            shift[j] = widened(of_bias[j], format_of(args, BIAS)), skip[j] = widened(of_D[j], format_of(args, D_));
    }
    __device__ void load_numbers(unsigned (&bits)[OWN], const SharedTensor& tensor, Tensor which) const {
#pragma unroll
        for (int j = 0; j < OWN; j++)
            load_element(bits[j], tensor.data, (first_row + first_own + j * UNITS) * tensor.channel, format_of(args, which), true);
    }
    // Where the lane's part of row 0 lies in a slot.
    __device__ Storage* states_of(const StateTensor& tensor, int slot) const {
        return tensor.data + unsigned(slot) * tensor.slot + first_state;
    }
    __device__ Token token_of(const TokenInputs& in) const {
        const bool gated = args.z.data;
        Token token;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const float raised = Input::widen(in.dt[j]) + shift[j], x = Input::widen(in.x[j]), z = Input::widen(in.z[j]);
            const float size = chosen(args.flags & SOFTPLUS, softplus<sizeof(Storage) == 2>(raised), raised);
            token.gate[j] = LOG2_E * size, token.scaled[j] = size * x;
            token.skipped[j] = skip[j] * x, token.silu[j] = chosen(gated, z * sigmoid(z), 1.f);
        }
        return token;
    }
    // Takes a token of row r; the sum is that of the lane's states.
    __device__ float step(float (&states)[VECTOR], int r, const Token& token, const float (&B)[VECTOR], const float (&C)[VECTOR]) const {
        const int owner = lane - part + r / OWN;
        const float gate = __shfl_sync(0xffffffffu, token.gate[r % OWN], owner);
        const float scaled = __shfl_sync(0xffffffffu, token.scaled[r % OWN], owner);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            states[i] = fast_exp2(gate * decay[r][i]) * states[i] + scaled * B[i];
            sum += C[i] * states[i];
        }
        return sum;
    }
    // Where the lane's first row lies in a row of the output.
    __device__ Input::Storage* outputs_of(int row) const {
        return static_cast<Input::Storage*>(args.out) + (row * int(args.out_batch) + first_row + first_own);
    }
    // `sums` are those of the lane's states of all rows of the unit.
    __device__ void store_outputs(Input::Storage* out, float (&sums)[ROWS], const Token& token, bool active) const {
        exchange_halves<LANES / 2, ROWS / 2>(sums);
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const float y = (sums[j] + token.skipped[j]) * token.silu[j];
            out[j * UNITS] = Input::narrow(active ? y : 0.f);
        }
    }
    // Sums of the lane's own rows over its unit: it gives half of its sums away for the other half of the lane at DISTANCE.
    template <int DISTANCE, int HALF>
    __device__ void exchange_halves(float (&sums)[ROWS]) const {
        if constexpr (DISTANCE > 0) {
            const bool upper = part & DISTANCE;
#pragma unroll
            for (int j = 0; j < HALF; j++) {
                const float away = upper ? sums[j] : sums[j + HALF];
                sums[j] = (upper ? sums[j + HALF] : sums[j]) + __shfl_xor_sync(0xffffffffu, away, DISTANCE);
            }
            exchange_halves<DISTANCE / 2, HALF / 2>(sums);
        }
    }
};
