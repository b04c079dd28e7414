/* memory.c - zbpipe._C.Recorder: a recording of an allocator, as a Python object.
 *
 * A recorder is made once and used once: either started and stopped, and fed by torch's CPU allocator
 * meanwhile (zbp_tap.h), or fed by hand (replay_*), with what another allocator's log says. What it
 * has seen can be asked for at any time; its log when it has stopped.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/parts.h"
#include "core/memory/zbp_ledger.h"
#include "core/memory/zbp_record.h"
#include "shim/memory/zbp_tap.h"

enum { FRESH, RUNNING, STOPPED, REPLAYED };

/* Owns its record; refers to no Python object. While RUNNING the record is the tap's to change. */
typedef struct {
    PyObject_HEAD zbp_record record;
    zbp_ledger ledger; /* REPLAYED: which feed the record */
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
    zbp_ledger_fini(&self->ledger);
    zbp_record_fini(&self->record);
    type->tp_free(op);
    Py_DECREF(type);
}

static int require(const recorder *self, int state, const char *what)
{
    static const char *const name[] = {"not started", "running", "stopped", "fed by hand"};

    if (self->state == state) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError, "%s needs a recorder that is %s; this one is %s", what,
                 name[state], name[self->state]);
    return -1;
}

static PyObject *recorder_start(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    recorder *self = (recorder *)op;
    zbp_error error = {0};

    if (require(self, FRESH, "start()") < 0) {
        return NULL;
    }
    if (zbp_tap_start(&self->record, self->max_events, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    self->state = RUNNING;
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

static PyObject *recorder_adopt(PyObject *op, PyObject *objects)
{
    const recorder *self = (const recorder *)op;

    if (!PyList_Check(objects)) {
        return PyErr_Format(PyExc_TypeError, "adopt() takes a list of objects, not a %s",
                            Py_TYPE(objects)->tp_name);
    }
    if (require(self, RUNNING, "adopt()") < 0) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
        zbp_tap_adopt(PyList_GET_ITEM(objects, i));
    }
    Py_RETURN_NONE;
}

/* None stands for a mark that found no memory: what is measured must not fail for it. */
static PyObject *wrap_mark(int status, uint32_t index)
{
    if (status == ZBP_OK) {
        return PyLong_FromUnsignedLong(index);
    }
    Py_RETURN_NONE;
}

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
    const int status = zbp_tap_mark(&self->record, &index);
    return wrap_mark(status, index);
}

/* By hand --------------------------------------------------------------------------------------- */

static PyObject *recorder_replay_begin(PyObject *op, PyObject *args)
{
    recorder *self = (recorder *)op;
    unsigned long long time_ns;

    if (!PyArg_ParseTuple(args, "K:replay_begin", &time_ns) ||
        require(self, FRESH, "replay_begin()") < 0) {
        return NULL;
    }
    if (zbp_ledger_start(&self->ledger, &self->record, time_ns, 0, self->max_events) != ZBP_OK) {
        return PyErr_NoMemory();
    }
    self->state = REPLAYED;
    Py_RETURN_NONE;
}

static PyObject *recorder_replay_mark(PyObject *op, PyObject *args)
{
    recorder *self = (recorder *)op;
    unsigned long long time_ns;
    uint32_t index = 0;

    if (!PyArg_ParseTuple(args, "K:replay_mark", &time_ns) ||
        require(self, REPLAYED, "replay_mark()") < 0) {
        return NULL;
    }
    const int status = zbp_ledger_mark(&self->ledger, &self->record, time_ns, 0, &index);
    return wrap_mark(status, index);
}

static PyObject *recorder_replay_alloc(PyObject *op, PyObject *args)
{
    recorder *self = (recorder *)op;
    unsigned long long time_ns, address, bytes;

    if (!PyArg_ParseTuple(args, "KKK:replay_alloc", &time_ns, &address, &bytes) ||
        require(self, REPLAYED, "replay_alloc()") < 0) {
        return NULL;
    }
    switch (zbp_ledger_alloc(&self->ledger, time_ns, 0, address, bytes)) {
    case ZBP_OK:
        Py_RETURN_NONE;
    case ZBP_EINVAL:
        PyErr_SetString(PyExc_ValueError, "replay_alloc() takes the address of a block, not 0");
        return NULL;
    default:
        return PyErr_NoMemory();
    }
}

/* A block that was never handed out here is older: it counts with the bytes that the log gives it. */
static PyObject *recorder_replay_free(PyObject *op, PyObject *args)
{
    recorder *self = (recorder *)op;
    unsigned long long time_ns, address, bytes;

    if (!PyArg_ParseTuple(args, "KKK:replay_free", &time_ns, &address, &bytes) ||
        require(self, REPLAYED, "replay_free()") < 0) {
        return NULL;
    }
    if (!zbp_ledger_free(&self->ledger, time_ns, 0, address, NULL)) {
        zbp_record_free_older(&self->record, time_ns, 0, (zbp_block){address, bytes, 0});
    }
    Py_RETURN_NONE;
}

/* What it has seen ------------------------------------------------------------------------------ */

static int require_begun(const recorder *self, const char *what)
{
    return self->state == FRESH ? require(self, RUNNING, what) : 0;
}

/* Only a record that the tap feeds changes under our eyes. */
static void lock(const recorder *self)
{
    if (self->state == RUNNING) {
        zbp_tap_lock();
    }
}

static void unlock(const recorder *self)
{
    if (self->state == RUNNING) {
        zbp_tap_unlock();
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
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsK}", "live", COUNT(r.live), "peak",
                         COUNT(r.total.peak), "allocated", COUNT(r.total.allocated), "freed",
                         COUNT(r.total.freed), "allocations", COUNT(r.total.allocations), "frees",
                         COUNT(r.total.frees), "older_frees", COUNT(r.older_frees), "older_freed",
                         COUNT(r.older_freed), "dropped", COUNT(r.dropped), "untracked",
                         COUNT(r.untracked));
}

static PyObject *wrap_one_mark(const zbp_mark *m)
{
    return Py_BuildValue("(KKKKKKKKI)", COUNT(m->time_ns), COUNT(m->events), COUNT(m->live),
                         COUNT(m->span.peak), COUNT(m->span.allocated), COUNT(m->span.freed),
                         COUNT(m->span.allocations), COUNT(m->span.frees), (unsigned int)m->thread);
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

static int require_log(const recorder *self, const char *what)
{
    return self->state == REPLAYED ? 0 : require(self, STOPPED, what);
}

/* An event as Python gets it. */
typedef struct logged {
    uint64_t time_ns;
    zbp_block block;
    uint32_t thread, kind;
} logged;

static PyObject *recorder_events(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    const recorder *self = (const recorder *)op;
    PyObject *bytes;
    size_t count;

    if (require_log(self, "events()") < 0) {
        return NULL;
    }
    count = (size_t)self->record.event_count;
    bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(logged)));
    for (size_t i = 0; bytes != NULL && i < count; ++i) {
        const zbp_event *event = zbp_record_event(&self->record, i);
        const logged one = {event->time_ns, event->block, event->thread, event->kind};
        memcpy(PyBytes_AS_STRING(bytes) + i * sizeof one, &one, sizeof one);
    }
    return bytes;
}

static PyObject *recorder_held(PyObject *op, PyObject *args)
{
    const recorder *self = (const recorder *)op;
    zbp_range range, *other = NULL;
    unsigned int at;
    uint64_t bytes = 0;
    const char *packed = NULL;
    Py_ssize_t length = 0;

    if (!PyArg_ParseTuple(args, "III|y#:held", &at, &range.begin, &range.end, &packed, &length) ||
        require_log(self, "held()") < 0) {
        return NULL;
    }
    if (length % (Py_ssize_t)sizeof *other != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "held() takes pairs of marks as struct '2I', not %zd bytes", length);
    }
    if (length != 0) { /* a copy: bytes need not be aligned */
        other = malloc((size_t)length);
        if (other == NULL) {
            return PyErr_NoMemory();
        }
        memcpy(other, packed, (size_t)length);
    }
    const int status =
        zbp_record_held(&self->record, at, range, other, (size_t)length / sizeof *other, &bytes);
    free(other);
    if (status != ZBP_OK) {
        return PyErr_Format(
            PyExc_ValueError,
            "held(%u, %u, %u) needs marks in that order, and others in theirs, below %u", at,
            range.begin, range.end, (unsigned int)self->record.mark_count);
    }
    return PyLong_FromUnsignedLongLong(bytes);
}

static PyMethodDef recorder_methods[] = {
    {"start", recorder_start, METH_NOARGS,
     "start()\n--\n\nBegin to be fed by torch's CPU allocator."},
    {"stop", recorder_stop, METH_NOARGS,
     "stop()\n--\n\nEnd it. True if another allocator was installed meanwhile."},
    {"adopt", recorder_adopt, METH_O,
     "adopt(objects, /)\n--\n\nLet storages among them that are older see the recording when they "
     "grow."},
    {"mark", recorder_mark, METH_NOARGS,
     "mark()\n--\n\nMark this moment; the mark's number, None without memory or when stopped."},
    {"replay_begin", recorder_replay_begin, METH_VARARGS,
     "replay_begin(time_ns, /)\n--\n\nBegin to be fed by hand."},
    {"replay_alloc", recorder_replay_alloc, METH_VARARGS,
     "replay_alloc(time_ns, address, bytes, /)\n--\n\nA block was handed out."},
    {"replay_free", recorder_replay_free, METH_VARARGS,
     "replay_free(time_ns, address, bytes, /)\n--\n\nA block was taken back."},
    {"replay_mark", recorder_replay_mark, METH_VARARGS,
     "replay_mark(time_ns, /)\n--\n\nAs mark()."},
    {"counters", recorder_counters, METH_NOARGS, "counters()\n--\n\nThe totals so far, by name."},
    {"marks", recorder_marks, METH_NOARGS,
     "marks()\n--\n\nPer mark (time_ns, events, live, peak, allocated, freed, allocations,\n"
     "frees, thread); from peak on, of the span up to the next mark."},
    {"events", recorder_events, METH_NOARGS,
     "events()\n--\n\nThe log as bytes: struct 'QQQQII' of time_ns, address, bytes, serial,\n"
     "thread, kind (0 handed out, 1 taken back, 2 taken back, older than the recording)."},
    {"held", recorder_held, METH_VARARGS,
     "held(at, begin, end, other=b'', /)\n--\n\nBytes live at mark `at` and taken back between "
     "marks, but\n"
     "for those handed out between a pair of marks (struct '2I') in `other`, on its thread."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot recorder_slots[] = {
    {Py_tp_doc, "Recorder(max_events)\n--\n\nA recording of an allocator, with a bounded log."},
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
