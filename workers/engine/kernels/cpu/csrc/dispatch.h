// Picks the best instruction set that this build and this CPU have.
#pragma once
#include "table.h"

namespace mill {

inline const KernelTable* detect() {
#if defined(__x86_64__)
#if defined(TM_WITH_AVX512VNNI)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return avx512vnni_kernels();
#endif
#if defined(TM_WITH_AVXVNNI)
  if (__builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    return avxvnni_kernels();
#endif
#if defined(TM_WITH_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return avx2_kernels();
#endif
#endif
  return baseline_kernels();
}

inline const KernelTable* active = detect();

}  // namespace mill
