// What each instruction set's build of the kernels offers to the dispatcher.
#pragma once
#include <cstdint>

namespace mill {

constexpr int kOutputTile = 16;   // outputs that a weight tile holds side by side
constexpr int kMaxRowTile = 6;    // rows x 16 outputs whose sums fit the registers
constexpr int kKeyTile = 32;      // keys per softmax step, aligned to key positions
constexpr int64_t kSegment = 512;  // key positions whose softmax is computed apart
constexpr int kRowTile = 4;        // heads of one query that read a tile together
constexpr int64_t kInt4Group = 16;  // elements of an INT4 vector that share a scale
constexpr int64_t kBlock = 512;   // inputs per exact int32 sum, see reference.py

enum StoreKind : int64_t { kFloatStore, kInt8Store, kInt4Store };

// Scales of one vector of an INT4 store.
inline int64_t int4_groups(int64_t dim) { return (dim + kInt4Group - 1) / kInt4Group; }

// A weight panel's geometry and the rows that one call multiplies with it.
struct LinearTask {
  const void* x;         // int16 or int8 [rows, padded]
  const float* x_scale;  // [rows]
  int64_t rows;
  const int8_t* w;       // packed tiles of 16 outputs
  const float* w_scale;  // [rounded-up outputs]
  const float* bias;     // [outputs] or null
  int64_t outputs;
  int64_t padded;        // inputs rounded up to 4
  float* y;
  int64_t y_stride;
};

// One layer's paged attention over all sequences of a step.
struct AttentionTask {
  const float* q;
  int64_t q_stride;
  const void* k;         // [blocks, kv_heads, block_size, vector], see layout.py
  const void* v;
  const void* k_scale;   // null for a float store
  const void* v_scale;
  const int32_t* query_start;
  const int32_t* context_length;
  const int32_t* block_table;
  int64_t table_stride;
  const float* alibi;    // [heads, alibi_stride]: bias by position, or null
  float* out;            // [tokens, heads, dim]
  int64_t heads, kv_heads, dim, block_size;
  int64_t window;        // 0 is none
  float scale, softcap;  // softcap 0 is none
  int64_t alibi_stride;
  int64_t store_kind;    // StoreKind
};

// Some queries of one sequence, seen by one KV head.
struct AttentionItem {
  int32_t sequence, kv_head, first, count;
  int32_t segment;  // the only one to compute, if there is a part
  float* part;      // [rows][d] sums, [rows] peaks, [rows] masses; null: all segments
};

struct KernelTable {
  const char* name;
  void (*quantize_int16)(const float* x, int64_t n, int64_t padded, int16_t* q,
                         float* scale);
  void (*quantize_int8)(const float* x, int64_t n, int64_t padded, int8_t* q,
                        float* scale);
  void (*linear_int16)(const LinearTask& task, int64_t first_tile, int64_t end_tile);
  void (*linear_int8)(const LinearTask& task, int64_t first_tile, int64_t end_tile);
  void (*quantize_head)(const float* x, int64_t dim, int8_t* q, float* scale);
  void (*quantize_int4)(const float* x, int64_t dim, uint8_t* q, uint16_t* scale);
  void (*attend)(const AttentionTask& task, const AttentionItem& item, float* scratch);
  void (*merge_parts)(const AttentionTask& task, const AttentionItem& item,
                      int64_t segments, float* scratch);
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float epsilon,
                   float* y);
  void (*silu_multiply)(const float* gate, const float* up, int64_t n, float* y);
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t dim,
                 float* y);
  void (*add)(float* x, const float* more, int64_t n);
};

const KernelTable* baseline_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avxvnni_kernels();
const KernelTable* avx512vnni_kernels();

// Floats of scratch that `attend` needs for items of at most `rows` query rows.
inline int64_t attention_scratch(int64_t rows, int64_t dim) {
  const int64_t d = (dim + 7) / 8 * 8;
  return 2 * kKeyTile * d + rows * (3 * d + 4) + kRowTile * kKeyTile;
}

}  // namespace mill
