// The small operations between the matrix products, one row at a time.
#pragma once
#include "vector.h"

namespace {

// y = x / sqrt(mean(x^2) + epsilon) * weight
void rms_norm(const float* x, const float* weight, int64_t n, float epsilon, float* y) {
  f8 even = all8(0.0f), odd = all8(0.0f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const f8 a = load8(x + i), b = load8(x + i + 8);
    even = fma8(a, a, even);
    odd = fma8(b, b, odd);
  }
  float total = sum8(even + odd);
  for (; i < n; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / (float)n + epsilon);
  for (i = 0; i + 8 <= n; i += 8)
    store8(y + i, (load8(x + i) * all8(factor)) * load8(weight + i));
  for (; i < n; ++i) y[i] = (x[i] * factor) * weight[i];
}

// y = gate * sigmoid(gate) * up. The exponent is never positive, so nothing overflows.
inline f8 silu_multiply8(f8 gate, f8 up) {
  const f8 zero = all8(0.0f), one = all8(1.0f);
  const f8 e = exp8(gate > zero ? -gate : gate);
  const f8 sigmoid = (gate > zero ? one : e) / (one + e);
  return (gate * sigmoid) * up;
}

void silu_multiply(const float* gate, const float* up, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(y + i, silu_multiply8(load8(gate + i), load8(up + i)));
  if (i == n) return;
  float g[8] = {}, u[8] = {}, v[8];
  std::memcpy(g, gate + i, (n - i) * sizeof(float));
  std::memcpy(u, up + i, (n - i) * sizeof(float));
  store8(v, silu_multiply8(load8(g), load8(u)));
  std::memcpy(y + i, v, (n - i) * sizeof(float));
}

// y = x * cos + swap_halves(x) * sin, where sin carries the sign of the rotation.
void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float* y) {
  const int64_t half = dim / 2;
  for (int side = 0; side < 2; ++side) {
    const int64_t at = side * half, other = half - at;
    int64_t i = 0;
    for (; i + 8 <= half; i += 8)
      store8(y + at + i, fma8(load8(x + other + i), load8(sin + at + i),
                              load8(x + at + i) * load8(cos + at + i)));
    for (; i < half; ++i)
      y[at + i] = x[other + i] * sin[at + i] + x[at + i] * cos[at + i];
  }
}

void add(float* x, const float* more, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(x + i, load8(x + i) + load8(more + i));
  for (; i < n; ++i) x[i] += more[i];
}

}  // namespace
