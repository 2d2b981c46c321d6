#pragma once

// What the tests of the chunk pipeline's stages share. A stage is a functor that takes a SharedRun; run_stage() puts numbers into
// shared memory, has one block run the stage and nothing else, and brings everything back.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "api/architectures.h"
#include "api/device.h"
#include "cuda/delta/chunk_pipeline_stages.cuh"
#include "cuda/device/runtime.h"
#include "support/run.h"

namespace delta_attention::test {

using namespace chunk_pipeline_stages;

/// The relative error of one float32 operation.
constexpr double kRounding = 0x1p-24;
/// What numbers below the smallest normal float32, 1e-38, may lose: at most 2^-150 an operation, in sums of some hundred terms.
constexpr double kUnderflow = 1e-40;

class StageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    random = random_for(std::string(test.test_suite_name()) + "." + test.name());
    std::string reason = cuda_skip_reason();
    if (reason.empty()) reason = missing_code_reason(device_properties(cuda()));
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  Random random;
};

/// Names the instances of a suite that is typed by Policy.
struct PolicyName {
  template <class P>
  static std::string GetName(int) {
    return std::string(P::kUpdate == Update::delta ? "delta" : "additive") +
           (P::kGate == Gate::channel ? "_channel" : "_scalar") + "_K" + std::to_string(P::kKeyTile) + "_slice" +
           std::to_string(P::kSlice);
  }
};

/// A copy of host numbers in the GPU's memory.
template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values)
      : size_(values.size()), data_(static_cast<T*>(device_allocate(cuda(), size_ * sizeof(T)))) {
    device_upload(cuda(), data_, values.data(), size_ * sizeof(T));
  }
  ~DeviceVector() { device_free(cuda(), data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  T* data() const { return data_; }
  std::vector<T> get() const {
    std::vector<T> values(size_);
    device_download(cuda(), values.data(), data_, size_ * sizeof(T));
    return values;
  }

 private:
  std::size_t size_;
  T* data_;
};

/// The arrays of a SharedRun outside shared memory.
template <class Array>
struct RunArrays {
  Array w, q, k, u, a_matrix, decay_end, beta, log_decay, denominator;
};

inline std::vector<float> nans(int size) {
  return std::vector<float>(static_cast<std::size_t>(size), std::numeric_limits<float>::quiet_NaN());
}

/// A SharedRun's numbers on the host, NaN until a test writes them.
template <class P>
struct RunValues : RunArrays<std::vector<float>> {
  int tokens;

  explicit RunValues(int run_tokens)
      : RunArrays<std::vector<float>>{nans(run_tokens * P::kKeyTile),
                                      nans(run_tokens * P::kKeyTile),
                                      nans(run_tokens * P::kKeyTile),
                                      nans(run_tokens * P::kColumnStride),
                                      nans(run_tokens * kMicroChunk),
                                      nans(run_tokens / kMicroChunk * SharedRun<P>::decay_end_width()),
                                      nans(run_tokens),
                                      nans(run_tokens),
                                      nans(run_tokens)},
        tokens(run_tokens) {}
};

template <class P, class Copy>
__device__ void for_each_array(const SharedRun<P>& shared, const RunArrays<float*>& global, int tokens, Copy copy) {
  copy(shared.w, global.w, tokens * P::kKeyTile);
  copy(shared.q, global.q, tokens * P::kKeyTile);
  copy(shared.k, global.k, tokens * P::kKeyTile);
  copy(shared.u, global.u, tokens * P::kColumnStride);
  copy(shared.a_matrix, global.a_matrix, tokens * kMicroChunk);
  copy(shared.decay_end, global.decay_end, tokens / kMicroChunk * SharedRun<P>::decay_end_width());
  copy(shared.beta, global.beta, tokens);
  copy(shared.log_decay, global.log_decay, tokens);
  copy(shared.denominator, global.denominator, tokens);
}

template <class P, class Stage>
__global__ void __launch_bounds__(kThreads)
    stage_alone(const __grid_constant__ Stage stage, const __grid_constant__ RunArrays<float*> run, int tokens) {
  extern __shared__ float4 stage_memory[];
  const SharedRun<P> shared(reinterpret_cast<float*>(stage_memory), tokens);
  for_each_array(shared, run, tokens, [](float* at, const float* from, int size) {
    for (int i = threadIdx.x; i < size; i += kThreads) at[i] = from[i];
  });
  __syncthreads();
  stage(shared);
  __syncthreads();
  for_each_array(shared, run, tokens, [](const float* at, float* to, int size) {
    for (int i = threadIdx.x; i < size; i += kThreads) to[i] = at[i];
  });
}

/// Runs the stage on these numbers and returns what it makes of them.
template <class P, class Stage>
RunValues<P> run_stage(const Stage& stage, const RunValues<P>& before) {
  const DeviceVector<float> w(before.w), q(before.q), k(before.k), u(before.u), a_matrix(before.a_matrix),
      decay_end(before.decay_end), beta(before.beta), log_decay(before.log_decay), denominator(before.denominator);
  const RunArrays<float*> arrays = {w.data(),         q.data(),    k.data(),         u.data(),          a_matrix.data(),
                                    decay_end.data(), beta.data(), log_decay.data(), denominator.data()};
  const auto bytes = static_cast<int>(SharedRun<P>::bytes(before.tokens));
  DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(stage_alone<P, Stage>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  stage_alone<P, Stage><<<1, kThreads, bytes>>>(stage, arrays, before.tokens);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());
  RunValues<P> after(before.tokens);
  static_cast<RunArrays<std::vector<float>>&>(after) = {w.get(),    q.get(),         k.get(),
                                                        u.get(),    a_matrix.get(),  decay_end.get(),
                                                        beta.get(), log_decay.get(), denominator.get()};
  return after;
}

/// Fills `values` from `first` on with numbers between -1 and 1.
inline void draw(std::vector<float>& values, Random& random, std::size_t first = 0) {
  for (std::size_t i = first; i < values.size(); ++i) values[i] = static_cast<float>(uniform(random, -1, 1));
}

/// A number in float64 and how far float32 may be from it.
struct Expected {
  double value = 0, error = 0;
};

inline void expect_near(float got, const Expected& expected, const std::string& what) {
  if (got == expected.value) return;  // infinities too
  const double allowed = expected.error + kUnderflow;
  if (!(std::fabs(got - expected.value) <= allowed)) {
    ADD_FAILURE() << what << " = " << got << ", expected " << expected.value << " +- " << allowed;
  }
}

inline std::string at(const char* name, int row, int column) {
  return std::string(name) + "[" + std::to_string(row) + "][" + std::to_string(column) + "]";
}

/// Rows [begin, end) of two row-major arrays hold the same numbers.
inline void expect_same_rows(const std::vector<float>& got, const std::vector<float>& expected, int begin, int end,
                             int stride, int columns, const char* name) {
  for (int row = begin; row < end; ++row) {
    for (int c = 0; c < columns; ++c) EXPECT_EQ(got[row * stride + c], expected[row * stride + c]) << at(name, row, c);
  }
}

}  // namespace delta_attention::test
