/* clock.h - monotonic time. */
#ifndef AFF_BASE_CLOCK_H
#define AFF_BASE_CLOCK_H
#include <stdint.h>
#include <time.h>

static inline uint64_t aff__now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
#endif
