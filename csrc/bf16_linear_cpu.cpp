// The op of csrc/bf16_linear.h on a CPU, and the rounding that emulated autocast needs.
//
//   few vectors (n <= 8)   The time is that of reading W. Each row is read once, from its beginning to its end, and is
//                          rounded and widened in registers. A row's sum does not depend on the number of threads.
//   many vectors           The time is that of multiplying. W is rounded once into panels of two registers of rows, and
//                          a block of results stays in registers while k goes by. Where x is bf16 and the CPU has
//                          AVX512_BF16, an instruction makes two products (vdpbf16ps; it takes subnormals for zero).
//
// Registers are the vector types of GCC and Clang, so the same lines serve AVX-512, AVX2 and Arm. The number of vectors
// and of rows that a loop takes at once changes no bit of a result.

#include "bf16_linear_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <memory>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;    // fp32 numbers in a register
constexpr int AT_ONCE = 12;  // vectors: AT_ONCE x 2 sums, 2 weights and a number of x fit into the registers
#else
constexpr int LANES = 8;
constexpr int AT_ONCE = 6;
#endif
constexpr int PANEL = 2 * LANES;    // rows of W in a panel
constexpr int CHUNK = 8 * AT_ONCE;  // vectors that a thread takes at a time
constexpr int FEW = 8;              // vectors; more are many
constexpr int AHEAD = 8;            // rows between the one that is read and the one that is prefetched
constexpr int PAGE = 4096;          // bytes; several rows in one page, read at once, confuse the hardware's prefetcher
static_assert(FEW >= 4, "linear() has loops for 1, 2, 4 and FEW vectors: FEW must be at least 4");

using floats = float __attribute__((vector_size(LANES * 4)));
using words = uint32_t __attribute__((vector_size(LANES * 4)));
using halves = uint16_t __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

// ---- rounding of a register of fp32 bits: to nearest, ties to even; NaN stays NaN

inline words to_bf16(words u) {
    const words magnitude = u & 0x7fffffffu;
    const words nearest = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return magnitude > 0x7f800000u ? (u | 0x00400000u) & 0xffff0000u : nearest;
}

inline words to_fp16(words u) {
#if defined(__AVX512F__)
    return (words)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    return (words)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)u, _MM_FROUND_TO_NEAREST_INT));
#else
    const words sign = u & 0x80000000u, magnitude = u & 0x7fffffffu;
    words nearest = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
    nearest = nearest >= 0x47800000u ? words{} + 0x7f800000u : nearest;  // 65536 and above
    // Below 2^-14 fp16's spacing is 2^-24, as is fp32's between 0.5 and 1: adding 0.5 rounds, subtracting it restores.
    const words small = (words)(((floats)magnitude + 0.5f) - 0.5f);
    nearest = magnitude < 0x38800000u ? small : nearest;
    nearest = magnitude > 0x7f800000u ? (magnitude | 0x00400000u) & ~0x1fffu : nearest;
    return sign | nearest;
#endif
}

// ---- loading as fp32: weights are rounded to bf16, x is not

inline floats load(const float* from) {
    floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline floats load(const bf16* from) {
    halves value;
    std::memcpy(&value, from, sizeof value);
    return (floats)(__builtin_convertvector(value, words) << 16);
}
template <typename T>
inline floats load_part(const T* from, int64_t count) {  // zeros past the end
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}
inline floats rounded(floats value, float) { return (floats)to_bf16((words)value); }
inline floats rounded(floats value, bf16) { return value; }

inline float widened(float value) { return value; }
inline float widened(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof value); }
inline void store(bf16* to, floats value) {
    const halves low = __builtin_convertvector(to_bf16((words)value) >> 16, halves);
    std::memcpy(to, &low, sizeof low);
}
inline void store_one(float* to, float value) { *to = value; }
inline void store_one(bf16* to, float value) {
    bf16 lanes[LANES];
    store(lanes, floats{} + value);
    *to = lanes[0];
}
template <typename T>
inline void store_part(T* to, floats value, int64_t count) {
    T padded[LANES];
    store(padded, value);
    std::memcpy(to, padded, count * sizeof(T));
}

floats bias_of(const Problem& p, int64_t row, int64_t count) {
    if (p.bias == nullptr) return floats{};
    if (p.bias_bf16) return load_part(static_cast<const bf16*>(p.bias) + row, count);
    return rounded(load_part(static_cast<const float*>(p.bias) + row, count), 0.0f);
}

// ---- few vectors

// Adds one half to the other until one number is left: the order is the same for every row.
inline float sum_of(floats value) {
    float lanes[LANES];
    std::memcpy(lanes, &value, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

template <int ROWS, int V, typename W, typename X>
void few_rows(const Problem& p, const float* const* x, int64_t row) {
    const W* w = static_cast<const W*>(p.weight) + row * p.k;
    floats sums[ROWS][V] = {};
    const int64_t whole = p.k / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats weights[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __builtin_prefetch(w + (AHEAD + r) * p.k + i);  // the hardware's prefetcher stops at a page's end
            weights[r] = rounded(load(w + r * p.k + i), W{});
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const floats numbers = load(x[v] + i);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][v] += weights[r] * numbers;
        }
    }
    if (whole < p.k) {
        for (int r = 0; r < ROWS; r++) {
            const floats weights = rounded(load_part(w + r * p.k + whole, p.k - whole), W{});
            for (int v = 0; v < V; v++) sums[r][v] += weights * load_part(x[v] + whole, p.k - whole);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        const float bias = bias_of(p, row + r, 1)[0];
        for (int v = 0; v < V && v < p.n; v++) {
            store_one(static_cast<X*>(p.y) + v * p.m + row + r, sum_of(sums[r][v]) + bias);
        }
    }
}

template <int ROWS, int V, typename W, typename X>
void few_vectors(const Problem& p, const float* const* x) {
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(p.k, 1)) * ROWS;
    at::parallel_for(0, p.m, grain, [&](int64_t begin, int64_t end) {
        int64_t row = begin;
        for (; row + ROWS <= end; row += ROWS) few_rows<ROWS, V, W, X>(p, x, row);
        for (; row < end; row++) few_rows<1, V, W, X>(p, x, row);
    });
}

// ---- many vectors. A unit is 32 bits: one fp32 number, or with PAIRS two bf16 numbers that are neighbours in k.

template <bool PAIRS>
inline floats multiply_add(floats sums, words weights, uint32_t x) {
#ifdef __AVX512BF16__
    if constexpr (PAIRS) {
        return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(words{} + x), (__m512bh)weights);
    }
#endif
    float number;
    std::memcpy(&number, &x, sizeof number);
    return sums + (floats)weights * number;
}

// Rounds PANEL rows of W from `row` on into panel (units of k, PANEL). Rows and numbers past the end are zero.
template <bool PAIRS, typename W>
void pack(const Problem& p, int64_t row, uint32_t* panel) {
    constexpr int NUMBERS = PAIRS ? 2 * LANES : LANES;
    for (int64_t i = 0; i < p.k; i += NUMBERS) {
        uint32_t units[PANEL][LANES] = {};
        for (int64_t r = 0; r < std::min<int64_t>(PANEL, p.m - row); r++) {
            const W* w = static_cast<const W*>(p.weight) + (row + r) * p.k + i;
            for (int part = 0; part < NUMBERS; part += LANES) {
                const int64_t count = std::clamp<int64_t>(p.k - i - part, 0, LANES);
                const floats weights = rounded(count == LANES ? load(w + part) : load_part(w + part, count), W{});
                if (PAIRS) {
                    store(reinterpret_cast<bf16*>(units[r]) + part, weights);
                } else {
                    store(reinterpret_cast<float*>(units[r]), weights);
                }
            }
        }
        const int64_t count = std::min<int64_t>(LANES, (p.k - i) / (NUMBERS / LANES));
        for (int64_t j = 0; j < count; j++, panel += PANEL) {
            for (int r = 0; r < PANEL; r++) panel[r] = units[r][j];
        }
    }
}

// Multiplies V vectors, `stride` units apart, by a panel and writes y[v m] to y[v m + rows - 1] for each vector v.
template <int V, bool PAIRS, typename X>
void multiply(const char* x, int64_t stride, const uint32_t* panel, int64_t units, const floats bias[2], X* y,
              int64_t m, int64_t rows) {
    floats sums[V][2] = {};
    for (int64_t i = 0; i < units; i++) {
        words weights[2];
        std::memcpy(weights, panel + i * PANEL, sizeof weights);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
            uint32_t unit;
            std::memcpy(&unit, x + (v * stride + i) * sizeof unit, sizeof unit);
            sums[v][0] = multiply_add<PAIRS>(sums[v][0], weights[0], unit);
            sums[v][1] = multiply_add<PAIRS>(sums[v][1], weights[1], unit);
        }
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
        for (int half = 0; half < 2; half++) {
            const int64_t count = std::min<int64_t>(LANES, rows - half * LANES);
            X* const to = y + v * m + half * LANES;
            if (count == LANES) {
                store(to, sums[v][half] + bias[half]);
            } else if (count > 0) {
                store_part(to, sums[v][half] + bias[half], count);
            }
        }
    }
}

template <bool PAIRS, typename W, typename X>
void many_vectors(const Problem& p) {
    const int64_t units = PAIRS ? p.k / 2 : p.k;
    const int64_t panels = (p.m + PANEL - 1) / PANEL, chunks = (p.n + CHUNK - 1) / CHUNK;
    const std::unique_ptr<uint32_t[]> packed(new uint32_t[panels * PANEL * units]);
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) pack<PAIRS, W>(p, i * PANEL, packed.get() + i * PANEL * units);
    });
    constexpr bool WIDEN = !PAIRS && sizeof(X) == 2;
    at::parallel_for(0, chunks * panels, 1, [&](int64_t begin, int64_t end) {
        const std::unique_ptr<float[]> wide(WIDEN ? new float[CHUNK * p.k] : nullptr);
        int64_t widened_chunk = -1;
        for (int64_t task = begin; task < end; task++) {
            const int64_t chunk = task / panels, first = chunk * CHUNK, vectors = std::min<int64_t>(CHUNK, p.n - first);
            const int64_t row = task % panels * PANEL, rows = std::min<int64_t>(PANEL, p.m - row);
            const X* const stored_x = static_cast<const X*>(p.x) + first * p.k;
            if (WIDEN && chunk != widened_chunk) {
                for (int64_t i = 0; i < vectors * p.k; i++) wide[i] = widened(stored_x[i]);
                widened_chunk = chunk;
            }
            const char* const x =
                WIDEN ? reinterpret_cast<const char*>(wide.get()) : reinterpret_cast<const char*>(stored_x);
            const uint32_t* const panel = packed.get() + row * units;
            const floats bias[2] = {bias_of(p, row, std::min<int64_t>(LANES, rows)),
                                    rows > LANES ? bias_of(p, row + LANES, rows - LANES) : floats{}};
            X* const y = static_cast<X*>(p.y) + first * p.m + row;
            int64_t v = 0;
            for (; v + AT_ONCE <= vectors; v += AT_ONCE) {
                multiply<AT_ONCE, PAIRS>(x + v * units * 4, units, panel, units, bias, y + v * p.m, p.m, rows);
            }
            for (; v + 3 <= vectors; v += 3) {
                multiply<3, PAIRS>(x + v * units * 4, units, panel, units, bias, y + v * p.m, p.m, rows);
            }
            for (; v < vectors; v++) {
                multiply<1, PAIRS>(x + v * units * 4, units, panel, units, bias, y + v * p.m, p.m, rows);
            }
        }
    });
}

// ---- few or many

template <typename W, typename X>
void linear(const Problem& p) {
    if (p.n > FEW) {
#ifdef __AVX512BF16__
        if (sizeof(X) == 2 && p.k % 2 == 0) return many_vectors<true, W, X>(p);
#endif
        return many_vectors<false, W, X>(p);
    }
    const std::unique_ptr<float[]> wide(new float[p.n * p.k]);
    for (int64_t i = 0; i < p.n * p.k; i++) wide[i] = widened(static_cast<const X*>(p.x)[i]);
    const float* x[FEW];
    for (int64_t v = 0; v < FEW; v++) x[v] = wide.get() + std::min(v, p.n - 1) * p.k;  // past the end: the last vector
    if (p.n == 1 && p.k * int64_t(sizeof(W)) < PAGE) return few_vectors<1, 1, W, X>(p, x);  // because of PAGE
    if (p.n == 1) return few_vectors<8, 1, W, X>(p, x);
    if (p.n == 2) return few_vectors<4, 2, W, X>(p, x);
    if (p.n <= 4) return few_vectors<2, 4, W, X>(p, x);
    return few_vectors<1, FEW, W, X>(p, x);
}

}  // namespace

void bf16_linear_cpu(const Problem& p) {
    if (p.n == 0 || p.m == 0) return;
    if (p.weight_bf16) return p.x_bf16 ? linear<bf16, bf16>(p) : linear<bf16, float>(p);
    return p.x_bf16 ? linear<float, bf16>(p) : linear<float, float>(p);
}

void round_cpu(const float* from, float* to, int64_t count, bool fp16) {
    at::parallel_for(0, count, 32768, [&](int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            const words u = (words)load(from + i);
            store(to + i, (floats)(fp16 ? to_fp16(u) : to_bf16(u)));
        }
        if (i < end) {
            const words u = (words)load_part(from + i, end - i);
            store_part(to + i, (floats)(fp16 ? to_fp16(u) : to_bf16(u)), end - i);
        }
    });
}

const char* instruction_set_cpu() {
#if defined(__AVX512BF16__)
    return "AVX-512 with BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "plain vectors";
#endif
}
