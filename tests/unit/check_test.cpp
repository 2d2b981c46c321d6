// Every bad argument is named, with what was expected and what came, and nothing is written.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "delta_attention/delta_attention.h"
#include "support/buffers.h"

namespace delta_attention {
namespace {

constexpr std::int64_t B = 1, T = 6, H = 2, HV = 4, K = 8, V = 4, N = 2;
constexpr std::int64_t kInterval = 2, kStates = 3;

/// A legal call with every optional operand, whose fields the tests then spoil one at a time.
struct Legal {
  std::vector<float> q = std::vector<float>(B * T * H * K), k = q;
  std::vector<float> v = std::vector<float>(B * T * HV * V), out = std::vector<float>(v.size(), 7.0f);
  std::vector<float> log_decay = std::vector<float>(B * T * HV * K), beta = std::vector<float>(B * T * HV);
  std::vector<float> initial_state = std::vector<float>(N * HV * K * V);
  std::vector<float> final_state = std::vector<float>(initial_state.size(), 7.0f);
  std::vector<float> initial_normalizer = std::vector<float>(N * HV * K);
  std::vector<float> final_normalizer = std::vector<float>(initial_normalizer.size(), 7.0f);
  std::vector<float> intermediate_states = std::vector<float>(kStates * HV * K * V, 7.0f);
  std::vector<float> a_log = std::vector<float>(HV), dt_bias = std::vector<float>(HV * K);
  std::vector<std::int32_t> cu = {0, 2, 6};
  ForwardArgs args;

  Legal() {
    args.q = tensor(q.data(), {B, T, H, K});
    args.k = tensor(k.data(), {B, T, H, K});
    args.v = tensor(v.data(), {B, T, HV, V});
    args.out = tensor(out.data(), {B, T, HV, V});
    args.log_decay = tensor(log_decay.data(), {B, T, HV, K});
    args.beta = tensor(beta.data(), {B, T, HV});
    args.initial_state = tensor(initial_state.data(), {N, HV, K, V});
    args.final_state = tensor(final_state.data(), {N, HV, K, V});
    args.initial_normalizer = tensor(initial_normalizer.data(), {N, HV, K});
    args.final_normalizer = tensor(final_normalizer.data(), {N, HV, K});
    args.intermediate_states = tensor(intermediate_states.data(), {kStates, HV, K, V});
    args.state_interval = kInterval;
    args.a_log = tensor(a_log.data(), {HV});
    args.dt_bias = tensor(dt_bias.data(), {HV, K});
    args.cu_seqlens = tensor(cu.data(), {N + 1});
    args.recurrence = {Update::delta, Gate::channel, true};
    args.gate_space = GateSpace::softplus;
  }

  bool untouched() const {
    for (const std::vector<float>* output : {&out, &final_state, &final_normalizer, &intermediate_states}) {
      for (float x : *output) {
        if (x != 7.0f) return false;
      }
    }
    return true;
  }
};

struct Bad {
  const char* name;      // of the test row
  const char* argument;  // that the error names
  std::vector<const char*> says;
  std::function<void(Legal&)> spoil;
};

void expect_rejected(const Bad& bad) {
  SCOPED_TRACE(bad.name);
  Legal legal;
  bad.spoil(legal);
  Execution execution;
  execution.kernel = "reference";
  try {
    delta_attention_forward(legal.args, execution);
    ADD_FAILURE() << "taken";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), bad.argument) << error.what();
    const std::string text = error.what();
    EXPECT_NE(text.find("expected "), std::string::npos) << text;
    EXPECT_NE(text.find("got "), std::string::npos) << text;
    for (const char* part : bad.says) {
      EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
    }
  }
  EXPECT_TRUE(legal.untouched());
  EXPECT_THROW(delta_attention_workspace(legal.args, execution), InvalidArgument);
  EXPECT_THROW(dispatch_info(legal.args, execution), InvalidArgument);
}

TEST(Check, TheLegalCallIsTaken) {
  Legal legal;
  EXPECT_NO_THROW(delta_attention_forward(legal.args));
  EXPECT_FALSE(legal.untouched());
}

TEST(Check, DefaultConstructedArgumentsSayWhatIsMissing) {
  try {
    delta_attention_forward(ForwardArgs{});
    FAIL() << "taken";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "q: expected a tensor [B,T,H,K], got none");
  }
}

TEST(Check, MissingOperands) {
  for (const Bad& bad : std::vector<Bad>{{"q", "q", {"[B,T,H,K]", "none"}, [](Legal& x) { x.args.q = {}; }},
                                         {"k", "k", {"[B,T,H,K]", "none"}, [](Legal& x) { x.args.k = {}; }},
                                         {"v", "v", {"[B,T,HV,V]", "none"}, [](Legal& x) { x.args.v = {}; }},
                                         {"out", "out", {"[B,T,HV,V]", "none"}, [](Legal& x) { x.args.out = {}; }},
                                         {"a_log", "a_log", {"[HV]", "none"}, [](Legal& x) { x.args.a_log = {}; }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, OperandsThatHaveNoUseHere) {
  for (const Bad& bad :
       std::vector<Bad>{{"gate none", "log_decay", {"no gate"}, [](Legal& x) { x.args.recurrence.gate = Gate::none; }},
                        {"a_log", "a_log", {"none"}, [](Legal& x) { x.args.gate_space = GateSpace::log; }},
                        {"dt_bias",
                         "dt_bias",
                         {"none"},
                         [](Legal& x) {
                           x.args.gate_space = GateSpace::log;
                           x.args.a_log = {};
                         }},
                        {"raw gate without log_decay", "a_log", {"none"}, [](Legal& x) { x.args.log_decay = {}; }},
                        {"initial_normalizer",
                         "initial_normalizer",
                         {"not normalised"},
                         [](Legal& x) { x.args.recurrence.normalize = false; }},
                        {"final_normalizer", "final_normalizer", {"not normalised"}, [](Legal& x) {
                           x.args.recurrence.normalize = false;
                           x.args.initial_normalizer = {};
                         }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, Shapes) {
  for (const Bad& bad : std::vector<Bad>{
           {"q rank",
            "q",
            {"[B,T,H,K]", "[1,6,2]"},
            [](Legal& x) {
              x.args.q = tensor(x.q.data(), {B, T, H});
            }},
           {"v rank",
            "v",
            {"[B,T,HV,V]"},
            [](Legal& x) {
              x.args.v = tensor(x.v.data(), {B, T, HV});
            }},
           {"k tokens", "k", {"[1,6,2,8]", "[1,5,2,8]"}, [](Legal& x) { x.args.k.shape[1] = 5; }},
           {"k channels", "k", {"[1,6,2,8]"}, [](Legal& x) { x.args.k.shape[3] = 4; }},
           {"v tokens", "v", {"[1,6,4,4]", "[1,5,4,4]"}, [](Legal& x) { x.args.v.shape[1] = 5; }},
           {"no channels", "q", {"at least one"}, [](Legal& x) { x.args.q.shape[3] = x.args.k.shape[3] = 0; }},
           {"no heads", "q", {"at least one"}, [](Legal& x) { x.args.q.shape[2] = 0; }},
           {"group", "v", {"multiple of H = 2"}, [](Legal& x) { x.args.v.shape[2] = 3; }},
           {"no value heads", "v", {"multiple of H"}, [](Legal& x) { x.args.v.shape[2] = 0; }},
           {"no columns", "v", {"V >= 1"}, [](Legal& x) { x.args.v.shape[3] = 0; }},
           {"out", "out", {"[1,6,4,4]"}, [](Legal& x) { x.args.out.shape[0] = 2; }},
           {"beta", "beta", {"[B,T,HV]", "[1,6,4]", "[1,6,2]"}, [](Legal& x) { x.args.beta.shape[2] = 2; }},
           {"beta rank", "beta", {"[1,6,4]"}, [](Legal& x) { x.args.beta.rank = 2; }},
           {"channel gate",
            "log_decay",
            {"[B,T,HV,K]", "channel"},
            [](Legal& x) {
              x.args.log_decay = tensor(x.log_decay.data(), {B, T, HV});
            }},
           {"scalar gate",
            "log_decay",
            {"[B,T,HV]", "scalar"},
            [](Legal& x) { x.args.recurrence.gate = Gate::scalar; }},
           {"a_log", "a_log", {"[HV]", "[4]"}, [](Legal& x) { x.args.a_log.shape[0] = 2; }},
           {"dt_bias", "dt_bias", {"[HV,K]"}, [](Legal& x) { x.args.dt_bias = tensor(x.dt_bias.data(), {HV}); }},
           {"initial_state",
            "initial_state",
            {"[2,4,8,4]", "[1,4,8,4]"},
            [](Legal& x) { x.args.initial_state.shape[0] = 1; }},
           {"final_state",
            "final_state",
            {"[2,4,8,4]", "[2,4,4,8]"},
            [](Legal& x) {
              x.args.final_state = tensor(x.final_state.data(), {N, HV, V, K});
            }},
           {"initial_normalizer",
            "initial_normalizer",
            {"[2,4,8]"},
            [](Legal& x) { x.args.initial_normalizer.shape[2] = 4; }},
           {"final_normalizer",
            "final_normalizer",
            {"[2,4,8]"},
            [](Legal& x) { x.args.final_normalizer.shape[1] = 2; }},
           {"cu rank",
            "cu_seqlens",
            {"[N+1]"},
            [](Legal& x) {
              x.args.cu_seqlens = tensor(x.cu.data(), {1, N + 1});
            }},
           {"cu empty", "cu_seqlens", {"[N+1]", "[0]"}, [](Legal& x) { x.args.cu_seqlens.shape[0] = 0; }},
           {"negative extent", "q", {"extents of 0 or more", "[-1,6,2,8]"}, [](Legal& x) {
              for (auto* view : {&x.args.q, &x.args.k, &x.args.v}) view->shape[0] = -1;
              x.args.out.shape[0] = x.args.log_decay.shape[0] = x.args.beta.shape[0] = -1;
              x.args.cu_seqlens = {};
              x.args.initial_state = x.args.initial_normalizer = {};
              x.args.final_state = x.args.final_normalizer = {};
            }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, RanksOutsideTheStruct) {
  for (int rank : {-1, 5, 1000}) {
    const std::string text = std::to_string(rank);
    for (const Bad& bad : std::vector<Bad>{
             {"q", "q", {text.c_str()}, [=](Legal& x) { x.args.q.rank = rank; }},
             {"beta", "beta", {text.c_str()}, [=](Legal& x) { x.args.beta.rank = rank; }},
             {"cu_seqlens", "cu_seqlens", {text.c_str()}, [=](Legal& x) { x.args.cu_seqlens.rank = rank; }},
             {"final_state", "final_state", {text.c_str()}, [=](Legal& x) { x.args.final_state.rank = rank; }}}) {
      expect_rejected(bad);
    }
  }
}

TEST(Check, Strides) {
  for (const Bad& bad : std::vector<Bad>{
           {"q", "q", {"stride 1 on the last axis"}, [](Legal& x) { x.args.q.strides[3] = 2; }},
           {"k", "k", {"stride 1"}, [](Legal& x) { x.args.k.strides[3] = 0; }},
           {"v", "v", {"stride 1"}, [](Legal& x) { x.args.v.strides[3] = 2; }},
           {"out", "out", {"stride 1"}, [](Legal& x) { x.args.out.strides[3] = 2; }},
           {"log_decay", "log_decay", {"stride 1"}, [](Legal& x) { x.args.log_decay.strides[3] = 2; }},
           {"state",
            "initial_state",
            {"stride 1 on K or on V"},
            [](Legal& x) {
              x.args.initial_state.strides = {512, 128, 16, 2};
            }},
           {"negative", "beta", {"strides of 0 or more"}, [](Legal& x) { x.args.beta.strides[1] = -4; }},
           {"out repeats memory", "out", {"memory of its own"}, [](Legal& x) { x.args.out.strides[1] = 0; }},
           {"out rows overlap", "out", {"memory of its own"}, [](Legal& x) { x.args.out.strides[2] = 3; }},
           {"state repeats memory",
            "final_state",
            {"memory of its own"},
            [](Legal& x) { x.args.final_state.strides[0] = 0; }},
           {"reach beyond 64 bits", "v", {"64 bits"}, [](Legal& x) { x.args.v.strides[1] = INT64_MAX / 2; }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, IntermediateStates) {
  for (const Bad& bad : std::vector<Bad>{
           {"no interval", "state_interval", {"1 or more", "got 0"}, [](Legal& x) { x.args.state_interval = 0; }},
           {"negative interval", "state_interval", {"1 or more", "-3"}, [](Legal& x) { x.args.state_interval = -3; }},
           {"interval alone", "state_interval", {"expected 0", "got 2"}, [](Legal& x) { x.args.intermediate_states = {}; }},
           {"negative interval alone",
            "state_interval",
            {"expected 0", "-1"},
            [](Legal& x) {
              x.args.intermediate_states = {};
              x.args.state_interval = -1;
            }},
           {"too few", "intermediate_states", {"[3,4,8,4]", "[2,4,8,4]"}, [](Legal& x) { x.args.intermediate_states.shape[0] = 2; }},
           {"too many", "intermediate_states", {"[1,4,8,4]", "[3,4,8,4]"}, [](Legal& x) { x.args.state_interval = 4; }},
           {"none fits", "intermediate_states", {"[0,4,8,4]"}, [](Legal& x) { x.args.state_interval = INT64_MAX; }},
           {"rank", "intermediate_states", {"[3,4,8,4]", "[3,4,8]"}, [](Legal& x) { x.args.intermediate_states.rank = 3; }},
           {"strides",
            "intermediate_states",
            {"stride 1 on K or on V"},
            [](Legal& x) {
              x.intermediate_states.resize(2 * x.intermediate_states.size(), 7.0f);
              x.args.intermediate_states =
                  strided_tensor(x.intermediate_states.data(), DType::f32, {kStates, HV, K, V}, {256, 64, 8, 2});
            }},
           {"repeats memory",
            "intermediate_states",
            {"memory of its own"},
            [](Legal& x) { x.args.intermediate_states.strides[0] = 0; }},
           {"integer", "intermediate_states", {"f32", "i32"}, [](Legal& x) { x.args.intermediate_states.dtype = DType::i32; }},
           {"elsewhere",
            "intermediate_states",
            {"cpu", "cuda:0"},
            [](Legal& x) { x.args.intermediate_states.device = cuda(0); }},
           {"null", "intermediate_states", {"null"}, [](Legal& x) { x.args.intermediate_states.data = nullptr; }},
           {"on the initial state",
            "intermediate_states",
            {"apart from initial_state"},
            [](Legal& x) {
              x.args.state_interval = 3;
              x.args.intermediate_states = tensor(x.initial_state.data(), {2, HV, K, V});
            }},
           {"on the final state", "final_state", {"apart from intermediate_states"}, [](Legal& x) {
              x.args.intermediate_states.data = x.args.final_state.data;
            }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, DtypesDevicesAndPointers) {
  for (const Bad& bad : std::vector<Bad>{
           {"q integer", "q", {"f32", "i32"}, [](Legal& x) { x.args.q.dtype = DType::i32; }},
           {"beta integer", "beta", {"i64"}, [](Legal& x) { x.args.beta.dtype = DType::i64; }},
           {"cu float", "cu_seqlens", {"i32 or i64", "f32"}, [](Legal& x) { x.args.cu_seqlens.dtype = DType::f32; }},
           {"k unlike q", "k", {"f32, as q has", "bf16"}, [](Legal& x) { x.args.k.dtype = DType::bf16; }},
           {"out unlike q", "out", {"as q has", "f16"}, [](Legal& x) { x.args.out.dtype = DType::f16; }},
           {"C06: k elsewhere", "k", {"cpu", "cuda:1"}, [](Legal& x) { x.args.k.device = cuda(1); }},
           {"C06: state elsewhere",
            "final_state",
            {"cpu", "cuda:0"},
            [](Legal& x) { x.args.final_state.device = cuda(0); }},
           {"C06: two GPUs", "k", {"cuda:0", "cpu"}, [](Legal& x) { x.args.q.device = cuda(0); }},
           {"null q", "q", {"null"}, [](Legal& x) { x.args.q.data = nullptr; }},
           {"null out", "out", {"null"}, [](Legal& x) { x.args.out.data = nullptr; }},
           {"null cu", "cu_seqlens", {"null"}, [](Legal& x) { x.args.cu_seqlens.data = nullptr; }},
           {"q off its element",
            "q",
            {"aligned"},
            [](Legal& x) { x.args.q.data = static_cast<const char*>(x.args.q.data) + 1; }},
           {"enum", "recurrence.update", {"9"}, [](Legal& x) { x.args.recurrence.update = static_cast<Update>(9); }},
           {"enum", "recurrence.gate", {"-1"}, [](Legal& x) { x.args.recurrence.gate = static_cast<Gate>(-1); }},
           {"enum", "gate_space", {"9"}, [](Legal& x) { x.args.gate_space = static_cast<GateSpace>(9); }},
           {"enum", "beta_space", {"9"}, [](Legal& x) { x.args.beta_space = static_cast<BetaSpace>(9); }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, Numbers) {
  for (const Bad& bad : std::vector<Bad>{
           {"scale", "scale", {"finite", "inf"}, [](Legal& x) { x.args.scale = INFINITY; }},
           {"scale", "scale", {"finite", "nan"}, [](Legal& x) { x.args.scale = NAN; }},
           {"bound",
            "gate_lower_bound",
            {"below 0", "1"},
            [](Legal& x) {
              x.args.gate_space = GateSpace::lower_bound;
              x.args.gate_lower_bound = 1.0f;
            }},
           {"first offset", "cu_seqlens", {"first entry of 0", "1"}, [](Legal& x) { x.cu[0] = 1; }},
           {"falling offsets", "cu_seqlens", {"never decrease", "entry 2 = 6 after 7"}, [](Legal& x) { x.cu[1] = 7; }},
           {"last offset", "cu_seqlens", {"last entry of T = 6", "5"}, [](Legal& x) { x.cu[2] = 5; }},
           {"packed batch", "cu_seqlens", {"B = 1", "B = 2"}, [](Legal& x) {
              for (auto* view : {&x.args.q, &x.args.k, &x.args.v}) {
                view->shape[0] = 2;
                view->strides[0] = 0;
              }
              x.args.out.shape[0] = x.args.log_decay.shape[0] = x.args.beta.shape[0] = 2;
            }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, OutputsShareNoMemory) {
  for (const Bad& bad :
       std::vector<Bad>{{"out on v", "out", {"apart from v"}, [](Legal& x) { x.args.out.data = x.v.data(); }},
                        {"out on part of v",
                         "out",
                         {"apart from v", "overlapping"},
                         [](Legal& x) {
                           x.v.resize(2 * x.v.size());
                           x.args.v.data = x.v.data();
                           x.args.out.data = x.v.data() + 5;
                         }},
                        {"state transposed in place",
                         "final_state",
                         {"apart from initial_state"},
                         [](Legal& x) {
                           x.args.final_state = tensor(x.initial_state.data(), {N, HV, V, K}).permuted({0, 1, 3, 2});
                         }},
                        {"both outputs in one place", "out", {"apart from final_state"}, [](Legal& x) {
                           x.args.final_state.data = x.out.data();
                         }}}) {
    expect_rejected(bad);
  }
}

TEST(Check, CallsThatMustBeTaken) {
  {
    Legal x;  // the same memory and view: in place
    x.args.final_state = tensor(x.initial_state.data(), {N, HV, K, V});
    EXPECT_NO_THROW(delta_attention_forward(x.args));
  }
  {
    Legal x;  // strides of axes of one element are free
    x.args.q.strides[0] = x.args.out.strides[0] = -77;
    EXPECT_NO_THROW(delta_attention_forward(x.args));
  }
  {
    Legal x;  // inputs may share memory
    x.args.k.data = x.q.data();
    EXPECT_NO_THROW(delta_attention_forward(x.args));
  }
  {
    Legal x;  // intervals that no sequence reaches: no states, no memory
    x.args.state_interval = T + 1;
    x.args.intermediate_states = tensor(static_cast<float*>(nullptr), {0, HV, K, V});
    EXPECT_NO_THROW(delta_attention_forward(x.args));
  }
  {
    Legal x;  // intermediate states in the other memory order, in another dtype
    x.args.intermediate_states =
        tensor(x.intermediate_states.data(), DType::f16, {kStates, HV, V, K}).permuted({0, 1, 3, 2});
    EXPECT_NO_THROW(delta_attention_forward(x.args));
  }
  {
    Legal x;  // i64 offsets
    const std::int64_t cu[] = {0, 2, 6};
    x.args.cu_seqlens = tensor(cu, {N + 1});
    EXPECT_NO_THROW(delta_attention_forward(x.args));
  }
}

// B10, and the CPU half of the error contract: CUDA tensors where nothing can serve them.
TEST(Check, B10_CudaTensorsWithoutADevice) {
  if (test::cuda_skip_reason().empty()) GTEST_SKIP() << "this machine has a GPU";
  Legal x;
  ForwardArgs& a = x.args;
  for (ConstTensor* view : {&a.q, &a.k, &a.v, &a.log_decay, &a.beta, &a.initial_state, &a.initial_normalizer,
                            &a.cu_seqlens, &a.a_log, &a.dt_bias}) {
    view->device = cuda(0);
  }
  for (Tensor* view : {&a.out, &a.final_state, &a.final_normalizer, &a.intermediate_states}) view->device = cuda(0);
  EXPECT_THROW(delta_attention_forward(a), NoDevice);
  EXPECT_TRUE(x.untouched());
  EXPECT_NO_THROW(delta_attention_forward(Legal().args));
}

}  // namespace
}  // namespace delta_attention
