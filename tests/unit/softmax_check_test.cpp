// What softmax_attention_forward refuses, with messages that name the argument; and what it says it would run.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "delta_attention/softmax_attention.h"

namespace delta_attention::test {
namespace {

class SoftmaxCheck : public ::testing::Test {
 protected:
  SoftmaxCheck() : q(2 * 3 * 4 * 8), k(2 * 5 * 2 * 8), v(k.size()), out(q.size(), -1.0f) {
    args.q = tensor(static_cast<const float*>(q.data()), {2, 3, 4, 8});
    args.k = tensor(static_cast<const float*>(k.data()), {2, 5, 2, 8});
    args.v = tensor(static_cast<const float*>(v.data()), {2, 5, 2, 8});
    args.out = tensor(out.data(), {2, 3, 4, 8});
  }

  void expect_refused(const std::string& argument) {
    try {
      softmax_attention_forward(args);
      FAIL() << "nothing was thrown for a wrong " << argument;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
    for (const float x : out) ASSERT_EQ(x, -1.0f) << "written although refused";
  }

  std::vector<float> q, k, v, out;
  SoftmaxArgs args;
};

TEST_F(SoftmaxCheck, ADefaultConstructedCallIsRefused) {
  args = {};
  expect_refused("q");
}

TEST_F(SoftmaxCheck, RunsAndSaysWhatWouldRun) {
  const DispatchInfo info = softmax_dispatch_info(args);
  EXPECT_EQ(info.kernel, "softmax_reference");
  EXPECT_EQ(softmax_attention_workspace(args), 0u);
  softmax_attention_forward(args);
  EXPECT_NE(out.front(), -1.0f);
}

TEST_F(SoftmaxCheck, AnUnknownKernelIsUnsupported) {
  Execution execution;
  execution.kernel = "v1_chunk_pipeline";
  EXPECT_THROW(softmax_attention_forward(args, execution), Unsupported);
  execution.kernel = "softmax_reference";
  execution.settings = "flush=8";
  EXPECT_THROW(softmax_attention_forward(args, execution), InvalidArgument);
}

TEST_F(SoftmaxCheck, ShapesAgainstEachOther) {
  args.k.shape[2] = 3;
  expect_refused("k");
}

TEST_F(SoftmaxCheck, ValuesHaveTheShapeOfKeys) {
  args.v.shape[1] = 4;
  expect_refused("v");
}

TEST_F(SoftmaxCheck, OneDtype) {
  args.k.dtype = DType::bf16;
  expect_refused("k");
}

TEST_F(SoftmaxCheck, OutputsAreApartFromInputs) {
  args.out.data = const_cast<float*>(q.data());
  expect_refused("out");
}

TEST_F(SoftmaxCheck, Numbers) {
  args.softcap = -1.0f;
  expect_refused("softcap");
  args.softcap = 0.0f;
  args.window_left = -2;
  expect_refused("window_left");
  args.window_left = -1;
  args.scale = 1.0f / 0.0f;
  expect_refused("scale");
}

TEST_F(SoftmaxCheck, LengthsAreInsideTheKeys) {
  const std::int32_t lengths[] = {5, 6};
  args.valid_len = tensor(lengths, {2});
  expect_refused("valid_len");
}

TEST_F(SoftmaxCheck, AMaskFitsOrIsOne) {
  const float mask[6] = {};
  args.mask = tensor(mask, {1, 1, 1, 5});
  softmax_attention_forward(args);
  std::fill(out.begin(), out.end(), -1.0f);
  args.mask = tensor(mask, {1, 1, 1, 6});
  expect_refused("mask");
}

TEST_F(SoftmaxCheck, PackedSequencesComeInPairs) {
  const std::int32_t offsets[] = {0, 3};
  args.cu_seqlens_q = tensor(offsets, {2});
  expect_refused("cu_seqlens_q");  // B = 2
  args.cu_seqlens_q = {};
  args.cu_seqlens_kv = tensor(offsets, {2});
  expect_refused("cu_seqlens_kv");
}

TEST_F(SoftmaxCheck, P01_PagesThatDoNotExist) {
  // Four pages of five keys: k and v as they are, read as pages.
  args.q = tensor(static_cast<const float*>(q.data()), {1, 3, 4, 8});
  args.out = tensor(out.data(), {1, 3, 4, 8});
  std::int32_t pages[] = {1, 7, -1}, length[] = {6};
  args.block_table = tensor(static_cast<const std::int32_t*>(pages), {1, 3});
  expect_refused("valid_len");  // needed
  args.valid_len = tensor(static_cast<const std::int32_t*>(length), {1});
  expect_refused("block_table");
  pages[1] = -1;
  expect_refused("block_table");
  pages[1] = 0;
  softmax_attention_forward(args);  // entry 2 lies past the length
  std::fill(out.begin(), out.end(), -1.0f);
  length[0] = 16;
  expect_refused("valid_len");
}

}  // namespace
}  // namespace delta_attention::test
