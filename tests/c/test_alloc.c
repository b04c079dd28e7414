/* The helpers of the core's memory. */
#include "check.h"
#include "core/base/zbpi_alloc.h"
#include "counting.h"

static void counting_sees_a_leak(void)
{
    char *p = zbpi_resize(NULL, 3);

    REQUIRE(p != NULL && count.live == 1 && count.bytes == 3);
    memcpy(p, "ab", 3);
    p = zbpi_resize(p, 5000);
    CHECK(p != NULL && strcmp(p, "ab") == 0 && count.live == 1 && count.peak == 5003);
    zbpi_free(p);
    zbpi_free(NULL);
    CHECK(count.live == 0 && count.bytes == 0);
}

static void growth_doubles_up_to_the_largest_count(void)
{
    uint32_t capacity = 0;
    char *p = zbpi_room(NULL, 0, &capacity, 8);

    REQUIRE(p != NULL && capacity == 4);
    CHECK(zbpi_room(p, 3, &capacity, 8) == p && capacity == 4);
    p = zbpi_room(p, 4, &capacity, 8);
    CHECK(p != NULL && capacity == 8);
    zbpi_free(p);
    counting_begin(0);
    capacity = UINT32_MAX / 4 + 1;
    CHECK(zbpi_room(NULL, capacity, &capacity, 1) == NULL && count.calls == 1);
    CHECK(zbpi_room(NULL, capacity, &capacity, SIZE_MAX / 1000) == NULL && count.calls == 1);
    capacity *= 2;
    CHECK(zbpi_room(NULL, INT32_MAX, &capacity, 1) == NULL && capacity == UINT32_MAX / 2 + 1);
    CHECK(zbpi_room(NULL, capacity, &capacity, 1) == NULL && count.calls == 1);
}

int main(void)
{
    check_sees_failure();
    RUN(counting_sees_a_leak);
    RUN(growth_doubles_up_to_the_largest_count);
    return check_end();
}
