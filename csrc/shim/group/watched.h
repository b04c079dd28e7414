// Tensors that W will read: what I keeps of them, and how W finds out that they were changed since.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

namespace zbp {

using c10::SmallVector;

/// False for what is undefined, and for inference tensors.
bool has_version(const at::Tensor& tensor);

/// A tensor that W will read, and the version that it had when I kept it.
class Watched {
 public:
  Watched() = default;
  /// Keeps a detached alias of `tensor`: same memory, same version counter, no history.
  explicit Watched(const at::Tensor& tensor);
  /// Keeps `tensor` itself, with its history: for what a second try could not have back if this
  /// threw.
  static Watched with_history(at::Tensor&& tensor) noexcept;

  const at::Tensor& tensor() const { return tensor_; }
  uint32_t kept_version() const { return version_; }
  bool was_modified() const;
  void reset() { tensor_.reset(); }

 private:
  at::Tensor tensor_;
  uint32_t version_ = 0;
};

/// The version of a tensor that W will read and that no group holds.
class Version {
 public:
  /// Of a tensor for which has_version() is true.
  explicit Version(const at::Tensor& tensor);

  bool was_modified() const { return counter_.current_version() != seen_; }
  uint32_t seen() const { return seen_; }
  uint32_t now() const { return counter_.current_version(); }
  /// The tensor as "float32[2, 3] on cpu", for messages.
  std::string describe() const;

 private:
  c10::VariableVersion counter_;
  uint32_t seen_;
  c10::ScalarType type_;
  c10::Device device_;
  SmallVector<c10::SymInt, 4> sizes_;
};

/// What a W that computes checkpointed regions again may read beside what the groups hold: one list
/// for all groups of an I, the first read in the forward first.
struct Reads {
  struct Read {
    uint64_t sequence_nr;  // of the first node that read it
    Version weight;
  };
  std::vector<Read> weights;
};

/// The identity of the tensor's storage; null if it has none.
const void* storage_of(const at::Tensor& tensor);

/// Of the tensor's whole storage; 0 where there is none, or where its size is not known as a
/// number.
size_t bytes_of(const at::Tensor& tensor);

}  // namespace zbp
