/* Loaded before all else: counts the memory that torch's CPU allocator has handed out and not had back, to the byte, and
 * refuses the n-th request to come. */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

enum { SLOTS = 1 << 16, ALIGNMENT = 64 };

static struct {
    void *block;
    size_t size;
} slots[SLOTS]; /* open addressing, by address */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long blocks;
static long bytes;
static long until_refusal; /* 0: refuses none */
static long refused;

static size_t home(const void *block)
{
    return ((uintptr_t)block / ALIGNMENT * 0x9E3779B97F4A7C15u) >> 48;
}

static size_t find(const void *block)
{
    size_t i = home(block);
    while (slots[i].block && slots[i].block != block) {
        i = (i + 1) % SLOTS;
    }
    return i;
}

static void take_out(size_t i)
{
    slots[i].block = NULL;
    for (size_t j = (i + 1) % SLOTS; slots[j].block; j = (j + 1) % SLOTS) {
        size_t wanted = home(slots[j].block);
        if ((j - wanted) % SLOTS >= (j - i) % SLOTS) {
            slots[i] = slots[j];
            slots[j].block = NULL;
            i = j;
        }
    }
}

int posix_memalign(void **result, size_t alignment, size_t size)
{
    pthread_mutex_lock(&lock);
    int is_refused = until_refusal > 0 && --until_refusal == 0;
    refused += is_refused;
    void *block = is_refused ? NULL : __libc_memalign(alignment, size);
    if (block && (uintptr_t)block % ALIGNMENT == 0) {
        if (++blocks == SLOTS) {
            abort();
        }
        size_t i = find(block);
        slots[i].block = block;
        slots[i].size = size;
        bytes += (long)size;
    }
    pthread_mutex_unlock(&lock);
    if (!block) {
        return ENOMEM;
    }
    *result = block;
    return 0;
}

void free(void *block)
{
    if (block && (uintptr_t)block % ALIGNMENT == 0) {
        pthread_mutex_lock(&lock);
        size_t i = find(block);
        if (slots[i].block) {
            --blocks;
            bytes -= (long)slots[i].size;
            take_out(i);
        }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(block);
}

long allocations_bytes(void)
{
    return bytes;
}

long allocations_blocks(void)
{
    return blocks;
}

long allocations_refused(void)
{
    return refused;
}

/* The n-th request from now on fails, as the first of them does for 1; 0 takes it back. */
void allocations_refuse(long n)
{
    pthread_mutex_lock(&lock);
    until_refusal = n;
    pthread_mutex_unlock(&lock);
}
