/* I's conductor on a scene that is a list: what is called in which order, what an error stops, and that
 * nothing is kept. */
#include "check.h"
#include "model.h"
#include "pass/zbp_pass.h"

enum { CALLS = 16 };

struct zbp_scene {
    char calls[CALLS]; /* a letter each */
    int count, fail_at;
    uint32_t root;
};

static const char FAILED[] = "failed";

static int call(zbp_scene *scene, char letter, zbp_error *error)
{
    REQUIRE(scene->count < CALLS - 1);
    scene->calls[scene->count] = letter;
    if (scene->count++ != scene->fail_at)
        return ZBP_OK;
    error->raised = (void *)(uintptr_t)FAILED;
    return ZBP_ETORCH;
}

/* Output -> input, and output -> weight. */
int zbp_scene_walk(zbp_scene *scene, zbp_graph *graph, const uint32_t **root_out,
                   uint32_t *root_count_out, zbp_error *error)
{
    CHECK(graph->node_count == 0);
    for (uint32_t i = 0; i < 3; i++)
        REQUIRE(zbp_graph_add_node(graph, model_key(i), NULL) == ZBP_OK);
    REQUIRE(zbp_graph_add_edge(graph, 0, 0, 1) == ZBP_OK &&
            zbp_graph_add_edge(graph, 0, 1, 2) == ZBP_OK);
    graph->mark[0] |= ZBP_ROLE_ROOT;
    graph->mark[1] |= ZBP_ROLE_INPUT;
    graph->mark[2] |= ZBP_ROLE_WEIGHT;
    *root_out = &scene->root;
    *root_count_out = 1;
    return call(scene, 'w', error);
}

int zbp_scene_note_facts(zbp_scene *scene, zbp_survey *survey, zbp_error *error)
{
    CHECK(survey->facts.fact[2].type == ZBP_TYPE_UNKNOWN && !survey->facts.is_matrix[0]);
    survey->facts.fact[0] = (zbp_fact){.type = ZBP_TYPE_PRODUCT};
    survey->facts.is_matrix[1] = true;
    survey->facts.policy = (zbp_decision){ZBP_DEFER_MATRICES, ZBP_CHECKPOINT_KEEP};
    return call(scene, 'f', error);
}

int zbp_scene_run(zbp_scene *scene, zbp_survey *survey, zbp_error *error)
{
    CHECK(survey->split.group_count == 1);
    CHECK(survey->split.layout[0].task[0].kind == ZBP_TASK_PRODUCT);
    CHECK(survey->split.edit_count == 2);
    CHECK(survey->split.root_to[0] == ZBP_TO_STAND_IN);
    return call(scene, 'r', error);
}

static void the_steps_come_in_their_order_and_an_error_ends_them(void)
{
    for (int n = 0; n <= 3; n++) {
        zbp_scene scene = {.fail_at = n};
        zbp_error error = {0};

        CHECK(zbp_pass_inputs(&scene, &error) == (n < 3 ? ZBP_ETORCH : ZBP_OK));
        CHECK(error.raised == (n < 3 ? FAILED : NULL));
        CHECK(scene.count == (n < 3 ? n + 1 : 3));
        CHECK(strncmp(scene.calls, "wfr", (size_t)scene.count) == 0);
    }
}

int main(void)
{
    check_sees_failure();
    RUN(the_steps_come_in_their_order_and_an_error_ends_them);
    return check_end();
}
