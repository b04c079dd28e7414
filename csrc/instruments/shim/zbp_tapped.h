/* zbp_tapped.h - what the tap (zbp_tap.h) has seen, for who knows no Python. */
#ifndef ZBP_TAPPED_H
#define ZBP_TAPPED_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "instruments/core/zbp_blocks.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The number of the next block: those that are handed out from now on have it or a larger one. */
uint64_t zbp_tap_serial(void);

/* The blocks in use with serials from `since` on: an array that is the caller's to free() (NULL for
 * none), in that order, and their count. Error: ZBP_ENOMEM. Any thread. O(n log n) for n blocks
 * in use. */
ZBP_MUST_USE int zbp_tap_blocks(uint64_t since, zbp_block **blocks_out, size_t *count_out);

#ifdef __cplusplus
}
#endif

#endif
