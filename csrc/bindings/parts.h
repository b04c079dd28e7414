/* parts.h - the parts of the extension module, each in a file of its own.
 *
 * Each function adds what its part offers to the module. Returns 0, or -1 with a Python error set.
 */
#ifndef ZBP_PARTS_H
#define ZBP_PARTS_H

#include <Python.h>

int zbp_add_explain(PyObject *module);
int zbp_add_memory(PyObject *module);
int zbp_add_release(PyObject *module);
int zbp_add_work(PyObject *module);

#endif
