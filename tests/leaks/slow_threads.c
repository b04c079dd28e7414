/* Loaded before all else: threads but the first are slow to go on when they have given the GIL away, and who reads
 * memory that may have been freed is slow to go on with what it read. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

int times_given_away;

void *PyEval_SaveThread(void) {
    void *(*next)(void) = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
    void *state = next();
    if (getpid() != (pid_t)syscall(SYS_gettid)) {
        ++times_given_away;
        usleep(200);
    }
    return state;
}

ssize_t process_vm_readv(pid_t process, const struct iovec *to, unsigned long to_count,
                         const struct iovec *from, unsigned long from_count, unsigned long flags) {
    ssize_t count =
        syscall(SYS_process_vm_readv, process, to, to_count, from, from_count, flags);
    usleep(300);
    return count;
}
