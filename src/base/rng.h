/* rng.h - splitmix64: a counter-based generator (Steele, Lea, Flood 2014); the k-th draw of a seed needs no state. */
#ifndef AFF_BASE_RNG_H
#define AFF_BASE_RNG_H
#include <stdint.h>

static inline uint64_t aff__mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline uint64_t aff__splitmix64(uint64_t *state) { return aff__mix64(*state += 0x9E3779B97F4A7C15u); }
#endif
