#pragma once

// The checked softmax problem: what every softmax kernel is handed, like Problem for the recurrences.

#include "delta_attention/softmax_attention.h"
#include "problem/problem.h"

namespace delta_attention {

/// Rows of q and keys of one sequence.
struct SequencePair {
  std::int64_t batch = 0;  // row of q and, unless paged, of k and v
  std::int64_t query_begin = 0, queries = 0;
  std::int64_t key_begin = 0, keys = 0;
};

/// Keys [begin, end) of a sequence.
struct KeyRange {
  std::int64_t begin = 0, end = 0;
};

struct SoftmaxProblem {
  std::int64_t batch = 0;      // B
  std::int64_t queries = 0;    // Nq, of each batch row or of all packed sequences together
  std::int64_t keys = 0;       // Nkv, likewise; with pages, the most that a sequence can have
  std::int64_t sequences = 0;  // N
  std::int64_t heads = 0;      // H
  std::int64_t key_heads = 0;  // Hkv
  std::int64_t head_dim = 0;   // D
  std::int64_t pages = 0, page_size = 0;

  InputOperand q, k, v, valid_len, mask, cu_seqlens_q, cu_seqlens_kv, block_table;
  OutputOperand out, lse;

  bool causal = false;
  Alignment alignment = Alignment::bottom_right;
  std::int64_t window_left = -1;
  float softcap = 0.0f;
  float scale = 1.0f;

  DType dtype = DType::f32;  // of q, k, v and out
  bool has_f64 = false;
  Device device;

  DELTA_ATTENTION_HOST_DEVICE bool paged() const { return block_table.present; }

  DELTA_ATTENTION_HOST_DEVICE std::int64_t key_head(std::int64_t head) const { return head / (heads / key_heads); }

  /// An entry of an integer operand, kept inside [0, most]: what lies in device memory is not checked before launch, and a wrong one must
  /// not become a wild access.
  DELTA_ATTENTION_HOST_DEVICE static std::int64_t load_count(const InputOperand& operand, std::int64_t at,
                                                             std::int64_t most) {
    const std::int64_t value = operand.dtype == DType::i32
                                   ? static_cast<std::int64_t>(static_cast<const std::int32_t*>(operand.data)[at])
                                   : static_cast<const std::int64_t*>(operand.data)[at];
    return value < 0 ? 0 : (value > most ? most : value);
  }

  /// Sequence n. Reads memory of the problem's device where lengths are given.
  DELTA_ATTENTION_HOST_DEVICE SequencePair sequence(std::int64_t n) const {
    SequencePair s = {n, 0, queries, 0, keys};
    const auto cut = [n](const InputOperand& offsets, std::int64_t most, std::int64_t& begin, std::int64_t& length) {
      begin = load_count(offsets, n * offsets.strides[0], most);
      const std::int64_t end = load_count(offsets, (n + 1) * offsets.strides[0], most);
      length = end > begin ? end - begin : 0;
    };
    if (cu_seqlens_q.present) {
      s.batch = 0;
      cut(cu_seqlens_q, queries, s.query_begin, s.queries);
    }
    if (cu_seqlens_kv.present) cut(cu_seqlens_kv, keys, s.key_begin, s.keys);
    if (valid_len.present) s.keys = load_count(valid_len, n * valid_len.strides[0], s.keys);
    return s;
  }

  /// The keys that row `row` of a sequence can see by causality and window.
  DELTA_ATTENTION_HOST_DEVICE KeyRange visible(const SequencePair& s, std::int64_t row) const {
    const std::int64_t stands_at = alignment == Alignment::top_left ? row : row + s.keys - s.queries;
    KeyRange range = {0, s.keys};
    if (causal && stands_at + 1 < range.end) range.end = stands_at + 1 < 0 ? 0 : stands_at + 1;
    if (window_left >= 0 && stands_at - window_left > 0) range.begin = stands_at - window_left;
    if (range.begin > range.end) range.begin = range.end;
    return range;
  }

  /// Where key `key` of sequence n has its row of head `head` in k or v.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t key_offset(const InputOperand& operand, std::int64_t n, const SequencePair& s,
                                                      std::int64_t key, std::int64_t head) const {
    if (!paged()) return operand.offset(s.batch, s.key_begin + key, head);
    // 32 bits are enough (check_softmax.cpp), and GPUs divide them without a call.
    const auto at = static_cast<std::uint32_t>(key), size = static_cast<std::uint32_t>(page_size);
    const std::int64_t page = load_count(block_table, n * block_table.strides[0] + at / size * block_table.strides[1], pages - 1);
    return operand.offset(page, at % size, head);
  }
};

}  // namespace delta_attention
