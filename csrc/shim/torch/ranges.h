// Named ranges for profilers: torch.profiler, and NVTX by torch.autograd.profiler.emit_nvtx.
//
// Without a profiler a range is a look at libtorch's list of callbacks; no name is made.
#pragma once

#include <string>

#include <ATen/record_function.h>

#include "shim/pass/group.h"

namespace zbp {

/// From its making to its end, what runs on this thread lies in the range.
class ProfiledRange {
 public:
  explicit ProfiledRange(const char* name) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) {
      begin(name);
    }
  }

  /// "zbpipe::group " and the names of the group's weights, matrices first, as zbpipe.name_parameters()
  /// gave them; their shapes where it did not. Takes the GIL, if a profiler runs.
  explicit ProfiledRange(const Group& group) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) {
      begin(name_of(group));
    }
  }

  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;

 private:
  void begin(std::string name) {
    name_ = std::move(name);
    range_.before(std::string_view(name_));
  }
  static std::string name_of(const Group& group);

  std::string name_;  // borrowed by range_
  at::RecordFunction range_;
};

}  // namespace zbp
