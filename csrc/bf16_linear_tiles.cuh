// The version for many vectors: v5 of csrc/bf16_linear.cu, on tensor cores (wmma), from sm_80 on.
//
//   A block   computes TILE_N vectors x TILE_M rows of y, and goes along k in steps of TILE_K.
//   A step    brings TILE_N x TILE_K of x and TILE_M x TILE_K of W into shared memory, both as bf16. While the tensor
//             cores multiply these tiles, the threads already read the next ones from global memory.
//   A warp    computes WARP_N x WARP_M results of the block, as fragments of 16 x 16.
//
// The sizes in capitals are parameters. Change one, and either every result keeps its bits (the sums run along k in the
// same order for all sizes) or the compiler stops and says why. tests/test_cuda_changes.py tries other sizes; `make
// cuda-check` tells whether they spill registers, and `benchmark.py traffic` whether they cause bank conflicts.
#pragma once

#include "bf16_linear_numbers.cuh"

namespace {

constexpr int TILE_N = 128, TILE_M = 64, TILE_K = 64;
constexpr int WARP_N = 32, WARP_M = 32;
constexpr int FRAGMENT = 16;  // N, M and K of a product of tensor cores; fixed by wmma

constexpr int V5_WARPS = TILE_N / WARP_N * (TILE_M / WARP_M);
constexpr int V5_THREADS = V5_WARPS * WARP;
constexpr int FRAGMENTS_N = WARP_N / FRAGMENT, FRAGMENTS_M = WARP_M / FRAGMENT;
constexpr int LD = TILE_K + 8;        // of a tile in shared memory, in numbers of 2 bytes
constexpr int LD_STAGE = WARP_M + 8;  // of FRAGMENT x WARP_M results of a warp on their way out, of 4 bytes
constexpr int TILE_BYTES = (TILE_N + TILE_M) * LD * 2, STAGE_BYTES = V5_WARPS * FRAGMENT * LD_STAGE * 4;
constexpr int V5_SHARED = TILE_BYTES > STAGE_BYTES ? TILE_BYTES : STAGE_BYTES;  // the results take the tiles' place

static_assert(TILE_N % WARP_N == 0, "v5: the warps must cover the tile: WARP_N must divide TILE_N");
static_assert(TILE_M % WARP_M == 0, "v5: the warps must cover the tile: WARP_M must divide TILE_M");
static_assert(WARP_N % FRAGMENT == 0, "v5: a warp computes fragments of 16 x 16: 16 must divide WARP_N");
static_assert(WARP_M % FRAGMENT == 0, "v5: a warp computes fragments of 16 x 16: 16 must divide WARP_M");
static_assert(TILE_K % FRAGMENT == 0, "v5: a fragment takes 16 of k: 16 must divide TILE_K");
static_assert(WARP_M == 32 || WARP_M == 64,
              "v5: lanes write whole lines, and lines of fewer than 32 results share banks: WARP_M is 32 or 64");
static_assert(V5_THREADS <= 1024, "v5: a block has at most 1024 threads: larger WARP_N, WARP_M or a smaller tile");
static_assert(V5_SHARED <= 48 * 1024,
              "v5: a launch gets 48 KB of shared memory: make TILE_N, TILE_M or TILE_K smaller");
static_assert(LD % 8 == 0 && LD_STAGE % 8 == 0, "v5: wmma loads and stores lines that start at multiples of 16 bytes");
static_assert(LD / 8 % 2 == 1,
              "v5: eight lines of a tile must lie in different banks: LD must be an odd multiple of 8");

// Carries one thread's share of a tile from global to shared memory, in packs of 16 bytes: read() starts early, write()
// waits until the tile in shared memory is free.
template <typename T, int ROWS>
struct Carrier {
    static constexpr int PACKS = TILE_K / WIDTH<T>;          // of a row of the tile
    static constexpr int LOADS = ROWS * PACKS / V5_THREADS;  // of this thread
    static_assert(ROWS * PACKS % V5_THREADS == 0,
                  "v5: all threads must carry equally many packs of a tile: larger tiles, or larger WARP_N or WARP_M");
    Pack<T, WIDTH<T>> packs[LOADS];

    __device__ void read(const T* matrix, int64_t first_row, int64_t rows, int64_t first_k, int64_t k) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * V5_THREADS;
            const int64_t row = first_row + at / PACKS, column = first_k + at % PACKS * WIDTH<T>;
            packs[i] = {};  // zeros past the end add nothing
            if (row < rows && column < k)
                packs[i] = *reinterpret_cast<const Pack<T, WIDTH<T>>*>(matrix + row * k + column);
        }
    }

    __device__ void write(bf16* tile) const {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * V5_THREADS;
            store(tile + at / PACKS * LD + at % PACKS * WIDTH<T>, packs[i]);
        }
    }
};

template <typename W>
__global__ void __launch_bounds__(V5_THREADS) v5_tensor_cores(Problem p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using namespace nvcuda;
    bf16* const x_tile = reinterpret_cast<bf16*>(shared_memory);  // [TILE_N][LD]
    bf16* const w_tile = x_tile + TILE_N * LD;                    // [TILE_M][LD]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_n = warp / (TILE_M / WARP_M) * WARP_N;  // where in the block's tile the warp's results begin
    const int warp_m = warp % (TILE_M / WARP_M) * WARP_M;
    const int64_t tiles_m = (p.m + TILE_M - 1) / TILE_M;
    const int64_t first_n = blockIdx.x / tiles_m * TILE_N, first_m = blockIdx.x % tiles_m * TILE_M;
    const bf16* const x = static_cast<const bf16*>(p.x);
    const W* const w = static_cast<const W*>(p.weight);

    wmma::fragment<wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float> sums[FRAGMENTS_N][FRAGMENTS_M];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_N; i++) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_M; j++) wmma::fill_fragment(sums[i][j], 0.0f);
    }

    Carrier<bf16, TILE_N> x_next;
    Carrier<W, TILE_M> w_next;
    x_next.read(x, first_n, p.n, 0, p.k);
    w_next.read(w, first_m, p.m, 0, p.k);
    for (int64_t first_k = 0; first_k < p.k; first_k += TILE_K) {
        x_next.write(x_tile);
        w_next.write(w_tile);
        __syncthreads();
        if (first_k + TILE_K < p.k) {  // on their way while the tensor cores work
            x_next.read(x, first_n, p.n, first_k + TILE_K, p.k);
            w_next.read(w, first_m, p.m, first_k + TILE_K, p.k);
        }
#pragma unroll
        for (int k = 0; k < TILE_K; k += FRAGMENT) {
            // A row of W is a column of its transpose, hence col_major.
            wmma::fragment<wmma::matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, bf16, wmma::row_major> a[FRAGMENTS_N];
            wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, bf16, wmma::col_major> b[FRAGMENTS_M];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_N; i++) {
                wmma::load_matrix_sync(a[i], x_tile + (warp_n + FRAGMENT * i) * LD + k, LD);
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS_M; j++) {
                wmma::load_matrix_sync(b[j], w_tile + (warp_m + FRAGMENT * j) * LD + k, LD);
            }
#pragma unroll
            for (int i = 0; i < FRAGMENTS_N; i++) {
#pragma unroll
                for (int j = 0; j < FRAGMENTS_M; j++) wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
            }
        }
        __syncthreads();  // before the next tile overwrites this one
    }

    // FRAGMENT x WARP_M results at a time go through shared memory, so that neighbouring lanes write neighbours in y.
    constexpr int LANES_OF_A_LINE = WARP_M / 4, LINES_AT_ONCE = WARP / LANES_OF_A_LINE;
    float* const stage = reinterpret_cast<float*>(shared_memory) + warp * FRAGMENT * LD_STAGE;
    const int column = lane % LANES_OF_A_LINE * 4;
    const int64_t row_of_w = first_m + warp_m + column;
    float bias[4];
#pragma unroll
    for (int j = 0; j < 4; j++) bias[j] = row_of_w + j < p.m ? bias_of(p, row_of_w + j) : 0.0f;
#pragma unroll
    for (int part = 0; part < FRAGMENTS_N; part++) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_M; j++) {
            wmma::store_matrix_sync(stage + FRAGMENT * j, sums[part][j], LD_STAGE, wmma::mem_row_major);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < FRAGMENT / LINES_AT_ONCE; i++) {
            const int line = lane / LANES_OF_A_LINE + LINES_AT_ONCE * i;
            const int64_t vector = first_n + warp_n + FRAGMENT * part + line;
            Pack<float, 4> sum = *reinterpret_cast<const Pack<float, 4>*>(stage + line * LD_STAGE + column);
#pragma unroll
            for (int j = 0; j < 4; j++) sum.values[j] += bias[j];
            bf16* const y = static_cast<bf16*>(p.y) + vector * p.m + row_of_w;
            if (vector < p.n && row_of_w + 4 <= p.m && p.m % 4 == 0) {
                store(y, sum);
            } else if (vector < p.n) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (row_of_w + j < p.m) store(y + j, sum.values[j]);
                }
            }
        }
        __syncwarp();
    }
#else
    __trap();  // compiled for less than sm_80: the launcher must not have come here
#endif
}

}  // namespace
