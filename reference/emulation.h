#pragma once

// What the staged kernels' schedules do to rounding, on the CPU: the micro-chunk algebra of docs/math.md in f32, with the summation
// policies that the kernels are compiled from (src/state), token counts and all. It answers "how large does the error of V1..V4
// get" where there is no GPU, and it is what their errors are held against where there is one.
//
// Not the same bits as a GPU: a kernel adds the K products of a dot in the order of its lanes, and its exp may be an ulp off.
// What is the same: which quantities are rounded, how often, and what carries compensation from token to token.
//
// Reads the caller's arguments directly, in CPU memory, f32, f16 or bf16, and trusts them. Compile with -ffp-contract=off: a
// compiler that fuses the compensated steps undoes them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "delta_attention/delta_attention.h"
#include "problem/element.h"
#include "problem/host_device.h"
#include "state/gate.h"
#include "state/state_update.h"
#include "state/summation.h"

namespace delta_attention::emulation {

using Index = std::int64_t;

/// What tells the kernels' arithmetic apart, besides how the state is summed.
struct Schedule {
  int micro_chunk = 8;  // F: tokens between two updates of the state
  int row_groups = 8;   // S^T x is summed inside each group of rows of the state, then over the groups, in order
};

struct StagedKernel {
  const char* name;
  const char* stage;
  bool compensated;
  Schedule schedule;
  const char* settings;  // Execution::settings under which the kernel has this schedule
};

/// The kernels by name. Row groups: the 8 lanes that share a column in V1 and V2; in V3 and V4 4 blocks of rows, whose sums are
/// added in the order of their ranks.
inline constexpr StagedKernel kStagedKernels[] = {
    {"v1_chunk_pipeline", "V1", false, {8, 8}, ""},
    {"v2_chunk_pipeline_compensated", "V2", true, {8, 8}, ""},
    {"v3_on_chip", "V3", false, {8, 4}, "flush=8,row_blocks=4"},
    {"v4_on_chip_compensated", "V4", true, {8, 4}, "flush=8,row_blocks=4"},
};

inline float load(const ConstTensor& x, Index i, Index j = 0, Index k = 0, Index l = 0) {
  return load_element(x.data, x.dtype, i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3]);
}
inline void store(const Tensor& x, float value, Index i, Index j, Index k = 0, Index l = 0) {
  store_element(x.data, x.dtype, i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3], value);
}

/// One sequence of one value head. Everything that run() calls is inlined into it, so that one copy of it can use AVX2 and FMA.
template <class Sum>
class HeadEmulation {
 public:
  HeadEmulation(const ForwardArgs& args, const Schedule& schedule, Index n, Index head)
      : args_(args), schedule_(schedule), n_(n), head_(head), key_head_(head / (args.v.shape[2] / args.q.shape[2])) {
    const auto f = static_cast<std::size_t>(schedule.micro_chunk), k = static_cast<std::size_t>(K_),
               v = static_cast<std::size_t>(V_);
    state_.resize(k * v);
    normalizer_.resize(k);
    for (auto* rows : {&query_, &key_, &weights_}) rows->resize(f * k);
    for (auto* rows : {&u_, &predicted_, &product_, &partial_}) rows->resize(f * v);
    for (auto* square : {&key_products_, &query_products_}) square->resize(f * f);
    beta_.resize(f);
    row_.resize(v);
    for (auto* channels : {&decay_, &since_start_, &log_since_start_}) channels->resize(k);
    load_initial_state();
  }

  /// Tokens [begin, end) of batch row b. Micro-chunks count from `begin`, so a sequence that is run in parts gives the bits of one
  /// run where each part but the last is a multiple of the micro-chunk.
  void run(Index b, Index begin, Index end) {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (wide) return run_wide(b, begin, end);
#endif
    run_tokens(b, begin, end);
  }

  float state(Index i, Index j) const { return state_[static_cast<std::size_t>(i * V_ + j)].value(); }
  float normalizer(Index i) const { return normalizer_[static_cast<std::size_t>(i)].value(); }

  void store_final() const {
    for (Index i = 0; i < K_; ++i) {
      for (Index j = 0; j < V_ && args_.final_state.present(); ++j) {
        store(args_.final_state, state(i, j), n_, head_, i, j);
      }
      if (args_.final_normalizer.present()) store(args_.final_normalizer, normalizer(i), n_, head_, i);
    }
  }

 private:
#if defined(__x86_64__)
  __attribute__((target("avx2,fma"))) void run_wide(Index b, Index begin, Index end) { run_tokens(b, begin, end); }
#endif

  DELTA_ATTENTION_HOST_DEVICE void run_tokens(Index b, Index begin, Index end) {
    for (Index t = begin; t < end; t += schedule_.micro_chunk) {
      tokens_ = static_cast<int>(std::min<Index>(schedule_.micro_chunk, end - t));
      load_tokens(b, t);
      prepare_keys(b, t);
      step();
      store_outputs(b, t);
      advance();
    }
  }

  void load_initial_state() {
    for (Index i = 0; i < K_; ++i) {
      for (Index j = 0; j < V_ && args_.initial_state.present(); ++j) {
        state_[static_cast<std::size_t>(i * V_ + j)].set(load(args_.initial_state, n_, head_, i, j));
      }
      if (args_.initial_normalizer.present()) {
        normalizer_[static_cast<std::size_t>(i)].set(load(args_.initial_normalizer, n_, head_, i));
      }
    }
  }

  void load_tokens(Index b, Index t) {
    for (int i = 0; i < tokens_; ++i) {
      load_row(args_.q, b, t + i, &query_[static_cast<std::size_t>(i * K_)]);
      load_row(args_.k, b, t + i, &key_[static_cast<std::size_t>(i * K_)]);
      for (Index j = 0; j < V_; ++j) u_[static_cast<std::size_t>(i * V_ + j)] = load(args_.v, b, t + i, head_, j);
      beta_[static_cast<std::size_t>(i)] =
          args_.beta.present() ? activate_beta(load(args_.beta, b, t + i, head_), args_.beta_space) : 1.0f;
    }
  }

  void load_row(const ConstTensor& x, Index b, Index t, float* row) const {
    float sum_of_squares = 0.0f;
    for (Index e = 0; e < K_; ++e) {
      row[e] = load(x, b, t, key_head_, e);
      sum_of_squares = fused_mul_add(row[e], row[e], sum_of_squares);
    }
    if (!args_.qk_l2norm) return;
    const float factor = l2norm_factor(sum_of_squares);
    for (Index e = 0; e < K_; ++e) row[e] *= factor;
  }

  float log_decay(Index b, Index t, Index channel) const {
    const float rate = args_.a_log.present() ? expf(load(args_.a_log, head_)) : 1.0f;
    const float bias = args_.dt_bias.present() ? load(args_.dt_bias, head_, channel) : 0.0f;
    return log_decay_of(load(args_.log_decay, b, t, head_, channel), args_.gate_space, rate, bias,
                        args_.gate_lower_bound);
  }

  /// One token's decays, multiplied onto those since the micro-chunk's start.
  void load_decays(Index b, Index t) {
    const bool channel = args_.recurrence.gate == Gate::channel;
    for (Index e = 0; e < K_; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const float g = channel || e == 0 ? log_decay(b, t, e) : 0.0f;
      decay_[at] = channel || e == 0 ? expf(g) : decay_[0];
      log_since_start_[at] = channel || e == 0 ? log_since_start_[at] + g : log_since_start_[0];
      since_start_[at] *= decay_[at];
    }
  }

  /// W_i, U_i, Q_i, A_ij and R_i, which need no state: src/cuda/device/micro_chunk.cuh (V1, V2) and
  /// src/cuda/delta/on_chip_prepare.cuh (V3, V4) have the formulas.
  DELTA_ATTENTION_HOST_DEVICE void prepare_keys(Index b, Index t) {
    std::fill(since_start_.begin(), since_start_.end(), 1.0f);
    std::fill(log_since_start_.begin(), log_since_start_.end(), 0.0f);
    for (int i = 0; i < tokens_; ++i) {
      float* const query = query_.data() + i * K_;
      float* const key = key_.data() + i * K_;
      float* const weights = weights_.data() + i * K_;
      if (args_.log_decay.present()) {
        load_decays(b, t + i);
        for (int j = 0; j < i; ++j) multiply(decay_.data(), key_.data() + j * K_);
      }
      for (int j = 0; j <= i; ++j) {
        key_products_[at(i, j)] = dot(key, key_.data() + j * K_);
        query_products_[at(i, j)] = dot(query, key_.data() + j * K_);
      }
      std::copy(key, key + K_, weights);
      multiply(since_start_.data(), query);
      multiply(since_start_.data(), weights);
      solve_keys(i);
    }
    for (Index e = 0; e < K_; ++e) {
      const auto at = static_cast<std::size_t>(e);
      decay_[at] = args_.recurrence.gate == Gate::channel || e == 0 ? exp_decay(log_since_start_[at]) : decay_[0];
    }
  }

  /// Row i of W and U by forward substitution.
  DELTA_ATTENTION_HOST_DEVICE void solve_keys(int i) {
    float* const weights = weights_.data() + i * K_;
    float* const u = u_.data() + i * V_;
    const float beta = beta_[static_cast<std::size_t>(i)];
    for (int j = 0; j < i && is_delta(); ++j) {
      const float product = -key_products_[at(i, j)];
      add_multiple(product, weights_.data() + j * K_, K_, weights);
      add_multiple(product, u_.data() + j * V_, V_, u);
    }
    for (Index e = 0; e < K_; ++e) weights[e] *= beta;
    for (Index j = 0; j < V_; ++j) u[j] *= beta;
  }

  /// u and the read-outs of the micro-chunk, from the state before it.
  DELTA_ATTENTION_HOST_DEVICE void step() {
    multiply_state(query_.data(), product_.data());
    if (is_delta()) correct_tokens();
    for (int i = 0; i < tokens_; ++i) {
      for (int j = 0; j <= i; ++j) {
        add_multiple(query_products_[at(i, j)], u_.data() + j * V_, V_, product_.data() + i * V_);
      }
    }
  }

  /// u = U - S^T W.
  DELTA_ATTENTION_HOST_DEVICE void correct_tokens() {
    multiply_state(weights_.data(), predicted_.data());
    for (Index j = 0; j < tokens_ * V_; ++j) {
      const auto at = static_cast<std::size_t>(j);
      u_[at] = correct<Update::delta>(u_[at], predicted_[at], 1.0f);
    }
  }

  /// result_i = S^T x_i for the vectors x of the micro-chunk.
  DELTA_ATTENTION_HOST_DEVICE void multiply_state(const float* vectors, float* result) {
    const Index rows = (K_ + schedule_.row_groups - 1) / schedule_.row_groups;
    std::fill(result, result + tokens_ * V_, 0.0f);
    for (Index first = 0; first < K_; first += rows) {
      std::fill(partial_.begin(), partial_.end(), 0.0f);
      for (Index r = first; r < std::min(first + rows, K_); ++r) {
        const Sum* const cells = state_.data() + r * V_;
        for (Index j = 0; j < V_; ++j) row_[static_cast<std::size_t>(j)] = cells[j].value();
        for (int i = 0; i < tokens_; ++i) add_multiple(vectors[i * K_ + r], row_.data(), V_, partial_.data() + i * V_);
      }
      for (Index j = 0; j < tokens_ * V_; ++j)
        result[j] = rounded_add(result[j], partial_[static_cast<std::size_t>(j)]);
    }
  }

  /// S <- Diag(b) S + sum_j R_j u_j^T, and the normaliser likewise.
  DELTA_ATTENTION_HOST_DEVICE void advance() {
    for (Index r = 0; r < K_; ++r) {
      const auto row = static_cast<std::size_t>(r);
      Sum* const cells = state_.data() + r * V_;
      for (Index j = 0; j < V_; ++j) cells[j].scale(decay_[row]);
      normalizer_[row].scale(decay_[row]);
      for (int i = 0; i < tokens_; ++i) {
        const float key = key_[static_cast<std::size_t>(i * K_ + r)];
        const float* const u = u_.data() + i * V_;
        for (Index j = 0; j < V_; ++j) cells[j].add_product(key, u[j]);
        normalizer_[row].add(key);
      }
    }
  }

  DELTA_ATTENTION_HOST_DEVICE void store_outputs(Index b, Index t) {
    const float scale = args_.scale ? *args_.scale : 1.0f / std::sqrt(static_cast<float>(K_));
    for (int i = 0; i < tokens_; ++i) {
      float denominator = 1.0f;
      if (args_.recurrence.normalize) {
        denominator = 0.0f;
        for (Index e = 0; e < K_; ++e) {
          const auto at = static_cast<std::size_t>(e);
          denominator =
              fused_mul_add(normalizer_[at].value(), query_[static_cast<std::size_t>(i * K_ + e)], denominator);
        }
        for (int j = 0; j <= i; ++j) denominator += query_products_[at(i, j)];
      }
      for (Index j = 0; j < V_; ++j) {
        const float o = scale * product_[static_cast<std::size_t>(i * V_ + j)];
        store(args_.out, args_.recurrence.normalize ? o / denominator : o, b, t + i, head_, j);
      }
    }
  }

  bool is_delta() const { return args_.recurrence.update == Update::delta; }
  std::size_t at(int i, int j) const { return static_cast<std::size_t>(i * schedule_.micro_chunk + j); }

  /// y_e += a x_e and y_e *= x_e.
  DELTA_ATTENTION_HOST_DEVICE static void add_multiple(float a, const float* x, Index count, float* y) {
    for (Index e = 0; e < count; ++e) y[e] = fused_mul_add(a, x[e], y[e]);
  }
  DELTA_ATTENTION_HOST_DEVICE void multiply(const float* x, float* y) const {
    for (Index e = 0; e < K_; ++e) y[e] *= x[e];
  }

  /// <x, y> over the channels, in 8 running sums.
  DELTA_ATTENTION_HOST_DEVICE float dot(const float* x, const float* y) const {
    constexpr Index kSums = 8;
    float sums[kSums] = {};
    Index e = 0;
    for (; e + kSums <= K_; e += kSums) {
      for (Index i = 0; i < kSums; ++i) sums[i] = fused_mul_add(x[e + i], y[e + i], sums[i]);
    }
    for (; e < K_; ++e) sums[0] = fused_mul_add(x[e], y[e], sums[0]);
    for (Index half = kSums / 2; half > 0; half /= 2) {
      for (Index i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }

  ForwardArgs args_;
  Schedule schedule_;
  Index n_, head_, key_head_;
  Index K_ = args_.q.shape[3], V_ = args_.v.shape[3];

  std::vector<Sum> state_;       // [K][V]
  std::vector<Sum> normalizer_;  // [K]

  // One micro-chunk. Rows are tokens.
  int tokens_ = 0;
  std::vector<float> query_;                                  // [F][K]: q, then Q
  std::vector<float> key_;                                    // [F][K]: k, decayed as tokens come: R in the end
  std::vector<float> weights_;                                // [F][K]: b*k, then W
  std::vector<float> u_;                                      // [F][V]: v, then U, then u
  std::vector<float> predicted_, product_;                    // [F][V]: S^T W; S^T Q, then the read-outs
  std::vector<float> key_products_, query_products_;          // [F][F]: <k_i, d_ij k_j>, <q_i, d_ij k_j>
  std::vector<float> beta_;                                   // [F]
  std::vector<float> decay_, since_start_, log_since_start_;  // [K]: a_i, in the end b; b_i and its logarithm
  std::vector<float> partial_, row_;  // sums of one group of rows; values of one row of the state
};

/// Every sequence and value head.
template <class Sum>
void forward_with(const ForwardArgs& args, const Schedule& schedule) {
  const ConstTensor& cu = args.cu_seqlens;
  const auto offset = [&cu](Index n) {
    const Index at = n * cu.strides[0];
    return cu.dtype == DType::i32 ? Index{static_cast<const std::int32_t*>(cu.data)[at]}
                                  : static_cast<const std::int64_t*>(cu.data)[at];
  };
  const Index sequences = cu.present() ? cu.shape[0] - 1 : args.q.shape[0];
  for (Index n = 0; n < sequences; ++n) {
    for (Index head = 0; head < args.v.shape[2]; ++head) {
      HeadEmulation<Sum> emulation(args, schedule, n, head);
      if (cu.present()) {
        emulation.run(0, offset(n), offset(n + 1));
      } else {
        emulation.run(n, 0, args.q.shape[1]);
      }
      emulation.store_final();
    }
  }
}

inline void forward(const ForwardArgs& args, const StagedKernel& kernel) {
  if (kernel.compensated) {
    forward_with<CompensatedSum>(args, kernel.schedule);
  } else {
    forward_with<PlainSum>(args, kernel.schedule);
  }
}

}  // namespace delta_attention::emulation
