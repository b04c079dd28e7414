/* The search for holders in worlds drawn at random, against naive models: what is met, what is sought and who holds it;
 * each touch of the world and each allocation failing. */
#include "check.h"
#include "checks.h"
#include "counting.h"
#include "fake_things.h"
#include "holders/zbp_search.h"
#include "model.h"

enum { ROUNDS = 3000, SERIALS = 20 };

static uint64_t state = 11;

static uint32_t below(uint32_t n)
{
    return model_below(&state, n);
}

static zbp_things *const nobody = NULL; /* the fake world needs none */

/* ---- worlds */

static void draw_thing(fake_thing *of)
{
    static const uint8_t kinds[] = {ZBP_THING_PYTHON, ZBP_THING_PYTHON,  ZBP_THING_TENSOR,
                                    ZBP_THING_TENSOR, ZBP_THING_STORAGE, ZBP_THING_STORAGE,
                                    ZBP_THING_NODE,   ZBP_THING_GROUP};

    *of = (fake_thing){
        .thing = kinds[below(sizeof kinds)], .storage = -1, .blame = (uint8_t)below(4)};
    of->hidden = below(6) == 0;
    if (of->thing == ZBP_THING_PYTHON) {
        of->type = (uint8_t)(below(3) == 0 ? below(4) : ZBP_TYPE_OTHER);
        of->is_of_no_interest = below(5) == 0;
        of->is_listed = !of->is_of_no_interest && below(3) > 0;
    } else if (of->thing == ZBP_THING_GROUP) {
        of->is_listed = below(2) == 0;
    } else {
        of->is_dying = below(12) == 0;
        of->has_object = below(2) == 0;
        of->is_listed = of->has_object && below(2) == 0;
    }
}

static void draw_memory(void)
{
    world.blocks = below(4);
    for (uint32_t i = 0; i < world.blocks; i++)
        world.block[i] = (zbp_block){.address = 1000 + i, .bytes = 8, .serial = below(SERIALS)};
    for (uint32_t i = 0; i < world.things; i++) {
        fake_thing *of = &world.of[i];
        const uint32_t tapped = below(3);

        if (of->thing != ZBP_THING_STORAGE)
            continue;
        of->memory = (zbp_memory){
            .address = 100 + i, .bytes = below(4) > 0 ? 8 : 0, .is_foreign = below(2) == 0};
        if (tapped < world.blocks && below(2) == 0)
            of->memory.address = world.block[tapped].address;
        if (below(8) == 0)
            of->memory.address = 0;
    }
}

static void draw_edges(void)
{
    const uint32_t most = below(2) == 0 ? below(WORLD_EDGES + 1) : below(2 * world.things + 1);

    for (uint32_t e = 0; world.things > 0 && e < most; e++) {
        const uint32_t from = below(world.things), to = below(world.things);
        const bool counts = !is_of_torch(to) || (world.of[to].has_object && below(2) == 0);

        if (world.of[from].is_of_no_interest)
            continue;
        world.edge[world.edges].from = (uint8_t)from;
        world.edge[world.edges].to = (uint8_t)to;
        world.edge[world.edges].is_scripts = false;
        world.edge[world.edges++].counts_python = counts;
        if (world.of[from].thing == ZBP_THING_TENSOR && world.of[to].thing == ZBP_THING_STORAGE)
            world.of[from].storage = (int)to;
    }
}

static void draw_world(void)
{
    world = (fake_world){.things = below(WORLD_MOST + 1), .fail_at = -1};
    for (uint32_t i = 0; i < world.things; i++)
        draw_thing(&world.of[i]);
    draw_memory();
    draw_edges();
}

/* As before anything was done to it. */
static void rewind_world(long fail_at)
{
    world.touches = 0;
    world.fail_at = fail_at;
    REQUIRE(!world.is_listing);
    for (uint32_t i = 0; i < world.things; i++) {
        REQUIRE(world.of[i].watched == 0);
        world.of[i].owned = 0;
    }
}

/* ---- the models: sets of things, by number */

typedef struct set {
    bool has[WORLD_MOST];
} set;

/* Whether it becomes a vertex when it is met. ignored: -1 for none. */
static bool is_met(uint32_t i, int ignored)
{
    return !world.of[i].is_of_no_interest && !(is_of_torch(i) && world.of[i].is_dying) &&
           !((int)i == ignored && !is_of_torch(i));
}

static void spread(set *reached, int ignored)
{
    for (bool grows = true; grows;) {
        grows = false;
        for (uint32_t e = 0; e < world.edges; e++) {
            const uint32_t to = world.edge[e].to;

            if (reached->has[world.edge[e].from] && !reached->has[to] && is_met(to, ignored))
                grows = reached->has[to] = true;
        }
    }
}

/* References to it that no member of `known` has. */
static int unknown_references(uint32_t i, const set *known)
{
    int count = world.of[i].hidden;

    for (uint32_t e = 0; e < world.edges; e++)
        count += world.edge[e].to == i && !known->has[world.edge[e].from];
    return count;
}

static bool is_member(const zbp_heap *heap, uint32_t i)
{
    return zbp_heap_find(heap, key_at(i)) != ZBP_NO_VERTEX;
}

/* ---- searches */

typedef struct terms {
    uint32_t roots; /* the first things */
    int ignored;
    int target; /* -1: none */
    bool has_older;
    uint32_t older; /* the storages among so many first things */
    uint64_t since, until;
    int allowed;
} terms;

static terms draw_terms(void)
{
    terms t = {.roots = below(world.things + 1) / 3, .ignored = -1, .target = -1, .allowed = -1};

    if (world.things > 0 && below(3) == 0)
        t.ignored = (int)below(world.things);
    if (world.things > 0 && below(3) == 0)
        t.allowed = (int)below(world.things);
    for (uint32_t i = 0; below(3) == 0 && t.target < 0 && i < world.things; i++)
        if (world.of[i].thing == ZBP_THING_TENSOR && world.of[i].storage >= 0)
            t.target = (int)i;
    t.has_older = t.target < 0 && below(2) == 0;
    t.older = below(world.things + 1);
    t.since = below(SERIALS);
    t.until = t.since + below(SERIALS);
    return t;
}

/* The storages among the first things, as a moment. */
static int take_older(const terms *t, zbp_storages *older, const zbp_alloc *alloc)
{
    zbp_explore explore;
    int status = ZBP_OK;

    zbp_explore_init(&explore, nobody, alloc);
    for (uint32_t i = 0; status == ZBP_OK && i < t->older; i++) {
        uint32_t v;

        if (world.of[i].thing == ZBP_THING_STORAGE)
            status = zbp_heap_meet(&explore.heap, native_at(i), ZBP_THING_STORAGE, ZBP_NO_VERTEX,
                                   false, &v, NULL);
    }
    if (status == ZBP_OK)
        status = zbp_storages_take(older, &explore, alloc);
    zbp_explore_fini(&explore);
    return status;
}

static int run_search(zbp_search *search, const terms *t, const zbp_storages *older,
                      const zbp_alloc *alloc, zbp_error *error)
{
    int status = ZBP_OK;
    uint32_t v;

    zbp_search_init(search, nobody, alloc);
    search->target = t->target >= 0 ? native_at((uint32_t)t->target) : NULL;
    search->since = t->since;
    search->until = t->until;
    search->older = t->has_older ? older : NULL;
    if (t->allowed >= 0)
        status = zbp_map_add(&search->allowed, native_at((uint32_t)t->allowed), 0, NULL, NULL);
    if (status == ZBP_OK && t->ignored >= 0)
        status = zbp_explore_ignore(&search->explore, object_at((uint32_t)t->ignored));
    if (status == ZBP_OK)
        status = zbp_search_begin(search, error);
    for (uint32_t i = 0; status == ZBP_OK && i < t->roots; i++)
        if (world.of[i].has_object || !is_of_torch(i))
            status = zbp_explore_root(&search->explore, object_at(i), &v);
    return status == ZBP_OK ? zbp_search_run(search, error) : status;
}

static bool is_sought_by(const terms *t, uint32_t i)
{
    const fake_thing *of = &world.of[i];
    bool is_tapped = false;

    if (of->thing != ZBP_THING_STORAGE || (int)i == t->allowed)
        return false;
    if (t->target >= 0)
        return world.of[t->target].storage == (int)i;
    for (uint32_t b = 0; b < world.blocks; b++)
        if (world.block[b].address == of->memory.address) {
            if (world.block[b].serial >= t->since && world.block[b].serial < t->until)
                return true;
            is_tapped = true;
        }
    return t->has_older && i >= t->older && of->memory.bytes > 0 && of->memory.is_foreign &&
           !is_tapped;
}

static void search_is_the_models(const zbp_search *search, const terms *t)
{
    const zbp_heap *heap = &search->explore.heap;
    set roots = {{false}}, met, hidden = {{false}};
    const char *reason = NULL;
    uint32_t sought = 0;

    for (uint32_t i = 0; i < t->roots; i++)
        roots.has[i] = (world.of[i].has_object || !is_of_torch(i)) && is_met(i, t->ignored);
    spread(&roots, t->ignored);
    met = roots;
    if (heap->has_rest) {
        for (uint32_t i = 0; i < world.things; i++)
            if (world.of[i].is_listed && is_met(i, t->ignored))
                met.has[i] = true;
        spread(&met, t->ignored);
        for (uint32_t i = 0; i < world.things; i++)
            hidden.has[i] = met.has[i] && !roots.has[i] && world.of[i].thing != ZBP_THING_STORAGE &&
                            (int)i != t->target && unknown_references(i, &met) > 0;
        if (t->target >= 0 && met.has[t->target] && !roots.has[t->target])
            return; /* of the caller's own references to it: tested by itself */
        for (bool grows = true; grows;) {
            grows = false;
            for (uint32_t e = 0; e < world.edges; e++) {
                const uint32_t to = world.edge[e].to;

                if (hidden.has[world.edge[e].from] && met.has[to] && !roots.has[to] &&
                    !hidden.has[to])
                    grows = hidden.has[to] = true;
            }
        }
    }
    CHECK_VALID(zbp_heap_check(heap, &reason));
    CHECK_VALID(zbp_ways_check(&search->ways, heap, &reason));
    for (uint32_t i = 0; i < world.things; i++) {
        const uint32_t v = zbp_heap_find(heap, key_at(i));
        const bool is_vertex = v != ZBP_NO_VERTEX;

        CHECK(is_vertex == met.has[i]);
        if (!is_vertex || !met.has[i])
            continue;
        CHECK((search->ways.way[v].rank == ZBP_RANK_ROOT) == roots.has[i]);
        CHECK((search->ways.way[v].rank == ZBP_RANK_HIDDEN) == hidden.has[i]);
        sought += is_sought_by(t, i);
    }
    CHECK(search->sought_count == sought);
    for (uint32_t s = 0; s < search->sought_count; s++) {
        const zbp_sought *one = &search->sought[s];
        const uint32_t i =
            (uint32_t)((const char *)heap->vertex[one->storage].key - (const char *)native_at(0));
        uint32_t tensors = 0;

        CHECK(is_sought_by(t, i) && one->memory.address == world.of[i].memory.address);
        for (uint32_t k = 0; k < world.things; k++)
            tensors += met.has[k] && world.of[k].thing == ZBP_THING_TENSOR &&
                       world.of[k].storage == (int)i;
        CHECK(one->tensors_end - one->tensors_begin == tensors);
        for (uint32_t k = one->tensors_begin; k < one->tensors_end; k++)
            CHECK(zbp_tensor_storage(heap->vertex[search->tensor[k]].key) == native_at(i));
    }
    for (uint32_t b = 0; b < search->born.count; b++) {
        bool is_found = false;

        for (uint32_t i = 0; i < world.things; i++)
            is_found = is_found || (met.has[i] && world.of[i].thing == ZBP_THING_STORAGE &&
                                    world.of[i].memory.address == search->born.block[b].address);
        CHECK(search->is_found[b] == is_found);
    }
}

static void searches_are_the_models(void)
{
    uint32_t with_rest = 0, sought = 0, lost = 0;

    for (int round = 0; round < ROUNDS; round++) {
        zbp_storages older = {0};
        zbp_search search;
        zbp_error error = {0};
        terms t;

        draw_world();
        t = draw_terms();
        REQUIRE(take_older(&t, &older, NULL) == ZBP_OK);
        REQUIRE(run_search(&search, &t, &older, NULL, &error) == ZBP_OK);
        CHECK(!world.is_listing);
        search_is_the_models(&search, &t);
        with_rest += search.explore.heap.has_rest;
        sought += search.sought_count;
        for (uint32_t b = 0; b < search.born.count; b++)
            lost += !search.is_found[b];
        zbp_search_fini(&search);
        zbp_storages_fini(&older);
        rewind_world(-1);
    }
    /* The rounds have looked at all there is. */
    CHECK(with_rest > ROUNDS / 4 && with_rest < ROUNDS && sought > ROUNDS / 4 &&
          lost > ROUNDS / 10);
}

/* Whatever fails, everything is given back, and what raised is told. */
static void a_search_that_fails_keeps_nothing(void)
{
    uint32_t failures = 0;

    for (int round = 0; round < 150; round++) {
        counting count;
        const zbp_alloc alloc = counting_alloc(&count);
        terms t;

        draw_world();
        t = draw_terms();
        for (long at = 0, ends = 0; ends < 2; at++) {
            const bool is_touch = ends == 0;
            zbp_storages older = {0};
            zbp_search search = {0};
            zbp_error error = {0};
            int status;

            rewind_world(is_touch ? at : -1);
            count.calls = 0;
            count.fail_once = is_touch ? -1 : at;
            status = take_older(&t, &older, &alloc);
            CHECK(status == ZBP_OK || older.storage == NULL);
            if (status == ZBP_OK)
                status = run_search(&search, &t, &older, &alloc, &error);
            CHECK((status == ZBP_ETORCH) == (error.raised == WORLD_FAILED));
            zbp_search_fini(&search);
            zbp_storages_fini(&older);
            CHECK(count.live == 0);
            failures += status != ZBP_OK;
            if (status == ZBP_OK && (is_touch ? world.touches : count.calls) <= at) {
                at = -1;
                ends++;
            }
        }
        rewind_world(-1);
    }
    CHECK(failures > 1000);
}

/* ---- by hand */

static uint32_t add_thing(uint8_t thing, uint8_t type)
{
    world.of[world.things] = (fake_thing){.thing = thing, .type = type, .storage = -1};
    return world.things++;
}

static void add_edge(uint32_t from, uint32_t to, bool counts_python)
{
    world.edge[world.edges].from = (uint8_t)from;
    world.edge[world.edges].to = (uint8_t)to;
    world.edge[world.edges].is_scripts = false;
    world.edge[world.edges++].counts_python = counts_python;
}

/* A moment is explored through libtorch's own references; a script module is known by its TorchScript object. */
static void autograd_alone_is_passed_through(void)
{
    zbp_explore explore;
    zbp_error error = {0};
    uint32_t tensor, node, object, module, script, inside, plain, v;
    zbp_reference reference;

    world = (fake_world){.fail_at = -1};
    tensor = add_thing(ZBP_THING_TENSOR, ZBP_TYPE_OTHER);
    world.of[tensor].has_object = true;
    node = add_thing(ZBP_THING_NODE, ZBP_TYPE_OTHER);
    object = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_OTHER);
    module = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_SCRIPT_MODULE);
    script = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_SCRIPT);
    inside = add_thing(ZBP_THING_TENSOR, ZBP_TYPE_OTHER);
    plain = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_OTHER);
    add_edge(tensor, node, false);
    add_edge(tensor, object, true);
    add_edge(script, inside, false);
    add_edge(plain, node, false);
    add_edge(module, script, true);
    world.edge[world.edges - 1].is_scripts = true;
    zbp_explore_init(&explore, nobody, NULL);
    REQUIRE(zbp_explore_root_of_torch(&explore, object_at(plain), &error) == ZBP_OK);
    REQUIRE(zbp_explore_root_of_torch(&explore, object_at(module), &error) == ZBP_OK);
    CHECK(explore.heap.count == 1 && is_member(&explore.heap, script));
    REQUIRE(zbp_explore_root_of_torch(&explore, object_at(tensor), &error) == ZBP_OK);
    REQUIRE(zbp_explore_root(&explore, object_at(plain), &v) == ZBP_OK);
    REQUIRE(zbp_explore_autograd(&explore, &error) == ZBP_OK);
    CHECK(is_member(&explore.heap, node) && is_member(&explore.heap, inside));
    CHECK(!is_member(&explore.heap, object) && !is_member(&explore.heap, module));
    reference = (zbp_reference){ZBP_THING_TENSOR, object_at(tensor), NULL, -1, true};
    CHECK(zbp_explore_find(&explore, &reference, &v) == ZBP_OK &&
          explore.heap.vertex[v].key == native_at(tensor));
    reference = (zbp_reference){ZBP_THING_NODE, native_at(node), NULL, -1, false};
    CHECK(zbp_explore_find(&explore, &reference, &v) == ZBP_OK &&
          explore.heap.vertex[v].key == native_at(node));
    world.fail_at = world.touches;
    reference = (zbp_reference){ZBP_THING_TENSOR, object_at(tensor), NULL, -1, true};
    CHECK(zbp_explore_find(&explore, &reference, &v) == ZBP_ENOMEM && v == ZBP_NO_VERTEX);
    zbp_explore_fini(&explore);
}

/* A script module that has a TorchScript object, if there is room. */
static void add_script(void)
{
    if (world.things + 2 <= WORLD_MOST && world.edges < WORLD_EDGES) {
        const uint32_t module = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_SCRIPT_MODULE);

        add_edge(module, add_thing(ZBP_THING_PYTHON, ZBP_TYPE_SCRIPT), true);
        world.edge[world.edges - 1].is_scripts = true;
    }
}

static void exploring_a_moment_may_fail_anywhere(void)
{
    uint32_t failures = 0;

    for (int round = 0; round < 100; round++) {
        draw_world();
        add_script();
        for (long at = 0;; at++) {
            zbp_explore explore;
            zbp_error error = {0};
            int status = ZBP_OK;

            rewind_world(at);
            zbp_explore_init(&explore, nobody, NULL);
            for (uint32_t i = 0; status == ZBP_OK && i < world.things; i++)
                if (world.of[i].has_object || !is_of_torch(i))
                    status = zbp_explore_root_of_torch(&explore, object_at(i), &error);
            if (status == ZBP_OK)
                status = zbp_explore_autograd(&explore, &error);
            CHECK((status == ZBP_ETORCH) == (error.raised == WORLD_FAILED));
            zbp_explore_fini(&explore);
            failures += status != ZBP_OK;
            if (status == ZBP_OK)
                break;
        }
    }
    CHECK(failures > 500);
}

/* Works are told in the order in which they were met, each once. */
static void works_are_told(void)
{
    zbp_explore explore;
    zbp_error error = {0};
    uint32_t root, first, second, v;

    world = (fake_world){.fail_at = -1};
    root = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_OTHER);
    second = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_WORK);
    first = add_thing(ZBP_THING_PYTHON, ZBP_TYPE_WORK);
    add_edge(root, first, true);
    add_edge(root, second, true);
    add_edge(second, first, true);
    zbp_explore_init(&explore, nobody, NULL);
    REQUIRE(zbp_explore_root(&explore, object_at(root), &v) == ZBP_OK);
    REQUIRE(zbp_explore_all(&explore, &error) == ZBP_OK);
    CHECK(explore.works.count == 2);
    CHECK(explore.heap.vertex[explore.works.item[0]].key == object_at(first));
    CHECK(explore.heap.vertex[explore.works.item[1]].key == object_at(second));
    zbp_explore_fini(&explore);
}

/* The caller's own references to the target's Python object are no holder; libtorch's are. */
static void a_targets_python_references_are_the_callers(void)
{
    for (int native = 0; native < 2; native++) {
        zbp_search search;
        zbp_error error = {0};
        uint32_t tensor, storage, v;

        world = (fake_world){.fail_at = -1};
        storage = add_thing(ZBP_THING_STORAGE, ZBP_TYPE_OTHER);
        tensor = add_thing(ZBP_THING_TENSOR, ZBP_TYPE_OTHER);
        world.of[tensor].has_object = world.of[tensor].is_listed = true;
        world.of[tensor].storage = (int)storage;
        world.of[tensor].hidden = (uint8_t)native;
        add_edge(tensor, storage, false);
        zbp_search_init(&search, nobody, NULL);
        search.target = native_at(tensor);
        REQUIRE(zbp_search_begin(&search, &error) == ZBP_OK);
        REQUIRE(zbp_search_run(&search, &error) == ZBP_OK);
        v = zbp_heap_find(&search.explore.heap, native_at(tensor));
        REQUIRE(v != ZBP_NO_VERTEX && search.sought_count == 1);
        CHECK(search.ways.way[v].rank == (native ? ZBP_RANK_HIDDEN : ZBP_RANK_NONE));
        zbp_search_fini(&search);
    }
}

/* One that was freed since is none that is new, whoever lives at its address by now. */
static void storages_of_a_moment(void)
{
    zbp_storages storages;
    zbp_explore explore;
    zbp_born born;
    zbp_memory memory;
    uint32_t v, one, other, tensor;

    world = (fake_world){.fail_at = -1};
    one = add_thing(ZBP_THING_STORAGE, ZBP_TYPE_OTHER);
    other = add_thing(ZBP_THING_STORAGE, ZBP_TYPE_OTHER);
    tensor = add_thing(ZBP_THING_TENSOR, ZBP_TYPE_OTHER);
    zbp_explore_init(&explore, nobody, NULL);
    REQUIRE(zbp_heap_meet(&explore.heap, native_at(tensor), ZBP_THING_TENSOR, ZBP_NO_VERTEX, false,
                          &v, NULL) == ZBP_OK);
    REQUIRE(zbp_heap_meet(&explore.heap, native_at(one), ZBP_THING_STORAGE, ZBP_NO_VERTEX, false,
                          &v, NULL) == ZBP_OK);
    REQUIRE(zbp_storages_take(&storages, &explore, NULL) == ZBP_OK);
    zbp_explore_fini(&explore);
    CHECK(storages.count == 1 && storages.storage[0] == native_at(one) &&
          world.of[one].watched == 1);
    world.blocks = 2;
    world.block[0] = (zbp_block){.address = 500, .bytes = 8, .serial = 4};
    world.block[1] = (zbp_block){.address = 600, .bytes = 8, .serial = 5};
    REQUIRE(zbp_born_take(&born, 5, 6, NULL) == ZBP_OK);
    CHECK(born.count == 1 && zbp_born_find(&born, 600) == 0);
    CHECK(zbp_born_find(&born, 500) == ZBP_NO_BLOCK && zbp_born_find(&born, 700) == ZBP_NO_BLOCK);
    memory = (zbp_memory){.address = 700, .bytes = 8, .is_foreign = true};
    CHECK(zbp_storages_lack(&storages, &born, native_at(other), &memory));
    CHECK(!zbp_storages_lack(&storages, &born, native_at(one), &memory));
    memory.address = 500;
    CHECK(!zbp_storages_lack(&storages, &born, native_at(other), &memory));
    memory = (zbp_memory){.address = 700, .bytes = 8};
    CHECK(!zbp_storages_lack(&storages, &born, native_at(other), &memory));
    memory = (zbp_memory){.address = 700, .is_foreign = true};
    CHECK(!zbp_storages_lack(&storages, &born, native_at(other), &memory));
    zbp_born_fini(&born);
    world.fail_at = world.touches;
    CHECK(zbp_born_take(&born, 5, 6, NULL) == ZBP_ENOMEM && born.block == NULL);
    zbp_storages_fini(&storages);
    CHECK(world.of[one].watched == 0);
}

int main(void)
{
    check_sees_failure();
    RUN(searches_are_the_models);
    RUN(a_search_that_fails_keeps_nothing);
    RUN(autograd_alone_is_passed_through);
    RUN(exploring_a_moment_may_fail_anywhere);
    RUN(works_are_told);
    RUN(a_targets_python_references_are_the_callers);
    RUN(storages_of_a_moment);
    return check_end();
}
