// What step.cu and tokens.cu share: which rows a thread has, what a row needs once a token, and sums over the lanes of a row.
//
// A row is a channel of a head. A section are rows of one head and one group: all channels of a head, or as many as a group has. Of
// blockIdx, x counts CTAs of a section, y sections, and z slices of the batches.
//
// 2^lane_bits lanes share a unit of ROWS rows, so that what a lane reads of B and C serves all of them. A lane has VECTOR states of each
// row at once: 16 bytes, or, unless ALIGNED, one state. A unit's rows are neighbours, or, if SPREAD, neighbouring units have
// neighbouring rows, so that what a warp reads at once lies in whole lines. What a row needs once, one lane computes for one of the
// warp's rows, and passes on through shared memory.
#pragma once
#include "tensors.cuh"

enum : bool { SPREAD = sizeof(Storage) == 4 };

// What the lanes of a row need of one token.
struct Once {
    float gate;    // of the states, if TIED; else what A is multiplied by
    float scaled;  // the step size times x
};
// What a lane keeps of it for the output: (sum + skipped) * silu.
struct Output {
    float skipped, silu;
};
// A token's x, dt and z of a row, as they lie in memory.
struct Inputs {
    unsigned x, dt, z;
};

struct Rows {
    const Arguments& args;

    const int lanes = 1 << args.lane_bits, lane_of_warp = threadIdx.x % 32, lane = lane_of_warp & (lanes - 1);
    const int rows_of_warp = (32 >> args.lane_bits) * ROWS, unit_of_warp = lane_of_warp >> args.lane_bits;
    const int section_rows = int(args.channels < args.group_rows ? args.channels : args.group_rows);
    const unsigned first_of_section = blockIdx.y * unsigned(section_rows);
    const int head = first_of_section / unsigned(args.channels), group = first_of_section / unsigned(args.group_rows);
    const int first_of_warp = (blockIdx.x * WARPS + threadIdx.x / 32) * rows_of_warp;
    const int first_channel = first_of_section - head * unsigned(args.channels) + first_of_warp;

    // The lane's unit: rows from one of its rows to the next, how many there are, the first one's channel, and the lane's states, VECTOR from `first` on.
    const int unit_bits = SPREAD ? 5 - int(args.lane_bits) : 0, distance = 1 << unit_bits, own = unit_of_warp * (SPREAD ? 1 : ROWS);
    const int rest = section_rows - first_of_warp - own + distance - 1 >> unit_bits;
    const int unit_rows = rest < 0 ? 0 : rest < ROWS ? rest : int(ROWS);
    const int channel = first_channel + (unit_rows ? own : 0);
    const int count = int(args.states), first = lane * VECTOR, stride = lanes * VECTOR;
    const i64 state_of_unit = head * args.state_head + channel * args.state_channel, state_row = distance * args.state_channel;
    const Offset B_unit = group * Offset(args.B.group), C_unit = group * Offset(args.C.group);

    // The one row for which the lane computes what is needed once. Lanes beyond rows_of_warp have other tokens of the same rows.
    // Where there is no such row, it reads those of another one.
    const int its_row = lane_of_warp & (rows_of_warp - 1);
    const int its_place = SPREAD ? (its_row & (distance - 1)) * ROWS + (its_row >> unit_bits) : its_row;  // unit by unit
    const bool its_exists = first_of_warp + its_row < section_rows;
    const int its_channel = first_channel + (its_exists ? its_row : section_rows - 1 - first_of_warp);
    const Offset x_row = offset_of(args.x), dt_row = offset_of(args.dt), z_row = offset_of(args.z);
    const Offset out_row = head * Offset(args.out_head) + its_channel * Offset(args.out_channel);
    const float skip = number_of(args.D, D_), shift = number_of(args.bias, BIAS);
    const float tied_decay = TIED ? LOG2_E * number_of({args.A, args.A_head, args.A_channel}, A_) : 0.f;

    __device__ explicit Rows(const Arguments& args) : args(args) {}

    __device__ int format(Tensor tensor) const { return format_of(args, tensor); }
    __device__ Offset offset_of(const RowTensor& tensor) const {
        return head * Offset(tensor.head) + its_channel * Offset(tensor.channel);
    }
    __device__ float number_of(const SharedTensor& tensor, Tensor which) const {
        const Offset at = head * Offset(tensor.head) + its_channel * Offset(tensor.channel);
        return widened(element(tensor.data, at, format(which), tensor.data), format(which));
    }
    // Where the number of a state lies; in chunks they are neighbours.
    __device__ static auto offset(int n, i64 distance) { return ALIGNED ? n : n * Offset(distance); }

    // Of the states from n on, for the unit's row r.
    __device__ void load_decay(Chunk<float32, VECTOR>& decay, int r, int n) const {
        const Offset from = head * Offset(args.A_head) + (channel + r * distance) * Offset(args.A_channel) + offset(n, args.A_state);
        load_chunk(decay, args.A, from, format(A_), n < count && r < unit_rows);
    }
    // `token` is the row of x, dt and z.
    __device__ void load_inputs(Inputs& in, int token, bool wanted) const {
        load_element(in.x, args.x.data, token * Offset(args.x.batch) + x_row, format(X), wanted);
        load_element(in.dt, args.dt.data, token * Offset(args.dt.batch) + dt_row, format(DT), wanted);
        load_element(in.z, args.z.data, token * Offset(args.z.batch) + z_row, format(Z), wanted && args.z.data);
    }
    __device__ void load_projections(Chunk<Input, VECTOR>& B, Chunk<Input, VECTOR>& C, int token, int n, bool wanted) const {
        const Offset of_B = token * Offset(args.B.batch) + B_unit, of_C = token * Offset(args.C.batch) + C_unit;
        wanted = wanted && n < count && unit_rows > 0;
        load_chunk(B, args.B.data, of_B + offset(n, args.B.state), format(B_), wanted);
        load_chunk(C, args.C.data, of_C + offset(n, args.C.state), format(C_), wanted);
    }
    __device__ Once once_of(const Inputs& in, Output& output) const {
        const float raised = widened(in.dt, format(DT)) + shift, x = widened(in.x, format(X)), z = widened(in.z, format(Z));
        const float size = chosen(args.flags & SOFTPLUS, softplus(raised), raised);
        output = {skip * x, args.z.data ? z * sigmoid(z) : 1.f};
        return {TIED ? fast_exp2(size * tied_decay) : LOG2_E * size, size * x};
    }
    // What the rows of the unit need of a token once, from shared memory.
    __device__ static void load_once(float (&of_rows)[ROWS][2], SharedAddress from) {
        enum : int { AT_ONCE = ROWS < 2 ? 2 : 4 };
#pragma unroll
        for (int i = 0; i < 2 * ROWS; i += AT_ONCE)
            load_shared(reinterpret_cast<float(&)[AT_ONCE]>(of_rows[i / 2]), from + i * FLOAT);
    }
    // `sum` is that of the lane's one row.
    __device__ void store_output(int token, float sum, const Output& output, bool active, bool wanted) const {
        const float y = (sum + output.skipped) * output.silu;
        write(args.out, token * Offset(args.out_batch) + out_row, format(X), chosen(active, y, 0.f), wanted && its_exists);
    }

    // Each sum over the lanes of a unit, to `to`: ROWS neighbours of each token, and those of the next token `pitch` bytes on.
    template <int SUMS>
    __device__ void share_sums(float (&sums)[SUMS], SharedAddress to, int pitch = 0) const {
        exchange_halves<1, SUMS>(sums, to, pitch);
    }
    // While a lane has several sums, it gives half of them away for the other half of the neighbour's at DISTANCE. LEFT are the sums
    // that it still has, and `to` is where they go.
    template <int DISTANCE, int LEFT, int SUMS>
    __device__ void exchange_halves(float (&sums)[SUMS], SharedAddress to, int pitch) const {
        if constexpr (LEFT > 1) {
            if (DISTANCE < ROWS || DISTANCE < lanes) {
                enum : int { HALF = LEFT / 2 };
                const bool upper = lane & DISTANCE;
#pragma unroll
                for (int i = 0; i < HALF; i++) {
                    const float away = upper ? sums[i] : sums[i + HALF];
                    sums[i] = (upper ? sums[i + HALF] : sums[i]) + __shfl_xor_sync(0xffffffffu, away, DISTANCE);
                }
                const int half = HALF < ROWS ? HALF * int(FLOAT) : HALF / ROWS * pitch;
                return exchange_halves<2 * DISTANCE, HALF>(sums, to + (upper ? half : 0), pitch);
            }
        } else {
#pragma unroll
            for (int distance = DISTANCE; distance < 32; distance *= 2)
                if (distance < lanes) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
        }
        enum : int { AT_ONCE = LEFT < ROWS ? LEFT : int(ROWS) };
#pragma unroll
        for (int i = 0; i < LEFT; i += AT_ONCE)
            if (lane < DISTANCE) store_shared(to + i / AT_ONCE * pitch, reinterpret_cast<float(&)[AT_ONCE]>(sums[i]));
    }
};
