// gated_scan, backward, channels contiguous. With h[t] the gradient that reaches the state before step t,
//
//     token_grad[t] = states_grad[t] + h[t+1]
//     gate_grad[t]  = token_grad[t] * states[t-1]
//     h[t]          = gate[t] * token_grad[t]
//
// This is a scan in the opposite direction. The kernel computes the gates from the inputs again. The kind turns gate_grad
// and token_grad into the gradients of its inputs and channel parameters. Step t needs states[t-1], so the rows of the
// states that are copied are one time step away from those of the other tensors.
//
// Traffic: with n inputs, n + 2 tensors are read (inputs, states, states_grad) and n are written. That is 8 (n + 1) bytes
// per element in float32 and 4 (n + 1) in bfloat16 and float16: 12 for minGRU, 16 for RG-LRU.
//
// In shared memory the gradients overwrite the inputs. channel_last.cuh describes the two passes over a tile, and names the
// headers that have the tile pictures.
//
// parameters_grad is (parts, PARAMETERS, channels). Each CTA sums over its own time steps, and writes one part.
#include "../common/compiler.cuh"
#include "channel_last.cuh"

// The affine map of one step of the backward scan, h -> gate * (grad + h). At a reset it is 0.
__device__ inline Step backward_map(const Step& step, const Given& given, float grad) {
    return {step.scale, given.reset ? 0.0f : step.scale * grad};
}

// The gradients of the inputs and parameters at one step. `earlier` is the state before the step. `h` is the gradient
// from the step after, and is replaced by the gradient that reaches the state before. At a reset `earlier` has no effect,
// even if it is NaN.
__device__ inline Kind::Gradients backward(const Step& step, const Given& given, const Values& values, float grad,
                                           float earlier, float& h) {
    const float token_grad = grad + h;
    h = given.reset ? 0.0f : step.scale * token_grad;
    return Kind::gradients(given, values, given.reset ? 0.0f : token_grad * earlier, token_grad);
}

// A channel parameter's gradient at a step, or 0 past the end of the sequence. For kinds with PADS it is 0 by itself.
__device__ inline float existing_gradient(float grad, bool exists) { return Kind::PADS || exists ? grad : 0.0f; }

// A compensated sum: `error` collects what rounding takes from `sum`.
struct CompensatedSum {
    float sum = 0, error = 0;

    __device__ void add(float x) { sum = exact_sum(sum, x, error); }
    __device__ float total() const { return sum + error; }
};

#if COLUMN_SERIAL

struct Backward {
    Inputs inputs;
    const float* parameters;
    const unsigned char* reset;
    const Storage *states, *states_grad;
    Storage* grads[4];
    i64 channels, reset_batch, states_batch, states_time, states_grad_batch, states_grad_time, grads_batch, grads_time;
    bool option;
};

// What a thread does for the tiles of its column; ForwardPass says when each function is called.
template <bool RESETS>
struct BackwardPass {
    enum : int { GRADS = INPUTS, STATES = INPUTS + 1 };  // places in shared memory after those of the inputs
    Rows inputs[INPUTS], grads, states;
    Results to_inputs[INPUTS];
    unsigned wanted;  // a bit for each input whose gradient is wanted
    Tiles<INPUTS + 2> tiles;
    BlockPrefix block_prefix;
    ResetRows<RESETS> composing, finishing;  // resets of the next tile to compose, and of the next to finish
    Channel channel[VECTOR];
    State initial[VECTOR];
    CompensatedSum sum[VECTOR][PARAMETER_SLOTS];
    const bool option;

    template <int... I, int... V>
    __device__ BackwardPass(const Backward& of, const Column& column, const States& before, const States& after_grad,
                            IndexSequence<I...>, IndexSequence<V...>)
        : inputs{Rows(of.inputs.first[I], of.inputs.by_batch, of.inputs.by_time, column)...},
          grads(of.states_grad, of.states_grad_batch, of.states_grad_time, column),
          // Each row's state is that of one step earlier in the recurrence. The scan's last row needs the initial state.
          states(of.states, of.states_batch, of.states_time, column, 1),
          to_inputs{Results(of.grads[I], of.grads_batch, of.grads_time, column)...},
          wanted(((of.grads[I] ? 1u << I : 0u) | ...)),
          tiles(column, of.inputs.by_batch, of.inputs.by_time),
          composing(of.reset, of.reset_batch, column),
          finishing(of.reset, of.reset_batch, column),
          channel{Channel(of.parameters, of.channels, column.channel + V * TO_NEXT, column.has(V))...},
          option(of.option) {
#pragma unroll
        for (int v = 0; v < VECTOR; v++) block_prefix.carried[v] = after_grad.read(v), initial[v] = before.read(v);
    }
    __device__ BackwardPass(const Backward& of, const Column& column, const States& before, const States& after_grad)
        : BackwardPass(of, column, before, after_grad, MakeIndexSequence<INPUTS>{}, MakeIndexSequence<VECTOR>{}) {}

    __device__ void fetch(int left) {
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            tiles.copy_in(i, inputs[i], left, Element::narrow(Kind::padding(i)));
            inputs[i].advance();
        }
        tiles.copy_in(GRADS, grads, left, 0);
        tiles.template copy_in<1>(STATES, states, left, 0);
        grads.advance(), states.advance();
    }
    // This lane's rows of the current tile. States are not among them: `finish` reads each when it needs it.
    struct Held {
        Chunk<Element, VECTOR> inputs[STEPS][INPUTS], grads[STEPS];
        Values values[STEPS][VECTOR];
        unsigned resets;
    };
    __device__ void read(Held& held) const {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
#pragma unroll
            for (int i = 0; i < INPUTS; i++) held.inputs[k][i] = tiles.get(i, k);
            held.grads[k] = tiles.get(GRADS, k);
        }
    }
    __device__ Given given(const Held& held, int k, int v) const {
        return given_of(held.inputs[k], v, channel[v], RESETS && held.resets >> k & 1, option);
    }
    __device__ bool exists(int left, int k) const { return tiles.first_own + k < left; }
    __device__ void compose_tile(Held& held, Affine (&maps)[VECTOR], int left) {
        held.resets = composing.take_tile();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const Given given = this->given(held, k, v);
                held.values[k][v] = Kind::values(given);
                const Step step = gated(given, held.values[k][v], exists(left, k));
                maps[v] = composed<RESETS>(maps[v], backward_map(step, given, held.grads[k].get(v)));
            }
    }
    __device__ void finish(Held& held, State (&h)[VECTOR], int left) {
        if (RECOMPUTE_GATES) held.resets = finishing.take_tile();
        float tile_sum[VECTOR][PARAMETER_SLOTS] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const Chunk<Element, VECTOR> earlier = tiles.template get<1>(STATES, k);
            State to[INPUTS][VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const State x = chosen(tiles.first_own + k + 1 == left, initial[v], earlier.get(v));
                const Given given = this->given(held, k, v);
                const Values values = RECOMPUTE_GATES ? Kind::values(given) : held.values[k][v];
                const Step step = gated(given, values, exists(left, k));
                const Kind::Gradients of = backward(step, given, values, held.grads[k].get(v), x, h[v]);
#pragma unroll
                for (int i = 0; i < INPUTS; i++) to[i][v] = of.input[i];
#pragma unroll
                for (int p = 0; p < PARAMETERS; p++) tile_sum[v][p] += existing_gradient(of.parameter[p], exists(left, k));
            }
#pragma unroll
            for (int i = 0; i < INPUTS; i++) tiles.put(i, to_inputs[i], left, k, to[i]);
        }
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
#pragma unroll
            for (int p = 0; p < PARAMETERS; p++) sum[v][p].add(tile_sum[v][p]);
    }
    __device__ void leave(int left) {
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            if (wanted >> i & 1) tiles.copy_out(i, to_inputs[i], left);
            to_inputs[i].advance();
        }
    }
    // Adds the sums of all groups of the CTA, and writes them as part `part`. All threads of the CTA must call this.
    __device__ void write_sums(float* parameters_grad, const Backward& of, const Column& column, i64 part) const {
        __shared__ float sums[GROUPS][VECTOR][LANES_ACROSS];
        const int group = threadIdx.x / LANES_ACROSS, lane = threadIdx.x % LANES_ACROSS;
        if (!parameters_grad) return;
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) {
            const i64 row = (part * PARAMETERS + p) * of.channels + column.channel;
            __syncthreads();  // `sums` of the parameter before has been read
#pragma unroll
            for (int v = 0; v < VECTOR; v++)
                if (group < GROUPS) sums[group][v][lane] = sum[v][p].total();
            __syncthreads();
            if (group > 0) continue;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                if (!column.has(v)) continue;
                float all = 0;
                for (int g = 0; g < GROUPS; g++) all += sums[g][v][lane];
                const float parameter = of.parameters[p * of.channels + column.channel + v * TO_NEXT];
                parameters_grad[row + v * TO_NEXT] = all * Kind::slope(p, parameter);
            }
        }
    }
};

#if CTAS_PER_COLUMN == 1
template <bool RESETS>
__device__ void run_column(const Backward& of, const Column& column, const States& before, const States& after_grad,
                           const States& before_grad, float* parameters_grad, i64 part) {
    BackwardPass<RESETS> pass(of, column, before, after_grad);
    pass.tiles.run(pass);
    if (PARAMETERS) pass.write_sums(parameters_grad, of, column, part);
    if (threadIdx.x >= LANES_ACROSS) return;
#pragma unroll
    for (int v = 0; v < VECTOR; v++) before_grad.write(v, pass.block_prefix.carried[v].x);
}
#else
// Forwards to a pass that it does not own, so that the caller can read the pass's sums after ColumnCta::run.
template <class Pass>
struct PassReference {
    using Held = typename Pass::Held;
    Pass& pass;
    decltype(Pass::tiles)& tiles = pass.tiles;

    __device__ void fetch(int left) { pass.fetch(left); }
    __device__ void read(Held& held) const { pass.read(held); }
    __device__ void compose_tile(Held& held, Affine (&maps)[VECTOR], int left) { pass.compose_tile(held, maps, left); }
    __device__ void finish(Held& held, State (&h)[VECTOR], int left) { pass.finish(held, h, left); }
    __device__ void leave(int left) { pass.leave(left); }
};

template <bool RESETS>
__device__ void run_column(ColumnCta& cta, const Backward& of, const Column& column, const States& before,
                           const States& after_grad, i64 time, float* parameters_grad, i64 part) {
    BackwardPass<RESETS> pass(of, column, before, after_grad);
    cta.run(PassReference<BackwardPass<RESETS>>{pass}, time);
    if (PARAMETERS) pass.write_sums(parameters_grad, of, column, part);
}
#endif
#endif

// reset, parameters, initial_state, offsets, workspace and all gradients to write may be null.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gated_scan_channel_last_backward(
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
    const Inputs inputs{{input0, input1, input2, input3}, inputs_batch, inputs_channel, inputs_time};
    Storage* const grads[] = {input0_grad, input1_grad, input2_grad, input3_grad};
    const bool option = flags & WITH_OPTION;
    const i64 parts_each = parts / (batch > 0 ? batch : 1);  // parts for each batch
#if COLUMN_SERIAL
#if CTAS_PER_COLUMN > 1
    const CtaRank cta(workspace);
    const Column column(channels, time, !(flags & AGAINST_TIME), offsets, sequences, cta.column, cta.rank * TIMES);
    const i64 part = column.batch * parts_each + cta.rank;
#else
    const Column column(channels, time, !(flags & AGAINST_TIME), offsets, sequences, blockIdx.x);
    const i64 part = column.batch * parts_each;
#endif
    const auto states_of = [&](const State* tensor, const Column& column) {
        return States(tensor, state_batch, state_channel, state_time, column);
    };
    const Backward of{inputs,       parameters,  reset,        states,      states_grad,
                      {grads[0], grads[1], grads[2], grads[3]},
                      channels,     reset_batch, states_batch, states_time, states_grad_batch,
                      states_grad_time, grads_batch, grads_time, option};
    const States before = states_of(initial_state, column), after_grad = states_of(final_state_grad, column);
#if CTAS_PER_COLUMN > 1
    const Column own = column.with(place_of(ColumnCta::own_channel()));
    ColumnCta column_cta(cta, workspace, states_of(final_state_grad, own), states_of(initial_state_grad, own));
    if (reset) run_column<true>(column_cta, of, column, before, after_grad, time, parameters_grad, part);
    else run_column<false>(column_cta, of, column, before, after_grad, time, parameters_grad, part);
#else
    const States before_grad = states_of(initial_state_grad, column);
    if (reset) run_column<true>(of, column, before, after_grad, before_grad, parameters_grad, part);
    else run_column<false>(of, column, before, after_grad, before_grad, parameters_grad, part);
#endif
#else
    static_assert(VECTOR == 1, "boundaries are those of one channel");
    const Position at(static_cast<u64*>(workspace), 1, batch, channels);
    const Walk walk(time, !(flags & AGAINST_TIME), offsets, sequences);
    const bool has_channel = at.channel < channels;
    const i64 c = has_channel ? at.channel : 0;
    const auto rows_of = [&](const Storage* tensor, i64 by_batch, i64 by_channel, i64 by_time) {
        return Rows<Element>(tensor + at.offset(0, by_batch), by_channel, by_time, channels, at, walk);
    };
    const Rows<Element> states_rows = rows_of(states, states_batch, states_channel, states_time);
    const Rows<Element> grads_rows = rows_of(states_grad, states_grad_batch, states_grad_channel, states_grad_time);
    Chunk<Element, 1> held[STEPS][INPUTS], grad[STEPS];
#pragma unroll
    for (int i = 0; i < INPUTS; i++) {
        const Rows<Element> rows = rows_of(inputs.first[i], inputs_batch, inputs_channel, inputs_time);
#pragma unroll
        for (int k = 0; k < STEPS; k++) held[k][i] = rows.load(k, Element::narrow(Kind::padding(i)));
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) grad[k] = grads_rows.load(k, 0);
    const i64 state = at.offset(0, state_batch) + c * state_channel;
    const auto boundary = [&](const State* tensor) {
        return Boundary{tensor ? const_cast<State*>(tensor) + state : nullptr, state_time};
    };
    const Boundary before = boundary(initial_state), after_grad = boundary(final_state_grad);
    const Boundary before_grad = boundary(initial_state_grad);
    const Marks marks = walk.marks(at.first, STEPS, own_places());
    __syncwarp();  // lanes with the same rows have written the same marks to shared memory

    const Channel channel(parameters, channels, at.channel, has_channel);
    const unsigned resets = resets_of(reset, reset_batch, at, walk);
    const auto given_at = [&](int k) { return given_of(held[k], 0, channel, resets >> k & 1, option); };
    const auto exists = [&](int k) { return at.first + k < time; };
    Values values[STEPS];
    Affine rows[1];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const Given given = given_at(k);
        values[k] = Kind::values(given);
        Step map = backward_map(gated(given, values[k], exists(k)), given, grad[k].get(0));
        // A packed sequence starts from the gradient of its own final state, whatever gradient enters the tile.
        if (marks.starts_at(k)) {
            const State h = after_grad.read(marks.places[k].of_first);
            map = {State(0), given.reset ? 0.0f : map.scale * (grad[k].get(0) + h)};
        }
        rows[0] = compose(rows[0], map);
    }
    State h[1];
    const i64 offset = at.offset(0, state_batch);
    enter_rows(rows, h, at, walk, static_cast<u64*>(workspace), channels,
               final_state_grad ? final_state_grad + offset : nullptr,
               initial_state_grad ? initial_state_grad + offset : nullptr, state_channel);
    float sum[PARAMETER_SLOTS] = {};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        State x = State(0);
        if (k + 1 < states_rows.count) x = states_rows.load(k + 1, 0).get(0);
        else if (!walk.varlen() && has_channel) x = before.read(0);
        if (marks.starts_at(k)) h[0] = after_grad.read(marks.places[k].of_first);
        if (marks.ends_at(k)) x = before.read(marks.places[k].of_last);
        const Given given = given_at(k);
        const Step step = gated(given, values[k], exists(k));
        const Kind::Gradients to = backward(step, given, values[k], grad[k].get(0), x, h[0]);
        if (marks.ends_at(k) && has_channel) before_grad.write(marks.places[k].of_last, h[0]);
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            if (!grads[i]) continue;
            Chunk<Element, 1> chunk;
            chunk.set({to.input[i]});
            rows_of(grads[i], grads_batch, grads_channel, grads_time).store(k, chunk);
        }
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) sum[p] += existing_gradient(to.parameter[p], exists(k));
    }
    if (PARAMETERS == 0 || !parameters_grad) return;
    // The sum over the tile's time steps, for each channel.
    __shared__ float sums[SLOTS_PER_WARP * WARPS][LANES];
    const int slot = threadIdx.x / LANES;
#pragma unroll
    for (int p = 0; p < PARAMETERS; p++) {
        __syncthreads();  // `sums` of the parameter before has been read
        sums[slot][threadIdx.x % LANES] = sum[p];
        __syncthreads();
        if (slot > 0 || !has_channel) continue;
        float all = 0;
        for (int s = 0; s < SLOTS_PER_WARP * WARPS; s++) all += sums[s][threadIdx.x];
        const i64 part = at.batch * parts_each + at.index;
        parameters_grad[(part * PARAMETERS + p) * channels + c] =
            all * Kind::slope(p, parameters[p * channels + c]);
    }
#endif
}
