/* zbpi_hash.h - the hash of the core's tables of addresses (internal). */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Addresses differ in few bits and share their low ones (allocators hand out multiples of 16 to
 * 4096): mixes all into all (a 64-bit finaliser of the multiply-and-shift kind), so that the low
 * bits alone can choose the slot. */
static inline size_t zbpi_hash(uint64_t address)
{
    uint64_t x = address;

    x ^= x >> 32;
    x *= UINT64_C(0x9E3779B97F4A7C15);
    x ^= x >> 29;
    x *= UINT64_C(0xD6E8FEB86659FD93);
    x ^= x >> 32;
    return (size_t)x;
}
