/* A wall clock that jumps, in one process: LD_PRELOAD it, and call jump_to. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

static _Atomic long ahead_s;

void jump_to(long seconds) { ahead_s = seconds; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*_Atomic real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (seconds)
        *seconds = at.tv_sec;
    return at.tv_sec;
}
