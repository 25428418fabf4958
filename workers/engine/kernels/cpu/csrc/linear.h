// Integer matrix product of a few rows with tiles of 16 outputs.
//
// INT16 tile: [padded / 2][16][2] int8. One load widens two inputs of 8 or 16 outputs;
// a row's two inputs are broadcast and `madd` sums the pair of products per output.
// INT8 tile: [padded / 4][16][4] int8, four inputs per output.
#pragma once
#include "table.h"
#include "vector.h"

namespace {

using mill::LinearTask;
using mill::kBlock;
using mill::kMaxRowTile;
using mill::kOutputTile;

inline int32_t load32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

#if defined(TM_ISA_AVX512VNNI)
struct Sums { __m512i v; };
inline void clear(Sums& s) { s.v = _mm512_setzero_si512(); }
inline void flush(const Sums& s, float* total) {
  _mm512_storeu_ps(total,
                   _mm512_add_ps(_mm512_loadu_ps(total), _mm512_cvtepi32_ps(s.v)));
}
struct Weights16 { __m512i v; };
inline Weights16 widen(const int8_t* w) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w))};
}
inline void add_pairs(Sums& s, const Weights16& w, const int16_t* x) {
  s.v = _mm512_dpwssd_epi32(s.v, w.v, _mm512_set1_epi32(load32(x)));
}
#elif defined(__AVX2__)
struct Sums { __m256i low, high; };
inline void clear(Sums& s) { s.low = s.high = _mm256_setzero_si256(); }
inline void flush(const Sums& s, float* total) {
  store8(total, load8(total) + (f8)_mm256_cvtepi32_ps(s.low));
  store8(total + 8, load8(total + 8) + (f8)_mm256_cvtepi32_ps(s.high));
}
struct Weights16 { __m256i low, high; };
inline Weights16 widen(const int8_t* w) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 16)))};
}
inline void add_pairs(Sums& s, const Weights16& w, const int16_t* x) {
#if defined(TM_ISA_AVXVNNI)
  const __m256i pair = _mm256_set1_epi32(load32(x));
  s.low = _mm256_dpwssd_avx_epi32(s.low, w.low, pair);
  s.high = _mm256_dpwssd_avx_epi32(s.high, w.high, pair);
#else
  // In assembler because GCC otherwise loads all rows' inputs first and spills the sums
  // to memory, which halves the speed. 12 sums, 2 weights, 2 temporaries: 16 registers.
  __m256i pair, product;
  asm volatile(
      "vpbroadcastd %[x], %[pair]\n\t"
      "vpmaddwd %[pair], %[low], %[product]\n\t"
      "vpmaddwd %[pair], %[high], %[pair]\n\t"
      "vpaddd %[product], %[sum_low], %[sum_low]\n\t"
      "vpaddd %[pair], %[sum_high], %[sum_high]"
      : [sum_low] "+x"(s.low), [sum_high] "+x"(s.high), [pair] "=&x"(pair),
        [product] "=&x"(product)
      : [x] "m"(*(const int16_t(*)[2])x), [low] "x"(w.low), [high] "x"(w.high));
#endif
}
#else
struct Sums { int32_t v[kOutputTile]; };
inline void clear(Sums& s) { std::memset(s.v, 0, sizeof s.v); }
inline void flush(const Sums& s, float* total) {
  for (int i = 0; i < kOutputTile; ++i) total[i] += (float)s.v[i];
}
struct Weights16 { int16_t v[2 * kOutputTile]; };
inline Weights16 widen(const int8_t* w) {
  Weights16 wide;
  for (int i = 0; i < 2 * kOutputTile; ++i) wide.v[i] = w[i];
  return wide;
}
inline void add_pairs(Sums& s, const Weights16& w, const int16_t* x) {
  for (int i = 0; i < kOutputTile; ++i)
    s.v[i] += (int32_t)w.v[2 * i] * x[0] + (int32_t)w.v[2 * i + 1] * x[1];
}
#endif

template <int R>
inline void multiply_int16(const int16_t* x, int64_t stride, const int8_t* w,
                           int64_t padded, float (*total)[kOutputTile]) {
  for (int64_t start = 0; start < padded; start += kBlock) {
    const int64_t end = start + kBlock < padded ? start + kBlock : padded;
    Sums sums[R];
    for (int r = 0; r < R; ++r) clear(sums[r]);
    for (int64_t k = start; k < end; k += 2) {
      const Weights16 wide = widen(w + k * kOutputTile);
      for (int r = 0; r < R; ++r) {
        add_pairs(sums[r], wide, x + r * stride + k);
      }
    }
    for (int r = 0; r < R; ++r) flush(sums[r], total[r]);
  }
}

template <int R>
inline void multiply_int8(const int8_t* x, int64_t stride, const int8_t* w,
                          int64_t padded, float (*total)[kOutputTile]) {
  for (int64_t start = 0; start < padded; start += kBlock) {
    const int64_t end = start + kBlock < padded ? start + kBlock : padded;
#if defined(__AVX2__)
    __m256i low[R], high[R];
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_si256();
    for (int64_t k = start; k < end; k += 4) {
      const __m256i w0 = _mm256_loadu_si256((const __m256i*)(w + k * kOutputTile));
      const __m256i w1 = _mm256_loadu_si256((const __m256i*)(w + k * kOutputTile + 32));
      for (int r = 0; r < R; ++r) {
        // |x| * sign(w, x): both at most 127, so the int16 pair sums never saturate.
        const __m256i four = _mm256_set1_epi32(load32(x + r * stride + k));
        const __m256i size = _mm256_abs_epi8(four);
        const __m256i p0 = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w0, four));
        const __m256i p1 = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w1, four));
        low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(p0, ones));
        high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(p1, ones));
      }
    }
    for (int r = 0; r < R; ++r) {
      store8(total[r], load8(total[r]) + (f8)_mm256_cvtepi32_ps(low[r]));
      store8(total[r] + 8, load8(total[r] + 8) + (f8)_mm256_cvtepi32_ps(high[r]));
    }
#else
    int32_t sums[R][kOutputTile] = {};
    for (int64_t k = start; k < end; k += 4)
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < kOutputTile; ++i)
          for (int j = 0; j < 4; ++j)
            sums[r][i] += (int32_t)w[k * kOutputTile + 4 * i + j] * x[r * stride + k + j];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kOutputTile; ++i) total[r][i] += (float)sums[r][i];
#endif
  }
}

// Scales the sums of R rows and writes the outputs that exist.
template <int R>
inline void finish(const LinearTask& t, int64_t row, int64_t output,
                   const float (*total)[kOutputTile]) {
  const int64_t width =
      t.outputs - output < kOutputTile ? t.outputs - output : kOutputTile;
  for (int r = 0; r < R; ++r) {
    float* y = t.y + (row + r) * t.y_stride + output;
    const float x_scale = t.x_scale[row + r];
    if (width == kOutputTile) {
      for (int half = 0; half < kOutputTile; half += 8) {
        f8 v = load8(total[r] + half) * load8(t.w_scale + output + half);
        v = v * all8(x_scale);
        if (t.bias) v = v + load8(t.bias + output + half);
        store8(y + half, v);
      }
      continue;
    }
    for (int64_t i = 0; i < width; ++i) {
      float v = total[r][i] * t.w_scale[output + i];
      v = v * x_scale;
      y[i] = t.bias ? v + t.bias[output + i] : v;
    }
  }
}

template <int R, typename T>
void row_tile(const LinearTask& t, int64_t row, int64_t tile) {
  alignas(64) float total[R][kOutputTile] = {};
  const T* x = (const T*)t.x + row * t.padded;
  const int8_t* w = t.w + tile * kOutputTile * t.padded;
  if constexpr (sizeof(T) == 2)
    multiply_int16<R>(x, t.padded, w, t.padded, total);
  else
    multiply_int8<R>(x, t.padded, w, t.padded, total);
  finish<R>(t, row, tile * kOutputTile, total);
}

template <typename T>
void linear_tiles(const LinearTask& t, int64_t first_tile, int64_t end_tile) {
  // Weights of a tile stay in L1 while all rows of the block pass over them.
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    int64_t row = 0;
    while (row < t.rows) {
      const int64_t left = t.rows - row;
      const int64_t tiles = (left + kMaxRowTile - 1) / kMaxRowTile;
      const int64_t size = (left + tiles - 1) / tiles;  // even tiles: 16 = 6 + 5 + 5
      switch (size) {
        case 1: row_tile<1, T>(t, row, tile); break;
        case 2: row_tile<2, T>(t, row, tile); break;
        case 3: row_tile<3, T>(t, row, tile); break;
        case 4: row_tile<4, T>(t, row, tile); break;
        case 5: row_tile<5, T>(t, row, tile); break;
        default: row_tile<6, T>(t, row, tile); break;
      }
      row += size;
    }
  }
}

}  // namespace
