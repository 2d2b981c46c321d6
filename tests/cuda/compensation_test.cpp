// The compensated sum on the GPU: the same bits as its PTX twin and as the CPU, whatever the numbers; and that contraction would show.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "sass/compensated_steps.h"
#include "state/summation.h"
#include "support/buffers.h"
#include "support/cases.h"

namespace delta_attention::test {
namespace {

using compensated_steps::Operands;
using compensated_steps::Operation;
using compensated_steps::Result;
using Launch = void (*)(Operation, const Operands*, Result*, int);

constexpr Operation kOperations[] = {Operation::add, Operation::scale, Operation::add_product, Operation::step};
constexpr int kElements = 100000;

float signed_power(Random& random, double low, double high) {
  const double size = std::exp2(uniform(random, low, high));
  return static_cast<float>(pick(random, 0, 1) == 0 ? size : -size);
}

/// Sums and terms of like and of very unlike size, exact and near cancellation, and a compensation of up to half an ulp.
Operands draw_operands(Random& random) {
  Operands o;
  o.sum = signed_power(random, -30, 30);
  o.compensation = o.sum * static_cast<float>(uniform(random, -0x1p-24, 0x1p-24));
  o.y = signed_power(random, -2, 2);
  switch (pick(random, 0, 3)) {
    case 0: o.x = signed_power(random, -30, 30); break;
    case 1: o.x = -o.sum; break;                                                                    // cancels at once
    case 2: o.x = -o.sum / o.y * (1.0f + static_cast<float>(uniform(random, -1e-6, 1e-6))); break;  // and as a product
    default: o.x = o.sum * static_cast<float>(uniform(random, -2, 2)); break;
  }
  return o;
}

Result on_host(Operation operation, const Operands& o) {
  CompensatedSum sum;
  sum.sum = o.sum;
  sum.compensation = o.compensation;
  if (operation == Operation::add) sum.add(o.x);
  if (operation == Operation::scale || operation == Operation::step) sum.scale(o.x);
  if (operation == Operation::add_product || operation == Operation::step) sum.add_product(o.x, o.y);
  return {sum.sum, sum.compensation};
}

std::vector<Result> on_gpu(Launch launch, Operation operation, const std::vector<Operands>& operands) {
  const Device gpu = cuda(0);
  std::vector<Result> results(operands.size());
  auto* in = static_cast<Operands*>(device_allocate(gpu, operands.size() * sizeof(Operands)));
  auto* out = static_cast<Result*>(device_allocate(gpu, results.size() * sizeof(Result)));
  device_upload(gpu, in, operands.data(), operands.size() * sizeof(Operands));
  launch(operation, in, out, static_cast<int>(operands.size()));
  device_synchronize(gpu);
  device_download(gpu, results.data(), out, results.size() * sizeof(Result));
  device_free(gpu, in);
  device_free(gpu, out);
  return results;
}

int different_bits(const std::vector<Result>& a, const std::vector<Result>& b) {
  int count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += std::memcmp(&a[i], &b[i], sizeof(Result)) != 0;
  return count;
}

class Compensation : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_skip_reason(); !reason.empty()) GTEST_SKIP() << reason;
    Random random = random_for("Compensation");
    for (int i = 0; i < kElements; ++i) operands_.push_back(draw_operands(random));
  }

  std::vector<Result> host(Operation operation) const {
    std::vector<Result> results;
    for (const Operands& each : operands_) results.push_back(on_host(operation, each));
    return results;
  }

  std::vector<Operands> operands_;
};

TEST_F(Compensation, IntrinsicsPtxAndHostGiveTheSameBits) {
  for (Operation operation : kOperations) {
    const std::vector<Result> expected = host(operation);
    const int number = static_cast<int>(operation);
    EXPECT_EQ(different_bits(on_gpu(compensated_steps::launch_intrinsics, operation, operands_), expected), 0)
        << number;
    EXPECT_EQ(different_bits(on_gpu(compensated_steps::launch_ptx, operation, operands_), expected), 0) << number;
  }
}

TEST_F(Compensation, ContractionWouldShowInTheBits) {
  for (Operation operation : {Operation::scale, Operation::step}) {
    EXPECT_GT(different_bits(on_gpu(compensated_steps::launch_contracted, operation, operands_), host(operation)), 0);
  }
}

}  // namespace
}  // namespace delta_attention::test
