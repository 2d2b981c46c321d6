// The sweep of `delta-attention tune` on an invented kernel: what is tried, what wins, what is remembered.

#include "tuning.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>

#include "errors.h"
#include "temporary_folder.h"

namespace delta_attention::cli {
namespace {

constexpr const char* kDevice = "Invented GPU";

int value_of(const std::string& settings, const std::string& name) {
  const std::size_t at = settings.find(name + "=");
  return at == std::string::npos ? 0 : std::atoi(settings.c_str() + at + name.size() + 1);
}

/// A kernel whose time is known in advance: the best number of rows is T/128, two columns are better than one, and 64 rows with
/// two columns do not fit. Four rows are fastest of all and wrong.
class InventedBench : public TuneBench {
 public:
  std::string refusal(const TuneCandidate& c) override {
    return value_of(c.settings, "rows") == 64 && value_of(c.settings, "columns") == 2 ? "does not fit" : "";
  }

  double error(const TuneCandidate& c) override {
    ++checks;
    return value_of(c.settings, "rows") == 4 ? std::nan("") : 1e-6;
  }

  std::vector<double> times_us(const TuneCandidate& c, int runs, double give_up_us) override {
    if (calls_left == 0) throw std::runtime_error("killed");
    --calls_left;
    if (c.settings == fails_at) throw CudaError("an illegal address");
    if (value_of(c.settings, "rows") == 4) return std::vector<double>(static_cast<std::size_t>(runs), 0.001);
    if (cost(c) > give_up_us) {
      given_up.insert(c.settings);
      return {cost(c)};
    }
    timed[c.settings] += runs;
    std::vector<double> times(static_cast<std::size_t>(runs), cost(c));
    if (runs > 1) times[1] *= 3.0;  // an outlier, which a median does not see
    return times;
  }

  static double cost(const TuneCandidate& c) {
    const double T = static_cast<double>(c.problem.T);
    if (c.settings.empty()) return T;  // what the library does today
    const double rows = value_of(c.settings, "rows"), columns = value_of(c.settings, "columns");
    return T * (1.0 + std::abs(std::log2(rows * 128.0 / T))) / columns;
  }

  int checks = 0;
  int calls_left = 1000000;
  std::string fails_at = "nothing";
  std::map<std::string, int> timed;
  std::set<std::string> given_up;
};

TunePlan plan_of(std::vector<std::int64_t> T, std::int64_t keep = 100) {
  TunePlan plan;
  plan.device = kDevice;
  plan.capability = 90;
  plan.kernels = {
      {"invented", {{"rows", "rows a block", {4, 8, 11, 16, 64}}, {"columns", "columns a thread", {1, 2}}}}};
  plan.recurrences = {"gated_delta_net"};
  plan.D = {64};
  plan.B = {2};
  plan.T = std::move(T);
  plan.H = 8;
  plan.keep = keep;
  return plan;
}

std::vector<TuneOutcome> run(const TunePlan& plan, TuneBench& bench, TuneLog& log) {
  std::vector<TuneOutcome> outcomes;
  double last = 0.0;
  sweep(plan, bench, log,
        {[&](double fraction) {
           EXPECT_GE(fraction, last);
           EXPECT_LE(fraction, 1.0);
           last = fraction;
         },
         [&](const TuneOutcome& outcome) { outcomes.push_back(outcome); }});
  EXPECT_EQ(last, 1.0);
  return outcomes;
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

TEST(Tuning, CombinationsAreTheCrossProduct) {
  EXPECT_EQ(combinations({{"a", "", {1, 2}}, {"b", "", {-3}}, {"c", "", {4, 5}}}),
            (std::vector<std::string>{"a=1,b=-3,c=4", "a=1,b=-3,c=5", "a=2,b=-3,c=4", "a=2,b=-3,c=5"}));
}

TEST(Tuning, TheFastestRightOneWins) {
  InventedBench bench;
  TuneLog log;
  const std::vector<TuneOutcome> outcomes = run(plan_of({2048, 1024}), bench, log);
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_EQ(outcomes[0].problem.T, 1024);  // the shortest first, whatever the order of the plan
  ASSERT_NE(outcomes[0].best, nullptr);
  EXPECT_EQ(outcomes[0].best->candidate.settings, "rows=8,columns=2");
  EXPECT_EQ(outcomes[0].best->us, 512.0);
  ASSERT_NE(outcomes[0].now, nullptr);
  EXPECT_EQ(outcomes[0].now->us, 1024.0);
  EXPECT_EQ(outcomes[1].best->candidate.settings, "rows=16,columns=2");
  EXPECT_EQ(outcomes[0].tried, 1 + 9);  // one is refused, and `now` is tried as well
  EXPECT_EQ(outcomes[0].wrong, 2);
  EXPECT_EQ(outcomes[1].wrong, 0);  // what is wrong at one T is not tried at the next
}

TEST(Tuning, TheSlowAreTimedOnce) {
  InventedBench bench;
  TuneLog log;
  run(plan_of({1024}), bench, log);
  EXPECT_EQ(bench.timed.at("rows=8,columns=2"), 1 + 5);    // the first time, then those for the median
  EXPECT_EQ(bench.timed.at("rows=11,columns=2"), 1);       // 1.46 times behind it
  EXPECT_TRUE(bench.given_up.count("rows=64,columns=1"));  // far behind
  EXPECT_EQ(bench.timed.count("rows=64,columns=1"), 0u);
  EXPECT_EQ(bench.timed.count("rows=4,columns=2"), 0u);
}

TEST(Tuning, OneCheckServesEveryLength) {
  InventedBench bench;
  TuneLog log;
  run(plan_of({1024, 2048}), bench, log);
  EXPECT_EQ(bench.checks, 1 + 9);
}

TEST(Tuning, OnlyTheFastestGoOnToTheNextLength) {
  InventedBench bench;
  TuneLog log;
  const std::vector<TuneOutcome> outcomes = run(plan_of({1024, 2048, 4096}, 4), bench, log);
  EXPECT_EQ(outcomes[1].tried, 1 + 4);
  EXPECT_EQ(outcomes[1].best->candidate.settings, "rows=16,columns=2");
  EXPECT_EQ(outcomes[2].tried, 1 + 4);
}

TEST(Tuning, TheTableIsInTheFormThatTheLibraryIncludes) {
  InventedBench bench;
  TuneLog log;
  run(plan_of({1024, 2048}), bench, log);
  const std::string rows = tuned_rows(log, kDevice, 90);
  EXPECT_NE(rows.find("{\"invented\", 90, Gate::scalar, 64, 64, 1024, 16, \"rows=8,columns=2\"},  // gated_delta_net: "
                      "512.0 us\n"),
            std::string::npos)
      << rows;
  EXPECT_NE(rows.find("2048, 16, \"rows=16,columns=2\"}"), std::string::npos) << rows;
  EXPECT_EQ(std::count(rows.begin(), rows.end(), '{'), 2) << rows;
  EXPECT_EQ(tuned_rows(log, "Another GPU", 80).find('{'), std::string::npos);
}

TEST(Tuning, AFinishedLogIsNotMeasuredAgain) {
  const TemporaryFolder folder;
  const std::string path = folder.file("tune.jsonl");
  InventedBench bench;
  std::string rows;
  {
    TuneLog log(path);
    run(plan_of({1024, 2048}), bench, log);
    rows = tuned_rows(log, kDevice, 90);
  }
  const std::string text = text_of_file(path);
  InventedBench idle;
  idle.calls_left = 0;
  TuneLog log(path);
  run(plan_of({1024, 2048}), idle, log);
  EXPECT_EQ(idle.checks, 0);
  EXPECT_EQ(tuned_rows(log, kDevice, 90), rows);
  EXPECT_EQ(text_of_file(path), text);
}

TEST(Tuning, ResumesAfterAnyInterruption) {
  InventedBench whole;
  TuneLog unbroken;
  run(plan_of({1024, 2048}), whole, unbroken);
  const std::string rows = tuned_rows(unbroken, kDevice, 90);
  const int calls = 1000000 - whole.calls_left;
  for (int killed_at = 0; killed_at < calls; ++killed_at) {
    const TemporaryFolder folder;
    const std::string path = folder.file("tune.jsonl");
    InventedBench bench;
    bench.calls_left = killed_at;
    {
      TuneLog log(path);
      EXPECT_THROW(sweep(plan_of({1024, 2048}), bench, log, {[](double) {}, [](const TuneOutcome&) {}}),
                   std::runtime_error);
    }
    write(path, text_of_file(path) + "{\"device\":\"Invented GPU\",\"kern");  // a line cut off
    bench.calls_left = 1000000;
    {
      TuneLog log(path);
      run(plan_of({1024, 2048}), bench, log);
      EXPECT_EQ(tuned_rows(log, kDevice, 90), rows) << "killed at " << killed_at;
    }
    TuneLog reread(path);  // nothing was glued to the line that was cut off
    EXPECT_EQ(reread.records().size(), unbroken.records().size());
  }
}

TEST(Tuning, AnErrorOfTheDeviceIsRememberedAndPassedBy) {
  const TemporaryFolder folder;
  const std::string path = folder.file("tune.jsonl");
  InventedBench bench;
  bench.fails_at = "rows=16,columns=1";
  {
    TuneLog log(path);
    EXPECT_THROW(sweep(plan_of({1024}), bench, log, {[](double) {}, [](const TuneOutcome&) {}}), CudaError);
  }
  TuneLog log(path);
  const std::vector<TuneOutcome> outcomes = run(plan_of({1024}), bench, log);
  EXPECT_EQ(outcomes[0].failed, 1);
  EXPECT_EQ(outcomes[0].best->candidate.settings, "rows=8,columns=2");
}

TEST(Tuning, MeasurementsOfAnotherDeviceDoNotCount) {
  InventedBench first, second;
  TuneLog log;
  run(plan_of({1024}), first, log);
  TunePlan other = plan_of({1024});
  other.device = "Another GPU";
  run(other, second, log);
  EXPECT_EQ(second.checks, first.checks);
  EXPECT_EQ(second.timed, first.timed);
}

TEST(Tuning, TheFastestWinsEvenWhereTheLibraryDoesBetter) {
  InventedBench bench;
  TunePlan plan = plan_of({1024});
  plan.kernels[0].settings[0].values = {64};
  TuneLog log;
  const std::vector<TuneOutcome> outcomes = run(plan, bench, log);
  ASSERT_NE(outcomes[0].best, nullptr);
  EXPECT_GT(outcomes[0].best->us, 3 * outcomes[0].now->us);
}

TEST(Tuning, NothingRunsGivesNoRow) {
  InventedBench bench;
  TunePlan plan = plan_of({1024});
  plan.kernels[0].settings[0].values = {4};
  TuneLog log;
  const std::vector<TuneOutcome> outcomes = run(plan, bench, log);
  EXPECT_EQ(outcomes[0].best, nullptr);
  EXPECT_EQ(outcomes[0].wrong, 2);
  EXPECT_EQ(tuned_rows(log, kDevice, 90).find('{'), std::string::npos);
  EXPECT_NE(log.records().back().reason.find("relative error"), std::string::npos);
}

TEST(TuneLog, SaysWhichLineIsNoMeasurement) {
  const TemporaryFolder folder;
  const std::string path = folder.file("tune.jsonl");
  for (const char* line : {"[]\n", "{}\n", "nonsense\n", "{\"device\":1}\n", "\n", "cut off"}) {
    write(path, line);
    try {
      TuneLog log(path);
      ADD_FAILURE() << "took " << line;
    } catch (const BadInput& error) {
      EXPECT_NE(std::string(error.what()).find("line 1"), std::string::npos) << error.what();
    }
    EXPECT_EQ(text_of_file(path), line);
  }
  write(path, "{\"dev");
  EXPECT_TRUE(TuneLog(path).records().empty());
  EXPECT_THROW(TuneLog(folder.file("no/such/folder")), IoError);
}

}  // namespace
}  // namespace delta_attention::cli
