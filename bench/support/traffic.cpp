#include "support/traffic.h"

#include <algorithm>
#include <map>

namespace bench {
namespace {

/// How a kernel goes through keys and values. Where a score is computed again, its key is read again.
struct Reading {
  std::int64_t rows;                     // of q, of one head, that share what is read
  int key_passes = 1, value_passes = 1;  // how often each such group of rows reads them
};

/// Of the kernels that never write a score.
const std::map<std::string, Reading>& readings() {
  static const std::map<std::string, Reading> all = {
      {"three_pass", {1, 3, 1}},  // maximum, sum, output: scores are computed anew in each pass
      {"naive", {1}},
      {"tiled", {32}},
      {"vec_load", {32}},
      {"vec_padded", {32}},
      {"ping_pong", {32}},
      {"rowmax", {32}},
      {"vec_fused", {32}},
      {"flash_tc", {128}},
  };
  return all;
}

/// Keys that the first `rows` rows see at the most: what a group that ends there has to read.
std::int64_t keys_up_to(const SoftmaxShape& s, std::int64_t rows) {
  return s.causal ? std::clamp(rows + s.keys - s.queries, std::int64_t{0}, s.keys) : s.keys;
}

/// Keys read by all groups of `rows` rows of one head.
double keys_read(const SoftmaxShape& s, std::int64_t rows) {
  double sum = 0.0;
  for (std::int64_t end = rows; end < s.queries + rows; end += rows) {
    sum += static_cast<double>(keys_up_to(s, std::min(end, s.queries)));
  }
  return sum;
}

double count(std::int64_t a, std::int64_t b, std::int64_t c = 1, std::int64_t d = 1) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c) * static_cast<double>(d);
}

/// Bytes of q and out, and of k and v, each once.
double query_bytes(const SoftmaxShape& s) { return 2 * count(s.batch, s.queries, s.heads, s.dim * s.element_bytes); }
double key_bytes(const SoftmaxShape& s) { return 2 * count(s.batch, s.keys, s.key_heads, s.dim * s.element_bytes); }

/// The whole matrix of scores in f32, masked or not: written, read by the softmax, written, read by the second product.
Traffic three_stage(const SoftmaxShape& s) {
  constexpr double kPasses = 4, kBytes = sizeof(float);
  const double scores = count(s.batch, s.heads, s.queries, s.keys);
  return {query_bytes(s) + key_bytes(s) + kPasses * kBytes * scores, 4 * scores * static_cast<double>(s.dim), false};
}

/// Heads that share keys read them together.
Traffic decode(const SoftmaxShape& s) {
  return {query_bytes(s) + key_bytes(s), 4 * count(s.batch, s.heads, s.dim) * visible_pairs(s), false};
}

Traffic by_groups(const SoftmaxShape& s, const Reading& r) {
  const double passes = r.key_passes + r.value_passes, heads = count(s.batch, s.heads);
  return {query_bytes(s) + heads * keys_read(s, r.rows) * passes * count(s.dim, s.element_bytes),
          heads * visible_pairs(s) * passes * 2 * static_cast<double>(s.dim), false};
}

}  // namespace

double visible_pairs(const SoftmaxShape& shape) { return keys_read(shape, 1); }

std::optional<Traffic> softmax_traffic(const std::string& kernel, const SoftmaxShape& shape) {
  if (kernel == "three_stage") return three_stage(shape);
  if (kernel == "decode") return decode(shape);
  const auto found = readings().find(kernel);
  if (found == readings().end()) return std::nullopt;
  Traffic traffic = by_groups(shape, found->second);
  traffic.tensor_cores = kernel == "flash_tc";
  return traffic;
}

double predicted_seconds(const Traffic& traffic, const Ceilings& ceilings) {
  const double rate = traffic.tensor_cores ? ceilings.bf16_mma_flops : ceilings.f32_flops;
  return std::max(traffic.bytes / ceilings.bytes, traffic.flops / rate);
}

}  // namespace bench
