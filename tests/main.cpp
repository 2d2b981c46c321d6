// GoogleTest's main, plus the seed of this run.

#include <gtest/gtest.h>

#include <cstdio>

#include "support/cases.h"

namespace {

/// Says with every failed test how to see it again.
class SeedOnFailure : public ::testing::EmptyTestEventListener {
 public:
  explicit SeedOnFailure(const char* program) : program_(program) {}

 private:
  void OnTestEnd(const ::testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::printf("reproduce with: DELTA_ATTENTION_SEED=%llu %s --gtest_filter=%s.%s\n",
                static_cast<unsigned long long>(delta_attention::test::run_seed()), program_, test.test_suite_name(),
                test.name());
  }

  const char* program_;
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (!::testing::GTEST_FLAG(list_tests)) {
    std::printf("DELTA_ATTENTION_SEED=%llu\n", static_cast<unsigned long long>(delta_attention::test::run_seed()));
  }
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedOnFailure(argv[0]));
  return RUN_ALL_TESTS();
}
