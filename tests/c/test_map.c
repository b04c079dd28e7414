#include "check.h"
#include "counting.h"
#include "model.h"
#include "core/base/zbp_map.h"

/* Against an array indexed by key: 200,000 random additions and look-ups. */
static void model(void)
{
    enum { KEYS = 20000 };
    static uint32_t expected[KEYS]; /* value + 1, 0 for absent */
    uint64_t random = 1;
    uint32_t added = 0;
    zbp_map map = {0};

    memset(expected, 0, sizeof expected);
    for (uint32_t i = 0; i < 200000; i++) {
        uint32_t k = model_below(&random, KEYS), value = 7;
        const void *key = (const void *)((uintptr_t)(k + 1) * 64);
        bool there = zbp_map_find(&map, key, &value);

        REQUIRE(there == (expected[k] != 0) && value == (there ? expected[k] - 1 : 7));
        if (model_below(&random, 4) != 0)
            continue;
        value = i;
        REQUIRE(zbp_map_add(&map, key, &value) == ZBP_OK);
        if (!there)
            expected[k] = i + 1;
        REQUIRE(value == expected[k] - 1);
        REQUIRE(map.count == (added += !there) && zbp_map_find(&map, key, NULL));
    }
    zbp_map_fini(&map);
    zbp_map_fini(&map);
    CHECK(count.live == 0);
}

/* Keys that differ in high bits alone, or by large powers of two, must not crowd together. */
static void strides(void)
{
    static const uintptr_t stride[] = {1, 8, 16, 48, 64, 4096, 1 << 16, 1 << 20, 1 << 24};

    for (size_t s = 0; s < sizeof stride / sizeof stride[0]; s++) {
        zbp_map map = {0};
        size_t longest = 0, run = 0;

        for (uint32_t i = 1; i <= 10000; i++)
            REQUIRE(zbp_map_add(&map, (const void *)(i * stride[s]), NULL) == ZBP_OK);
        for (size_t i = 0; i < map.capacity; i++) {
            run = map.slot[i].key == NULL ? 0 : run + 1;
            longest = run > longest ? run : longest;
        }
        CHECK(longest < 200);
        zbp_map_fini(&map);
    }
}

static void failed_growth_keeps_the_data(void)
{
    uint32_t i = 0, value = 0, before, other;
    zbp_map map = {0};

    CHECK(zbp_map_add(&map, model_key(i), &i) == ZBP_OK);
    count.fail_at = count.calls;
    for (; i < 1000; i++) {
        other = i;
        if (zbp_map_add(&map, model_key(i), &other) != ZBP_OK)
            break;
    }
    before = map.count;
    CHECK(i > 100 && i < 1000 && before == i);
    other = 9;
    CHECK(zbp_map_add(&map, model_key(i), &other) == ZBP_ENOMEM && other == 9);
    CHECK(map.count == before && !zbp_map_find(&map, model_key(i), NULL));
    for (uint32_t k = 0; k < i; k++) {
        other = k + 1;
        CHECK(zbp_map_add(&map, model_key(k), &other) == ZBP_OK && other == k &&
              zbp_map_find(&map, model_key(k), &value) && value == k);
    }
    count.fail_at = -1;
    CHECK(zbp_map_add(&map, model_key(i), &i) == ZBP_OK && zbp_map_find(&map, model_key(i), NULL));
    zbp_map_fini(&map);
    CHECK(count.live == 0);
}

static void overflow(void)
{
    zbp_map map = {0};
    uint32_t honest, value = 7;

    CHECK(zbp_map_add(&map, model_key(0), NULL) == ZBP_OK);
    honest = map.count;
    map.count = UINT32_MAX;
    CHECK(zbp_map_add(&map, model_key(1), NULL) == ZBP_ENOMEM);
    CHECK(zbp_map_add(&map, model_key(0), NULL) == ZBP_OK);
    CHECK(zbp_map_find(&map, model_key(0), &value) && value == 0);
    map.count = honest;
    zbp_map_fini(&map);
}

int main(void)
{
    check_sees_failure();
    RUN(model);
    RUN(strides);
    RUN(failed_growth_keeps_the_data);
    RUN(overflow);
    return check_end();
}
