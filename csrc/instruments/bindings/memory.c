/* memory.c - zbpipe._C.Recorder: a recording of torch's CPU allocator (zbp_tap.h), for Python.
 *
 * A recorder is started and stopped once. What it has seen can be asked for from then on, its log
 * when it has stopped.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/parts.h"
#include "instruments/core/zbp_record.h"
#include "instruments/shim/zbp_tap.h"

enum { FRESH, RUNNING, STOPPED };

/* Owns its record; refers to no Python object. While RUNNING the record is the tap's to change. */
typedef struct {
    PyObject_HEAD zbp_record record;
    uint64_t max_events;
    int state;
} recorder;

static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"max_events", NULL};
    unsigned long long max_events;
    recorder *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K:Recorder", names, &max_events)) {
        return NULL;
    }
    self = (recorder *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->max_events = max_events;
    }
    return (PyObject *)self;
}

static void recorder_dealloc(PyObject *op)
{
    recorder *self = (recorder *)op;
    PyTypeObject *type = Py_TYPE(op);
    int displaced;

    if (self->state == RUNNING) {
        zbp_tap_stop(&self->record, &displaced);
    }
    zbp_record_fini(&self->record);
    type->tp_free(op);
    Py_DECREF(type);
}

static int require(const recorder *self, int state, const char *what)
{
    static const char *const name[] = {"not started", "running", "stopped"};

    if (self->state == state) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError, "%s needs a recorder that is %s; this one is %s", what,
                 name[state], name[self->state]);
    return -1;
}

static PyObject *recorder_start(PyObject *op, PyObject *args)
{
    recorder *self = (recorder *)op;
    zbp_error error = {0};
    PyObject *objects = NULL;

    if (!PyArg_ParseTuple(args, "|O!:start", &PyList_Type, &objects) ||
        require(self, FRESH, "start()") < 0) {
        return NULL;
    }
    if (zbp_tap_start(&self->record, self->max_events, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    self->state = RUNNING;
    for (Py_ssize_t i = 0; objects != NULL && i < PyList_GET_SIZE(objects); ++i) {
        zbp_tap_adopt(PyList_GET_ITEM(objects, i));
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_stop(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    recorder *self = (recorder *)op;
    int displaced;

    if (require(self, RUNNING, "stop()") < 0) {
        return NULL;
    }
    zbp_tap_stop(&self->record, &displaced);
    self->state = STOPPED;
    return PyBool_FromLong(displaced);
}

/* None stands for a mark that found no memory: what is measured must not fail for it. */
static PyObject *recorder_mark(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    recorder *self = (recorder *)op;
    uint32_t index = 0;

    if (self->state == STOPPED) { /* by another thread, a moment ago */
        Py_RETURN_NONE;
    }
    if (require(self, RUNNING, "mark()") < 0) {
        return NULL;
    }
    if (zbp_tally_mark(zbp_tap_tally(), &self->record, &index) != ZBP_OK) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLong(index);
}

/* What it has seen */

static int require_begun(const recorder *self, const char *what)
{
    return self->state == FRESH ? require(self, RUNNING, what) : 0;
}

/* Only a record that the tap feeds changes under our eyes. */
static void lock(const recorder *self)
{
    if (self->state == RUNNING) {
        zbp_tally_lock(zbp_tap_tally());
    }
}

static void unlock(const recorder *self)
{
    if (self->state == RUNNING) {
        zbp_tally_unlock(zbp_tap_tally());
    }
}

static PyObject *recorder_counters(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    const recorder *self = (const recorder *)op;
    zbp_record r;

    if (require_begun(self, "counters()") < 0) {
        return NULL;
    }
    lock(self);
    r = self->record;
    unlock(self);
#define COUNT(value) (unsigned long long)(value)
    return Py_BuildValue("{sKsKsK}", "live", COUNT(r.live), "dropped", COUNT(r.dropped),
                         "untracked", COUNT(r.untracked));
}

static PyObject *wrap_one_mark(const zbp_mark *m)
{
    return Py_BuildValue("(KKKKKKKKI)", COUNT(m->time_ns), COUNT(m->events), COUNT(m->live),
                         COUNT(m->peak), COUNT(m->allocated), COUNT(m->freed),
                         COUNT(m->allocations), COUNT(m->frees), (unsigned int)m->thread);
}
#undef COUNT

static PyObject *recorder_marks(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    const recorder *self = (const recorder *)op;
    zbp_mark *mark;
    PyObject *list;
    size_t count;

    if (require_begun(self, "marks()") < 0) {
        return NULL;
    }
    /* A copy: under the lock no Python object may be made. */
    lock(self);
    count = self->record.mark_count;
    mark = malloc(count * sizeof *mark);
    if (mark != NULL) {
        memcpy(mark, self->record.mark, count * sizeof *mark);
    }
    unlock(self);
    if (mark == NULL) {
        return PyErr_NoMemory();
    }
    list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; ++i) {
        PyObject *tuple = wrap_one_mark(&mark[i]);
        if (tuple == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, tuple);
        }
    }
    free(mark);
    return list;
}

static PyObject *recorder_events(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    const recorder *self = (const recorder *)op;

    if (require(self, STOPPED, "events()") < 0) {
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)self->record.event,
                                     (Py_ssize_t)(self->record.event_count * sizeof(zbp_event)));
}

static PyMethodDef recorder_methods[] = {
    {"start", recorder_start, METH_VARARGS,
     "start(objects=[], /)\n--\n\nBegin to be fed by torch's CPU allocator. Storages among the "
     "objects that are\n"
     "older see the recording when they grow."},
    {"stop", recorder_stop, METH_NOARGS,
     "stop()\n--\n\nEnd it. True if another allocator was installed meanwhile."},
    {"mark", recorder_mark, METH_NOARGS,
     "mark()\n--\n\nMark this moment; the mark's number, None without memory or when stopped."},
    {"counters", recorder_counters, METH_NOARGS,
     "counters()\n--\n\nBy name: live, dropped, untracked."},
    {"marks", recorder_marks, METH_NOARGS,
     "marks()\n--\n\nPer mark (time_ns, events, live, peak, allocated, freed, allocations,\n"
     "frees, thread); from peak on, of the span up to the next mark."},
    {"events", recorder_events, METH_NOARGS,
     "events()\n--\n\nThe log as bytes: struct 'QQQQQII' of time_ns, address, bytes, serial,\n"
     "trace, thread, kind (0 handed out, 1 taken back, 2 taken back, older than the recording)."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot recorder_slots[] = {
    {Py_tp_doc,
     "Recorder(max_events)\n--\n\nA recording of the CPU allocator, with a bounded log."},
    {Py_tp_new, recorder_new},
    {Py_tp_dealloc, recorder_dealloc},
    {Py_tp_methods, recorder_methods},
    {0, NULL}};

static PyType_Spec recorder_spec = {
    .name = "zbpipe._C.Recorder",
    .basicsize = sizeof(recorder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = recorder_slots,
};

int zbp_add_memory(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &recorder_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    const int status = PyModule_AddObjectRef(module, "Recorder", type);
    Py_DECREF(type);
    return status;
}
