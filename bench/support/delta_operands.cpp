#include "support/delta_operands.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/device/runtime.h"
#include "delta_attention_reference.h"
#include "support/device_data.h"
#include "support/inputs.h"
#include "support/parallel.h"

namespace bench {
namespace {

namespace reference = delta_attention::reference;
using delta_attention::Execution;

class DeltaOperands : public Operands {
 public:
  DeltaOperands(const Case& c, std::uint64_t seed)
      : case_(c), sizes_(operand_sizes(c)), checked_tokens_(std::min(c.tokens, kCheckedTokens)) {
    for (int i = 0; i < kOperands; ++i) memory_.push_back(std::make_unique<DeviceMemory>(sizes_[i]));
    const std::int64_t rows = c.batch * c.tokens * c.heads;
    const auto source = [seed](Operand operand) { return RandomSource{seed, 16u * static_cast<std::uint64_t>(operand)}; };
    for (const Operand operand : {kQ, kK, kV}) fill_normal(data(operand), c.dtype, rows, c.dim, operand != kV, source(operand));
    fill_strong_decays(static_cast<float*>(data(kLogDecay)), rows, c.heads, gates_per_head(), source(kLogDecay));
    fill_uniform(static_cast<float*>(data(kBeta)), rows, source(kBeta));
    expected_.resize(checked_heads().size());
    parallel_for(static_cast<std::int64_t>(expected_.size()), [this](std::int64_t i) { expected_[i] = expect(checked_heads()[i]); });
  }

  std::unique_ptr<CudaCall> call(const std::string& kernel, const std::string&) const override {
    Addresses at;
    for (int i = 0; i < kOperands; ++i) at[i] = memory_[i]->data();
    return std::make_unique<CudaCall>(make_args(case_, at, delta_attention::cuda()), kernel);
  }

  void poison_outputs() override {
    for (const Operand output : {kOut, kFinalState}) DELTA_ATTENTION_CUDA(cudaMemset(data(output), kPoison, sizes_[output]));
    DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());
  }

  double relative_error() const override {
    double difference = 0.0, expected = 0.0;
    for (std::size_t n = 0; n < expected_.size(); ++n) {
      const std::vector<float> out = read(kOut, case_.dtype, checked_heads()[n], case_.dim);
      for (std::size_t i = 0; i < out.size(); ++i) {
        difference += std::pow(out[i] - expected_[n][i], 2);
        expected += expected_[n][i] * expected_[n][i];
      }
    }
    return std::sqrt(difference / expected);
  }

  double allowed_error() const override { return bench::allowed_error(case_.dtype, case_.dim); }
  double bytes() const override { return least_bytes(case_); }

 private:
  struct Head {
    std::int64_t batch, head;
  };

  void* data(Operand operand) const { return memory_[operand]->data(); }
  std::int64_t gates_per_head() const { return case_.recurrence().gate == delta_attention::Gate::channel ? case_.dim : 1; }
  std::vector<Head> checked_heads() const { return {{0, 0}, {case_.batch - 1, case_.heads - 1}}; }

  /// The first tokens of an operand [B,T,H,width].
  std::vector<float> read(Operand operand, DType dtype, const Head& h, std::int64_t width) const {
    std::vector<std::int64_t> begins;
    for (std::int64_t t = 0; t < checked_tokens_; ++t) {
      begins.push_back(((h.batch * case_.tokens + t) * case_.heads + h.head) * width);
    }
    return read_rows(data(operand), dtype, begins, width);
  }

  std::vector<double> expect(const Head& h) const {
    const std::int64_t T = checked_tokens_, D = case_.dim, gates = gates_per_head();
    const std::vector<float> q = read(kQ, case_.dtype, h, D), k = read(kK, case_.dtype, h, D), v = read(kV, case_.dtype, h, D),
                             beta = read(kBeta, DType::f32, h, 1), decay = read(kLogDecay, DType::f32, h, gates);
    std::vector<double> out(q.size()), state(static_cast<std::size_t>(D * D));
    ForwardArgs args;
    args.recurrence = case_.recurrence();
    args.q = delta_attention::tensor(q.data(), {1, T, 1, D});
    args.k = delta_attention::tensor(k.data(), {1, T, 1, D});
    args.v = delta_attention::tensor(v.data(), {1, T, 1, D});
    args.beta = delta_attention::tensor(beta.data(), {1, T, 1});
    args.log_decay = gates > 1 ? delta_attention::tensor(decay.data(), {1, T, 1, D}) : delta_attention::tensor(decay.data(), {1, T, 1});
    args.out = delta_attention::tensor(out.data(), {1, T, 1, D});
    args.final_state = delta_attention::tensor(state.data(), {1, 1, D, D});
    reference::forward_head(args, 0, 0, 0, T, 0);
    return out;
  }

  Case case_;
  Sizes sizes_;
  std::int64_t checked_tokens_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<std::vector<double>> expected_;  // out [tokens,dim] of each checked head
};

}  // namespace

std::unique_ptr<Operands> delta_operands(const Case& c, std::uint64_t seed) { return std::make_unique<DeltaOperands>(c, seed); }

}  // namespace bench
