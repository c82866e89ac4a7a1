// The functions of bf16_linear_cpu.cpp, for bindings.cpp.
#pragma once

#include "bf16_linear.h"

void bf16_linear_cpu(const Problem& problem);

// Rounds fp32 numbers to the nearest values of bf16 (or fp16), ties to even, in fp32 storage. `from` may be `to`.
void round_cpu(const float* from, float* to, int64_t count, bool fp16);

// The instructions that the file was compiled for: "AVX-512 with BF16", "AVX-512", "AVX2", or "plain vectors".
const char* instruction_set_cpu();
