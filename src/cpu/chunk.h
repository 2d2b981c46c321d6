#pragma once

// What the CPU's hot routines are handed: one run of tokens of one head, already f32, in plain arrays. Those routines
// are compiled once per instruction set, so this header holds data only: an inline function compiled for AVX-512 could
// otherwise be the copy that the linker keeps for everyone.

#include <cstdint>

#include "delta_attention/recurrence.h"

namespace delta_attention::cpu_kernels {

using Index = std::int64_t;

constexpr Index kChunkTokens = 32;  // tokens handed over at a time
constexpr Index kBlockTokens = 16;  // tokens solved at a time inside a chunk
constexpr Index kAlignment = 16;  // floats: every row starts on a cache line, and vectors never straddle the end of one

/// Memory that will be needed once the chunk is done: where its output goes and where the next chunk comes from.
struct Run {
  const char* data;
  Index bytes;
};

/// Matrices are row-major; [r][s] below means r rows, s floats apart. Floats between a row's end and its stride are
/// padding: zero in q and k, finite in decay, of no meaning elsewhere (no sum crosses a column).
struct Chunk {
  // The head.
  Index key_dim = 0;
  Index columns = 0;       // of the state, rounded up to kAlignment
  Index key_stride = 0;    // of q, k, decay
  Index value_stride = 0;  // of v, out, state
  Update update = Update::additive;
  Gate gate = Gate::none;
  bool normalize = false;
  float scale = 1.0f;
  float* state = nullptr;       // [key_dim][value_stride], updated in place
  float* normalizer = nullptr;  // [key_dim], updated in place

  // The tokens: what comes in, and out.
  Index tokens = 0;
  float* q = nullptr;      // [tokens][key_stride]
  float* k = nullptr;      // [tokens][key_stride]
  float* decay = nullptr;  // [tokens] for scalar gates, [tokens][key_stride] for channel gates: a, not log a
  float* beta = nullptr;   // [tokens]
  float* v = nullptr;      // [tokens][value_stride]
  float* out = nullptr;    // [tokens][value_stride]

  // What to prefetch meanwhile.
  Run* upcoming = nullptr;
  Index upcoming_count = 0;

  // Scratch; chunkwise.cpp says what for.
  Index token_stride = 0;
  float* query_rows = nullptr;       // [kChunkTokens][key_stride]
  float* key_rows = nullptr;         // [kChunkTokens][key_stride]
  float* block_keys = nullptr;       // [kBlockTokens][key_stride]
  float* keys_by_channel = nullptr;  // [key_dim][token_stride]
  float* query_pairs = nullptr;      // [kChunkTokens][token_stride]
  float* key_pairs = nullptr;        // [kChunkTokens][token_stride]
  float* block_decay = nullptr;      // [key_stride]
  float* chunk_decay = nullptr;      // [key_stride]
  float* token_decay = nullptr;      // [kChunkTokens]
  float* pair_decay = nullptr;       // [kChunkTokens]
  float* prediction = nullptr;       // [kChunkTokens][value_stride]
  float* u = nullptr;                // [kChunkTokens][value_stride]
};

/// Advances state and normaliser over chunk.tokens tokens and fills chunk.out.
using ChunkRoutine = void (*)(const Chunk& chunk);

/// x <- e^x for `size` floats, a multiple of kAlignment, that start on a cache line.
using ExponentiateRow = void (*)(float* row, Index size);

/// x <- x / sqrt(sum x^2 + epsilon) for `size` floats that start on a cache line and are padded with zeros to
/// kAlignment.
using L2NormalizeRow = void (*)(float* row, Index size, float epsilon);

}  // namespace delta_attention::cpu_kernels
