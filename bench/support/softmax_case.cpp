#include "support/softmax_case.h"

#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "cuda/device/runtime.h"
#include "softmax_attention_reference.h"
#include "support/device_data.h"
#include "support/inputs.h"
#include "support/parallel.h"

namespace bench {
namespace {

namespace reference = delta_attention::reference;
using delta_attention::DType;
using delta_attention::Execution;
using delta_attention::SoftmaxArgs;

enum Part { kQueryPart, kKeyPart, kValuePart, kOutPart, kLengthPart, kTablePart, kParts };
using Pointers = std::array<void*, kParts>;

std::int64_t pages_per_sequence(const SoftmaxCase& c) { return c.page_size == 0 ? 0 : (c.keys + c.page_size - 1) / c.page_size; }
std::int64_t pages(const SoftmaxCase& c) { return c.batch * pages_per_sequence(c); }

/// Rows of k of one key head, of all sequences: with pages, what lies behind a sequence's last key is counted, too.
std::int64_t key_rows(const SoftmaxCase& c) { return c.page_size == 0 ? c.batch * c.keys : pages(c) * c.page_size; }

std::array<std::size_t, kParts> part_bytes(const SoftmaxCase& c) {
  const std::size_t element = delta_attention::size_of(c.dtype);
  const auto queries = static_cast<std::size_t>(c.batch * c.queries * c.heads * c.dim) * element;
  const auto keys = static_cast<std::size_t>(key_rows(c) * c.key_heads * c.dim) * element;
  const bool paged = c.page_size > 0;
  return {queries,
          keys,
          keys,
          queries,
          paged ? static_cast<std::size_t>(c.batch) * sizeof(std::int32_t) : 0,
          static_cast<std::size_t>(pages(c)) * sizeof(std::int32_t)};
}

SoftmaxArgs make_args(const SoftmaxCase& c, const Pointers& at) {
  const delta_attention::Device gpu = delta_attention::cuda();
  const std::int64_t B = c.batch, Hkv = c.key_heads, D = c.dim;
  const bool paged = c.page_size > 0;
  SoftmaxArgs args;
  args.q = delta_attention::tensor(at[kQueryPart], c.dtype, {B, c.queries, c.heads, D}, gpu);
  const std::int64_t outer = paged ? pages(c) : B, inner = paged ? c.page_size : c.keys;
  args.k = delta_attention::tensor(at[kKeyPart], c.dtype, {outer, inner, Hkv, D}, gpu);
  args.v = delta_attention::tensor(at[kValuePart], c.dtype, {outer, inner, Hkv, D}, gpu);
  args.out = delta_attention::tensor(at[kOutPart], c.dtype, {B, c.queries, c.heads, D}, gpu);
  if (paged) {
    args.valid_len = delta_attention::tensor(at[kLengthPart], DType::i32, {B}, gpu);
    args.block_table = delta_attention::tensor(at[kTablePart], DType::i32, {B, pages_per_sequence(c)}, gpu);
  }
  args.causal = c.causal;
  return args;
}

/// Page `i`, counted sequence by sequence, lies here: neighbours far apart, as in a cache that has served many requests. A step without a
/// common divisor visits every page once.
std::int64_t scattered(std::int64_t i, std::int64_t count) {
  std::int64_t step = count / 3 * 2 + 1;
  while (std::gcd(step, count) != 1) ++step;
  return i * step % count;
}

/// One row of the output that is checked.
struct CheckedRow {
  std::int64_t batch, head, row;
};

class SoftmaxOperands : public Operands {
 public:
  SoftmaxOperands(const SoftmaxCase& c, std::uint64_t seed) : case_(c), bytes_(part_bytes(c)) {
    for (const std::size_t bytes : bytes_) memory_.push_back(std::make_unique<DeviceMemory>(bytes));
    const auto fill = [&](Part part, std::int64_t rows) {
      fill_normal(memory_[part]->data(), c.dtype, rows, c.dim, false, {seed, static_cast<std::uint64_t>(part)});
    };
    fill(kQueryPart, c.batch * c.queries * c.heads);
    fill(kKeyPart, key_rows(c) * c.key_heads);
    fill(kValuePart, key_rows(c) * c.key_heads);
    if (c.page_size > 0) fill_pages();
    expect();
  }

  std::unique_ptr<CudaCall> call(const std::string& kernel, const std::string& settings) const override {
    Execution execution;
    execution.kernel = kernel;
    execution.settings = settings;
    const SoftmaxArgs arguments = args();
    return std::make_unique<CudaCall>(
        execution, softmax_attention_workspace(arguments, execution),
        [arguments](const Execution& complete) { softmax_attention_forward(arguments, complete); });
  }

  void poison_outputs() override {
    DELTA_ATTENTION_CUDA(cudaMemset(memory_[kOutPart]->data(), kPoison, bytes_[kOutPart]));
    DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());
  }

  double relative_error() const override {
    const std::vector<float> out = read_rows(memory_[kOutPart]->data(), case_.dtype, row_begins(), case_.dim);
    double difference = 0.0, expected = 0.0;
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      difference += std::pow(out[i] - expected_[i], 2);
      expected += expected_[i] * expected_[i];
    }
    return std::sqrt(difference / expected);
  }

  double allowed_error() const override { return bench::allowed_error(case_.dtype, case_.dim); }

  double bytes() const override {
    double sum = 0.0;
    for (const std::size_t bytes : bytes_) sum += static_cast<double>(bytes);
    return sum;
  }

 private:
  SoftmaxArgs args() const {
    Pointers at;
    for (int i = 0; i < kParts; ++i) at[i] = memory_[i]->data();
    return make_args(case_, at);
  }

  void fill_pages() {
    const std::vector<std::int32_t> lengths(static_cast<std::size_t>(case_.batch), static_cast<std::int32_t>(case_.keys));
    for (std::int64_t i = 0; i < pages(case_); ++i) table_.push_back(static_cast<std::int32_t>(scattered(i, pages(case_))));
    DELTA_ATTENTION_CUDA(cudaMemcpy(memory_[kLengthPart]->data(), lengths.data(), bytes_[kLengthPart], cudaMemcpyHostToDevice));
    DELTA_ATTENTION_CUDA(cudaMemcpy(memory_[kTablePart]->data(), table_.data(), bytes_[kTablePart], cudaMemcpyHostToDevice));
  }

  std::vector<CheckedRow> checked_rows() const {
    std::vector<CheckedRow> rows;
    for (const std::int64_t row : {std::int64_t{0}, case_.queries / 2, case_.queries - 1}) {
      rows.push_back({0, 0, row});
      rows.push_back({case_.batch - 1, case_.heads - 1, row});
    }
    return rows;
  }

  std::vector<std::int64_t> row_begins() const {
    std::vector<std::int64_t> begins;
    for (const CheckedRow& r : checked_rows()) {
      begins.push_back(((r.batch * case_.queries + r.row) * case_.heads + r.head) * case_.dim);
    }
    return begins;
  }

  /// Where the keys that the row sees begin in k and v.
  std::vector<std::int64_t> key_begins(const CheckedRow& r) const {
    const std::int64_t seen = case_.causal ? r.row + 1 + case_.keys - case_.queries : case_.keys;
    const std::int64_t head = r.head / (case_.heads / case_.key_heads), page_size = case_.page_size;
    std::vector<std::int64_t> begins;
    for (std::int64_t key = 0; key < seen; ++key) {
      std::int64_t at = r.batch * case_.keys + key;
      if (page_size > 0) {
        const std::int64_t page = table_[static_cast<std::size_t>(r.batch * pages_per_sequence(case_) + key / page_size)];
        at = page * page_size + key % page_size;
      }
      begins.push_back((at * case_.key_heads + head) * case_.dim);
    }
    return begins;
  }

  /// Each checked row as a problem of its own, without a mask or pages: the keys that it sees are picked here.
  void expect() {
    const std::vector<CheckedRow> rows = checked_rows();
    const std::vector<float> q = read_rows(memory_[kQueryPart]->data(), case_.dtype, row_begins(), case_.dim);
    std::vector<std::vector<float>> keys, values;
    for (const CheckedRow& r : rows) {
      const std::vector<std::int64_t> begins = key_begins(r);
      keys.push_back(read_rows(memory_[kKeyPart]->data(), case_.dtype, begins, case_.dim));
      values.push_back(read_rows(memory_[kValuePart]->data(), case_.dtype, begins, case_.dim));
    }
    expected_.resize(q.size());
    parallel_for(static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) {
      const std::int64_t D = case_.dim, seen = static_cast<std::int64_t>(keys[i].size()) / D;
      SoftmaxArgs args;
      args.q = delta_attention::tensor(q.data() + i * D, {1, 1, 1, D});
      args.k = delta_attention::tensor(static_cast<const float*>(keys[i].data()), {1, seen, 1, D});
      args.v = delta_attention::tensor(static_cast<const float*>(values[i].data()), {1, seen, 1, D});
      args.out = delta_attention::tensor(expected_.data() + i * D, {1, 1, 1, D});
      reference::softmax_forward(args);
    });
  }

  SoftmaxCase case_;
  std::array<std::size_t, kParts> bytes_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<std::int32_t> table_;
  std::vector<double> expected_;  // the checked rows, one after another
};

}  // namespace

std::string SoftmaxCase::name() const {
  const auto part = [](const char* key, std::int64_t value) { return std::string(key) + ":" + std::to_string(value) + " "; };
  return part("B", batch) + part("Nq", queries) + part("Nkv", keys) + part("H", heads) + part("Hkv", key_heads) + part("D", dim) +
         (page_size > 0 ? part("page", page_size) : "") + (causal ? "mask:causal" : "mask:full");
}

SoftmaxShape SoftmaxCase::shape() const {
  return {batch, queries, keys, heads, key_heads, dim, static_cast<std::int64_t>(delta_attention::size_of(dtype)), causal};
}

SoftmaxArgs shape_only_args(const SoftmaxCase& c) {
  constexpr std::uintptr_t kApart = std::uintptr_t{1} << 40;  // more than any operand takes, so that none overlap
  Pointers at;
  for (std::size_t i = 0; i < at.size(); ++i) at[i] = reinterpret_cast<void*>(kApart * (i + 1));
  return make_args(c, at);
}

std::unique_ptr<Operands> softmax_operands(const SoftmaxCase& c, std::uint64_t seed) {
  return std::make_unique<SoftmaxOperands>(c, seed);
}

}  // namespace bench
