/* host.h - what the machine and this process are doing, from /proc; what it does not say is 0. */
#ifndef AFF_BASE_HOST_H
#define AFF_BASE_HOST_H
#include <stdint.h>

typedef struct aff_host {
    uint64_t total, available; /* bytes of memory; available: free, or freed when asked for */
    uint64_t rss, peak;        /* bytes of this process, and the most there were */
    uint64_t cpu_ns;           /* CPU time of this process, all threads */
    int cpus;                  /* that it may use */
} aff_host;
void aff__host_read(aff_host *h);

/* The number of KiB behind `name` ("MemTotal:") in the lines of a /proc file, in bytes; 0: not there. */
uint64_t aff__proc_bytes(const char *text, const char *name);
#endif
