// Products of matrices, accumulated in float32 where they are added: on the CPU by oneDNN's kernels as libtorch offers
// them to others (ATen/native/CPUBlas.h), which take both factors in 16 bits and round nothing in between; on other
// devices by their libraries' (addmm.dtype_out and baddbmm.dtype_out, which CUDA has).
#pragma once

#include <ATen/core/Tensor.h>

namespace zbp {

/// sum += left @ right
struct MatrixProduct {
  at::Tensor left;
  at::Tensor right;
};

/// Whether `accumulate` can add them to `sum`: matrices, or batches of them, of one dtype in plain memory.
bool can_accumulate(const at::Tensor& sum, const MatrixProduct& product);

/// The same for `accumulate_on_device`: on another device than the CPU, whose library has a kernel for it.
bool can_accumulate_on_device(const at::Tensor& sum, const MatrixProduct& product);

/// Adds the product to `sum`, by the device's addmm or baddbmm with an out_dtype. If it raises, nothing was added.
void accumulate_on_device(at::Tensor& sum, const MatrixProduct& product);

/// Adds all products to `sum`, each element in float32, as one product whose inner dimension is that of all. Takes
/// 2 MiB at most, and 128 KiB more per thread. If it raises, nothing was added.
void accumulate(const at::Tensor& sum, c10::ArrayRef<MatrixProduct> products);

}  // namespace zbp
