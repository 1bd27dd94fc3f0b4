// What an operator takes on a named card: the longer of its arithmetic and its memory traffic.
//
// Only matrix products and convolutions have arithmetic that counts. Every dimension of a matrix is taken for
// `magnification` times as long: so a product takes its cube as many operations, and its square as many bytes.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "clock.hpp"

namespace virtual_gpu {

using c10::IValue;

// ---- What is known of an operator from its schema

struct Work {
  enum Kind { kNone, kTraffic, kProduct, kConvolution, kConvolutionBackward } kind = kTraffic;
  int left = 0;             // where a product's first factor is among the arguments; the second follows it
  bool reads_first = true;  // its first argument, which it overwrites or takes a few rows of
  bool gathers = false;     // it reads of its first argument as much as it writes
};

inline Work work_of(const c10::FunctionSchema& schema) {
  static const std::set<std::string> kNoKernel = {"aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_",
                                                  "aten::_local_scalar_dense"};
  static const std::set<std::string> kGathers = {"aten::embedding", "aten::index", "aten::gather", "aten::index_select"};
  static const std::set<std::string> kOverwrites = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_",
                                                    "aten::_foreach_copy_"};
  const std::string& name = schema.name();
  bool is_view = std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
  if (is_view || kNoKernel.count(name)) return {.kind = Work::kNone};
  if (name == "aten::mm" || name == "aten::bmm") return {.kind = Work::kProduct, .left = 0};
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::_addmm_activation") {
    return {.kind = Work::kProduct, .left = 1};
  }
  if (name == "aten::convolution" || name == "aten::_convolution" || name == "aten::convolution_overrideable") {
    return {.kind = Work::kConvolution};
  }
  if (name == "aten::convolution_backward") return {.kind = Work::kConvolutionBackward};
  bool gathers = kGathers.count(name) > 0;
  return {.reads_first = !gathers && kOverwrites.count(name) == 0, .gathers = gathers};
}

// ---- Arithmetic

struct Product {  // `num` products of (m, k) by (k, n)
  double num, m, n, k;
};

// TF32 is what torch.backends allows it to be, for matrix products and for convolutions apart.
inline double flops_per_second(at::ScalarType type, at::Float32Op op) {
  if (type == at::kHalf) return card.fp16;
  if (type == at::kBFloat16) return card.bf16;
  bool allows_tf32 = at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
  return allows_tf32 && card.tf32 > 0 ? card.tf32 : card.fp32;
}

// A multiprocessor takes 64 x 64 results at a time, at most 1024 deep. A last wave of them that does not fill the card
// takes as long as a full one, and a tile that the matrix does not fill as long as a whole one.
inline double product_seconds(const Product& product, double rate) {
  constexpr double kTile = 64, kDepth = 1024;
  double m = product.m * card.magnification;
  double n = product.n * card.magnification;
  double k = product.k * card.magnification;
  double num_slices = std::ceil(k / kDepth);
  double num_tiles = product.num * std::ceil(m / kTile) * std::ceil(n / kTile) * num_slices;
  double num_waves = std::ceil(num_tiles / card.num_multiprocessors);
  double tile_flops = 2 * kTile * kTile * (k / num_slices);
  return num_waves * tile_flops / (rate / card.num_multiprocessors);
}

inline double matrix_seconds(const at::Tensor& left, const at::Tensor& right) {
  auto sizes = left.sizes();
  double num = sizes.size() == 3 ? sizes.front() : 1;
  Product product{num, double(sizes[sizes.size() - 2]), double(right.sizes().back()), double(sizes.back())};
  return product_seconds(product, flops_per_second(left.scalar_type(), at::Float32Op::MATMUL));
}

// A convolution is the product of its weight with a patch of the input at each position. `at` has as many positions as
// patches: the output, or the input of a transposed convolution.
struct Convolution {
  double num_groups, num_positions, num_channels, depth, rate;

  Convolution(const at::Tensor& weight, const at::Tensor& at, int64_t groups)
      : num_groups(groups),
        num_positions(double(at.numel()) / at.size(1)),
        num_channels(double(weight.size(0)) / groups),
        depth(double(weight.numel()) / weight.size(0)),
        rate(flops_per_second(weight.scalar_type(), at::Float32Op::CONV)) {}

  double output_seconds() const {
    return product_seconds({num_groups, num_positions, num_channels, depth}, rate);
  }
  double input_gradient_seconds() const {
    return product_seconds({num_groups, num_positions, depth, num_channels}, rate);
  }
  double weight_gradient_seconds() const {
    return product_seconds({num_groups, num_channels, depth, num_positions}, rate);
  }
};

using Values = c10::ArrayRef<IValue>;

inline double arithmetic_seconds(const Work& work, Values in, Values out) {
  switch (work.kind) {
    case Work::kProduct:
      return matrix_seconds(in[work.left].toTensor(), in[work.left + 1].toTensor());
    case Work::kConvolution: {  // input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
      bool is_transposed = in[6].toBool();
      return Convolution(in[1].toTensor(), (is_transposed ? in : out)[0].toTensor(), in[8].toInt()).output_seconds();
    }
    case Work::kConvolutionBackward: {  // grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed,
                                        // output_padding, groups, output_mask
      bool is_transposed = in[7].toBool();
      Convolution convolution(in[2].toTensor(), in[is_transposed ? 1 : 0].toTensor(), in[9].toInt());
      auto is_wanted = in[10].toBoolList();
      return is_wanted[0] * convolution.input_gradient_seconds() + is_wanted[1] * convolution.weight_gradient_seconds();
    }
    default:
      return 0;
  }
}

// ---- Memory traffic

inline double bytes_of(const IValue& value) {
  auto of_tensor = [](const at::Tensor& tensor) -> double {
    if (!tensor.defined() || !tensor.has_storage()) return 0;
    return std::min(tensor.nbytes(), tensor.storage().nbytes());  // what is expanded is read once
  };
  if (value.isTensor()) return of_tensor(value.toTensor());
  double sum = 0;
  if (value.isList()) {
    for (const IValue& entry : value.toListRef()) sum += entry.isTensor() ? of_tensor(entry.toTensor()) : 0;
  }
  return sum;
}

// What is written in place is read as well, and counted as an argument where it is returned.
inline double traffic_bytes(const Work& work, const c10::FunctionSchema& schema, Values in, Values out) {
  double sum = 0;
  for (size_t i = 0; i < in.size(); i++) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    bool is_read = i > 0 || work.reads_first;
    bool is_written = alias && alias->isWrite();
    sum += (is_read + is_written) * bytes_of(in[i]);
  }
  for (size_t i = 0; i < out.size(); i++) {
    if (!schema.returns()[i].alias_info()) sum += (work.gathers ? 2 : 1) * bytes_of(out[i]);
  }
  return sum;
}

// ---- Both

inline double work_seconds(const Work& work, const c10::FunctionSchema& schema, Values in, Values out) {
  double bytes = traffic_bytes(work, schema, in, out) * card.magnification * card.magnification;
  return std::max(arithmetic_seconds(work, in, out), bytes / card.memory);
}

// A batch grows with its samples and their lengths, not with its channels: in one dimension.
inline double host_copy_seconds(const at::Tensor& copied) {
  return copied.nbytes() * card.magnification / card.host_link;
}

}  // namespace virtual_gpu
