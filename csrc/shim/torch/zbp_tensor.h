/* zbp_tensor.h - tensors as C knows them. */
#ifndef ZBP_TENSOR_H
#define ZBP_TENSOR_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The tensor of a Python object that is one, or NULL; the same for all objects that are that
 * tensor. Borrowed from the object. With the GIL. */
const void *zbp_tensor_key(PyObject *object);

#ifdef __cplusplus
}
#endif

#endif
