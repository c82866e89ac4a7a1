// Runs a grid on a CPU: a fiber for each thread, one block at a time, one thread at a time, in an order that the
// test chooses. A thread runs until it must wait for others or leaves. If no thread can run and some still wait, they
// wait at a barrier or warp collective that not all reach, which is an error. Shared memory is full of NaNs when a
// block begins.
//
// In the variant compiled with -fsanitize=thread every access of the kernels calls __tsan_read4 and the like, defined
// below in place of ThreadSanitizer's. The accesses of a warp's lanes from one place in the code, each lane's n-th
// there, are one request. There is no cache here: a request moves every 32-byte sector that it touches.

#include "cuda_on_cpu.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <vector>

#include "../bf16_linear.h"

// ---- settings and counters, all int64, for emulator.py

struct Settings {
    int64_t multiprocessors = 132, major = 9;    // the device that the launchers see
    int64_t order = 0;                           // of threads: 0 forward, 1 backward, else the seed of a shuffle
    int64_t first_blocks = -1, last_blocks = 0;  // how many run at either end of the grid; -1: all
};

struct Counters {
    int64_t launches, blocks, threads, barriers;
    int64_t requests, shared_requests, conflicts;  // conflicts: rounds on shared memory beyond one for each phase
    int64_t sectors[4], perfect[4];                // of x, weight, bias, y; perfect: had the bytes lain side by side
};

constexpr int WARP = 32, MAX_THREADS = 1024, STACK = 1 << 15;
constexpr int SHARED = 48 * 1024;  // what a kernel gets without asking for more

extern "C" {
Settings settings;
Counters counters;
alignas(128) unsigned char shared_memory[SHARED];
void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
}

dim3 threadIdx, blockIdx, blockDim;

// ---- fibers

namespace {

struct Fiber {
    ucontext_t context;
    const char* waits_at;  // null while it can run
    unsigned lanes;        // that it waits for
    void* brought;         // what it exchanges with them
};

Fiber fibers[MAX_THREADS];
unsigned ready[MAX_THREADS / WARP];  // a bit for each lane of each warp
ucontext_t scheduler;
int threads, arrived, left, current;  // of the block; at the barrier; gone; the thread that runs
uint64_t random_state;
void (*thread_body)(void*);
void* thread_argument;
char error[200];
bool running = false;

// The thread that runs next, or -1.
int next_thread() {
    const int warps = (threads + WARP - 1) / WARP;
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    const int random_warp = int(random_state >> 32 & 31), random_lane = int(random_state >> 59);
    for (int i = 0; i < warps; i++) {
        const int warp = settings.order == 0 ? i : settings.order == 1 ? warps - 1 - i : (i + random_warp) % warps;
        const unsigned lanes = ready[warp];
        if (lanes == 0) continue;
        if (settings.order == 0) return warp * WARP + __builtin_ctz(lanes);
        if (settings.order == 1) return warp * WARP + 31 - __builtin_clz(lanes);
        const unsigned later = lanes >> random_lane << random_lane;
        return warp * WARP + __builtin_ctz(later ? later : lanes);
    }
    return -1;
}

// Leaves this thread. It goes on here once it is ready and its turn comes.
void change_thread() {
    const int from = current, to = error[0] ? -1 : next_thread();
    if (to == from) return;
    current = to, threadIdx.x = unsigned(to);
    swapcontext(&fibers[from].context, to < 0 ? &scheduler : &fibers[to].context);
}

void wait(const char* where, unsigned lanes, void* brought) {
    Fiber& me = fibers[current];
    me.waits_at = where, me.lanes = lanes, me.brought = brought;
    ready[current / WARP] &= ~(1u << current % WARP);
}

void release(int thread) {
    fibers[thread].waits_at = nullptr;
    ready[thread / WARP] |= 1u << thread % WARP;
}

// The thread waits until all `lanes` of its warp are here; the last one exchanges what they brought.
void meet(const char* where, unsigned lanes, void* brought = nullptr, void (*exchange)(void* const*) = nullptr) {
    wait(where, lanes, brought);
    const int first = current / WARP * WARP;
    void* of_lane[WARP] = {};
    for (int lane = WARP - 1; lane >= 0; lane--) {
        if (!(lanes >> lane & 1)) continue;
        const Fiber& other = fibers[first + lane];
        const bool here = first + lane < threads && other.waits_at && strcmp(other.waits_at, where) == 0;
        if (!here || other.lanes != lanes) return change_thread();
        of_lane[lane] = other.brought;
    }
    if (exchange) exchange(of_lane);
    for (int lane = 0; lane < WARP; lane++) {
        if (lanes >> lane & 1) release(first + lane);
    }
    change_thread();
}

void start() {
    thread_body(thread_argument);
    wait(nullptr, 0, nullptr);
    left++;
}

void tally();  // the accesses of a block

void run_block(int64_t block, int shared_bytes, char* stacks) {
    memset(shared_memory, 0xff, SHARED);
    if (__asan_poison_memory_region) __asan_poison_memory_region(shared_memory + shared_bytes, SHARED - shared_bytes);
    blockIdx.x = unsigned(block);
    arrived = left = 0;
    for (int i = 0; i < threads; i++) {
        ucontext_t& context = fibers[i].context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks + int64_t(i) * STACK;
        context.uc_stack.ss_size = STACK;
        context.uc_link = &scheduler;
        makecontext(&context, start, 0);
        stacks[int64_t(i) * STACK] = 'x';  // still there if the stack was large enough
        release(i);
    }
    while (!error[0] && (current = next_thread()) >= 0) {
        threadIdx.x = unsigned(current);
        swapcontext(&scheduler, &fibers[current].context);  // until a thread leaves or none can run
    }
    for (int i = 0; i < threads && !error[0]; i++) {
        if (stacks[int64_t(i) * STACK] != 'x') snprintf(error, sizeof error, "thread %d: the stack is too small", i);
        const char* const where = fibers[i].waits_at;
        if (!where) continue;
        int here = 0;
        for (int j = 0; j < threads; j++) here += fibers[j].waits_at && strcmp(fibers[j].waits_at, where) == 0;
        snprintf(error, sizeof error, "block %u: %d threads wait at %s, %d wait elsewhere, %d have left", blockIdx.x,
                 here, where, threads - left - here, left);
    }
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(shared_memory, SHARED);
    const auto untouched = [](unsigned char byte) { return byte == 0xff; };
    if (!std::all_of(shared_memory + shared_bytes, shared_memory + SHARED, untouched)) {
        snprintf(error, sizeof error, "written beyond the %d bytes of shared memory of the launch", shared_bytes);
    }
    memset(ready, 0, sizeof ready);
    tally();
}

}  // namespace

const char* run_grid(int64_t blocks, int block_threads, int shared_bytes, void (*body)(void*), void* argument) {
    static char* const stacks = static_cast<char*>(mmap(nullptr, int64_t(MAX_THREADS) * STACK, PROT_READ | PROT_WRITE,
                                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (blocks > 2147483647) return "more blocks than a grid has";
    if (blocks < 1 || block_threads < 1 || block_threads > MAX_THREADS || shared_bytes > SHARED) {
        return "invalid configuration of a launch";
    }
    threads = block_threads, thread_body = body, thread_argument = argument;
    random_state = uint64_t(settings.order), error[0] = 0, blockDim.x = unsigned(threads);
    counters.launches++, counters.blocks = blocks, counters.threads = threads;
    running = true;
    for (int64_t block = 0; block < blocks && !error[0]; block++) {
        if (block == settings.first_blocks) block = std::max(block, blocks - settings.last_blocks);
        if (block < blocks) run_block(block, shared_bytes, stacks);
    }
    running = false;
    return error[0] ? error : nullptr;
}

void require(bool holds, const char* message) {
    if (holds) return;
    snprintf(error, sizeof error, "block %u, thread %u: %s", blockIdx.x, threadIdx.x, message);
    change_thread();
}

// ---- barriers and collectives

void __syncthreads() {
    wait("__syncthreads", 0, nullptr);
    if (++arrived == threads) {
        arrived = 0;
        counters.barriers++;
        for (int i = 0; i < threads; i++) release(i);
    }
    change_thread();
}

void __syncwarp(unsigned lanes) { meet("__syncwarp", lanes); }

float __shfl_xor_sync(unsigned lanes, float value, int mask) {
    struct Exchange {
        float in, out;
        int mask;
    } mine = {value, value, mask};
    meet("__shfl_xor_sync", lanes, &mine, [](void* const* of_lane) {
        for (int lane = 0; lane < WARP; lane++) {
            if (!of_lane[lane]) continue;
            auto* to = static_cast<Exchange*>(of_lane[lane]);
            if (const auto* from = static_cast<Exchange*>(of_lane[lane ^ to->mask])) to->out = from->in;
        }
    });
    return mine.out;
}

using nvcuda::wmma::column_of;
using nvcuda::wmma::row_of;

void ldmatrix(const void* line, __nv_bfloat16* fragment) {
    struct Exchange {
        const __nv_bfloat16* line;  // of lane l: row l % 16, columns from l / 16 * 8 on
        __nv_bfloat16* fragment;
    } mine = {static_cast<const __nv_bfloat16*>(line), fragment};
    meet("load_matrix_sync", 0xffffffffu, &mine, [](void* const* of_lane) {
        for (int lane = 0; lane < WARP; lane++) {
            for (int i = 0; i < 8; i++) {
                const int row = row_of(lane, i), column = column_of(lane, i);
                const auto* from = static_cast<Exchange*>(of_lane[row + column / 8 * 16]);
                static_cast<Exchange*>(of_lane[lane])->fragment[i] = from->line[column % 8];
            }
        }
    });
}

void mma(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c) {
    struct Exchange {
        float* d;
        const __nv_bfloat16 *a, *b;
        const float* c;
    } mine = {d, a, b, c};
    meet("mma_sync", 0xffffffffu, &mine, [](void* const* of_lane) {
        float a[16][16], b[16][16];
        for (int lane = 0; lane < WARP; lane++) {
            const auto* of = static_cast<Exchange*>(of_lane[lane]);
            for (int i = 0; i < 8; i++) {
                a[row_of(lane, i)][column_of(lane, i)] = __bfloat162float(of->a[i]);
                b[row_of(lane, i)][column_of(lane, i)] = __bfloat162float(of->b[i]);
            }
        }
        for (int lane = 0; lane < WARP; lane++) {
            const auto* of = static_cast<Exchange*>(of_lane[lane]);
            for (int i = 0; i < 8; i++) {
                float sum = of->c[i];
                for (int k = 0; k < 16; k++) sum += a[row_of(lane, i)][k] * b[column_of(lane, i)][k];
                of->d[i] = sum;
            }
        }
    });
}

// ---- accesses

namespace {

struct Request {
    int array;  // index of the counters; -1: shared memory
    int size, lanes;
    uintptr_t address[WARP], lane[WARP];
};

struct Range {
    uintptr_t begin, end;
} arrays[4];

std::unordered_map<uintptr_t, uint64_t> sites;   // place in the code -> number
std::vector<uint32_t> passed[MAX_THREADS];       // how often each thread was at each
std::unordered_map<uint64_t, Request> requests;  // of the block that runs

void access(const void* pointer, int size, const void* caller) {
    if (!running) return;
    const auto address = reinterpret_cast<uintptr_t>(pointer), shared = reinterpret_cast<uintptr_t>(shared_memory);
    int array = -1;
    if (address < shared || address >= shared + SHARED) {
        for (array = 0; array < 4 && (address < arrays[array].begin || address >= arrays[array].end);) array++;
        if (array == 4) return;  // the thread's own
    }
    const uint64_t site = sites.emplace(reinterpret_cast<uintptr_t>(caller), sites.size()).first->second;
    auto& times = passed[current];
    if (times.size() <= site) times.resize(site + 1);
    Request& request = requests[site << 48 | uint64_t(current / WARP) << 40 | times[site]++];
    request.array = array, request.size = size;
    request.address[request.lanes] = address, request.lane[request.lanes++] = current % WARP;
}

int64_t distinct(std::vector<uintptr_t>& values) {
    std::sort(values.begin(), values.end());
    return std::unique(values.begin(), values.end()) - values.begin();
}

// Shared memory serves 128 bytes at a time: a warp's 4-byte accesses together, 8-byte ones by halves, 16-byte ones by
// quarters. A bank is a column of 4-byte words; words of one bank take turns.
int64_t conflicts_of(const Request& request) {
    const int lanes_at_once = std::min(WARP, 128 / request.size);
    int64_t conflicts = 0;
    for (int first = 0; first < WARP; first += lanes_at_once) {
        std::vector<uintptr_t> words[32];
        for (int i = 0; i < request.lanes; i++) {
            if (int(request.lane[i]) / lanes_at_once * lanes_at_once != first) continue;
            for (int byte = 0; byte < std::max(request.size, 4); byte += 4) {
                const uintptr_t word = (request.address[i] + byte) / 4;
                words[word % 32].push_back(word);
            }
        }
        int64_t rounds = 1;
        for (auto& of_bank : words) rounds = std::max(rounds, distinct(of_bank));
        conflicts += rounds - 1;
    }
    return conflicts;
}

void tally() {
    for (const auto& entry : requests) {
        const Request& request = entry.second;
        if (request.array < 0) {
            counters.shared_requests++;
            counters.conflicts += conflicts_of(request);
            continue;
        }
        std::vector<uintptr_t> addresses(request.address, request.address + request.lanes), sectors;
        for (const uintptr_t address : addresses) {
            sectors.push_back(address / 32);
            sectors.push_back((address + request.size - 1) / 32);
        }
        counters.requests++;
        counters.sectors[request.array] += distinct(sectors);
        counters.perfect[request.array] += (distinct(addresses) * request.size + 31) / 32;
    }
    requests.clear();
    for (auto& times : passed) times.clear();
}

}  // namespace

#define HOOK(name, size) \
    void __tsan_##name##size(void* address) { access(address, size, __builtin_return_address(0)); }
#define HOOKS(size) HOOK(read, size) HOOK(write, size) HOOK(unaligned_read, size) HOOK(unaligned_write, size)
#define RANGE_HOOK(name)                                                                  \
    void __tsan_##name##_range(char* address, uint64_t size) {                            \
        const auto* caller = static_cast<const char*>(__builtin_return_address(0));       \
        for (; size > 0; address += 16, size -= std::min<uint64_t>(size, 16), caller++) { \
            access(address, int(std::min<uint64_t>(size, 16)), caller);                   \
        }                                                                                 \
    }
extern "C" {
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16) RANGE_HOOK(read) RANGE_HOOK(write) void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

// ---- the device, and the functions that emulator.py calls

cudaError_t cudaGetDevice(int* id) { return *id = 0, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = int(attribute == cudaDevAttrMultiProcessorCount ? settings.multiprocessors : settings.major);
    return cudaSuccess;
}

extern "C" const char* run_linear(const Problem* p, int version) {
    const auto range = [](const void* begin, int64_t size, bool bf16) {
        const auto address = reinterpret_cast<uintptr_t>(begin);
        return Range{address, address + size * (bf16 ? 2 : 4)};
    };
    arrays[0] = range(p->x, p->n * p->k, p->x_bf16);
    arrays[1] = range(p->weight, p->m * p->k, p->weight_bf16);
    arrays[2] = range(p->bias, p->bias ? p->m : 0, p->bias_bf16);
    arrays[3] = range(p->y, p->n * p->m, p->x_bf16);
    counters = {};
    return bf16_linear_cuda(*p, version, nullptr);
}

extern "C" const char* version_for(const Problem* p, int* version) { return bf16_linear_cuda_version(*p, version); }
