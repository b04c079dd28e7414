#include "shim/torch/edits.h"

namespace zbp {

// Never destroyed: passes may run until the process ends.
std::mutex& edges_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

}  // namespace zbp
