#define TM_ISA_AVXVNNI
#define TM_ISA_NAME "avx-vnni"
#include "isa.h"

const mill::KernelTable* mill::avxvnni_kernels() { return &kTable; }
