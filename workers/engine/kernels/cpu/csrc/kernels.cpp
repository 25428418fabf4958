// The plain C interface that Python calls through ctypes.
#include <cstdio>
#include <exception>
#include <new>

#include "llama.h"

#define TM_EXPORT extern "C" __attribute__((visibility("default")))

using namespace mill;

// What a call answers; `Status` in cpp_library.py.
enum Status : int { kDone, kOutOfMemory, kFailed };

static thread_local char last_error[256];

// Runs a call's work: an exception that left this library would end the process.
template <typename Body>
static int guarded(const Body& body) noexcept {
  try {
    body();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (const std::exception& error) {
    std::snprintf(last_error, sizeof last_error, "%s", error.what());
  } catch (...) {
    std::snprintf(last_error, sizeof last_error, "unknown exception");
  }
  return kFailed;
}

// Raised with every change of a function's arguments or of a struct that Python fills
// in; cpp_library.py holds the same number and refuses a library of another one.
TM_EXPORT int tm_interface() { return 4; }

// What this thread's last call that answered kFailed met.
TM_EXPORT const char* tm_last_error() { return last_error; }

TM_EXPORT const char* tm_isa() { return active->name; }

// Forces an instruction set that this build and this CPU have; 0 if it is not there.
TM_EXPORT int tm_use(const char* name) {
  const KernelTable* best = detect();
  const KernelTable* known[] = {
      best, baseline_kernels(),
#if defined(TM_WITH_AVX2)
      best == baseline_kernels() ? best : avx2_kernels(),
#endif
  };
  for (const KernelTable* table : known)
    if (!std::strcmp(name, table->name)) {
      active = table;
      return 1;
    }
  return 0;
}

TM_EXPORT void tm_set_threads(int count) { thread_limit() = count < 1 ? 1 : count; }

TM_EXPORT int tm_linear(const float* x, int64_t rows, int64_t inputs, int64_t x_stride,
                        const int8_t* w, const float* w_scale, int64_t outputs,
                        const float* bias, float* y, int wide) {
  return guarded([&] {
    linear(x, rows, x_stride, {w, w_scale, bias, outputs, inputs, wide}, y);
  });
}

TM_EXPORT int tm_kv_write(const float* k, int64_t k_stride, const float* v,
                          int64_t v_stride, const int64_t* slots, int64_t tokens,
                          int64_t heads, int64_t dim, int64_t block_size, int64_t kind,
                          void* k_store, void* v_store, void* k_scale, void* v_scale) {
  return guarded([&] {
    kv_write(k, k_stride, v, v_stride, slots, tokens,
             {k_store, v_store, k_scale, v_scale, heads, dim, block_size, kind});
  });
}

TM_EXPORT int tm_attention(const AttentionTask* task, int64_t sequences) {
  return guarded([&] { attention(*task, sequences); });
}

TM_EXPORT int tm_rms_norm(const float* x, int64_t rows, int64_t x_stride,
                          const float* weight, int64_t n, float epsilon, float* y) {
  return guarded([&] { rms_norm_rows(x, rows, x_stride, weight, n, epsilon, y); });
}

TM_EXPORT int tm_silu_multiply(const float* gate_up, int64_t rows, int64_t inner,
                               float* y) {
  return guarded([&] { silu_multiply_rows(gate_up, rows, inner, y); });
}

TM_EXPORT int tm_rotate(float* x, int64_t rows, int64_t x_stride, int64_t heads,
                        int64_t dim, const float* cos, const float* sin) {
  return guarded([&] {
    rotate_rows(x, rows, x_stride, heads, 0, dim, cos, sin, nullptr, nullptr, 0.0f);
  });
}

TM_EXPORT int tm_llama_layer(const LlamaLayer* layer, const AttentionTask* task,
                             const int64_t* slots, const float* cos, const float* sin,
                             float* x, int64_t rows, int64_t sequences) {
  return guarded([&] {
    llama_layer(*layer, *task, slots, cos, sin, x, rows, sequences);
  });
}
