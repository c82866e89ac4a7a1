// y (n, m) = x (n, k) times the transpose of bf16(W (m, k)), plus bf16(bias (m)): csrc/bf16_linear.h, on a GPU.
//
// With one vector (n = 1) each weight is used once, so the time is that of reading W: m k 4 bytes in fp32, m k 2 in
// bf16. Every version must move those bytes; they differ in how many more they move, and how many are on their way.
//
//   v0  a thread per row                     neighbours read k elements apart: a 32-byte sector for every weight,
//                                            8 times the bytes in fp32 and 16 in bf16, if no cache helps
//   v1  a warp per row                       lanes read neighbours, a shuffle reduction ends the row: W's bytes, once
//   v2  16-byte loads, four at once          the same bytes in a quarter (fp32) or an eighth (bf16) of the requests
//   v3  rows per warp, warps per row         large m: x is read once for four rows; small m: k is split over the warps
//                                            of a block, which add up in a fixed order (no atomics: same bits always)
//   v4  up to eight vectors at once          a weight is read once and used for each: m k bytes rather than n m k
//   v5  tensor cores (wmma), from sm_80      for training: a tile of 128 x 64 results reads (128 2 + 64 4) k bytes,
//                                            where v4 would read W n / 8 times
//
// v0 and v1 take any k and any address. From v2 on an array is read 16 bytes at a time, so rows must start at multiples
// of 16 bytes; the launcher sees to it. No inline PTX and one launch() for all: csrc/cuda_on_cpu/ runs this file on a
// CPU. Left out: TMA, wgmma and cp.async, which would tie the file to one generation; x in shared memory: L1 holds it.

#include "bf16_linear.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void* stream,
                   Parameters... arguments) {
    if (blocks > 2147483647) return "more blocks than a grid has";
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#else
#include "cuda_on_cpu.h"
#endif

namespace {

using bf16 = __nv_bfloat16;

constexpr int WARP = 32;
constexpr int WARPS = 8;  // of a block, from v1 on
constexpr int THREADS = WARPS * WARP;
constexpr int MAX_VECTORS = 8;  // v4

extern __shared__ __align__(128) unsigned char shared_memory[];

// ---- numbers

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

// As many elements as 16 bytes of weights hold: 4 in fp32, 8 in bf16.
template <typename W>
constexpr int WIDTH = 16 / sizeof(W);

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T values[N];
};

// As integers of 8 bytes: the compiler would store some packs element by element.
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

// By value: through a reference the compiler would read element by element.
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

// SPLIT warps have each a part of COUNT sums: the first of them adds up what its fellows found, in their order.
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
    const int64_t result =
        int64_t(blockIdx.x) * blockDim.x + threadIdx.x;  // vector after vector, in each row after row
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
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x % WARP;
    const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (row >= p.m) return;
    const auto* w = reinterpret_cast<const Pack<W, WIDTH<W>>*>(static_cast<const W*>(p.weight) + row * p.k);
    const auto* x = static_cast<const Pack<X, WIDTH<W>>*>(p.x);
    const int64_t packs = p.k / WIDTH<W>;
    float sum = 0.0f;
    int64_t i = lane;
    for (; i + (AT_ONCE - 1) * WARP < packs; i += AT_ONCE * WARP) {
        Pack<W, WIDTH<W>> ahead[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) ahead[j] = w[i + j * WARP];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) sum = dot(ahead[j], x[i + j * WARP], sum);
    }
    for (; i < packs; i += WARP) sum = dot(w[i], x[i], sum);
    sum = sum_of_warp(sum);
    if (lane == 0) store(static_cast<X*>(p.y) + row, sum + bias_of(p, row));
}

// ---- v3: ROWS rows per warp, or SPLIT warps per row

template <typename W, typename X, int ROWS, int SPLIT>
__global__ void v3_rows_and_splits(Problem p) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp % SPLIT;
    const int64_t first_row = (int64_t(blockIdx.x) * (WARPS / SPLIT) + warp / SPLIT) * ROWS;
    const auto* x = static_cast<const Pack<X, WIDTH<W>>*>(p.x);
    const int64_t packs = p.k / WIDTH<W>;
    const Pack<W, WIDTH<W>>* w[ROWS];
    float sum[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t row =
            first_row + r < p.m ? first_row + r : p.m - 1;  // past the end: read the last, store nothing
        w[r] = reinterpret_cast<const Pack<W, WIDTH<W>>*>(static_cast<const W*>(p.weight) + row * p.k);
    }
    if (first_row < p.m) {
#pragma unroll 4 / ROWS
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

// ---- v4: up to N vectors at once; SPLIT warps per row as in v3

template <typename W, typename X, int N, int SPLIT>
__global__ void v4_few_vectors(Problem p) {
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

// ---- v5: tensor cores. A block computes TILE_N vectors x TILE_M rows, a warp 32 x 32 of them, TILE_K of k at a time.

constexpr int TILE_N = 128, TILE_M = 64, TILE_K = 64;
constexpr int LD = TILE_K + 8;    // of a tile in shared memory: 144 bytes, so that eight rows lie in different banks
constexpr int LD_STAGE = 32 + 8;  // of 16 x 32 results on their way out
constexpr int V5_SHARED = (TILE_N + TILE_M) * LD * 2;
static_assert(V5_SHARED >= WARPS * 16 * LD_STAGE * 4, "the results take the place of the tiles");

// What a thread carries from global to shared memory, 16 bytes at a time: read early, written once the tile is free.
template <typename T, int ROWS>
struct Carrier {
    static constexpr int PACKS = TILE_K / WIDTH<T>;       // of a row of the tile
    static constexpr int LOADS = ROWS * PACKS / THREADS;  // of this thread
    Pack<T, WIDTH<T>> packs[LOADS];

    __device__ void read(const T* matrix, int64_t first_row, int64_t rows, int64_t first_k, int64_t k) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * THREADS;
            const int64_t row = first_row + at / PACKS, column = first_k + at % PACKS * WIDTH<T>;
            packs[i] = {};  // zeros past the end add nothing
            if (row < rows && column < k)
                packs[i] = *reinterpret_cast<const Pack<T, WIDTH<T>>*>(matrix + row * k + column);
        }
    }

    __device__ void write(bf16* tile) const {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * THREADS;
            store(tile + at / PACKS * LD + at % PACKS * WIDTH<T>, packs[i]);
        }
    }
};

template <typename W>
__global__ void __launch_bounds__(THREADS) v5_tensor_cores(Problem p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using namespace nvcuda;
    bf16* const x_tile = reinterpret_cast<bf16*>(shared_memory);  // [TILE_N][LD]
    bf16* const w_tile = x_tile + TILE_N * LD;                    // [TILE_M][LD]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_n = warp / 2 * 32, warp_m = warp % 2 * 32;  // where in the tile its 32 x 32 results begin
    const int64_t tiles_m = (p.m + TILE_M - 1) / TILE_M;
    const int64_t first_n = blockIdx.x / tiles_m * TILE_N, first_m = blockIdx.x % tiles_m * TILE_M;
    const bf16* const x = static_cast<const bf16*>(p.x);
    const W* const w = static_cast<const W*>(p.weight);

    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) wmma::fill_fragment(sums[i / 2][i % 2], 0.0f);

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
        for (int k = 0; k < TILE_K; k += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major> a[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::col_major>
                b[2];  // rows of W are columns of its transpose
#pragma unroll
            for (int i = 0; i < 2; i++) {
                wmma::load_matrix_sync(a[i], x_tile + (warp_n + 16 * i) * LD + k, LD);
                wmma::load_matrix_sync(b[i], w_tile + (warp_m + 16 * i) * LD + k, LD);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) wmma::mma_sync(sums[i / 2][i % 2], a[i / 2], b[i % 2], sums[i / 2][i % 2]);
        }
        __syncthreads();  // before the next tile overwrites this one
    }

    // 16 x 32 results at a time go through shared memory, so that eight lanes write 64 bytes of a row of y.
    float* const stage = reinterpret_cast<float*>(shared_memory) + warp * 16 * LD_STAGE;
    const int column = lane % 8 * 4;
    const int64_t row_of_w = first_m + warp_m + column;
    float bias[4];
#pragma unroll
    for (int j = 0; j < 4; j++) bias[j] = row_of_w + j < p.m ? bias_of(p, row_of_w + j) : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        wmma::store_matrix_sync(stage, sums[half][0], LD_STAGE, wmma::mem_row_major);
        wmma::store_matrix_sync(stage + 16, sums[half][1], LD_STAGE, wmma::mem_row_major);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int line = lane / 8 + 4 * i;
            const int64_t vector = first_n + warp_n + 16 * half + line;
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

// ---- launchers

struct Device {
    int multiprocessors = 1, major = 0;  // of the compute capability
};

const char* current_device(Device* device) {
    int id = 0;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device->major, cudaDevAttrComputeCapabilityMajor, id);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether every row of x and W, and y, starts at a multiple of 16 bytes.
bool reads_wide(const Problem& p) {
    const int64_t x_size = p.x_bf16 ? 2 : 4, w_size = p.weight_bf16 ? 2 : 4;
    return p.k * x_size % 16 == 0 && p.k * w_size % 16 == 0 && is_aligned(p.x) && is_aligned(p.weight) &&
           is_aligned(p.y);
}

int choose(const Problem& p, const Device& device) {
    if (!reads_wide(p)) return 1;
    if (p.n == 1) return 3;
    return p.n > MAX_VECTORS && p.x_bf16 && device.major >= 8 ? 5 : 4;
}

int64_t divided(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Enough warps to keep every multiprocessor busy, while each lane still has two loads to make.
int splits(const Problem& p, const Device& device) {
    const int64_t packs = p.k / (p.weight_bf16 ? 8 : 4), enough = int64_t(device.multiprocessors) * 32;
    int split = 1;
    while (split < WARPS && p.m * split < enough && packs >= split * 4 * WARP) split *= 2;
    return split;
}

template <typename W, typename X, int SPLIT>
const char* launch_v3(const Problem& p, const Device& device, void* stream) {
    const int64_t rows_at_once = WARPS / SPLIT;
    if (SPLIT == 1 && p.m >= int64_t(device.multiprocessors) * 32 * 4) {
        return launch(v3_rows_and_splits<W, X, 4, 1>, divided(p.m, WARPS * 4), THREADS, 0, stream, p);
    }
    return launch(v3_rows_and_splits<W, X, 1, SPLIT>, divided(p.m, rows_at_once), THREADS, WARPS * 4, stream, p);
}

template <typename W, typename X, int SPLIT>
const char* launch_v4(const Problem& p, void* stream) {
    const int64_t blocks_of_rows = divided(p.m, WARPS / SPLIT);
    const auto start = [&](auto kernel, int vectors) {
        return launch(kernel, blocks_of_rows * divided(p.n, vectors), THREADS, WARPS * vectors * 4, stream, p);
    };
    if (p.n <= 2) return start(v4_few_vectors<W, X, 2, SPLIT>, 2);
    if (p.n <= 4) return start(v4_few_vectors<W, X, 4, SPLIT>, 4);
    return start(v4_few_vectors<W, X, MAX_VECTORS, SPLIT>, MAX_VECTORS);
}

template <typename W, typename X>
const char* launch_version(const Problem& p, int version, const Device& device, void* stream) {
    const int split = splits(p, device);
    switch (version) {
        case 0: return launch(v0_thread_per_row<W, X>, divided(p.n * p.m, THREADS), THREADS, 0, stream, p);
        case 1: return launch(v1_warp_per_row<W, X>, divided(p.n * p.m, WARPS), THREADS, 0, stream, p);
        case 2: return launch(v2_wide_loads<W, X>, divided(p.m, WARPS), THREADS, 0, stream, p);
        case 3:
            if (split == 1) return launch_v3<W, X, 1>(p, device, stream);
            if (split == 2) return launch_v3<W, X, 2>(p, device, stream);
            if (split == 4) return launch_v3<W, X, 4>(p, device, stream);
            return launch_v3<W, X, 8>(p, device, stream);
        default:
            if (split == 1) return launch_v4<W, X, 1>(p, stream);
            return launch_v4<W, X, 4>(p, stream);
    }
}

template <typename W>
const char* launch_v5(const Problem& p, void* stream) {
    const int64_t blocks = divided(p.n, TILE_N) * divided(p.m, TILE_M);
    return launch(v5_tensor_cores<W>, blocks, THREADS, V5_SHARED, stream, p);
}

}  // namespace

const char* bf16_linear_cuda_choice(const Problem& p, int* version) {
    Device device;
    const char* error = current_device(&device);
    *version = choose(p, device);
    return error;
}

const char* bf16_linear_cuda(const Problem& p, int version, void* stream) {
    if (p.n == 0 || p.m == 0) return nullptr;
    Device device;
    if (const char* error = current_device(&device)) return error;
    if (version == AUTO) version = choose(p, device);
    if (version < 0 || version > 5) return "there are versions 0 to 5";
    if (version >= 2 && !reads_wide(p)) return "from version 2 on, rows must start at multiples of 16 bytes";
    if ((version == 2 || version == 3) && p.n != 1) return "versions 2 and 3 take one vector";
    if (version == 5 && !p.x_bf16) return "version 5 takes bf16 vectors";
    if (version == 5 && device.major < 8) return "version 5 needs tensor cores for bf16, from sm_80 on";

    if (version == 5) return p.weight_bf16 ? launch_v5<bf16>(p, stream) : launch_v5<float>(p, stream);
    if (p.weight_bf16) {
        return p.x_bf16 ? launch_version<bf16, bf16>(p, version, device, stream)
                        : launch_version<bf16, float>(p, version, device, stream);
    }
    return p.x_bf16 ? launch_version<float, bf16>(p, version, device, stream)
                    : launch_version<float, float>(p, version, device, stream);
}
