// Eight floats at a time, in the compiler's own vector types: one source for AVX2, NEON
// and plain SSE, with the same operations in the same order everywhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <algorithm>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8x4 __attribute__((vector_size(32)));  // eight int32 lanes
typedef int8_t b8 __attribute__((vector_size(8)));

inline f8 load8(const float* p) {
  f8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store8(float* p, f8 v) { std::memcpy(p, &v, sizeof v); }
inline f8 all8(float s) { return f8{s, s, s, s, s, s, s, s}; }

// Explicit, so that no compiler decides which product of a sum is fused.
inline f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
  return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline f8 max8(f8 a, f8 b) { return a > b ? a : b; }  // b where a is NaN

inline float sum8(f8 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline float larger(float a, float b) { return a > b ? a : b; }
inline float largest8(f8 v) {
#if defined(__AVX2__)
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v),
                                 _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return larger(_mm_cvtss_f32(pair), _mm_cvtss_f32(_mm_shuffle_ps(pair, pair, 1)));
#else
  return larger(larger(larger(v[0], v[4]), larger(v[2], v[6])),
                larger(larger(v[1], v[5]), larger(v[3], v[7])));
#endif
}

// Adding 1.5 * 2^23 leaves no bits below one: rounds half to even for |v| < 2^22.
inline f8 round8(f8 v) {
  const f8 magic = all8(12582912.0f);
  return (v + magic) - magic;
}

inline f8 from_int8(const int8_t* p) {
#if defined(__AVX2__)
  return (f8)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  b8 v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, f8);
#endif
}

// e^x for x <= 0, relative error about 1e-7; NaN stays NaN.
inline f8 exp8(f8 x) {
  const f8 low = all8(-87.0f);
  const f8 y = x > low ? x : low;
  const f8 n = round8(y * all8(1.44269504088896341f));
  f8 r = fma8(n, all8(-0.693359375f), y);
  r = fma8(n, all8(2.12194440e-4f), r);
  f8 p = all8(1.9875691500e-4f);
  p = fma8(p, r, all8(1.3981999507e-3f));
  p = fma8(p, r, all8(8.3334519073e-3f));
  p = fma8(p, r, all8(4.1665795894e-2f));
  p = fma8(p, r, all8(1.6666665459e-1f));
  p = fma8(p, r, all8(5.0000001201e-1f));
  p = fma8(p, r * r, r + all8(1.0f));
  const i8x4 bits = (__builtin_convertvector(n, i8x4) + 127) << 23;
  f8 power;
  std::memcpy(&power, &bits, sizeof power);
  return x == x ? p * power : x;
}

// Largest magnitude of n floats as its bit pattern: orders like the value, and NaN and
// infinity come out on top, so one pass finds both the scale and the damage.
inline int32_t largest_bits(const float* x, int64_t n) {
  i8x4 best = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    i8x4 bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    best = bits > best ? bits : best;
  }
  int32_t top = 0;
  for (int lane = 0; lane < 8; ++lane) top = best[lane] > top ? best[lane] : top;
  for (; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return top;
}

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kTiny = 7.888609052210118e-31f;  // 2^-100, see reference.py

inline float from_bits(int32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

}  // namespace
