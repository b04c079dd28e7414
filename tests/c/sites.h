/* sites.h - included before every file of the core and the passes by `make allocations`: each place that asks for memory
 * tells the file $ZBP_SITES when it got none. tests/c/sites.py compares them with those in the source. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "core/base/zbpi_alloc.h"
#include "core/base/zbp_status.h"

static inline void site_failed(const char *file, int line)
{
    const char *name = getenv("ZBP_SITES");
    FILE *out = name == NULL ? NULL : fopen(name, "a");

    if (out != NULL) {
        fprintf(out, "%s:%d\n", file, line);
        fclose(out);
    }
}

static inline void *site_got(const char *file, int line, void *got)
{
    if (got == NULL)
        site_failed(file, line);
    return got;
}

static inline int site_status(const char *file, int line, int status)
{
    if (status == ZBP_ENOMEM)
        site_failed(file, line);
    return status;
}

#define zbpi_resize(...) site_got(__FILE__, __LINE__, zbpi_resize(__VA_ARGS__))
#define zbpi_grow(...) site_got(__FILE__, __LINE__, zbpi_grow(__VA_ARGS__))
#define zbpi_block_new(...) site_status(__FILE__, __LINE__, zbpi_block_new(__VA_ARGS__))
#define malloc(...) site_got(__FILE__, __LINE__, malloc(__VA_ARGS__))
