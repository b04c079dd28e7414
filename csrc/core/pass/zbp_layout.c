#include "core/pass/zbp_layout.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

void zbp_layout_fini(zbp_layout *layout)
{
    zbpi_free(layout->task);
    zbpi_free(layout->face);
    zbpi_free(layout->hop);
    memset(layout, 0, sizeof *layout);
}

int zbp_layout_add_task(zbp_layout *layout, uint8_t kind, uint64_t sequence_nr)
{
    zbp_task *room =
        zbpi_room(layout->task, layout->task_count, &layout->task_capacity, sizeof *room);

    if (room == NULL)
        return ZBP_ENOMEM;
    layout->task = room;
    layout->task[layout->task_count++] = (zbp_task){
        .face_begin = layout->face_count,
        .face_end = layout->face_count,
        .sequence_nr = sequence_nr,
        .kind = kind,
    };
    return ZBP_OK;
}

int zbp_layout_add_face(zbp_layout *layout, zbp_face face)
{
    zbp_face *room =
        zbpi_room(layout->face, layout->face_count, &layout->face_capacity, sizeof *room);

    if (room == NULL)
        return ZBP_ENOMEM;
    layout->face = room;
    face.task = layout->task_count - 1;
    layout->face[layout->face_count++] = face;
    layout->task[face.task].face_end = layout->face_count;
    return ZBP_OK;
}

int zbp_layout_add_hop(zbp_layout *layout, zbp_hop hop)
{
    zbp_hop *room = zbpi_room(layout->hop, layout->hop_count, &layout->hop_capacity, sizeof *room);

    if (room == NULL)
        return ZBP_ENOMEM;
    layout->hop = room;
    layout->hop[layout->hop_count++] = hop;
    return ZBP_OK;
}

int32_t zbp_layout_face_at(const zbp_layout *layout, uint32_t task, uint32_t slot)
{
    const zbp_task *t = &layout->task[task];

    for (uint32_t f = t->face_begin; f < t->face_end; f++) {
        if (layout->face[f].slot == slot)
            return (int32_t)(f - t->face_begin);
    }
    return -1;
}

bool zbp_layout_has_path(const zbp_face *face)
{
    return face->weight >= 0 && face->outside >= 0;
}

void zbp_layout_give_up_path(zbp_layout *layout, uint32_t face)
{
    zbp_face *f = &layout->face[face];

    if (zbp_layout_has_path(f)) {
        f->weight = -1;
        f->is_viewed = f->is_transposed = false;
    }
}
