// Work for W, in the task of the Function that hands it over.
#pragma once

#include <Python.h>

#include "shim/pass/group.h"

namespace zbp {

/// Makes `function(*saved)`, which gives the gradients at `faces`, or those that are not -1 of them, a work of the
/// task. Called with the GIL held. Runs Python code for containers and subclasses in `saved`. Throws python_error.
void keep_work(Group& group, Task& task, PyObject* function, PyObject* saved,
               SmallVector<int32_t, 2> faces, bool is_single);

/// Per face of the task, whether it takes the gradient of a matrix: what zbp_verdict_of asks for.
SmallVector<bool, 4> matrix_faces(const Task& task);

}  // namespace zbp
