/* Products of several groups for the same weight, in one sweep over its gradient. See Note [Sweeps] in zbp_sweep.h. */

#include "pass/zbp_sweep.h"

#include <stdlib.h>

#include "core/base/zbp_map.h"

/* A weight of a turn's group. */
typedef struct place {
    uint32_t turn, weight;
    uint32_t next;    /* the same weight in the next group that has it; NOWHERE */
    uint32_t refused; /* so often in a row it could not be swept */
    uint32_t
        last; /* while places are linked, of the weight with this place's number: its last place */
} place;

static const uint32_t NOWHERE = UINT32_MAX;
/* Once is a gradient that was not there yet; twice, it is no product: looking ahead again and again would cost. */
static const uint32_t OFTEN = 2;

/* A turn when it was looked at last. */
typedef struct view {
    uint32_t first;      /* the place of its first weight */
    uint32_t looked_for; /* for the sweeps of which turn, plus one */
    uint8_t way;         /* a zbp_way */
} view;

struct zbp_sweeps {
    const zbp_turn *turn;  /* borrowed */
    zbp_product *together; /* scratch: one per turn */
    place *place;
    view *view; /* one per turn, and one behind the last */
};

void zbp_sweeps_free(zbp_sweeps *sweeps)
{
    free(sweeps);
}

/* Links each place with the one before it that is the same weight. *any_out: there is such a pair. */
static int link_places(zbp_sweeps *sweeps, uint32_t count, bool *any_out)
{
    zbp_map weights = {0};
    int status = ZBP_OK;

    *any_out = false;
    for (uint32_t p = 0; p < count && status == ZBP_OK; p++) {
        const place *here = &sweeps->place[p];
        const void *key = zbp_weight_key(sweeps->turn[here->turn].held, here->weight);
        bool is_new = true;
        uint32_t number = 0;

        status = zbp_map_add(&weights, key, weights.count, &number, &is_new);
        if (!is_new) {
            sweeps->place[sweeps->place[number].last].next = p;
            *any_out = true;
        }
        sweeps->place[number].last = p;
    }
    zbp_map_fini(&weights);
    return status;
}

/* One block of all; NULL without memory. */
static zbp_sweeps *allocate(const zbp_turn *turn, size_t turns, size_t places)
{
    const size_t products = turns * sizeof(zbp_product), views = (turns + 1) * sizeof(view);
    zbp_sweeps *sweeps = malloc(sizeof *sweeps + products + places * sizeof(place) + views);

    if (sweeps != NULL) {
        sweeps->turn = turn;
        sweeps->together = (zbp_product *)(sweeps + 1);
        sweeps->place = (place *)(sweeps->together + turns);
        sweeps->view = (view *)(sweeps->place + places);
    }
    return sweeps;
}

static uint32_t count_weights(const zbp_turn *turn, size_t count)
{
    uint32_t weights = 0;

    for (size_t t = 0; t < count; t++)
        weights += turn[t].book->weight_count;
    return weights;
}

int zbp_sweeps_new(const zbp_turn *turn, size_t count, zbp_sweeps **sweeps_out)
{
    const uint32_t places = count_weights(turn, count);
    zbp_sweeps *sweeps;
    uint32_t p = 0;
    bool any = false;
    int status;

    *sweeps_out = NULL;
    if (count < 2)
        return ZBP_OK;
    sweeps = allocate(turn, count, places);
    if (sweeps == NULL)
        return ZBP_ENOMEM;
    for (uint32_t t = 0; t < count; t++) {
        sweeps->view[t] = (view){.first = p};
        for (uint32_t w = 0; w < turn[t].book->weight_count; w++)
            sweeps->place[p++] = (place){.turn = t, .weight = w, .next = NOWHERE};
    }
    sweeps->view[count] = (view){.first = p};
    status = link_places(sweeps, places, &any);
    if (status == ZBP_OK && any)
        *sweeps_out = sweeps;
    else
        zbp_sweeps_free(sweeps);
    return status;
}

/* What would become of turn t now; the books of those that would be added directly count what they owe. */
static int look_ahead(zbp_sweeps *sweeps, uint32_t t, uint32_t head, zbp_how how, zbp_error *error)
{
    const zbp_turn *turn = &sweeps->turn[t];
    uint32_t face = 0;
    int status = ZBP_OK;

    if (sweeps->view[t].looked_for == head + 1)
        return ZBP_OK;
    if (t != head) /* it was looked at just now */
        status = zbp_look(turn->held, turn->book, error);
    if (status != ZBP_OK)
        return status;
    sweeps->view[t].way =
        t == head ? ZBP_WAY_DIRECT : (uint8_t)zbp_book_way(turn->book, turn->layout, how, &face);
    if (sweeps->view[t].way == ZBP_WAY_DIRECT)
        zbp_book_count_owed(turn->book, turn->layout);
    sweeps->view[t].looked_for = head + 1;
    return ZBP_OK;
}

/* The products that are next for the weight at place p, up to a group whose part of its gradient is none. */
static int gather(zbp_sweeps *sweeps, uint32_t p, zbp_how how, uint32_t *count_out,
                  zbp_error *error)
{
    const uint32_t head = sweeps->place[p].turn;
    uint32_t count = 0;

    for (; p != NOWHERE; p = sweeps->place[p].next) {
        const uint32_t t = sweeps->place[p].turn, w = sweeps->place[p].weight;
        const zbp_turn *turn = &sweeps->turn[t];
        uint32_t face;
        const int status = look_ahead(sweeps, t, head, how, error);

        if (status != ZBP_OK)
            return status;
        if (sweeps->view[t].way == ZBP_WAY_REFUSED)
            break;
        /* The engine adds when all others have. */
        if (sweeps->view[t].way != ZBP_WAY_DIRECT)
            continue;
        face = zbp_book_sole_product(turn->book, turn->layout, w);
        if (face == ZBP_NO_FACE && (t == head || zbp_book_is_owed(turn->book, w)))
            break;
        if (face != ZBP_NO_FACE)
            sweeps->together[count++] = (zbp_product){.turn = turn, .face = face};
    }
    *count_out = count;
    return ZBP_OK;
}

int zbp_sweep(zbp_sweeps *sweeps, size_t turn, zbp_how how, zbp_error *error)
{
    int status = ZBP_OK;

    if (sweeps == NULL)
        return ZBP_OK;
    for (uint32_t p = sweeps->view[turn].first;
         p < sweeps->view[turn + 1].first && status == ZBP_OK; p++) {
        const place here = sweeps->place[p];
        uint32_t count = 0, added = 0;

        if (here.next == NOWHERE || here.refused == OFTEN)
            continue;
        status = gather(sweeps, p, how, &count, error);
        if (status == ZBP_OK && count > 1)
            status = zbp_add_products(sweeps->together, count, how, &added, error);
        for (uint32_t i = 0; i < added; i++)
            zbp_book_delivered(sweeps->together[i].turn->book, sweeps->together[i].face);
        if (count > 0 && added == 0)
            sweeps->place[here.next].refused = here.refused + 1;
    }
    return status;
}
