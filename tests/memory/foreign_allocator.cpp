// CPU allocators of somebody else, for test_foreign_allocators.py. Called through ctypes.
#include <cstdlib>
#include <cstring>

#include <c10/core/Allocator.h>

namespace {

c10::Allocator* previous = nullptr;
long live = 0;  // blocks of Own's that are not freed yet

/// Keeps to itself. Its blocks have a header, and a context that is not their address; or none, and raw deleters.
struct Own final : c10::Allocator {
  explicit Own(size_t header_bytes) : header(header_bytes) {}
  static void free_block(void* context) {
    std::free(context);
    --live;
  }
  c10::DataPtr allocate(size_t bytes) override {
    ++live;
    char* context = static_cast<char*>(std::malloc(header + bytes));
    return {context + header, context, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return header == 0 ? &free_block : nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    std::memcpy(dest, src, count);
  }
  size_t header;
};

/// Forwards to whatever was installed before it.
struct Chain final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return previous->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return previous->raw_deleter(); }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    previous->copy_data(dest, src, count);
  }
};

Own with_context(64), raw(0), second_raw(0);
Chain chain;
c10::Allocator* const every[] = {&with_context, &raw, &second_raw, &chain};

}  // namespace

extern "C" {

long foreign_live() { return live; }

void foreign_install(int number) {
  previous = c10::GetAllocator(c10::kCPU);
  c10::SetAllocator(c10::kCPU, every[number]);
}

void foreign_restore() { c10::SetAllocator(c10::kCPU, previous); }

void foreign_set_priority(int priority) {
  c10::SetAllocator(c10::kCPU, c10::GetAllocator(c10::kCPU), static_cast<uint8_t>(priority));
}

void* foreign_raw_allocate(size_t bytes) { return c10::GetAllocator(c10::kCPU)->raw_allocate(bytes); }
void foreign_raw_deallocate(void* data) { c10::GetAllocator(c10::kCPU)->raw_deallocate(data); }

void* foreign_installed() { return c10::GetAllocator(c10::kCPU); }

int foreign_clones() {
  c10::Allocator* allocator = c10::GetAllocator(c10::kCPU);
  c10::DataPtr one = allocator->allocate(16);
  std::memset(one.mutable_get(), 7, 16);
  const bool is_simple = allocator->is_simple_data_ptr(one);
  c10::DataPtr two = allocator->clone(one.get(), 16);
  return is_simple && std::memcmp(one.get(), two.get(), 16) == 0;
}
}
