// Time on the cards. Kernels run on the host as they are called, so by the host's clock a card is never behind.
//
// Cards that are named (site/named_cards.py) have a clock of virtual seconds instead. The host issues operators one after
// another, each for `launch_seconds` of its own; a card works on them in their order, each for what it costs there
// (costs.hpp); a wait brings the host to where the card is. The host's other work takes no time, and no two runs differ.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace virtual_gpu {

struct NamedCard {
  double fp32, tf32, bf16, fp16;  // FLOP/s of matrix products; tf32 is 0 where there is none
  double memory, host_link;       // bytes per second
  double num_multiprocessors, launch_seconds, magnification;
};
inline NamedCard card{};
inline bool is_card_named = false;

struct Clock {
  std::mutex mutex;  // autograd issues operators from threads of its own
  double host_seconds = 0;
  std::array<double, 16> done_seconds{};  // when a device will have done what was issued to it
};
inline Clock& virtual_clock = *new Clock;

inline double host_seconds() {
  std::lock_guard<std::mutex> lock(virtual_clock.mutex);
  return virtual_clock.host_seconds;
}

// When the device will have done all that was issued to it so far.
inline double now_seconds(int device) {
  if (!is_card_named) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  std::lock_guard<std::mutex> lock(virtual_clock.mutex);
  return std::max(virtual_clock.host_seconds, virtual_clock.done_seconds[device]);
}

inline void issue(int device, double seconds) {
  std::lock_guard<std::mutex> lock(virtual_clock.mutex);
  virtual_clock.host_seconds += card.launch_seconds;
  double& done = virtual_clock.done_seconds[device];
  done = std::max(done, virtual_clock.host_seconds) + seconds;
}

// ---- Waits

inline std::atomic<int64_t> num_waits = 0;

inline void wait_until(double seconds) {
  num_waits++;
  std::lock_guard<std::mutex> lock(virtual_clock.mutex);
  if (is_card_named) virtual_clock.host_seconds = std::max(virtual_clock.host_seconds, seconds);
}

inline void wait_for(int device) {
  wait_until(now_seconds(device));
}

// Asking takes a moment, so that a host that asks again and again meets the event.
inline bool has_passed(double seconds) {
  if (!is_card_named) return true;
  constexpr double kAskingSeconds = 1e-6;
  std::lock_guard<std::mutex> lock(virtual_clock.mutex);
  virtual_clock.host_seconds += kAskingSeconds;
  return virtual_clock.host_seconds >= seconds;
}

// torch.cuda.set_sync_debug_mode: 0 allows operations that wait, 1 warns, 2 refuses them.
inline int sync_debug_mode = 0;

inline void check_may_wait(const char* name) {
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation (", name, ")");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", name, ")");
}

inline void wait_in_operation(int device, const char* name) {
  check_may_wait(name);
  wait_for(device);
}

// ---- Bytes: a named card takes every tensor for as many times as many elements as a matrix of its size magnified has

inline int64_t magnified(int64_t num_bytes) {
  return is_card_named ? static_cast<int64_t>(num_bytes * card.magnification * card.magnification) : num_bytes;
}

}  // namespace virtual_gpu
