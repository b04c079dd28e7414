/* W: see the hooks, add what is alone, run the rest in the engine, settle. See Note [The states of
 * a weight]. */

#include "core/base/zbp_map.h"
#include "shim/weight/zbp_weight.h"

static bool is_engines(const zbp_group *group, uint32_t w)
{
    return !group->book.weight[w].is_added && group->book.weight[w].alone == ZBP_NO_FACE;
}

/* A weight that is the engine's in one group is the engine's in all: what it adds comes in the
 * order of the groups. */
static int share_engine(zbp_group *const *group, size_t count)
{
    zbp_map engine = {0};
    int status = ZBP_OK;

    for (size_t g = 0; g < count; g++) {
        for (uint32_t w = 0; w < group[g]->book.weight_count && status == ZBP_OK; w++) {
            if (is_engines(group[g], w))
                status = zbp_map_add(&engine, zbp_weight_key(group[g], w), NULL);
        }
    }
    for (size_t g = 0; g < count && status == ZBP_OK && engine.count > 0; g++) {
        for (uint32_t w = 0; w < group[g]->book.weight_count; w++) {
            if (zbp_map_find(&engine, zbp_weight_key(group[g], w), NULL))
                group[g]->book.weight[w].alone = ZBP_NO_FACE;
        }
    }
    zbp_map_fini(&engine);
    return status;
}

static int find_alone(zbp_group *const *group, size_t count, zbp_how how, zbp_error *error)
{
    int status = ZBP_OK;

    for (size_t g = 0; g < count && status == ZBP_OK; g++) {
        status = zbp_group_see_hooks(group[g], error);
        if (status == ZBP_OK)
            zbp_book_find_alone(&group[g]->book, &group[g]->layout, how);
    }
    return status == ZBP_OK && count > 1 ? share_engine(group, count) : status;
}

/* The group's weights that are alone. A group that is complete then lets go: those behind it need
 * the memory. */
static int add_alone(zbp_group *group, zbp_how how, zbp_error *error)
{
    const zbp_book *book = &group->book;
    int status = ZBP_OK;

    for (uint32_t w = 0; w < book->weight_count && status == ZBP_OK; w++) {
        if (book->weight[w].alone == ZBP_NO_FACE)
            continue;
        /* An accumulator would add nothing to a frozen weight either. */
        if ((book->weight[w].seen & ZBP_WEIGHT_FROZEN) == 0)
            status = zbp_add_alone(group, book->weight[w].alone, how, error);
        if (status == ZBP_OK)
            group->book.weight[w].is_added = true;
    }
    if (status == ZBP_OK && !how.retain && zbp_book_is_complete(book))
        zbp_group_release(group);
    return status;
}

static bool has_one_of(const zbp_group *group, const zbp_map *weights)
{
    bool has = false;

    for (uint32_t w = 0; w < group->book.weight_count && !has; w++)
        has = !group->book.weight[w].is_added &&
              zbp_map_find(weights, zbp_weight_key(group, w), NULL);
    return has;
}

/* The group joins the run whose weights these are. */
static int join_run(zbp_group *group, zbp_map *weights)
{
    int status = ZBP_OK;

    for (uint32_t w = 0; w < group->book.weight_count && status == ZBP_OK; w++) {
        if (!group->book.weight[w].is_added)
            status = zbp_map_add(weights, zbp_weight_key(group, w), NULL);
    }
    if (status == ZBP_OK)
        zbp_book_give_up_paths(&group->book, &group->layout);
    return status;
}

/* One run for the groups of each microbatch: a group that shares a weight with one before it begins
 * the next. */
static int run_engine(zbp_group *const *group, size_t count, zbp_how how, zbp_error *error)
{
    zbp_map weights = {0};
    size_t first = 0;
    int status = ZBP_OK;

    for (size_t g = 0; g < count && status == ZBP_OK; g++) {
        if (zbp_book_is_complete(&group[g]->book))
            continue;
        if (has_one_of(group[g], &weights)) {
            status = zbp_run_engine(group + first, g - first, how, error);
            zbp_map_fini(&weights);
            first = g;
        }
        if (status == ZBP_OK)
            status = join_run(group[g], &weights);
    }
    if (status == ZBP_OK && weights.count > 0)
        status = zbp_run_engine(group + first, count - first, how, error);
    zbp_map_fini(&weights);
    return status;
}

static void settle(zbp_group *group, zbp_how how, bool failed)
{
    switch (zbp_book_settle(&group->book, how, failed)) {
    case ZBP_FATE_KEEP:
        break;
    case ZBP_FATE_AGAIN:
        zbp_group_again(group);
        break;
    case ZBP_FATE_RELEASE:
        zbp_group_release(group); /* it reads the layout */
        zbp_layout_fini(&group->layout);
        break;
    case ZBP_FATE_CLOSE:
        zbp_group_close(group);
        zbp_layout_fini(&group->layout);
        zbp_book_close(&group->book);
        break;
    }
}

int zbp_pass_weights(zbp_group *const *group, size_t count, zbp_how how, zbp_error *error)
{
    int status = find_alone(group, count, how, error);

    for (size_t g = 0; g < count && status == ZBP_OK; g++)
        status = add_alone(group[g], how, error);
    if (status == ZBP_OK)
        status = run_engine(group, count, how, error);
    for (size_t g = 0; g < count; g++)
        settle(group[g], how, status != ZBP_OK);
    return status;
}
