#include "shim/memory/zbp_tap.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include "core/memory/zbp_ledger.h"
#include "shim/memory/traces.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;

/// CLOCK_MONOTONIC in nanoseconds.
uint64_t nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

/// A small number for the calling thread, from 1.
uint32_t this_thread() {
  static std::atomic<uint32_t> next{0};
  thread_local const uint32_t number = ++next;
  return number;
}

/// What all recordings share. Never destroyed: tensors are freed until the process ends.
struct Tapped {
  std::mutex mutex;
  zbp_ledger ledger{};
  std::unordered_map<uint64_t, Trace> traces;
  // To be read without the lock:
  std::atomic<bool> is_fed{false};      // some record is; whoever sees it sees the tap in front
  std::atomic<size_t> block_count{0};   // in use
  std::atomic<int> tracers{0};          // who wants to know where blocks come from
  std::atomic<uint64_t> generation{0};  // of traces: an older one's codes may be gone
  std::atomic<uint64_t> watchers{
      0};  // changes when nobody wants to know any more what collections free
};

Tapped& tapped() {
  static Tapped* const all = new Tapped;
  return *all;
}

uint64_t number_of(const void* data) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
}

/// The clock is read under the lock, so that no log runs backwards; and not where nobody will be told.
uint64_t now(const zbp_ledger& ledger) {
  return ledger.record_count != 0 ? nanoseconds() : 0;
}

void note_untracked() {
  Tapped& t = tapped();
  const std::lock_guard<std::mutex> lock(t.mutex);
  zbp_ledger_untracked(&t.ledger);
}

/// What a collection that runs on this thread has freed.
struct Collection {
  bool runs = false;
  uint64_t watchers = 0;  // those that it began for
  std::vector<zbp_block> freed;
};

thread_local Collection collection;

/// Without memory for the ledger the block is not followed: nobody will know it when it is freed.
/// One that the ledger has at its address was freed past our deleter: raw_deallocate() after we were taken out.
void note_alloc(const void* data, size_t bytes) {
  Tapped& t = tapped();
  const uint64_t generation = t.generation.load(std::memory_order_acquire);
  Trace trace = t.tracers.load(std::memory_order_relaxed) != 0 ? trace_now() : Trace();
  const std::lock_guard<std::mutex> lock(t.mutex);
  const uint64_t address = number_of(data);
  if (zbp_ledger_alloc(&t.ledger, now(t.ledger), this_thread(), address, bytes) != ZBP_OK) {
    zbp_ledger_untracked(&t.ledger);
    return;
  }
  if (!trace.empty() && generation == t.generation.load(std::memory_order_relaxed)) {
    t.traces.insert_or_assign(address, std::move(trace));
  }
  t.block_count.store(t.ledger.blocks.count, std::memory_order_relaxed);
}

/// Before the block is freed: afterwards another thread may be given its address.
void note_free(const void* data) {
  Tapped& t = tapped();
  if (t.block_count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const uint64_t address = number_of(data);
  decltype(t.traces)::node_type trace;  // goes when the lock is given back
  const std::lock_guard<std::mutex> lock(t.mutex);
  if (!t.traces.empty()) {
    trace = t.traces.extract(address);
  }
  zbp_block block{};
  if (zbp_ledger_free(&t.ledger, now(t.ledger), this_thread(), address, &block)) {
    t.block_count.store(t.ledger.blocks.count, std::memory_order_relaxed);
    if (collection.runs && collection.watchers == t.watchers.load(std::memory_order_relaxed)) {
      collection.freed.push_back(block);
    }
  }
}

/// Around the context of a block whose deleter needs one.
struct Context {
  void* data;
  void* inner;
  c10::DeleterFnPtr deleter;
};

void free_context(void* context) {
  const std::unique_ptr<Context> c(static_cast<Context*>(context));
  note_free(c->data);
  c->deleter(c->inner);
}

/// One of these for each allocator that we have stood in front of. A deleter is a plain function: the
/// slot's number is how it finds the allocator.
constexpr size_t SLOTS = 4;

class Tap final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return inner_deleter ? deleter : nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    behind()->copy_data(dest, src, count);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data_ptr) const override {
    return data_ptr.get_deleter() != &free_context && behind()->is_simple_data_ptr(data_ptr);
  }
  c10::Allocator* behind() const { return inner.load(std::memory_order_acquire); }

  // Set once, before anybody can call. c10 hands the tap to other threads through a plain pointer.
  std::atomic<c10::Allocator*> inner{nullptr};
  c10::DeleterFnPtr inner_deleter = nullptr;
  c10::DeleterFnPtr deleter = nullptr;
};

std::array<Tap, SLOTS>& taps() {
  static auto* const the_taps = new std::array<Tap, SLOTS>;
  return *the_taps;
}

template <size_t slot>
void free_block(void* data) {
  note_free(data);
  taps()[slot].inner_deleter(data);
}

template <size_t... slot>
c10::DeleterFnPtr deleter_of(size_t i, std::index_sequence<slot...> /*slots*/) {
  constexpr std::array<c10::DeleterFnPtr, sizeof...(slot)> all{&free_block<slot>...};
  return all[i];
}

/// True while a tap is within the allocator behind it, which may be a chain that leads to another tap.
thread_local bool is_inside = false;

struct Inside {
  Inside() { is_inside = true; }
  ~Inside() { is_inside = false; }
};

c10::DataPtr Tap::allocate(size_t bytes) {
  if (is_inside || !tapped().is_fed.load(std::memory_order_acquire)) {
    return behind()->allocate(bytes);
  }
  c10::DataPtr block = [&] {
    const Inside inside;
    return behind()->allocate(bytes);
  }();
  if (block.get() == nullptr || block.get_context() == nullptr) {
    return block;  // of no bytes, or nobody's to free
  }
  if (inner_deleter && block.get() == block.get_context() &&
      block.compare_exchange_deleter(inner_deleter, deleter)) {
    note_alloc(block.get(), bytes);
    return block;
  }
  auto* context = new (std::nothrow) Context{block.get(), block.get_context(), block.get_deleter()};
  if (context == nullptr) {
    note_untracked();
    return block;
  }
  note_alloc(block.get(), bytes);
  block.release_context();
  return {context->data, context, &free_context, block.device()};
}

bool is_tap(const c10::Allocator* allocator) {
  return allocator >= taps().begin() && allocator < taps().end();
}

/// The tap that stands in front of `allocator`; a new one the first time.
Tap& tap_of(c10::Allocator* allocator) {
  for (size_t i = 0; i < SLOTS; ++i) {
    Tap& tap = taps()[i];
    if (tap.behind() == nullptr) {
      tap.inner_deleter = allocator->raw_deleter();
      tap.deleter = deleter_of(i, std::make_index_sequence<SLOTS>());
      tap.inner.store(allocator, std::memory_order_release);
    }
    if (tap.behind() == allocator) {
      return tap;
    }
  }
  refuse(PyExc_RuntimeError, "memory cannot be recorded: the CPU allocator was replaced ", SLOTS,
         " times between recordings; make them while one of the first ", SLOTS, " is installed");
}

c10::Allocator* installed() {
  return c10::GetAllocator(c10::kCPU);
}

void install() {
  c10::Allocator* const current = installed();
  if (is_tap(current)) {
    return;
  }
  Tap& tap = tap_of(current);
  c10::SetAllocator(c10::kCPU, &tap);
  if (installed() != &tap) {
    refuse(PyExc_RuntimeError,
           "memory cannot be recorded: the installed CPU allocator was set with a priority, which "
           "forbids to stand in front of it; install it with priority 0");
  }
}

/// False if what is installed is not ours.
bool uninstall() {
  c10::Allocator* const current = installed();
  if (!is_tap(current)) {
    return false;
  }
  c10::SetAllocator(c10::kCPU, static_cast<Tap*>(current)->behind());
  return true;
}

/// The storage of a tensor or of a torch.UntypedStorage, nullptr if `object` has none. By its type alone:
/// isinstance() would run the code of whoever fakes __class__.
c10::StorageImpl* storage_in(PyObject* object) {
  if (PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    return tensor.defined() && tensor.has_storage()
               ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
               : nullptr;
  }
  if (PyObject_TypeCheck(object, THPStorageClass)) {
    return THPStorage_Unpack(object).unsafeGetStorageImpl();
  }
  return nullptr;
}

[[noreturn]] void refuse_for_memory() {
  refuse(PyExc_MemoryError, "there is no memory to record memory with");
}

void lock_for_fork() {
  tapped().mutex.lock();
}

void unlock_after_fork() {
  tapped().mutex.unlock();
}

}  // namespace

int zbp_tap_start(zbp_record* record, uint64_t max_events, zbp_error* error) {
  bool is_fed = false;
  const int status = guarded(error, [&] {
    static const int at_fork =
        pthread_atfork(&lock_for_fork, &unlock_after_fork, &unlock_after_fork);
    if (at_fork != 0) {
      refuse_for_memory();
    }
    Tapped& t = tapped();
    const bool is_first = !t.is_fed.load(std::memory_order_relaxed);
    if (is_first) {
      install();
    }
    const std::lock_guard<std::mutex> lock(t.mutex);
    if (zbp_ledger_start(&t.ledger, record, nanoseconds(), this_thread(), max_events) != ZBP_OK) {
      if (is_first) {
        uninstall();
      }
      refuse_for_memory();
    }
    t.is_fed.store(true, std::memory_order_release);
    is_fed = true;
  });
  if (status != ZBP_OK && is_fed) {  // a warning is an error
    int displaced = 0;
    zbp_tap_stop(record, &displaced);
    zbp_record_fini(record);
  }
  return status;
}

void zbp_tap_stop(zbp_record* record, int* displaced_out) {
  Tapped& t = tapped();
  *displaced_out = !is_tap(installed());
  const std::lock_guard<std::mutex> lock(t.mutex);
  zbp_ledger_stop(&t.ledger, record);
  if (t.ledger.record_count == 0) {
    t.is_fed.store(false, std::memory_order_relaxed);
    uninstall();
  }
}

int zbp_tap_adopt(PyObject* objects, zbp_error* error) {
  return guarded(error, [&] {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
      if (c10::StorageImpl* const storage = storage_in(PyList_GET_ITEM(objects, i))) {
        zbp_tap_adopt_storage(storage);
      }
    }
  });
}

void zbp_tap_adopt_storage(void* storage) {
  c10::Allocator* const current = installed();
  auto* const grows = static_cast<c10::StorageImpl*>(storage);
  if (is_tap(current) && grows->allocator() == static_cast<Tap*>(current)->behind()) {
    grows->set_allocator(current);
  }
}

int zbp_tap_feeds(const void* allocator) {
  c10::Allocator* const current = installed();
  return is_tap(current) &&
         (allocator == current || allocator == static_cast<Tap*>(current)->behind());
}

int zbp_tap_mark(zbp_record* record, uint32_t* index_out) {
  Tapped& t = tapped();
  const std::lock_guard<std::mutex> lock(t.mutex);
  return zbp_ledger_mark(&t.ledger, record, nanoseconds(), this_thread(), index_out);
}

void zbp_tap_trace_start(void) {
  ++tapped().tracers;
}

void zbp_tap_trace_stop(void) {
  Tapped& t = tapped();
  if (--t.tracers != 0) {
    return;
  }
  decltype(t.traces) traces;
  {
    const std::lock_guard<std::mutex> lock(t.mutex);
    traces.swap(t.traces);
    ++t.generation;
  }
  forget_codes();
}

PyObject* zbp_tap_trace_of(uint64_t address, zbp_error* error) {
  return guarded_object(error, [&] {
    Tapped& t = tapped();
    Trace trace;
    {
      const std::lock_guard<std::mutex> lock(t.mutex);
      if (const auto found = t.traces.find(address); found != t.traces.end()) {
        trace = found->second;
      }
    }
    return described(trace);
  });
}

void zbp_tap_collection_begins(void) {
  collection.freed.clear();
  collection.watchers = tapped().watchers.load(std::memory_order_relaxed);
  collection.runs = true;
}

int zbp_tap_collection_ends(zbp_block** blocks_out, size_t* count_out) {
  *blocks_out = nullptr;
  *count_out = 0;
  const std::vector<zbp_block> freed = std::exchange(collection, {}).freed;
  if (freed.empty()) {
    return ZBP_OK;
  }
  auto* const blocks = static_cast<zbp_block*>(std::malloc(freed.size() * sizeof(zbp_block)));
  if (blocks == nullptr) {
    return ZBP_ENOMEM;
  }
  std::copy(freed.begin(), freed.end(), blocks);
  *blocks_out = blocks;
  *count_out = freed.size();
  return ZBP_OK;
}

void zbp_tap_forget_collections(void) {
  ++tapped().watchers;
}

uint64_t zbp_tap_serial(void) {
  Tapped& t = tapped();
  const std::lock_guard<std::mutex> lock(t.mutex);
  return t.ledger.next_serial;
}

int zbp_tap_blocks(uint64_t since, zbp_block** blocks_out, size_t* count_out) {
  Tapped& t = tapped();
  const std::lock_guard<std::mutex> lock(t.mutex);
  *blocks_out = nullptr;
  *count_out = 0;
  const size_t in_use = t.ledger.blocks.count;
  if (in_use == 0) {
    return ZBP_OK;
  }
  auto* const blocks = static_cast<zbp_block*>(std::malloc(in_use * sizeof(zbp_block)));
  if (blocks == nullptr) {
    return ZBP_ENOMEM;
  }
  *blocks_out = blocks;
  *count_out = zbp_ledger_since(&t.ledger, since, blocks);
  return ZBP_OK;
}

void zbp_tap_lock(void) {
  tapped().mutex.lock();
}

void zbp_tap_unlock(void) {
  tapped().mutex.unlock();
}
