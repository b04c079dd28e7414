/* zbp_c.h - what every header of C needs: what lies between ZBP_BEGIN_C and ZBP_END_C is C, also to
 * the shim's C++; the compiler says so where a result that is ZBP_MUST_USE is not used; and what
 * functions return.
 *
 * A status: 0 is success, negative is an error. "Absent" is a value, never an error. After an error
 * the object is what it was before the call, unless the function's own contract says otherwise.
 * What an argument must be is the caller's to see to: the core checks nothing of it.
 */
#pragma once

#ifdef __cplusplus
#define ZBP_BEGIN_C extern "C" {
#define ZBP_END_C }
#else
#define ZBP_BEGIN_C
#define ZBP_END_C
#endif

#if defined(__GNUC__) || defined(__clang__)
#define ZBP_MUST_USE __attribute__((warn_unused_result))
#else
#define ZBP_MUST_USE
#endif

enum {
    ZBP_OK = 0,
    ZBP_ENOMEM = -1, /* the allocator returned NULL, or there is more than can be counted */
    /* the shim's: something was thrown and is kept in a zbp_error; never from the core */
    ZBP_ETORCH = -2
};
