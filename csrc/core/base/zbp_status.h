/* zbp_status.h - what a zbp function returns.
 *
 * 0 is success, negative is an error. "Absent" is a value, never an error. A status must be used:
 * the compiler says so where it can. After an error the object is what it was before the call,
 * unless the function's own contract says otherwise.
 */
#pragma once

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

enum {
    ZBP_OK = 0,
    ZBP_ENOMEM = -1,    /* the allocator returned NULL */
    ZBP_EINVAL = -2,    /* an argument breaks the function's contract, or a check found a fault */
    ZBP_EOVERFLOW = -3, /* a count or a size does not fit its type */
    /* the shim's: something was thrown and is kept in a zbp_error; never from the core */
    ZBP_ETORCH = -4
};

/* The name of a status, "ZBP_EINVAL" for ZBP_EINVAL, "unknown status" for anything else.
 * Returns a static string. Any thread. */
const char *zbp_status_name(int status);

ZBP_END_C
