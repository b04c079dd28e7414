/* check.h - the test programs' frame: checks, and a count of cases.
 *
 * A program's main calls RUN once per case and returns check_end(). A failed CHECK says where and
 * what, fails the case and goes on; a failed REQUIRE ends the program.
 */
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check_failures, check_passed, check_failed;
static bool check_quiet; /* while a case looks at a check that must fail */

#define CHECK(condition) ((condition) ? (void)0 : check_fail(__FILE__, __LINE__, #condition))
#define REQUIRE(condition)                                                                         \
    ((condition) ? (void)0 : (check_fail(__FILE__, __LINE__, #condition), exit(1)))
#define RUN(test) check_run(#test, test)

static inline void check_fail(const char *file, int line, const char *what)
{
    check_failures++;
    if (!check_quiet)
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

static inline void check_run(const char *name, void (*test)(void))
{
    check_failures = 0;
    test();
    if (check_failures == 0) {
        check_passed++;
    } else {
        check_failed++;
        fprintf(stderr, "FAILED %s\n", name);
    }
}

/* The detector first catches a planted fault. */
static inline void check_sees_failure(void)
{
    check_quiet = true;
    CHECK(1 + 1 == 3);
    check_quiet = false;
    if (check_failures != 1) {
        fprintf(stderr, "CHECK does not see a failure\n");
        exit(1);
    }
    check_failures = 0;
}

/* Prints the line that run.sh adds up. */
static inline int check_end(void)
{
    printf("%d passed, %d failed\n", check_passed, check_failed);
    return check_failed == 0 ? 0 : 1;
}
