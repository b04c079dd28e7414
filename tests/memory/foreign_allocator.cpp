// CPU allocators of somebody else, for test_foreign_allocators.py. Called through ctypes.
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include <c10/core/Allocator.h>

namespace {

c10::Allocator* previous = nullptr;
long live = 0;  // blocks of ours that are not freed yet

struct Copies : c10::Allocator {
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    std::memcpy(dest, src, count);
  }
};

/// Gives its blocks a context that is not their address, as allocators with headers of their own do.
struct WithContext final : Copies {
  struct Header {
    void* data;
  };
  static void free_header(void* context) {
    auto* header = static_cast<Header*>(context);
    std::free(header->data);
    delete header;
    --live;
  }
  c10::DataPtr allocate(size_t bytes) override {
    ++live;
    auto* header = new Header{std::malloc(bytes)};
    return {header->data, header, &free_header, c10::Device(c10::kCPU)};
  }
};

/// Forwards to whatever was installed before it.
struct Chain final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return previous->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return previous->raw_deleter(); }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    previous->copy_data(dest, src, count);
  }
};

/// Keeps to itself, and promises raw deleters.
struct Raw final : Copies {
  static void free_block(void* data) {
    std::free(data);
    --live;
  }
  c10::DataPtr allocate(size_t bytes) override {
    ++live;
    void* data = std::malloc(bytes);
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
};

WithContext with_context;
Chain chain;
Raw raw;
Raw second_raw;

}  // namespace

extern "C" {

long foreign_live() { return live; }

void foreign_install(const char* kind) {
  previous = c10::GetAllocator(c10::kCPU);
  const std::map<std::string, c10::Allocator*> by_kind = {
      {"context", &with_context}, {"chain", &chain}, {"raw", &raw}, {"second raw", &second_raw}};
  c10::SetAllocator(c10::kCPU, by_kind.at(kind));
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
