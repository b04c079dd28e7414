#include "core/pass/zbp_split.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

/* Long enough for what einsum puts between a weight and its product. */
enum { LONGEST_PATH = 8 };

/* What lives only while a split is built. */
typedef struct work {
    const zbp_graph *graph;
    const zbp_plan *plan;
    const zbp_facts *facts;
    zbp_split *split;

    uint32_t *index;    /* [nodes], a weight's or outside node's index in its group */
    uint32_t *arrivals; /* [nodes], how many edges and roots lead there; in the same block */
} work;

/* ---- memory */

static int new_split(zbp_split *split)
{
    const size_t groups = split->group_count, nodes = split->node_count;

    split->block =
        zbpi_resize(NULL, groups * sizeof *split->layout + split->edge_count * sizeof *split->edit +
                              (nodes + split->root_count) * sizeof *split->task +
                              split->root_count * sizeof *split->root_to);
    if (split->block == NULL)
        return ZBP_ENOMEM;
    split->layout = split->block;
    memset(split->layout, 0, groups * sizeof *split->layout);
    split->edit = (zbp_edit *)(split->layout + groups);
    split->task = (uint32_t *)(split->edit + split->edge_count);
    split->root_task = split->task + nodes;
    split->root_to = (uint8_t *)(split->root_task + split->root_count);
    memset(split->task, 0xff, nodes * sizeof *split->task); /* ZBP_NONE */
    memset(split->root_task, 0xff, split->root_count * sizeof *split->root_task);
    return ZBP_OK;
}

void zbp_split_fini(zbp_split *split)
{
    for (uint32_t g = 0; split->layout != NULL && g < split->group_count; g++)
        zbp_layout_fini(&split->layout[g]);
    zbpi_free(split->block);
    memset(split, 0, sizeof *split);
}

/* ---- what nodes are */

static bool is_input(const work *w, uint32_t node)
{
    return (w->graph->mark[node] & ZBP_ROLE_INPUT) != 0;
}

static bool has(const work *w, uint32_t node, uint8_t flag)
{
    return (w->plan->flag[node] & flag) != 0;
}

static bool is_weight(const work *w, uint32_t node)
{
    return has(w, node, ZBP_NODE_WEIGHT);
}

static const zbp_edge *out_edge(const work *w, uint32_t node, uint32_t i)
{
    return &w->graph->edge[w->plan->out[w->plan->out_begin[node] + i]];
}

static uint32_t out_count(const work *w, uint32_t node)
{
    return w->plan->out_begin[node + 1] - w->plan->out_begin[node];
}

static bool is_plain_step(const work *w, uint32_t node)
{
    const zbp_fact *fact = &w->facts->fact[node];

    return fact->step != ZBP_STEP_NONE && (fact->flag & ZBP_FACT_WATCHED) == 0 &&
           out_count(w, node) == 1 && !is_weight(w, node);
}

/* ---- groups */

static void index_group(work *w, uint32_t g)
{
    const zbp_plan *plan = w->plan;

    for (uint32_t i = plan->weight_begin[g]; i < plan->weight_begin[g + 1]; i++)
        w->index[plan->weight[i]] = i - plan->weight_begin[g];
    for (uint32_t i = plan->outside_begin[g]; i < plan->outside_begin[g + 1]; i++)
        w->index[plan->outside[i]] = i - plan->outside_begin[g];
}

static int add_hops(work *w, uint32_t g)
{
    zbp_layout *layout = &w->split->layout[g];
    int status = ZBP_OK;

    for (uint32_t o = 0; o < layout->outside_count && status == ZBP_OK; o++) {
        const uint32_t node = w->plan->outside[w->plan->outside_begin[g] + o];

        for (uint32_t i = 0; i < out_count(w, node) && status == ZBP_OK; i++) {
            const zbp_edge *edge = out_edge(w, node, i);
            zbp_hop hop = {.outside = o, .slot = edge->slot, .to_outside = -1, .to_weight = -1};

            if (!has(w, edge->dst, ZBP_NODE_WEIGHTWARD))
                continue;
            *(is_weight(w, edge->dst) ? &hop.to_weight : &hop.to_outside) =
                (int32_t)w->index[edge->dst];
            status = zbp_layout_add_hop(layout, hop);
        }
    }
    return status;
}

/* ---- tasks */

/* Follows a face that leads to an outside node to its weight, if only plain steps lie between. */
static void follow(const work *w, zbp_face *face, uint32_t node)
{
    bool is_viewed = false, is_transposed = false, adds_up = false;
    uint32_t casts = 0;

    for (; face->steps < LONGEST_PATH && is_plain_step(w, node); face->steps++) {
        const uint8_t step = w->facts->fact[node].step;

        casts += step == ZBP_STEP_CAST;
        is_viewed = is_viewed || step == ZBP_STEP_VIEW;
        is_transposed = is_transposed != (step == ZBP_STEP_TRANSPOSITION);
        adds_up = adds_up || w->arrivals[node] > 1;
        node = out_edge(w, node, 0)->dst;
    }
    if (face->steps == 0 || !is_weight(w, node)) {
        face->obstacle = ZBP_OBSTACLE_NODE;
    } else if (casts > 1) {
        face->obstacle = ZBP_OBSTACLE_CAST;
    } else if (adds_up) {
        face->obstacle = ZBP_OBSTACLE_SUM;
    } else {
        face->weight = (int32_t)w->index[node];
        face->is_viewed = is_viewed;
        face->is_transposed = is_transposed && !is_viewed;
    }
}

static int add_face(const work *w, zbp_layout *layout, uint32_t slot, uint32_t target)
{
    zbp_face face = {.slot = slot, .weight = -1, .outside = -1};

    if (is_weight(w, target)) {
        face.weight = (int32_t)w->index[target];
    } else {
        face.outside = (int32_t)w->index[target];
        follow(w, &face, target);
    }
    return zbp_layout_add_face(layout, face);
}

static int add_split_task(work *w, uint32_t g, uint32_t node)
{
    zbp_layout *layout = &w->split->layout[g];
    const zbp_fact *fact = &w->facts->fact[node];
    zbp_sides sides = {0};
    bool is_excluded = false;
    zbp_task *task;
    int status = zbp_layout_add_task(layout, ZBP_TASK_WHOLE, fact->sequence_nr);

    for (uint32_t i = 0; i < out_count(w, node) && status == ZBP_OK; i++) {
        const zbp_edge *edge = out_edge(w, node, i);

        if (!has(w, edge->dst, ZBP_NODE_WEIGHTWARD))
            continue;
        if (fact->type >= ZBP_TYPE_FACTORS &&
            (edge->slot == fact->left_slot || edge->slot == fact->left_slot + 1u)) {
            const bool is_left = edge->slot == fact->left_slot;

            *(is_left ? &sides.left : &sides.right) = true;
            sides.has_matrix |=
                (fact->flag & (is_left ? ZBP_FACT_LEFT_MATRIX : ZBP_FACT_RIGHT_MATRIX)) != 0;
        }
        is_excluded = is_excluded || has(w, edge->dst, ZBP_NODE_EXCLUDED);
        status = add_face(w, layout, edge->slot, edge->dst);
    }
    if (status != ZBP_OK)
        return status;
    task = &layout->task[layout->task_count - 1];
    task->kind = zbp_kind_of(fact, sides, w->facts->policy, is_excluded, &task->why);
    task->takes_work = zbp_takes_work(fact, w->facts->policy, is_excluded);
    task->leaves_packed =
        task->kind != ZBP_TASK_WHOLE && w->facts->policy.checkpoint == ZBP_CHECKPOINT_RECOMPUTE;
    w->split->task[node] = layout->task_count - 1;
    return ZBP_OK;
}

static int add_group(work *w, uint32_t g)
{
    const zbp_plan *plan = w->plan;
    zbp_layout *layout = &w->split->layout[g];
    int status;

    index_group(w, g);
    layout->weight_count = plan->weight_begin[g + 1] - plan->weight_begin[g];
    layout->outside_count = plan->outside_begin[g + 1] - plan->outside_begin[g];
    status = add_hops(w, g);
    for (uint32_t i = plan->split_begin[g]; i < plan->split_begin[g + 1] && status == ZBP_OK; i++)
        status = add_split_task(w, g, plan->split[i]);
    return status;
}

/* ---- where gradients go */

static uint8_t target_of(const work *w, uint32_t node)
{
    if (is_input(w, node))
        return ZBP_TO_CAPTURE;
    if (has(w, node, ZBP_NODE_SPLIT))
        return ZBP_TO_STAND_IN;
    return has(w, node, ZBP_NODE_CLOSURE) ? ZBP_TO_NODE : ZBP_TO_NOWHERE;
}

/* A whole node runs with all its edges, so its own stay. Of another split node's the weight face is
 * cut. */
static void edit_edge(work *w, uint32_t e)
{
    const zbp_edge *edge = &w->graph->edge[e];
    zbp_edit edit = {.edge = e, .to = target_of(w, edge->dst)};

    if (!has(w, edge->src, ZBP_NODE_CLOSURE) || is_input(w, edge->src))
        return;
    edit.is_of_stand_in = has(w, edge->src, ZBP_NODE_SPLIT);
    edit.is_of_node = edit.to != ZBP_TO_NODE;
    if (edit.is_of_stand_in) {
        const zbp_layout *layout = &w->split->layout[w->plan->group[edge->src]];
        const zbp_task *task = &layout->task[w->split->task[edge->src]];

        edit.is_of_node = edit.to == ZBP_TO_NOWHERE && task->kind != ZBP_TASK_WHOLE;
    }
    if (edit.is_of_stand_in || edit.is_of_node)
        w->split->edit[w->split->edit_count++] = edit;
}

/* A root outside the closure gets a task of its own: it starts there before any node runs. */
static int add_root(work *w, const uint32_t *root, uint32_t r)
{
    zbp_layout *layout;
    int status;

    w->split->root_to[r] = target_of(w, root[r]);
    if (w->split->root_to[r] != ZBP_TO_NOWHERE || !has(w, root[r], ZBP_NODE_WEIGHT_ROOT))
        return ZBP_OK;
    layout = &w->split->layout[w->plan->group[root[r]]];
    status = zbp_layout_add_task(layout, ZBP_TASK_ROOT, UINT64_MAX - 1 - r);
    if (status == ZBP_OK) {
        layout->task[layout->task_count - 1].why = ZBP_WHY_ROOT;
        w->split->root_task[r] = layout->task_count - 1;
        status = add_face(w, layout, 0, root[r]);
    }
    return status;
}

/* ---- */

static int build(work *w, const uint32_t *root)
{
    const uint32_t roots = w->split->root_count;
    int status = new_split(w->split);

    if (status != ZBP_OK)
        return status;
    w->index = zbpi_zeroed(w->split->node_count * 2 * sizeof *w->index);
    if (w->index == NULL)
        return ZBP_ENOMEM;
    w->arrivals = w->index + w->split->node_count;
    for (uint32_t e = 0; e < w->graph->edge_count; e++)
        w->arrivals[w->graph->edge[e].dst]++;
    for (uint32_t r = 0; r < roots; r++)
        w->arrivals[root[r]]++;
    for (uint32_t g = 0; g < w->plan->group_count && status == ZBP_OK; g++)
        status = add_group(w, g);
    for (uint32_t r = 0; r < roots && status == ZBP_OK; r++)
        status = add_root(w, root, r);
    for (uint32_t e = 0; e < w->graph->edge_count && status == ZBP_OK; e++)
        edit_edge(w, e);
    return status;
}

int zbp_split_build(zbp_split *split, const zbp_graph *graph, const zbp_plan *plan,
                    const zbp_facts *facts, const uint32_t *root, uint32_t root_count)
{
    work w = {.graph = graph, .plan = plan, .facts = facts, .split = split};
    int status;

    *split = (zbp_split){.group_count = plan->group_count,
                         .node_count = graph->node_count,
                         .edge_count = graph->edge_count,
                         .root_count = root_count};
    status = build(&w, root);
    zbpi_free(w.index);
    if (status != ZBP_OK)
        zbp_split_fini(split);
    return status;
}
