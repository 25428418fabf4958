// Paged attention of a few query rows against one KV head, 32 keys at a time.
//
// Tiles are aligned to key positions and visited in rising order, and each row's numbers
// never meet another row's: a query's result is the same bits in decode, in any chunk
// and beside any neighbours.
#pragma once
#include "table.h"
#include "vector.h"

namespace {

using mill::AttentionItem;
using mill::AttentionTask;
using mill::kKeyTile;
constexpr int kVectors = kKeyTile / 8;

struct Scratch {
  float* keys;      // [d][32], transposed
  float* values;    // [32][d]
  float* queries;   // [rows][d]
  float* sums;      // [rows][d]
  float* scores;    // [rows][32]
  float* peak;      // [rows] running maximum
  float* mass;      // [rows] running sum of weights
};

inline Scratch carve(float* p, int64_t rows, int64_t d) {
  Scratch s;
  s.keys = p;
  s.values = s.keys + kKeyTile * d;
  s.queries = s.values + kKeyTile * d;
  s.sums = s.queries + rows * d;
  s.scores = s.sums + rows * d;
  s.peak = s.scores + rows * kKeyTile;
  s.mass = s.peak + rows;
  return s;
}

// Eight keys' eight dimensions, transposed to floats.
inline void transpose_int8(const int8_t* const* rows, int64_t at, float* to) {
#if defined(__AVX2__)
  __m128i r[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm_loadl_epi64((const __m128i*)(rows[i] + at));
  __m128i a[4], b[4];
  for (int i = 0; i < 4; ++i) a[i] = _mm_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
  b[0] = _mm_unpacklo_epi16(a[0], a[1]);
  b[1] = _mm_unpackhi_epi16(a[0], a[1]);
  b[2] = _mm_unpacklo_epi16(a[2], a[3]);
  b[3] = _mm_unpackhi_epi16(a[2], a[3]);
  for (int half = 0; half < 2; ++half) {
    const __m128i c0 = _mm_unpacklo_epi32(b[half], b[2 + half]);
    const __m128i c1 = _mm_unpackhi_epi32(b[half], b[2 + half]);
    const __m128i columns[4] = {c0, _mm_unpackhi_epi64(c0, c0), c1,
                                _mm_unpackhi_epi64(c1, c1)};
    for (int i = 0; i < 4; ++i)
      _mm256_storeu_ps(to + (4 * half + i) * kKeyTile,
                       _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(columns[i])));
  }
#else
  for (int d = 0; d < 8; ++d)
    for (int i = 0; i < 8; ++i) to[d * kKeyTile + i] = (float)rows[i][at + d];
#endif
}

inline void transpose_float(const float* const* rows, int64_t at, float* to) {
  for (int d = 0; d < 8; ++d)
    for (int i = 0; i < 8; ++i) to[d * kKeyTile + i] = rows[i][at + d];
}

// Loads a tile's keys (transposed) and values as floats; scales stay apart.
template <typename T>
void load_tile(const T* const* k_rows, const T* const* v_rows, int64_t dim, int64_t d,
               Scratch& s) {
  const int64_t whole = dim / 8 * 8;
  for (int group = 0; group < kKeyTile; group += 8) {
    for (int64_t at = 0; at < whole; at += 8) {
      float* to = s.keys + at * kKeyTile + group;
      if constexpr (sizeof(T) == 1)
        transpose_int8((const int8_t* const*)k_rows + group, at, to);
      else
        transpose_float((const float* const*)k_rows + group, at, to);
    }
    for (int64_t at = whole; at < d; ++at)
      for (int i = 0; i < 8; ++i)
        s.keys[at * kKeyTile + group + i] =
            at < dim ? (float)k_rows[group + i][at] : 0.0f;
  }
  for (int key = 0; key < kKeyTile; ++key) {
    float* to = s.values + key * d;
    for (int64_t at = 0; at < whole; at += 8) {
      if constexpr (sizeof(T) == 1)
        store8(to + at, from_int8((const int8_t*)v_rows[key] + at));
      else
        store8(to + at, load8((const float*)v_rows[key] + at));
    }
    for (int64_t at = whole; at < d; ++at)
      to[at] = at < dim ? (float)v_rows[key][at] : 0.0f;
  }
}

template <int R>
inline void score_rows(const float* q, int64_t d, const float* keys, float* scores) {
  f8 acc[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = all8(0.0f);
  for (int64_t at = 0; at < d; ++at) {
    f8 key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = load8(keys + at * kKeyTile + 8 * v);
    for (int r = 0; r < R; ++r) {
      const f8 value = all8(q[r * d + at]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma8(value, key[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store8(scores + r * kKeyTile + 8 * v, acc[r][v]);
}

struct RowView {
  int64_t first_key, position;  // keys that the row sees, both ends included
  const float* bias;            // by position, or null
  float* scores;
};

// Hides the keys outside the row's range, or zeroes their weights.
inline f8 outside(f8 value, f8 key, const RowView& row, int64_t tile, float filler) {
  const f8 low = all8((float)(row.first_key - tile));
  const f8 high = all8((float)(row.position - tile));
  value = (key >= low) ? value : all8(filler);
  return (key <= high) ? value : all8(filler);
}

// Adds a tile's biases, each less the query's own.
inline void add_bias(const RowView& row, int64_t tile) {
  const float own = row.bias[row.position];
  const int64_t left = row.position - tile + 1;
  const int count = left < kKeyTile ? (int)left : kKeyTile;
  for (int i = 0; i < count; ++i) row.scores[i] += row.bias[tile + i] - own;
}

// Scales, caps, biases and hides a row's raw products; returns their maximum.
inline float prepare_scores(const AttentionTask& t, const RowView& row, int64_t tile,
                            bool whole, const float* k_scale) {
  for (int v = 0; v < kVectors; ++v)
    store8(row.scores + 8 * v, load8(row.scores + 8 * v) * load8(k_scale + 8 * v));
  if (t.softcap > 0.0f)
    for (int i = 0; i < kKeyTile; ++i)
      row.scores[i] = t.softcap * std::tanh(row.scores[i] / t.softcap);
  if (row.bias) add_bias(row, tile);
  const f8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  f8 top = all8(-INFINITY);
  for (int v = 0; v < kVectors; ++v) {
    const f8 key = lanes + all8(8.0f * v);
    f8 s = load8(row.scores + 8 * v);
    if (!whole) s = outside(s, key, row, tile, -INFINITY);
    top = max8(s, top);
    store8(row.scores + 8 * v, s);
  }
  return largest8(top);
}

// Turns raw products into softmax weights of this tile; returns the old sums' factor.
inline float soften(const AttentionTask& t, const RowView& row, int64_t tile,
                    bool whole, const float* k_scale, const float* v_scale,
                    float* peak, float* mass) {
  const float before = *peak;
  const float top = prepare_scores(t, row, tile, whole, k_scale);
  const float now = top > before ? top : before;
  const f8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  f8 total = all8(0.0f);
  for (int v = 0; v < kVectors; ++v) {
    f8 p = exp8(load8(row.scores + 8 * v) - all8(now));
    if (!whole) p = outside(p, lanes + all8(8.0f * v), row, tile, 0.0f);
    total = total + p;
    store8(row.scores + 8 * v, p * load8(v_scale + 8 * v));
  }
  float keep = 1.0f;  // e^0: the maximum stands
  if (before == -INFINITY) keep = 0.0f;
  else if (top > before) keep = exp8(all8(before - now))[0];
  *mass = *mass * keep + sum8(total);
  *peak = now;
  return keep;
}

// sums = sums * keep + weights[lo..hi) * values, in rising key order.
template <int V>
inline void mix(float* sums, float keep, const float* weights, int lo, int hi,
                const float* values, int64_t d) {
  f8 acc[V];
  for (int v = 0; v < V; ++v) acc[v] = load8(sums + 8 * v) * all8(keep);
  for (int key = lo; key < hi; ++key) {
    const f8 weight = all8(weights[key]);
    const float* value = values + key * d;
    for (int v = 0; v < V; ++v) acc[v] = fma8(weight, load8(value + 8 * v), acc[v]);
  }
  for (int v = 0; v < V; ++v) store8(sums + 8 * v, acc[v]);
}

inline int64_t first_visible(const AttentionTask& t, int64_t position) {
  return t.window > 0 && position >= t.window ? position - t.window + 1 : 0;
}

// Finds a tile's rows in the block store and folds the scales into two vectors.
template <typename T>
void find_rows(const AttentionTask& t, const AttentionItem& item, int64_t tile,
               const T** k_rows, const T** v_rows, float* k_scale, float* v_scale) {
  const int32_t* table = t.block_table + item.sequence * t.table_stride;
  const int64_t last = t.context_length[item.sequence] - 1;
  const auto block_row = [&](int64_t block) {
    return ((int64_t)table[block] * t.kv_heads + item.kv_head) * t.block_size;
  };
  int64_t block = tile / t.block_size, offset = tile % t.block_size;
  int64_t first = block_row(block);
  for (int i = 0; i < kKeyTile; ++i) {
    const int64_t row = first + offset;
    k_rows[i] = (const T*)t.k + row * t.dim;
    v_rows[i] = (const T*)t.v + row * t.dim;
    k_scale[i] = t.k_scale ? t.k_scale[row] * t.scale : t.scale;
    v_scale[i] = t.v_scale ? t.v_scale[row] : 1.0f;
    if (tile + i >= last) continue;  // lanes past the end repeat the last key
    if (++offset == t.block_size) {
      offset = 0;
      first = block_row(++block);
    }
  }
}

template <typename T>
void attend_store(const AttentionTask& t, const AttentionItem& item, float* memory) {
  const int64_t group = t.heads / t.kv_heads, rows = item.count * group;
  const int64_t d = (t.dim + 7) / 8 * 8;
  const int64_t start = t.query_start[item.sequence];
  const int64_t length = t.query_start[item.sequence + 1] - start;
  const int64_t base = t.context_length[item.sequence] - length + item.first;
  Scratch s = carve(memory, rows, d);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = start + item.first + r / group;
    const int64_t head = item.kv_head * group + r % group;
    std::memcpy(s.queries + r * d, t.q + token * t.q_stride + head * t.dim,
                t.dim * sizeof(float));
    for (int64_t at = t.dim; at < d; ++at) s.queries[r * d + at] = 0.0f;
    std::memset(s.sums + r * d, 0, d * sizeof(float));
    s.peak[r] = -INFINITY;
    s.mass[r] = 0.0f;
  }
  const int64_t final_key = base + item.count - 1;
  int64_t tile = first_visible(t, base) / kKeyTile * kKeyTile;
  for (; tile <= final_key; tile += kKeyTile) {
    const T *k_rows[kKeyTile], *v_rows[kKeyTile];
    alignas(32) float k_scale[kKeyTile], v_scale[kKeyTile];
    find_rows<T>(t, item, tile, k_rows, v_rows, k_scale, v_scale);
    load_tile<T>(k_rows, v_rows, t.dim, d, s);
    // Rows are ordered by position, so those that see the tile are a range.
    int64_t from = tile > base ? (tile - base) * group : 0;
    int64_t end = rows;
    while (end > from &&
           first_visible(t, base + (end - 1) / group) > tile + kKeyTile - 1)
      end -= group;
    int64_t r = from;
    for (; r + 2 <= end; r += 2)
      score_rows<2>(s.queries + r * d, d, s.keys, s.scores + r * kKeyTile);
    for (; r < end; ++r)
      score_rows<1>(s.queries + r * d, d, s.keys, s.scores + r * kKeyTile);
    for (r = from; r < end; ++r) {
      const int64_t position = base + r / group;
      const int64_t head = item.kv_head * group + r % group;
      const float* bias = t.alibi ? t.alibi + head * t.alibi_stride : nullptr;
      const RowView row = {first_visible(t, position), position, bias,
                           s.scores + r * kKeyTile};
      const int lo = row.first_key > tile ? (int)(row.first_key - tile) : 0;
      const int hi =
          position - tile + 1 < kKeyTile ? (int)(position - tile + 1) : kKeyTile;
      const float keep = soften(t, row, tile, hi - lo == kKeyTile, k_scale, v_scale,
                                s.peak + r, s.mass + r);
      int64_t at = 0;
      for (; at + 64 <= d; at += 64)
        mix<8>(s.sums + r * d + at, keep, row.scores, lo, hi, s.values + at, d);
      for (; at + 32 <= d; at += 32)
        mix<4>(s.sums + r * d + at, keep, row.scores, lo, hi, s.values + at, d);
      for (; at < d; at += 8)
        mix<1>(s.sums + r * d + at, keep, row.scores, lo, hi, s.values + at, d);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = start + item.first + r / group;
    const int64_t head = item.kv_head * group + r % group;
    float* out = t.out + (token * t.heads + head) * t.dim;
    for (int64_t at = 0; at < t.dim; ++at) out[at] = s.sums[r * d + at] / s.mass[r];
  }
}

void attend(const AttentionTask& t, const AttentionItem& item, float* scratch) {
  if (t.k_scale)
    attend_store<int8_t>(t, item, scratch);
  else
    attend_store<float>(t, item, scratch);
}

}  // namespace
