#define TM_ISA_AVX512VNNI
#define TM_ISA_NAME "avx512-vnni"
#include "isa.h"

const mill::KernelTable* mill::avx512vnni_kernels() { return &kTable; }
