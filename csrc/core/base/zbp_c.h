/* zbp_c.h - what every header of C needs: what lies between ZBP_BEGIN_C and ZBP_END_C is C, also to
 * the shim's C++; and the compiler says so where a result that is ZBP_MUST_USE is not used. */
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
