// The one kernel of every CUDA operator: it labels the arguments as the CPU's, runs the CPU's kernel on them, labels the
// results as the card's and puts the arguments' labels back. Autograd, autocast and dispatch above it are CUDA's.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "costs.hpp"
#include "device.hpp"
#include "memory.hpp"

namespace virtual_gpu {

using c10::OperatorHandle;
using torch::jit::Stack;

// ---- Labels

struct TensorDevice : c10::TensorImpl {
  static void set(c10::TensorImpl* tensor, c10::Device device) {
    static_cast<TensorDevice*>(tensor)->device_opt_ = device;
  }
};

struct GeneratorDevice : c10::GeneratorImpl {
  static void set(c10::GeneratorImpl* generator, c10::Device device) {
    static_cast<GeneratorDevice*>(generator)->device_ = device;
  }
};

inline void label_storage(c10::StorageImpl* storage, c10::Device device) {
  storage->_mutable_data_ptr_no_checks().unsafe_set_device(device);
}

// A tensor and its storage must agree: inside a CPU kernel TensorIterator looks at both.
inline void label_tensor(c10::TensorImpl* tensor, c10::Device device) {
  tensor->_change_backend_component_keys(device);
  TensorDevice::set(tensor, device);
  if (tensor->has_storage()) label_storage(tensor->unsafe_storage().unsafeGetStorageImpl(), device);
}

template <class Visit>
void each_tensor(const IValue& value, Visit visit) {
  auto visit_defined = [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor.unsafeGetTensorImpl());
  };
  if (value.isTensor()) {
    visit_defined(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& entry : value.toListRef()) {
      if (entry.isTensor()) visit_defined(entry.toTensor());
    }
  }
}

// ---- What is known of an operator

struct Traits {
  std::string name;
  bool may_mix_devices;       // a copy, or indices on the host
  bool refuses_host_scalars;  // optimizers' and GradScaler's kernels take no CPU scalar tensor
  bool is_copy;
  bool always_waits;  // its result's size or value is read by the host
  bool indexes;       // a mask among its indices is counted by the host
  bool draws;
  Work work;
};

inline Traits traits_of(const OperatorHandle& op) {
  static const std::set<std::string> kMixing = {
      "aten::copy_",
      "aten::_foreach_copy_",
      "aten::index.Tensor",
      "aten::index.Tensor_out",
      "aten::_unsafe_index.Tensor",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor",
  };
  static const std::set<std::string> kWaiting = {
      "aten::_local_scalar_dense", "aten::nonzero",  "aten::masked_select", "aten::equal",
      "aten::_unique2",            "aten::bincount", "aten::unique_dim",    "aten::repeat_interleave.Tensor",
  };
  static const std::set<std::string> kIndexing = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};
  std::string name = toString(op.operator_name());
  bool is_for_optimizers = name.rfind("aten::_amp_", 0) == 0 || name.rfind("aten::_fused_", 0) == 0;
  return {
      .name = name,
      .may_mix_devices = kMixing.count(name) > 0,
      .refuses_host_scalars = is_for_optimizers,
      .is_copy = name == "aten::copy_",
      .always_waits = kWaiting.count(name) > 0,
      .indexes = kIndexing.count(name) > 0,
      .draws = op.hasTag(at::Tag::nondeterministic_seeded),
      .work = work_of(op.schema()),
  };
}

// Filled when kernels are registered, only read afterwards.
inline auto& traits_by_schema = *new std::unordered_map<const c10::FunctionSchema*, Traits>;

// ---- The arguments of one call

class Arguments {
 public:
  int device = -1;

  Arguments(const Traits& traits, const Stack& stack, size_t num_arguments)
      : kept_(stack.end() - num_arguments, stack.end()) {
    for (const IValue& value : kept_) note(traits, value);
    if (device < 0) device = current_device;
    check_device(device);
    bool is_mixed = is_tensor_on_host_ || (traits.refuses_host_scalars && is_scalar_on_host_);
    if (!tensors_.empty() && is_mixed && !traits.may_mix_devices) refuse_mixing(traits, "cpu");
  }

  // In place: views and the caller's own tensors are the same objects.
  void label_as_host(Stack& stack) {
    for (auto& [tensor, _] : tensors_) label_tensor(tensor, c10::Device(c10::kCPU));
    for (auto& [storage, _] : storages_) label_storage(storage, c10::Device(c10::kCPU));
    for (auto& [generator, _] : generators_) GeneratorDevice::set(generator, c10::Device(c10::kCPU));
    for (auto it = stack.end() - kept_.size(); it != stack.end(); ++it) {
      if (it->isDevice() && it->toDevice().is_cuda()) *it = IValue(c10::Device(c10::kCPU));
    }
  }

  void label_back() {
    for (auto& [storage, before] : storages_) label_storage(storage, before);
    for (auto& [tensor, before] : tensors_) label_tensor(tensor, before);
    for (auto& [generator, before] : generators_) GeneratorDevice::set(generator, before);
  }

  // Results are new, but for arguments that an operator returns.
  void label_result(const IValue& result) {
    each_tensor(result, [&](c10::TensorImpl* tensor) {
      if (tensor->device_type() == c10::kCPU && !arguments_.count(tensor)) {
        label_tensor(tensor, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
      }
    });
  }

  bool has_generator() const {
    return !generators_.empty();
  }
  bool crosses_from_or_to_host() const {
    return is_tensor_on_host_ || is_scalar_on_host_;
  }
  const IValue& operator[](size_t index) const {
    return kept_[index];
  }
  const std::vector<IValue>& all() const {
    return kept_;
  }

 private:
  std::vector<IValue> kept_;  // so that tensors live to the end, whatever the kernel drops
  std::vector<std::pair<c10::TensorImpl*, c10::Device>> tensors_;
  std::vector<std::pair<c10::StorageImpl*, c10::Device>> storages_;
  std::vector<std::pair<c10::GeneratorImpl*, c10::Device>> generators_;
  std::set<c10::TensorImpl*> arguments_;
  bool is_tensor_on_host_ = false;
  bool is_scalar_on_host_ = false;

  void note(const Traits& traits, const IValue& value) {
    if (value.isDevice()) {
      c10::Device asked = value.toDevice();
      if (asked.is_cuda()) device = asked.has_index() ? asked.index() : current_device;
    } else if (value.isStorage()) {
      auto* storage = value.toStorage().unsafeGetStorageImpl();
      if (storage->device().is_cuda()) storages_.emplace_back(storage, storage->device());
    } else if (value.isGenerator()) {
      auto* generator = value.toGenerator().unsafeGetGeneratorImpl();
      if (generator->device().is_cuda()) generators_.emplace_back(generator, generator->device());
    } else {
      each_tensor(value, [&](c10::TensorImpl* tensor) { note_tensor(traits, tensor); });
    }
  }

  void note_tensor(const Traits& traits, c10::TensorImpl* tensor) {
    bool is_new = arguments_.insert(tensor).second;
    if (!is_new) return;
    if (tensor->device_type() == c10::kCPU) {
      (tensor->dim() > 0 ? is_tensor_on_host_ : is_scalar_on_host_) = true;
      return;
    }
    if (tensor->device_type() != c10::kCUDA) return;
    bool is_elsewhere = device >= 0 && device != tensor->device().index() && tensor->dim() > 0;
    if (is_elsewhere && !traits.may_mix_devices) refuse_mixing(traits, tensor->device().str());
    tensors_.emplace_back(tensor, tensor->device());
    if (device < 0) device = tensor->device().index();
  }

  [[noreturn]] void refuse_mixing(const Traits& traits, const std::string& other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                " and ", other, "! (when checking arguments of ", traits.name, ")");
  }
};

// ---- Random numbers: kernels without a generator draw from the host's default one, which lends itself to the card

class LendDraws {
 public:
  LendDraws(bool is_wanted, int device) : generator_(is_wanted ? &of(default_generator(device)) : nullptr) {
    if (generator_) swap();
  }
  ~LendDraws() {
    if (generator_) swap();
  }

 private:
  at::CPUGeneratorImpl* generator_;

  static at::CPUGeneratorImpl& of(const at::Generator& generator) {
    return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }

  void swap() {
    at::CPUGeneratorImpl& host = of(at::detail::getDefaultCPUGenerator());
    std::lock_guard<std::mutex> lock(host.mutex_);
    auto engine = host.engine();
    auto next_float = host.next_float_normal_sample();
    auto next_double = host.next_double_normal_sample();
    host.set_engine(generator_->engine());
    host.set_next_float_normal_sample(generator_->next_float_normal_sample());
    host.set_next_double_normal_sample(generator_->next_double_normal_sample());
    generator_->set_engine(engine);
    generator_->set_next_float_normal_sample(next_float);
    generator_->set_next_double_normal_sample(next_double);
  }
};

// ---- The kernel

inline bool waits_on_cuda(const Traits& traits, const Arguments& arguments) {
  bool waits = traits.always_waits;
  if (traits.is_copy) {
    bool is_non_blocking = arguments[2].toBool();
    bool is_empty = arguments[0].toTensor().numel() == 0;
    waits = arguments.crosses_from_or_to_host() && !is_non_blocking && !is_empty;
  }
  if (traits.indexes) {
    each_tensor(arguments[1], [&](c10::TensorImpl* index) { waits |= index->dtype() == caffe2::TypeMeta::Make<bool>(); });
  }
  return waits;
}

inline void spend_time(const OperatorHandle& op, const Traits& traits, const Arguments& arguments, const Stack& stack) {
  if (!is_card_named) return;
  if (traits.is_copy && arguments.crosses_from_or_to_host()) {
    issue(arguments.device, host_copy_seconds(arguments[0].toTensor()));
  } else if (traits.work.kind != Work::kNone) {
    c10::ArrayRef<IValue> results(stack.data() + stack.size() - op.schema().returns().size(), stack.data() + stack.size());
    issue(arguments.device, work_seconds(traits.work, op.schema(), arguments.all(), results));
  }
}

// An index out of range is an exception on the host, and on a card an assert that no later call of the process survives.
inline void assert_on_device(const c10::IndexError& error) {
  std::string text = error.what_without_backtrace();
  bool is_met_by_embedding = text.find("index out of range in self") != std::string::npos;
  bool is_met_by_index = text.find("is out of bounds") != std::string::npos;
  if (!is_met_by_embedding && !is_met_by_index) return;
  machine.has_asserted = true;
  cuda_failed(710, "device-side assert triggered");
}

inline void run_on_host(const OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(
      c10::autocast_dispatch_keyset | c10::autograd_dispatch_keyset |
      c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  try {
    op.callBoxed(stack);
  } catch (const c10::IndexError& error) {
    assert_on_device(error);
    throw;
  }
}

inline void kernel(const OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  if (machine.has_asserted) cuda_failed(710, "device-side assert triggered");
  const Traits& traits = traits_by_schema.at(&op.schema());
  Arguments arguments(traits, *stack, op.schema().arguments().size());
  bool waits = waits_on_cuda(traits, arguments);
  if (waits) check_may_wait(traits.name.c_str());
  LendDraws draws(traits.draws && !arguments.has_generator(), arguments.device);
  int charged_before = charged_device;
  charged_device = arguments.device;
  arguments.label_as_host(*stack);
  auto undo = [&] {
    charged_device = charged_before;
    arguments.label_back();
  };
  try {
    run_on_host(op, stack);
  } catch (...) {
    undo();
    throw;
  }
  for (auto it = stack->end() - op.schema().returns().size(); it != stack->end(); ++it) arguments.label_result(*it);
  undo();
  spend_time(op, traits, arguments, *stack);
  if (waits) wait_for(arguments.device);
}

// ---- Operators whose CUDA kernels do what no CPU kernel does

// Flash and memory-efficient attention have no CPU kernel of that name: the choice is always the plain formula.
inline void choose_math_attention(const OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, static_cast<int64_t>(0));
}

// softmax(half, dtype=float) is one CUDA kernel: here the input is cast first. Arguments: input, dim, half_to_float.
inline void softmax(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  IValue& half_to_float = *(stack->end() - 1);
  if (half_to_float.toBool()) {
    IValue& input = *(stack->end() - 3);
    input = IValue(input.toTensor().to(at::kFloat));
    half_to_float = IValue(false);
  }
  kernel(op, keys, stack);
}

// Its backward: the gradient is cast back. Arguments: grad_output, output, dim, input_dtype.
inline void softmax_backward(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  IValue& input_dtype = *(stack->end() - 1);
  at::ScalarType wanted = input_dtype.toScalarType();
  input_dtype = IValue((stack->end() - 4)->toTensor().scalar_type());
  kernel(op, keys, stack);
  at::Tensor gradient = torch::jit::pop(*stack).toTensor();
  torch::jit::push(*stack, gradient.to(wanted));
}

// With one stream, no other uses the memory.
inline void record_stream(const OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

// ---- Registration

inline c10::KernelFunction kernel_of(const std::string& name) {
  using c10::KernelFunction;
  if (name == "aten::_fused_sdp_choice") return KernelFunction::makeFromBoxedFunction<&choose_math_attention>();
  if (name == "aten::_softmax" || name == "aten::_log_softmax") {
    return KernelFunction::makeFromBoxedFunction<&softmax>();
  }
  if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    return KernelFunction::makeFromBoxedFunction<&softmax_backward>();
  }
  if (name == "aten::record_stream") return KernelFunction::makeFromBoxedFunction<&record_stream>();
  return KernelFunction::makeFromBoxedFunction<&kernel>();
}

inline void register_kernels() {
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  // Those that choose among cuDNN and others by the device, in place of the choice of a CPU.
  std::vector<c10::OperatorName> names = {
      {"aten::copy_", ""},
      {"aten::convolution", ""},
      {"aten::_convolution", ""},
      {"aten::convolution_backward", ""},
      {"aten::convolution_overrideable", ""},
  };
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    bool is_atens = name.name.rfind("aten::", 0) == 0;
    if (is_atens && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  for (const c10::OperatorName& name : names) {
    OperatorHandle op = dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    traits_by_schema.emplace(&op.schema(), traits_of(op));
    c10::KernelFunction chosen = kernel_of(toString(name));
    registered->push_back(
        dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(chosen), std::nullopt, nullptr, "virtual GPU"));
  }
}

}  // namespace virtual_gpu
