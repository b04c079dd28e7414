// The device as libtorch asks for it: memory, devices, streams, events.

#include "backend.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>

namespace late {

Faults faults;

namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, DEVICES> streams_of_thread{};
std::mutex captures_mutex;
std::set<uint32_t> captures;

c10::Device checked(c10::Device device) {
  TORCH_CHECK(device.index() < DEVICES, "late: there is no device ", device.index());
  return c10::Device(LATE, device.index() < 0 ? device_of_thread : device.index());
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(LATE, device_of_thread);
    if (bytes == 0) {
      return {nullptr, nullptr, &give_back, device};
    }
    Block* block = Schedule::get().allocate(bytes, current_stream(device.index()));
    return {block->data, block, &give_back, device};
  }
  static void give_back(void* block) {
    if (block) {
      Schedule::get().free(static_cast<Block*>(block));
    }
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    Schedule::get().finish_all(-1);
    std::memcpy(to, from, count);
  }
};

/// Whether the code at the address is zbpipe's own.
bool is_zbpipe(void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 && info.dli_fname &&
         std::strstr(info.dli_fname, "zbpipe/_native/");
}

struct Event {
  Mark mark;
};

std::mutex calls_mutex;
std::vector<EventCall> calls;

void note(EventCall call) {
  const std::lock_guard<std::mutex> lock(calls_mutex);
  calls.push_back(call);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return LATE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {LATE, device_of_thread}; }
  void setDevice(c10::Device device) const override { device_of_thread = checked(device).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = device.index() < 0 ? device_of_thread : device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device device) const override {
    const c10::Device of = checked(device);
    return c10::Stream(c10::Stream::UNSAFE, of, streams_of_thread[of.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, checked(device));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const c10::Device of = checked(device);
    return c10::Stream(c10::Stream::UNSAFE, of, Schedule::get().new_stream(of.index()) / DEVICES);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Schedule::get().is_done(Schedule::get().mark(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Schedule::get().finish(Schedule::get().mark(number_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Schedule::get().finish_all(device);
  }
  bool isStreamCapturing(const c10::Stream& stream) const
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
      override
#endif
  {
    const std::lock_guard<std::mutex> lock(captures_mutex);
    return captures.count(number_of(stream)) != 0 || Schedule::get().is_captured(number_of(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (!*event) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->mark = Schedule::get().mark(number_of(stream));
    note({'r', is_zbpipe(__builtin_return_address(0)), number_of(stream), number_of(stream)});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) {
      return;
    }
    const bool is_ours = is_zbpipe(__builtin_return_address(0));
    const bool is_join = number_of(stream) == current_stream(stream.device_index());
    const bool is_asked =
        faults.wait == Wait::either || faults.wait == (is_join ? Wait::joins : Wait::follows);
    faults.waits_seen += is_ours ? 1 : 0;
    note({'w', is_ours, static_cast<Event*>(event)->mark.at.stream, number_of(stream)});
    if (is_ours && is_asked && faults.waits.is_dropped()) {
      return;
    }
    Schedule::get().wait(number_of(stream), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return !event || Schedule::get().is_done(static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      Schedule::get().finish(static_cast<Event*>(event)->mark);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Block* block = block_of(data);
    if (block && !faults.records.is_dropped()) {
      Schedule::get().record(block, number_of(stream));
    }
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_of_thread = device; }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(device_of_thread, device < 0 ? device_of_thread : device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard on(storage.device());
    c10::DataPtr grown = allocator()->allocate(bytes);
    Block *from = block_of(storage.data_ptr()), *to = block_of(grown);
    if (const size_t kept = from && to ? std::min(bytes, storage.nbytes()) : 0) {
      Schedule::get().enqueue(current_stream(storage.device().index()), "resizing a storage",
                              {{from, 0, kept, false}, {to, 0, kept, true}},
                              [a = to->data, b = from->data, kept] { std::memcpy(a, b, kept); });
    }
    storage.set_data_ptr(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

c10::DeviceIndex current_device() {
  return device_of_thread;
}

uint32_t current_stream(c10::DeviceIndex device) {
  return stream_number(device, streams_of_thread[device]);
}

c10::Allocator* allocator() {
  static auto* memory = new Memory;
  return memory;
}

std::vector<EventCall> take_calls() {
  const std::lock_guard<std::mutex> lock(calls_mutex);
  return std::exchange(calls, {});
}

void set_capturing(uint32_t stream, bool is_capturing) {
  const std::lock_guard<std::mutex> lock(captures_mutex);
  if (is_capturing) {
    captures.insert(stream);
  } else {
    captures.erase(stream);
  }
}

namespace {

[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(LATE, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace late
