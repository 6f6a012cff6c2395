// Scans with one gate a channel for all time steps, of at most 32 channels, all of which lie in shared memory at once, or nearly: what the
// forward and the backward kernel share. Rows have no gaps between them, and begin at any address. A row of contiguous time is a
// batch of one channel.
//
// The build pins WARPS (per CTA), STEPS (rows of a lane in a chunk), CHUNKS (those that a warp keeps) and BLOCKS (CTAs per SM). A batch
// is cut into runs of time steps, one for each warp of the GPU, and a run into chunks:
//
//      order   run 0    warp 0 of the first CTA    chunk 0 … n-1    a chunk:   slot 0   | STEPS rows of a lane for each channel |
//        |     run 1    warp 1                     …                           slot 1   | …                                     |
//        v     …
//
// Order runs in the direction of the scan, with time or against it. A run of n rows scales the state by gate^n, whatever the rows are.
// So runs differ only in their shifts, the states that they end with if they begin with zero.
//
// 1. A warp copies its run in, chunk by chunk from the last to the first, and computes its shift. What was copied last stays.
// 2. CTAs publish their shifts, and read those of all CTAs before them in the batch: one exchange for the whole scan. A CTA waits only
//    for CTAs with lower numbers, which a GPU starts first.
// 3. A warp computes the states of its run from its first chunk to its last, in shared memory, from where they are copied out. Chunks
//    that were overwritten are read again, from the L2.
//
// Traffic: 8 bytes for each element in float32 forward, 12 backward, where the states before are read in step 3.
//
// Copies are of whole pieces of 16 bytes, and so begin and end up to 15 bytes outside of a chunk. Results lie in their pieces as inputs
// do.
//
// workspace: null if no batch has several CTAs; the head of WorkspaceInit, and then a piece of 16 bytes (tile_state.cuh) for each channel
// of each CTA. The first CTA zeroes it and has no runs.
#pragma once
#include "../linear_scan/resident_runs.cuh"

#if BACKWARD
using Recurrence = BackwardStep;
#else
using Recurrence = ForwardStep;
#endif

// Powers of the gate of a lane's channel.
struct Powers {
    WidePower chunk, part;  // gate^n, n the rows of a chunk and of a CTA's runs
    PowerOf slots[LEVELS - 1];  // … of 1, 2, 4 … slots
    PowerOf before, whole, run; // … of the slots before the lane's, of a chunk and of a run

    __device__ Powers(State gate, const Run& of) {
        WidePower power = WidePower(gate).raised(STEPS), of_slots;
#pragma unroll
        for (int level = 0; level < LEVELS; level++, power = power * power) {
            if (level + 1 < LEVELS) slots[level] = PowerOf(power);
            if (of.slot >> level & 1) of_slots = of_slots * power;
            if (of.slots == 1 << level) chunk = power;
        }
        before = PowerOf(of_slots), whole = PowerOf(chunk);
        const WidePower of_run = chunk.raised(of.most);
        run = PowerOf(of_run), part = of_run.raised(WARPS);
    }
};

// A state for each channel of a batch, or null.
struct Boundary {
    State* first;
    i64 by_channel;

    __device__ State read(int channel) const { return first ? first[channel * by_channel] : State(0); }
    __device__ void write(int channel, State x, i64 further = 0) const {
        if (first) first[channel * by_channel + further] = x;
    }
};

// The states that enter runs. What it takes is computed while the first chunks are on their way.
struct Exchange {
    const Run& run;
    const PowerOf of_run_rows;
    const WorkspaceInit workspace_init;
    uint4* const published;
    // A thread reads what one slice of the CTAs before has published of one channel: `most` CTAs, of the `before` before the CTA.
    const int before, slices, most, slice, channel;
    PowerOf part, of_slice;  // gate^n, n the rows of a CTA's runs, of the thread's channel, and of a slice, of the lane's
    unsigned seen = 0;       // CTAs that have seen the workspace's flag before this one

    __device__ Exchange(const Run& run, const Powers& powers, void* workspace)
        : run(run),
          of_run_rows(powers.run),
          workspace_init(init_of(run, workspace)),
          published(static_cast<uint4*>(workspace_init.past_head()) + i64(run.cta) * run.channels),
          before(run.shared() ? run.cta % run.parts() : 0),
          slices(smaller(THREADS / run.channels, SLICES)),
          most(before / slices + 1),
          slice(int(threadIdx.x) / run.channels),
          channel(int(threadIdx.x) - slice * run.channels) {
        part = PowerOf(WidePower(from_lane(powers.part.re, channel), from_lane(powers.part.im, channel)));
        if (run.shared()) of_slice = PowerOf(powers.part.raised(most));
    }
    __device__ static WorkspaceInit init_of(const Run& run, void* workspace) {
        return {workspace, int(gridDim.x - 1) * run.channels * int(sizeof(uint4))};
    }
    static __device__ State& of_run(int warp, int channel) {
        __shared__ State shifts[WARPS][32];
        return shifts[warp][channel];
    }
    // The state after some warps' runs.
    __device__ State after_runs(State x, int begin, int end) const {
#pragma unroll 1
        for (int warp = begin; warp < end; warp++) x = of_run_rows(x, of_run(warp, run.channel));
        return x;
    }
    // That after the CTAs before. Slices begin with the last of them, and the initial state stands before the first one.
    __device__ State after_parts(const Boundary& initial) const {
        __shared__ State of_slices[SLICES][32];
        if (slice < slices) {
            const int begin = slice * most, end = smaller(begin + most, before + 1);
            State x = end > begin && end > before ? initial.read(channel) : State(0);
#pragma unroll 1
            for (int i = smaller(end, before) - 1; i >= begin; i -= LOOKS) {
                LineBuffer<1> lines[LOOKS];
                unsigned looked = 0;
#pragma unroll
                for (int j = 0; j < LOOKS; j++) looked |= i - j >= begin ? 1u << j : 0;
                unsigned missing = looked;
#pragma unroll 1
                while (true) {
#pragma unroll
                    for (int j = 0; j < LOOKS; j++)
                        if (missing >> j & 1 && lines[j].fetch(published - (i - j + 1) * run.channels + channel, 0)) missing &= ~(1u << j);
                    if (!missing) break;
                    __nanosleep(POLLED_NS);
                }
#pragma unroll
                for (int j = 0; j < LOOKS; j++)
                    if (looked >> j & 1) x = part(x, lines[j].get(0));
            }
            of_slices[slice][channel] = x;
        }
        __syncthreads();
        State x = State(0);
#pragma unroll 4
        for (int i = slices - 1; i >= 0; i--) x = of_slice(x, of_slices[i][run.channel]);
        return x;
    }
    // `shift` is that of the warp's run, in the lanes of slot 0. To be called by the whole CTA.
    __device__ State enter(State shift, const Boundary& initial) {
        if (run.slot == 0) of_run(run.warp, run.channel) = shift;
        if (run.shared() && threadIdx.x == 0) {
            while (!workspace_init.is_ready()) {}
            seen = workspace_init.count_reader();
        }
        __syncthreads();
        if (!run.shared()) return after_runs(run.count > 0 ? initial.read(run.channel) : State(0), run.warp - run.place, run.warp);
        if (run.warp == 0 && run.slot == 0 && before + 1 < run.parts()) {
            LineBuffer<1> line;
            line.put(0, after_runs(State(0), 0, WARPS));
            line.publish(published + run.channel, 0);
        }
        return after_runs(after_parts(initial), 0, run.warp);
    }
    __device__ void leave() const {
        if (run.shared() && threadIdx.x == 0 && seen + 2 == gridDim.x) workspace_init.retract();
    }
};

// Of the warp's batch: tokens and states forward, gradients of states and of tokens backward, where the states before are null if no
// gradient of gates is wanted. Of the lane's channel: the gate, and the state before the first time step.
struct Tensors {
    const Storage *in, *earlier;
    Storage* out;
    State gate, first;
    Boundary entering, leaving;
    Boundary sums;  // of the gradient of gates: those of one channel lie `apart`
    i64 apart;
};

struct Pass {
    const Run& run;
    const Tensors& of;
    Ring ring;
    const Powers powers;

    __device__ Pass(const Run& run, const Tensors& of) : run(run), of(of), ring(begun(run, of)), powers(conjugated(of.gate), run) {}
    // The first copies are on their way while powers are computed.
    static __device__ Ring begun(const Run& run, const Tensors& of) {
        const Ring ring(run);
#pragma unroll 1
        for (int chunk = run.chunks - 1; chunk >= 0 && chunk >= run.chunks - CHUNKS; chunk--)
            ring.request(run.stage(chunk), run.stretch(of.in, chunk));
        return ring;
    }
    static __device__ State conjugated(State gate) { return BACKWARD ? conj(gate) : gate; }

    __device__ void request(int chunk) const { ring.request(run.stage(chunk), run.stretch(of.in, chunk)); }
    __device__ void request_earlier(int chunk) const {
        if (EARLIER && of.earlier && chunk < run.chunks) ring.request(CHUNKS, run.stretch(of.earlier, chunk, 1));
    }
    __device__ State shift_of(const Rows& rows) const {
        State shift = State(0);
#pragma unroll 1
        for (int k = 0; k < rows.own; k += GROUP) {
            State x[GROUP];
            rows.load(k, x);
#pragma unroll
            for (int i = 0; i < GROUP; i++) shift = Recurrence::map(of.gate, x[i])(shift);
        }
        return shift;
    }
    // That of the run, in the lanes of slot 0.
    __device__ State compose() {
        State shift = State(0);
        WidePower behind;  // of the chunks that follow
#pragma unroll 1
        for (int chunk = run.chunks - 1; chunk >= 0; chunk--) {
            ring.await(run.stage(chunk));
            const State own = shift_of(Rows(ring.area(run.stage(chunk)), run.stretch(of.in, chunk), run));
            shift = PowerOf(behind)(own, shift);
            behind = behind * powers.chunk;
            __syncwarp();  // before others come in
            if (chunk >= CHUNKS) request(chunk - CHUNKS);
        }
#pragma unroll
        for (int level = 0; level + 1 < LEVELS; level++)
            if (1 << level < run.slots) shift = powers.slots[level](shift, from_higher(shift, run.channels << level));
        return shift;
    }
    // The state that enters the lane's rows, whose shift is `own`, from the one that enters the chunk, which becomes the one after it.
    __device__ State enter(State own, State& entering) const {
#pragma unroll
        for (int level = 0; level + 1 < LEVELS; level++) {
            if (1 << level >= run.slots) break;
            const State lower = from_lower(own, run.channels << level);
            if (run.slot >> level) own = powers.slots[level](lower, own);
        }
        const State lower = from_lower(own, run.channels), last = from_lane(own, (run.slots - 1) * run.channels + run.channel);
        const State x = powers.before(entering, chosen(run.slot > 0, lower, State(0)));
        entering = powers.whole(entering, last);
        return x;
    }
    __device__ void walk(State entering) {
        State sum = State(0);
#pragma unroll 1
        for (int chunk = 0; chunk < run.chunks; chunk++) {
            const int stage = run.stage(chunk);
            if (chunk >= CHUNKS) ring.await(stage);
            const Stretch in = run.stretch(of.in, chunk);
            const Rows rows(ring.area(stage), in, run);
            State state = enter(shift_of(rows), entering);
#if BACKWARD
            const Stretch before = run.stretch(of.earlier, chunk, 1);
            if (of.earlier && before.rows > 0) ring.await(CHUNKS);
            Rows earlier(ring.area(CHUNKS), before, run);
            if (!of.earlier) earlier.own = 0;
#endif
            const int written = of.out ? rows.own : 0;
            const bool ends = rows.own > 0 && run.begin + chunk * run.times() + run.slot * STEPS + rows.own == run.time;
            State of_chunk = State(0), result = State(0);
#pragma unroll 1
            for (int k = 0; k < rows.own; k += GROUP) {
                State x[GROUP];
                rows.load(k, x);
#if BACKWARD
                State states[GROUP];
                earlier.load(k, states);
#endif
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                    if (k + i < rows.own) {
#if BACKWARD
                        const auto to = BackwardStep::gradients(of.gate, x[i], states[i], state);
                        state = to.earlier, of_chunk = of_chunk + to.gate, result = to.token;
#else
                        state = result = ForwardStep::map(of.gate, x[i])(state);
#endif
                    }
                    if (k + i < written) rows.row[(k + i) * rows.apart] = Element::narrow(result);
                }
            }
#if BACKWARD
            // The state before the first time step is not among those before, of which it has taken a zero.
            if (ends) of_chunk = of_chunk + BackwardStep::gate_gradient(result, of.first);
#endif
            __syncwarp();  // before others come in
            request_earlier(chunk + 1);
            sum = sum + of_chunk;
            if (ends) of.leaving.write(run.channel, state);
            if (of.out) ring.store(in.in(ring.area(stage)), run.stretch(of.out, chunk));
            if (chunk >= 1 && chunk - 1 + CHUNKS < run.chunks) {
                ring.await_stores<1>();
                request(chunk - 1 + CHUNKS);
            }
        }
        if (EARLIER && of.earlier) add_up(sum);
        ring.await_stores<0>();
    }
    // A sum is of what a CTA has of a batch. To be called by the whole CTA.
    __device__ void add_up(State sum) const {
#pragma unroll 1
        for (int half = run.slots / 2; half > 0; half /= 2) sum = sum + from_higher(sum, half * run.channels);
        __shared__ State of_warps[WARPS][32];
        if (run.slot == 0) of_warps[run.warp][run.channel] = sum;
        __syncthreads();
        const int together = smaller(run.runs, WARPS);
        if (run.slot > 0 || !run.exists || run.place % together > 0) return;
#pragma unroll 1
        for (int i = 1; i < together; i++) sum = sum + of_warps[run.warp + i][run.channel];
        of.sums.write(run.channel, sum, run.place / together * of.apart);
    }
};

__device__ inline void scan_resident(const Run& run, const Tensors& of, void* workspace) {
    if (run.cta < 0) return Exchange::init_of(run, workspace).initialize();
    Pass pass(run, of);
    Exchange exchange(run, pass.powers, workspace);
    const State shift = pass.compose();
    pass.request_earlier(0);
    pass.walk(exchange.enter(shift, of.entering));
    exchange.leave();
}
