// The words of CUDA that csrc/bf16_linear.cu and its headers use, defined for g++, which compiles those very files to
// run them on a CPU. The words mean what CUDA's guides say: a warp is 32 threads, a collective needs every thread that
// it names, a fragment is spread over the lanes as PTX documents it. cuda_on_cpu.cpp runs the threads and counts.
#pragma once

#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ "C"  // `extern __shared__ …` becomes `extern "C" …`: the one buffer that the runtime defines

struct dim3 {
    unsigned x;
};
extern dim3 threadIdx, blockIdx, blockDim;  // of the thread that runs at the moment

// ---- bf16

struct __nv_bfloat16 {
    uint16_t bits;
};

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return {0x7fff};  // the NaN that the hardware gives
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// ---- threads that meet

void __syncthreads();
void __syncwarp(unsigned lanes = 0xffffffffu);
float __shfl_xor_sync(unsigned lanes, float value, int mask);

// ---- tensor cores: 16 x 16 x 16, bf16 in, fp32 out

void ldmatrix(const void* line, __nv_bfloat16* fragment);  // each lane brings 16 bytes and takes its part of the matrix
void mma(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c);
void require(bool holds, const char* message);

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "this emulator knows fragments of 16 x 16 x 16 only");
    T x[8];
};

// The row and column of the matrix where x[i] of a lane belongs: two neighbours in each quarter (PTX,
// mma.m16n8k16). The second operand is held as rows of its transpose, so its places are those of the first.
inline int row_of(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
inline int column_of(int lane, int i) { return lane % 4 * 2 + i % 2 + i / 4 * 8; }

template <typename Fragment>
void fill_fragment(Fragment& f, float value) {
    for (float& x : f.x) x = value;
}

// Works as ldmatrix.x4: lanes 0 to 15 read the first half of a row, 16 to 31 the second half, 16 bytes each.
template <typename Fragment>
void load(Fragment& f, const __nv_bfloat16* matrix, unsigned stride) {
    require(reinterpret_cast<uintptr_t>(matrix) % 32 == 0 && stride % 8 == 0, "load_matrix_sync: misaligned matrix");
    struct alignas(16) Line {
        __nv_bfloat16 values[8];
    };
    const int lane = threadIdx.x % 32;
    const Line line = *reinterpret_cast<const Line*>(matrix + lane % 16 * stride + lane / 16 * 8);
    ldmatrix(&line, f.x);
}

using A = fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major>;
using B = fragment<matrix_b, 16, 16, 16, __nv_bfloat16, col_major>;
using C = fragment<accumulator, 16, 16, 16, float>;

inline void load_matrix_sync(A& f, const __nv_bfloat16* matrix, unsigned stride) { load(f, matrix, stride); }
inline void load_matrix_sync(B& f, const __nv_bfloat16* matrix, unsigned stride) { load(f, matrix, stride); }
inline void mma_sync(C& d, const A& a, const B& b, const C& c) { mma(d.x, a.x, b.x, c.x); }

inline void store_matrix_sync(float* matrix, const C& f, unsigned stride, layout_t) {
    require(reinterpret_cast<uintptr_t>(matrix) % 32 == 0 && stride % 4 == 0, "store_matrix_sync: misaligned matrix");
    __syncwarp();  // before and not after: the caller must see to it that other lanes see the values
    struct alignas(8) Pair {
        float values[2];
    };
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 8; i += 2) {
        const Pair pair = {{f.x[i], f.x[i + 1]}};
        *reinterpret_cast<Pair*>(matrix + row_of(lane, i) * stride + column_of(lane, i)) = pair;
    }
}

}  // namespace nvcuda::wmma

// ---- the host's side

enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };

cudaError_t cudaGetDevice(int* id);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int id);
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

// Runs the blocks one after the other. Returns null, or a message that says what went wrong.
const char* run_grid(int64_t blocks, int threads, int shared_bytes, void (*thread)(void*), void* argument);

template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void*,
                   Parameters... arguments) {
    auto thread = [&] { kernel(arguments...); };
    return run_grid(blocks, threads, shared_bytes, [](void* it) { (*static_cast<decltype(thread)*>(it))(); }, &thread);
}
