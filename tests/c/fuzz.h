/* fuzz.h - what a fuzz target defines, for libFuzzer (clang: `make fuzz FUZZ_TARGET=...`) and for fuzz_main.c. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Of an input, in bytes: what comes after says nothing. At most 4096. */
extern const uint32_t fuzz_longest;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
