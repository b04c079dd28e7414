/* parts.h - what the files of csrc/bindings add to the module zbpipe._C. */
#ifndef ZBP_PARTS_H
#define ZBP_PARTS_H

#include <Python.h>

/* Each adds its types and functions to `module`; 0, or -1 with an error set. */
int zbp_add_memory(PyObject *module);

#endif
