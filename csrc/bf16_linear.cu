// y (n, m) = x (n, k) times the transpose of bf16(W (m, k)), plus bf16(bias (m)): csrc/bf16_linear.h, on a GPU.
//
// With one vector (n = 1) each weight is used once, so the time is that of reading W: m k 4 bytes in fp32, m k 2 in
// bf16. Every version must move those bytes; they differ in how many more they move, and how many are on their way.
//
//   bf16_linear_vectors.cuh: one vector or a few
//   v0  a thread per row                     neighbours read k elements apart: a 32-byte sector for every weight,
//                                            8 times the bytes in fp32 and 16 in bf16, if no cache helps
//   v1  a warp per row                       lanes read neighbours, a shuffle reduction ends the row: W's bytes, once
//   v2  16-byte loads, four at once          the same bytes in a quarter (fp32) or an eighth (bf16) of the requests
//   v3  rows per warp, warps per row         large m: x is read once for four rows; small m: k is split over the warps
//                                            of a block, which add up in a fixed order (no atomics: same bits always)
//   v4  up to eight vectors at once          a weight is read once and used for each: m k bytes rather than n m k
//
//   bf16_linear_tiles.cuh: many vectors
//   v5  tensor cores (wmma), from sm_80      for training: a tile of 128 x 64 results reads (128 2 + 64 4) k bytes,
//                                            where v4 would read W n / 8 times
//
// This file chooses and launches; bf16_linear_numbers.cuh has what all versions share. There is no inline PTX and only
// one launch(), so csrc/cuda_on_cpu/ can run these files on a CPU. Left out: TMA, wgmma and cp.async, which would tie
// the code to one generation of cards; x in shared memory, because L1 holds it.

#include "bf16_linear_tiles.cuh"
#include "bf16_linear_vectors.cuh"

#ifdef __CUDACC__
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void* stream,
                   Parameters... arguments) {
    if (blocks > 2147483647) return "more blocks than a grid has";
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#endif  // else csrc/cuda_on_cpu/cuda_on_cpu.h has it

namespace {

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

// ---- which version runs

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether every row of x and of W, and y, starts at a multiple of 16 bytes: v2 to v5 read and write 16 bytes at a time.
bool rows_are_aligned(const Problem& p) {
    const int64_t x_size = p.x_bf16 ? 2 : 4, w_size = p.weight_bf16 ? 2 : 4;
    return p.k * x_size % 16 == 0 && p.k * w_size % 16 == 0 && is_aligned(p.x) && is_aligned(p.weight) &&
           is_aligned(p.y);
}

// The launcher takes the first line that is true:
//
//   a row of x or W, or y, does not start at a multiple of 16 bytes         v1, which takes any address and any k
//   there is one vector                                                     v3
//   there are more than MAX_VECTORS (8), x is bf16, the card is sm_80 on    v5
//   else (2 to 8 vectors, or fp32 vectors, or an older card)                v4
//
// v0 and v2 run only when they are asked for: they are steps of the ladder, to be measured against.
int version_for(const Problem& p, const Device& device) {
    if (!rows_are_aligned(p)) return 1;
    if (p.n == 1) return 3;
    return p.n > MAX_VECTORS && p.x_bf16 && device.major >= 8 ? 5 : 4;
}

constexpr int BUSY = 32;  // warps that keep a multiprocessor busy while memory answers

// How many warps share a row of W in v3 and v4: 1, doubled while the warps so far do not keep every multiprocessor busy
// and each lane would still have two loads of 16 bytes to make.
int warps_per_row(const Problem& p, const Device& device) {
    const int64_t packs = p.k / (p.weight_bf16 ? WIDTH<bf16> : WIDTH<float>);
    const int64_t enough = int64_t(device.multiprocessors) * BUSY;
    int split = 1;
    while (split < MAX_SPLIT && p.m * split < enough && packs >= split * 4 * WARP) split *= 2;
    return split;
}

// ---- launchers

int64_t divided(int64_t value, int64_t by) { return (value + by - 1) / by; }

// v3 reads MAX_ROWS rows for each warp where even so every multiprocessor has enough warps.
template <typename W, typename X, int SPLIT>
const char* launch_v3(const Problem& p, const Device& device, void* stream) {
    if (SPLIT == 1 && p.m >= int64_t(device.multiprocessors) * BUSY * MAX_ROWS) {
        const int64_t blocks = divided(p.m, WARPS * MAX_ROWS);
        return launch(v3_rows_and_splits<W, X, MAX_ROWS, 1>, blocks, THREADS, 0, stream, p);
    }
    const int64_t blocks = divided(p.m, WARPS / SPLIT);
    return launch(v3_rows_and_splits<W, X, 1, SPLIT>, blocks, THREADS, WARPS * 4, stream, p);
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

template <typename W>
const char* launch_v5(const Problem& p, void* stream) {
    const int64_t blocks = divided(p.n, TILE_N) * divided(p.m, TILE_M);
    return launch(v5_tensor_cores<W>, blocks, V5_THREADS, V5_SHARED, stream, p);
}

template <typename W, typename X>
const char* launch_v0_to_v4(const Problem& p, int version, const Device& device, void* stream) {
    const int split = warps_per_row(p, device);
    switch (version) {
        case 0: return launch(v0_thread_per_row<W, X>, divided(p.n * p.m, THREADS), THREADS, 0, stream, p);
        case 1: return launch(v1_warp_per_row<W, X>, divided(p.n * p.m, WARPS), THREADS, 0, stream, p);
        case 2: return launch(v2_wide_loads<W, X>, divided(p.m, WARPS), THREADS, 0, stream, p);
        case 3:
            if (split == 1) return launch_v3<W, X, 1>(p, device, stream);
            if (split == 2) return launch_v3<W, X, 2>(p, device, stream);
            if (split == 4) return launch_v3<W, X, 4>(p, device, stream);
            return launch_v3<W, X, MAX_SPLIT>(p, device, stream);
        default:
            if (split == 1) return launch_v4<W, X, 1>(p, stream);
            return launch_v4<W, X, 4>(p, stream);
    }
}

}  // namespace

const char* bf16_linear_cuda_version(const Problem& p, int* version) {
    Device device;
    const char* error = current_device(&device);
    *version = version_for(p, device);
    return error;
}

const char* bf16_linear_cuda(const Problem& p, int version, void* stream) {
    if (p.n == 0 || p.m == 0) return nullptr;
    Device device;
    if (const char* error = current_device(&device)) return error;
    if (version == AUTO) version = version_for(p, device);
    if (version < 0 || version > 5) return "there are versions 0 to 5";
    if (version >= 2 && !rows_are_aligned(p)) return "from version 2 on, rows must start at multiples of 16 bytes";
    if ((version == 2 || version == 3) && p.n != 1) return "versions 2 and 3 take one vector";
    if (version == 5 && !p.x_bf16) return "version 5 takes bf16 vectors";
    if (version == 5 && device.major < 8) return "version 5 needs tensor cores for bf16, from sm_80 on";

    if (version == 5) return p.weight_bf16 ? launch_v5<bf16>(p, stream) : launch_v5<float>(p, stream);
    if (p.weight_bf16) {
        return p.x_bf16 ? launch_v0_to_v4<bf16, bf16>(p, version, device, stream)
                        : launch_v0_to_v4<bf16, float>(p, version, device, stream);
    }
    return p.x_bf16 ? launch_v0_to_v4<float, bf16>(p, version, device, stream)
                    : launch_v0_to_v4<float, float>(p, version, device, stream);
}
