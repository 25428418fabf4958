// Paged attention of a few query rows against one KV head, 32 keys at a time.
//
// Tiles are aligned to key positions and visited in rising order. Every 512 positions a
// segment ends, and segments are merged in rising order: they may be computed apart. Each
// row's numbers never meet another row's. So a query's result is the same bits in decode,
// in any chunk, beside any neighbours and however its keys are shared out to threads.
#pragma once
#include "kv_store.h"
#include "softmax.h"

namespace {

using mill::kRowTile;
using mill::kSegment;

struct Scratch {
  float* keys;      // [32][d], for stores that many rows read
  float* values;    // [32][d]
  float* queries;   // [rows][d]
  float* scores;    // [4][32]
  Segment now, all;
};

inline Scratch carve(float* p, int64_t rows, int64_t d) {
  Scratch s;
  const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
  s.keys = take(kKeyTile * d);
  s.values = take(kKeyTile * d);
  s.queries = take(rows * d);
  s.now.sums = take(rows * d);
  s.all.sums = take(rows * d);
  s.scores = take(kRowTile * kKeyTile);
  for (Segment* segment : {&s.now, &s.all}) {
    segment->peak = take(rows);
    segment->mass = take(rows);
  }
  return s;
}

// 32 stored vectors, or their floats.
struct Vectors {
  const uint8_t* const* rows;
  const uint16_t* const* groups;
};

// Sums each of four vectors' lanes.
inline void store_sums(const f8* v, float* to) {
  const auto halves = [](f8 a, f8 b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
           __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  };
  const f8 a = halves(v[0], v[1]), b = halves(v[2], v[3]);
  const f8 sums = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  const auto total = __builtin_shufflevector(sums, sums, 0, 1, 2, 3) +
                     __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
  std::memcpy(to, &total, sizeof total);
}

// Products of R queries with `Keys` keys, in eight partial sums each.
template <int Kind, int R, int Keys>
inline void multiply_keys(const float* q, int64_t d, Vectors keys, int first,
                          f8 (*sums)[4], int at_sum) {
  f8 acc[R][Keys];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Keys; ++i) acc[r][i] = all8(0.0f);
  for (int64_t at = 0; at < d; at += 8) {
    f8 query[R];
    for (int r = 0; r < R; ++r) query[r] = load8(q + r * d + at);
    for (int i = 0; i < Keys; ++i) {
      const f8 key =
          load_stored<Kind>(keys.rows[first + i], keys.groups[first + i], at);
      for (int r = 0; r < R; ++r) acc[r][i] = fma8(query[r], key, acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Keys; ++i) sums[r][at_sum + i] = acc[r][i];
}

template <int Kind, int R>
inline void score_rows(const float* q, int64_t d, Vectors keys, float* scores) {
  for (int first = 0; first < kKeyTile; first += 4) {
    f8 sums[R][4];
    if constexpr (R <= 3) {  // queries, sums and a key fit the 16 registers
      multiply_keys<Kind, R, 4>(q, d, keys, first, sums, 0);
    } else {
      multiply_keys<Kind, R, 2>(q, d, keys, first, sums, 0);
      multiply_keys<Kind, R, 2>(q, d, keys, first + 2, sums, 2);
    }
    for (int r = 0; r < R; ++r) store_sums(sums[r], scores + r * kKeyTile + first);
  }
}

// sums = sums * keep + weights[lo..hi) * values, in rising key order.
template <int Kind, int R, int V>
inline void mix(float* sums, int64_t d, const float* keep, const float* weights, int lo,
                int hi, Vectors values, int64_t at) {
  f8 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      acc[r][v] = load8(sums + r * d + at + 8 * v) * all8(keep[r]);
  for (int key = lo; key < hi; ++key) {
    f8 weight[R];
    for (int r = 0; r < R; ++r) weight[r] = all8(weights[r * kKeyTile + key]);
    for (int v = 0; v < V; ++v) {
      const f8 value =
          load_stored<Kind>(values.rows[key], values.groups[key], at + 8 * v);
      for (int r = 0; r < R; ++r) acc[r][v] = fma8(weight[r], value, acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store8(sums + r * d + at + 8 * v, acc[r][v]);
}

// What the rows of one query see of a tile.
struct TileView {
  const AttentionTask& task;
  int64_t d, tile, position, first_head;
  Vectors keys, values;
  const float *k_scale, *v_scale;
};

// Adds a tile to the running softmax of R heads of one query.
template <int Kind, int R>
void attend_rows(const TileView& view, const float* q, const Segment& state, int64_t row,
                 float* scores) {
  const AttentionTask& t = view.task;
  const int64_t d = view.d, tile = view.tile, position = view.position;
  const int64_t first_key = first_visible(t, position);
  const int lo = first_key > tile ? (int)(first_key - tile) : 0;
  const int hi = position - tile + 1 < kKeyTile ? (int)(position - tile + 1) : kKeyTile;
  score_rows<Kind, R>(q, d, view.keys, scores);
  float keep[R];
  for (int r = 0; r < R; ++r) {
    const float* bias =
        t.alibi ? t.alibi + (view.first_head + r) * t.alibi_stride : nullptr;
    const RowView one = {first_key, position, bias, scores + r * kKeyTile};
    keep[r] = soften(t, one, tile, hi - lo == kKeyTile, view.k_scale, view.v_scale,
                     state.peak + row + r, state.mass + row + r);
  }
  float* sums = state.sums + row * d;
  constexpr int kWide = R == 1 ? 8 : R == 2 ? 4 : 2;  // enough sums to hide latency
  int64_t at = 0;
  for (; at + 8 * kWide <= d; at += 8 * kWide)
    mix<Kind, R, kWide>(sums, d, keep, scores, lo, hi, view.values, at);
  for (; at < d; at += 8)
    mix<Kind, R, 1>(sums, d, keep, scores, lo, hi, view.values, at);
}

template <int Kind>
void attend_query(TileView view, int64_t head, int64_t group, const Scratch& s,
                  int64_t row) {
  for (int64_t h = 0; h < group; h += kRowTile, row += kRowTile) {
    view.first_head = head * group + h;
    const float* q = s.queries + row * view.d;
    switch (group - h) {
      case 1: attend_rows<Kind, 1>(view, q, s.now, row, s.scores); break;
      case 2: attend_rows<Kind, 2>(view, q, s.now, row, s.scores); break;
      case 3: attend_rows<Kind, 3>(view, q, s.now, row, s.scores); break;
      default: attend_rows<Kind, 4>(view, q, s.now, row, s.scores); break;
    }
  }
}

inline void clear(const Segment& segment, int64_t rows, int64_t d) {
  std::memset(segment.sums, 0, rows * d * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    segment.peak[r] = -INFINITY;
    segment.mass[r] = 0.0f;
  }
}

// Adds the segment that ends to the total and begins the next.
inline void end_segment(const Scratch& s, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r)
    merge_row(s.all.sums + r * d, s.all.peak + r, s.all.mass + r, s.now.sums + r * d,
              s.now.peak[r], s.now.mass[r], d);
  clear(s.now, rows, d);
}

inline void load_queries(const AttentionTask& t, const AttentionItem& item, int64_t d,
                         float* to) {
  const int64_t group = t.heads / t.kv_heads;
  const int64_t start = t.query_start[item.sequence] + item.first;
  for (int64_t r = 0; r < item.count * group; ++r, to += d) {
    const float* q = t.q + (start + r / group) * t.q_stride;
    std::memcpy(to, q + (item.kv_head * group + r % group) * t.dim,
                t.dim * sizeof(float));
    for (int64_t at = t.dim; at < d; ++at) to[at] = 0.0f;
  }
}

inline void store_results(const AttentionTask& t, const AttentionItem& item, int64_t d,
                          const Segment& total) {
  const int64_t group = t.heads / t.kv_heads;
  const int64_t start = t.query_start[item.sequence] + item.first;
  for (int64_t r = 0; r < item.count * group; ++r) {
    const int64_t head = item.kv_head * group + r % group;
    float* out = t.out + ((start + r / group) * t.heads + head) * t.dim;
    for (int64_t at = 0; at < t.dim; ++at)
      out[at] = total.sums[r * d + at] / total.mass[r];
  }
}

template <int Kind>
void attend_tile(const AttentionTask& t, const AttentionItem& item, int64_t base,
                 int64_t tile, int64_t d, const Scratch& s, const TileRows& found) {
  const int64_t group = t.heads / t.kv_heads;
  TileView view = {t, d, tile, 0, 0, {found.k, found.k_groups},
                   {found.v, found.v_groups}, found.k_scale, found.v_scale};
  // Read once, bytes are converted on the way; read often, or in odd sizes, before.
  const bool direct = d == t.dim && (Kind == kFloatStore ||
                                     item.count * group <= kRowTile);
  const uint8_t *k_rows[kKeyTile], *v_rows[kKeyTile];
  if (!direct) {
    load_tile<Kind>(found.k, found.k_groups, t.dim, d, s.keys);
    load_tile<Kind>(found.v, found.v_groups, t.dim, d, s.values);
    for (int i = 0; i < kKeyTile; ++i) {
      k_rows[i] = (const uint8_t*)(s.keys + i * d);
      v_rows[i] = (const uint8_t*)(s.values + i * d);
    }
    view.keys.rows = k_rows;
    view.values.rows = v_rows;
  }
  for (int64_t query = tile > base ? tile - base : 0; query < item.count; ++query) {
    view.position = base + query;
    if (first_visible(t, view.position) > tile + kKeyTile - 1) break;
    if (direct)
      attend_query<Kind>(view, item.kv_head, group, s, query * group);
    else
      attend_query<kFloatStore>(view, item.kv_head, group, s, query * group);
  }
}

template <int Kind>
void attend_store(const AttentionTask& t, const AttentionItem& item, float* memory) {
  const int64_t rows = item.count * (t.heads / t.kv_heads), d = (t.dim + 7) / 8 * 8;
  const int64_t length = t.query_start[item.sequence + 1] - t.query_start[item.sequence];
  const int64_t base = t.context_length[item.sequence] - length + item.first;
  Scratch s = carve(memory, rows, d);
  load_queries(t, item, d, s.queries);
  clear(s.now, rows, d);
  clear(s.all, rows, d);
  int64_t tile = first_visible(t, base) / kKeyTile * kKeyTile;
  int64_t end = base + item.count;
  if (item.part) {
    tile = std::max<int64_t>(tile, item.segment * kSegment);
    end = std::min<int64_t>(end, (item.segment + 1) * kSegment);
    s.now = {item.part, item.part + rows * d, item.part + rows * (d + 1)};
    clear(s.now, rows, d);
  }
  TileRows found[2];  // this tile's and the next one's
  if (tile < end) find_rows<Kind>(t, item, tile, found[0]);
  for (int odd = 0; tile < end; tile += kKeyTile, odd = !odd) {
    if (tile + kKeyTile < end)
      find_rows<Kind>(t, item, tile + kKeyTile, found[!odd]);
    attend_tile<Kind>(t, item, base, tile, d, s, found[odd]);
    if (!item.part && ((tile + kKeyTile) % kSegment == 0 || tile + kKeyTile >= end))
      end_segment(s, rows, d);
  }
  if (!item.part) store_results(t, item, d, s.all);
}

void attend(const AttentionTask& t, const AttentionItem& item, float* scratch) {
  switch (t.store_kind) {
    case kInt4Store: attend_store<kInt4Store>(t, item, scratch); break;
    case kInt8Store: attend_store<kInt8Store>(t, item, scratch); break;
    default: attend_store<kFloatStore>(t, item, scratch); break;
  }
}

// Merges the parts of an item that was computed in `segments` segments.
void merge_parts(const AttentionTask& t, const AttentionItem& item, int64_t segments,
                 float* memory) {
  const int64_t rows = item.count * (t.heads / t.kv_heads), d = (t.dim + 7) / 8 * 8;
  Scratch s = carve(memory, rows, d);
  clear(s.all, rows, d);
  for (int64_t i = 0; i < segments; ++i) {
    float* part = item.part + i * rows * (d + 2);
    s.now = {part, part + rows * d, part + rows * (d + 1)};
    for (int64_t r = 0; r < rows; ++r)
      merge_row(s.all.sums + r * d, s.all.peak + r, s.all.mass + r, part + r * d,
                s.now.peak[r], s.now.mass[r], d);
  }
  store_results(t, item, d, s.all);
}

}  // namespace
