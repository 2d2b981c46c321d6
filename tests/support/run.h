#pragma once

// Runs a kernel on Inputs through the public API, with every operand in guarded memory, and compares with the float64 oracle.

#include <memory>
#include <string>
#include <vector>

#include "support/buffers.h"
#include "support/cases.h"

namespace delta_attention::test {

/// Where an operand's elements lie: the order of axes from the outermost to the innermost in memory (empty: as they come), extra
/// elements after each level's last entry, and how many elements past an aligned address the first one is.
struct Placement {
  std::vector<int> order;
  std::vector<Index> pad;
  Index offset = 0;
};

struct Placements {
  Placement q, k, v, log_decay, beta, initial_state, initial_normalizer, out, final_state, final_normalizer;
  Placement intermediate_states;
};

/// The placements that the case's layout asks for.
Placements placements_of(const Case& problem);

struct Outputs {
  Array out, final_state, final_normalizer, intermediate_states;
};
bool operator==(const Outputs& a, const Outputs& b);  // same bits, except that -0 == 0

struct CallOptions {
  Placements placements;
  unsigned char guard = kNanByte;
  bool in_place = false;  // final_state is initial_state's memory, and the normalisers likewise
};

/// One operand in guarded memory.
class Stored {
 public:
  Stored(const Array& array, const Placement& placement, Device device, unsigned char guard);
  ConstTensor view() const { return view_; }
  Tensor writable() const;
  void put(const Array& array);  // new numbers of the same shape
  Array get() const;
  void poison();  // every byte back to the guard byte
  /// Bytes that are not an element's still hold the guard.
  bool gaps_intact() const;
  bool unchanged() const { return buffer_->unchanged(); }

 private:
  template <class Visit>
  void for_each_element(Visit visit) const;
  Array like_;
  Extents strides_{};
  Index offset_ = 0;
  std::unique_ptr<GuardedBuffer> buffer_;
  ConstTensor view_;
};

/// Arguments for delta_attention_forward whose memory this object owns. Outputs start as NaN.
class Call {
 public:
  Call(const Inputs& inputs, Device device, const CallOptions& options);
  Call(const Inputs& inputs, Device device);  // the case's own layout

  ForwardArgs args;

  /// Runs and waits. Whatever forward throws passes through.
  void run(const Execution& execution);
  /// Downloads the outputs; adds a test failure for written guards, gaps or inputs.
  Outputs outputs() const;
  /// No output byte has been written.
  bool outputs_untouched() const;
  void poison_outputs();
  void fill_outputs(float value);
  void put(const Inputs& inputs);

 private:
  struct Operand {
    const char* name;
    std::unique_ptr<Stored> stored;
  };
  ConstTensor add_input(const char* name, const Array& array, const Placement& placement);
  Tensor add_output(const char* name, const Array& array, const Placement& placement);

  Device device_;
  CallOptions options_;
  std::vector<Operand> inputs_, outputs_;
  std::unique_ptr<GuardedBuffer> offsets_;  // cu_seqlens
};

/// A number of a floating storage type from its bytes.
float decode(const unsigned char* source, DType dtype);

/// What the float64 oracle says, every number in float64.
struct Truth {
  std::vector<double> out, final_state, final_normalizer, intermediate_states;
};
Truth oracle(const Inputs& inputs);

/// ||got - truth|| / ||truth||, 0 where both are 0.
double relative_error(const std::vector<float>& got, const std::vector<double>& truth);

/// Products of f32 numbers.
constexpr int kF32Bits = 24;

/// The relative error that a result of type `storage` may have, by the derivation in compare.cpp. `product_bits`: bits of what is
/// multiplied (Kernel::product_bits).
double bar_for(const Case& problem, DType storage, const std::vector<double>& truth, int product_bits = kF32Bits);

/// Compares outputs and states with the oracle under those tolerances; adds test failures.
void expect_matches(const Inputs& inputs, const Outputs& got, const Truth& truth, int product_bits = kF32Bits);

/// Adds a failure for the first element that differs by more than abs_tolerance + rel_tolerance * |expected|.
void expect_near(const std::vector<float>& got, const std::vector<float>& expected, double absolute, double relative,
                 const std::string& what);

}  // namespace delta_attention::test
