/* W: look, refuse, sweep and add directly what nobody watches, run the rest in the engine, settle. */

#include "pass/zbp_pass.h"
#include "pass/zbp_sweep.h"

/* What W does with a group, as it is now. */
static int find_way(zbp_turn *turn, zbp_how how, zbp_way *way_out, zbp_error *error)
{
    uint32_t face = 0;
    const int status = zbp_look(turn->held, turn->book, error);

    if (status != ZBP_OK)
        return status;
    *way_out = zbp_book_way(turn->book, turn->layout, how, &face);
    return *way_out == ZBP_WAY_REFUSED ? zbp_error_half_added(turn->held, face, error) : ZBP_OK;
}

/* Group number g of the call. */
static int start(zbp_turn *turn, size_t g, zbp_how how, zbp_sweeps *sweeps, zbp_run *run,
                 zbp_error *error)
{
    zbp_way way = ZBP_WAY_DONE;
    /* Only now: what ran for the groups before may have put hooks on this one's weights. */
    int status = find_way(&turn[g], how, &way, error);

    if (status != ZBP_OK || way == ZBP_WAY_DONE)
        return status;
    status = zbp_follow_caller(turn[g].held, error);
    if (status != ZBP_OK)
        return status;
    if (way != ZBP_WAY_DIRECT)
        return zbp_run_add(run, turn[g].held, error);
    status = zbp_sweep(sweeps, g, how, error);
    return status == ZBP_OK ? zbp_pass_directly(&turn[g], how, error) : status;
}

static void settle(zbp_turn *turn, zbp_how how, bool failed)
{
    switch (zbp_book_settle(turn->book, how, failed)) {
    case ZBP_FATE_KEEP:
        break;
    case ZBP_FATE_AGAIN:
        zbp_held_again(turn->held);
        break;
    case ZBP_FATE_RELEASE:
        zbp_held_release(turn->held); /* it reads the layout */
        zbp_layout_clear(turn->layout);
        zbp_book_forget_faces(turn->book);
        break;
    case ZBP_FATE_CLOSE:
        zbp_held_close(turn->held);
        zbp_layout_fini(turn->layout);
        zbp_book_close(turn->book);
        break;
    }
}

/* Part of the gradients may have been added: what the caller does to them next comes after that. */
static void join_what_has_run(zbp_turn *turn)
{
    zbp_error later = {0};
    const int status = zbp_join_streams(turn->held, &later);

    (void)status; /* the call raises what came first */
    zbp_error_clear(&later);
}

int zbp_pass_weights(zbp_turn *turn, size_t count, zbp_how how, zbp_error *error)
{
    bool is_retry = false;
    zbp_run *run = NULL;
    zbp_sweeps *sweeps = NULL;
    zbp_way way = ZBP_WAY_DONE;
    int status = ZBP_OK;

    for (size_t g = 0; g < count && status == ZBP_OK; g++) { /* refuse before anything is added */
        is_retry = is_retry || turn[g].book->has_failed;
        if (zbp_book_has_half(turn[g].book))
            status = find_way(&turn[g], how, &way, error);
    }
    if (status != ZBP_OK)
        return status;
    status = zbp_run_new(how, &run, error);
    if (status == ZBP_OK)
        status = zbp_sweeps_new(turn, count, &sweeps);
    for (size_t g = 0; g < count && status == ZBP_OK; g++)
        status = start(turn, g, how, sweeps, run, error);
    if (status == ZBP_OK)
        status = zbp_run_go(run, error);
    for (size_t g = 0; g < count; g++) {
        if (status != ZBP_OK)
            join_what_has_run(&turn[g]);
        settle(&turn[g], how, status != ZBP_OK);
    }
    zbp_sweeps_free(sweeps);
    zbp_run_free(run);
    if (status != ZBP_OK && is_retry)
        zbp_error_name_lost(error, turn, count);
    return status;
}
