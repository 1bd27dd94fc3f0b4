// What PyTorch asks of a device type beside kernels: the guard (current device, streams, events), the generators, and
// the CUDA hooks, by which a build that finds no driver would otherwise say that there is no card.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>
#include <string>
#include <vector>

#include "clock.hpp"
#include "memory.hpp"

namespace virtual_gpu {

// ---- Streams and events: one stream a device, on which everything has run when the call returns, but for its time

struct Event {
  double recorded_seconds;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device getDevice() const override {
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device));
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    current_device = device.index();
    return before;
  }
  void setDevice(c10::Device device) const override {
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high_priority*/) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_in_operation(stream.device_index(), "Stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& /*data*/, const c10::Stream& /*stream*/) const override {}

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{now_seconds(stream.device_index())};
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* event) const override {
    return has_passed(static_cast<Event*>(event)->recorded_seconds);
  }
  void synchronizeEvent(void* event) const override {
    wait_until(static_cast<Event*>(event)->recorded_seconds);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    return 1e3 * (static_cast<Event*>(second)->recorded_seconds - static_cast<Event*>(first)->recorded_seconds);
  }
};
inline Guard guard;

// ---- Generators: the host's, one for each device

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  }
};

inline const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxCards; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return (*generators)[device];
}

// ---- Hooks: "no" to cuDNN, so that convolutions, norms and recurrent layers take PyTorch's native path

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  int getNumGPUs() const override {
    return num_devices();
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return memory_of[device].has_context;
  }

  c10::DeviceIndex current_device() const override {
    return static_cast<c10::DeviceIndex>(virtual_gpu::current_device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    virtual_gpu::current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = current_device();
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    wait_for(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? virtual_gpu::current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? virtual_gpu::current_device : device);
  }

  c10::Allocator* getCUDADeviceAllocator() const override {
    return &charging_allocator;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned_allocator.is_pinned(address);
  }
  c10::Device getDeviceFromPtr(void* /*address*/) const override {
    return guard.getDevice();
  }

  // Scaled dot product attention asks for them before it chooses a backend.
  long versionCuDNN() const override {
    return 91000;
  }
  long versionRuntimeCuDNN() const override {
    return 91000;
  }
  long versionCUDART() const override {
    return 13020;
  }
  std::string showConfig() const override {
    return "virtual";
  }
};

// torch makes its hooks once, while it is imported: this library is loaded before it.
struct RegisterHooks {
  RegisterHooks() {
    auto make = [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(); };
    at::CUDAHooksRegistry()->Register("CUDAHooks", make, c10::REGISTRY_PREFERRED);
  }
};
inline RegisterHooks register_hooks;

}  // namespace virtual_gpu
