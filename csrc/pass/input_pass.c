/* I: walk, plan, decide, split, run, hand over. See docs/architecture.md. */

#include "pass/zbp_pass.h"

static void fini(zbp_survey *survey)
{
    zbp_split_fini(&survey->split);
    zbp_facts_fini(&survey->facts);
    zbp_plan_fini(&survey->plan);
    zbp_graph_fini(&survey->graph);
}

/* Step 1, and of step 2 what needs no more than marks. */
static int walk(zbp_scene *scene, zbp_survey *survey, zbp_error *error)
{
    int status = zbp_graph_init(&survey->graph, NULL);

    if (status == ZBP_OK)
        status = zbp_scene_walk(scene, &survey->graph, error);
    if (status == ZBP_OK)
        status = zbp_plan_build(&survey->plan, &survey->graph, NULL);
    return status;
}

/* Steps 1 and 2; what an error leaves of the survey is for fini(). */
static int plan(zbp_scene *scene, zbp_survey *survey, zbp_error *error)
{
    uint32_t root_count = 0;
    const uint32_t *root;
    int status = walk(scene, survey, error);

    if (status == ZBP_OK)
        status = zbp_facts_init(&survey->facts, &survey->graph, NULL);
    if (status == ZBP_OK)
        status = zbp_scene_look(scene, survey, error);
    if (status == ZBP_OK) {
        root = zbp_scene_roots(scene, &root_count);
        status = zbp_split_build(&survey->split, &survey->graph, &survey->plan, &survey->facts,
                                 root, root_count, NULL);
    }
    if (status == ZBP_OK)
        status = zbp_scene_make_groups(scene, survey, error);
    return status;
}

int zbp_pass_inputs(zbp_scene *scene, zbp_error *error)
{
    zbp_survey survey = {0};
    int status = plan(scene, &survey, error);

    if (status == ZBP_OK)
        status = zbp_scene_set(scene, &survey, error);
    if (status == ZBP_OK)
        status = zbp_scene_run(scene, &survey, error);
    if (status == ZBP_OK)
        status = zbp_scene_hand_over(scene, &survey, error);
    fini(&survey);
    return status;
}
