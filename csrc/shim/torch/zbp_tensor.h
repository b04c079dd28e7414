/* zbp_tensor.h - tensors as C knows them. */
#pragma once

#include <Python.h>

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

/* The tensor of a Python object that is one, or NULL; the same for all objects that are that
 * tensor. Borrowed from the object. With the GIL. */
const void *zbp_tensor_key(PyObject *object);

ZBP_END_C
