#include "operands.h"

#include <gtest/gtest.h>

#include "device_memory.h"
#include "errors.h"

namespace delta_attention::cli {
namespace {

ConstTensor floats(const float* data, std::initializer_list<std::int64_t> shape) { return tensor(data, shape); }

TEST(OperandNames, ParseWords) {
  const OperandNames names = parse_operand_names({"log_decay=gate.weight", "beta=", "q=a=b"});
  EXPECT_EQ(names.at("log_decay"), "gate.weight");
  EXPECT_EQ(names.at("beta"), "");
  EXPECT_EQ(names.at("q"), "a=b");
  EXPECT_THROW(parse_operand_names({"gate=x"}), BadInput);
  EXPECT_THROW(parse_operand_names({"beta"}), BadInput);
  EXPECT_THROW(parse_operand_names({""}), BadInput);
}

TEST(RegroupHeads, ReadsNeighboursAsOne) {
  float numbers[96] = {};
  ForwardArgs args;
  args.q = args.k = floats(numbers, {1, 2, 4, 8});
  args.v = args.log_decay = floats(numbers, {1, 1, 8, 12});
  regroup_heads(args, 2);
  EXPECT_EQ(args.q.shape, (Extents{1, 2, 2, 16}));
  EXPECT_EQ(args.q.strides, (Extents{64, 32, 16, 1}));
  EXPECT_EQ(args.v.shape, (Extents{1, 1, 4, 24}));
  EXPECT_EQ(args.log_decay.shape, (Extents{1, 1, 4, 24}));
  EXPECT_THROW(regroup_heads(args, 3), BadInput);
}

TEST(RegroupHeads, LeavesScalarGatesAlone) {
  float numbers[64] = {};
  ForwardArgs args;
  args.q = args.k = args.v = floats(numbers, {1, 2, 4, 8});
  args.log_decay = floats(numbers, {1, 2, 2});
  regroup_heads(args, 2);
  EXPECT_EQ(args.log_decay.shape[2], 2);
}

TEST(Device, IsParsedWhole) {
  EXPECT_EQ(parse_device("cpu"), cpu());
  EXPECT_EQ(parse_device("cuda"), cuda(0));
  EXPECT_EQ(parse_device("cuda:12"), cuda(12));
  for (const char* text : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999"}) {
    EXPECT_THROW(parse_device(text), BadInput) << text;
  }
}

}  // namespace
}  // namespace delta_attention::cli
