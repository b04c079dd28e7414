/* What each structure of the core promises of itself, checked anew. The plan's is plan_check.c. */
#include "checks.h"

#include <string.h>

#include "core/base/zbpi_hash.h"

enum { ALL_ROLES = ZBP_ROLE_INPUT | ZBP_ROLE_WEIGHT | ZBP_ROLE_ROOT | ZBP_ROLE_EXCLUDED };

static int told(const char *reason, const char **reason_out)
{
    if (reason_out != NULL)
        *reason_out = reason;
    return reason == NULL ? ZBP_OK : ZBP_EINVAL;
}

int zbp_map_check(const zbp_map *map, const char **reason_out)
{
    const char *reason = NULL;
    size_t taken = 0;
    uint32_t value = 0;

    if ((map->capacity & (map->capacity - 1)) != 0)
        reason = "map: the capacity is not a power of two";
    else if ((map->slot == NULL) != (map->capacity == 0))
        reason = "map: slots and capacity disagree";
    else if (map->count > map->capacity / 8 * 5)
        reason = "map: more than 5/8 of the slots are taken";
    for (size_t i = 0; reason == NULL && i < map->capacity; i++) {
        if (map->slot[i].key == NULL)
            continue;
        taken++;
        if (taken > map->count)
            reason = "map: more slots are taken than count says";
        else if (!zbp_map_find(map, map->slot[i].key, &value) || value != map->slot[i].value)
            reason = "map: a key is not where a look-up finds it";
    }
    if (reason == NULL && taken != map->count)
        reason = "map: fewer slots are taken than count says";
    return told(reason, reason_out);
}

int zbp_graph_check(const zbp_graph *graph, const char **reason_out)
{
    const char *reason = NULL;

    if (graph->node_count > UINT32_MAX - 1 || graph->edge_count > UINT32_MAX - 1)
        reason = "graph: too many nodes or edges";
    else if (graph->node_count > graph->key_capacity || graph->node_count > graph->mark_capacity ||
             graph->edge_count > graph->edge_capacity)
        reason = "graph: a count is beyond its capacity";
    else if (graph->id_of.count != graph->node_count)
        reason = "graph: the map and the nodes differ in number";
    else
        (void)!zbp_map_check(&graph->id_of, &reason);
    for (uint32_t i = 0; reason == NULL && i < graph->node_count; i++) {
        uint32_t id = ZBP_NONE;

        if (!zbp_map_find(&graph->id_of, graph->key[i], &id) || id != i)
            reason = "graph: the map does not find a node under its key";
        else if ((graph->mark[i] & ~ALL_ROLES) != 0)
            reason = "graph: a mark has an unknown bit";
    }
    for (uint32_t e = 0; reason == NULL && e < graph->edge_count; e++)
        if (graph->edge[e].src >= graph->node_count || graph->edge[e].dst >= graph->node_count)
            reason = "graph: an edge ends at no node";
    return told(reason, reason_out);
}

static bool is_index(int32_t i, uint32_t count)
{
    return i >= -1 && i < (int32_t)count;
}

static bool face_is_legal(const zbp_layout *layout, const zbp_face *face)
{
    const bool has_path = (face->flag & ZBP_FACE_PATH) != 0;

    return is_index(face->weight, layout->weight_count) &&
           is_index(face->outside, layout->outside_count) &&
           (has_path ? face->weight >= 0 && face->outside >= 0
                     : (face->weight < 0) != (face->outside < 0));
}

static bool hop_is_legal(const zbp_layout *layout, const zbp_hop *hop)
{
    return hop->outside < layout->outside_count &&
           is_index(hop->to_outside, layout->outside_count) &&
           is_index(hop->to_weight, layout->weight_count) &&
           (hop->to_outside < 0) != (hop->to_weight < 0);
}

static const char *fault_in_layout(const zbp_layout *layout)
{
    uint32_t face = 0;

    for (uint32_t t = 0; t < layout->task_count; t++) {
        const zbp_task *task = &layout->task[t];

        if (task->face_begin != face || task->face_end < face ||
            task->face_end > layout->face_count)
            return "task: its faces do not follow those of the task before";
        if (task->kind > ZBP_TASK_ROOT)
            return "task.kind is none";
        for (; face < task->face_end; face++) {
            if (layout->face[face].task != t)
                return "face.task is another";
            if (!face_is_legal(layout, &layout->face[face]))
                return "face leads nowhere, or to two places without a path";
        }
    }
    if (face != layout->face_count)
        return "face_count: faces without a task";
    for (uint32_t h = 0; h < layout->hop_count; h++) {
        if (!hop_is_legal(layout, &layout->hop[h]))
            return "hop leads nowhere, or to two places";
        if (h > 0 && layout->hop[h].outside < layout->hop[h - 1].outside)
            return "hop: not in the order of the outside nodes";
    }
    return NULL;
}

int zbp_layout_check(const zbp_layout *layout, const char **reason_out)
{
    const char *reason = fault_in_layout(layout);

    return told(reason, reason_out);
}

static const char *fault_in_book(const zbp_book *book, const zbp_layout *layout)
{
    if (book->weight_count != layout->weight_count && book->weight_count != 0)
        return "weight_count is not the layout's";
    if (book->state > ZBP_BOOK_SPENT)
        return "state is none";
    for (uint32_t w = 0; w < book->weight_count; w++) {
        const zbp_book_weight *weight = &book->weight[w];

        if (weight->is_added && weight->has_arrived)
            return "weight: what was added still waits";
        if (weight->is_hooked && !weight->is_added && !weight->has_arrived)
            return "weight: its hooks saw a gradient that never arrived";
    }
    return NULL;
}

int zbp_book_check(const zbp_book *book, const zbp_layout *layout, const char **reason_out)
{
    const char *reason = fault_in_book(book, layout);

    return told(reason, reason_out);
}

/* Whether a look-up of the block in slot i ends there. */
static bool is_found(const zbp_blocks *blocks, size_t i)
{
    size_t at = zbpi_hash(blocks->slot[i].address) & (blocks->capacity - 1);

    while (blocks->slot[at].address != 0 && blocks->slot[at].address != blocks->slot[i].address)
        at = (at + 1) & (blocks->capacity - 1);
    return at == i;
}

int zbp_blocks_check(const zbp_blocks *blocks, const char **reason_out)
{
    const char *reason = NULL;
    size_t taken = 0;

    if ((blocks->capacity & (blocks->capacity - 1)) != 0)
        reason = "blocks: the capacity is not a power of two";
    else if ((blocks->slot == NULL) != (blocks->capacity == 0))
        reason = "blocks: slots and capacity disagree";
    else if (blocks->count > blocks->capacity / 8 * 5)
        reason = "blocks: more than 5/8 of the slots are taken";
    for (size_t i = 0; reason == NULL && i < blocks->capacity; i++) {
        if (blocks->slot[i].address == 0)
            continue;
        taken++;
        if (taken > blocks->count)
            reason = "blocks: more slots are taken than count says";
        else if (!is_found(blocks, i))
            reason = "blocks: a block is not where a look-up finds it";
    }
    if (reason == NULL && taken != blocks->count)
        reason = "blocks: fewer slots are taken than count says";
    return told(reason, reason_out);
}

/* Plays the log again: what it says must be what the marks and the counters say. */
static const char *fault_in_log(const zbp_record *record)
{
    uint64_t live = 0, time_ns = record->mark[0].time_ns;
    uint32_t m = 0;

    for (uint32_t i = 0; i <= record->event_count; i++) {
        for (; m < record->mark_count && record->mark[m].events == i; m++)
            if (record->mark[m].live != live)
                return "record: the log and a mark disagree about live bytes";
        if (i == record->event_count)
            break;
        const zbp_event *event = &record->event[i];
        if (event->time_ns < time_ns)
            return "record: time runs backwards";
        time_ns = event->time_ns;
        if (event->kind == ZBP_EVENT_ALLOC)
            live += event->block.bytes;
        else if (event->kind == ZBP_EVENT_FREE)
            live -= event->block.bytes;
        if (event->kind != ZBP_EVENT_FREE_OLDER && event->block.serial < record->first_serial)
            return "record: an older block counts as the recording's own";
    }
    if (m != record->mark_count)
        return "record: a mark lies behind the log";
    return live == record->live ? NULL : "record: the log and the counters disagree";
}

static const char *fault_in_record(const zbp_record *record)
{
    if (record->mark_count == 0)
        return "record: there is no mark 0";
    for (uint32_t m = 0; m < record->mark_count; m++) {
        const zbp_mark *mark = &record->mark[m];
        uint64_t next = m + 1 < record->mark_count ? mark[1].live : record->live;

        if (mark->live + mark->allocated - mark->freed != next)
            return "record: a span's bytes do not lead to the next mark";
        if (mark->peak < mark->live || mark->peak < next)
            return "record: a span's peak is lower than its ends";
    }
    return record->dropped == 0 && record->max_events != 0 ? fault_in_log(record) : NULL;
}

int zbp_record_check(const zbp_record *record, const char **reason_out)
{
    return told(fault_in_record(record), reason_out);
}

static const char *fault_of_serials(const zbp_tally *tally)
{
    const zbp_blocks *blocks = &tally->blocks;

    for (size_t i = 0; i < blocks->capacity; i++) {
        if (blocks->slot[i].address == 0)
            continue;
        if (blocks->slot[i].serial >= tally->next_serial)
            return "tally: a block has a serial that is still to come";
        for (size_t j = 0; j < i; j++)
            if (blocks->slot[j].address != 0 && blocks->slot[j].serial == blocks->slot[i].serial)
                return "tally: two blocks have the same serial";
    }
    return NULL;
}

static const char *fault_of_fed(const zbp_tally *tally, const zbp_record *record)
{
    const char *reason = NULL;
    uint64_t count = 0, live = 0;

    if (record->first_serial > tally->next_serial)
        return "tally: a record begins with a serial that is still to come";
    for (size_t i = 0; i < tally->blocks.capacity; i++) {
        const zbp_block *block = &tally->blocks.slot[i];

        if (block->address != 0 && block->serial >= record->first_serial) {
            count++;
            live += block->bytes;
        }
    }
    for (uint32_t m = 0; m < record->mark_count; m++)
        count += record->mark[m].frees - record->mark[m].allocations;
    if (live != record->live || count != 0)
        return "tally: what is live in a record is not what is in use since it began";
    return zbp_record_check(record, &reason) == ZBP_OK ? NULL : reason;
}

int zbp_tally_check(const zbp_tally *tally, const char **reason_out)
{
    const char *reason = NULL;

    if (tally->block_count != tally->blocks.count)
        reason = "tally: the count to be read without the lock is not the table's";
    else if (zbp_blocks_check(&tally->blocks, &reason) == ZBP_OK)
        reason = fault_of_serials(tally);
    for (const zbp_record *r = tally->fed; reason == NULL && r != NULL; r = r->next)
        reason = fault_of_fed(tally, r);
    return told(reason, reason_out);
}
