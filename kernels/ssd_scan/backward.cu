// The gradients of an SSD scan, for chunks of 64 steps of each head, from the states S before the chunks and the gradients G
// of the states after them (states.cu). With s_i = Σ_{t≤i} dt_t·A, L_ij = exp(s_i - s_j) where i ≥ j, else 0, and w_j =
// exp(s_63 - s_j):
//     X_ij = dy_i·x_j
//     u_j  = Σ_i L_ij·(C_i·B_j)·dy_i + w_j·G·B_j            x_grad_j  = dt_j·u_j + D·dy_j
//     C_grad_i = Σ_j L_ij·dt_j·X_ij·B_j + exp(s_i)·Sᵀ·dy_i   B_grad_j = Σ_i L_ij·dt_j·X_ij·C_i + dt_j·w_j·Gᵀ·x_j
//     a_grad_t = Σ_{i≥t>j} L_ij·dt_j·X_ij·(C_i·B_j) + Σ_{i≥t} exp(s_i)·dy_i·S·C_i + Σ_{j<t} dt_j·w_j·x_j·G·B_j + exp(s_63)·S·G
//     dt_grad_t = f_t·(x_t·u_t + A·a_grad_t), with f_t the derivative of the step size by the raw dt
//     A_grad = Σ_t dt_t·a_grad_t          D_grad = Σ_t X_tt          bias_grad = Σ_t dt_grad_t
// where dt is the step size and a_grad the gradient of dt·A. D_grad is of one number a head.
//
// Traffic of a step and head tile: SIZE elements of x, dy and x_grad each, once for each block of STATES states, and x_grad once more
// for each block but one; and SIZE · state_size / 32 of S and G.
//
// With three STAGES warpgroups have work of their own; with fewer all warps do the same.
#if STAGES == 3
#include "backward_apart.cuh"
#else
#include "backward_in_step.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ssd_scan_backward(const Storage* x, const void* dt, const float* A, const Storage* B, const Storage* C, const float* D,
                  const float* dt_bias, const Storage* out_grad, const int* cu_seqlens, const int* seq_idx,
                  const Storage* states, const Storage* adjoints, Storage* x_grad, float* dt_grad,
                  float* head_grads, void* B_grad, void* C_grad, char* workspace, i64 batch, i64 time, i64 heads, i64 groups,
                  i64 head_size, i64 state_size, i64 sequences, i64 slots, i64 splits, i64 D_channel, i64 flags,
                  i64 dt_low, i64 dt_high, i64 x_batch, i64 x_time, i64 x_head, i64 dt_batch, i64 dt_time, i64 dt_head,
                  i64 B_batch, i64 B_time, i64 B_group, i64 C_batch, i64 C_time, i64 C_group, i64 grad_batch,
                  i64 grad_time, i64 grad_head) {
    Backward({{x, x_batch, x_time, x_head},
              {B, B_batch, B_time, B_group},
              {C, C_batch, C_time, C_group},
              {out_grad, grad_batch, grad_time, grad_head},
              {dt, dt_batch, dt_time, dt_head, A, dt_bias, seq_idx, time, flags, __uint_as_float(unsigned(dt_low)),
               __uint_as_float(unsigned(dt_high))},
              D, D_channel, cu_seqlens, states, adjoints, x_grad, dt_grad, head_grads, B_grad, C_grad,
              {batch, time, heads, groups, head_size, state_size, sequences, slots},
              splits, workspace})
        .run();
}
