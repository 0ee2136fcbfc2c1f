/* machine.h - what memory there is: of this machine as the process may use it, or of one that was described. */
#ifndef AFF_BASE_MACHINE_H
#define AFF_BASE_MACHINE_H
#include "base/status.h"
#include <stdint.h>

enum { AFF_MAX_CARDS = 16 };

typedef struct aff_machine {
    bool described;      /* not this one */
    uint64_t ram;        /* MemTotal, or as described */
    uint64_t free;       /* MemAvailable; described: what the system needs (1.5 GiB, at least 1/32) taken off */
    uint64_t limit;      /* of the cgroup that binds first, UINT64_MAX: none */
    uint64_t limit_free; /* what of it is left; page cache does not count as used */
    int cgroup;          /* 1 or 2: which version the limit is of; 0: none */
    int cards;
    uint64_t card[AFF_MAX_CARDS]; /* bytes of memory */
    double link;                  /* GB/s of one card's link, 0: not said */
} aff_machine;

/* This machine: /proc/meminfo, and every cgroup from the process's own up to the root. `root` stands before all paths
 * ("" outside of tests). A system without cgroups is fine, one without MemAvailable an error. Cards are not looked for.
 */
aff_status aff__machine_here(aff_machine *m, const char *root, aff_error *err);
/* "2x32G,ram=64G,pcie=27": cards and their memory (N x size; sizes with M or G are MiB or GiB), memory of the machine,
 * GB/s of a card's link. ram is required. */
aff_status aff__machine_parse(aff_machine *m, const char *text, aff_error *err);
/* What may be allocated now: the least of free memory and what is left of the limit. */
uint64_t aff__machine_available(const aff_machine *m);
#endif
