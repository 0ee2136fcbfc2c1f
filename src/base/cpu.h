/* cpu.h - which instruction sets this processor has; kernels pick a path by it at run time. */
#ifndef AFF_BASE_CPU_H
#define AFF_BASE_CPU_H
#include <stdbool.h>

typedef enum aff_cpu_level {
    AFF_CPU_SCALAR,
    AFF_CPU_AVX2,  /* AVX2, FMA, F16C */
    AFF_CPU_AVX512 /* F, BW, VL, DQ, VNNI, BF16, VBMI */
} aff_cpu_level;

/* The best level this machine has, or the cap set below. */
aff_cpu_level aff__cpu_level(void);
/* Caps the level for the whole process (tests, --cpu-path); a level above the machine's has no effect. */
void aff__cpu_cap(aff_cpu_level level);
const char *aff__cpu_level_name(aff_cpu_level level);
#endif
