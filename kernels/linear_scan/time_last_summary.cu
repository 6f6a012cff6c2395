// linear_scan, summary, time contiguous: the product of the gates of each row, and its final state from a state of zero.
//
// Two reads: 8 bytes per element in float32, 4 in bfloat16 and float16. Two numbers are written for each row.
//
//     row     | segment 0 (a CTA)                     | segment 1 | …
//             | warp 0        | warp 1        | …     |                    `shares` warps to a segment;
//             | tile | tile … | tile | tile … |                            other warps have rows of their own
//     tile    | step 0                     | step 1 | …  STEPS
//             | 32 lanes × VECTOR elements |
//
// An aligned row is read in chunks of 16 bytes. It may start and end anywhere in one, if it does so in both tensors: what
// lies outside of it is padded with the identity.
#include "summary.cuh"

enum : int {
    VECTOR = ALIGNED || sizeof(Storage) > 4 ? 16 / sizeof(Storage) : 4,
    STEP = 32 * VECTOR,
    TILE = STEPS * STEP,
};

// Elements [at, at + VECTOR) of a row, with `outside` for those that are not in it. INSIDE: all are.
template <bool INSIDE, class E>
__device__ inline Chunk<E, VECTOR> chunk_at(const Line<E>& row, i64 at, i64 time, typename E::Storage outside) {
    if constexpr (ALIGNED)
        if (INSIDE || (at >= 0 && at + VECTOR <= time))
            return get_words<E, VECTOR>(reinterpret_cast<const unsigned*>(row.first + at));
    Chunk<E, VECTOR> chunk;
    chunk.word[Chunk<E, VECTOR>::WORDS - 1] = 0;
    chunk.fill(outside);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        if (INSIDE || (at + i >= 0 && at + i < time)) chunk.put(i, *row.at(at + i));
    return chunk;
}

template <bool AGAINST>
__device__ inline Affine map_of(const Chunk<GateElement, VECTOR>& gates, const Chunk<Element, VECTOR>& tokens) {
    constexpr int FIRST = AGAINST ? VECTOR - 1 : 0;
    const Step first = ForwardStep::map(gates.get(FIRST), tokens.get(FIRST));
    Affine map{first.scale, State(0), first.shift};
#pragma unroll
    for (int k = 1; k < VECTOR; k++) {
        const int i = AGAINST ? VECTOR - 1 - k : k;
        map = compose(map, ForwardStep::map(gates.get(i), tokens.get(i)));
    }
    return map;
}

// Of the lanes, in the order of the scan; right in the first of them.
template <int COUNT>
__device__ inline void compose_lanes(Affine (&maps)[COUNT], bool against) {
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
        const int from = (threadIdx.x + (against ? 32 - distance : distance)) % 32;
#pragma unroll
        for (int s = 0; s < COUNT; s++) maps[s] = compose(maps[s], from_lane(maps[s], from));
    }
}

// What a warp reads.
struct Part {
    Line<GateElement> gates;
    Line<Element> tokens;
    i64 time;
};

// Composes `run` with the maps of COUNT steps, of which the first lies at `at` and the others `step` apart.
template <int COUNT, bool INSIDE>
__device__ inline void compose_steps(Affine& run, const Part& part, i64 at, i64 step, bool against) {
    Chunk<GateElement, VECTOR> gate[COUNT];
    Chunk<Element, VECTOR> token[COUNT];
    at += threadIdx.x % 32 * VECTOR;
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
        gate[s] = chunk_at<INSIDE>(part.gates, at + s * step, part.time, ForwardStep::Padding::GATE);
        token[s] = chunk_at<INSIDE>(part.tokens, at + s * step, part.time, ForwardStep::Padding::TOKEN);
    }
    Affine maps[COUNT];
#pragma unroll
    for (int s = 0; s < COUNT; s++)
        maps[s] = against ? map_of<true>(gate[s], token[s]) : map_of<false>(gate[s], token[s]);
    compose_lanes(maps, against);
#pragma unroll
    for (int s = 0; s < COUNT; s++) run = compose(run, maps[s]);
}

// flags: 1 if x[t] follows from x[t+1]. A share is a multiple of TILE. `shares` divides WARPS, and is WARPS where there are
// several segments.
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_CTAS) linear_scan_time_last_summary(
    const GateStorage* __restrict__ gates, const Storage* __restrict__ tokens, State* __restrict__ final_gate,
    State* __restrict__ final_state, void* workspace, i64 outer, i64 batch, i64 channels, i64 time,
    i64 sequences,
    i64 gates_outer, i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_outer, i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time,
    i64 share, i64 shares, i64 segments, i64 flags) {
    const Cut cut{share, unsigned(shares), unsigned(segments), bool(flags & 1)};
    const unsigned segment = blockIdx.x % cut.segments, rows = unsigned(outer * batch * channels);
    const unsigned row = blockIdx.x / cut.segments * (WARPS / cut.shares) + threadIdx.x / 32 / cut.shares;
    const unsigned channel = row % unsigned(channels), both = row / unsigned(channels);
    const unsigned o = ALIGNED ? 0 : both / unsigned(batch), b = ALIGNED ? both : both % unsigned(batch);
    const auto offset = [&](i64 by_outer, i64 by_batch, i64 by_channel) {
        return (ALIGNED ? 0 : o * by_outer) + b * by_batch + channel * by_channel;
    };
    const Part part{
        line<GateElement>(gates + offset(gates_outer, gates_batch, gates_channel), ALIGNED ? 1 : gates_time),
        line<Element>(tokens + offset(tokens_outer, tokens_batch, tokens_channel), ALIGNED ? 1 : tokens_time),
        time};
    const i64 of_summary = offset(state_outer, state_batch, state_channel);
    const Summaries summaries{final_gate, final_state};
    const int warp = threadIdx.x / 32, own = warp % cut.shares;
    const int lane = cut.against ? 31 - threadIdx.x % 32 : threadIdx.x % 32;  // in the order of the scan
    const bool there = row < rows;

    Affine run;
    if (there) {
        // Elements of the row's first 16 bytes that come before it.
        const i64 head = ALIGNED ? i64(u64(part.tokens.first) % 16 / sizeof(Storage)) : 0;
        const unsigned number = segment * cut.shares + own;
        const i64 begin = (cut.against ? cut.segments * cut.shares - 1 - number : number) * share - head;
        const i64 end = begin + share < time ? begin + share : time;
        const i64 steps = end > begin ? (end - begin + STEP - 1) / STEP : 0;
        const i64 step = cut.against ? -STEP : STEP;
        i64 at = cut.against ? begin + (steps - 1) * STEP : begin;
#pragma unroll 1
        for (i64 k = 0; k < steps;) {
            const i64 lowest = cut.against ? at - (TILE - STEP) : at;
            if (k + STEPS <= steps && lowest >= 0 && lowest + TILE <= time) {
                compose_steps<STEPS, true>(run, part, at, step, cut.against);
                k += STEPS, at += STEPS * step;
            } else {
                compose_steps<1, false>(run, part, at, step, cut.against);
                k++, at += step;
            }
        }
    }

    __shared__ Stored<> of_warp[WARPS];
    if (lane == 0) of_warp[warp] = run;
    __syncthreads();
    const Segments maps(workspace, rows);
    Stored<>* const of_row = maps.maps + row * segments;
    if (there && lane == 0 && own == 0) {
        const Affine map = compose_run(of_warp + warp, cut.shares, 1);
        if (cut.segments == 1) summaries.write(of_summary, map);
        else of_row[segment] = map;
    }
    if (cut.segments == 1 || !maps.complete(row, cut.segments)) return;
    const Strip strip(cut.segments, warp * 32 + lane, THREADS);
    Affine of_strip[1] = {compose_run<AT_ONCE>(of_row + strip.first, strip.count, 1)};
    compose_lanes(of_strip, cut.against);
    if (lane == 0) of_warp[warp] = of_strip[0];
    __syncthreads();
    if (threadIdx.x == 0) summaries.write(of_summary, compose_run(of_warp, WARPS, 1));
}
