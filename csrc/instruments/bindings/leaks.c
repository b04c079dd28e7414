/* leaks.c - what zbpipe.leaks needs of the process besides its searches: blocks of CPU memory,
 * where they come from, the variables of a running frame.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
/* Python 3.11 alone has neither the frame's layout nor PyFrame_GetVar(). Its f_locals would keep
 * what it finds alive for as long as the frame. */
#define Py_BUILD_CORE
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#include <frameobject.h>
#endif

#include "bindings/parts.h"
#include "instruments/shim/zbp_tap.h"
#include "instruments/shim/zbp_traces.h"

/* Returns 0, or -1 with an error set. */
static int read_number(PyObject *object, uint64_t *out)
{
    const unsigned long long number = PyLong_AsUnsignedLongLong(object);

    *out = number;
    return number == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(next_serial_doc,
             "next_serial()\n--\n\n"
             "The serial of the next block of CPU memory, while something records.");

static PyObject *next_serial(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLongLong(zbp_tally_serial(zbp_tap_tally()));
}

PyDoc_STRVAR(live_blocks_doc,
             "live_blocks(since, /)\n--\n\n"
             "The blocks of CPU memory in use from that serial on: list of (address, bytes,\n"
             "serial, trace); for trace_of().");

static PyObject *live_blocks(PyObject *Py_UNUSED(module), PyObject *since)
{
    uint64_t serial;
    zbp_block *blocks = NULL;
    size_t count = 0;

    if (read_number(since, &serial) < 0) {
        return NULL;
    }
    if (zbp_tap_blocks(serial, &blocks, &count) != ZBP_OK) {
        return PyErr_NoMemory();
    }
    const int collects = PyGC_Disable(); /* a block that it freed would be listed */
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; ++i) {
        PyObject *block = Py_BuildValue(
            "(KKKK)", (unsigned long long)blocks[i].address, (unsigned long long)blocks[i].bytes,
            (unsigned long long)blocks[i].serial, (unsigned long long)blocks[i].trace);
        if (block == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, block);
        }
    }
    if (collects) {
        PyGC_Enable();
    }
    free(blocks);
    return list;
}

PyDoc_STRVAR(trace_start_doc,
             "trace_start()\n--\n\nKeep where blocks come from, until trace_stop().");

static PyObject *trace_start(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_trace_start();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(trace_stop_doc, "trace_stop()\n--\n\nOnce for each trace_start().");

static PyObject *trace_stop(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_trace_stop();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(trace_of_doc,
             "trace_of(trace, /)\n--\n\n"
             "Where a block comes from: list of (file, function, line), innermost first.");

static PyObject *trace_of(PyObject *Py_UNUSED(module), PyObject *trace)
{
    uint64_t number;
    zbp_error error = {0};

    return read_number(trace, &number) < 0 ? NULL
                                           : zbp_or_raise(zbp_trace_of(number, &error), &error);
}

/* Frames */

static int add_variable(PyObject *list, PyObject *name, PyObject *value)
{
    PyObject *pair = PyTuple_Pack(2, name, value);
    const int status = pair != NULL ? PyList_Append(list, pair) : -1;
    Py_XDECREF(pair);
    return status;
}

#if PY_VERSION_HEX < 0x030B0000

static int add_variables(PyObject *list, PyFrameObject *frame)
{
    const PyCodeObject *code = frame->f_code;
    PyObject *const names[] = {code->co_varnames, code->co_cellvars, code->co_freevars};
    PyObject **value = frame->f_localsplus;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names[i]); ++k, ++value) {
            if (*value != NULL && add_variable(list, PyTuple_GET_ITEM(names[i], k), *value) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

#elif PY_VERSION_HEX < 0x030C0000

static int add_variables(PyObject *list, PyFrameObject *frame)
{
    const PyCodeObject *code = frame->f_frame->f_code;
    PyObject **const value = frame->f_frame->localsplus;

    for (int i = 0; i < code->co_nlocalsplus; ++i) {
        if (value[i] != NULL &&
            add_variable(list, PyTuple_GET_ITEM(code->co_localsplusnames, i), value[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

#else

static int add_variables_of(PyObject *list, PyFrameObject *frame, PyObject *names)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject *value = PyFrame_GetVar(frame, PyTuple_GET_ITEM(names, i));
        if (value == NULL) { /* unbound */
            PyErr_Clear();
            continue;
        }
        const int status = add_variable(list, PyTuple_GET_ITEM(names, i), value);
        Py_DECREF(value);
        if (status < 0) {
            return -1;
        }
    }
    return names != NULL ? 0 : -1;
}

static int add_variables(PyObject *list, PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *const names[] = {PyCode_GetVarnames(code), PyCode_GetCellvars(code),
                               PyCode_GetFreevars(code)};
    int status = 0;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        if (status == 0) {
            status = add_variables_of(list, frame, names[i]);
        }
        Py_XDECREF(names[i]);
    }
    Py_DECREF(code);
    return status;
}

#endif

PyDoc_STRVAR(frame_variables_doc,
             "frame_variables(frame, /)\n--\n\n"
             "The bound variables of a function's frame: list of (name, value or cell). Unlike\n"
             "f_locals it leaves nothing behind in the frame.");

static PyObject *frame_variables(PyObject *Py_UNUSED(module), PyObject *frame)
{
    PyObject *list;

    if (!PyFrame_Check(frame)) {
        return PyErr_Format(PyExc_TypeError, "frame is a %s; expected a frame",
                            Py_TYPE(frame)->tp_name);
    }
    list = PyList_New(0);
    if (list != NULL && add_variables(list, (PyFrameObject *)frame) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

PyMethodDef zbp_leaks_functions[] = {
    {"next_serial", next_serial, METH_NOARGS, next_serial_doc},
    {"live_blocks", live_blocks, METH_O, live_blocks_doc},
    {"trace_start", trace_start, METH_NOARGS, trace_start_doc},
    {"trace_stop", trace_stop, METH_NOARGS, trace_stop_doc},
    {"trace_of", trace_of, METH_O, trace_of_doc},
    {"frame_variables", frame_variables, METH_O, frame_variables_doc},
    {NULL, NULL, 0, NULL}};
