/* description.c - what a search for holders has found, as Python's objects. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "bindings/searching.h"

typedef struct description {
    zbp_search *search;
    bool wraps;
    /* Dictionaries: by a cycle's number, where the chains out of it begin and the storages at their ends; steps, for
     * many chains go the same way; each text to itself. */
    PyObject *cycles, *steps, *texts;
} description;

/* By ZBP_RANK_*. */
static const char *const ranks[] = {"none", "root", "hidden", "cycle"};
/* By ZBP_THING_*. */
static const char *const kinds[] = {"python", "tensor", "storage", "node", "group"};

static const zbp_vertex *vertex_of(const description *self, uint32_t v)
{
    return &self->search->explore.heap.vertex[v];
}

/* Steps -------------------------------------------------------------------------------------------- */

/* The one string that says it, new; steals text, which may be NULL with an error set. */
static PyObject *one_text(description *self, PyObject *text)
{
    PyObject *known = text != NULL ? PyDict_SetDefault(self->texts, text, text) : NULL;
    Py_XINCREF(known);
    Py_XDECREF(text);
    return known;
}

typedef struct edge {
    const zbp_explore *explore;
    uint32_t to;
    PyObject *text; /* of the first reference there that C++ has a word for; else NULL */
    bool has_failed;
} edge;

static int look_at_edge(void *arg, const zbp_reference *reference)
{
    edge *found = arg;
    uint32_t to;

    if (found->text != NULL || found->has_failed || reference->label == NULL) {
        return ZBP_OK;
    }
    const int status = zbp_explore_find(found->explore, reference, &to);
    if (status != ZBP_OK || to != found->to) {
        return status;
    }
    found->text = reference->index >= 0
                      ? PyUnicode_FromFormat("%s %d", reference->label, (int)reference->index)
                      : PyUnicode_FromString(reference->label);
    found->has_failed = found->text == NULL;
    return ZBP_OK;
}

/* How `from` holds `to`, where C++ knows, else None. New, or NULL with an error set. */
static PyObject *edge_between(description *self, uint32_t from, uint32_t to)
{
    const zbp_explore *explore = &self->search->explore;
    const zbp_vertex *holder = vertex_of(self, from);
    edge found = {.explore = explore, .to = to};
    zbp_error error = {0};
    int status = ZBP_OK;

    if (holder->thing != ZBP_THING_PYTHON) {
        status = zbp_things_visit(explore->things, holder->thing, holder->key, look_at_edge, &found,
                                  &error);
    }
    if (status != ZBP_OK) {
        Py_XDECREF(found.text);
        return zbp_raise_status(status, &error);
    }
    if (found.has_failed) {
        return NULL;
    }
    return found.text != NULL ? one_text(self, found.text) : Py_NewRef(Py_None);
}

/* (kind, object or None, name, edge or None) */
static PyObject *make_step(description *self, uint32_t v, uint32_t before)
{
    const zbp_vertex *vertex = vertex_of(self, v);
    zbp_error error = {0};
    PyObject *object = zbp_or_raise(zbp_look_object(vertex->thing, vertex->key, &error), &error);
    PyObject *name = object != NULL
                         ? zbp_or_raise(zbp_look_name(vertex->thing, vertex->key, &error), &error)
                         : NULL;
    PyObject *held = name == NULL              ? NULL
                     : before == ZBP_NO_VERTEX ? Py_NewRef(Py_None)
                                               : edge_between(self, before, v);

    if (held == NULL) {
        Py_XDECREF(object);
        Py_XDECREF(name);
        return NULL;
    }
    return Py_BuildValue("(NNNN)", one_text(self, PyUnicode_FromString(kinds[vertex->thing])),
                         object, one_text(self, name), held);
}

/* New, or NULL with an error set. */
static PyObject *step(description *self, uint32_t v, uint32_t before)
{
    PyObject *key = PyLong_FromUnsignedLongLong((unsigned long long)before << 32 | v);
    PyObject *known = key != NULL ? PyDict_GetItemWithError(self->steps, key) : NULL;

    Py_XINCREF(known);
    if (key != NULL && known == NULL && !PyErr_Occurred()) {
        known = make_step(self, v, before);
        if (known != NULL && PyDict_SetItem(self->steps, key, known) < 0) {
            Py_CLEAR(known);
        }
    }
    Py_XDECREF(key);
    return known;
}

/* In the place of the middle of a chain between two of its vertices. */
static PyObject *left_out(const description *self, uint32_t from, uint32_t to)
{
    const zbp_way_to *way = self->search->ways.way;

    return Py_BuildValue("(sONO)", "more", Py_None,
                         PyUnicode_FromFormat("%u", way[to].depth - way[from].depth - 1), Py_None);
}

/* New list, or NULL with an error set. */
static PyObject *steps(description *self, const uint32_t *chain, uint32_t count)
{
    PyObject *list = PyList_New(0);
    uint32_t before = ZBP_NO_VERTEX;

    for (uint32_t i = 0; list != NULL && i < count; ++i) {
        PyObject *next = chain[i] == ZBP_NO_VERTEX ? left_out(self, chain[i - 1], chain[i + 1])
                                                   : step(self, chain[i], before);
        if (zbp_append_new(list, next) < 0) {
            Py_CLEAR(list);
        }
        before = chain[i];
    }
    return list;
}

/* Leaks -------------------------------------------------------------------------------------------- */

/* To its storage, without what stands in its place where a tensor does. */
static uint32_t chain_to(const description *self, uint32_t storage, uint32_t *chain)
{
    uint32_t count;

    if (self->search->ways.way[storage].rank == ZBP_RANK_NONE) {
        return 0;
    }
    count = zbp_ways_chain(&self->search->ways, storage, chain);
    if (count < 2 || (chain[count - 2] != ZBP_NO_VERTEX &&
                      vertex_of(self, chain[count - 2])->thing == ZBP_THING_TENSOR)) {
        --count;
    }
    return count;
}

/* The storage is at the end of a chain out of a cycle. Returns 0, or -1 with an error set. */
static int note_cycle(description *self, uint32_t start, const void *storage)
{
    PyObject *number = PyLong_FromUnsignedLong(zbp_ways_component(&self->search->ways, start));
    PyObject *first = number != NULL ? Py_BuildValue("(k[])", (unsigned long)start) : NULL;
    PyObject *cycle = first != NULL ? PyDict_SetDefault(self->cycles, number, first) : NULL;
    const int status = cycle != NULL ? zbp_append_new(PyTuple_GET_ITEM(cycle, 1),
                                                      PyLong_FromVoidPtr((void *)storage))
                                     : -1;
    Py_XDECREF(first);
    Py_XDECREF(number);
    return status;
}

static int append_tensor(description *self, PyObject *list, uint32_t v)
{
    zbp_error error = {0};
    return zbp_append_new(
        list, zbp_or_raise(zbp_look_tensor(vertex_of(self, v)->key, self->wraps, &error), &error));
}

/* *others: references to them. New list of tuples, that of the chain's end first, or NULL with an error set. */
static PyObject *tensors(description *self, const zbp_sought *sought, uint32_t last,
                         int64_t *others)
{
    const bool is_first = last != ZBP_NO_VERTEX && vertex_of(self, last)->thing == ZBP_THING_TENSOR;
    PyObject *list = PyList_New(0);

    if (list != NULL && is_first && append_tensor(self, list, last) < 0) {
        Py_CLEAR(list);
    }
    for (uint32_t i = sought->tensors_begin; list != NULL && i < sought->tensors_end; ++i) {
        const uint32_t v = self->search->tensor[i];

        *others += (int64_t)vertex_of(self, v)->python_refs + vertex_of(self, v)->native_refs;
        if (v != last && append_tensor(self, list, v) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* (storage, bytes, device, address, tensors, chain, rank, others) */
static PyObject *leak(description *self, const zbp_sought *sought)
{
    const void *storage = vertex_of(self, sought->storage)->key;
    const uint8_t rank = self->search->ways.way[sought->storage].rank;
    uint32_t chain[ZBP_CHAIN_LONGEST];
    const uint32_t count = chain_to(self, sought->storage, chain);
    int64_t others = -1; /* without the chain's */
    zbp_error error = {0};
    PyObject *found, *way, *device;

    if (rank == ZBP_RANK_CYCLE && count > 0 && note_cycle(self, chain[0], storage) < 0) {
        return NULL;
    }
    found = tensors(self, sought, count > 0 ? chain[count - 1] : ZBP_NO_VERTEX, &others);
    way = found != NULL ? steps(self, chain, count) : NULL;
    device =
        way != NULL ? zbp_or_raise(zbp_look_device_name(&sought->memory, &error), &error) : NULL;
    if (device == NULL) {
        Py_XDECREF(found);
        Py_XDECREF(way);
        return NULL;
    }
    return Py_BuildValue(
        "(NKNKNNNL)", PyLong_FromVoidPtr((void *)storage), (unsigned long long)sought->memory.bytes,
        one_text(self, device), (unsigned long long)sought->memory.address, found, way,
        one_text(self, PyUnicode_FromString(ranks[rank])), (long long)(others > 0 ? others : 0));
}

/* A block that nothing visible holds. */
static PyObject *lost(const zbp_block *block)
{
    return Py_BuildValue("(iKsK[][]si)", 0, (unsigned long long)block->bytes, "cpu",
                         (unsigned long long)block->address, "none", 0);
}

static PyObject *leaks(description *self)
{
    const zbp_search *search = self->search;
    PyObject *list = PyList_New(0);

    for (uint32_t i = 0; list != NULL && i < search->sought_count; ++i) {
        if (zbp_append_new(list, leak(self, &search->sought[i])) < 0) {
            Py_CLEAR(list);
        }
    }
    for (uint32_t i = 0; list != NULL && i < search->born.count; ++i) {
        if (!search->is_found[i] && zbp_append_new(list, lost(&search->born.block[i])) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* (steps, storages) for each cycle that the leaks have named. */
static PyObject *cycles(description *self)
{
    PyObject *list = PyList_New(0), *number, *cycle;

    for (Py_ssize_t i = 0; list != NULL && PyDict_Next(self->cycles, &i, &number, &cycle);) {
        const uint32_t start = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(cycle, 0));
        const uint32_t *member = NULL;
        const uint32_t count = zbp_ways_cycle(&self->search->ways, start, &member);
        PyObject *way = steps(self, member, count);

        if (zbp_append_new(list, way != NULL
                                     ? Py_BuildValue("(NO)", way, PyTuple_GET_ITEM(cycle, 1))
                                     : NULL) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* A chain for each work that the roots reach. */
static PyObject *works(description *self)
{
    const zbp_explore *explore = &self->search->explore;
    PyObject *list = PyList_New(0);

    for (uint32_t i = 0; list != NULL && i < explore->works.count; ++i) {
        const uint32_t v = explore->works.item[i];
        uint32_t chain[ZBP_CHAIN_LONGEST];

        if (v < zbp_heap_reached(&explore->heap) &&
            zbp_append_new(list,
                           steps(self, chain, zbp_ways_chain(&self->search->ways, v, chain))) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static int set_new(PyObject *dict, const char *key, PyObject *value)
{
    const int status = value != NULL ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return status;
}

PyObject *zbp_describe_search(zbp_search *search, bool wraps)
{
    description self = {search, wraps, PyDict_New(), PyDict_New(), PyDict_New()};
    zbp_error error = {0};
    PyObject *dict = PyDict_New();
    const bool has_room = self.cycles != NULL && self.steps != NULL && self.texts != NULL;

    if (!has_room || dict == NULL || set_new(dict, "leaks", leaks(&self)) < 0 ||
        set_new(dict, "cycles", cycles(&self)) < 0 || set_new(dict, "works", works(&self)) < 0 ||
        set_new(dict, "unseen",
                zbp_or_raise(zbp_things_unseen(search->explore.things, &error), &error)) < 0 ||
        set_new(dict, "visited", PyLong_FromUnsignedLong(search->explore.heap.count)) < 0) {
        Py_CLEAR(dict);
    }
    Py_XDECREF(self.cycles);
    Py_XDECREF(self.steps);
    Py_XDECREF(self.texts);
    return dict;
}
