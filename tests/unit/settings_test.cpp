// Settings from the caller's words to the kernel: what is taken, what is refused and in which words, and which choice wins.

#include "api/settings.h"

#include <gtest/gtest.h>

#include <set>

#include "api/dispatch.h"
#include "support/run.h"

namespace delta_attention {
namespace {

std::vector<Setting> tiles() {
  return {{"rows", "rows a block", {8, 16, 32}}, {"columns", "columns a block", {-1, 4}}};
}

/// Refuses two settings together, and 32 rows beyond K = 64: what a limit of shared memory looks like.
std::string small_only(const Problem& problem, const DeviceProperties&, const Settings& settings) {
  if (settings.get("rows", 8) == 16 && settings.get("columns", -1) == 4) return "16 rows of 4 columns do not fit";
  return settings.get("rows", 8) == 32 && problem.key_dim > 64 ? "32 rows do not fit" : "";
}

std::size_t rows_as_bytes(const Problem&, const DeviceProperties&, const Settings& settings) {
  return static_cast<std::size_t>(settings.get("rows", 8));
}

void no_launch(const Launch&) {}

const Kernel kTiled = {"tiled", "a fake", DeviceType::cpu, true, 10, tiles, small_only, rows_as_bytes, no_launch};
const Kernel kPlain = {"plain",
                       "a fake",
                       DeviceType::cpu,
                       true,
                       0,
                       no_settings,
                       [](const Problem&, const DeviceProperties&, const Settings&) { return std::string(); },
                       no_workspace,
                       no_launch};

const TunedTable kNothingTuned({}, {});

TunedTable tuned_to(const char* settings) {
  return TunedTable({{"tiled", 0, Gate::none, 64, 64, 512, 8, settings}}, {&kTiled, &kPlain});
}

Problem problem_with(std::int64_t key_dim) {
  Problem problem;
  problem.sequences = problem.value_heads = 1;
  problem.key_dim = problem.value_dim = key_dim;
  problem.tokens = 512;
  return problem;
}

Execution asking(const char* kernel, const char* settings) {
  Execution execution;
  execution.kernel = kernel;
  execution.settings = settings;
  return execution;
}

Choice choice_of(const Execution& execution, const TunedTable& tuned, std::int64_t key_dim = 64) {
  return choose(problem_with(key_dim), DeviceProperties(), execution, {&kPlain, &kTiled}, tuned);
}

void expect_refused(const char* kernel, const char* settings, const std::vector<const char*>& words) {
  try {
    choice_of(asking(kernel, settings), kNothingTuned);
    ADD_FAILURE() << kernel << " took \"" << settings << '"';
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "settings");
    for (const char* word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << '"' << word << "\" not in: " << error.what();
    }
  }
}

TEST(Settings, HoldChoicesByName) {
  Settings settings;
  EXPECT_TRUE(settings.empty());
  EXPECT_EQ(settings.get("rows", 7), 7);
  settings.set("rows", 16);
  settings.set("columns", 4);
  settings.set("rows", 32);
  EXPECT_EQ(settings.size(), 2u);
  EXPECT_EQ(settings.get(std::string("rows"), 7), 32);
  EXPECT_EQ(settings.get("row", 7), 7);
  EXPECT_EQ(settings.text(), "rows=32,columns=4");
}

TEST(Settings, TextIsReadBack) {
  for (const char* text : {"", "rows=8", "columns=-1", "columns=4,rows=32", "rows=16,columns=-1"}) {
    EXPECT_EQ(parse_settings(text, "tiled", tiles()).text(), text);
  }
}

TEST(Settings, RefusedInWordsThatTeach) {
  for (const char* text : {"rows", "rows=", "=8", "rows=8,", ",rows=8", "rows=8,,columns=4", "rows==8", "rows=8x",
                           "rows=1e1", "rows= 8", " rows=8", "rows=8;columns=4", "rows=99999999999", ",", "="}) {
    expect_refused("tiled", text, {"rows=8|16|32", "columns=-1|4", "'tiled'"});
  }
  expect_refused("tiled", "colour=4", {"unknown", "'colour'"});
  expect_refused("tiled", "rows=8,colour=4", {"unknown", "'colour'"});
  expect_refused("tiled", "rows=9", {"got rows=9"});
  expect_refused("tiled", "rows=8,rows=8", {"'rows' twice"});
  expect_refused("plain", "rows=8", {"'plain'", "no settings"});
}

TEST(Settings, BelongToAKernelAskedForByName) {
  expect_refused("automatic", "rows=8", {"automatic", "\"rows=8\""});
  expect_refused("", "rows=8", {"by name"});
  EXPECT_EQ(choice_of(asking("no_such_kernel", "rows=8"), kNothingTuned).kernel, nullptr);
}

TEST(Settings, CallerBeforeTableBeforeKernel) {
  const Choice own = choice_of(asking("tiled", ""), kNothingTuned);
  EXPECT_TRUE(own.settings.empty());
  EXPECT_EQ(choice_of({}, tuned_to("rows=16")).settings.text(), "rows=16");
  EXPECT_EQ(choice_of(asking("tiled", ""), tuned_to("rows=16")).settings.text(), "rows=16");
  EXPECT_EQ(choice_of(asking("tiled", "columns=-1"), tuned_to("rows=16")).settings.text(), "rows=16,columns=-1");
  EXPECT_EQ(choice_of(asking("tiled", "rows=8"), tuned_to("rows=16,columns=-1")).settings.text(), "rows=8,columns=-1");
  EXPECT_TRUE(choice_of(asking("plain", ""), tuned_to("rows=16")).settings.empty());
}

TEST(Settings, TunedOnesThatDoNotFitGiveWay) {
  const TunedTable tuned = tuned_to("rows=32");
  EXPECT_EQ(choice_of({}, tuned, 64).settings.text(), "rows=32");
  EXPECT_EQ(choice_of({}, tuned, 128).kernel, &kTiled);
  EXPECT_TRUE(choice_of({}, tuned, 128).settings.empty());
  EXPECT_EQ(choice_of(asking("tiled", "columns=4"), tuned_to("rows=16")).settings.text(), "columns=4");
}

TEST(Settings, DeterministicRefusesThoseThatDoNotRepeat) {
  Kernel loose = kTiled;
  loose.unrepeatable = [](const Settings& settings) { return settings.get("columns", -1) == 4; };
  const TunedTable tuned({{"tiled", 0, Gate::none, 64, 64, 512, 8, "rows=8,columns=4"}}, {&loose});
  Execution execution = asking("tiled", "");
  const auto info = [&](const TunedTable& table) {
    return explain(problem_with(64), DeviceProperties(), execution, {&loose}, table);
  };
  EXPECT_EQ(info(tuned).settings, "rows=8,columns=4");
  execution.deterministic = true;
  EXPECT_EQ(info(tuned).kernel, "tiled");
  EXPECT_EQ(info(tuned).settings, "");  // its own rule instead
  execution.settings = "columns=4";
  EXPECT_EQ(info(kNothingTuned).kernel, "");
  EXPECT_NE(info(kNothingTuned).kernels[0].reason.find("with columns=4"), std::string::npos);
  execution.deterministic = false;
  EXPECT_EQ(info(kNothingTuned).settings, "columns=4");
}

TEST(Settings, AskedOnesThatDoNotFitAreARefusal) {
  const Execution execution = asking("tiled", "rows=32");
  EXPECT_EQ(choice_of(execution, kNothingTuned, 128).kernel, nullptr);
  const DispatchInfo info =
      explain(problem_with(128), DeviceProperties(), execution, {&kPlain, &kTiled}, kNothingTuned);
  EXPECT_EQ(info.kernels[1].reason, "32 rows do not fit");
  EXPECT_TRUE(info.kernels[0].supported);  // another kernel is asked without them
}

TEST(Settings, DispatchTellsWhichAndWhence) {
  const auto info = [](const Execution& execution, const TunedTable& tuned) {
    return explain(problem_with(64), DeviceProperties(), execution, {&kPlain, &kTiled}, tuned);
  };
  const DispatchInfo own = info({}, kNothingTuned);
  EXPECT_EQ(own.settings, "");
  EXPECT_EQ(own.reason.find("settings"), std::string::npos) << own.reason;
  ASSERT_EQ(own.kernels[1].settings.size(), 2u);
  EXPECT_STREQ(own.kernels[1].settings[0].name, "rows");
  EXPECT_EQ(own.kernels[1].settings[0].values, (std::vector<int>{8, 16, 32}));
  EXPECT_TRUE(own.kernels[0].settings.empty());

  const DispatchInfo tuned = info({}, tuned_to("rows=16"));
  EXPECT_EQ(tuned.settings, "rows=16");
  EXPECT_NE(tuned.reason.find("with tuned settings"), std::string::npos) << tuned.reason;
  const DispatchInfo asked = info(asking("tiled", "rows=8"), tuned_to("rows=16"));
  EXPECT_EQ(asked.settings, "rows=8");
  EXPECT_NE(asked.reason.find("with the caller's settings"), std::string::npos) << asked.reason;
  EXPECT_EQ(asked.reason.find("tuned"), std::string::npos) << asked.reason;
  const DispatchInfo both = info(asking("tiled", "columns=-1"), tuned_to("rows=16"));
  EXPECT_NE(both.reason.find("over tuned ones"), std::string::npos) << both.reason;
}

TEST(Settings, EveryKernelListsThemWell) {
  for (const Kernel* kernel : kernels()) {
    std::set<std::string> names;
    Settings all;
    for (const Setting& setting : kernel->settings()) {
      EXPECT_TRUE(names.insert(setting.name).second) << kernel->name << ": two settings " << setting.name;
      EXPECT_EQ(std::string(setting.name).find_first_of(" ,="), std::string::npos) << kernel->name;
      EXPECT_FALSE(std::string(setting.meaning).empty()) << kernel->name << ' ' << setting.name;
      ASSERT_FALSE(setting.values.empty()) << kernel->name << ' ' << setting.name;
      EXPECT_EQ(std::set<int>(setting.values.begin(), setting.values.end()).size(), setting.values.size())
          << kernel->name << ": a value of " << setting.name << " twice";
      all.set(setting.name, setting.values.back());  // throws where there are too many
    }
    EXPECT_EQ(parse_settings(all.text(), kernel->name, kernel->settings()).text(), all.text());
  }
}

TEST(Settings, RefusedBeforeAnythingIsWritten) {
  test::Case c;
  c.tokens = 5;
  test::Call call(test::zero_inputs(c), cpu());
  EXPECT_THROW(delta_attention_forward(call.args, asking("reference", "rows=8")), InvalidArgument);
  EXPECT_THROW(delta_attention_forward(call.args, asking("automatic", "rows=8")), InvalidArgument);
  EXPECT_THROW(delta_attention_workspace(call.args, asking("reference", "rows=8")), InvalidArgument);
  EXPECT_THROW(dispatch_info(call.args, asking("reference", "rows=8")), InvalidArgument);
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(TunedTable, TakesTheNearestRow) {
  const auto row = [](int capability, Gate gate, std::int64_t key_dim, std::int64_t tokens, std::int64_t chains,
                      const char* settings) {
    return TunedRow{"tiled", capability, gate, key_dim, 64, tokens, chains, settings};
  };
  const TunedTable table({row(90, Gate::none, 64, 512, 8, "rows=8"),
                          row(90, Gate::none, 64, 8192, 8, "rows=16"),
                          row(90, Gate::none, 64, 512, 128, "columns=-1"),
                          row(90, Gate::none, 128, 512, 8, "columns=4"),
                          row(90, Gate::channel, 64, 512, 8, "rows=32"),
                          row(80, Gate::none, 64, 512, 8, "rows=8,columns=4"),
                          {"some_other_kernel", 90, Gate::none, 64, 64, 512, 8, "fudge=1"}},
                         {&kTiled, &kPlain});
  struct Case {
    int capability;
    Gate gate;
    std::int64_t key_dim, tokens, chains;
    const char* settings;
  };
  const Case cases[] = {
      {90, Gate::none, 64, 512, 8, "rows=8"},         // the row itself
      {90, Gate::none, 64, 2000, 8, "rows=8"},        // log2(2000/512) = 1.97 < log2(8192/2000) = 2.03
      {90, Gate::none, 64, 2100, 8, "rows=16"},       // beyond the geometric mean, 2048
      {90, Gate::none, 64, 100000, 8, "rows=16"},     // longer than anything measured
      {90, Gate::none, 64, 8192, 40, "columns=-1"},   // chains before tokens
      {90, Gate::none, 100, 512, 8, "columns=4"},     // 100 rows are a tile of 128
      {90, Gate::none, 65, 8192, 128, "columns=4"},   // the tile before all else
      {90, Gate::none, 40, 512, 8, "rows=8"},         // 40 rows are a tile of 64
      {90, Gate::none, 256, 512, 8, "columns=4"},     // no such tile: the nearest
      {90, Gate::channel, 64, 8192, 128, "rows=32"},  // the gate before chains and tokens
      {90, Gate::scalar, 64, 512, 8, "rows=8"},       // no such gate: any
      {80, Gate::none, 64, 512, 8, "rows=8,columns=4"},
      {86, Gate::none, 64, 512, 8, "rows=8,columns=4"},  // the same generation
      {100, Gate::none, 64, 512, 8, ""},
      {0, Gate::none, 64, 512, 8, ""},
      {90, Gate::none, 64, 0, 0, "rows=8"},  // nothing to do
  };
  for (const Case& c : cases) {
    Problem problem = problem_with(c.key_dim);
    problem.value_dim = 64;
    problem.gate = c.gate;
    problem.tokens = c.tokens;
    problem.sequences = c.chains;
    DeviceProperties device;
    device.capability = c.capability;
    EXPECT_EQ(table.find(kTiled, problem, device).text(), c.settings)
        << c.capability << " K=" << c.key_dim << " T=" << c.tokens << " chains=" << c.chains;
    EXPECT_TRUE(table.find(kPlain, problem, device).empty());
  }
}

TEST(TunedTable, PackedSequencesCountByTheirMeanLength) {
  const TunedTable table(
      {{"tiled", 0, Gate::none, 64, 64, 512, 8, "rows=8"}, {"tiled", 0, Gate::none, 64, 64, 4096, 8, "rows=16"}},
      {&kTiled});
  Problem packed = problem_with(64);
  packed.sequences = 8;
  packed.tokens = 8 * 512;
  packed.cu_seqlens.present = true;
  EXPECT_EQ(table.find(kTiled, packed, DeviceProperties()).text(), "rows=8");
  packed.cu_seqlens.present = false;
  EXPECT_EQ(table.find(kTiled, packed, DeviceProperties()).text(), "rows=16");
}

TEST(TunedTable, RowsThatTheirKernelDoesNotUnderstandAreAnError) {
  EXPECT_THROW(tuned_to("rows=9"), InvalidArgument);
  EXPECT_THROW(tuned_to("fudge=1"), InvalidArgument);
}

TEST(TunedTable, TheCommittedOneIsUnderstood) { EXPECT_NO_THROW(tuned_table()); }

}  // namespace
}  // namespace delta_attention
