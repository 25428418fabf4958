// A pool of helper threads for work that lasts microseconds.
//
// The caller works too and waits only for items that a helper has begun: when other
// processes hold the cores, it simply does everything itself. An OpenMP team meets at a
// barrier instead, and stalls for whole time slices on a busy machine.
#pragma once
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mill {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// In the one block of all of this library's thread-local data.
inline volatile char& thread_data() {
  static thread_local volatile char data = 0;
  return data;
}

class Pool {
 public:
  using Call = void (*)(const void* body, int64_t item);

  explicit Pool(int helpers) : helpers_(helpers), process_(getpid()) {
    // With fewer helpers the caller does more itself. Throwing here would free the
    // pool under the helpers that have begun.
    int begun = 0;
    try {
      for (; begun < helpers; ++begun) std::thread([this] { help(); }).detach();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "tokenmill kernels: %d of %d helper threads, then: %s\n",
                   begun, helpers, error.what());
    }
    while (ready_.load() < begun) std::this_thread::yield();
  }

  int helpers() const { return helpers_; }
  bool alive() const { return process_ == getpid(); }  // threads do not survive fork

  // Calls call(body, item) once for each item below `count`, on any thread. Throws what
  // the first failing item threw, after all others: until then helpers use `body`.
  void run(uint32_t count, Call call, const void* body) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) {  // another thread computes: its work comes first
      for (uint32_t i = 0; i < count; ++i) call(body, i);
      return;
    }
    call_ = call;
    body_ = body;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    ++generation_;
    ticket_.store((uint64_t)generation_ << 32 | count);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    while (work_once()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins)
      if (spins < 2000) pause_briefly();
      else std::this_thread::yield();
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

 private:
  // The ticket is the generation and the items left. Fields of a generation cannot
  // change while one of its items is claimed and not done, so they are read after.
  bool work_once() {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while ((uint32_t)seen > 0) {
      if (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel))
        continue;
      try {
        call_(body_, count_ - (uint32_t)seen);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  // A thread gets its arena, thread-local data and what exceptions need at first use.
  // Where no memory is left by then, the loader ends the process: take them now.
  static void take_thread_memory() {
    try {
      throw std::bad_alloc();
    } catch (const std::bad_alloc&) {
    }
    thread_data() = 1;
  }

  void help() {
    take_thread_memory();
    ready_.fetch_add(1);
    // Long enough to bridge the gap between two operations of a layer.
    constexpr auto kSpin = std::chrono::microseconds(100);
    for (;;) {
      auto until = std::chrono::steady_clock::now() + kSpin;
      for (;;) {
        if (work_once()) until = std::chrono::steady_clock::now() + kSpin;
        else if (std::chrono::steady_clock::now() > until) break;
        for (int i = 0; i < 16; ++i) pause_briefly();
      }
      std::unique_lock<std::mutex> guard(sleep_);
      sleeping_.fetch_add(1);
      wake_.wait(guard, [this] { return (uint32_t)ticket_.load() > 0; });
      sleeping_.fetch_sub(1);
    }
  }

  const int helpers_;
  const pid_t process_;
  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::atomic<int> ready_{0}, sleeping_{0};
  Call call_ = nullptr;
  const void* body_ = nullptr;
  uint32_t count_ = 0, generation_ = 0;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // `done_` publishes it
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
};

inline std::atomic<int>& thread_limit() {
  static std::atomic<int> limit{1};
  return limit;
}

// The pool of this process and thread limit. Old ones are left alone, never destroyed:
// their sleeping threads may still look at them.
inline Pool* current_pool() {
  static std::mutex change;
  static std::atomic<Pool*> pool{nullptr};
  const int helpers = thread_limit() - 1;
  Pool* now = pool.load();
  if (now && now->helpers() == helpers && now->alive()) return now;
  std::lock_guard<std::mutex> guard(change);
  now = pool.load();
  if (!now || now->helpers() != helpers || !now->alive()) {
    now = new Pool(helpers);
    pool.store(now);
  }
  return now;
}

// Calls body(item) once for each item below `count`; whoever is free takes the next.
template <typename Body>
void parallel(int64_t count, const Body& body) {
  if (thread_limit() == 1 || count < 2) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  current_pool()->run(
      (uint32_t)count,
      [](const void* b, int64_t item) { (*static_cast<const Body*>(b))(item); }, &body);
}

}  // namespace mill
