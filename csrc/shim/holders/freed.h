// Memory that another thread may have freed.
#pragma once

#include <c10/core/TensorImpl.h>

namespace zbp {

/// Whether a tensor lies there. Between the end of a gradient's Python object and the null that takes the gradient's
/// place, `leaf.grad = None` gives the GIL away (libtorch's THPVariable_clear), and what the leaf refers to is freed
/// memory: that begins with what malloc writes there, or is another object's by now, or is as the last reference has
/// left it, or has gone back to the system.
bool is_tensor(const c10::TensorImpl* place);

}  // namespace zbp
