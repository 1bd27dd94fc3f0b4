// The Python module: makes the machine, and answers what torch.cuda asks of its C part.
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/extension.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "device.hpp"
#include "kernel.hpp"
#include "memory.hpp"

namespace virtual_gpu {

void install(const std::string& ledger_path, int64_t card_bytes, int64_t context_bytes, bool is_exclusive) {
  machine.ledger = open_ledger(ledger_path.c_str());
  TORCH_CHECK(machine.ledger, "The ledger of the virtual machine cannot be opened: ", ledger_path);
  machine.card_bytes = card_bytes;
  machine.context_bytes = context_bytes;
  machine.is_exclusive = is_exclusive;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(&guard);
  charging_allocator.host = c10::GetCPUAllocator();
  constexpr uint8_t kAbovePlainAndMkldnn = 250;
  c10::SetAllocator(c10::kCPU, &charging_allocator, kAbovePlainAndMkldnn);
  register_kernels();
}

std::map<std::string, int64_t> memory_stats(int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const Stats& stats = memory_of[device].stats;
  return {
      {"allocated", stats.allocated},   {"peak_allocated", stats.peak_allocated},
      {"reserved", stats.reserved},     {"peak_reserved", stats.peak_reserved},
      {"num_retries", stats.num_retries}, {"num_ooms", stats.num_ooms},
  };
}

void reset_peaks(int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  Stats& stats = memory_of[device].stats;
  stats.peak_allocated = stats.allocated;
  stats.peak_reserved = stats.reserved;
}

void empty_cache() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (int device = 0; device < num_devices(); device++) memory_of[device].empty_cache(device);
}

void set_memory_fraction(double fraction, int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory_of[device].fraction = fraction;
}

// As cudaMemGetInfo, which makes a context.
std::pair<int64_t, int64_t> memory_info(int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory_of[device].make_context(device);
  return {memory_of[device].free_bytes(device), machine.card_bytes};
}

void name_card(const std::map<std::string, double>& of) {
  card = {
      .fp32 = of.at("fp32"),
      .tf32 = of.at("tf32"),
      .bf16 = of.at("bf16"),
      .fp16 = of.at("fp16"),
      .memory = of.at("memory"),
      .host_link = of.at("host_link"),
      .num_multiprocessors = of.at("num_multiprocessors"),
      .launch_seconds = of.at("launch_seconds"),
      .magnification = of.at("magnification"),
  };
  is_card_named = true;
}

void set_device(int device) {
  check_device(device);
  current_device = device;
}

// What the parent had on a card is not the child's; its next use of a card asks torch.cuda again, which refuses.
void forked() {
  torch::utils::set_requires_device_init(c10::kCUDA, true);
  for (DeviceMemory& memory : memory_of) memory.has_context = false;
}

}  // namespace virtual_gpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace virtual_gpu;
  module.def("install", &install);
  module.def("name_card", &name_card);
  module.def("host_seconds", &host_seconds);
  module.def("set_visible", [](const std::vector<int>& cards) { machine.visible = cards; });
  module.def("default_generator", &default_generator);
  module.def("memory_stats", &memory_stats);
  module.def("reset_peaks", &reset_peaks);
  module.def("empty_cache", &empty_cache);
  module.def("set_memory_fraction", &set_memory_fraction);
  module.def("memory_fraction", [](int device) { return memory_of[device].fraction; });
  module.def("memory_info", &memory_info);
  module.def("has_context", [](int device) { return memory_of[device].has_context; });
  module.def("device", [] { return current_device; });
  module.def("set_device", &set_device);
  module.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  module.def("sync_debug_mode", [] { return sync_debug_mode; });
  module.def("synchronize", [] { wait_for(current_device); });
  module.def("num_waits", [] { return num_waits.load(); });
  module.def("forked", &forked);
}
