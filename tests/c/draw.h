/* draw.h - layouts from a line of text: a task per capital letter, with its faces behind it.
 *
 *   P, D, W, R   a product, a deferred node, a whole one, a root
 *   0 to 9       a face that leads to this weight
 *   a to z       a face that leads to this outside node; a:1, by a path to weight 1
 *
 * Tasks are drawn in the order in which they run.
 */
#pragma once

#include "check.h"
#include "core/pass/zbp_layout.h"

static inline void draw(zbp_layout *layout, uint32_t weights, uint32_t outsides, const char *tasks)
{
    uint64_t sequence_nr = 100;

    *layout = (zbp_layout){.weight_count = weights, .outside_count = outsides};
    for (const char *c = tasks; *c != '\0'; c++) {
        static const char kinds[] = "PDWR";
        const char *kind = strchr(kinds, *c);
        zbp_face face = {.slot = layout->face_count, .weight = -1, .outside = -1};

        if (*c == ' ')
            continue;
        if (kind != NULL) {
            REQUIRE(zbp_layout_add_task(layout, (uint8_t)(kind - kinds), sequence_nr--) == ZBP_OK);
            continue;
        }
        if (*c >= 'a')
            face.outside = *c - 'a';
        else
            face.weight = *c - '0';
        if (c[1] == ':') {
            face.weight = c[2] - '0';
            c += 2;
        }
        REQUIRE(zbp_layout_add_face(layout, face) == ZBP_OK);
    }
}
