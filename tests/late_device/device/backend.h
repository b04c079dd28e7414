// What the parts of the backend share: memory, guard and kernels.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <vector>

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

/// Counts what may be left out, and leaves out what a test asks for.
struct Fault {
  enum Which : int { NONE = -2, ALL = -1 };  // or a number
  int64_t which = NONE;
  int64_t seen = 0;
  bool is_dropped() { return which == ALL || seen++ == which; }
};

/// What zbpipe waits for: the caller's streams for the tasks', and the tasks' for the caller's.
enum class Wait : int { joins, follows, either };

struct Faults {
  Wait wait = Wait::either;
  Fault waits;
  Fault records;
  int64_t waits_seen = 0;
};
extern Faults faults;

/// An event was recorded ('r', on `from`), or `to` was told to wait for one of `from` ('w').
struct EventCall {
  char what;
  bool is_zbpipes;
  uint32_t from;
  uint32_t to;
};

/// Since the last call.
std::vector<EventCall> take_calls();

void set_capturing(uint32_t stream, bool is_capturing);

}  // namespace late
