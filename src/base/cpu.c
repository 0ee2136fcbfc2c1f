#include "base/cpu.h"
#include <stdatomic.h>

static atomic_int cap = AFF_CPU_AVX512;

static aff_cpu_level machine_level(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                  __builtin_cpu_supports("avx512vbmi");
    return avx2 && avx512 ? AFF_CPU_AVX512 : avx2 ? AFF_CPU_AVX2 : AFF_CPU_SCALAR;
#else
    return AFF_CPU_SCALAR;
#endif
}

aff_cpu_level aff__cpu_level(void)
{
    aff_cpu_level m = machine_level(), c = (aff_cpu_level)atomic_load_explicit(&cap, memory_order_relaxed);
    return m < c ? m : c;
}

void aff__cpu_cap(aff_cpu_level level) { atomic_store(&cap, (int)level); }

const char *aff__cpu_level_name(aff_cpu_level level)
{
    return level == AFF_CPU_AVX512 ? "avx512" : level == AFF_CPU_AVX2 ? "avx2" : "scalar";
}
