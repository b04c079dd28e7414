// Order between I, W and the caller on devices that run asynchronously: see Note [Streams].
//
// Note [Streams]
//
// A task runs where its forward ran, in I and in W, whichever thread or stream calls: on the
// forward's stream. What I keeps for W was made there or handed to that stream by the engine, and
// is used and let go of there, so that the caching allocator may give it away again without a word.
// Between that stream and the caller's:
//
// - I starts after what the caller's streams have been given, and these wait for what I has given
//   its own: the engine's rules for the roots and the leaves of a graph. The captures are the
//   leaves of I's graph: all that I runs leads to them.
// - W likewise, without the engine too: follow_caller at its beginning, join_streams at its end.
// - The gradient of a weight root goes by no run of I's to the stream that will read it:
//   take_from_caller does there what the engine does for its roots.
//
// Whoever calls W on another thread or stream than I needs no synchronisation of his own but for
// gradients that a third stream uses.
//
// I and W may be captured in one graph of the device's. A W outside of the capture of its I would
// read what no replay has computed yet, one within a capture what every replay would find
// overwritten: both are refused.
#pragma once

#include <algorithm>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "shim/group/group.h"

namespace zbp {

/// Notes the device and the stream on which the task's node runs; the CPU needs no ordering.
inline void note_device(Group& group, Task& task) {
  for (uint32_t i = 0; i < task.node->num_inputs(); ++i) {
    const auto& metadata = task.node->input_metadata(i);
    if (metadata.device().is_cpu()) {
      continue;
    }
    task.device = std::make_unique<const torch::autograd::InputMetadata>(metadata);
    const c10::Stream stream = metadata.stream();
    if (std::find(group.streams.begin(), group.streams.end(), stream) == group.streams.end()) {
      group.streams.push_back(stream);
    }
    return;
  }
}

/// `second` does what it is given from now on when `first` has done what it has been given.
inline void order(const c10::Stream& first, const c10::Stream& second) {
  if (first != second) {
    c10::Event done(first.device_type());
    done.record(first);
    second.wait(done);
  }
}

inline c10::Stream callers_stream(const c10::Stream& beside) {
  return c10::impl::VirtualGuardImpl(beside.device_type()).getStream(beside.device());
}

/// What the caller's current stream has made, and W will read, and let go of, on the task's.
inline void take_from_caller(const Task& task, const at::Tensor& grad) {
  if (!task.device || !grad.has_storage() || grad.device() != task.device->device()) {
    return;
  }
  const c10::Stream stream = task.device->stream();
  if (const c10::Stream current = callers_stream(stream); current != stream) {
    order(current, stream);
    const c10::impl::VirtualGuardImpl device(stream.device_type());
    device.recordDataPtrOnStream(grad.storage().data_ptr(), stream);
  }
}

/// True if the caller captures a graph on a device where the group has, or had, tasks.
inline bool is_capturing(const Group& group) {
  return std::any_of(group.streams.begin(), group.streams.end(), [](const c10::Stream& stream) {
    const auto* device = c10::impl::getDeviceGuardImpl(stream.device_type());
    return is_capturing(*device, device->getStream(stream.device()), 0);
  });
}

/// W runs on the tasks' streams, but adds to gradients that the caller may have zeroed, reduced or
/// clipped on its own: those streams wait for what the caller's have been given.
inline void follow_caller(const Group& group) {
  for (const c10::Stream& stream : group.streams) {
    order(callers_stream(stream), stream);
  }
}

/// The caller's current streams wait for what the tasks' have been given, as the engine has it for
/// the leaves of a graph at the end of a backward.
inline void join_streams(const Group& group) {
  for (const c10::Stream& stream : group.streams) {
    order(stream, callers_stream(stream));
  }
}

}  // namespace zbp
