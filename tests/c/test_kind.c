/* Which kind a split node gets, and why: the list in docs/architecture.md, row by row. */
#include "check.h"
#include "core/pass/zbp_kind.h"

static const zbp_sides LEFT = {true, false, true}, RIGHT = {false, true, true},
                       BOTH = {true, true, true}, NEITHER = {false, false, false},
                       LIGHT = {false, true, false};
static const zbp_policy MATRICES = {.defer = ZBP_DEFER_MATRICES, .checkpoint = ZBP_CHECKPOINT_KEEP},
                        ALL = {.defer = ZBP_DEFER_ALL, .checkpoint = ZBP_CHECKPOINT_KEEP},
                        NOTHING = {.defer = ZBP_DEFER_NOTHING, .checkpoint = ZBP_CHECKPOINT_KEEP},
                        IN_I = {.defer = ZBP_DEFER_ALL, .checkpoint = ZBP_CHECKPOINT_INPUT_PASS};

typedef struct row {
    uint8_t type, flag;
    zbp_sides sides;
    zbp_policy policy;
    uint8_t kind, why;
    bool is_excluded;
} row;

static void each_row_of_the_table(void)
{
    const row rows[] = {
        {ZBP_TYPE_PRODUCT, 0, LEFT, MATRICES, ZBP_TASK_PRODUCT, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_PRODUCT, 0, RIGHT, MATRICES, ZBP_TASK_PRODUCT, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_PRODUCT, 0, BOTH, MATRICES, ZBP_TASK_DEFERRED, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_PRODUCT, 0, NEITHER, MATRICES, ZBP_TASK_WHOLE, ZBP_WHY_LIGHT,
         false}, /* a bias alone */
        {ZBP_TYPE_PRODUCT, 0, NEITHER, ALL, ZBP_TASK_DEFERRED, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_PRODUCT, 0, LIGHT, MATRICES, ZBP_TASK_WHOLE, ZBP_WHY_LIGHT, false},
        {ZBP_TYPE_PRODUCT, 0, LIGHT, ALL, ZBP_TASK_PRODUCT, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_FACTORS, 0, LEFT, MATRICES, ZBP_TASK_DEFERRED, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_SEPARABLE, 0, NEITHER, MATRICES, ZBP_TASK_WHOLE, ZBP_WHY_LIGHT, false},
        {ZBP_TYPE_SEPARABLE, 0, NEITHER, ALL, ZBP_TASK_DEFERRED, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_UNKNOWN, 0, NEITHER, ALL, ZBP_TASK_WHOLE, ZBP_WHY_UNKNOWN, false},
        {ZBP_TYPE_DISAGREES, 0, NEITHER, ALL, ZBP_TASK_WHOLE, ZBP_WHY_DISAGREES, false},
        {ZBP_TYPE_FUNCTION, 0, NEITHER, ALL, ZBP_TASK_WHOLE, ZBP_WHY_FUNCTION, false},
        {ZBP_TYPE_PRODUCT, 0, LEFT, NOTHING, ZBP_TASK_WHOLE, ZBP_WHY_POLICY, false},
        {ZBP_TYPE_FUNCTION, 0, NEITHER, NOTHING, ZBP_TASK_WHOLE, ZBP_WHY_POLICY, false},
        {ZBP_TYPE_PRODUCT, ZBP_FACT_POST_HOOK, LEFT, ALL, ZBP_TASK_WHOLE, ZBP_WHY_POST_HOOK, false},
        {ZBP_TYPE_PRODUCT, ZBP_FACT_POST_HOOK, LEFT, NOTHING, ZBP_TASK_WHOLE, ZBP_WHY_POST_HOOK,
         false},
        {ZBP_TYPE_PRODUCT, ZBP_FACT_PACKED, LEFT, IN_I, ZBP_TASK_WHOLE, ZBP_WHY_PACKED, false},
        {ZBP_TYPE_PRODUCT, 0, LEFT, IN_I, ZBP_TASK_PRODUCT, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_PRODUCT, ZBP_FACT_PACKED, LEFT, ALL, ZBP_TASK_PRODUCT, ZBP_WHY_SEPARABLE, false},
        {ZBP_TYPE_PRODUCT, 0, LEFT, ALL, ZBP_TASK_WHOLE, ZBP_WHY_EXCLUDED, true},
        {ZBP_TYPE_FUNCTION, 0, NEITHER, ALL, ZBP_TASK_WHOLE, ZBP_WHY_EXCLUDED, true},
        {ZBP_TYPE_UNKNOWN, 0, NEITHER, ALL, ZBP_TASK_WHOLE, ZBP_WHY_EXCLUDED, true},
        {ZBP_TYPE_PRODUCT, 0, LIGHT, MATRICES, ZBP_TASK_WHOLE, ZBP_WHY_EXCLUDED, true},
        {ZBP_TYPE_PRODUCT, ZBP_FACT_PACKED, LEFT, IN_I, ZBP_TASK_WHOLE, ZBP_WHY_EXCLUDED, true},
        {ZBP_TYPE_PRODUCT, 0, LEFT, NOTHING, ZBP_TASK_WHOLE, ZBP_WHY_POLICY, true},
        {ZBP_TYPE_PRODUCT, ZBP_FACT_POST_HOOK, LEFT, ALL, ZBP_TASK_WHOLE, ZBP_WHY_POST_HOOK, true},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const zbp_fact fact = {.type = rows[i].type, .flag = rows[i].flag};
        uint8_t why = 99;
        const uint8_t kind =
            zbp_kind_of(&fact, rows[i].sides, rows[i].policy, rows[i].is_excluded, &why);

        if (kind != rows[i].kind || why != rows[i].why)
            fprintf(stderr, "row %zu: kind %d, why %d\n", i, kind, why);
        CHECK(kind == rows[i].kind && why == rows[i].why);
    }
}

static void only_a_functions_backward_hands_work_over(void)
{
    const zbp_fact function = {.type = ZBP_TYPE_FUNCTION};
    const zbp_fact hooked = {.type = ZBP_TYPE_FUNCTION, .flag = ZBP_FACT_POST_HOOK};
    const zbp_fact packed = {.type = ZBP_TYPE_FUNCTION, .flag = ZBP_FACT_PACKED};
    const zbp_fact product = {.type = ZBP_TYPE_PRODUCT};

    CHECK(zbp_takes_work(&function, MATRICES, false) == ZBP_DEFER_MATRICES);
    CHECK(zbp_takes_work(&function, ALL, false) == ZBP_DEFER_ALL);
    CHECK(zbp_takes_work(&function, NOTHING, false) == ZBP_DEFER_NOTHING);
    CHECK(zbp_takes_work(&function, IN_I, false) == ZBP_DEFER_ALL);
    CHECK(zbp_takes_work(&hooked, ALL, false) == ZBP_DEFER_NOTHING);
    CHECK(zbp_takes_work(&packed, IN_I, false) == ZBP_DEFER_NOTHING);
    CHECK(zbp_takes_work(&packed, ALL, false) == ZBP_DEFER_ALL);
    CHECK(zbp_takes_work(&product, ALL, false) == ZBP_DEFER_NOTHING);
    CHECK(zbp_takes_work(&function, ALL, true) == ZBP_DEFER_NOTHING);
}

int main(void)
{
    check_sees_failure();
    RUN(each_row_of_the_table);
    RUN(only_a_functions_backward_hands_work_over);
    return check_end();
}
