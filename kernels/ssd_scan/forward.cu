// The forward pass of an SSD scan. For each head, in chunks of 64 steps, with s_i = Σ_{t≤i} dt_t·A within a chunk,
//     y_i   = exp(s_i)·S·C_i + Σ_{j≤i} exp(s_i - s_j)·dt_j·(C_i·B_j)·x_j + D·x_i,       out_i = y_i·silu(z_i), or y_i without z
//     S_end = exp(s_63)·S + Σ_j exp(s_63 - s_j)·dt_j·x_j ⊗ B_j
//
// GATED says whether there may be a z, and a D that has a number for each channel and not one for each head.
//
// Traffic of a step and head: SIZE elements of x, of z and of out. B and C, which the heads of a group share, come from the L2.
//
// A CTA walks along the chunks of its heads: some warps have the states, others the outputs. Decays are exponentials of differences of
// prefix sums, which are not positive for i ≥ j if A ≤ 0 and dt ≥ 0.
//
// OUTPUTS is the number of warpgroups that compute outputs: one, which goes along with that of the states, or two that take turns.
#if OUTPUTS == 1
#include "forward_in_step.cuh"
#else
#include "forward_apart.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
ssd_scan_forward(const Storage* x, const void* dt, const float* A, const Storage* B, const Storage* C, const float* D,
                 const Storage* z, const float* dt_bias, const float* initial_state, const int* cu_seqlens,
                 const int* seq_idx, Storage* out, Storage* ungated, float* final_state, char* workspace,
                 i64 batch, i64 time, i64 heads,
                 i64 groups, i64 head_size, i64 state_size, i64 sequences, i64 slots, i64 D_channel, i64 flags, i64 dt_low,
                 i64 dt_high, i64 x_batch, i64 x_time, i64 x_head, i64 dt_batch, i64 dt_time, i64 dt_head, i64 B_batch,
                 i64 B_time, i64 B_group, i64 C_batch, i64 C_time, i64 C_group, i64 z_batch, i64 z_time, i64 z_head) {
    Forward({{x, x_batch, x_time, x_head},
             {B, B_batch, B_time, B_group},
             {C, C_batch, C_time, C_group},
             {z, z_batch, z_time, z_head},
             {dt, dt_batch, dt_time, dt_head, A, dt_bias, seq_idx, time, flags, __uint_as_float(unsigned(dt_low)),
              __uint_as_float(unsigned(dt_high))},
             D, D_channel, initial_state, cu_seqlens, out, ungated, final_state,
             {batch, time, heads, groups, head_size, state_size, sequences, slots},
             workspace})
        .run();
}
