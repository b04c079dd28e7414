#include "shim/pass/group.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "shim/pass/zbp_weight.h"
#include "shim/torch/python.h"

namespace zbp {

std::optional<size_t> face_at(const Task& task, uint32_t slot) {
  for (size_t f = 0; f < task.face.size(); ++f) {
    if (task.plan(f).slot == slot) {
      return f;
    }
  }
  return std::nullopt;
}

Group::~Group() {
  release();
  zbp_book_fini(&book);
  zbp_layout_fini(&layout);
}

void Group::release() noexcept {
  // Freeing may run Python code that looks at this group: it must find it empty, not half freed.
  const auto dead_tasks = std::exchange(tasks, {});
  const auto dead_outside = std::exchange(outside, {});
  const auto dead_reads = std::exchange(reads, nullptr);
  saved_outside.clear();
  arguments_outside.clear();
  outside_recomputed_for = 0;
  for (const Task& task : dead_tasks) {
    if (task.is_consumed && task.kind() == Kind::deferred) {
      task.node->release_variables();
    }
  }
}

namespace {

std::string reader_in(const Group& group, const Task& task) {
  std::string words = task.name();
  const char* between = " for the weight of ";
  for (size_t i = 0; i < task.face.size(); ++i) {
    if (task.plan(i).weight >= 0) {
      words += between + describe(group.weights[task.plan(i).weight].accumulator->variable);
      between = " and of ";
    }
  }
  return words;
}

Modified modified(const Watched& watched, std::string reader) {
  return {ZBP_MODIFIED_HELD, describe(watched.tensor()), std::move(reader), watched.kept_version(),
          static_cast<uint32_t>(watched.tensor()._version())};
}

std::optional<Modified> find_modified(const std::vector<Version>& versions, uint8_t role) {
  const auto found = std::find_if(versions.begin(), versions.end(),
                                  [](const Version& version) { return version.was_modified(); });
  if (found == versions.end()) {
    return std::nullopt;
  }
  return Modified{role, found->describe(), {}, found->seen(), found->now()};
}

}  // namespace

std::optional<Modified> Group::find_modified() const {
  for (const Task& task : tasks) {
    const Watched* first = nullptr;
    const auto look = [&first](const Watched& watched) {
      first = first || !watched.was_modified() ? first : &watched;
    };
    for_each_watched(task, look);
    for (const Work& work : task.works) {
      if (work.call) {
        std::for_each(work.call->parameters.begin(), work.call->parameters.end(), look);
      }
    }
    if (first) {
      return modified(*first, reader_in(*this, task));
    }
    if (auto argument = zbp::find_modified(task.arguments, ZBP_MODIFIED_RECOMPUTED)) {
      return argument;
    }
  }
  auto argument = zbp::find_modified(arguments_outside, ZBP_MODIFIED_RECOMPUTED);
  return argument ? argument : zbp::find_modified(saved_outside, ZBP_MODIFIED_OUTSIDE);
}

uint64_t Group::recomputed_for() const {
  return std::max(outside_recomputed_for, zbp_book_unpacks_up_to(&book, &layout));
}

bool Group::leaves_packed() const {
  // Where I ran nothing, it has not seen to what is outside.
  return recomputed_for() != 0 || !unpinned_outside.empty();
}

size_t Group::bytes_held() const {
  size_t bytes = 0;
  std::unordered_set<const void*> seen;
  for (const Task& task : tasks) {
    for_each_watched(task, [&](const Watched& watched) {
      if (seen.insert(storage_of(watched.tensor())).second) {
        bytes += bytes_of(watched.tensor());
      }
    });
  }
  return bytes;
}

}  // namespace zbp
