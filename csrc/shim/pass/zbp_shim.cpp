// A group as the bindings see it.

#include "shim/pass/zbp_shim.h"

#include "shim/pass/group.h"
#include "shim/torch/error.h"

using namespace zbp;

zbp_turn zbp_group_turn(const zbp_group* group) {
  return turn_of(*group->group);
}

void zbp_group_free(zbp_group* group) {
  delete group;
}

// A W that runs without the GIL changes the group: nothing of it may be looked at meanwhile.
int zbp_group_state(const zbp_group* handle) {
  if (zbp_book_is_claimed(&handle->group->book)) {
    return ZBP_GROUP_RUNNING;
  }
  return zbp_book_is_complete(&handle->group->book) ? ZBP_GROUP_SPENT : ZBP_GROUP_READY;
}

int zbp_group_get_info(const zbp_group* handle, zbp_group_info* info_out, zbp_error* error) {
  return guarded(error, [&] {
    *info_out = {};
    if (!zbp_book_is_claimed(&handle->group->book)) {
      const Group& group = *handle->group;
      *info_out = {group.weights.size(), group.tasks.size(), group.bytes_held()};
    }
  });
}
