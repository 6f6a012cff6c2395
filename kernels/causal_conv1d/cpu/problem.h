/* A causal convolution as numbers, and how it is cut into tasks. */
#include "cpu_sum.h"

/* Channels that go through time together, steps that they go at a time, and taps. */
enum { TOGETHER = 64, STEPS = 128, LEAST_WIDTH = 2, MOST_WIDTH = 8 };

/* (B, D, L), or states (rows, D, W - 1); strides are in bytes. */
typedef struct {
    char *at; /* null: not there */
    int type;
    int64_t stride[3];
} Tensor;

enum { X, Y, Y_GRAD, X_GRAD, INITIAL, FINAL, FINAL_GRAD, INITIAL_GRAD, TENSORS };

typedef struct {
    int64_t batch, channels, time, width;
    int64_t sequences, *offsets; /* packed ones; 0: none */
    int silu;
    Tensor tensor[TENSORS];
    const char *weight, *bias; /* without gaps; bias null: zeros */
    int weight_type;
    const int32_t *seq_idx;             /* (B, L), or null */
    float *weight_sums, *bias_sums;     /* that tasks leave: (batch, D, W), (batch, D) */
    int64_t run;                        /* channels of a task */
} Conv;

/* A few steps, with states that are changed in place. */
typedef struct {
    int64_t batch, channels, time, width, slots, length;
    int silu;
    Tensor x, state, y;
    const char *weight, *bias;
    int weight_type;
    const int32_t *positions, *indices; /* (B,), or null */
} Update;
