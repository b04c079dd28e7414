#include "check.h"
#include "core/base/zbpi_alloc.h"

static void libc_is_the_default(void)
{
    zbp_alloc zeroed = {0};
    uint32_t capacity = 0;
    char *p = zbpi_resize(NULL, NULL, 0, 3);

    REQUIRE(p != NULL);
    memcpy(p, "ab", 3);
    p = zbpi_resize(&zeroed, p, 3, 5000);
    REQUIRE(p != NULL && strcmp(p, "ab") == 0);
    zbpi_free(NULL, p, 5000);
    zbpi_free(NULL, NULL, 0);
    p = zbpi_grow(NULL, NULL, &capacity, 8);
    CHECK(p != NULL && capacity == 64);
    p = zbpi_grow(NULL, p, &capacity, 8);
    CHECK(p != NULL && capacity == 128);
    zbpi_free(NULL, p, (size_t)capacity * 8);
}

/* Remembers what was asked for, gives nothing. */
static void *refuse(void *ctx, void *p, size_t old_size, size_t new_size)
{
    (void)p;
    (void)old_size;
    *(size_t *)ctx = new_size;
    return NULL;
}

static void growth_stops_at_the_largest_count(void)
{
    size_t asked = 0;
    zbp_alloc alloc = {refuse, &asked};
    uint32_t capacity = UINT32_MAX / 2 + 1;

    CHECK(zbpi_grow(&alloc, NULL, &capacity, 1) == NULL);
    CHECK(asked == UINT32_MAX && capacity == UINT32_MAX / 2 + 1);
    asked = 0;
    CHECK(zbpi_grow(&alloc, NULL, &capacity, SIZE_MAX / 1000) == NULL && asked == 0);
}

int main(void)
{
    check_sees_failure();
    RUN(libc_is_the_default);
    RUN(growth_stops_at_the_largest_count);
    return check_end();
}
