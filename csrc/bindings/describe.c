/* describe.c - what a parameter group leaves to W and holds for it, as a list: zbpipe.explain and zbpipe.memory.held
 * read it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "core/pass/zbp_kind.h"
#include "core/pass/zbp_reach.h"
#include "shim/pass/zbp_describe.h"

int zbp_append_new(PyObject *list, PyObject *value)
{
    int status = -1;

    if (value != NULL) {
        status = PyList_Append(list, value);
        Py_DECREF(value);
    }
    return status;
}

/* New list of those of `weights`, a tuple of the group's, that the question has found. NULL with an error set. */
static PyObject *pick(PyObject *weights, zbp_reach *reach)
{
    zbp_reach_weights(reach);
    PyObject *list = PyList_New((Py_ssize_t)reach->weight_count);

    for (uint32_t i = 0; list != NULL && i < reach->weight_count; ++i) {
        PyObject *weight = PyTuple_GET_ITEM(weights, (Py_ssize_t)reach->weight[i]);
        PyList_SET_ITEM(list, (Py_ssize_t)i, Py_NewRef(weight));
    }
    return list;
}

/* The tasks so far, and what the tensors that come are of. */
typedef struct description {
    zbp_group *group;
    PyObject *tasks;
    PyObject *weights; /* the group's */
    zbp_reach reach;
    uint32_t number; /* of the task, the outside node or the weight */
} description;

/* name, faces: stolen; NULL with an error set. */
static int add_task(description *self, PyObject *name, const char *kind, const char *why,
                    bool is_packed, PyObject *faces)
{
    return zbp_append_new(
        self->tasks,
        Py_BuildValue("NssNNN", name, kind, why, PyBool_FromLong(is_packed), faces, PyList_New(0)));
}

static const char *role_of(const zbp_held_tensor *tensor)
{
    switch (tensor->part) {
    case ZBP_PART_MATRIX:
        return "matrix";
    case ZBP_PART_OUTPUT_GRAD:
        return "output gradient";
    case ZBP_PART_KEPT:
    case ZBP_PART_WORK_GRAD:
        return tensor->dims > 1 ? "kept gradient" : "light gradient";
    case ZBP_PART_WAITING:
        return "waiting gradient";
    default:
        return "saved";
    }
}

/* Whether the gradient at face number `place` of the task is computed from the tensor. */
static bool serves(const zbp_held_tensor *tensor, const zbp_face *face, int32_t place)
{
    bool is_of_work = false;

    switch (tensor->part) {
    case ZBP_PART_MATRIX:
        return face->slot == tensor->place;
    case ZBP_PART_KEPT:
        return tensor->place == (uint32_t)place;
    case ZBP_PART_WORK_SAVED:
    case ZBP_PART_WORK_GRAD:
        for (size_t i = 0; i < tensor->face_count; ++i) {
            is_of_work = is_of_work || tensor->faces[i] == place;
        }
        return is_of_work;
    default:
        return true;
    }
}

/* (role, storage, bytes, shape, dtype, device, weights), to the last task. Steals weights. */
static int add_tensor(const description *self, const zbp_held_tensor *tensor, PyObject *weights)
{
    PyObject *task = PyList_GET_ITEM(self->tasks, PyList_GET_SIZE(self->tasks) - 1);

    return zbp_append_new(PyTuple_GET_ITEM(task, 5),
                          Py_BuildValue("sNnOOON", role_of(tensor),
                                        PyLong_FromVoidPtr((void *)tensor->storage),
                                        (Py_ssize_t)tensor->bytes, tensor->shape, tensor->dtype,
                                        tensor->device, weights));
}

static int add_tasks(void *arg, const zbp_held_tensor *tensor)
{
    description *self = arg;
    const zbp_layout *layout = &self->group->layout;
    const zbp_task *task = &layout->task[self->number];

    zbp_reach_begin(&self->reach);
    for (uint32_t f = task->face_begin; f < task->face_end; ++f) {
        if (serves(tensor, &layout->face[f], (int32_t)(f - task->face_begin))) {
            zbp_reach_add(&self->reach, layout, f);
        }
    }
    return add_tensor(self, tensor, pick(self->weights, &self->reach));
}

static int add_outside(void *arg, const zbp_held_tensor *tensor)
{
    description *self = arg;

    zbp_reach_begin(&self->reach);
    zbp_reach_add_outside(&self->reach, &self->group->layout, self->number);
    return add_tensor(self, tensor, pick(self->weights, &self->reach));
}

static int add_waiting(void *arg, const zbp_held_tensor *tensor)
{
    description *self = arg;
    PyObject *weight = PyTuple_GET_ITEM(self->weights, (Py_ssize_t)self->number);

    return add_task(self, Py_NewRef(Py_None), "waiting", "", false, PyList_New(0)) < 0
               ? -1
               : add_tensor(self, tensor, Py_BuildValue("[O]", weight));
}

/* What makes W go through the engine to get from the face to its weight: a new str; None if it need not. */
static PyObject *way_of(zbp_group *group, uint32_t f, zbp_error *error)
{
    bool is_watched = false;
    PyObject *node, *way = NULL;

    switch (group->layout.face[f].obstacle) {
    case ZBP_OBSTACLE_NONE:
        return Py_NewRef(Py_None);
    case ZBP_OBSTACLE_CAST:
        return PyUnicode_FromString("it is cast twice on its way");
    case ZBP_OBSTACLE_SUM:
        return PyUnicode_FromString("several gradients meet before its cast");
    default:
        node = zbp_or_raise(zbp_face_end(group, f, &is_watched, error), error);
        if (node != NULL) {
            way = PyUnicode_FromFormat(is_watched ? "a hook watches %U" : "it is computed by %U",
                                       node);
            Py_DECREF(node);
        }
        return way;
    }
}

/* New (slot, shape, way, weights). */
static PyObject *face(description *self, uint32_t f, zbp_error *error)
{
    PyObject *shape = zbp_or_raise(zbp_face_shape(self->group, f, error), error);
    PyObject *way = shape != NULL ? way_of(self->group, f, error) : NULL;

    if (way == NULL) {
        Py_XDECREF(shape);
        return NULL;
    }
    zbp_reach_begin(&self->reach);
    zbp_reach_add(&self->reach, &self->group->layout, f);
    return Py_BuildValue("INNN", (unsigned int)self->group->layout.face[f].slot, shape, way,
                         pick(self->weights, &self->reach));
}

/* New list of a task's. */
static PyObject *list_faces(description *self, const zbp_task *task, zbp_error *error)
{
    PyObject *faces = PyList_New(0);

    for (uint32_t f = task->face_begin; faces != NULL && f < task->face_end; ++f) {
        if (zbp_append_new(faces, face(self, f, error)) < 0) {
            Py_CLEAR(faces);
        }
    }
    return faces;
}

static int list_task(description *self, uint32_t t, zbp_error *error)
{
    zbp_group *group = self->group;
    const zbp_task *task = &self->group->layout.task[t];
    const char *kind = zbp_task_has_work(group, t) ? "handed over" : zbp_kind_name(task->kind);
    PyObject *name = zbp_or_raise(zbp_task_name(group, t, error), error);

    PyObject *faces = name != NULL ? list_faces(self, task, error) : NULL;

    self->number = t;
    if (add_task(self, name, kind, zbp_why_name(task->why), task->leaves_packed, faces) < 0) {
        return -1;
    }
    return zbp_task_tensors(group, t, add_tasks, self, error) == ZBP_OK ? 0 : zbp_fail(error);
}

static int list_outside(description *self, uint32_t o, zbp_error *error)
{
    bool is_packed = false;
    PyObject *name = zbp_or_raise(zbp_outside_name(self->group, o, &is_packed, error), error);

    if (name == Py_None) {
        Py_DECREF(name);
        return 0;
    }
    self->number = o;
    if (add_task(self, name, "outside", "", is_packed, PyList_New(0)) < 0) {
        return -1;
    }
    return zbp_outside_tensors(self->group, o, add_outside, self, error) == ZBP_OK
               ? 0
               : zbp_fail(error);
}

static int list_waiting(description *self, uint32_t w, zbp_error *error)
{
    self->number = w;
    return zbp_weight_waiting(self->group, w, add_waiting, self, error) == ZBP_OK ? 0
                                                                                  : zbp_fail(error);
}

/* The tasks in the group's order, then what is no task. Returns 0, or -1 with an error set. */
static int list_all(description *self)
{
    const zbp_layout *layout = &self->group->layout;
    zbp_error error = {0};
    int status = 0;

    for (uint32_t t = 0; status == 0 && t < layout->task_count; ++t) {
        status = list_task(self, t, &error);
    }
    for (uint32_t o = 0; status == 0 && o < layout->outside_count; ++o) {
        status = list_outside(self, o, &error);
    }
    for (uint32_t w = 0; status == 0 && w < layout->weight_count; ++w) {
        status = list_waiting(self, w, &error);
    }
    return status;
}

static PyObject *refuse_running(void)
{
    PyErr_SetString(PyExc_RuntimeError,
                    "what a parameter group holds cannot be listed while its weight pass runs; "
                    "wait for stage_backward_weight to return");
    return NULL;
}

PyObject *zbp_describe_group(zbp_group *group)
{
    description self = {.group = group};
    zbp_error error = {0};

    /* Making Python objects may run other Python code, and that a W. */
    if (!zbp_book_claim(&group->book)) {
        return refuse_running();
    }
    if (group->book.state == ZBP_BOOK_SPENT) {
        self.tasks = PyList_New(0);
    } else if (zbp_reach_init(&self.reach, &group->layout, NULL) != ZBP_OK) {
        PyErr_NoMemory();
    } else {
        self.weights = zbp_or_raise(zbp_group_weights(group, &error), &error);
        self.tasks = self.weights != NULL ? PyList_New(0) : NULL;
    }
    if (self.weights != NULL && self.tasks != NULL && list_all(&self) < 0) {
        Py_CLEAR(self.tasks);
    }
    Py_XDECREF(self.weights);
    zbp_reach_fini(&self.reach);
    zbp_book_give_back(&group->book);
    return self.tasks;
}

PyObject *zbp_weights_wrap(zbp_group *group)
{
    zbp_error error = {0};
    PyObject *weights;

    if (zbp_group_state(group) == ZBP_GROUP_SPENT) {
        return PyTuple_New(0);
    }
    if (!zbp_book_claim(&group->book)) { /* as zbp_describe_group() */
        return refuse_running();
    }
    weights = zbp_or_raise(zbp_group_weights(group, &error), &error);
    zbp_book_give_back(&group->book);
    return weights;
}

PyDoc_STRVAR(is_watched_doc,
             "is_watched(tensor, /)\n--\n\nTrue if hooks watch its accumulation, as DDP's do.");

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    int answer = 0;

    return zbp_is_watched(tensor, &answer, &error) == ZBP_OK ? PyBool_FromLong(answer)
                                                             : zbp_error_raise(&error);
}

static PyMethodDef describe_methods[] = {{"is_watched", is_watched, METH_O, is_watched_doc},
                                         {NULL, NULL, 0, NULL}};

int zbp_add_describe(PyObject *module)
{
    return PyModule_AddFunctions(module, describe_methods);
}
