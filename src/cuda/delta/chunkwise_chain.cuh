#pragma once

// The second launch of v5_chunkwise: the state, chunk after chunk, and the outputs. chunkwise.cu tells the story.
//
// A block takes one (sequence, value head) and a slice of its value columns, shared out to teams of warps. There are two kinds of teams:
//     three warps for 16 columns   where chains are few: what follows one after the other within a chunk is as short as it gets
//                                  (chunkwise_three_warps.cuh)
//     two warps for 32 columns     where chains are many: each factor read from shared memory serves twice as many columns, and less is handed
//                                  from warp to warp (chunkwise_two_warps.cuh)
// Chunks are loaded as many ahead as there are stages, by one more warp or by all. Nobody waits for everybody: stages, and what a team's warps have
// for each other, are handed over at barriers in shared memory (cuda/device/arrivals.cuh). Whoever arrives at one has seen the round before end;
// where nothing else makes it wait for that, it looks once more, which never takes long.
//
// Images of which a block has no room for two come in three sections, one for each of the products with wide factors, and a stage holds one of
// them: the room is for what is read at the time and next. So every K and dtype has its chain also with the least shared memory that GPUs have
// (99 KiB a block). Where two whole images fit, sections would be a few percent slower: there is more to wait for.

#include <cstdint>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/delta/chunkwise_products.cuh"
#include "cuda/device/arrivals.cuh"
#include "cuda/device/warp.cuh"
#include "state/gate.h"

namespace delta_attention::chunkwise {

/// What both kinds of teams have in common.
template <class Element_, int kKeys_, int kTeamWarps_, int kBands_, bool kInSections_ = false>
struct ChainPolicy {
  using Element = Element_;
  static constexpr int kTerms = TermsOf<Element>::value;
  static constexpr int kKeys = kKeys_;
  static constexpr Image kImage = {kTerms, kKeys};
  static constexpr int kSteps = kKeys / 16;  // products that a whole state takes, one behind the other
  static constexpr int kTeamWarps = kTeamWarps_;
  static constexpr int kBands = kBands_;  // of a warp
  static constexpr int kColumns = kBands * kBand;

  static constexpr bool kInSections = kInSections_;  // whether a stage holds a section of an image, not all of it
  static constexpr int kSections = kInSections ? 3 : 1;
  static constexpr int kEnoughStages = kInSections ? 4 : 2;  // so that what is read next is there
  /// Where section n begins in the image; kSections: where the image ends.
  static DELTA_ATTENTION_HOST_DEVICE constexpr int section(int n) {
    return n == 0 ? 0 : n == kSections ? kImage.bytes() : n == 1 ? kImage.accumulate() : kImage.read();
  }
  // Where things lie in a stage. The values come with the first section, behind it.
  static constexpr int kPredict = 0;
  static constexpr int kAccumulate = kInSections ? 0 : kImage.accumulate();
  static constexpr int kDecays = kAccumulate + kImage.decays() - kImage.accumulate();
  static constexpr int kRead = kInSections ? 0 : kImage.read();
  static constexpr int kAttend = kRead + kImage.attend() - kImage.read();
  static constexpr int kValues = kInSections ? kImage.accumulate() : kImage.bytes();
};

/// A stage is full when its image (or section) and values are there, and empty when all who read it are done.
struct StageArrivals {
  Arrivals full, empty;
};

/// Shared memory of a block: a ring of stages, each for the image of a chunk (or a section) and its values, and what each team has for itself.
template <class P>
struct ChainShared {
  int teams, stages;
  int states = 1;  // places for a team's state as an operand: with two, the warps that write it may be a chunk ahead of those that read it

  DELTA_ATTENTION_HOST_DEVICE int value_pitch() const { return teams * P::kColumns * static_cast<int>(sizeof(typename P::Element)) + 16; }
  /// Rows of images stay aligned to their length, which addresses are computed with.
  DELTA_ATTENTION_HOST_DEVICE int stage_bytes() const {
    int most = P::kValues + kChunk * value_pitch();
    for (int n = 1; n < P::kSections; ++n) {
      const int bytes = P::section(n + 1) - P::section(n);
      if (bytes > most) most = bytes;
    }
    return (most + 1023) / 1024 * 1024;
  }
  DELTA_ATTENTION_HOST_DEVICE int stage_arrivals_offset() const { return stages * stage_bytes() + teams * team_bytes(); }
  DELTA_ATTENTION_HOST_DEVICE int team_bytes() const { return P::team_bytes(states); }
  DELTA_ATTENTION_HOST_DEVICE int bytes() const { return stage_arrivals_offset() + stages * static_cast<int>(sizeof(StageArrivals)); }
};

template <class P>
DELTA_ATTENTION_HOST_DEVICE constexpr int chain_threads(int teams) {
  return (P::kTeamWarps * teams + (P::kHasLoader ? 1 : 0)) * kWarpSize;
}

/// What a block works on. Warp `role` of each team comes before warp `role` + 1 of any.
struct ChainPlace {
  std::int64_t sequence, value_head;
  Sequence tokens;
  std::int64_t first_chunk;
  int chunks;
  std::int64_t first_column;  // of the block
  int teams, team, role;
};

template <class P>
__device__ __forceinline__ ChainPlace chain_place_of(const Params& params, std::int64_t block, int teams) {
  const Problem& p = params.problem;
  const std::int64_t slices = ceil_div(p.value_dim, std::int64_t{teams} * P::kColumns);
  const std::int64_t slice = block % slices, head = block / slices % p.value_heads, n = block / slices / p.value_heads;
  const int warp = threadIdx.x / kWarpSize;
  const Sequence tokens = p.sequence(n);
  const auto chunks = static_cast<int>(Chunking::of(p).chunks(tokens.length));
  return {n, head, tokens, first_chunk_of(params, n), chunks, slice * teams * P::kColumns, teams, warp % teams, warp / teams};
}

// ------------------------------------------------------------------------------------------------------------------------------ state

/// Calls visit(element, offset) for every element of state number n of `operand` that this lane has and that exists, of a band that starts at
/// value column `column`, from channel 16 `first` on.
template <int kCount, class Operand, class State, class Visit>
__device__ __forceinline__ void for_state(const Problem& p, const Operand& operand, std::int64_t n, std::int64_t value_head, int first,
                                          std::int64_t column, State& state, const Visit& visit) {
  const int lane = threadIdx.x % kWarpSize, first_channel = first * 16 + lane % 4 * 2;
  const std::int64_t first_column = column + lane / 4;
  const int channels = static_cast<int>(p.key_dim) - first_channel, columns = static_cast<int>(p.value_dim - first_column);
  const std::int64_t start = operand.offset(n, value_head, first_channel, first_column);
#pragma unroll
  for (int i = 0; i < kCount * 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int channel = i * 8 + e % 2, column_after = e / 2 * 8;
      if (channel < channels && column_after < columns) {
        visit(state[i][e], start + channel * operand.strides[2] + column_after * operand.strides[3]);
      }
    }
  }
}

/// The channels from 16 `first` on, of the initial state; columns[band]: where a band starts.
template <class P, int kCount>
__device__ __forceinline__ void load_state(const Problem& p, const ChainPlace& place, int first, const std::int64_t (&columns)[P::kBands],
                                           StateSums<kCount> (&state)[P::kBands]) {
#pragma unroll
  for (int band = 0; band < P::kBands; ++band) {
    for_state<kCount>(p, p.initial_state, place.sequence, place.value_head, first, columns[band], state[band],
                      [&](float& x, std::int64_t offset) { x = p.initial_state.load(offset); });
  }
}

/// As state number n of `to`.
template <class P, int kCount>
__device__ __forceinline__ void store_state(const Problem& p, const ChainPlace& place, int first, const std::int64_t (&columns)[P::kBands],
                                            const OutputOperand& to, std::int64_t n, const StateSums<kCount> (&state)[P::kBands]) {
#pragma unroll
  for (int band = 0; band < P::kBands; ++band) {
    for_state<kCount>(p, to, n, place.value_head, first, columns[band], state[band], [&](float x, std::int64_t offset) { to.store(offset, x); });
  }
}

/// Which of a sequence's chunks end with an intermediate state, and where that goes.
struct IntermediateStates {
  int in_span = 0, until = 0;  // chunks of a span, and until the next one ends
  int next = 0, left = 0;      // numbers

  /// All lanes of a warp, which counts those of the packed sequences before.
  __device__ IntermediateStates(const Problem& p, const ChainPlace& place) {
    if (!p.intermediate_states.present) return;
    std::int64_t first = place.sequence * p.intermediate_count(place.tokens);
    if (p.cu_seqlens.present) {
      int before = 0;
      for (std::int64_t n = threadIdx.x % kWarpSize; n < place.sequence; n += kWarpSize) {
        before += static_cast<int>(p.intermediate_count(p.sequence(n)));
      }
      first = __reduce_add_sync(kFullWarp, before);
    }
    std::int64_t count = p.intermediate_count(place.tokens);
    if (count > p.intermediate_capacity() - first) count = p.intermediate_capacity() - first;  // wrong offsets
    next = static_cast<int>(first);
    left = static_cast<int>(count);
    in_span = until = static_cast<int>(Chunking::of(p).in_span);
  }
  /// After each chunk: whether to store.
  __device__ __forceinline__ bool is_next() {
    if (left <= 0 || --until > 0) return false;
    until = in_span;
    --left;
    return true;
  }
};

// ---------------------------------------------------------------------------------------------------------------------------- outputs

/// A band's outputs of a chunk on their way: [token][16-byte piece], pieces swizzled for those who write eight tokens at a time.
template <class Element>
struct StagedOutputs {
  static constexpr int kPiece = 16 / sizeof(Element), kPieces = kBand / kPiece;
  static constexpr int kBytes = kChunk * kPieces * 16;
  static __device__ __forceinline__ int at(int token, int piece) { return token * kPieces + (piece ^ (token / (8 / kPieces) % kPieces)); }
};

/// A band's outputs through shared memory to global memory, chunk after chunk, in pieces of 16 bytes. One warp.
template <class Element>
struct Outputs {
  using Staged = StagedOutputs<Element>;
  static constexpr int kRows = kWarpSize / Staged::kPieces;  // at once

  Element* next;        // this lane's piece of its first row
  std::int64_t stride;  // of tokens
  int left;             // columns from there on
  uint4* staged;

  __device__ Outputs(const Problem& p, const ChainPlace& place, std::int64_t column, uint4* staging) : stride(p.out.strides[1]), staged(staging) {
    const int lane = threadIdx.x % kWarpSize;
    const std::int64_t own_column = column + lane % Staged::kPieces * Staged::kPiece;
    next = static_cast<Element*>(p.out.data) +
           p.out.offset(place.tokens.batch, place.tokens.begin + lane / Staged::kPieces, place.value_head, own_column);
    left = static_cast<int>(p.value_dim - own_column);
  }

  __device__ __forceinline__ void store(const Params& params, int rows, const TokenSums& out) {
    stage(out);
    const int row = threadIdx.x % kWarpSize / Staged::kPieces, piece = threadIdx.x % Staged::kPieces;
    constexpr int kTimes = kChunk / kRows;
    uint4 pieces[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) pieces[i] = staged[Staged::at(i * kRows + row, piece)];
    Element* to = next;
    next += rows * stride;
    if (params.pieces_in_out && left >= Staged::kPiece) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i, to += kRows * stride) {
        if (i * kRows + row < rows) *reinterpret_cast<uint4*>(to) = pieces[i];
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kTimes; ++i, to += kRows * stride) {
        const auto* from = reinterpret_cast<const Element*>(staged + Staged::at(i * kRows + row, piece));
        for (int e = 0; e < Staged::kPiece && e < left && i * kRows + row < rows; ++e) to[e] = from[e];
      }
    }
  }

 private:
  __device__ __forceinline__ void stage(const TokenSums& out) const {
    const int lane = threadIdx.x % kWarpSize;
    __syncwarp();  // every lane has read the chunk before
    if constexpr (sizeof(Element) == 2) {
      // Matrices of 8 columns by 8 tokens, transposed on their way.
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = pack<Element>(out[pair * 2 + i / 2][i % 2 * 2], out[pair * 2 + i / 2][i % 2 * 2 + 1]);
        store_matrices_transposed(shared_address(staged + Staged::at(pair * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2)), x);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int in_band = e / 2 * 8 + lane / 4;
          reinterpret_cast<Element*>(staged + Staged::at(token_of(n, e % 2), in_band / Staged::kPiece))[in_band % Staged::kPiece] = out[n][e];
        }
      }
    }
    __syncwarp();
  }
};

// ----------------------------------------------------------------------------------------------------------------------- hand-overs

/// Where a team's warps leave things for each other, as one of them sees it.
template <class P>
struct TeamExchange {
  unsigned char* own;   // this lane's part of what lies [...][lane], 16 bytes each
  uint4* outputs;       // on their way out
  Arrivals* handovers;  // of each kind one
  int round = 0;        // the chunk's number, its last bit

  /// `outputs_place`: which of those for staged outputs is this warp's.
  __device__ TeamExchange(const ChainShared<P>& shared, unsigned char* memory, int team, int outputs_place) {
    const unsigned start = shared_address(memory) + shared.stages * shared.stage_bytes() + team * shared.team_bytes();
    own = shared_pointer<unsigned char>(kept(start + threadIdx.x % kWarpSize * 16));
    outputs = shared_pointer<uint4>(kept(start + P::outputs_offset(shared.states) + outputs_place * StagedOutputs<typename P::Element>::kBytes));
    handovers = shared_pointer<Arrivals>(kept(start + P::handovers_offset(shared.states)));
  }

  __device__ __forceinline__ void arrive(int handover) const { arrive_at(handovers[handover]); }
  __device__ __forceinline__ void await(int handover) const { wait_for_arrivals(handovers[handover], round); }
  __device__ __forceinline__ void await_round_before(int handover) const { wait_for_arrivals(handovers[handover], round ^ 1); }
};

// -------------------------------------------------------------------------------------------------------------------------- the ring

/// The ring of stages as one warp goes through it.
template <class P>
struct Ring {
  const ChainShared<P>& shared;
  const int stage_bytes;
  unsigned char* const first_stage;
  StageArrivals* const first_arrivals;
  unsigned char* stage = first_stage;
  StageArrivals* arrivals = first_arrivals;
  int slot = 0, round = 0;

  __device__ Ring(const ChainShared<P>& s, unsigned char* memory)
      : shared(s),
        stage_bytes(s.stage_bytes()),
        first_stage(shared_pointer<unsigned char>(kept(shared_address(memory)))),
        first_arrivals(shared_pointer<StageArrivals>(kept(shared_address(memory + s.stage_arrivals_offset())))) {}

  /// Before any warp uses it. One thread.
  __device__ __forceinline__ void prepare() const {
    const int readers = P::kTeamWarps * kWarpSize * shared.teams;
    for (int i = 0; i < shared.stages; ++i) {
      prepare_arrivals(first_arrivals[i].full, P::kHasLoader ? kWarpSize : readers);
      prepare_arrivals(first_arrivals[i].empty, readers);
    }
  }
  __device__ __forceinline__ void advance() {
    stage += stage_bytes;
    ++arrivals;
    if (++slot < shared.stages) return;
    slot = 0;
    round ^= 1;
    stage = first_stage;
    arrivals = first_arrivals;
  }

  /// The next stage, once it is full. Who has passed a section without waiting for that could be a round ahead, and take the one before for its own.
  __device__ __forceinline__ const unsigned char* next() const {
    if constexpr (P::kInSections) await_empty();
    wait_for_arrivals(arrivals->full, round);
    return stage;
  }
  /// Until all are done with what the next stage held before. (Of the first round, there is nothing to wait for.)
  __device__ __forceinline__ void await_empty() const { wait_for_arrivals(arrivals->empty, round ^ 1); }
  /// This warp is done with it, and has seen it empty before.
  __device__ __forceinline__ void let_go() {
    arrive_at(arrivals->empty);
    advance();
  }

  /// On to the next section of the image; a whole image is in one stage.
  __device__ __forceinline__ void pass_section() {
    if constexpr (P::kInSections) {
      let_go();
      await_empty();
    }
  }
  /// The stage of the next section, after `stage`.
  __device__ __forceinline__ const unsigned char* next_section(const unsigned char* stage) {
    if constexpr (!P::kInSections) return stage;
    let_go();
    return next();
  }
};

/// The block's values, chunk after chunk, on their way to the stages, in pieces of 16 bytes: this lane's part of them. Lanes lie along rows, so
/// that a warp reads as few rows at once as it can.
template <class P>
struct Values {
  using Element = typename P::Element;
  static constexpr int kPiece = 16 / sizeof(Element);

  const Element* next;        // this lane's piece of its first row
  std::int64_t stride;        // of tokens
  int left;                   // columns from there on
  int first_row, rows, step;  // of this lane: the first one, how many, and how far apart
  int offset, pitch;          // in a stage, bytes

  /// Warp `warp` of `warps` that share the work.
  __device__ Values(const Problem& p, const ChainPlace& place, int value_pitch, int warp, int warps)
      : stride(p.v.strides[1]), pitch(value_pitch) {
    const int lane = threadIdx.x % kWarpSize, pieces = place.teams * P::kColumns / kPiece, column = lane % pieces * kPiece;
    step = kWarpSize / pieces;
    rows = kChunk / warps / step;
    first_row = warp * (kChunk / warps) + lane / pieces;
    next = static_cast<const Element*>(p.v.data) +
           p.v.offset(place.tokens.batch, place.tokens.begin + first_row, place.value_head, place.first_column + column);
    left = static_cast<int>(p.value_dim - place.first_column) - column;
    offset = P::kValues + first_row * pitch + column * static_cast<int>(sizeof(Element));
  }

  /// Starts to copy those of a chunk of `tokens` tokens, and arrives with them at `full`; tokens and columns that do not exist become 0.
  __device__ __forceinline__ void load(const Params& params, int tokens, unsigned char* stage, Arrivals& full) {
    const Element* from = next;
    unsigned char* to = stage + offset;
    next += tokens * stride;
#pragma unroll 2
    for (int i = 0; i < rows; ++i, from += step * stride, to += step * pitch) {
      const int exist = first_row + i * step < tokens ? left : 0;
      if (!params.pieces_in_v) {
        for (int e = 0; e < kPiece; ++e) reinterpret_cast<Element*>(to)[e] = e < exist ? from[e] : from_float<Element>(0.0f);
      } else if (exist >= kPiece) {
        start_copy(to, from, 16);
      } else {
        start_copy(to, exist > 0 ? from : params.problem.v.data, exist > 0 ? exist * static_cast<int>(sizeof(Element)) : 0);
      }
    }
    if (params.pieces_in_v) {
      arrive_when_copied(full);
    } else {
      arrive_with_copies(full);
    }
  }
};

/// The images of a chain's chunks in global memory.
struct Images {
  const unsigned char* next;
  std::int64_t stride;
  int begin;  // of what is needed of an image, bytes: the additive update needs less

  template <class P>
  static __device__ __forceinline__ Images of(const Params& params, const ChainPlace& place) {
    const Problem& p = params.problem;
    const std::int64_t image = P::kImage.bytes(), stride = p.value_heads * image;
    const int begin = p.update == Update::delta ? 0 : P::kImage.accumulate();
    return {params.factors + place.first_chunk * stride + place.value_head * image, stride, begin};
  }
};

/// A warp that loads for all teams.
template <class P>
__device__ __forceinline__ void run_loading(const Params& params, const ChainPlace& place, Ring<P> ring) {
  Images images = Images::of<P>(params, place);
  Values<P> values(params.problem, place, ring.shared.value_pitch(), 0, 1);
  ChunkCursor cursor(Chunking::of(params.problem), place.tokens, 0);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left, images.next += images.stride) {
#pragma unroll
    for (int n = 0; n < P::kSections; ++n) {
      const int begin = P::section(n), from = begin < images.begin ? images.begin : begin, bytes = P::section(n + 1) - from;
      ring.await_empty();
      Arrivals& full = ring.arrivals->full;
      wait_for_arrivals(full, ring.round ^ 1);
      if (bytes > 0) start_bulk_copy(ring.stage + (from - begin), images.next + from, bytes, full);
      if (n == 0) {
        values.load(params, cursor.next().rows, ring.stage, full);
      } else {
        arrive_when_copied(full);
      }
      ring.advance();
    }
  }
}

}  // namespace delta_attention::chunkwise
