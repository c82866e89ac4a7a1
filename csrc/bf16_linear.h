// The problem that csrc/bindings.cpp hands to bf16_linear.cu or to bf16_linear_cpu.cpp, in plain C++.
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

constexpr int AUTO = -1;  // the launcher takes the version that suits the problem

// In csrc/bf16_linear.cu. Both return null, or a message that says what went wrong. `stream` is a cudaStream_t of the
// current device.
const char* bf16_linear_cuda(const Problem& problem, int version, void* stream);
const char* bf16_linear_cuda_version(const Problem& problem, int* version);  // that AUTO takes, 0 to 5
