// What the parts of the backend share: memory, guard and kernels.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "schedule.h"

namespace late {

constexpr auto LATE = c10::DeviceType::PrivateUse1;

inline uint32_t number_of(const c10::Stream& stream) {
  return stream_number(stream.device_index(), stream.id());
}

c10::DeviceIndex current_device();
uint32_t current_stream(c10::DeviceIndex device);
inline uint32_t current_stream(const at::TensorBase& tensor) {
  return current_stream(tensor.device().index());
}

c10::Allocator* allocator();

/// Null if it has no memory.
inline Block* block_of(const c10::DataPtr& data) {
  return static_cast<Block*>(data.get_context());
}

/// Counts what may be left out, and leaves out the one that is asked for.
struct Fault {
  int64_t seen = 0;
  int64_t dropped = -1;
  bool is_dropped() { return seen++ == dropped; }
};
extern Fault waits_of_zbpipe, records, needless_waits;

void set_capturing(uint32_t stream, bool is_capturing);

}  // namespace late
