/* near.h - which experts the router nearly chose (spec runtime 21): a sign of what will be used that past use does not
 * have. */
#ifndef AFF_EXPERTS_NEAR_H
#define AFF_EXPERTS_NEAR_H
#include <stdint.h>

enum { AFF_NEAR_MOST = 10 };
/* value [experts]: what the router ranks by, summed over the rows of a dispatch that used the n experts `used`. Out
 * come the at most `most` (<= AFF_NEAR_MOST) best of the others, the best first, and how near they were: 0 like the
 * least of all, 1 like the least of those used. Returns how many; 0 if a value is not finite (the pass fails elsewhere)
 * or all are alike. O(experts x most). */
int aff__near_misses(const float *value, int experts, const int32_t *used, int n, int most, int32_t *id, float *score);
#endif
