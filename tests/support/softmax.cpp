#include "support/softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "api/softmax_kernel.h"
#include "softmax_attention_reference.h"

namespace delta_attention::test {
namespace {

Placement placement_of(Layout layout) {
  if (layout == Layout::bhtd) return {{0, 2, 1, 3}, {}, 0};
  if (layout == Layout::padded) return {{}, {8, 4, 4, 0}, 4};
  return {};
}

void set_options(const SoftmaxInputs& inputs, SoftmaxArgs& args) {
  args.causal = inputs.causal;
  args.alignment = inputs.alignment;
  args.window_left = inputs.window_left;
  args.softcap = inputs.softcap;
  args.scale = inputs.scale;
}

std::vector<Index> flat(const std::vector<std::vector<Index>>& table) {
  std::vector<Index> all;
  for (const std::vector<Index>& row : table) all.insert(all.end(), row.begin(), row.end());
  return all;
}

Index count(const std::vector<Index>& values) { return static_cast<Index>(values.size()); }

/// Relative error of f32 arithmetic: scores are dot products over D channels, whose rounding, about sqrt(D) of 2^-24 in a random walk with
/// the reads and the exponential on the way, becomes the weights'. 33 roundings a channel, as for the recurrences.
double f32_bar(const SoftmaxInputs& inputs) { return 2e-6 * std::sqrt(static_cast<double>(inputs.q.shape[3])); }

}  // namespace

StoredIntegers::StoredIntegers(const std::vector<Index>& values, std::initializer_list<Index> shape, Device device)
    : buffer_(device, values.size() * sizeof(std::int32_t)) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<std::int32_t>(values[i]);
    std::memcpy(buffer_.image() + i * sizeof value, &value, sizeof value);
  }
  buffer_.upload();
  view_ = tensor(static_cast<const void*>(buffer_.data()), DType::i32, shape, device);
}

SoftmaxCall::SoftmaxCall(const SoftmaxInputs& inputs, Device device) {
  const Placement placement = placement_of(inputs.layout);
  const auto store = [&](const Array& array, const Placement& where) {
    stored_.push_back(std::make_unique<Stored>(array, where, device, kNanByte));
    stored_.back()->put(array);
    return stored_.back()->view();
  };
  const auto store_integers = [&](const std::vector<Index>& values, std::initializer_list<Index> shape) {
    integers_.push_back(std::make_unique<StoredIntegers>(values, shape, device));
    return integers_.back()->view();
  };
  args.q = store(inputs.q, placement);
  args.k = store(inputs.k, placement);
  args.v = store(inputs.v, placement);
  if (inputs.mask.present()) args.mask = store(inputs.mask, {});
  if (!inputs.valid_len.empty()) args.valid_len = store_integers(inputs.valid_len, {count(inputs.valid_len)});
  if (!inputs.cu_seqlens_q.empty()) args.cu_seqlens_q = store_integers(inputs.cu_seqlens_q, {count(inputs.cu_seqlens_q)});
  if (!inputs.cu_seqlens_kv.empty()) {
    args.cu_seqlens_kv = store_integers(inputs.cu_seqlens_kv, {count(inputs.cu_seqlens_kv)});
  }
  if (!inputs.block_table.empty()) {
    args.block_table = store_integers(flat(inputs.block_table),
                                      {static_cast<Index>(inputs.block_table.size()), count(inputs.block_table.front())});
  }
  const std::vector<Index>& shape = inputs.q.shape;
  out_ = std::make_unique<Stored>(Array(inputs.q.dtype, shape), placement, device, kNanByte);
  lse_ = std::make_unique<Stored>(Array(DType::f32, {shape[0], shape[1], shape[2]}), Placement{}, device, kNanByte);
  out_->poison();
  lse_->poison();
  args.out = out_->writable();
  args.lse = lse_->writable();
  set_options(inputs, args);
}

bool SoftmaxCall::rest_untouched() const {
  bool same = out_->gaps_intact() && lse_->gaps_intact();
  for (const auto& each : stored_) same = same && each->unchanged();
  for (const auto& each : integers_) same = same && each->unchanged();
  return same;
}

std::string SoftmaxInputs::describe() const {
  const auto text = [](const std::vector<Index>& values) {
    std::string all;
    for (const Index value : values) all += (all.empty() ? "" : ",") + std::to_string(value);
    return "[" + all + "]";
  };
  return std::string(name(q.dtype)) + " q " + text(q.shape) + " k " + text(k.shape) + " mask " + text(mask.shape) + " valid " +
         text(valid_len) + " cu_q " + text(cu_seqlens_q) + " cu_kv " + text(cu_seqlens_kv) +
         (causal ? alignment == Alignment::top_left ? " causal top-left" : " causal bottom-right" : "") + " window " +
         std::to_string(window_left) + " softcap " + std::to_string(softcap) + " layout " +
         std::to_string(static_cast<int>(layout));
}

SoftmaxInputs counting_inputs(Index batch, Index queries, Index keys, Index heads, Index key_heads, Index size) {
  SoftmaxInputs inputs;
  inputs.q = Array(DType::f32, {batch, queries, heads, size});
  inputs.k = Array(DType::f32, {batch, keys, key_heads, size}, 1.0f);
  inputs.v = Array(DType::f32, {batch, keys, key_heads, size});
  for (Index b = 0; b < batch; ++b) {
    for (Index j = 0; j < keys; ++j) {
      for (Index h = 0; h < key_heads; ++h) {
        for (Index d = 0; d < size; ++d) inputs.v.set({b, j, h, d}, static_cast<float>(j));
      }
    }
  }
  return inputs;
}

SoftmaxInputs random_inputs(Random& random, DType dtype, Index batch, Index queries, Index keys, Index heads, Index key_heads,
                            Index size) {
  SoftmaxInputs inputs;
  inputs.q = Array(dtype, {batch, queries, heads, size});
  inputs.k = Array(dtype, {batch, keys, key_heads, size});
  inputs.v = Array(dtype, {batch, keys, key_heads, size});
  std::normal_distribution<float> normal;
  for (Array* array : {&inputs.q, &inputs.k, &inputs.v}) {
    for (float& x : array->values) x = rounded(normal(random), dtype);
  }
  return inputs;
}

SoftmaxTruth softmax_oracle(const SoftmaxInputs& inputs) {
  // The numbers as f32, which holds every storage type.
  SoftmaxInputs wide = inputs;
  wide.q.dtype = wide.k.dtype = wide.v.dtype = DType::f32;
  wide.layout = Layout::bthd;
  const SoftmaxCall call(wide, Device{});
  SoftmaxArgs args = call.args;
  const std::vector<Index>& shape = inputs.q.shape;
  SoftmaxTruth truth;
  truth.out.resize(inputs.q.values.size());
  truth.lse.resize(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]));
  args.out = tensor(truth.out.data(), {shape[0], shape[1], shape[2], shape[3]});
  args.lse = tensor(truth.lse.data(), {shape[0], shape[1], shape[2]});
  reference::softmax_forward(args);
  return truth;
}

SoftmaxInputs paged(const SoftmaxInputs& inputs, Index page_size, Random& random) {
  const Index keys = inputs.k.shape[1], heads = inputs.k.shape[2], size = inputs.k.shape[3];
  const Index pages = (keys + page_size - 1) / page_size;
  std::vector<Index> order(static_cast<std::size_t>(pages + 2));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<Index>(i);
  std::shuffle(order.begin(), order.end(), random);
  SoftmaxInputs result = inputs;
  const float nan = std::numeric_limits<float>::quiet_NaN();  // what no key fills
  result.k = Array(inputs.k.dtype, {pages + 2, page_size, heads, size}, nan);
  result.v = Array(inputs.v.dtype, {pages + 2, page_size, heads, size}, nan);
  for (Index j = 0; j < keys; ++j) {
    for (Index h = 0; h < heads; ++h) {
      for (Index d = 0; d < size; ++d) {
        const Index page = order[static_cast<std::size_t>(j / page_size)];
        result.k.set({page, j % page_size, h, d}, inputs.k.get({0, j, h, d}));
        result.v.set({page, j % page_size, h, d}, inputs.v.get({0, j, h, d}));
      }
    }
  }
  order.resize(static_cast<std::size_t>(pages));
  result.block_table = {order};
  result.valid_len = {keys};
  return result;
}

void expect_matches(const SoftmaxInputs& inputs, const SoftmaxOutputs& got, const SoftmaxTruth& truth, bool rounds_weights) {
  double difference = 0, size = 0, storage = 0;
  for (std::size_t i = 0; i < truth.out.size(); ++i) {
    difference += std::pow(got.out.values[i] - truth.out[i], 2);
    size += truth.out[i] * truth.out[i];
    storage += std::pow(rounded(static_cast<float>(truth.out[i]), inputs.q.dtype) - truth.out[i], 2);
  }
  // A rounded weight is off by the type's unit roundoff u at most, independently of the others: sum_j (p_j v_j u)^2 a channel, which for
  // values without a mean, as here, is u times the size of the output. (A scale near 0 leaves the weights alike; then they err alike, less.)
  const double weights = !rounds_weights ? 0.0 : inputs.q.dtype == DType::bf16 ? std::ldexp(1.0, -8) : std::ldexp(1.0, -11);
  // 1.2 times what storing the output costs, the weights, and the arithmetic. Written so that NaN fails.
  EXPECT_TRUE(std::sqrt(difference) <= 1.2 * std::sqrt(storage) + (weights + f32_bar(inputs)) * std::sqrt(size))
      << "error " << std::sqrt(difference) << " of " << std::sqrt(size) << ": " << inputs.describe();
  for (std::size_t i = 0; i < truth.lse.size(); ++i) {
    if (std::isinf(truth.lse[i])) {
      EXPECT_EQ(got.lse.values[i], truth.lse[i]) << "lse " << i << ": " << inputs.describe();
    } else {
      // Scores reach some tens: f32 holds them to 2^-24 of that, and so their logarithm of a sum.
      EXPECT_NEAR(got.lse.values[i], truth.lse[i], 4e-6 * (1 + std::fabs(truth.lse[i]))) << "lse " << i << ": " << inputs.describe();
    }
  }
}

std::vector<SoftmaxKernelInfo> all_softmax_kernels() {
  std::vector<SoftmaxKernelInfo> list;
  for (const SoftmaxKernel* kernel : softmax_kernels()) list.push_back({kernel->name, Device{kernel->device, 0}, kernel->rounds_weights});
  return list;
}

std::string softmax_kernel_test_name(const ::testing::TestParamInfo<SoftmaxKernelInfo>& info) { return info.param.name; }
std::ostream& operator<<(std::ostream& stream, const SoftmaxKernelInfo& kernel) { return stream << kernel.name; }

void SoftmaxTest::SetUp() {
  const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
  random = random_for(std::string(test.test_suite_name()) + "." + test.name());
  if (GetParam().device.type == DeviceType::cuda) {
    const std::string reason = cuda_skip_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
}

std::optional<SoftmaxOutputs> SoftmaxTest::run(const SoftmaxInputs& inputs) {
  SoftmaxCall call(inputs, GetParam().device);
  Execution execution;
  execution.kernel = GetParam().name;
  try {
    softmax_attention_forward(call.args, execution);
  } catch (const Unsupported&) {
    EXPECT_TRUE(call.outputs_untouched()) << "a call that was refused has written";
    return std::nullopt;
  }
  device_synchronize(GetParam().device);
  EXPECT_TRUE(call.rest_untouched()) << "inputs or memory around an operand have changed: " << inputs.describe();
  return call.outputs();
}

void SoftmaxTest::expect_rows(const SoftmaxInputs& inputs, const std::vector<double>& expected) {
  const std::optional<SoftmaxOutputs> got = run(inputs);
  if (!got) return;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    // Means of small integers: a few roundings of f32.
    EXPECT_NEAR(got->out.get({0, static_cast<Index>(i), 0, 0}), expected[i], 1e-6 * (1 + std::fabs(expected[i])))
        << "row " << i << " of " << inputs.describe();
  }
}

void SoftmaxTest::expect_matches_oracle(const SoftmaxInputs& inputs) {
  const std::optional<SoftmaxOutputs> got = run(inputs);
  if (got) expect_matches(inputs, *got, softmax_oracle(inputs), GetParam().rounds_weights);
}

}  // namespace delta_attention::test
