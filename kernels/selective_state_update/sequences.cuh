// Sequences of several tokens: which tokens they have, and between which slots their states go.
#pragma once
#include "tensors.cuh"

enum : int { BATCHES = 31 };  // of which lanes have the bounds; the last lane has no sequence, and so stands for the end

// One batch: the slot that it starts from, its tokens, and the slot for its last states. A slot of -1 is none, as is that of a batch
// without tokens.
struct Sequence {
    int slot, begin, end, to;
};

// The slot that a column names for the states of a batch that starts from a slot; -1: they are not written.
__device__ inline int slot_after(const Arguments& args, int batch, int column, int slot) {
    if (slot < 0 || column >= args.columns) return -1;
    const SlotTensor& indices = args.dst_indices.data ? args.dst_indices : args.indices;
    const i64 to = load_index(indices.data, batch * indices.batch + column * indices.token,
                              args.flags & (args.dst_indices.data ? WIDE_DST_INDICES : WIDE_INDICES));
    return is_slot(to, args.dst_state.slots, args.pad_slot) ? int(to) : -1;
}
__device__ inline Sequence load_sequence(const Arguments& args, int batch, int end_of_batches) {
    if (batch >= end_of_batches) return {-1, 0, 0, -1};
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
    const int valid = begin < end && is_slot(slot, args.state.slots, args.pad_slot) ? int(slot) : -1;
    const int to = args.dst_indices.data ? slot_after(args, batch, 0, valid) : valid < args.dst_state.slots ? valid : -1;
    return {valid, int(begin), int(end), to};
}
// That of a lane.
__device__ inline Sequence sequence_of(const Sequence& of_lane, int lane) {
    return {__shfl_sync(0xffffffffu, of_lane.slot, lane), __shfl_sync(0xffffffffu, of_lane.begin, lane),
            __shfl_sync(0xffffffffu, of_lane.end, lane), __shfl_sync(0xffffffffu, of_lane.to, lane)};
}
