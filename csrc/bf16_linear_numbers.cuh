// How the kernels read, round and write numbers: x is widened to fp32, W and bias are also rounded to bf16, and y is
// rounded to its type.
#pragma once

#include "bf16_linear.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>
#else
#include "cuda_on_cpu.h"
#endif

namespace {

using bf16 = __nv_bfloat16;

constexpr int WARP = 32;  // lanes; fixed by CUDA

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ inline float widened(float value) { return value; }
__device__ inline float widened(bf16 value) { return __bfloat162float(value); }
__device__ inline float rounded(float weight) { return __bfloat162float(__float2bfloat16_rn(weight)); }
__device__ inline float rounded(bf16 weight) { return __bfloat162float(weight); }

__device__ inline void store(float* y, float value) { *y = value; }
__device__ inline void store(bf16* y, float value) { *y = __float2bfloat16_rn(value); }

__device__ inline float bias_of(const Problem& p, int64_t row) {
    if (p.bias == nullptr) return 0.0f;
    return p.bias_bf16 ? widened(static_cast<const bf16*>(p.bias)[row])
                       : rounded(static_cast<const float*>(p.bias)[row]);
}

// The number of weights in 16 bytes: 4 in fp32, 8 in bf16.
template <typename W>
constexpr int WIDTH = 16 / sizeof(W);

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T values[N];
};

// Stores integers of 8 bytes: from a pack of bf16 the compiler would store some element by element.
template <int N>
__device__ inline void store(bf16* y, Pack<bf16, N> pack) {
    Pack<uint64_t, N / 4> words = {};
#pragma unroll
    for (int i = 0; i < N; i++) words.values[i / 4] |= uint64_t(__bfloat16_as_ushort(pack.values[i])) << i % 4 * 16;
    *reinterpret_cast<Pack<uint64_t, N / 4>*>(y) = words;
}

template <int N>
__device__ inline void store(bf16* y, Pack<float, N> pack) {
    Pack<bf16, N> low;
#pragma unroll
    for (int i = 0; i < N; i++) low.values[i] = __float2bfloat16_rn(pack.values[i]);
    store(y, low);
}

}  // namespace
