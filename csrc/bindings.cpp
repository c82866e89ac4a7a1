// The door between PyTorch and csrc/: it checks tensors and picks the code of their device. The op's schema, derivative
// and fallback are in model/bf16_linear.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "bf16_linear_cpu.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace {

bool is_bf16(const at::Tensor& tensor, const char* name) {
    const auto dtype = tensor.scalar_type();
    TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kFloat, "bf16_linear: ", name, " must be fp32 or bf16, not ",
                dtype);
    return dtype == at::kBFloat16;
}

// Checks the tensors and makes room for the result y. The references keep contiguous copies alive.
Problem problem_of(at::Tensor& x, at::Tensor& weight, std::optional<at::Tensor>& bias, at::Tensor& y) {
    TORCH_CHECK(weight.dim() == 2, "bf16_linear: weight must be (M, K), not ", weight.sizes());
    TORCH_CHECK(x.dim() >= 1 && x.size(-1) == weight.size(1), "bf16_linear: x must be (..., K = ", weight.size(1),
                ") to fit weight ", weight.sizes(), ", not ", x.sizes());
    TORCH_CHECK(x.device() == weight.device(), "bf16_linear: x is on ", x.device(), ", weight on ", weight.device());
    if (bias) {
        TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0),
                    "bf16_linear: bias must be (M = ", weight.size(0), "), not ", bias->sizes());
        TORCH_CHECK(bias->device() == x.device(), "bf16_linear: x is on ", x.device(), ", bias on ", bias->device());
        bias = bias->contiguous();
    }
    x = x.contiguous();
    weight = weight.contiguous();
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    y = at::empty(sizes, x.options());
    const int64_t n = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
    return {x.const_data_ptr(),
            weight.const_data_ptr(),
            bias ? bias->const_data_ptr() : nullptr,
            y.data_ptr(),
            n,
            weight.size(0),
            weight.size(1),
            is_bf16(x, "x"),
            is_bf16(weight, "weight"),
            bias && is_bf16(*bias, "bias")};
}

at::Tensor linear_cpu(at::Tensor x, at::Tensor weight, std::optional<at::Tensor> bias) {
    at::Tensor y;
    bf16_linear_cpu(problem_of(x, weight, bias, y));
    return y;
}

#ifdef WITH_CUDA
at::Tensor linear_cuda(at::Tensor x, at::Tensor weight, std::optional<at::Tensor> bias, int64_t version) {
    const c10::cuda::CUDAGuard guard(x.device());
    at::Tensor y;
    const Problem problem = problem_of(x, weight, bias, y);
    const char* error = bf16_linear_cuda(problem, version, c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(error == nullptr, "bf16_linear on ", x.device(), ": ", error);
    return y;
}
#endif

// x (..., K), weight (M, K), bias (M) -> (..., M). `version` picks one of bf16_linear.cu; the CPU has no versions.
at::Tensor linear(at::Tensor x, at::Tensor weight, std::optional<at::Tensor> bias, int64_t version) {
#ifdef WITH_CUDA
    if (x.is_cuda()) return linear_cuda(x, weight, bias, version);
#endif
    TORCH_CHECK(x.is_cpu(), "bf16_linear: x is on ", x.device(), ", for which this build has no code");
    TORCH_CHECK(version == AUTO, "bf16_linear: only CUDA has versions, and x is on the CPU");
    return linear_cpu(x, weight, bias);
}

// The version of bf16_linear.cu that AUTO takes for n vectors and weight (M, K) on the current device; -1 without CUDA.
int64_t cuda_version_for(int64_t n, int64_t m, int64_t k, bool x_bf16, bool weight_bf16) {
#ifdef WITH_CUDA
    int version = AUTO;
    const char* error =
        bf16_linear_cuda_version({nullptr, nullptr, nullptr, nullptr, n, m, k, x_bf16, weight_bf16}, &version);
    TORCH_CHECK(error == nullptr, "bf16_linear: ", error);
    return version;
#else
    return AUTO;
#endif
}

void check_rounding(const at::Tensor& x) {
    TORCH_CHECK(x.is_cpu() && x.scalar_type() == at::kFloat, "rounding takes fp32 tensors on the CPU");
}

// Rounds in the memory of x to the nearest values of fp16, or else of bf16, ties to even.
at::Tensor round_(at::Tensor x, bool fp16) {
    check_rounding(x);
    TORCH_CHECK(x.is_non_overlapping_and_dense(), "round_: x has holes or overlaps");  // memory order does not matter
    float* const numbers = x.mutable_data_ptr<float>();
    round_cpu(numbers, numbers, x.numel(), fp16);
    return x;
}

// The same rounding into a new tensor.
at::Tensor rounded(const at::Tensor& x, bool fp16) {
    check_rounding(x);
    if (!x.is_non_overlapping_and_dense()) return round_(x.contiguous(), fp16);
    at::Tensor y = at::empty_like(x);
    round_cpu(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel(), fp16);
    return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(minigpt, CPU, library) { library.impl("bf16_linear", linear_cpu); }

#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(minigpt, CUDA, library) {
    library.impl("bf16_linear", [](at::Tensor x, at::Tensor weight, std::optional<at::Tensor> bias) {
        return linear_cuda(x, weight, bias, AUTO);
    });
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    namespace py = pybind11;
    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def("bf16_linear", linear, py::arg("x"), py::arg("weight"), py::arg("bias") = py::none(),
               py::arg("version") = AUTO, released);
    module.def(
        "bf16_gemv",
        [](at::Tensor weight, at::Tensor x, int64_t version) {
            TORCH_CHECK(x.dim() == 1, "bf16_gemv: x must be one vector (K), not ", x.sizes());
            return linear(x, weight, std::nullopt, version);
        },
        "weight (M, K) times x (K) -> (M)", py::arg("weight"), py::arg("x"), py::arg("version") = AUTO, released);
    module.def("cuda_version_for", cuda_version_for);
    module.def("rounded", rounded, py::arg("x"), py::arg("fp16"), released);
    module.def("round_", round_, py::arg("x"), py::arg("fp16"), released);
    module.def("instruction_set", instruction_set_cpu);
#ifdef WITH_CUDA
    module.attr("with_cuda") = true;
#else
    module.attr("with_cuda") = false;
#endif
}
