/* zbpi_lists.h - many lists in two arrays, by counting. Private: not for the shim.
 *
 * begin has n + 1 places: list i is item[begin[i]] to item[begin[i + 1] - 1]. Clear, count the
 * items of each list i into begin[i], end the lists, then place the items in descending order at
 * item[--begin[i]]: they come out ascending, and begin is where each list begins.
 */
#pragma once

#include <stdint.h>
#include <string.h>

static inline void zbpi_lists_clear(uint32_t *begin, uint32_t n)
{
    memset(begin, 0, ((size_t)n + 1) * sizeof *begin);
}

static inline void zbpi_lists_end(uint32_t *begin, uint32_t n)
{
    for (uint32_t i = 1; i <= n; i++)
        begin[i] += begin[i - 1];
}
