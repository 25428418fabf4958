// How keys and values are stored, and a tile of them as floats.
#pragma once
#include "table.h"
#include "vector.h"

namespace {

using mill::AttentionItem;
using mill::AttentionTask;
using mill::kFloatStore;
using mill::kInt4Group;
using mill::kInt4Store;
using mill::kInt8Store;
using mill::kKeyTile;

// Where a tile's vectors lie. INT4 has its own scales per vector; else `k_scale` and
// `v_scale` hold one factor per key, the score factor folded in.
struct TileRows {
  const uint8_t *k[kKeyTile], *v[kKeyTile];
  const uint16_t *k_groups[kKeyTile], *v_groups[kKeyTile];  // bfloat16 [groups]
  alignas(32) float k_scale[kKeyTile];
  alignas(32) float v_scale[kKeyTile];
};

// Finds a tile's vectors in the block store and calls them into the cache: blocks lie
// apart, so the CPU does not see the next one coming.
template <int Kind>
void find_rows(const AttentionTask& t, const AttentionItem& item, int64_t tile,
               TileRows& rows) {
  const int32_t* table = t.block_table + item.sequence * t.table_stride;
  const int64_t last = t.context_length[item.sequence] - 1;
  const int64_t bytes = Kind == kInt4Store   ? t.dim / 2
                        : Kind == kInt8Store ? t.dim
                                             : t.dim * (int64_t)sizeof(float);
  const int64_t groups = mill::int4_groups(t.dim);
  const auto block_row = [&](int64_t block) {
    return ((int64_t)table[block] * t.kv_heads + item.kv_head) * t.block_size;
  };
  const auto set = [&](int i, int64_t row) {
    rows.k[i] = (const uint8_t*)t.k + row * bytes;
    rows.v[i] = (const uint8_t*)t.v + row * bytes;
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(rows.k[i] + at);
      __builtin_prefetch(rows.v[i] + at);
    }
    rows.k_scale[i] = t.scale;
    rows.v_scale[i] = 1.0f;
    rows.k_groups[i] = rows.v_groups[i] = nullptr;
    if constexpr (Kind == kInt8Store) {
      rows.k_scale[i] = ((const float*)t.k_scale)[row] * t.scale;
      rows.v_scale[i] = ((const float*)t.v_scale)[row];
    }
    if constexpr (Kind == kInt4Store) {
      rows.k_groups[i] = (const uint16_t*)t.k_scale + row * groups;
      rows.v_groups[i] = (const uint16_t*)t.v_scale + row * groups;
    }
  };
  const int count = (int)std::min<int64_t>(kKeyTile, last + 1 - tile);
  int64_t row = 0;
  for (int i = 0; i < count;) {
    const int64_t offset = (tile + i) % t.block_size;
    const int end = (int)std::min<int64_t>(count, i + t.block_size - offset);
    row = block_row((tile + i) / t.block_size) + offset;
    for (; i < end; ++i) set(i, row++);
  }
  for (int i = count; i < kKeyTile; ++i) set(i, row - 1);  // repeat the last key
}

inline float from_bfloat16(uint16_t bits) { return from_bits((int32_t)bits << 16); }

// One element of a stored vector, without the scale of INT8.
template <int Kind>
inline float element(const uint8_t* row, const uint16_t* groups, int64_t at) {
  if constexpr (Kind == kInt8Store) return (float)((const int8_t*)row)[at];
  if constexpr (Kind == kFloatStore) return ((const float*)row)[at];
  const int half = at % 2 ? row[at / 2] >> 4 : row[at / 2] & 15;
  return (float)(half - 8) * from_bfloat16(groups[at / kInt4Group]);
}

#if defined(__AVX2__)
// Eight packed INT4 values as floats.
inline f8 from_int4(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  const __m256i places = _mm256_setr_epi64x(0x8080800080808000, 0x8080800180808001,
                                            0x8080800280808002, 0x8080800380808003);
  const __m256i halves = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(four), places);
  const __m256i q = _mm256_and_si256(_mm256_srlv_epi32(spread, halves),
                                     _mm256_set1_epi32(15));
  // 2^23 has no bits below one: q stands in them, and 2^23 + 8 is taken off again.
  const __m256i biased = _mm256_or_si256(q, _mm256_set1_epi32(0x4b000000));
  return (f8)_mm256_castsi256_ps(biased) - all8(8388616.0f);
}
#endif

// Eight elements of a stored vector, exact as floats; without the scale of INT8.
template <int Kind>
inline f8 load_stored(const uint8_t* row, const uint16_t* groups, int64_t at) {
  if constexpr (Kind == kInt8Store) return from_int8((const int8_t*)row + at);
  if constexpr (Kind == kFloatStore) return load8((const float*)row + at);
#if defined(__AVX2__)
  return from_int4(row + at / 2) * all8(from_bfloat16(groups[at / kInt4Group]));
#else
  f8 v;
  for (int i = 0; i < 8; ++i) v[i] = element<Kind>(row, groups, at + i);
  return v;
#endif
}

// Converts 32 stored vectors to floats [32][d]. `d` is `dim` rounded up to 8; the
// elements between are 0.
template <int Kind>
void load_tile(const uint8_t* const* rows, const uint16_t* const* groups, int64_t dim,
               int64_t d, float* to) {
  const int64_t whole = dim / 8 * 8;
  for (int key = 0; key < kKeyTile; ++key, to += d) {
    for (int64_t at = 0; at < whole; at += 8)
      store8(to + at, load_stored<Kind>(rows[key], groups[key], at));
    for (int64_t at = whole; at < d; ++at)
      to[at] = at < dim ? element<Kind>(rows[key], groups[key], at) : 0.0f;
  }
}

}  // namespace
