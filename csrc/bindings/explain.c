/* explain.c - what an input pass would leave to W: see zbpipe/_explain/run.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "core/pass/zbp_kind.h"
#include "pass/zbp_pass.h"
#include "shim/explain/zbp_explain.h"
#include "shim/explain/zbp_tasks.h"
#include "shim/torch/zbp_tensor.h"

/* What makes W go through the engine to get from the face to its weight: a new str; None if it need not. */
static PyObject *way_of(const zbp_turn *turn, uint32_t f, zbp_error *error)
{
    bool is_watched = false;
    PyObject *node, *way = NULL;

    switch (turn->layout->face[f].obstacle) {
    case ZBP_OBSTACLE_NONE:
        return Py_NewRef(Py_None);
    case ZBP_OBSTACLE_CAST:
        return PyUnicode_FromString("it is cast twice on its way");
    case ZBP_OBSTACLE_SUM:
        return PyUnicode_FromString("several gradients meet before its cast");
    default:
        node = zbp_or_raise(zbp_face_end(turn->held, f, &is_watched, error), error);
        if (node != NULL) {
            way = PyUnicode_FromFormat(is_watched ? "a hook watches %U" : "it is computed by %U",
                                       node);
            Py_DECREF(node);
        }
        return way;
    }
}

/* New (slot, shape, way, weights); weights: the group's. */
static PyObject *edge(const zbp_turn *turn, uint32_t f, PyObject *weights, zbp_reach *reach)
{
    zbp_error error = {0};
    PyObject *shape = zbp_or_raise(zbp_face_shape(turn->held, f, &error), &error);
    PyObject *way = shape != NULL ? way_of(turn, f, &error) : NULL;

    if (way == NULL) {
        Py_XDECREF(shape);
        return NULL;
    }
    zbp_reach_begin(reach);
    zbp_reach_add(reach, turn->layout, f);
    return Py_BuildValue("INNN", (unsigned int)turn->layout->face[f].slot, shape, way,
                         zbp_pick(weights, reach));
}

/* New (node, name, kind, why, edges). */
static PyObject *task(const zbp_turn *turn, uint32_t t, PyObject *weights, zbp_reach *reach)
{
    const zbp_task *plan = &turn->layout->task[t];
    zbp_error error = {0};
    PyObject *node = zbp_or_raise(zbp_task_node(turn->held, t, &error), &error);
    PyObject *name =
        node != NULL ? zbp_or_raise(zbp_task_name(turn->held, t, &error), &error) : NULL;
    PyObject *edges = name != NULL ? PyList_New(0) : NULL;

    for (uint32_t f = plan->face_begin; edges != NULL && f < plan->face_end; ++f) {
        if (zbp_append_new(edges, edge(turn, f, weights, reach)) < 0) {
            Py_CLEAR(edges);
        }
    }
    if (edges == NULL) {
        Py_XDECREF(node);
        Py_XDECREF(name);
        return NULL;
    }
    return Py_BuildValue("NNssN", node, name, zbp_kind_name(plan->kind), zbp_why_name(plan->why),
                         edges);
}

/* New list of the tasks of a group. */
static PyObject *tasks(const zbp_turn *turn)
{
    zbp_error error = {0};
    zbp_reach reach = {0};
    PyObject *list = NULL;

    if (zbp_reach_init(&reach, turn->layout, NULL) != ZBP_OK) {
        return PyErr_NoMemory();
    }
    PyObject *weights = zbp_or_raise(zbp_held_weights(turn->held, &error), &error);
    list = weights != NULL ? PyList_New(0) : NULL;
    for (uint32_t t = 0; list != NULL && t < turn->layout->task_count; ++t) {
        if (zbp_append_new(list, task(turn, t, weights, &reach)) < 0) {
            Py_CLEAR(list);
        }
    }
    Py_XDECREF(weights);
    zbp_reach_fini(&reach);
    return list;
}

/* New list of those of every group of the survey. */
static PyObject *groups(zbp_scene *scene)
{
    PyObject *list = PyList_New(0);

    for (size_t i = 0; list != NULL && i < zbp_scene_group_count(scene); ++i) {
        const zbp_turn turn = zbp_scene_group(scene, i);
        if (zbp_append_new(list, tasks(&turn)) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Raises it for what is no tensor; name: of the list, or of the argument where i is -1. */
static int check_tensor(PyObject *object, const char *name, Py_ssize_t i)
{
    if (zbp_tensor_key(object) != NULL) {
        return 0;
    }
    if (i < 0) {
        PyErr_Format(PyExc_TypeError, "%s is a %s; expected a tensor", name,
                     Py_TYPE(object)->tp_name);
    } else {
        PyErr_Format(PyExc_TypeError, "%s[%zd] is a %s; expected a tensor", name, i,
                     Py_TYPE(object)->tp_name);
    }
    return -1;
}

/* what: a ZBP_EXPLAIN_* of all tensors of a tuple. */
static int add_tensors(zbp_scene *scene, int what, PyObject *tensors)
{
    static const char *const name[] = {[ZBP_EXPLAIN_OUTPUT] = "outputs",
                                       [ZBP_EXPLAIN_INPUT] = "inputs",
                                       [ZBP_EXPLAIN_WEIGHT] = "weights"};
    zbp_error error = {0};

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        if (check_tensor(tensor, name[what], i) < 0) {
            return -1;
        }
        if (zbp_explain_add(scene, what, tensor, &error) != ZBP_OK) {
            return zbp_fail(&error);
        }
    }
    return 0;
}

/* New list, or NULL with an error set. */
static PyObject *survey(zbp_scene *scene)
{
    zbp_survey found = {0};
    zbp_error error = {0};
    PyObject *list = NULL;

    if (zbp_scene_begin(scene, NULL, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    const int status = zbp_pass_survey(scene, &found, &error);
    if (zbp_explain_end(scene, status, &error) == ZBP_OK) {
        list = groups(scene);
    } else {
        zbp_error_raise(&error);
    }
    zbp_survey_fini(&found);
    return list;
}

PyDoc_STRVAR(explain_doc, "explain(outputs, inputs, weights, policy, /)\n--\n\n"
                          "The plan of an input pass, which does not run. See zbpipe.explain.");

static PyObject *explain(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *outputs, *inputs, *weights, *given_policy, *list = NULL;
    PyObject *type, *value, *traceback;
    zbp_policy policy = {.main_grad = false};
    zbp_scene *scene = NULL;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "O!O!O!O:explain", &PyTuple_Type, &outputs, &PyTuple_Type, &inputs,
                          &PyTuple_Type, &weights, &given_policy) ||
        zbp_read_policy(given_policy, &policy) < 0) {
        return NULL;
    }
    if (zbp_scene_new(policy, false, &scene, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    if (zbp_exclude_weights(scene, given_policy) == 0 &&
        add_tensors(scene, ZBP_EXPLAIN_OUTPUT, outputs) == 0 &&
        add_tensors(scene, ZBP_EXPLAIN_INPUT, inputs) == 0 &&
        add_tensors(scene, ZBP_EXPLAIN_WEIGHT, weights) == 0) {
        list = survey(scene);
    }
    PyErr_Fetch(&type, &value, &traceback);
    zbp_scene_free(scene);
    PyErr_Restore(type, value, traceback);
    return list;
}

PyDoc_STRVAR(is_watched_doc,
             "is_watched(tensor, /)\n--\n\nTrue if hooks watch its accumulation, as DDP's do.");

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    int answer = 0;

    if (check_tensor(tensor, "tensor", -1) < 0) {
        return NULL;
    }
    return zbp_is_watched(tensor, &answer, &error) == ZBP_OK ? PyBool_FromLong(answer)
                                                             : zbp_error_raise(&error);
}

static PyMethodDef explain_methods[] = {{"explain", explain, METH_VARARGS, explain_doc},
                                        {"is_watched", is_watched, METH_O, is_watched_doc},
                                        {NULL, NULL, 0, NULL}};

int zbp_add_explain(PyObject *module)
{
    return PyModule_AddFunctions(module, explain_methods);
}
