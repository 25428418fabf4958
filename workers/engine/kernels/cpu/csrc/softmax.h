// One query row's scores in a tile of 32 keys, and the running softmax over tiles.
#pragma once
#include "table.h"
#include "vector.h"

namespace {

using mill::AttentionTask;
using mill::kKeyTile;
constexpr int kVectors = kKeyTile / 8;

inline int64_t first_visible(const AttentionTask& t, int64_t position) {
  return t.window > 0 && position >= t.window ? position - t.window + 1 : 0;
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

// The softmax of a segment's visible keys so far; no key yet is peak -inf and mass 0.
struct Segment {
  float *sums, *peak, *mass;  // [rows][d], [rows], [rows]
};

inline bool is_empty(float peak, float mass) {
  return peak == -INFINITY && mass == 0.0f;
}

inline float fade(float peak, float now) {
  if (peak == now) return 1.0f;
  return peak == -INFINITY ? 0.0f : exp8(all8(peak - now))[0];
}

// Adds a later segment's row to the total of the earlier ones.
inline void merge_row(float* sums, float* peak, float* mass, const float* more,
                      float more_peak, float more_mass, int64_t d) {
  if (is_empty(more_peak, more_mass)) return;
  if (is_empty(*peak, *mass)) {
    std::memcpy(sums, more, d * sizeof(float));
    *peak = more_peak;
    *mass = more_mass;
    return;
  }
  const float now = larger(more_peak, *peak);
  const float old = fade(*peak, now), fresh = fade(more_peak, now);
  for (int64_t at = 0; at < d; at += 8)
    store8(sums + at, fma8(load8(more + at), all8(fresh), load8(sums + at) * all8(old)));
  *mass = *mass * old + more_mass * fresh;
  *peak = now;
}

}  // namespace
