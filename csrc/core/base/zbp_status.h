/* zbp_status.h - what a zbp function returns.
 *
 * 0 is success, negative is an error. "Absent" is a value, never an error. A status must be used:
 * the compiler says so where it can. After an error the object is what it was before the call,
 * unless the function's own contract says otherwise. What an argument must be is the caller's to
 * see to: the core checks nothing of it.
 */
#pragma once

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

enum {
    ZBP_OK = 0,
    ZBP_ENOMEM = -1, /* the allocator returned NULL, or there is more than can be counted */
    /* the shim's: something was thrown and is kept in a zbp_error; never from the core */
    ZBP_ETORCH = -2
};

ZBP_END_C
