#pragma once

// What a test runs: a Case describes a problem, make_inputs() draws numbers for it. Numbers come from the ranges of real models:
// log decays in [-316, 0), values in about [-0.3, 25] with a heavy tail, l2-normalised q and k, beta in (0, 1) or (0, 2). They are
// rounded to the storage type first, so that the reference and the kernel read the same numbers.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention::test {

using Index = std::int64_t;
using Random = std::mt19937_64;

/// x rounded to a storage type and back.
float rounded(float x, DType dtype);

/// A host tensor: float values that the dtype can hold, row-major. No shape means "none".
struct Array {
  DType dtype = DType::f32;
  std::vector<Index> shape;
  std::vector<float> values;

  Array() = default;
  Array(DType type, std::vector<Index> extents, float value = 0.0f);

  bool present() const { return !shape.empty(); }
  Index size() const { return static_cast<Index>(values.size()); }
  Index at(std::initializer_list<Index> index) const;
  float get(std::initializer_list<Index> index) const { return values[static_cast<std::size_t>(at(index))]; }
  void set(std::initializer_list<Index> index, float value) {
    values[static_cast<std::size_t>(at(index))] = rounded(value, dtype);
  }
  void fill(float value);
};

enum class GateRegime { mixed, strong, slow };
enum class Keys { random, near_parallel };
enum class Layout { bthd, bhtd, padded };  // padded: gaps after rows, heads and tokens
enum class StateLayout { kv, vk };

struct Case {
  Recurrence recurrence;
  DType dtype = DType::f32;  // of q, k, v, out
  DType gate_dtype = DType::f32, beta_dtype = DType::f32, state_dtype = DType::f32;
  Index batch = 1, tokens = 1, heads = 1, value_heads = 1, key_dim = 16, value_dim = 16;
  std::vector<Index> cu_seqlens;  // empty: none
  DType cu_dtype = DType::i32;

  bool with_gate = true;  // log_decay given, where the recurrence has a gate
  bool with_beta = true;
  bool with_initial_state = false;
  bool with_final_state = true;
  Index state_interval = 0;  // tokens between intermediate states; 0: none

  GateRegime gate_regime = GateRegime::mixed;
  Keys keys = Keys::random;
  bool beta_to_two = false;  // beta in (0, 2)
  Layout layout = Layout::bthd;
  StateLayout state_layout = StateLayout::kv;

  bool qk_l2norm = false;
  bool with_dt_bias = true;  // for the raw gates
  GateSpace gate_space = GateSpace::log;
  BetaSpace beta_space = BetaSpace::value;
  std::optional<float> scale;

  Index sequences() const { return cu_seqlens.empty() ? batch : static_cast<Index>(cu_seqlens.size()) - 1; }
  /// How many intermediate states there is room for, and how many sequence n has.
  Index intermediate_states() const { return state_interval == 0 ? 0 : batch * (tokens / state_interval); }
  Index intermediate_states_of(Index n) const { return state_interval == 0 ? 0 : length(n) / state_interval; }
  Index begin(Index n) const { return cu_seqlens.empty() ? 0 : cu_seqlens[static_cast<std::size_t>(n)]; }
  Index length(Index n) const {
    return cu_seqlens.empty() ? tokens : cu_seqlens[static_cast<std::size_t>(n) + 1] - begin(n);
  }
  bool raw_gate() const { return gate_space == GateSpace::softplus || gate_space == GateSpace::lower_bound; }
  std::string describe() const;
};

struct Inputs {
  Case problem;
  Array q, k, v, log_decay, beta, initial_state, initial_normalizer, a_log, dt_bias;
};

/// Every operand that the case calls for, all zero except scale-free defaults; for tests that write exact values.
Inputs zero_inputs(const Case& problem);

/// V11: one token of a gated delta rule, small enough to do by hand: out = (7, 13), state = ((1, 2), (6.5, 12)).
Inputs v11_inputs();

/// Fresh numbers in real ranges.
Inputs make_inputs(const Case& problem, Random& random);

/// Tokens [begin, end) of the same inputs (no cu_seqlens), with the state they start from.
Inputs slice_tokens(const Inputs& inputs, Index begin, Index end, const Array& initial_state,
                    const Array& initial_normalizer);
/// The first tokens of sequence n as a problem of its own.
Inputs first_tokens(const Inputs& inputs, Index n, Index tokens);
/// Batch rows `rows` of the same inputs, in that order; rows of cu_seqlens problems cannot be taken.
Inputs take_rows(const Inputs& inputs, const std::vector<Index>& rows);

/// A problem drawn at random from everything the library takes.
Case random_case(Random& random);

double uniform(Random& random, double low, double high);
Index pick(Random& random, Index low, Index high);  // inclusive
template <class T>
T pick_from(Random& random, const std::vector<T>& from) {
  return from[static_cast<std::size_t>(pick(random, 0, static_cast<Index>(from.size()) - 1))];
}

/// The seed of this run: DELTA_ATTENTION_SEED, or fresh from the system.
std::uint64_t run_seed();
/// A generator for one test, from run_seed() and the test's name.
Random random_for(const std::string& test_name);
/// DELTA_ATTENTION_SMALL=1: few and small sampled cases, for compute-sanitizer.
bool small_run();

}  // namespace delta_attention::test
