// Named ranges for profilers: torch.profiler, and NVTX by torch.autograd.profiler.emit_nvtx.
#pragma once

#include <ATen/record_function.h>

namespace zbp {

/// From its making to its end, what runs on this thread lies in the range. Without a profiler it
/// costs a look at libtorch's list of callbacks. `name` is static.
class ProfiledRange {
 public:
  explicit ProfiledRange(const char* name) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) {
      range_.before(name);
    }
  }

 private:
  at::RecordFunction range_;
};

}  // namespace zbp
