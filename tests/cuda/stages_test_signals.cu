// Building blocks under the stages: sums across the lanes of a warp, and the signals between blocks.

#include "cuda/device/signal.cuh"
#include "cuda/stages_test.cuh"

namespace delta_attention::test {
namespace {

class WarpSums : public StageTest {
 protected:
  /// Whole numbers: their sums are exact in every order, so results are compared with ==.
  std::vector<float> whole_numbers(int size) {
    std::vector<float> values(static_cast<std::size_t>(size));
    for (float& x : values) x = static_cast<float>(pick(random, -1000, 1000));
    return values;
  }
  template <int kLanes, int kStride, int kCount>
  void expect_spread_sums();
};

__global__ void warp_sums(const float* values, float* sums) { sums[threadIdx.x] = warp_sum(values[threadIdx.x]); }

TEST_F(WarpSums, WarpSumReachesEveryLane) {
  const std::vector<float> values = whole_numbers(kWarpSize);
  const DeviceVector<float> input(values), output(nans(kWarpSize));
  warp_sums<<<1, kWarpSize>>>(input.data(), output.data());
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  float sum = 0;
  for (float x : values) sum += x;
  const std::vector<float> got = output.get();
  for (int lane = 0; lane < kWarpSize; ++lane) EXPECT_EQ(got[lane], sum) << "lane " << lane;
}

template <int kLanes, int kStride, int kCount>
__global__ void spread_sums(const float* values, float* sums) {
  float mine[kCount];
  for (int i = 0; i < kCount; ++i) mine[i] = values[threadIdx.x * kCount + i];
  sums[threadIdx.x] = spread_sum<kLanes, kStride>(mine, threadIdx.x);
}

template <int kLanes, int kStride, int kCount>
void WarpSums::expect_spread_sums() {
  const std::vector<float> values = whole_numbers(kWarpSize * kCount);
  const DeviceVector<float> input(values), output(nans(kWarpSize));
  spread_sums<kLanes, kStride, kCount><<<1, kWarpSize>>>(input.data(), output.data());
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  const std::vector<float> got = output.get();
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int member = lane / kStride % kLanes, first_of_group = lane - member * kStride;
    float sum = 0;
    for (int m = 0; m < kLanes; ++m) sum += values[(first_of_group + m * kStride) * kCount + member * kCount / kLanes];
    EXPECT_EQ(got[lane], sum) << "lane " << lane << " of groups of " << kLanes << ", " << kStride << " apart";
  }
}

TEST_F(WarpSums, SpreadSumGivesEveryLaneItsSum) {
  expect_spread_sums<32, 1, 16>();  // the products of a micro-chunk
  expect_spread_sums<8, 4, 8>();    // S^T x
  expect_spread_sums<16, 2, 8>();   // several lanes a sum and several groups at once
}

class Signals : public StageTest {};

constexpr int kChainThreads = 256;

/// A block waits for the ticket before its own, then passes on what that one left, a number a thread: one higher, and moved by one
/// place, so that every thread needs what another thread of the other block wrote.
__global__ void pass_on(int* counter, int* progress, int* taken, int* cells) {
  const int ticket = take_ticket(counter);
  atomicAdd(taken + ticket, 1);
  if (ticket > 0) wait_for(progress, ticket);
  const int* from = cells + ticket % 2 * kChainThreads;
  int* to = cells + (ticket + 1) % 2 * kChainThreads;
  to[threadIdx.x] = from[(threadIdx.x + 1) % kChainThreads] + 1;
  raise(progress, ticket + 1);
}

TEST_F(Signals, ChainOfManyMoreBlocksThanFitFinishesInOrder) {
  int multiprocessors = 0, blocks_each = 0;
  DELTA_ATTENTION_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  DELTA_ATTENTION_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, pass_on, kChainThreads, 0));
  const int blocks = 8 * multiprocessors * blocks_each + static_cast<int>(pick(random, 1, 1000));
  std::vector<int> start(2 * kChainThreads, 0);
  for (int t = 0; t < kChainThreads; ++t) start[t] = static_cast<int>(pick(random, 0, 1000000));
  const DeviceVector<int> counter({0}), progress({0}), taken(std::vector<int>(blocks, 0)), cells(start);
  pass_on<<<blocks, kChainThreads>>>(counter.data(), progress.data(), taken.data(), cells.data());
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());

  EXPECT_EQ(counter.get()[0], blocks);
  EXPECT_EQ(progress.get()[0], blocks);
  // Every ticket went to one block, to all of its threads.
  EXPECT_EQ(taken.get(), std::vector<int>(blocks, kChainThreads));
  const std::vector<int> end = cells.get();
  for (int t = 0; t < kChainThreads; ++t) {
    EXPECT_EQ(end[blocks % 2 * kChainThreads + t], start[(t + blocks) % kChainThreads] + blocks) << "thread " << t;
  }
}

}  // namespace
}  // namespace delta_attention::test
