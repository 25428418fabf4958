// Included once per instruction set: everything sits in unnamed namespaces, so that the
// linker never merges one set's code into another's.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "quantize.h"

namespace {
const mill::KernelTable kTable = {
    TM_ISA_NAME,
    quantize_row<int16_t>,
    quantize_row<int8_t>,
    linear_tiles<int16_t>,
    linear_tiles<int8_t>,
    quantize_head,
    quantize_head_int4,
    attend,
    merge_parts,
    rms_norm,
    silu_multiply,
    rotate,
    add,
};
}
