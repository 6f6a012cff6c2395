// A head's states as they run along time, in the registers of four warps: SIZE channels, 16 a warp, with COLUMNS states each.
#pragma once
#include "products.cuh"
#include "steps.cuh"

template <int COLUMNS>
struct RunningStates {
    enum : int { TILES = 8, BLOCKS = COLUMNS / 64 };  // of 64 columns, what a warp multiplies at a time
    float sums[BLOCKS][TILES][4];

    // sums = decay · sums + Σ_t weights[t] · x_t ⊗ B_t. `weights` are in shared memory.
    template <class TX, class TB>
    __device__ void add(TX x, TB B, const float* weights, float decay, int row) {
#if WIDE
        scale(decay);
        const LeftOperand<TX> left{across_k(x), weights, row};
#pragma unroll 1
        for (int t = 0; t < 64; t += 16) {  // what is unrolled stays in the instruction cache
            const Fragment a = left.load(t);
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) multiply_registers(sums[block], a, across_k(B, 64 * block), t);
        }
#else
        Fragment lefts[4];
        load_lefts(lefts, x, weights, row);
        start_add(lefts, B, decay);
        finish_add();
#endif
    }

    // x, scaled.
    template <class TX>
    struct LeftOperand {
        Operand<ACROSS_K, TX> x;
        const float* weights;
        int row;
        unsigned lane = x.lane_of_A(row);

        // 16 steps from t on.
        __device__ Fragment load(int t) const {
            const float2 first = *reinterpret_cast<const float2*>(weights + t + lane_column());
            const float2 second = *reinterpret_cast<const float2*>(weights + t + 8 + lane_column());
            return scaled(x.load_A(lane, t), first, second);
        }
    };
    __device__ void scale(float decay) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) sums[block][n][k] *= decay;
    }
    // `add` in three parts. Tensor cores work between the last two.
    template <class TX>
    __device__ static void load_lefts(Fragment (&lefts)[4], TX x, const float* weights, int row) {
        const LeftOperand<TX> left{across_k(x), weights, row};
#pragma unroll
        for (int t = 0; t < 64; t += 16) lefts[t / 16] = left.load(t);
    }
    template <class TB>
    __device__ void start_add(const Fragment (&lefts)[4], TB B, float decay) {
        scale(decay);
        begin_products();
#pragma unroll
        for (int t = 0; t < 64; t += 16)
#pragma unroll
            for (int block = 0; block < BLOCKS; block++)
                multiply_registers(sums[block], lefts[t / 16], across_k(B, 64 * block), t);
        close_products();
    }
    __device__ void finish_add() {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) wait_for_products<0>(sums[block]);
    }

    // To shared memory, in the elements' type.
    __device__ void keep(Tile<SIZE, COLUMNS> to, int row) const {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) store_sums(to, sums[block], row, 64 * block);
    }

    // From float32 in memory, or zeros, and back: `rows` rows of `stride` numbers, of which `columns` are there.
    __device__ void load(const float* from, i64 stride, int rows, int columns, int row) {
#pragma unroll
        for (int i = 0; i < BLOCKS * TILES; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int r = row + 8 * k + lane_row(), c = 8 * i + lane_column();
                float2 value = make_float2(0, 0);
                if (from && r < rows && c < columns) value = *reinterpret_cast<const float2*>(from + r * stride + c);
                sums[i / TILES][i % TILES][2 * k] = value.x, sums[i / TILES][i % TILES][2 * k + 1] = value.y;
            }
    }
    __device__ void store(float* to, i64 stride, int rows, int columns, int row) const {
#pragma unroll
        for (int i = 0; i < BLOCKS * TILES; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int r = row + 8 * k + lane_row(), c = 8 * i + lane_column();
                const float(&values)[4] = sums[i / TILES][i % TILES];
                if (r < rows && c < columns) store_float2(to + r * stride + c, values[2 * k], values[2 * k + 1]);
            }
    }
};
