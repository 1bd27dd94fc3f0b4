// A card's time. Kernels run on the host as they are called, so a card is never behind and its clock is the host's.
//
// What a card's own clock would need passes here: every kernel (`run_on_host` in kernel.hpp), every event
// (`now_seconds`) and every wait of the host for a card (`wait_for`).
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace virtual_gpu {

inline double now_seconds(int /*device*/) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::atomic<int64_t> num_waits = 0;

inline void wait_for(int /*device*/) {
  num_waits++;
}

// torch.cuda.set_sync_debug_mode: 0 allows operations that wait, 1 warns, 2 refuses them.
inline int sync_debug_mode = 0;

inline void wait_in_operation(int device, const char* name) {
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation (", name, ")");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", name, ")");
  wait_for(device);
}

}  // namespace virtual_gpu
