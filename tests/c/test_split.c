/* How a backward is split: random graphs against what a naive engine does with the edges, naive paths and
 * kinds; the longest path by hand; failing allocations. */
#include "check.h"
#include "core/pass/zbp_split.h"
#include "counting.h"
#include "model.h"

enum { NODES = 40, ROOTS = 4 };

typedef struct world {
    zbp_graph graph;
    zbp_plan plan;
    zbp_fact fact[NODES];
    zbp_facts facts; /* the array */
    zbp_split split;
    uint32_t root[ROOTS], root_count;
} world;

static void fini(world *w)
{
    zbp_split_fini(&w->split);
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

static void open_facts(world *w)
{
    REQUIRE(w->graph.node_count <= NODES);
    w->facts.fact = w->fact;
}

static void draw_facts(world *w, uint64_t *state)
{
    open_facts(w);
    for (uint32_t i = 0; i < w->graph.node_count; i++) {
        w->fact[i] = (zbp_fact){
            .sequence_nr = model_below(state, 100),
            .type = (uint8_t)model_below(state, 5),
            .left_slot = (uint8_t)model_below(state, 2),
            .step = (uint8_t)model_below(state, ZBP_STEP_VIEW + 1),
            .flag = (uint8_t)(model_below(state, 4) == 0 ? model_below(state, 32)
                                                         : model_below(state, 4) * 8),
        };
    }
    w->facts.policy = (zbp_policy){.defer = (uint8_t)model_below(state, 3),
                                   .checkpoint = (uint8_t)model_below(state, 3)};
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
        const bool of_stand_in = edit != NULL && edit->is_of_stand_in;

        if (w->graph.edge[e].src != node)
            continue;
        CHECK(of_stand_in == as_stand_in); /* a stand-in has no other edges */
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
            CHECK(has(&w, edge->src, ZBP_NODE_CLOSURE) &&
                  !is_marked(&w, edge->src, ZBP_ROLE_INPUT));
            CHECK(is_split == edit->is_of_stand_in);
            if (is_split) {
                const zbp_layout *layout = &w.split.layout[w.plan.group[edge->src]];
                const bool is_whole = layout->task[w.split.task[edge->src]].kind == ZBP_TASK_WHOLE;

                CHECK(edit->is_of_node == (edit->to == ZBP_TO_NOWHERE && !is_whole));
            } else {
                CHECK(edit->is_of_node && edit->to != ZBP_TO_NODE);
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

/* What a face that reaches `node` says of the way to its weight, which comes out where the way leads to one. */
static zbp_face naive_path(const world *w, uint32_t node, uint32_t *weight_out)
{
    zbp_face face = {0};
    uint32_t casts = 0, turns = 0, out = 0;
    bool meets = false;

    for (; !is_marked(w, node, ZBP_ROLE_WEIGHT); face.steps++) {
        const zbp_fact *fact = &w->facts.fact[node];
        const uint32_t edge = only_edge_of(w, node, &out);

        if (face.steps == 8 || out != 1 || fact->step == ZBP_STEP_NONE ||
            (fact->flag & ZBP_FACT_WATCHED) != 0) {
            face.obstacle = ZBP_OBSTACLE_NODE;
            return face;
        }
        casts += fact->step == ZBP_STEP_CAST;
        turns += fact->step == ZBP_STEP_TRANSPOSITION;
        face.is_viewed = face.is_viewed || fact->step == ZBP_STEP_VIEW;
        meets = meets || arrivals_at(w, node) > 1;
        node = w->graph.edge[edge].dst;
    }
    if (casts > 1 || meets)
        face.obstacle = casts > 1 ? ZBP_OBSTACLE_CAST : ZBP_OBSTACLE_SUM;
    else
        face.is_transposed = turns % 2 == 1 && !face.is_viewed;
    *weight_out = node;
    return face;
}

static void check_face(const world *w, uint32_t group, const zbp_face *face, uint32_t target)
{
    uint32_t behind = ZBP_NONE;
    const zbp_face wanted = naive_path(w, target, &behind);

    CHECK(face->obstacle == wanted.obstacle && face->steps == wanted.steps);
    CHECK(face->is_transposed == wanted.is_transposed);
    CHECK(face->weight < 0 || face->is_viewed == wanted.is_viewed);
    CHECK((face->weight >= 0) == (wanted.obstacle == ZBP_OBSTACLE_NONE));
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
            sides.has_matrix =
                sides.has_matrix ||
                (fact->flag & (edge->slot == fact->left_slot ? ZBP_FACT_LEFT_MATRIX
                                                             : ZBP_FACT_RIGHT_MATRIX)) != 0;
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

/* ---- by hand */

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
    open_facts(&w);
    for (uint32_t i = 1; i <= steps; i++)
        w.fact[i].step = ZBP_STEP_TRANSPOSITION;
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

static void a_failed_allocation_leaves_nothing(void)
{
    uint64_t state = 17;

    for (int round = 0; round < 50; round++) {
        int status = ZBP_ENOMEM;
        world w;

        draw(&w, &state);
        zbp_split_fini(&w.split);
        for (long n = 0; status != ZBP_OK; n++) {
            counting_begin(-1);
            count.fail_at = n;
            status = zbp_split_build(&w.split, &w.graph, &w.plan, &w.facts, w.root, w.root_count);
            count.fail_at = -1;
            CHECK(status == ZBP_OK || (status == ZBP_ENOMEM && w.split.layout == NULL));
            zbp_split_fini(&w.split);
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
    RUN(a_path_has_eight_steps_at_most);
    RUN(a_failed_allocation_leaves_nothing);
    return check_end();
}
