/* module.c - the extension module zbpipe._C.
 *
 * ParamGroup lives in the module's state (parts.h); static is the count of running passes, and the
 * shim's tables, which live as long as the process.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"

static int module_exec(PyObject *module)
{
    /* What the shim asks of Python, libtorch answers with the main interpreter's objects. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(
            PyExc_ImportError,
            "zbpipe._C cannot be loaded into a sub-interpreter: torch has one interpreter, "
            "the main one; use zbpipe there, or in another process");
        return -1;
    }
    *zbp_group_type(module) = zbp_add_group(module);
    if (*zbp_group_type(module) == NULL ||
        PyModule_AddFunctions(module, zbp_passes_functions) < 0 ||
        PyModule_AddFunctions(module, zbp_release_functions) < 0 ||
        PyModule_AddFunctions(module, zbp_leaks_functions) < 0) {
        return -1;
    }
    return zbp_add_memory(module) < 0 ? -1 : zbp_add_holders(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(*zbp_group_type(module));
    return 0;
}

static int module_clear(PyObject *module)
{
    Py_CLEAR(*zbp_group_type(module));
    return 0;
}

static void module_free(void *module)
{
    module_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED}, /* many an object here has no lock but the GIL */
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zbpipe._C",
    .m_doc = "The compiled part of zbpipe.",
    .m_size = sizeof(PyTypeObject *),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
