// One decoder layer of the llama pattern in one call: the same operations in the same
// order as the separate calls, without the trips through Python between them.
#pragma once
#include "operations.h"

namespace mill {

struct LlamaLayer {
  const float* attention_norm;
  const float* mlp_norm;
  const float* q_norm;  // [dim] or null
  const float* k_norm;
  Linear qkv, output, gate_up, down;
  int64_t hidden, inner;
  float epsilon;
};

inline void rms_norm_rows(const float* x, int64_t rows, int64_t x_stride,
                          const float* weight, int64_t n, float epsilon, float* y) {
  for_rows(rows, n, [&](int64_t row) {
    active->rms_norm(x + row * x_stride, weight, n, epsilon, y + row * n);
  });
}

inline void silu_multiply_rows(const float* gate_up, int64_t rows, int64_t inner,
                               float* y) {
  for_rows(rows, 2 * inner, [&](int64_t row) {
    const float* gate = gate_up + row * 2 * inner;
    active->silu_multiply(gate, gate + inner, inner, y + row * inner);
  });
}

// Rotates the first `heads` heads of each row in place; norms first where given.
inline void rotate_rows(float* x, int64_t rows, int64_t x_stride, int64_t q_heads,
                        int64_t kv_heads, int64_t dim, const float* cos,
                        const float* sin, const float* q_norm, const float* k_norm,
                        float epsilon) {
  for_rows(rows, (q_heads + kv_heads) * dim, [&](int64_t row) {
    float* turned = workspace<float, kTurned>(dim);
    for (int64_t head = 0; head < q_heads + kv_heads; ++head) {
      float* at = x + row * x_stride + head * dim;
      const float* norm = head < q_heads ? q_norm : k_norm;
      if (norm) active->rms_norm(at, norm, dim, epsilon, at);
      active->rotate(at, cos + row * dim, sin + row * dim, dim, turned);
      std::memcpy(at, turned, dim * sizeof(float));
    }
  });
}

// x[rows, hidden] += layer(x). `task` holds the store and the layout; its q, q_stride
// and out are set here.
inline void llama_layer(const LlamaLayer& l, AttentionTask task, const int64_t* slots,
                        const float* cos, const float* sin, float* x, int64_t rows,
                        int64_t sequences) {
  const int64_t q_width = task.heads * task.dim, kv_width = task.kv_heads * task.dim;
  const int64_t qkv_width = q_width + 2 * kv_width;
  const int64_t widest = std::max({l.hidden, q_width, l.inner});
  float* narrow = workspace<float, kNarrow>(rows * widest);
  float* wide = workspace<float, kWide>(rows * std::max(qkv_width, 2 * l.inner));
  const auto add = [&](const float* more) {
    for_rows(rows, l.hidden, [&](int64_t row) {
      active->add(x + row * l.hidden, more + row * l.hidden, l.hidden);
    });
  };
  rms_norm_rows(x, rows, l.hidden, l.attention_norm, l.hidden, l.epsilon, narrow);
  linear(narrow, rows, l.hidden, l.qkv, wide);
  rotate_rows(wide, rows, qkv_width, task.heads, task.kv_heads, task.dim, cos, sin,
              l.q_norm, l.k_norm, l.epsilon);
  const Store store = {(void*)task.k,       (void*)task.v, (void*)task.k_scale,
                       (void*)task.v_scale, task.kv_heads, task.dim,
                       task.block_size,     task.store_kind};
  kv_write(wide + q_width, qkv_width, wide + q_width + kv_width, qkv_width, slots, rows,
           store);
  task.q = wide;
  task.q_stride = qkv_width;
  task.out = narrow;
  attention(task, sequences);
  linear(narrow, rows, q_width, l.output, wide);
  add(wide);
  rms_norm_rows(x, rows, l.hidden, l.mlp_norm, l.hidden, l.epsilon, narrow);
  linear(narrow, rows, l.hidden, l.gate_up, wide);
  silu_multiply_rows(wide, rows, l.inner, narrow);
  linear(narrow, rows, l.inner, l.down, wide);
  add(wide);
}

}  // namespace mill
