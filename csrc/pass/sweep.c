/* Products of several groups for the same weight, in one sweep over its gradient. See Note [Sweeps] in zbp_sweep.h. */

#include "pass/zbp_sweep.h"

#include <stdlib.h>

#include "core/base/zbp_map.h"

/* A weight of a turn's group. */
typedef struct place {
    uint32_t turn, weight;
    uint32_t next;    /* the same weight in the next group that has it; NOWHERE */
    uint32_t refused; /* so often in a row it could not be swept */
} place;

static const uint32_t NOWHERE = UINT32_MAX;
/* Once is a gradient that was not there yet; twice, it is no product: looking ahead again and again would cost. */
static const uint32_t OFTEN = 2;

struct zbp_sweeps {
    const zbp_turn *turn; /* borrowed */
    place *place;
    uint32_t *first;       /* per turn: the place of its first weight; and the end */
    uint32_t *looked_for;  /* per turn: for the sweeps of which turn it was looked at, plus one */
    uint8_t *way;          /* per turn: a zbp_way, as it was then */
    zbp_product *together; /* scratch: one per turn */
};

void zbp_sweeps_free(zbp_sweeps *sweeps)
{
    if (sweeps == NULL)
        return;
    free(sweeps->place);
    free(sweeps->first);
    free(sweeps->looked_for);
    free(sweeps->way);
    free(sweeps->together);
    free(sweeps);
}

/* Links each place with the one before it that is the same weight. *any_out: there is such a pair. */
static int link_places(zbp_sweeps *sweeps, uint32_t count, bool *any_out)
{
    uint32_t *last = calloc((size_t)count + 1, sizeof *last); /* per weight */
    zbp_map weights = {0};
    int status = last == NULL ? ZBP_ENOMEM : ZBP_OK;

    *any_out = false;
    for (uint32_t p = 0; p < count && status == ZBP_OK; p++) {
        place *here = &sweeps->place[p];
        const void *key = zbp_weight_key(sweeps->turn[here->turn].held, here->weight);
        bool is_new = false;
        uint32_t number = 0;

        status = zbp_map_add(&weights, key, weights.count, &number, &is_new);
        if (status != ZBP_OK)
            break;
        if (!is_new)
            sweeps->place[last[number]].next = p;
        *any_out = *any_out || !is_new;
        last[number] = p;
    }
    zbp_map_fini(&weights);
    free(last);
    return status;
}

static uint32_t count_weights(const zbp_turn *turn, size_t count)
{
    uint32_t weights = 0;

    for (size_t t = 0; t < count; t++)
        weights += turn[t].book->weight_count;
    return weights;
}

static int allocate(zbp_sweeps *sweeps, size_t turns, uint32_t places)
{
    sweeps->place = malloc(((size_t)places + 1) * sizeof *sweeps->place);
    sweeps->first = malloc((turns + 1) * sizeof *sweeps->first);
    sweeps->looked_for = calloc(turns, sizeof *sweeps->looked_for);
    sweeps->way = malloc(turns);
    sweeps->together = malloc(turns * sizeof *sweeps->together);
    return sweeps->place != NULL && sweeps->first != NULL && sweeps->looked_for != NULL &&
                   sweeps->way != NULL && sweeps->together != NULL
               ? ZBP_OK
               : ZBP_ENOMEM;
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
    sweeps = calloc(1, sizeof *sweeps);
    if (sweeps == NULL)
        return ZBP_ENOMEM;
    sweeps->turn = turn;
    status = allocate(sweeps, count, places);
    for (uint32_t t = 0; status == ZBP_OK && t < count; t++) {
        sweeps->first[t] = p;
        for (uint32_t w = 0; w < turn[t].book->weight_count; w++)
            sweeps->place[p++] = (place){.turn = t, .weight = w, .next = NOWHERE};
        sweeps->first[t + 1] = p;
    }
    if (status == ZBP_OK)
        status = link_places(sweeps, places, &any);
    if (status != ZBP_OK || !any) {
        zbp_sweeps_free(sweeps);
        return status;
    }
    *sweeps_out = sweeps;
    return ZBP_OK;
}

/* What would become of turn t now; the books of those that would be added directly count what they owe. */
static int look_ahead(zbp_sweeps *sweeps, uint32_t t, uint32_t head, zbp_how how, zbp_error *error)
{
    const zbp_turn *turn = &sweeps->turn[t];
    uint32_t face = 0;
    int status = ZBP_OK;

    if (sweeps->looked_for[t] == head + 1)
        return ZBP_OK;
    if (t != head) /* it was looked at just now */
        status = zbp_look(turn->held, turn->book, error);
    if (status != ZBP_OK)
        return status;
    sweeps->way[t] =
        t == head ? ZBP_WAY_DIRECT : (uint8_t)zbp_book_way(turn->book, turn->layout, how, &face);
    if (sweeps->way[t] == ZBP_WAY_DIRECT)
        zbp_book_count_owed(turn->book, turn->layout);
    sweeps->looked_for[t] = head + 1;
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
        if (sweeps->way[t] == ZBP_WAY_REFUSED)
            break;
        /* The engine adds when all others have. */
        if (sweeps->way[t] != ZBP_WAY_DIRECT)
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
    for (uint32_t p = sweeps->first[turn]; p < sweeps->first[turn + 1] && status == ZBP_OK; p++) {
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
