// What csrc/bindings.cpp hands to its two implementations, bf16_linear.cu and bf16_linear_cpu.cpp; no torch, no CUDA header.
#pragma once

#include <cstdint>

// y (n, m) = x (n, k) times the transpose of bf16(weight (m, k)), plus bf16(bias (m)); bf16() rounds to nearest even.
// Products and sums are fp32. All arrays are row-major and contiguous; y has x's type, and is rounded to it once.
struct Problem {
    const void* x;
    const void* weight;
    const void* bias;  // may be null
    void* y;
    int64_t n, m, k;
    bool x_bf16, weight_bf16, bias_bf16;  // else fp32
};

constexpr int AUTO = -1;  // a launcher takes the version that suits the shape

// csrc/bf16_linear.cu. Both return null, or what went wrong. `stream` is a cudaStream_t of the current device.
const char* bf16_linear_cuda(const Problem& problem, int version, void* stream);
const char* bf16_linear_cuda_choice(const Problem& problem, int* version);  // what AUTO takes, 0 to 5
