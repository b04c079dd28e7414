/* A group's gradients, added without the engine. See Note [The order of sums] in core/pass/zbp_book.h. */

#include <stdlib.h>

#include "pass/zbp_pass.h"

/* The face's gradient goes into its weight's sum, and with the last face the sum to the weight. */
static int join_sum(zbp_turn *turn, zbp_adding *adding, uint32_t face, zbp_error *error)
{
    const uint32_t weight = (uint32_t)turn->layout->face[face].weight;
    int status = zbp_sum_gradient(adding, face, error);

    if (status == ZBP_OK && zbp_book_came(turn->book, turn->layout, face)) {
        status = zbp_add_sum(adding, weight, error);
        if (status == ZBP_OK)
            zbp_book_met(turn->book, weight);
    }
    return status;
}

static int add_alone(zbp_turn *turn, zbp_adding *adding, uint32_t face, zbp_how how,
                     zbp_error *error)
{
    const zbp_product product = {.turn = turn, .face = face};
    uint32_t added = 0;
    int status = zbp_add_products(&product, 1, how, &added, error);

    if (status == ZBP_OK && added == 0)
        status = turn->book->face[face].half.panels > 0
                     ? zbp_error_half_added(turn->held, face, error)
                     : zbp_add_gradient(adding, face, error);
    if (status != ZBP_OK)
        return status;
    zbp_book_delivered(turn->book, face);
    if (!how.retain)
        zbp_let_go(adding, face); /* not before it is added: a retry would find nothing */
    return ZBP_OK;
}

static int add_task(zbp_turn *turn, zbp_adding *adding, uint32_t t, zbp_how how, zbp_error *error)
{
    const zbp_task task = turn->layout->task[t];
    int status = zbp_adding_begin(adding, t, error);

    for (uint32_t f = task.face_begin; f < task.face_end && status == ZBP_OK; f++) {
        if (!zbp_book_owes(turn->book, turn->layout, f))
            continue;
        status = zbp_book_meets(turn->book, turn->layout, how, f)
                     ? join_sum(turn, adding, f, error)
                     : add_alone(turn, adding, f, how, error);
    }
    return status;
}

int zbp_pass_directly(zbp_turn *turn, zbp_how how, zbp_error *error)
{
    const uint32_t count = turn->layout->task_count;
    uint32_t *order = malloc((2 * (size_t)count + 1) * sizeof *order);
    zbp_adding *adding = NULL;
    int status = order == NULL ? ZBP_ENOMEM : zbp_adding_new(turn->held, how, &adding, error);

    if (status == ZBP_OK) {
        zbp_layout_order(turn->layout, order);
        zbp_book_begin_direct(turn->book, turn->layout);
    }
    for (uint32_t i = 0; i < count && status == ZBP_OK; i++)
        status = add_task(turn, adding, order[i], how, error);
    zbp_adding_free(adding);
    free(order);
    if (status != ZBP_OK)
        return status;
    zbp_book_added_all(turn->book);
    status = zbp_join_streams(turn->held, error);
    if (!how.retain)
        zbp_held_release(turn->held); /* now: the groups that follow need the memory */
    return status;
}
