#define TM_ISA_AVX2
#define TM_ISA_NAME "avx2"
#include "isa.h"

const mill::KernelTable* mill::avx2_kernels() { return &kTable; }
