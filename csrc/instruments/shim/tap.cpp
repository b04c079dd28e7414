#include "instruments/shim/zbp_tap.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include "instruments/shim/handle.h"
#include "instruments/shim/zbp_traces.h"

namespace {

using namespace zbp;

/// CLOCK_MONOTONIC.
uint64_t nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t number_of(const void* data) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
}

/// One that is followed at this address already was freed past our deleter: raw_deallocate() after
/// we were taken out.
void note_alloc(const void* data, size_t bytes) {
  const uint64_t trace =
      zbp_trace_here();  // takes the GIL, which nobody may under the tally's lock
  zbp_tally_alloc(zbp_tap_tally(), number_of(data), bytes, trace);
}

/// Around the context of a block whose deleter needs one.
struct Context {
  void* data;
  void* inner;
  c10::DeleterFnPtr deleter;
};

void free_context(void* context) {
  const std::unique_ptr<Context> c(static_cast<Context*>(context));
  zbp_tally_free(zbp_tap_tally(), number_of(c->data));
  c->deleter(c->inner);
}

/// One of these for each allocator that we have stood in front of. A deleter is a plain function:
/// the slot's number is how it finds the allocator.
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
  zbp_tally_free(zbp_tap_tally(), number_of(data));
  taps()[slot].inner_deleter(data);
}

template <size_t... slot>
c10::DeleterFnPtr deleter_of(size_t i, std::index_sequence<slot...> /*slots*/) {
  constexpr std::array<c10::DeleterFnPtr, sizeof...(slot)> all{&free_block<slot>...};
  return all[i];
}

/// True while a tap is within the allocator behind it, which may be a chain that leads to another
/// tap.
thread_local bool is_inside = false;

struct Inside {
  Inside() { is_inside = true; }
  ~Inside() { is_inside = false; }
};

c10::DataPtr Tap::allocate(size_t bytes) {
  if (is_inside || !zbp_tally_is_fed(zbp_tap_tally())) {
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
    zbp_tally_untracked(zbp_tap_tally());
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
  __sync_synchronize();  // c10 hands it to other threads by a plain store
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

[[noreturn]] void refuse_for_memory() {
  refuse(PyExc_MemoryError, "there is no memory to record memory with");
}

void lock_for_fork() {
  zbp_tally_lock(zbp_tap_tally());
}

void unlock_after_fork() {
  zbp_tally_unlock(zbp_tap_tally());
}

}  // namespace

zbp_tally* zbp_tap_tally(void) {
  static zbp_tally* const all = [] {
    auto* const made = new zbp_tally;
    zbp_tally_init(made, &nanoseconds);
    return made;
  }();
  return all;
}

int zbp_tap_start(zbp_record* record, uint64_t max_events, zbp_error* error) {
  bool is_fed = false;
  const int status = guarded(error, [&] {
    static const int at_fork =
        pthread_atfork(&lock_for_fork, &unlock_after_fork, &unlock_after_fork);
    if (at_fork != 0) {
      refuse_for_memory();
    }
    const bool is_first = !zbp_tally_is_fed(zbp_tap_tally());
    if (is_first) {
      install();
    }
    is_fed = zbp_tally_start(zbp_tap_tally(), record, max_events) == ZBP_OK;
    if (!is_fed) {
      if (is_first) {
        uninstall();
      }
      refuse_for_memory();
    }
  });
  if (status != ZBP_OK && is_fed) {  // a warning is an error
    int displaced = 0;
    zbp_tap_stop(record, &displaced);
    zbp_record_fini(record);
  }
  return status;
}

void zbp_tap_stop(zbp_record* record, int* displaced_out) {
  *displaced_out = !is_tap(installed());
  if (zbp_tally_stop(zbp_tap_tally(), record)) {
    uninstall();
  }
}

void zbp_tap_adopt(PyObject* object) {
  const auto* const tensor = tensor_in(object);
  if (auto* const storage = tensor ? storage_in(*tensor) : storage_in(object)) {
    zbp_tap_adopt_storage(storage);
  }
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

int zbp_tap_blocks(uint64_t since, zbp_block** blocks_out, size_t* count_out) {
  const zbp_blocks& in_use = zbp_tap_tally()->blocks;
  zbp_tally_lock(zbp_tap_tally());
  const size_t most = in_use.count;
  auto* const blocks =
      most != 0 ? static_cast<zbp_block*>(std::malloc(most * sizeof(zbp_block))) : nullptr;
  zbp_block* end = blocks;
  for (size_t i = 0; blocks != nullptr && i < in_use.capacity; ++i) {
    if (in_use.slot[i].address != 0 && in_use.slot[i].serial >= since) {
      *end++ = in_use.slot[i];
    }
  }
  zbp_tally_unlock(zbp_tap_tally());
  std::sort(blocks, end,
            [](const zbp_block& a, const zbp_block& b) { return a.serial < b.serial; });
  *blocks_out = blocks;
  *count_out = static_cast<size_t>(end - blocks);
  return blocks != nullptr || most == 0 ? ZBP_OK : ZBP_ENOMEM;
}
