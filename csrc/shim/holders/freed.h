// Memory that another thread may have freed.
#pragma once

#include <c10/core/TensorImpl.h>

namespace zbp {

/// Whether a leaf's gradient lies there, which then stays as long as the GIL and the accumulator's mutex are held.
/// `leaf.grad = None` ends the gradient's Python object before the null takes the gradient's place, and that gives the
/// GIL away (libtorch's THPVariable_clear): meanwhile the leaf refers to a tensor that its dying Python object alone
/// has, which the other thread frees at any moment, or to freed memory: that begins with what malloc writes there, or
/// is another object's by now, or is as the last reference has left it, or has gone back to the system.
bool is_gradient(const c10::TensorImpl* place);

}  // namespace zbp
