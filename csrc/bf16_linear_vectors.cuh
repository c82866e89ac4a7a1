// The versions for one vector or a few: v0 to v4 of csrc/bf16_linear.cu, which says when each of them runs.
//
// The sizes in capitals are parameters. Change one, and either every result stays right or the compiler stops and says
// why; tests/test_cuda_changes.py tries other sizes.
#pragma once

#include "bf16_linear_numbers.cuh"

namespace {

constexpr int WARPS = 8;          // of a block
constexpr int LOADS_AT_ONCE = 4;  // of 16 bytes of W, by a lane of v2 and v3
constexpr int MAX_ROWS = 4;       // of W that a warp of v3 reads side by side
constexpr int MAX_SPLIT = 8;      // warps of v3 that share a row of W
constexpr int MAX_VECTORS = 8;    // of v4, which uses each weight for all of them
constexpr int THREADS = WARPS * WARP;
static_assert(THREADS <= 1024, "a block has at most 1024 threads: WARPS must be at most 32");
static_assert(WARPS % MAX_SPLIT == 0, "MAX_SPLIT warps of a block share a row: MAX_SPLIT must divide WARPS");

// ---- sums

// The packs come by value: through a reference the compiler would read element by element.
template <typename W, typename X>
__device__ inline float dot(Pack<W, WIDTH<W>> w, Pack<X, WIDTH<W>> x, float sum) {
#pragma unroll
    for (int i = 0; i < WIDTH<W>; i++) sum += rounded(w.values[i]) * widened(x.values[i]);
    return sum;
}

__device__ inline float sum_of_warp(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// SPLIT warps share COUNT sums: each has a part of every sum. The first warp adds the others' parts in a fixed order.
template <int COUNT, int SPLIT>
__device__ inline void add_parts(float (&sum)[COUNT], int warp, int lane) {
    float* partial = reinterpret_cast<float*>(shared_memory);  // [WARPS][COUNT]
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) partial[warp * COUNT + i] = sum[i];
    }
    __syncthreads();
    if (warp % SPLIT == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            for (int other = 1; other < SPLIT; other++) sum[i] += partial[(warp + other) * COUNT + i];
        }
    }
}

// ---- v0: a thread per row

template <typename W, typename X>
__global__ void v0_thread_per_row(Problem p) {
    const int64_t result = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;  // row by row, vector after vector
    if (result >= p.n * p.m) return;
    const int64_t row = result % p.m;
    const W* w = static_cast<const W*>(p.weight) + row * p.k;
    const X* x = static_cast<const X*>(p.x) + result / p.m * p.k;
    float sum = 0.0f;
    for (int64_t i = 0; i < p.k; i++) sum += rounded(w[i]) * widened(x[i]);
    store(static_cast<X*>(p.y) + result, sum + bias_of(p, row));
}

// ---- v1: a warp per row

template <typename W, typename X>
__global__ void v1_warp_per_row(Problem p) {
    const int lane = threadIdx.x % WARP;
    const int64_t result = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (result >= p.n * p.m) return;  // the whole warp
    const int64_t row = result % p.m;
    const W* w = static_cast<const W*>(p.weight) + row * p.k;
    const X* x = static_cast<const X*>(p.x) + result / p.m * p.k;
    float sum = 0.0f;
    for (int64_t i = lane; i < p.k; i += WARP) sum += rounded(w[i]) * widened(x[i]);
    sum = sum_of_warp(sum);
    if (lane == 0) store(static_cast<X*>(p.y) + result, sum + bias_of(p, row));
}

// ---- v2: 16-byte loads, four at once

template <typename W, typename X>
__global__ void v2_wide_loads(Problem p) {
    const int lane = threadIdx.x % WARP;
    const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= p.m) return;
    const auto* w = reinterpret_cast<const Pack<W, WIDTH<W>>*>(static_cast<const W*>(p.weight) + row * p.k);
    const auto* x = static_cast<const Pack<X, WIDTH<W>>*>(p.x);
    const int64_t packs = p.k / WIDTH<W>;
    float sum = 0.0f;
    int64_t i = lane;
    for (; i + (LOADS_AT_ONCE - 1) * WARP < packs; i += LOADS_AT_ONCE * WARP) {
        Pack<W, WIDTH<W>> ahead[LOADS_AT_ONCE];
#pragma unroll
        for (int j = 0; j < LOADS_AT_ONCE; j++) ahead[j] = w[i + j * WARP];
#pragma unroll
        for (int j = 0; j < LOADS_AT_ONCE; j++) sum = dot(ahead[j], x[i + j * WARP], sum);
    }
    for (; i < packs; i += WARP) sum = dot(w[i], x[i], sum);
    sum = sum_of_warp(sum);
    if (lane == 0) store(static_cast<X*>(p.y) + row, sum + bias_of(p, row));
}

// ---- v3: ROWS rows for each warp, or SPLIT warps for each row

template <typename W, typename X, int ROWS, int SPLIT>
__global__ void v3_rows_and_splits(Problem p) {
    static_assert(LOADS_AT_ONCE % ROWS == 0, "v3 reads one pack of each of its ROWS: ROWS must divide LOADS_AT_ONCE");
    static_assert(WARPS % SPLIT == 0, "v3: SPLIT warps of a block share a row, so SPLIT must divide WARPS");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp % SPLIT;
    const int64_t first_row = (int64_t(blockIdx.x) * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    const auto* x = static_cast<const Pack<X, WIDTH<W>>*>(p.x);
    const int64_t packs = p.k / WIDTH<W>;
    const Pack<W, WIDTH<W>>* w[ROWS];
    float sum[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t row = first_row + r < p.m ? first_row + r : p.m - 1;  // past the end: the last, not stored
        w[r] = reinterpret_cast<const Pack<W, WIDTH<W>>*>(static_cast<const W*>(p.weight) + row * p.k);
    }
    if (first_row < p.m) {
#pragma unroll LOADS_AT_ONCE / ROWS
        for (int64_t i = part * WARP + lane; i < packs; i += SPLIT * WARP) {
            Pack<W, WIDTH<W>> ahead[ROWS];
            const Pack<X, WIDTH<W>> shared_x = x[i];
#pragma unroll
            for (int r = 0; r < ROWS; r++) ahead[r] = w[r][i];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] = dot(ahead[r], shared_x, sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = sum_of_warp(sum[r]);
    if (SPLIT > 1) add_parts<ROWS, SPLIT>(sum, warp, lane);
    if (lane == 0 && part == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int64_t row = first_row + r;
            if (row < p.m) store(static_cast<X*>(p.y) + row, sum[r] + bias_of(p, row));
        }
    }
}

// ---- v4: N vectors at once; SPLIT warps for each row, as in v3

template <typename W, typename X, int N, int SPLIT>
__global__ void v4_few_vectors(Problem p) {
    static_assert(WARPS % SPLIT == 0, "v4: SPLIT warps of a block share a row, so SPLIT must divide WARPS");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp % SPLIT;
    const int64_t blocks_of_rows = (p.m + WARPS / SPLIT - 1) / (WARPS / SPLIT);
    const int64_t row = blockIdx.x % blocks_of_rows * (WARPS / SPLIT) + warp / SPLIT;
    const int64_t first_vector = blockIdx.x / blocks_of_rows * N;
    const int64_t packs = p.k / WIDTH<W>;
    float sum[N] = {};
    if (row < p.m) {
        const auto* w = reinterpret_cast<const Pack<W, WIDTH<W>>*>(static_cast<const W*>(p.weight) + row * p.k);
        const Pack<X, WIDTH<W>>* x[N];
#pragma unroll
        for (int v = 0; v < N; v++) {
            const int64_t vector = first_vector + v < p.n ? first_vector + v : p.n - 1;  // past the end, as in v3
            x[v] = reinterpret_cast<const Pack<X, WIDTH<W>>*>(static_cast<const X*>(p.x) + vector * p.k);
        }
#pragma unroll 2
        for (int64_t i = part * WARP + lane; i < packs; i += SPLIT * WARP) {
            const Pack<W, WIDTH<W>> shared_w = w[i];
#pragma unroll
            for (int v = 0; v < N; v++) sum[v] = dot(shared_w, x[v][i], sum[v]);
        }
    }
#pragma unroll
    for (int v = 0; v < N; v++) sum[v] = sum_of_warp(sum[v]);
    if (SPLIT > 1) add_parts<N, SPLIT>(sum, warp, lane);
    if (lane == 0 && part == 0 && row < p.m) {
#pragma unroll
        for (int v = 0; v < N; v++) {
            if (first_vector + v < p.n) {
                store(static_cast<X*>(p.y) + (first_vector + v) * p.m + row, sum[v] + bias_of(p, row));
            }
        }
    }
}

}  // namespace
