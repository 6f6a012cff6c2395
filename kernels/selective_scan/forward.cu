// The forward pass of a selective scan: for each batch, channel d and state n
//     h[t] = exp(δ[t]·A)·h[t-1] + δ[t]·u[t]·B[t],  y[t] = Σ_n C[t]·h[t] + D·u[t],  out[t] = y[t]·silu(z[t])
// where δ is delta + delta_bias, or its softplus.
//
// Traffic of an element in 16 bits: 8 bytes (u, delta, z and out), and 2 for checkpoints where a backward pass follows.
//
// forward_states.cuh has the kernels whose warps have different channels, or different states of the same channels;
// forward_turns.cuh those whose warps take turns over time, for so few channels that the others leave a GPU idle. TURNS says which.
//
// Sequences can be cut into parts, each with its own CTAs. `part_states` and `part_sizes` hold, of each part, h after its last
// step if the state before it is zero, and the sum of δ (adjoint.cu): from these follows the h that enters the parts after.
//
// A lane's states are its part of the 16 × 8 matrix that tensor cores multiply. So in 16 bits y is a product on tensor cores:
// of one step's states with C of eight steps, of which the column of that step is kept. float32 is multiplied and summed by
// shuffles. notes/README.md says which unit is the bound.
#if TURNS
#define CHANNELS 8
#define SPLIT WARPS
#define CAPACITY 16
#else
#define CHANNELS 16
#define CAPACITY (4 * STATES * SPLIT)
#endif
#include "tile.cuh"

struct Arguments {
    ChannelTensor<const Storage*> u, delta, z;
    ChannelTensor<Storage*> out;
    ProjectionTensor B, C;
    const float *A, *D, *delta_bias, *initial_state, *part_states, *part_sizes;
    float *final_state, *checkpoints;
    const i64* cu_seqlens;
    Sizes sizes;
    i64 flags;
};

#if TURNS
#include "forward_turns.cuh"
#else
#include "forward_states.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
selective_scan_forward(const Storage* u, const Storage* delta, const float* A, const Storage* B, const Storage* C,
                       const float* D, const Storage* z, const float* delta_bias, const float* initial_state,
                       const float* part_states, const float* part_sizes, Storage* out, float* final_state,
                       float* checkpoints, const i64* cu_seqlens, i64 batch, i64 channels, i64 time, i64 states,
                       i64 group_channels, i64 sequences, i64 parts, i64 flags,
                       i64 u_batch, i64 u_channel, i64 u_time, i64 delta_batch, i64 delta_channel,
                       i64 delta_time, i64 z_batch, i64 z_channel, i64 z_time, i64 out_batch, i64 out_channel,
                       i64 out_time, i64 B_batch, i64 B_group, i64 B_state, i64 B_time, i64 C_batch, i64 C_group,
                       i64 C_state, i64 C_time) {
    Forward({{u, u_batch, u_channel, u_time},
             {delta, delta_batch, delta_channel, delta_time},
             {z, z_batch, z_channel, z_time},
             {out, out_batch, out_channel, out_time},
             {B, B_batch, B_group, B_state, B_time, bool(flags & B_CONTIGUOUS)},
             {C, C_batch, C_group, C_state, C_time, bool(flags & C_CONTIGUOUS)},
             A, D, delta_bias, initial_state, part_states, part_sizes, final_state, checkpoints, cu_seqlens,
             {batch, channels, time, states, group_channels, sequences, parts},
             flags})
        .run();
}
