/* I: walk, plan, note facts, decide, run. See docs/architecture.md. */

#include "pass/zbp_pass.h"

static void fini(zbp_survey *survey)
{
    zbp_split_fini(&survey->split);
    zbp_facts_fini(&survey->facts);
    zbp_plan_fini(&survey->plan);
    zbp_graph_fini(&survey->graph);
}

int zbp_pass_inputs(zbp_scene *scene, zbp_error *error)
{
    zbp_survey survey = {0};
    const uint32_t *root = NULL;
    uint32_t root_count = 0;
    int status = zbp_scene_walk(scene, &survey.graph, &root, &root_count, error);
    if (status == ZBP_OK)
        status = zbp_plan_build(&survey.plan, &survey.graph);
    if (status == ZBP_OK)
        status = zbp_facts_init(&survey.facts, &survey.graph);
    if (status == ZBP_OK)
        status = zbp_scene_note_facts(scene, &survey, error);
    if (status == ZBP_OK)
        status = zbp_split_build(&survey.split, &survey.graph, &survey.plan, &survey.facts, root,
                                 root_count);
    if (status == ZBP_OK)
        status = zbp_scene_run(scene, &survey, error);
    fini(&survey);
    return status;
}
