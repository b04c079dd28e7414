// Kept tensors: what outlives the node that made it, between I and W or towards the caller. Whose
// memory it is, on which stream it is ready, and how W finds out that it was changed since. The
// rules are those of docs/architecture.md, "What is kept".
//
// Note [Whose memory a gradient has]
// What a Function or a hook returns is copied, if somebody else has its memory (Holders). The time
// is when an ordinary backward has used it: what hooks return at once; a weight's gradient when the
// last one of this backward has come. What came in and goes out again is not copied (CameIn), but
// for what a node that computes a weight hands on: a Function before it may keep that.
//
// Note [Streams]
// A task runs on its node's stream, or where the node had none on that of what it keeps, whichever
// thread or stream calls. I starts after what the caller's streams have been given, and these wait
// for what I has given its own: the engine's rules for the roots and the leaves of a graph, and the
// captures are the leaves of I's. For W see Streams. So whoever calls W on another thread or stream
// than I needs no synchronisation of his own but for gradients that a third stream uses.
//
// I and W may be captured in one graph of the device's. A W outside of the capture of its I would
// read what no replay has computed yet, one within a capture what every replay would find
// overwritten: both are refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include "shim/torch/compat.h"

namespace zbp {

using c10::SmallVector;

/// False for what is undefined, and for inference tensors.
bool has_version(const at::Tensor& tensor);

/// The identity of the tensor's storage; null if it has none.
const void* storage_of(const at::Tensor& tensor);

/// The same of a DTensor's local part, a sparse tensor's values; without one, the tensor's own.
const void* memory_of(const at::Tensor& tensor);

/// Of the tensor's whole storage; 0 where there is none, or where its size is not known as a
/// number.
size_t bytes_of(const at::Tensor& tensor);

/// True for a tensor whose storage was emptied: its values are not there.
bool is_emptied(const at::Tensor& tensor);

// ---- what is kept

/// A tensor that W will read, the version that it had when it was kept, and the stream.
class Kept {
 public:
  Kept() = default;
  /// Keeps a detached alias of `tensor`: same memory, same version counter, no history.
  explicit Kept(const at::Tensor& tensor);
  /// Keeps `tensor` itself, with its history: for what a second try could not have back if this
  /// threw.
  static Kept with_history(at::Tensor&& tensor) noexcept;

  const at::Tensor& tensor() const { return tensor_; }
  /// None for what is on no device that runs late.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  /// Puts the device's current stream, which is about to read it, behind its own, unless it was put
  /// behind `ordered`, which is that from now on.
  void bring_here(std::optional<c10::Stream>& ordered) const;

  uint32_t kept_version() const { return version_; }
  bool was_modified() const;
  /// It is as it is now that W is to read it.
  void see_anew() { version_ = has_version(tensor_) ? tensor_._version() : 0; }
  void reset() { tensor_.reset(); }

 private:
  at::Tensor tensor_;
  std::optional<c10::Stream> stream_;
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

// ---- whose memory it is

/// The references to some tensors' memory that are known: who else has it is somebody else.
class Holders {
 public:
  explicit Holders(c10::ArrayRef<at::Tensor> known = {});
  /// Adds a reference: the tensor's, and its base's by it.
  void add(const at::Tensor& tensor);
  /// True if others have the memory of a tensor that was added. Of a DTensor the local part is
  /// asked. False for other subclasses, and for a local part that is not there yet. Takes the GIL.
  bool has_others(const at::Tensor& tensor) const;

 private:
  std::unordered_map<const c10::TensorImpl*, size_t> known_;
};

/// Gives the gradients memory of their own, if somebody else has it, beside them and the `known`.
void own(c10::ArrayRef<Kept*> grads, c10::ArrayRef<at::Tensor> known);

/// Gradients on their way into a Function or a hook. Their memory is known again, and not kept.
class CameIn {
 public:
  explicit CameIn(c10::ArrayRef<at::Tensor> grads);
  bool has(const at::Tensor& grad) const;
  /// Gives those of the returned gradients memory of their own that did not come in, and that
  /// somebody else has, too. `known`: other references to what is returned.
  void own(variable_list& returned, c10::ArrayRef<at::Tensor> known = {}) const;

 private:
  SmallVector<c10::weak_intrusive_ptr<c10::StorageImpl>, 2> storages_;
};

// ---- streams

/// False for a device whose kernels have run when they return.
bool runs_late(c10::Device device);

/// What has the device and the stream on which the node runs, borrowed; null for a node of the CPU.
const torch::autograd::InputMetadata* late_metadata_of(Node& node);
/// The stream alone.
std::optional<c10::Stream> stream_of(Node& node);

c10::Stream current_stream(c10::Device device);

/// The current stream of the tensor's device; none where nothing runs late.
std::optional<c10::Stream> stream_here(const at::Tensor& tensor);

/// `second` does what it is given from now on when `first` has done what it has been given.
void order(const c10::Stream& first, const c10::Stream& second);

/// The allocator learns that `tensor` is used on the current stream, which is not its own.
void record_here(const at::Tensor& tensor);

/// Several streams, each once. In a call of W those of tasks and weights wait for the caller's
/// before, and the caller's for them at the end.
class Streams {
 public:
  void add(const std::optional<c10::Stream>& stream);
  void add(const Streams& others);
  bool empty() const { return all_.empty(); }
  void follow_caller() const { order_callers(true); }
  void join() const { order_callers(false); }
  /// True if the caller captures a graph on one of their devices.
  bool are_captured() const;

 private:
  void order_callers(bool are_first) const;

  SmallVector<c10::Stream, 2> all_;
};

}  // namespace zbp
