/* How a backward is split: random graphs against what a naive engine does with the edges, naive paths and
 * kinds; small cases by hand; failing allocations. */
#include "check.h"
#include "core/pass/zbp_split.h"
#include "counting.h"
#include "model.h"

enum { NODES = 40, ROOTS = 4 };

typedef struct world {
    zbp_graph graph;
    zbp_plan plan;
    zbp_facts facts;
    zbp_split split;
    uint32_t root[ROOTS], root_count;
} world;

static void fini(world *w)
{
    zbp_split_fini(&w->split);
    zbp_facts_fini(&w->facts);
    zbp_plan_fini(&w->plan);
    zbp_graph_fini(&w->graph);
}

static bool has(const world *w, uint32_t node, uint8_t flag)
{
    return (w->plan.flag[node] & flag) != 0;
}

static bool is_marked(const world *w, uint32_t node, uint8_t mark)
{
    return (w->graph.mark[node] & mark) != 0;
}

static void draw_facts(world *w, uint64_t *state)
{
    for (uint32_t i = 0; i < w->graph.node_count; i++) {
        w->facts.fact[i] = (zbp_fact){
            .sequence_nr = model_below(state, 100),
            .type = (uint8_t)model_below(state, 5),
            .left_slot = (uint8_t)model_below(state, 2),
            .step = (uint8_t)model_below(state, ZBP_STEP_OTHER + 1),
            .flag = (uint8_t)(model_below(state, 4) == 0 ? model_below(state, 8) : 0),
        };
    }
    for (uint32_t e = 0; e < w->graph.edge_count; e++)
        w->facts.is_matrix[e] = model_below(state, 2) == 0;
    w->facts.policy =
        (zbp_decision){(uint8_t)model_below(state, 3), (uint8_t)model_below(state, 3)};
}

/* The roots are those that the graph has marked; one may start the backward twice. */
static void draw_roots(world *w, uint64_t *state)
{
    for (uint32_t i = 0; i < w->graph.node_count; i++) {
        for (uint32_t n = model_below(state, 3); n > 0 && w->root_count < ROOTS; n--) {
            if (is_marked(w, i, ZBP_ROLE_ROOT))
                w->root[w->root_count++] = i;
        }
    }
}

static void draw(world *w, uint64_t *state)
{
    memset(w, 0, sizeof *w);
    w->graph = (zbp_graph){0};
    REQUIRE(model_random_graph(&w->graph, state, NODES) == ZBP_OK);
    REQUIRE(zbp_plan_build(&w->plan, &w->graph) == ZBP_OK);
    REQUIRE(zbp_facts_init(&w->facts, &w->graph) == ZBP_OK);
    draw_facts(w, state);
    draw_roots(w, state);
    REQUIRE(zbp_split_build(&w->split, &w->graph, &w->plan, &w->facts, w->root, w->root_count) ==
            ZBP_OK);
}

/* ---- where gradients go while I runs */

typedef struct reached {
    bool node[NODES], stand_in[NODES], capture[NODES];
} reached;

static void go(const world *w, reached *r, uint32_t to, uint8_t way);

static const zbp_edit *edit_of(const world *w, uint32_t edge)
{
    for (uint32_t i = 0; i < w->split.edit_count; i++) {
        if (w->split.edit[i].edge == edge)
            return &w->split.edit[i];
    }
    return NULL;
}

static void run_edges(const world *w, reached *r, uint32_t node, bool as_stand_in)
{
    for (uint32_t e = 0; e < w->graph.edge_count; e++) {
        const zbp_edit *edit = edit_of(w, e);
        const bool of_stand_in =
            edit != NULL && (edit->how == ZBP_EDIT_OF_STAND_IN || edit->how == ZBP_EDIT_OF_BOTH);

        if (w->graph.edge[e].src != node)
            continue;
        if (as_stand_in) /* it has no other edges */
            CHECK(of_stand_in);
        if (of_stand_in != as_stand_in)
            CHECK(as_stand_in);
        go(w, r, w->graph.edge[e].dst, edit != NULL ? edit->to : ZBP_TO_NODE);
    }
}

static void go(const world *w, reached *r, uint32_t to, uint8_t way)
{
    if (way == ZBP_TO_NODE && !r->node[to]) {
        r->node[to] = true;
        run_edges(w, r, to, false);
    } else if (way == ZBP_TO_STAND_IN && !r->stand_in[to]) {
        r->stand_in[to] = true;
        run_edges(w, r, to, true);
    } else if (way == ZBP_TO_CAPTURE) {
        r->capture[to] = true;
    }
}

/* What an ordinary backward that ends at the inputs reaches. */
static void go_ordinarily(const world *w, bool *seen, uint32_t node)
{
    if (seen[node])
        return;
    seen[node] = true;
    if (is_marked(w, node, ZBP_ROLE_INPUT))
        return;
    for (uint32_t e = 0; e < w->graph.edge_count; e++) {
        if (w->graph.edge[e].src == node)
            go_ordinarily(w, seen, w->graph.edge[e].dst);
    }
}

static void i_runs_the_closure_and_nothing_else(void)
{
    uint64_t state = 11;

    for (int round = 0; round < 4000; round++) {
        bool seen[NODES] = {0};
        reached r = {{0}, {0}, {0}};
        world w;

        draw(&w, &state);
        for (uint32_t i = 0; i < w.root_count; i++) {
            go(&w, &r, w.root[i], w.split.root_to[i]);
            go_ordinarily(&w, seen, w.root[i]);
        }
        for (uint32_t i = 0; i < w.graph.node_count; i++) {
            const bool is_input = is_marked(&w, i, ZBP_ROLE_INPUT);
            const bool runs = seen[i] && !is_input && has(&w, i, ZBP_NODE_CLOSURE);

            CHECK(r.capture[i] == (seen[i] && is_input));
            CHECK(r.stand_in[i] == (runs && has(&w, i, ZBP_NODE_SPLIT)));
            CHECK(r.node[i] == (runs && !has(&w, i, ZBP_NODE_SPLIT)));
        }
        fini(&w);
    }
}

/* A node that W runs again computes in I the gradients of its input face alone. */
static void what_w_runs_again_is_cut_off_from_its_weights(void)
{
    uint64_t state = 12;

    for (int round = 0; round < 2000; round++) {
        world w;

        draw(&w, &state);
        for (uint32_t i = 0; i < w.split.edit_count; i++) {
            const zbp_edit *edit = &w.split.edit[i];
            const zbp_edge *edge = &w.graph.edge[edit->edge];
            const bool is_split = has(&w, edge->src, ZBP_NODE_SPLIT);

            CHECK(i == 0 || edit[-1].edge < edit->edge);
            CHECK(is_split == (edit->how == ZBP_EDIT_OF_STAND_IN || edit->how == ZBP_EDIT_OF_BOTH));
            if (is_split) {
                const zbp_layout *layout = &w.split.layout[w.plan.group[edge->src]];
                const bool is_whole = layout->task[w.split.task[edge->src]].kind == ZBP_TASK_WHOLE;

                CHECK((edit->how == ZBP_EDIT_OF_BOTH) == (edit->to == ZBP_TO_NOWHERE && !is_whole));
            } else {
                CHECK(edit->to != ZBP_TO_NODE);
                CHECK((edit->how == ZBP_EDIT_FOR_GOOD) == (edit->to == ZBP_TO_STAND_IN));
            }
        }
        fini(&w);
    }
}

/* ---- what groups are made of */

static uint32_t only_edge_of(const world *w, uint32_t node, uint32_t *count_out)
{
    uint32_t found = ZBP_NONE;

    *count_out = 0;
    for (uint32_t e = 0; e < w->graph.edge_count; e++) {
        if (w->graph.edge[e].src == node) {
            ++*count_out;
            found = e;
        }
    }
    return found;
}

static uint32_t arrivals_at(const world *w, uint32_t node)
{
    uint32_t arrivals = 0;

    for (uint32_t e = 0; e < w->graph.edge_count; e++)
        arrivals += w->graph.edge[e].dst == node;
    for (uint32_t r = 0; r < w->root_count; r++)
        arrivals += w->root[r] == node;
    return arrivals;
}

static uint32_t weight_id(const world *w, uint32_t group, int32_t weight)
{
    return w->plan.weight[w->plan.weight_begin[group] + (uint32_t)weight];
}

/* The weight of the path from `node` on, ZBP_NONE without one. */
static uint32_t naive_path(const world *w, uint32_t node)
{
    uint32_t casts = 0, steps = 0, out = 0;
    bool meets = false;

    while (!is_marked(w, node, ZBP_ROLE_WEIGHT)) {
        const zbp_fact *fact = &w->facts.fact[node];
        const uint32_t edge = only_edge_of(w, node, &out);

        if (steps == 8 || out != 1 || fact->step == ZBP_STEP_NONE ||
            (fact->flag & ZBP_FACT_WATCHED) != 0)
            return ZBP_NONE;
        casts += fact->step == ZBP_STEP_CAST || fact->step == ZBP_STEP_MOVE;
        meets = meets || arrivals_at(w, node) > 1;
        node = w->graph.edge[edge].dst;
        steps++;
    }
    return casts > 1 || meets ? ZBP_NONE : node;
}

static void check_face(const world *w, uint32_t group, const zbp_face *face, uint32_t target)
{
    const uint32_t behind = naive_path(w, target);

    CHECK((face->weight >= 0) == (behind != ZBP_NONE));
    CHECK((face->obstacle == ZBP_OBSTACLE_NONE) == (face->weight >= 0));
    if (face->weight >= 0)
        CHECK(weight_id(w, group, face->weight) == behind);
    CHECK((face->outside < 0) == is_marked(w, target, ZBP_ROLE_WEIGHT));
    if (face->outside >= 0)
        CHECK(w->plan.outside[w->plan.outside_begin[group] + (uint32_t)face->outside] == target);
}

/* Whether a weight that is left to I lies there or behind; `seen` has a bit for each node on the way. */
static bool leads_to_excluded(const world *w, uint32_t node, uint64_t seen)
{
    if ((seen >> node & 1) != 0 || !has(w, node, ZBP_NODE_WEIGHTWARD))
        return false;
    if (is_marked(w, node, ZBP_ROLE_EXCLUDED))
        return true;
    for (uint32_t e = 0; e < w->graph.edge_count; e++) {
        if (w->graph.edge[e].src == node &&
            leads_to_excluded(w, w->graph.edge[e].dst, seen | UINT64_C(1) << node))
            return true;
    }
    return false;
}

static void check_task(const world *w, uint32_t group, uint32_t node)
{
    const zbp_layout *layout = &w->split.layout[group];
    const zbp_task *task = &layout->task[w->split.task[node]];
    const zbp_fact *fact = &w->facts.fact[node];
    zbp_sides sides = {false, false, false};
    bool is_excluded = false;
    uint32_t f = task->face_begin;
    uint8_t why = 99;

    for (uint32_t e = 0; e < w->graph.edge_count; e++) {
        const zbp_edge *edge = &w->graph.edge[e];

        if (edge->src != node || !has(w, edge->dst, ZBP_NODE_WEIGHTWARD))
            continue;
        REQUIRE(f < task->face_end);
        CHECK(layout->face[f].slot == edge->slot);
        check_face(w, group, &layout->face[f], edge->dst);
        is_excluded = is_excluded || leads_to_excluded(w, edge->dst, 0);
        if (fact->type >= ZBP_TYPE_FACTORS &&
            (edge->slot == fact->left_slot || edge->slot == fact->left_slot + 1u)) {
            sides.left = sides.left || edge->slot == fact->left_slot;
            sides.right = sides.right || edge->slot != fact->left_slot;
            sides.has_matrix = sides.has_matrix || w->facts.is_matrix[e];
        }
        f++;
    }
    CHECK(f == task->face_end);
    CHECK(task->kind == zbp_kind_of(fact, sides, w->facts.policy, is_excluded, &why));
    CHECK(task->why == why && !task->has_work);
    CHECK(task->takes_work == zbp_takes_work(fact, w->facts.policy, is_excluded));
    CHECK(task->sequence_nr == fact->sequence_nr);
    CHECK(task->leaves_packed ==
          (task->kind != ZBP_TASK_WHOLE && w->facts.policy.checkpoint == ZBP_CHECKPOINT_RECOMPUTE));
}

static void check_group(const world *w, uint32_t g)
{
    const zbp_layout *layout = &w->split.layout[g];
    uint32_t tasks = w->plan.split_begin[g + 1] - w->plan.split_begin[g], hops = 0;

    CHECK(layout->weight_count == w->plan.weight_begin[g + 1] - w->plan.weight_begin[g]);
    for (uint32_t i = w->plan.split_begin[g]; i < w->plan.split_begin[g + 1]; i++)
        check_task(w, g, w->plan.split[i]);
    for (uint32_t e = 0; e < w->graph.edge_count; e++) {
        const zbp_edge *edge = &w->graph.edge[e];

        hops += has(w, edge->src, ZBP_NODE_WEIGHTWARD) &&
                !is_marked(w, edge->src, ZBP_ROLE_WEIGHT) && w->plan.group[edge->src] == g &&
                has(w, edge->dst, ZBP_NODE_WEIGHTWARD);
    }
    CHECK(layout->hop_count == hops);
    for (uint32_t r = 0; r < w->root_count; r++) {
        if (w->split.root_task[r] != ZBP_NONE && w->plan.group[w->root[r]] == g) {
            const zbp_task *task = &layout->task[w->split.root_task[r]];

            CHECK(task->kind == ZBP_TASK_ROOT && task->why == ZBP_WHY_ROOT);
            CHECK(task->face_end == task->face_begin + 1);
            check_face(w, g, &layout->face[task->face_begin], w->root[r]);
            CHECK(w->split.root_task[r] == tasks);
            tasks++;
        }
    }
    CHECK(layout->task_count == tasks);
}

static void groups_are_made_of_what_the_plan_says(void)
{
    uint64_t state = 13;

    for (int round = 0; round < 2000; round++) {
        world w;

        draw(&w, &state);
        CHECK(w.split.group_count == w.plan.group_count);
        for (uint32_t g = 0; g < w.plan.group_count; g++)
            check_group(&w, g);
        for (uint32_t i = 0; i < w.graph.node_count; i++)
            CHECK((w.split.task[i] != ZBP_NONE) == has(&w, i, ZBP_NODE_SPLIT));
        for (uint32_t r = 0; r < w.root_count; r++)
            CHECK((w.split.root_task[r] != ZBP_NONE) == has(&w, w.root[r], ZBP_NODE_WEIGHT_ROOT));
        fini(&w);
    }
}

/* ---- by hand: a split node, steps, a weight; an input */

enum { SPLIT, STEP, CAST, WEIGHT, INPUT, KNOWN };

static void make_chain(world *w, uint8_t first, uint8_t second)
{
    const uint32_t chain[][3] = {
        {SPLIT, 0, INPUT}, {SPLIT, 1, STEP}, {STEP, 0, CAST}, {CAST, 0, WEIGHT}};

    memset(w, 0, sizeof *w);
    w->graph = (zbp_graph){0};
    for (uint32_t i = 0; i < KNOWN; i++)
        REQUIRE(zbp_graph_add_node(&w->graph, model_key(i), NULL) == ZBP_OK);
    for (size_t e = 0; e < sizeof chain / sizeof *chain; e++)
        REQUIRE(zbp_graph_add_edge(&w->graph, chain[e][0], chain[e][1], chain[e][2]) == ZBP_OK);
    w->graph.mark[SPLIT] |= ZBP_ROLE_ROOT;
    w->graph.mark[WEIGHT] |= ZBP_ROLE_WEIGHT;
    w->graph.mark[INPUT] |= ZBP_ROLE_INPUT;
    REQUIRE(zbp_plan_build(&w->plan, &w->graph) == ZBP_OK);
    REQUIRE(zbp_facts_init(&w->facts, &w->graph) == ZBP_OK);
    w->facts.fact[SPLIT] = (zbp_fact){.sequence_nr = 7, .type = ZBP_TYPE_PRODUCT};
    w->facts.is_matrix[1] = true;
    w->facts.policy = (zbp_decision){ZBP_DEFER_MATRICES, ZBP_CHECKPOINT_KEEP};
    w->facts.fact[STEP].step = first;
    w->facts.fact[CAST].step = second;
    w->root[0] = SPLIT;
    w->root_count = 1;
}

static zbp_face face_of_chain(uint8_t first, uint8_t second, uint8_t watched)
{
    zbp_face face = {0};
    world w;

    make_chain(&w, first, second);
    w.facts.fact[CAST].flag = watched;
    REQUIRE(zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, w.root, 1) == ZBP_OK);
    CHECK(w.split.layout[0].task_count == 1 && w.split.layout[0].face_count == 1);
    CHECK(w.split.layout[0].task[0].kind == ZBP_TASK_PRODUCT);
    CHECK(w.split.root_to[0] == ZBP_TO_STAND_IN && w.split.edit_count == 2);
    face = w.split.layout[0].face[0];
    fini(&w);
    return face;
}

static void a_path_is_what_its_steps_are(void)
{
    zbp_face face = face_of_chain(ZBP_STEP_TRANSPOSITION, ZBP_STEP_CAST, 0);

    CHECK(face.weight == 0 && face.outside == 0 && face.steps == 2);
    CHECK(face.flag == (ZBP_FACE_PATH | ZBP_FACE_SIMPLE | ZBP_FACE_TRANSPOSED));
    face = face_of_chain(ZBP_STEP_TRANSPOSITION, ZBP_STEP_TRANSPOSITION, 0);
    CHECK(face.flag == (ZBP_FACE_PATH | ZBP_FACE_SIMPLE));
    face = face_of_chain(ZBP_STEP_OTHER, ZBP_STEP_TRANSPOSITION, 0);
    CHECK(face.flag == ZBP_FACE_PATH);
    face = face_of_chain(ZBP_STEP_CAST, ZBP_STEP_CAST, 0);
    CHECK(face.weight == -1 && face.obstacle == ZBP_OBSTACLE_CAST && face.steps == 2);
    face = face_of_chain(ZBP_STEP_MOVE, ZBP_STEP_CAST, 0);
    CHECK(face.weight == -1 && face.obstacle == ZBP_OBSTACLE_CAST);
    face = face_of_chain(ZBP_STEP_MOVE, ZBP_STEP_MOVE, 0);
    CHECK(face.weight == -1 && face.obstacle == ZBP_OBSTACLE_CAST);
    face = face_of_chain(ZBP_STEP_MOVE, ZBP_STEP_TRANSPOSITION, 0);
    CHECK(face.weight == 0 && face.flag == ZBP_FACE_PATH);
    face = face_of_chain(ZBP_STEP_OTHER, ZBP_STEP_CAST, ZBP_FACT_WATCHED);
    CHECK(face.weight == -1 && face.obstacle == ZBP_OBSTACLE_NODE && face.steps == 1);
    face = face_of_chain(ZBP_STEP_NONE, ZBP_STEP_CAST, 0);
    CHECK(face.weight == -1 && face.obstacle == ZBP_OBSTACLE_NODE && face.steps == 0);
}

/* The weight's node, or the one on the way to it. */
static void what_leads_to_an_excluded_weight_is_whole(void)
{
    for (uint32_t at = CAST; at <= WEIGHT; at++) {
        world w;

        make_chain(&w, ZBP_STEP_OTHER, ZBP_STEP_CAST);
        zbp_plan_fini(&w.plan);
        w.graph.mark[at] |= ZBP_ROLE_EXCLUDED;
        REQUIRE(zbp_plan_build(&w.plan, &w.graph) == ZBP_OK);
        CHECK(zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, w.root, 1) == ZBP_OK);
        CHECK(w.split.layout[0].task[0].kind == ZBP_TASK_WHOLE);
        CHECK(w.split.layout[0].task[0].why == ZBP_WHY_EXCLUDED);
        CHECK(w.split.layout[0].face[0].weight == 0); /* its path is as ever */
        fini(&w);
    }
}

static void gradients_that_meet_on_a_path_end_it(void)
{
    world w;

    make_chain(&w, ZBP_STEP_OTHER, ZBP_STEP_CAST);
    w.root[1] = CAST; /* the backward starts there as well */
    CHECK(zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, w.root, 2) == ZBP_OK);
    CHECK(w.split.layout[0].face[0].obstacle == ZBP_OBSTACLE_SUM);
    CHECK(w.split.root_task[1] == ZBP_NONE); /* it was not marked as a root */
    fini(&w);
}

/* Split node -> `steps` steps -> weight; and an input. */
static uint8_t obstacle_behind(uint32_t steps)
{
    const uint32_t weight = steps + 1, input = steps + 2;
    world w = {0};
    uint8_t obstacle;

    for (uint32_t i = 0; i <= input; i++)
        REQUIRE(zbp_graph_add_node(&w.graph, model_key(i), NULL) == ZBP_OK);
    for (uint32_t i = 0; i < weight; i++)
        REQUIRE(zbp_graph_add_edge(&w.graph, i, 0, i + 1) == ZBP_OK);
    REQUIRE(zbp_graph_add_edge(&w.graph, 0, 1, input) == ZBP_OK);
    w.graph.mark[weight] |= ZBP_ROLE_WEIGHT;
    w.graph.mark[input] |= ZBP_ROLE_INPUT;
    REQUIRE(zbp_plan_build(&w.plan, &w.graph) == ZBP_OK);
    REQUIRE(zbp_facts_init(&w.facts, &w.graph) == ZBP_OK);
    for (uint32_t i = 1; i <= steps; i++)
        w.facts.fact[i].step = ZBP_STEP_OTHER;
    REQUIRE(zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, NULL, 0) == ZBP_OK);
    obstacle = w.split.layout[0].face[0].obstacle;
    fini(&w);
    return obstacle;
}

static void a_path_has_eight_steps_at_most(void)
{
    CHECK(obstacle_behind(8) == ZBP_OBSTACLE_NONE);
    CHECK(obstacle_behind(9) == ZBP_OBSTACLE_NODE);
}

static void an_empty_graph_is_split_into_nothing(void)
{
    world w = {0};

    REQUIRE(zbp_plan_build(&w.plan, &w.graph) == ZBP_OK);
    CHECK(zbp_facts_init(&w.facts, &w.graph) == ZBP_OK);
    CHECK(zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, NULL, 0) == ZBP_OK);
    CHECK(w.split.group_count == 0 && w.split.edit_count == 0);
    fini(&w);
}

static void a_failed_allocation_leaves_nothing(void)
{
    uint64_t state = 17;

    for (int round = 0; round < 50; round++) {
        int status = ZBP_ENOMEM;
        world w;

        draw(&w, &state);
        zbp_split_fini(&w.split);
        zbp_facts_fini(&w.facts);
        for (long n = 0; status != ZBP_OK; n++) {
            counting_begin(-1);
            count.fail_at = n;
            status = zbp_facts_init(&w.facts, &w.graph);
            if (status == ZBP_OK) {
                uint64_t facts_state = 19;

                draw_facts(&w, &facts_state);
                status =
                    zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, w.root, w.root_count);
            }
            count.fail_at = -1;
            CHECK(status == ZBP_OK || (status == ZBP_ENOMEM && w.split.layout == NULL));
            zbp_split_fini(&w.split);
            zbp_facts_fini(&w.facts);
            CHECK(count.live == 0);
            REQUIRE(n < 1000);
        }
        fini(&w);
    }
}

int main(void)
{
    check_sees_failure();
    RUN(i_runs_the_closure_and_nothing_else);
    RUN(what_w_runs_again_is_cut_off_from_its_weights);
    RUN(groups_are_made_of_what_the_plan_says);
    RUN(a_path_is_what_its_steps_are);
    RUN(what_leads_to_an_excluded_weight_is_whole);
    RUN(gradients_that_meet_on_a_path_end_it);
    RUN(a_path_has_eight_steps_at_most);
    RUN(an_empty_graph_is_split_into_nothing);
    RUN(a_failed_allocation_leaves_nothing);
    return check_end();
}
