// Rows of activations to INT16 or INT8; heads of K and V to INT8 or INT4.
#pragma once
#include "table.h"
#include "vector.h"

namespace {

// Sets scale and the factor to multiply with; false if all values are to be zero.
inline bool row_scale(int32_t bits, float levels, float* scale, float* factor) {
  const float largest = from_bits(bits);
  if (bits >= kInfinityBits) {
    *scale = from_bits(0x7fc00000);
    return false;
  }
  if (largest < kTiny) {
    *scale = 0.0f;
    return false;
  }
  *scale = largest / levels;
  *factor = levels / largest;
  return true;
}

template <typename T>
inline void store_rounded(f8 v, T* q) {
  const i8x4 whole = __builtin_convertvector(round8(v), i8x4);
  for (int lane = 0; lane < 8; ++lane) q[lane] = (T)whole[lane];
}
#if defined(__AVX2__)
template <>
inline void store_rounded<int16_t>(f8 v, int16_t* q) {
  const __m256i whole = _mm256_cvtps_epi32((__m256)v);
  _mm_storeu_si128((__m128i*)q, _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                                _mm256_extracti128_si256(whole, 1)));
}
template <>
inline void store_rounded<int8_t>(f8 v, int8_t* q) {
  const __m256i whole = _mm256_cvtps_epi32((__m256)v);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                       _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)q, _mm_packs_epi16(half, half));
}
#endif

template <typename T>
void quantize_row(const float* x, int64_t n, int64_t padded, T* q, float* scale) {
  float factor;
  const float levels = sizeof(T) == 2 ? 32767.0f : 127.0f;
  if (!row_scale(largest_bits(x, n), levels, scale, &factor)) {
    std::memset(q, 0, padded * sizeof(T));
    return;
  }
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store_rounded<T>(load8(x + i) * all8(factor), q + i);
  for (; i < n; ++i) q[i] = (T)std::nearbyintf(x[i] * factor);
  for (; i < padded; ++i) q[i] = 0;
}

void quantize_head(const float* x, int64_t dim, int8_t* q, float* scale) {
  float factor;
  if (!row_scale(largest_bits(x, dim), 127.0f, scale, &factor)) {
    std::memset(q, 0, dim);
    return;
  }
  int64_t i = 0;
  for (; i + 8 <= dim; i += 8) store_rounded<int8_t>(load8(x + i) / all8(*scale), q + i);
  for (; i < dim; ++i) q[i] = (int8_t)std::nearbyintf(x[i] / *scale);
}

// Rounds a finite float to the nearest bfloat16, half to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Quantizes up to 16 elements to q + 8, one a byte, and returns their scale.
inline uint16_t quantize_group(const float* x, int64_t n, uint8_t* q) {
  float top = x[0], low = x[0];
  for (int64_t i = 1; i < n; ++i) {
    top = x[i] > top ? x[i] : top;
    low = x[i] < low ? x[i] : low;
  }
  const float extreme = top >= -low ? top : low;
  std::memset(q, 8, mill::kInt4Group);
  if (std::fabs(extreme) < kTiny) return 0;
  const uint16_t bits = to_bfloat16(extreme * -0.125f);
  const float scale = from_bits((int32_t)bits << 16);
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::nearbyintf(x[i] / scale);
    q[i] = (uint8_t)((int)(v > 7.0f ? 7.0f : v < -8.0f ? -8.0f : v) + 8);
  }
  return bits;
}

// See `reference.kv_quantize_int4`.
void quantize_head_int4(const float* x, int64_t dim, uint8_t* packed,
                        uint16_t* scale) {
  constexpr int64_t kGroup = mill::kInt4Group;
  if (largest_bits(x, dim) >= kInfinityBits) {
    std::memset(packed, 0x88, dim / 2);
    for (int64_t g = 0; g < mill::int4_groups(dim); ++g) scale[g] = 0x7fc0;
    return;
  }
  for (int64_t at = 0; at < dim; at += kGroup) {
    const int64_t n = dim - at < kGroup ? dim - at : kGroup;
    uint8_t q[kGroup];
    scale[at / kGroup] = quantize_group(x + at, n, q);
    for (int64_t i = 0; i < n; i += 2)
      packed[(at + i) / 2] = (uint8_t)(q[i] | q[i + 1] << 4);
  }
}

}  // namespace
