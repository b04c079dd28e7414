// The storages and CPU blocks of a moment: what zbp_holders.h compares and searches for.
#pragma once

#include <Python.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/holders/heap.h"
#include "shim/holders/zbp_holders.h"

struct zbp_storages {
  // The weak reference keeps the identity from being given to another storage.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
};

namespace zbp {

/// While it lives, Python's collector does not run by itself, and so frees nothing that was seen.
class NoCollection {
 public:
  NoCollection() : was_enabled_(PyGC_Disable()) {}
  ~NoCollection() {
    if (was_enabled_) {
      PyGC_Enable();
    }
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  bool was_enabled_;
};

/// Null if the tensor has none.
const c10::StorageImpl* storage_key(const c10::TensorImpl& tensor);
const c10::TensorImpl& tensor_at(const Heap& heap, uint32_t v);
const c10::StorageImpl& storage_at(const Heap& heap, uint32_t v);
uint64_t address_of(const c10::StorageImpl& storage);
/// 0 for a storage without memory whose size is symbolic (a tracer's).
size_t bytes_of(const c10::StorageImpl& storage);

/// All that Python's collector knows. Throws python_error.
THPObjectPtr collectors_list();

/// As zbp_search's roots: adds them to `heap`.
void add_roots_to(Heap& heap, PyObject* roots);

struct Block {
  uint64_t bytes;
  bool found = false;
};

using Blocks = std::unordered_map<uint64_t, Block>;

/// Blocks that were handed out from `since` on and before `until`, by their addresses; of others the addresses alone.
Blocks blocks_between(uint64_t since, uint64_t until, std::unordered_set<uint64_t>& others_out);

/// True for memory that is not among `older` and that the tap does not know.
bool is_foreign(const c10::StorageImpl& storage, const zbp_storages& older,
                const std::unordered_set<uint64_t>& tapped);

}  // namespace zbp
