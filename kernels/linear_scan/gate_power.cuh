// Powers of a gate that all time steps share: a run of n rows scales the state that enters it by gate^n.
#pragma once
#include "../linear_scan/step.cuh"

// A gate's power in float64, so that its rounding errors do not show in that of float32.
struct WidePower {
    double re = 1, im = 0;

    __device__ WidePower() {}
    __device__ WidePower(double re, double im) : re(re), im(im) {}
    __device__ explicit WidePower(float gate) : re(gate) {}
    __device__ explicit WidePower(Complex gate) : re(gate.re), im(gate.im) {}
    // Of a real state, the imaginary part stays 0, and the compiler leaves it out.
    __device__ WidePower operator*(const WidePower& other) const {
        if constexpr (sizeof(State) == 4) return {re * other.re, 0};
        return {re * other.re - im * other.im, re * other.im + im * other.re};
    }
    __device__ WidePower raised(unsigned n) const {
        WidePower all, square = *this;
#pragma unroll 1
        for (; n; n >>= 1, square = square * square)
            if (n & 1) all = all * square;
        return all;
    }
};

__device__ inline void narrow(const WidePower& wide, float& scale, float& error) {
    scale = float(wide.re), error = float(wide.re - scale);
}
__device__ inline void narrow(const WidePower& wide, Complex& scale, Complex& error) {
    scale = {float(wide.re), float(wide.im)};
    error = {float(wide.re - scale.re), float(wide.im - scale.im)};
}

// gate^n, with what rounding took from it.
struct PowerOf {
    State scale, error_term;

    __device__ PowerOf() {}
    __device__ explicit PowerOf(const WidePower& wide) { narrow(wide, scale, error_term); }
    // The state after a run that is scaled so.
    __device__ State operator()(State x, State shift) const { return scale * x + (error_term * x + shift); }
};
