#include "experts/near.h"
#include <math.h>
#include <stdbool.h>

static bool has(const int32_t *v, int n, int32_t e)
{
    while (n--)
        if (v[n] == e) return true;
    return false;
}

int aff__near_misses(const float *value, int experts, const int32_t *used, int n, int most, int32_t *id, float *score)
{
    float low = INFINITY, cut = INFINITY;
    int found = 0;
    for (int e = 0; e < experts; e++) {
        if (!isfinite(value[e])) return 0;
        low = fminf(low, value[e]);
    }
    for (int i = 0; i < n; i++) cut = fminf(cut, value[used[i]]);
    if (most > AFF_NEAR_MOST) most = AFF_NEAR_MOST;
    if (!n || !(cut > low)) return 0;
    for (int e = 0; e < experts; e++) {
        int at = found;
        while (at > 0 && value[id[at - 1]] < value[e]) at--;
        if (at >= most || has(used, n, e)) continue;
        if (found < most) found++;
        for (int i = found - 1; i > at; i--) id[i] = id[i - 1];
        id[at] = e;
    }
    for (int i = 0; i < found; i++) score[i] = fminf(1, (value[id[i]] - low) / (cut - low));
    return found;
}
