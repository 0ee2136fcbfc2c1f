/* pages.h - how large blocks of memory are paged: in huge pages where the system gives them to those who ask, and dealt
 * over the nodes of a NUMA machine, since any thread may come to read any row of a weight. */
#ifndef AFF_BASE_PAGES_H
#define AFF_BASE_PAGES_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { AFF_NODE_WORDS = 16 }; /* 1024 nodes, as many as Linux has */

/* For private memory that nobody has touched yet: asks for huge pages in its whole 2 MiB pieces, and deals its pages
 * over the nodes if there are several. Only advice: nothing is lost when the system declines. Blocks below 4 MiB are
 * left alone. */
void aff__pages_prepare(void *p, uint64_t bytes);

/* What the system does with that advice. */
typedef enum aff_huge { AFF_HUGE_GIVEN, AFF_HUGE_DENIED, AFF_HUGE_UNKNOWN } aff_huge;
/* setting: the text of /sys/kernel/mm/transparent_hugepage/enabled, NULL if it cannot be read. */
aff_huge aff__huge_setting(const char *setting);
/* One line for people: huge pages in force or not and what to do about it, nodes. */
void aff__pages_line(char *out, size_t cap);

/* The nodes of a list as Linux writes it ("0-1,3"), and their number; 0 if it is none. */
int aff__node_list(const char *text, uint64_t mask[AFF_NODE_WORDS]);
/* Nodes that have memory; 1 where that is not known. */
int aff__numa_nodes(uint64_t mask[AFF_NODE_WORDS]);
/* Deals the pages of [p, p+bytes), not touched yet, over the nodes of the mask in turn; false: the system declines. */
bool aff__pages_deal(void *p, uint64_t bytes, const uint64_t mask[AFF_NODE_WORDS]);
#endif
