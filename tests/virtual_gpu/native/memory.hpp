// A card's memory: what a process may have of it, and the bookkeeping of PyTorch's caching allocator.
//
// The bytes lie in host memory. What is charged to a card follows c10/cuda/CUDACachingAllocator.cpp: rounding, segments
// of two pools, splitting and merging of blocks, one retry without the cache, then OutOfMemoryError.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iomanip>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "ledger.h"

namespace virtual_gpu {

constexpr int kMaxCards = 16;
constexpr int64_t kMiB = 1 << 20;

// The machine, as the environment describes it. Devices are numbered as CUDA does, cards as NVML does.
struct Machine {
  Ledger* ledger = nullptr;
  int64_t card_bytes = 0;
  int64_t context_bytes = 0;
  bool is_exclusive = false;  // compute mode "exclusive process": one process has a context
  std::vector<int> visible;   // the card of each device
  bool has_asserted = false;  // a kernel met an assert: every later call of this process fails
};
inline Machine machine;

inline thread_local int current_device = 0;
inline thread_local int charged_device = -1;  // whose memory the host's allocator gives out now; -1: the host's own

inline int num_devices() {
  return static_cast<int>(machine.visible.size());
}

// The codes are CUDA's own. torch raises torch.AcceleratorError where a CUDA call fails.
[[noreturn]] inline void cuda_failed(int code, const std::string& text) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, "CUDA error: " + text);
}

inline void check_device(int device) {
  if (device < 0 || device >= num_devices()) cuda_failed(101, "invalid device ordinal");
}

// ---- What processes hold of a card

inline Holding& own_holding(int card) {
  int32_t pid = getpid();
  for (Holding& holding : machine.ledger->holdings) {
    if (holding.pid == pid && holding.card == card) return holding;
  }
  for (Holding& holding : machine.ledger->holdings) {
    int32_t before = holding.pid;
    if (is_alive(before) || !__sync_bool_compare_and_swap(&holding.pid, before, pid)) continue;
    holding.card = card;
    holding.bytes = 0;
    return holding;
  }
  TORCH_CHECK(false, "The virtual machine has more than ", MAX_HOLDINGS, " processes on its cards.");
}

// Bytes that other processes hold of the card, or -1 where none has a context on it.
inline int64_t bytes_of_others(int card) {
  int64_t bytes = -1;
  for (const Holding& holding : machine.ledger->holdings) {
    bool is_others = holding.pid != getpid() && holding.card == card && is_alive(holding.pid);
    if (is_others) bytes = std::max<int64_t>(bytes, 0) + holding.bytes;
  }
  return bytes;
}

// ---- The caching allocator's bookkeeping

// A part of a segment; its neighbours in the segment are linked.
struct Block {
  int64_t address;
  int64_t size;
  bool is_small;
  bool is_used = false;
  Block* previous = nullptr;
  Block* next = nullptr;
};

struct BySize {
  bool operator()(const Block* one, const Block* other) const {
    return std::tie(one->size, one->address) < std::tie(other->size, other->address);
  }
};

struct Stats {
  int64_t allocated = 0, peak_allocated = 0;
  int64_t reserved = 0, peak_reserved = 0;
  int64_t num_retries = 0, num_ooms = 0;
};

inline std::string in_words(int64_t bytes) {
  std::ostringstream words;
  words << std::fixed << std::setprecision(2);
  if (bytes < 1024 * kMiB) {
    words << static_cast<double>(bytes) / kMiB << " MiB";
  } else {
    words << static_cast<double>(bytes) / (1024 * kMiB) << " GiB";
  }
  return words.str();
}

// One device's memory in this process. The caller holds `memory_mutex`.
class DeviceMemory {
 public:
  Stats stats;
  double fraction = 1.0;  // set_per_process_memory_fraction
  bool has_context = false;

  // A context costs memory, and in exclusive mode another process's context refuses it.
  void make_context(int device) {
    if (has_context) return;
    int card = machine.visible[device];
    if (machine.is_exclusive && bytes_of_others(card) >= 0) {
      cuda_failed(46, "CUDA-capable device(s) is/are busy or unavailable");
    }
    if (machine.context_bytes > free_bytes(device)) cuda_failed(2, "out of memory");
    has_context = true;
    publish(device);
  }

  int64_t free_bytes(int device) const {
    int64_t others = std::max<int64_t>(bytes_of_others(machine.visible[device]), 0);
    return machine.card_bytes - others - (has_context ? machine.context_bytes : 0) - stats.reserved;
  }

  Block* allocate(int device, int64_t asked) {
    make_context(device);
    int64_t size = round_up(std::max<int64_t>(asked, 1), 512);
    bool is_small = size <= kMiB;
    Block* block = take_cached(size, is_small);
    if (!block) block = reserve(device, size, is_small);
    split(block, size);
    block->is_used = true;
    stats.allocated += block->size;
    stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
    return block;
  }

  void free(Block* block) {
    stats.allocated -= block->size;
    block->is_used = false;
    if (Block* before = block->previous; before && !before->is_used) {
      pool(block).erase(before);
      absorb_next(before);
      block = before;
    }
    if (Block* after = block->next; after && !after->is_used) {
      pool(block).erase(after);
      absorb_next(block);
    }
    pool(block).insert(block);
  }

  // Gives back the segments that nothing uses.
  void empty_cache(int device) {
    for (auto& blocks : pools_) {
      for (auto it = blocks.begin(); it != blocks.end();) {
        Block* block = *it;
        bool is_whole_segment = !block->previous && !block->next;
        if (!is_whole_segment) {
          ++it;
          continue;
        }
        stats.reserved -= block->size;
        it = blocks.erase(it);
        delete block;
      }
    }
    publish(device);
  }

 private:
  std::set<Block*, BySize> pools_[2];
  int64_t next_address_ = 1;

  static int64_t round_up(int64_t bytes, int64_t unit) {
    return (bytes + unit - 1) / unit * unit;
  }

  std::set<Block*, BySize>& pool(const Block* block) {
    return pools_[block->is_small];
  }

  void publish(int device) const {
    if (has_context) own_holding(machine.visible[device]).bytes = machine.context_bytes + stats.reserved;
  }

  Block* take_cached(int64_t size, bool is_small) {
    Block wanted{0, size, is_small};
    auto found = pools_[is_small].lower_bound(&wanted);
    if (found == pools_[is_small].end()) return nullptr;
    Block* block = *found;
    pools_[is_small].erase(found);
    return block;
  }

  bool may_reserve(int device, int64_t bytes) const {
    bool is_in_fraction = stats.reserved + bytes <= fraction * machine.card_bytes;
    return is_in_fraction && bytes <= free_bytes(device);
  }

  // A new segment, after a retry without the cache.
  Block* reserve(int device, int64_t size, bool is_small) {
    int64_t segment = is_small ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : round_up(size, 2 * kMiB);
    if (!may_reserve(device, segment)) {
      stats.num_retries++;
      empty_cache(device);
    }
    if (!may_reserve(device, segment)) {
      stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_words(size), ". GPU ",
                       device, " has a total capacity of ", in_words(machine.card_bytes), " of which ",
                       in_words(free_bytes(device)), " is free. Of the allocated memory ", in_words(stats.allocated),
                       " is allocated by PyTorch on this virtual card.");
    }
    stats.reserved += segment;
    stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
    publish(device);
    auto* block = new Block{next_address_, segment, is_small};
    next_address_ += segment + 1;
    return block;
  }

  // Leaves the rest of a block in its pool, where the rest is worth it.
  void split(Block* block, int64_t size) {
    int64_t rest = block->size - size;
    if (block->is_small ? rest < 512 : rest <= kMiB) return;
    auto* left = new Block{block->address + size, rest, block->is_small};
    left->previous = block;
    left->next = block->next;
    if (left->next) left->next->previous = left;
    block->next = left;
    block->size = size;
    pool(left).insert(left);
  }

  static void absorb_next(Block* block) {
    Block* gone = block->next;
    block->size += gone->size;
    block->next = gone->next;
    if (block->next) block->next->previous = block;
    delete gone;
  }
};

inline std::mutex memory_mutex;
inline DeviceMemory memory_of[kMaxCards];

// ---- The host's allocator, which charges a device while a kernel of it runs

struct Charge {
  c10::DataPtr host_memory;
  int device;
  Block* block;
};

class ChargingAllocator final : public c10::Allocator {
 public:
  c10::Allocator* host = nullptr;

  // The context of a DataPtr is its own address, as raw_allocate wants it: charges are found by the address.
  c10::DataPtr allocate(size_t num_bytes) override {
    if (charged_device < 0 || num_bytes == 0) return host->allocate(num_bytes);
    std::lock_guard<std::mutex> lock(memory_mutex);
    Block* block = memory_of[charged_device].allocate(charged_device, magnified(static_cast<int64_t>(num_bytes)));
    c10::DataPtr host_memory = host->allocate(num_bytes);
    void* address = host_memory.get();
    charges_[address] = Charge{std::move(host_memory), charged_device, block};
    return {address, address, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

 private:
  std::unordered_map<void*, Charge> charges_;

  static void release(void* address);
};

// Never destroyed: tensors of other static objects are freed after it.
inline ChargingAllocator& charging_allocator = *new ChargingAllocator;

inline void ChargingAllocator::release(void* address) {
  Charge charge;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto found = charging_allocator.charges_.find(address);
    if (found != charging_allocator.charges_.end()) {
      charge = std::move(found->second);
      charging_allocator.charges_.erase(found);
      memory_of[charge.device].free(charge.block);
    }
  }
  if (!charge.host_memory && address) charging_allocator.host->raw_deleter()(address);
}

// ---- Pinned memory: the host's, remembered

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* host_memory = new c10::DataPtr(charging_allocator.host->allocate(std::max<size_t>(num_bytes, 1)));
    std::lock_guard<std::mutex> lock(mutex_);
    pinned_.insert(host_memory->get());
    return {host_memory->get(), host_memory, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return pinned_.count(address) > 0;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const void*> pinned_;

  static void release(void* context);
};

inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;

inline void PinnedAllocator::release(void* context) {
  auto* host_memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(pinned_allocator.mutex_);
    pinned_allocator.pinned_.erase(host_memory->get());
  }
  delete host_memory;
}

}  // namespace virtual_gpu
