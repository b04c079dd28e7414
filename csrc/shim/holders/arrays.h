// What numpy's arrays refer to.
#pragma once

#include <Python.h>

#include <c10/util/FunctionRef.h>

namespace zbp {

/// What a numpy array holds: the owner of its memory, and the objects of an array of objects (of a field of objects).
/// `type` is numpy.ndarray, by whose own getters and buffers it is looked at: a subclass runs no code. Visits new
/// references' objects, which the array keeps alive. Of what does not let itself be looked at nothing is visited.
void visit_array(PyObject* array, PyTypeObject* type, c10::function_ref<void(PyObject*)> visit);

}  // namespace zbp
