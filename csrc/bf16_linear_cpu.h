// What bf16_linear_cpu.cpp offers to bindings.cpp.
#pragma once

#include "bf16_linear.h"

void bf16_linear_cpu(const Problem& problem);

// Rounds fp32 numbers to what bf16 (or fp16) can represent, nearest even, in fp32 storage. `from` may be `to`.
void round_cpu(const float* from, float* to, int64_t count, bool fp16);

// What the file was compiled for: "AVX-512 with BF16", "AVX-512", "AVX2", or "plain vectors".
const char* instruction_set_cpu();
