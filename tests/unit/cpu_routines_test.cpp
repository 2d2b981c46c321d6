// The hot routines of every instruction set that this processor has, not only the one that dispatch takes.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/check.h"
#include "cpu/head_buffers.h"
#include "cpu/instruction_set.h"
#include "cpu/parallel.h"
#include "delta_attention_reference.h"
#include "support/cases.h"

namespace delta_attention {
namespace {

using cpu_kernels::ChunkRoutine;
using cpu_kernels::ChunkRoutines;
using cpu_kernels::HeadBuffers;
using cpu_kernels::Index;
using cpu_kernels::TaskQueue;

constexpr Index kTokens = cpu_kernels::kChunkTokens - 3;  // a chunk with a short last block
constexpr Index kKeyDim = 60, kValueDim = 41;             // no multiple of any vector

struct OneChunk {
  std::vector<float> q, k, v, log_decay, beta, state, out, final_state;
  ForwardArgs args;

  explicit OneChunk(Recurrence recurrence) {
    test::Random random = test::random_for("cpu_routines");
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    const auto fill = [&](std::vector<float>& x, Index size, auto draw) {
      x.resize(static_cast<std::size_t>(size));
      for (float& element : x) element = draw();
    };
    const Index decays = recurrence.gate == Gate::channel ? kTokens * kKeyDim : kTokens;
    fill(q, kTokens * kKeyDim, [&] { return normal(random); });
    fill(k, kTokens * kKeyDim, [&] { return normal(random); });
    fill(v, kTokens * kValueDim, [&] { return normal(random); });
    fill(log_decay, decays, [&] { return -3.0f * uniform(random) * uniform(random); });
    fill(beta, kTokens, [&] { return 2.0f * uniform(random); });
    fill(state, kKeyDim * kValueDim, [&] { return normal(random); });
    fill(out, kTokens * kValueDim, [] { return std::nanf(""); });
    fill(final_state, kKeyDim * kValueDim, [] { return std::nanf(""); });

    args.q = tensor(q.data(), {1, kTokens, 1, kKeyDim});
    args.k = tensor(k.data(), {1, kTokens, 1, kKeyDim});
    args.v = tensor(v.data(), {1, kTokens, 1, kValueDim});
    args.beta = tensor(beta.data(), {1, kTokens, 1});
    args.initial_state = tensor(state.data(), {1, 1, kKeyDim, kValueDim});
    args.out = tensor(out.data(), {1, kTokens, 1, kValueDim});
    args.final_state = tensor(final_state.data(), {1, 1, kKeyDim, kValueDim});
    args.recurrence = recurrence;
    args.qk_l2norm = true;
    if (recurrence.gate == Gate::scalar) args.log_decay = tensor(log_decay.data(), {1, kTokens, 1});
    if (recurrence.gate == Gate::channel) args.log_decay = tensor(log_decay.data(), {1, kTokens, 1, kKeyDim});
  }
};

void run_chunk(const OneChunk& data, const ChunkRoutines& routines, ChunkRoutine routine) {
  const Problem problem = check(data.args);
  HeadBuffers buffers(problem, routines, kValueDim);
  buffers.load_state({0, 0, 0, kValueDim}, nullptr);
  buffers.load_tokens({0, 0, 0, kValueDim}, 0, 0, kTokens, kTokens);
  routine(buffers.chunk());
  buffers.store_out({0, 0, 0, kValueDim}, 0, 0);
  buffers.store_final_state({0, 0, 0, kValueDim});
}

double relative_error(const std::vector<float>& x, const std::vector<float>& truth) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (static_cast<double>(x[i]) - truth[i]) * (static_cast<double>(x[i]) - truth[i]);
    norm += static_cast<double>(truth[i]) * truth[i];
  }
  return std::sqrt(error / norm);
}

TEST(CpuRoutines, EveryInstructionSetMatchesTheReference) {
  const double bar = 2e-6 * std::sqrt(static_cast<double>(kKeyDim));  // of f32 kernels on contractive input
  for (const Preset& preset : kPresets) {
    if (preset.recurrence.normalize) continue;
    OneChunk data(preset.recurrence);
    reference::forward(data.args);
    const std::vector<float> out = data.out, state = data.final_state;
    for (const ChunkRoutines& routines : cpu_kernels::chunk_routines()) {
      for (ChunkRoutine routine : {routines.sequential, routines.chunkwise}) {
        SCOPED_TRACE(std::string(preset.name) + " " + routines.instruction_set +
                     (routine == routines.chunkwise ? " chunkwise" : " sequential"));
        data.out.assign(data.out.size(), std::nanf(""));
        data.final_state.assign(data.final_state.size(), std::nanf(""));
        run_chunk(data, routines, routine);
        EXPECT_LE(relative_error(data.out, out), bar);
        EXPECT_LE(relative_error(data.final_state, state), bar);
      }
    }
  }
}

TEST(CpuRoutines, ExponentialIsWithinTwoUlps) {
  std::vector<float> inputs = {0.0f, -0.0f, -1e-30f, -87.0f, -88.0f, 1.0f, 88.0f};
  test::Random random = test::random_for("cpu_routines");
  std::uniform_real_distribution<float> uniform(-87.0f, 5.0f);  // results that are normal numbers
  while (inputs.size() % 16 != 0 || inputs.size() < 4096) inputs.push_back(uniform(random));
  for (const ChunkRoutines& routines : cpu_kernels::chunk_routines()) {
    alignas(64) float row[16];
    for (std::size_t begin = 0; begin < inputs.size(); begin += 16) {
      std::copy_n(inputs.begin() + static_cast<std::ptrdiff_t>(begin), 16, row);
      routines.exponentiate_row(row, 16);
      for (std::size_t i = 0; i < 16; ++i) {
        const double truth = std::exp(static_cast<double>(inputs[begin + i]));
        const double ulp = std::max(truth * 0x1p-23, 0x1p-149);
        ASSERT_LE(std::abs(row[i] - truth), 2 * ulp) << routines.instruction_set << " e^" << inputs[begin + i];
      }
    }
  }
}

TEST(CpuRoutines, ExponentialAtTheEnds) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const ChunkRoutines& routines : cpu_kernels::chunk_routines()) {
    SCOPED_TRACE(routines.instruction_set);
    alignas(64) float row[16] = {-kInfinity, -316.0f, -105.0f, 0.0f, kInfinity, 90.0f, std::nanf("")};
    routines.exponentiate_row(row, 16);
    EXPECT_EQ(row[0], 0.0f);
    EXPECT_EQ(row[1], 0.0f);
    EXPECT_EQ(row[2], 0.0f);
    EXPECT_EQ(row[3], 1.0f);
    EXPECT_EQ(row[4], kInfinity);
    EXPECT_EQ(row[5], kInfinity);
    EXPECT_TRUE(std::isnan(row[6]));
  }
}

TEST(RunTasks, EveryTaskRunsOnce) {
  for (int threads : {1, 2, 7}) {
    std::vector<std::atomic<int>> runs(100);
    cpu_kernels::run_tasks(100, threads, [&](int, TaskQueue& queue) {
      for (std::int64_t task = 0; queue.take(task);) ++runs[static_cast<std::size_t>(task)];
    });
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
  }
}

TEST(RunTasks, AnExceptionOfAWorkerReachesTheCaller) {
  for (int threads : {1, 4}) {
    const auto fail = [](int, TaskQueue& queue) {
      for (std::int64_t task = 0; queue.take(task);) {
        if (task == 5) throw std::runtime_error("task 5");
      }
    };
    EXPECT_THROW(cpu_kernels::run_tasks(100, threads, fail), std::runtime_error);
  }
}

}  // namespace
}  // namespace delta_attention
