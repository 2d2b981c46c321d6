#pragma once

// One worker's memory, and the traffic between the caller's tensors (any dtype, any stride) and the f32 arrays of a
// Chunk.

#include <cstddef>
#include <memory>
#include <vector>

#include "cpu/chunk.h"
#include "cpu/instruction_set.h"
#include "problem/problem.h"

namespace delta_attention::cpu_kernels {

/// Columns [column, column + count) of the state of one value head in one sequence.
struct HeadSlice {
  Index sequence = 0;
  Index value_head = 0;
  Index column = 0;
  Index count = 0;
};

class HeadBuffers {
 public:
  /// Room for slices of up to `columns` columns. The routines are those that rows are prepared with.
  HeadBuffers(const Problem& problem, const ChunkRoutines& routines, Index columns);

  /// Initial state and normaliser. `normalizers` is [N,HV,K] in f32, or null for zeros.
  void load_state(const HeadSlice& slice, const float* normalizers);
  /// The chunk of `tokens` tokens, at most kChunkTokens, that starts at `token`, of batch row `batch`, with l2 norm, gate
  /// and beta applied. `left` tokens of the sequence remain from its start.
  void load_tokens(const HeadSlice& slice, Index batch, Index token, Index tokens, Index left);
  void store_out(const HeadSlice& slice, Index batch, Index token) const;
  void store_final_state(const HeadSlice& slice) const;
  /// The state as intermediate state `at`.
  void store_intermediate_state(const HeadSlice& slice, Index at) const;

  const Chunk& chunk() const { return chunk_; }

 private:
  void load_key_row(const InputOperand& x, Index batch, Index token, Index head, float* row) const;
  void list_upcoming(const HeadSlice& slice, Index batch, Index token, Index tokens);
  void load_decay(const HeadSlice& slice, Index batch, Index token);
  void store_state(const HeadSlice& slice, const OutputOperand& states, Index at) const;

  struct Free {
    void operator()(float* data) const { ::operator delete (data, std::align_val_t{64}); }
  };
  const Problem& problem_;
  const ChunkRoutines& routines_;
  Chunk chunk_;
  std::unique_ptr<float[], Free> memory_;
  std::vector<Run> upcoming_;
};

}  // namespace delta_attention::cpu_kernels
