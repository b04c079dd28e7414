/* In a file of their own, so that the linker can put others in their place. */
#include <stdlib.h>

#include "core/base/zbpi_alloc.h"

void *zbpi_resize(void *p, size_t size)
{
    return realloc(p, size > 0 ? size : 1);
}

void zbpi_free(void *p)
{
    free(p);
}
