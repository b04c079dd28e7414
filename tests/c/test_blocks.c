#include "check.h"
#include "counting.h"
#include "model.h"
#include "core/base/zbpi_hash.h"
#include "instruments/core/zbp_blocks.h"

static zbp_block block(uint64_t address, uint64_t bytes, uint64_t serial)
{
    return (zbp_block){address, bytes, serial, 0};
}

/* Against an array indexed by address: blocks come and go in random order, as an allocator's do, and some
 * are replaced. */
static void model(void)
{
    enum { ADDRESSES = 3000 };
    static uint64_t serial_at[ADDRESSES]; /* + 1; 0: no block */
    static const uint64_t stride[] = {16, 64, 4096, 1 << 21};

    for (size_t s = 0; s < sizeof stride / sizeof stride[0]; s++) {
        uint64_t random = s + 1, used = 0;
        zbp_blocks blocks = {0};

        memset(serial_at, 0, sizeof serial_at);
        CHECK(!zbp_blocks_take(&blocks, 16, &(zbp_block){0}));
        for (uint32_t i = 0; i < 100000; i++) {
            const uint32_t k = model_below(&random, ADDRESSES);
            const uint64_t address = (k + 1) * stride[s], serial = serial_at[k] - 1;
            const bool was_there = serial_at[k] != 0;
            zbp_block got = {0};

            if (model_below(&random, 3) != 0 && (!was_there || i % 8 == 0)) {
                REQUIRE(zbp_blocks_add(&blocks, block(address, k, i), &got) == ZBP_OK);
                serial_at[k] = i + 1;
                used += !was_there;
            } else {
                REQUIRE(zbp_blocks_take(&blocks, address, &got) == was_there);
                serial_at[k] = 0;
                used -= was_there;
            }
            REQUIRE(got.address == (was_there ? address : 0) && blocks.count == used);
            REQUIRE(!was_there || (got.bytes == k && got.serial == serial));
        }
        CHECK(!zbp_blocks_take(&blocks, 0, &(zbp_block){0}));
        zbp_blocks_fini(&blocks);
        zbp_blocks_fini(&blocks);
        CHECK(count.live == 0);
    }
}

static void failed_growth_keeps_the_blocks(void)
{
    uint64_t i = 0;
    zbp_block got;
    zbp_blocks blocks = {0};

    CHECK(zbp_blocks_add(&blocks, block(16, 0, 0), &got) == ZBP_OK);
    count.fail_at = count.calls;
    for (i = 1; i < 1000; i++)
        if (zbp_blocks_add(&blocks, block((i + 1) * 16, i, i), &got) != ZBP_OK)
            break;
    CHECK(i > 100 && i < 1000 && blocks.count == i);
    CHECK(zbp_blocks_add(&blocks, block((i + 1) * 16, i, i), &got) == ZBP_ENOMEM);
    CHECK(zbp_blocks_add(&blocks, block(16, 5, 5), &got) == ZBP_OK); /* in place */
    for (uint64_t k = 0; k < i; k++)
        CHECK(zbp_blocks_take(&blocks, (k + 1) * 16, &got));
    count.fail_at = -1;
    zbp_blocks_fini(&blocks);
    CHECK(count.live == 0);
}

/* Whose place in the largest of tables is 3: the hash, backwards. */
static uint64_t address_of_place_3(void)
{
    uint64_t x = 3, inverse_1 = 1, inverse_2 = 1;

    for (int i = 0; i < 6; i++) { /* Newton's: each step doubles the bits that are right */
        inverse_1 *= 2 - UINT64_C(0x9E3779B97F4A7C15) * inverse_1;
        inverse_2 *= 2 - UINT64_C(0xD6E8FEB86659FD93) * inverse_2;
    }
    x ^= x >> 32;
    x *= inverse_2;
    x ^= x >> 29 ^ x >> 58;
    x *= inverse_1;
    x ^= x >> 32;
    return x;
}

/* As if it were so large that twice its size cannot be said. */
static void a_table_cannot_outgrow_size_t(void)
{
    zbp_block slot[4] = {{0}}, got = {7, 7, 7, 7};
    const uint64_t address = address_of_place_3();
    zbp_blocks blocks = {.slot = slot, .capacity = SIZE_MAX / sizeof *slot + 1};

    while ((blocks.capacity & (blocks.capacity - 1)) != 0) /* the next lower power of two */
        blocks.capacity &= blocks.capacity - 1;
    REQUIRE((zbpi_hash(address) & (blocks.capacity - 1)) == 3);
    blocks.count = blocks.capacity / 8 * 5;
    CHECK(zbp_blocks_add(&blocks, block(address, 1, 1), &got) == ZBP_ENOMEM);
    CHECK(got.address == 7 && slot[3].address == 0 && blocks.count == blocks.capacity / 8 * 5);
}

int main(void)
{
    check_sees_failure();
    RUN(model);
    RUN(failed_growth_keeps_the_blocks);
    RUN(a_table_cannot_outgrow_size_t);
    return check_end();
}
