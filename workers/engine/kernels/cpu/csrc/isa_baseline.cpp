#define TM_ISA_BASELINE
#if defined(__aarch64__)
#define TM_ISA_NAME "neon"
#else
#define TM_ISA_NAME "baseline"
#endif
#include "isa.h"

const mill::KernelTable* mill::baseline_kernels() { return &kTable; }
