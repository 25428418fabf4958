// Each operation over a whole step, spread over the threads.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "threads.h"

namespace mill {

constexpr int64_t kRowBlockBytes = 192 * 1024;  // quantized rows that stay in L2
constexpr int64_t kSerialElements = 16 * 1024;  // below this, waking threads costs more
constexpr int64_t kPieceProducts = 128 * 1024;   // multiply-adds per claimed piece
enum : int { kNarrow, kWide, kTurned, kScales, kScratch, kParts };  // workspaces in use
constexpr int64_t kAttentionRows = 48;          // query rows per attention item

// Grows and never shrinks; one per thread, so calls never share memory. `Use` keeps
// buffers apart that are alive at the same time.
template <typename T, int Use = 0>
T* workspace(size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

template <typename T>
const T* quantize_rows(const float* x, int64_t rows, int64_t inputs, int64_t stride,
                       int64_t padded, float* scale) {
  T* q = workspace<T>(rows * padded);
  const auto one = [&](int64_t row) {
    if constexpr (sizeof(T) == 2)
      active->quantize_int16(x + row * stride, inputs, padded, q + row * padded,
                             scale + row);
    else
      active->quantize_int8(x + row * stride, inputs, padded, q + row * padded,
                            scale + row);
  };
  if (rows * inputs < kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) one(row);
  } else {
    constexpr int64_t kChunk = 8;
    parallel((rows + kChunk - 1) / kChunk, [&](int64_t chunk) {
      const int64_t end = std::min(rows, (chunk + 1) * kChunk);
      for (int64_t row = chunk * kChunk; row < end; ++row) one(row);
    });
  }
  return q;
}

template <typename T>
void run_linear(LinearTask task, const float* x, int64_t x_stride, int64_t inputs) {
  const int64_t rows = task.rows;
  float* scale = workspace<float, kScales>(rows);
  const T* q =
      quantize_rows<T>(x, rows, inputs, x_stride, task.padded, scale);
  const int64_t block = std::max<int64_t>(
      kMaxRowTile, kRowBlockBytes / (task.padded * (int64_t)sizeof(T)) / kMaxRowTile *
                       kMaxRowTile);
  const int64_t tiles = (task.outputs + kOutputTile - 1) / kOutputTile;
  // Pieces small enough to share out evenly, large enough to be worth claiming.
  const int64_t work = std::min(rows, block) * task.outputs * inputs;
  const int64_t parts = std::clamp<int64_t>(work / kPieceProducts, 1,
                                            std::min<int64_t>(tiles, 8 * thread_limit()));
  const int64_t blocks = (rows + block - 1) / block;
  const auto tiles_of = [&](int64_t item) {
    const int64_t first_row = item / parts * block, part = item % parts;
    LinearTask piece = task;
    piece.rows = std::min(block, rows - first_row);
    piece.x = q + first_row * task.padded;
    piece.x_scale = scale + first_row;
    piece.y = task.y + first_row * task.y_stride;
    const int64_t first = tiles * part / parts, end = tiles * (part + 1) / parts;
    if constexpr (sizeof(T) == 2)
      active->linear_int16(piece, first, end);
    else
      active->linear_int8(piece, first, end);
  };
  parallel(blocks * parts, tiles_of);
}

// A packed weight as Python made it.
struct Linear {
  const int8_t* data;
  const float* scale;
  const float* bias;  // or null
  int64_t outputs, inputs;
  int64_t wide;       // INT16 activations, else INT8
};

// y[rows, outputs] = x @ w.T + bias
inline void linear(const float* x, int64_t rows, int64_t x_stride, const Linear& w,
                   float* y) {
  const int64_t padded = (w.inputs + 3) / 4 * 4;
  const LinearTask task = {nullptr, nullptr,   rows,   w.data, w.scale,
                           w.bias,  w.outputs, padded, y,      w.outputs};
  if (w.wide)
    run_linear<int16_t>(task, x, x_stride, w.inputs);
  else
    run_linear<int8_t>(task, x, x_stride, w.inputs);
}

// Calls body(row) for all rows, on several threads if they hold enough elements.
template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  if (rows * width < kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  constexpr int64_t kChunk = 8;
  parallel((rows + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t end = std::min(rows, (chunk + 1) * kChunk);
    for (int64_t row = chunk * kChunk; row < end; ++row) body(row);
  });
}

struct Store {
  void *k, *v, *k_scale, *v_scale;  // no scales for a float store
  int64_t heads, dim, block_size, kind;
};

// Writes one head's K or V into its slot.
inline void write_head(const float* x, const Store& s, void* store, void* scale,
                       int64_t row) {
  switch (s.kind) {
    case kInt4Store:
      active->quantize_int4(x, s.dim, (uint8_t*)store + row * (s.dim / 2),
                            (uint16_t*)scale + row * int4_groups(s.dim));
      break;
    case kInt8Store:
      active->quantize_head(x, s.dim, (int8_t*)store + row * s.dim,
                            (float*)scale + row);
      break;
    default:
      std::memcpy((float*)store + row * s.dim, x, s.dim * sizeof(float));
  }
}

// Writes K and V of each token into its slot.
inline void kv_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                     const int64_t* slots, int64_t tokens, const Store& s) {
  for_rows(tokens, s.heads * s.dim, [&](int64_t token) {
    const int64_t block = slots[token] / s.block_size;
    const int64_t offset = slots[token] % s.block_size;
    for (int64_t head = 0; head < s.heads; ++head) {
      const int64_t row = (block * s.heads + head) * s.block_size + offset;
      write_head(k + token * k_stride + head * s.dim, s, s.k, s.k_scale, row);
      write_head(v + token * v_stride + head * s.dim, s, s.v, s.v_scale, row);
    }
  });
}

// Cuts one sequence's queries into items of at most `most`.
inline void cut_queries(const AttentionTask& t, int32_t sequence, int32_t most,
                        std::vector<AttentionItem>& items) {
  const int32_t length = t.query_start[sequence + 1] - t.query_start[sequence];
  // Late queries see the most keys: they go first, so that no thread ends alone.
  for (int32_t end = length; end > 0;) {
    const int32_t first = std::max(0, (end - 1) / most * most);
    for (int32_t head = 0; head < t.kv_heads; ++head)
      items.push_back({sequence, head, first, end - first, 0, nullptr});
    end = first;
  }
}

// Computes few items segment by segment, so that all threads share a long context.
inline void attend_segments(const AttentionTask& t,
                            const std::vector<AttentionItem>& items, size_t floats) {
  const int64_t group = t.heads / t.kv_heads, d = (t.dim + 7) / 8 * 8;
  thread_local std::vector<AttentionItem> pieces;
  pieces.clear();
  int64_t size = 0;
  const auto segments_of = [&](const AttentionItem& item) {
    return (t.context_length[item.sequence] + kSegment - 1) / kSegment;
  };
  for (const AttentionItem& item : items)
    size += segments_of(item) * item.count * group * (d + 2);
  float* part = workspace<float, kParts>(size);
  for (AttentionItem item : items)
    for (item.segment = 0; item.segment < segments_of(item); ++item.segment) {
      item.part = part;
      pieces.push_back(item);
      part += item.count * group * (d + 2);
    }
  const AttentionItem* list = pieces.data();
  parallel((int64_t)pieces.size(), [&](int64_t i) {
    active->attend(t, list[i], workspace<float, kScratch>(floats));
  });
  for (size_t i = 0; i < pieces.size(); i += segments_of(pieces[i]))
    active->merge_parts(t, pieces[i], segments_of(pieces[i]),
                        workspace<float, kScratch>(floats));
}

inline void attention(const AttentionTask& t, int64_t sequences) {
  const int64_t group = t.heads / t.kv_heads;
  const int32_t most = (int32_t)std::max<int64_t>(1, kAttentionRows / group);
  thread_local std::vector<AttentionItem> items;
  items.clear();
  int32_t longest = 0;
  for (int32_t s = 0; s < sequences; ++s) {
    cut_queries(t, s, most, items);
    longest = std::max(longest, t.context_length[s]);
  }
  const AttentionItem* list = items.data();
  const size_t floats = attention_scratch(most * group, t.dim);
  const bool few = (int64_t)items.size() < 3 * thread_limit() && thread_limit() > 1;
  if (few && longest > kSegment) {
    attend_segments(t, items, floats);
    return;
  }
  parallel((int64_t)items.size(), [&](int64_t i) {
    active->attend(t, list[i], workspace<float, kScratch>(floats));
  });
}

}  // namespace mill
