// linear_scan, summary, channels contiguous: the product of the gates of each channel, and its final state from a state of
// zero.
//
// Two reads: 8 bytes per element in float32, 4 in bfloat16 and float16. What is written is two numbers a channel.
//
//              channels ->   `across` lanes × VECTOR
//     time  slot 0          | rows, ROWS of them at a time in a thread |
//       |   slot 1          | rows                                     |      segment 0 (a CTA)
//       v   …               THREADS / across slots
//           slot 0          |                                          |      segment 1
//           …
#include "summary.cuh"

enum : int {
    VECTOR = ALIGNED ? 16 / sizeof(Storage) : 1,
    WIDEST = 32 * VECTOR,
};
static_assert(WIDEST <= THREADS, "a channel needs a thread");

// What a thread reads: VECTOR channels, from the first row of its share on.
struct Part {
    const GateStorage* gates;
    const Storage* tokens;
    i64 gates_row, tokens_row;  // from row to row, in the order of the scan
};

// Composes each channel's run with the maps of COUNT rows, and goes on to the next ones.
template <int COUNT>
__device__ inline void compose_rows(Affine (&runs)[VECTOR], Part& part) {
    Chunk<GateElement, VECTOR> gate[COUNT];
    Chunk<Element, VECTOR> token[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        if constexpr (ALIGNED) {
            gate[k] = get_words<GateElement, VECTOR>(reinterpret_cast<const unsigned*>(part.gates));
            token[k] = get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(part.tokens));
        } else {
            gate[k].word[0] = token[k].word[0] = 0;
            gate[k].put(0, *part.gates);
            token[k].put(0, *part.tokens);
        }
        part.gates += part.gates_row, part.tokens += part.tokens_row;
    }
#pragma unroll
    for (int v = 0; v < VECTOR; v++) {
        // Apart from the rows before, so that rounding errors are those of short sums.
        const Step first = ForwardStep::map(gate[0].get(v), token[0].get(v));
        Affine map{first.scale, State(0), first.shift};
#pragma unroll
        for (int k = 1; k < COUNT; k++) map = compose(map, ForwardStep::map(gate[k].get(v), token[k].get(v)));
        runs[v] = compose(runs[v], map);
    }
}

// flags: 1 if x[t] follows from x[t+1]. `shares` is THREADS over the number of lanes across, a power of two up to 32; a
// segment is a multiple of it.
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_CTAS) linear_scan_channel_last_summary(
    const GateStorage* __restrict__ gates, const Storage* __restrict__ tokens, State* __restrict__ final_gate,
    State* __restrict__ final_state, void* workspace, i64 outer, i64 batch, i64 channels, i64 time,
    i64 sequences,
    i64 gates_outer, i64 gates_batch, i64 gates_channel, i64 gates_time,
    i64 tokens_outer, i64 tokens_batch, i64 tokens_channel, i64 tokens_time,
    i64 state_outer, i64 state_batch, i64 state_channel, i64 state_time,
    i64 share, i64 shares, i64 segments, i64 flags) {
    const Cut cut{share, unsigned(shares), unsigned(segments), bool(flags & 1)};
    const unsigned across = THREADS / cut.shares, width = across * VECTOR;
    const unsigned columns_across = (unsigned(channels) + width - 1) / width;
    const unsigned columns = unsigned(outer * batch) * columns_across;
    const unsigned column = blockIdx.x % columns, segment = blockIdx.x / columns, both = column / columns_across;
    const unsigned o = ALIGNED ? 0 : both / unsigned(batch), b = ALIGNED ? both : both % unsigned(batch);
    const i64 first_channel = i64(column % columns_across) * width;

    Affine runs[VECTOR];
    const i64 channel = first_channel + threadIdx.x % across * VECTOR;
    const i64 begin = (segment * cut.shares + threadIdx.x / across) * share;
    i64 left = (begin + share < time ? begin + share : time) - begin;  // rows of this share
    if (channel < channels && left > 0) {
        const i64 t = cut.against ? time - 1 - begin : begin;
        Part part{
            gates + o * gates_outer + b * gates_batch + channel * (ALIGNED ? 1 : gates_channel) + t * gates_time,
            tokens + o * tokens_outer + b * tokens_batch + channel * (ALIGNED ? 1 : tokens_channel) + t * tokens_time,
            cut.against ? -gates_time : gates_time, cut.against ? -tokens_time : tokens_time};
#pragma unroll 1
        for (; left >= ROWS; left -= ROWS) compose_rows<ROWS>(runs, part);
#pragma unroll 1
        for (; left > 0; left--) compose_rows<1>(runs, part);
    }

    __shared__ Stored<> shared[WARPS * WIDEST];  // [warp][channel], then [group][channel]
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (unsigned distance = across; distance < 32; distance *= 2)
#pragma unroll
        for (int v = 0; v < VECTOR; v++) runs[v] = compose(runs[v], from_higher(runs[v], distance));
#pragma unroll
    for (int v = 0; v < VECTOR; v++)
        if (lane < across) shared[warp * width + lane * VECTOR + v] = runs[v];
    __syncthreads();

    // From here on, a thread has one channel, and where the column is narrow, each group of threads has all of them.
    const unsigned own = threadIdx.x % width, group = threadIdx.x / width, groups = THREADS / width;
    const bool there = first_channel + own < channels;
    const i64 of_summary = o * state_outer + b * state_batch + (first_channel + own) * state_channel;
    const Summaries summaries{final_gate, final_state};
    const Segments maps(workspace, columns);
    Stored<>* const of_column = maps.maps + column * segments * width + own;
    if (there && group == 0) {
        const Affine map = compose_run(shared + own, WARPS, width);
        if (cut.segments == 1) summaries.write(of_summary, map);
        else of_column[segment * width] = map;
    }
    if (cut.segments == 1 || !maps.complete(column, cut.segments)) return;
    const Strip strip(cut.segments, group, groups);
    if (there) shared[group * width + own] = compose_run<AT_ONCE>(of_column + strip.first * width, strip.count, width);
    __syncthreads();
    if (there && group == 0) summaries.write(of_summary, compose_run(shared + own, groups, width));
}
