// The device side of the tuner, on the CPU and, where there is one, on a GPU.

#include "tune_bench.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace delta_attention::cli {
namespace {

std::vector<Device> devices() {
  std::string reason;
  return list_gpus(reason).empty() ? std::vector<Device>{cpu()} : std::vector<Device>{cpu(), cuda(0)};
}

const char* kernel_of(Device device) { return device.type == DeviceType::cpu ? "cpu_chunkwise" : "v1_chunk_pipeline"; }

TuneCandidate candidate_of(const char* recurrence, std::int64_t D, std::int64_t T, const char* kernel) {
  TuneCandidate candidate;
  candidate.problem.recurrence = recurrence;
  candidate.problem.D = D;
  candidate.problem.B = 2;
  candidate.problem.T = T;
  candidate.problem.H = 2;
  candidate.kernel = kernel;
  return candidate;
}

TEST(TuneBench, ErrorsAreThoseOfF32) {
  for (Device device : devices()) {
    DeviceBench bench(device);
    for (const char* recurrence : {"kda", "gated_delta_net", "normalized_linear"}) {
      const double error = bench.error(candidate_of(recurrence, 64, 512, kernel_of(device)));
      EXPECT_GT(error, 1e-9) << recurrence;  // the exact result is not its own
      EXPECT_LT(error, 2e-6 * std::sqrt(64.0)) << recurrence;
    }
  }
}

TEST(TuneBench, TimesComeAsOftenAsAsked) {
  for (Device device : devices()) {
    DeviceBench bench(device);
    // More than one block of tokens, and no multiple of one.
    const TuneCandidate candidate = candidate_of("kda", 32, 300, kernel_of(device));
    EXPECT_EQ(bench.refusal(candidate), "");
    const std::vector<double> times = bench.times_us(candidate, 3, std::numeric_limits<double>::infinity());
    ASSERT_EQ(times.size(), 3u);
    for (double time : times) EXPECT_GT(time, 0.0);
    EXPECT_EQ(bench.times_us(candidate, 3, 0.0).size(), 1u);
  }
}

TEST(TuneBench, SaysWhyAKernelRefuses) {
  DeviceBench bench(cpu());
  EXPECT_NE(bench.refusal(candidate_of("kda", 32, 64, "no_such_kernel")), "");
}

TEST(Repeated, FillsWithWholeBlocksAndTheRest) {
  const float block[3] = {1, 2, 3};
  for (Device device : devices()) {
    for (std::int64_t count : {1, 3, 4, 6, 20}) {
      const OwnedTensor x = repeated(tensor(block, {3}), tensor(static_cast<const float*>(nullptr), {count}), device);
      const std::vector<double> values = downloaded(x.view);
      ASSERT_EQ(values.size(), static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], block[i % 3]) << i << " of " << count;
    }
  }
}

}  // namespace
}  // namespace delta_attention::cli
