// Order between I, W and the caller on devices that run asynchronously.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "shim/group.h"

namespace zbp {

/// Notes the device and the stream on which `node` runs; the CPU needs no ordering.
inline void note_place(Task& task, const Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    if (!node.input_metadata(i).device().is_cpu()) {
      task.place = std::make_unique<const torch::autograd::InputMetadata>(node.input_metadata(i));
      return;
    }
  }
}

/// Makes the caller's current streams wait for the work that the tasks' streams have been given, as
/// the engine does for the leaves of a graph at the end of a backward.
inline void join_streams(const Group& group) {
  for (const Task& task : group.tasks) {
    if (!task.place) {
      continue;
    }
    const c10::Stream stream = task.place->stream();
    const c10::impl::VirtualGuardImpl device(stream.device_type());
    const c10::Stream current = device.getStream(stream.device());
    if (current != stream) {
      c10::Event done(stream.device_type());
      done.record(stream);
      current.wait(done);
    }
  }
}

}  // namespace zbp
