#pragma once

// What the two launches of v5_chunkwise share: how sequences are cut into chunks, and how the factors of a chunk lie in memory.

#include <cstdint>
#include <type_traits>

#include "cuda/device/mma.cuh"
#include "problem/problem.h"

namespace delta_attention::chunkwise {

constexpr int kChunk = 32;  // tokens

/// What q, k, v and out are made of says how many bf16 terms hold a number: as many as its own bits ask for, and with the range of f32.
template <class Element>
struct TermsOf;
template <>
struct TermsOf<BFloat16> : std::integral_constant<int, 1> {};
template <>
struct TermsOf<Half> : std::integral_constant<int, 2> {};
template <>
struct TermsOf<float> : std::integral_constant<int, 3> {};

/// Tokens [begin, begin + rows) of a batch row.
struct Tokens {
  std::int64_t begin;
  int rows;
};

/// Sequences are cut into spans (from one intermediate state to the next; without them, one span), and spans into chunks, so that every
/// intermediate state is the state after some chunk.
struct Chunking {
  std::int64_t span;     // tokens
  std::int64_t in_span;  // chunks

  DELTA_ATTENTION_HOST_DEVICE static Chunking of(const Problem& p) {
    constexpr std::int64_t kEndless = std::int64_t{1} << 30;  // no sequence is longer: see unsupported()
    const std::int64_t span = p.state_interval > 0 && p.state_interval < kEndless ? p.state_interval : kEndless;
    return {span, ceil_div(span, kChunk)};
  }
  DELTA_ATTENTION_HOST_DEVICE std::int64_t chunks(std::int64_t tokens) const { return count(tokens, kChunk - 1); }
  /// How many of the chunks of a sequence of `tokens` tokens are full, its spans' last ones counted as such.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t full_chunks(std::int64_t tokens) const { return count(tokens, 0); }

  /// Packed sequences: the number of the first chunk of sequence n, which begins at token `begin` of all. Found without looking at the sequences
  /// before: cut at any token, tokens make at most one chunk more than uncut, so each sequence gets one place more than it would need if its
  /// chunks went on where the one before stopped. Numbers that are left over name no chunk.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t first_chunk(std::int64_t n, std::int64_t begin) const { return full_chunks(begin) + n; }

  /// How many numbers the chunks of all sequences take.
  std::int64_t numbers(const Problem& p) const {
    if (!p.cu_seqlens.present) return p.sequences * chunks(p.tokens);
    return p.sequences == 0 ? 0 : first_chunk(p.sequences, p.tokens);
  }

 private:
  /// What the last span leaves over counts with `more` tokens.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t count(std::int64_t tokens, int more) const {
    if (in_span > tokens) return (tokens + more) / kChunk;
    return tokens / span * in_span + (tokens % span + more) / kChunk;
  }
};

/// Goes through a sequence chunk by chunk.
class ChunkCursor {
 public:
  /// Before chunk `chunk`.
  __device__ ChunkCursor(const Chunking& chunking, const Sequence& sequence, std::int64_t chunk) {
    std::int64_t in_span = chunk * kChunk, before = in_span;
    if (chunk >= chunking.in_span) {
      in_span = chunk % chunking.in_span * kChunk;
      before = chunk / chunking.in_span * chunking.span + in_span;
    }
    begin_ = sequence.begin + before;
    left_ = static_cast<int>(sequence.length - before);
    span_ = static_cast<int>(chunking.span);
    left_of_span_ = span_ - static_cast<int>(in_span);
  }
  /// The next chunk; no tokens past the end.
  __device__ __forceinline__ Tokens next() {
    int rows = left_of_span_ < kChunk ? left_of_span_ : kChunk;
    if (left_ < rows) rows = left_ > 0 ? left_ : 0;
    const Tokens tokens = {begin_, rows};
    begin_ += rows;
    left_ -= rows;
    left_of_span_ = rows == left_of_span_ ? span_ : left_of_span_ - rows;
    return tokens;
  }

 private:
  std::int64_t begin_;
  int span_, left_, left_of_span_;
};

/// The factors of one chunk of one value head, as they lie in global and in shared memory. Matrices are sums of `terms` planes of bf16,
/// each term what the ones before leave. Rows are swizzled in 16-byte pieces (cuda/device/mma.cuh).
///
/// With b_i the decay from before the chunk up to token i, one factor a channel, and d the decay from token i to the end of the chunk:
struct Image {
  int terms;
  int keys;  // channels, padded

  constexpr int wide() const { return kChunk * keys * 2; }
  constexpr int square() const { return kChunk * kChunk * 2; }

  // For R. (The delta update alone reads it, so that the additive one can leave it out.)
  constexpr int predict() const { return 0; }                               // [token i][channel]  -b_i k_i
  // For the next state.
  constexpr int accumulate() const { return predict() + terms * wide(); }   // [token i][channel]  T^T (d k)
  constexpr int decays() const { return accumulate() + terms * wide(); }    // [channel]  f32, over the chunk
  // For the outputs.
  constexpr int read() const { return decays() + keys * 4; }                // [token i][channel]  b_i q_i scale
  constexpr int attend() const { return read() + terms * wide(); }          // [token i][token j]  A T, j <= i
  constexpr int bytes() const { return attend() + terms * square(); }
};

/// Where the element (row, column) of a plane with rows of kKeys channels lies, in bytes.
template <int kKeys>
__device__ __forceinline__ int wide_offset(int row, int column) {
  return swizzled<kKeys / 8>(row, column / 8) * 16 + column % 8 * 2;
}

/// The 16-byte piece (row, piece) of a plane with rows of 32 tokens: of eight rows that ldmatrix reads together, two share each piece's
/// number, and those lie 64 bytes apart.
__device__ __forceinline__ int square_piece(int row, int piece) { return row * 4 + (piece ^ ((row >> 1) & 3)); }
__device__ __forceinline__ int square_offset(int row, int column) { return square_piece(row, column / 8) * 16 + column % 8 * 2; }

/// x as a sum of kTerms bf16 numbers, two x at a time, packed: what each term leaves is the next one's.
template <int kTerms>
__device__ __forceinline__ void split(float low, float high, unsigned (&terms)[kTerms]) {
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    terms[t] = pack<BFloat16>(low, high);
    const float2 taken = unpack<BFloat16>(terms[t]);
    low -= taken.x;
    high -= taken.y;
  }
}

struct Params {
  Problem problem;
  unsigned char* factors = nullptr;  // [chunk][value head] images
  std::int64_t chunks = 0;           // of a sequence that is a batch row
  int group = 1;                     // value heads of a head of k
  // Rows of q, k and gates can be read two channels at a time, those of v and out in pieces of 16 bytes.
  bool pairs_in_q = false, pairs_in_k = false, pairs_in_gate = false, pieces_in_v = false, pieces_in_out = false;
};

/// The number of the first chunk of sequence n.
__device__ __forceinline__ std::int64_t first_chunk_of(const Params& params, std::int64_t n) {
  const Problem& p = params.problem;
  return p.cu_seqlens.present ? Chunking::of(p).first_chunk(n, p.sequence_offset(n)) : n * params.chunks;
}

}  // namespace delta_attention::chunkwise
