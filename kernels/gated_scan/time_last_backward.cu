// gated_scan, backward, time contiguous. With g[t] the gradient that reaches h[t-1],
//
//     token_grad[t] = states_grad[t] + g[t+1]
//     gate_grad[t]  = token_grad[t] * h[t-1]
//     g[t]          = gate[t] * token_grad[t]
//
// This is a scan in the opposite direction over the affine maps g -> gate[t] * (states_grad[t] + g). At a reset gate_grad
// and g are 0. The kind turns gate_grad and token_grad into the gradients of its inputs and channel parameters.
//
// A tile takes two passes. The first one computes the kind's Values from the inputs, and composes the maps. The second one
// computes the gradients. If a warp has a whole row, Values stay in registers between the passes. If a row is cut into
// segments (CUT), the second pass computes them again.
//
// parameters_grad is (parts, PARAMETERS, channels). A part is the sum over a whole row, or over one tile where rows are
// cut; so there is a part for each batch, or for each tile of each batch.
//
// Traffic: each input, the states and their gradient are read once, and the gradient of each input is written once. With
// two inputs that is 24 bytes per element in float32 and 12 in bfloat16 and float16; with three, 32 and 16.
//
// The tile pictures are in ../linear_scan/time_stream.cuh (STAGES > 0, through a ring in shared memory) and
// ../linear_scan/time_last.cuh (STAGES 0, held in registers).
#include "../common/compiler.cuh"
#if STAGES
#include "time_last_stream.cuh"

struct Backward {
    Sources sources;
    Rows states, grads;
    Storage* gradient[4];  // of each input; null where it is not wanted
    Strides of_gradients;
    float* parameters_grad;
    const State *initial_state, *final_grad;
    State* initial_grad;
    Strides of_state;
};

enum : int { KEPT = CUT ? 1 : ITEMS };
enum : int { STATES = INPUTS, GRADS = INPUTS + 1 };  // columns of the ring after those of the inputs
enum : int { NEXT_STATE, OF_RESETS };                // extra pieces of the ring

struct BackwardPrefix : RowTilePrefix {
    Channel channel;
    float sum[Kind::PARAMETER_SLOTS];  // gradients of `prepared` values, over this lane's elements of the part so far
    Values values[KEPT];
};

template <bool TURNED, bool RESETS>
struct BackwardTiles {
    using Tiles = Ring<INPUTS + 2, 32 * PIECES, OF_RESETS + RESET_PIECES>;  // one more piece of the states, past the tile
    using TilePrefix = BackwardPrefix;
    enum : int { SCANS = 1, HELD = 1 };
    const Backward& of;
    const Scans& scans;

    __device__ void fetch(const Tile& tile, int stage) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        const auto zero = [](unsigned) { return Storage(0); };
        copy_inputs<TURNED>(ring, of.sources, at, scans);
        copy_in<TURNED>(ring, GRADS, of.grads, at, scans, zero);
        copy_in<TURNED>(ring, STATES, of.states, at, scans, zero);
        if (RESETS) copy_resets<TURNED>(ring, OF_RESETS, of.sources, at, scans);
        if (at.lane > 0) return;
        const i64 next = at.first + TIMES;
        copy_async(ring.extra(NEXT_STATE), of.states.at<TURNED>(scans, at, at.first_row, next), next < scans.time);
    }
    // The state of row `row` of batches × channels; null if there is no such row, or no tensor.
    template <class S>
    __device__ S* of_row(S* states, const Position& at, unsigned row) const {
        return states && row < scans.rows ? states + of.of_state.offset(at, row) : nullptr;
    }
    __device__ const State* before(unsigned row, int) const {
        return of_row(of.final_grad, Position({0, row}, scans), row);
    }
    __device__ State* after(unsigned row, int) const { return of_row(of.initial_grad, Position({0, row}, scans), row); }
    __device__ void compose_tile(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        if (PARAMETERS && (CUT || tile.level == 0)) {
            tile_prefix.channel.load(of.sources.parameters, of.sources.channels, at.channel);
#pragma unroll
            for (int k = 0; k < PARAMETERS; k++) tile_prefix.sum[k] = 0;
        }
        const auto resets = read_resets<TURNED, RESETS>(ring, OF_RESETS, at.lane);
        Affine map;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int own = at.lane * PIECES + p;
            const bool inside = at.first + own * VECTOR < scans.time;
            InputPieces<TURNED> inputs;
            inputs.read(ring, own);
            const Piece<TURNED> grad{read_piece(ring.place(GRADS, own))};
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const int item = p * VECTOR + i;
                const Given given = inputs.given(i, tile_prefix.channel, resets.at(item), of.sources.option);
                const Values values = Kind::values(given);
                const Step step = backward_step(given, values, grad.get(i));
                map = compose_step<RESETS>(map, padded(step, inside));
                if (!CUT) tile_prefix.values[item % KEPT] = values;
            }
        }
        tile_prefix.scan(map, at);
    }
    __device__ void finish(const Tile& tile, int stage, TilePrefix& tile_prefix) const {
        const Position at(tile, scans);
        const Tiles ring(stage);
        State g = tile_prefix.enter(tile, at, scans.grid.levels, of_row(of.final_grad, at, at.row()),
                                    of_row(of.initial_grad, at, at.row()));
        // The state before the scan's last step is the initial state, which is not among the states. The lane that has that
        // step reads it here.
        const i64 to_last = scans.time - 1 - at.first - at.lane * ITEMS;
        const int last = to_last >= 0 && to_last < ITEMS ? int(to_last) : -1;
        const State* const initial_state = last < 0 ? nullptr : of_row(of.initial_state, at, at.row());
        const State initial = initial_state ? *initial_state : State(0);
        const auto resets = read_resets<TURNED, RESETS>(ring, OF_RESETS, at.lane);
        float sum[Kind::PARAMETER_SLOTS] = {};
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int own = at.lane * PIECES + p;
            const bool inside = at.first + own * VECTOR < scans.time;
            InputPieces<TURNED> inputs;
            inputs.read(ring, own);
            const Piece<TURNED> grad{read_piece(ring.place(GRADS, own))};
            const Piece<TURNED> states{read_piece(ring.place(STATES, own))};
            const bool past = p + 1 == PIECES && at.ends_row();
            const Piece<TURNED> next{read_piece(past ? ring.extra(NEXT_STATE) : ring.place(STATES, own + 1))};
            float gradients[INPUTS][VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const int item = p * VECTOR + i;
                const Given given = inputs.given(i, tile_prefix.channel, resets.at(item), of.sources.option);
                State earlier = i + 1 < VECTOR ? states.get(i + 1) : next.get(0);
                if (i + 1 == VECTOR) earlier = chosen(item == last, initial, earlier);
                const Values values = CUT ? Kind::values(given) : tile_prefix.values[item % KEPT];
                const BackwardResult to = backward(given, values, grad.get(i), earlier, g);
                g = to.earlier;
#pragma unroll
                for (int j = 0; j < INPUTS; j++) gradients[j][i] = to.gradients.input[j];
#pragma unroll
                for (int k = 0; k < PARAMETERS; k++) sum[k] += inside ? to.gradients.parameter[k] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < INPUTS; j++) {
                Piece<TURNED> piece;
                piece.set(gradients[j]);
                *ring.place(j, own) = words_of(piece.chunk);
            }
        }
        meet_copiers();
#pragma unroll
        for (int j = 0; j < INPUTS; j++)
            if (of.gradient[j])
                copy_out<TURNED>(ring, j, {of.gradient[j], of.of_gradients.by_batch, of.of_gradients.by_channel}, at, scans);
        if (PARAMETERS && of.parameters_grad) add_up(tile, at, tile_prefix, sum);
    }
    // Add the sums of a tile. After the last tile of a part, add up all lanes and write the part.
    __device__ void add_up(const Tile& tile, const Position& at, TilePrefix& tile_prefix, const float* sum) const {
        const unsigned levels = scans.grid.levels;
#pragma unroll
        for (int k = 0; k < PARAMETERS; k++) tile_prefix.sum[k] += sum[k];
        if (CUT ? tile.level >= levels : tile.level + 1 < levels) return;
        const i64 part = CUT ? i64(at.batch) * levels + tile.level : at.batch;
#pragma unroll
        for (int k = 0; k < PARAMETERS; k++) {
            const float all = warp_sum(tile_prefix.sum[k]);
            if (at.lane == 0)
                of.parameters_grad[(part * PARAMETERS + k) * scans.channels + at.channel] =
                    of_parameter(k, all, of.sources.parameters, of.sources.channels, at.channel);
        }
    }
};
template <bool TURNED>
using PlainTiles = BackwardTiles<TURNED, false>;
template <bool TURNED>
using ResetTiles = BackwardTiles<TURNED, true>;

#else
#include "time_last_chunks.cuh"

struct Inputs {
    Chunks chunks[STEPS];
    Steps<Element, false> grads[STEPS], states[STEPS];
    State edge[STEPS];  // the state one step further along the scan than the chunk's last

    // `initial` is the state before the recurrence's first step, which is the last step of this scan.
    __device__ void load_tile(const Sources& sources, const Row<Element, false>& grads_row,
                              const Row<Element, false>& states_row, State initial, const Position& at, i64 tile) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            chunks[k].load(sources, order);
            grads[k] = grads_row.load(order, 0);
            states[k] = states_row.load(order, 0);
            edge[k] = order + VECTOR < sources.time ? states_row.get(order + VECTOR) : initial;
        }
    }
    // The state before step i of a chunk.
    __device__ State earlier(int k, int i, i64 order, i64 time) const {
        return i + 1 == VECTOR || order + i + 1 == time ? edge[k] : states[k].get(i + 1);
    }
};

struct Outputs {
    Storage* gradient[4];
    i64 row, stride;

    __device__ void store(int input, i64 order, const float (&x)[VECTOR], const Walk& walk) const {
        if (!gradient[input]) return;
        Steps<Element, false> steps;
        steps.set(x);
        Row<Element, false>(gradient[input] + row, stride, walk).store(order, steps);
    }
};

// Adds this row's lanes' sums, and writes the gradients of the channel's parameters. `to` is the place of the first one.
__device__ inline void add_up(const float (&sum)[Kind::PARAMETER_SLOTS], float* to, const float* parameters, i64 channels,
                              const Position& at) {
    if constexpr (PARAMETERS > 0) {
        __shared__ float of_warps[Kind::PARAMETER_SLOTS][WARPS * ROWS];
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int k = 0; k < PARAMETERS; k++) {
            const float all = warp_sum(sum[k]);
            if (at.lane == 0) of_warps[k][warp] = all;
        }
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
        if (at.warp > 0 || at.lane > 0) return;
#pragma unroll
        for (int k = 0; k < PARAMETERS; k++) {
            float all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) all += of_warps[k][warp + w];
            to[k * channels] = of_parameter(k, all, parameters, channels, at.channel);
        }
    }
}

__device__ __forceinline__ void scan_row(const Sources& sources, const Row<Element, false>& grads_row,
                                         const Row<Element, false>& states_row, const Outputs& outputs,
                                         const Boundary& before, const Boundary& before_grad,
                                         const Boundary& after_grad, const Position& at, const Walk& walk,
                                         float (&sum)[Kind::PARAMETER_SLOTS]) {
    const State initial = walk.varlen() ? State(0) : before.read(0);
    RunningPrefix carry = walk.varlen() ? State(0) : after_grad.read(0);
    const i64 time = walk.time;
    Inputs next;
    next.load_tile(sources, grads_row, states_row, initial, at, 0);
    int parity = 0;
    for (i64 tile = 0; tile < time; tile += TILE, parity ^= 1) {
        const Inputs here = next;
        if (tile + TILE < time) next.load_tile(sources, grads_row, states_row, initial, at, tile + TILE);

        Affine total, before_chunk[STEPS];
        Marks marks[STEPS];
        Values values[STEPS][VECTOR];
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            marks[k] = walk.marks(order, VECTOR, own_places(k));
            Affine chunk;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const Given given = here.chunks[k].given(i, sources);
                values[k][i] = Kind::values(given);
                float grad = here.grads[k].get(i);
                // A packed sequence starts from the gradient of its own final state, whatever gradient the scan has
                // reached.
                if (marks[k].starts_at(i)) grad += after_grad.read(marks[k].places[i].of_first);
                Step step = backward_step(given, values[k][i], grad);
                if (marks[k].starts_at(i)) step.scale = 0;
                if (order + i >= time) step = {1.0f, 0.0f};
                chunk = compose(chunk, step);
            }
            before_chunk[k] = compose(total, exclusive_scan(chunk, at.lane));
            total = compose(total, from_lane(chunk, 31));
        }

        const State entering = enter_warp(total, at.warp, at.lane, parity, carry);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const i64 order = at.order(tile, k);
            const Marks& mark = marks[k];
            float gradients[INPUTS][VECTOR];
            State g = before_chunk[k](entering);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                State earlier = here.earlier(k, i, order, time);
                if (mark.starts_at(i)) g = after_grad.read(mark.places[i].of_first);
                if (mark.ends_at(i)) earlier = before.read(mark.places[i].of_last);
                const Given given = here.chunks[k].given(i, sources);
                const BackwardResult to = backward(given, values[k][i], here.grads[k].get(i), earlier, g);
                g = to.earlier;
#pragma unroll
                for (int j = 0; j < INPUTS; j++) gradients[j][i] = to.gradients.input[j];
#pragma unroll
                for (int p = 0; p < PARAMETERS; p++) sum[p] += order + i < time ? to.gradients.parameter[p] : 0.0f;
                if (mark.ends_at(i)) before_grad.write(mark.places[i].of_last, g);
            }
#pragma unroll
            for (int j = 0; j < INPUTS; j++) outputs.store(j, order, gradients[j], walk);
        }
    }
    if (!walk.varlen() && at.warp == 0 && at.lane == 0) before_grad.write(0, carry.x);
}
#endif

// Inputs beyond the kind's are null, and so may all be but inputs, states and states_grad. flags: 1 if h[t] follows from
// h[t+1], and 2 for the kind's option.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gated_scan_time_last_backward(
    const Storage* __restrict__ input0, const Storage* __restrict__ input1, const Storage* __restrict__ input2,
    const Storage* __restrict__ input3, const float* __restrict__ parameters,
    const unsigned char* __restrict__ reset, const Storage* __restrict__ states,
    const Storage* __restrict__ states_grad, const State* __restrict__ initial_state,
    const State* __restrict__ final_state_grad, Storage* __restrict__ input0_grad, Storage* __restrict__ input1_grad,
    Storage* __restrict__ input2_grad, Storage* __restrict__ input3_grad, float* __restrict__ parameters_grad,
    State* __restrict__ initial_state_grad, const i64* __restrict__ offsets, void* workspace,
    i64 batch, i64 channels, i64 time, i64 sequences,
    i64 inputs_batch, i64 inputs_channel, i64 inputs_time,
    i64 states_batch, i64 states_channel, i64 states_time,
    i64 states_grad_batch, i64 states_grad_channel, i64 states_grad_time,
    i64 grads_batch, i64 grads_channel, i64 grads_time,
    i64 state_batch, i64 state_channel, i64 state_time, i64 reset_batch, i64 parts, i64 flags) {
#if STAGES
    const Scans scans(batch, channels, time, {inputs_batch, inputs_channel});
    const Backward of{{{input0, input1, input2, input3},
                       {inputs_batch, inputs_channel},
                       parameters,
                       reset,
                       reset_batch,
                       channels,
                       (flags & WITH_OPTION) != 0},
                      {states, states_batch, states_channel},
                      {states_grad, states_grad_batch, states_grad_channel},
                      {input0_grad, input1_grad, input2_grad, input3_grad},
                      {grads_batch, grads_channel},
                      parameters_grad,
                      initial_state,
                      final_state_grad,
                      initial_state_grad,
                      {state_batch, state_channel}};
    if (CUT || reset) run<ResetTiles>(of, scans, !(flags & AGAINST_TIME), workspace);
    else run<PlainTiles>(of, scans, !(flags & AGAINST_TIME), workspace);
#else
    const Position at(batch, channels);
    if (at.row >= batch * channels) return;
    const Walk walk(time, !(flags & AGAINST_TIME), offsets, sequences);
    const Sources sources({input0, input1, input2, input3}, at.offset(0, inputs_batch, inputs_channel), inputs_time,
                          parameters, reset ? reset + at.batch * reset_batch : nullptr, at.channel, channels,
                          flags & WITH_OPTION, walk);
    const Outputs outputs{{input0_grad, input1_grad, input2_grad, input3_grad},
                          at.offset(0, grads_batch, grads_channel),
                          grads_time};
    const i64 state = at.offset(0, state_batch, state_channel);
    const Boundary before{initial_state ? const_cast<State*>(initial_state) + state : nullptr, state_time};
    const Boundary before_grad{initial_state_grad ? initial_state_grad + state : nullptr, state_time};
    const Boundary after_grad{final_state_grad ? const_cast<State*>(final_state_grad) + state : nullptr, state_time};
    float sum[Kind::PARAMETER_SLOTS] = {};
    scan_row(sources, {states_grad + at.offset(0, states_grad_batch, states_grad_channel), states_grad_time, walk},
             {states + at.offset(0, states_batch, states_channel), states_time, walk}, outputs, before, before_grad,
             after_grad, at, walk, sum);
    if (parameters_grad)
        add_up(sum, parameters_grad + at.batch * PARAMETERS * channels + at.channel, parameters, channels, at);
#endif
}
