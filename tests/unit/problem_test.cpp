// The checked problem: offsets, sequences and heads in 64-bit arithmetic; single elements in every storage type; workspace.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "api/device.h"
#include "problem/problem.h"

namespace delta_attention {
namespace {

TEST(ProblemShapes, I01_OffsetsPassTwoToThe31) {
  InputOperand x;
  x.strides[0] = (std::int64_t{1} << 31) + 64;
  x.strides[1] = 3;
  x.strides[2] = 2;
  x.strides[3] = 1;
  EXPECT_EQ(x.offset(1, 2, 3, 4), 2147483712 + 6 + 6 + 4);
  EXPECT_EQ(x.offset(1 << 20), (std::int64_t{1} << 51) + (std::int64_t{64} << 20));
}

TEST(ProblemShapes, I02_StateElementsPassTwoToThe31) {
  Problem p;
  p.sequences = 2147483649;  // 2^31 + 1, a prime factor short of nothing
  p.value_heads = p.key_dim = p.value_dim = 1;
  EXPECT_EQ(p.state_elements(), 2147483649);
  p.sequences = 1 << 16;
  p.value_heads = 64;
  p.key_dim = p.value_dim = 256;
  EXPECT_EQ(p.state_elements(), std::int64_t{1} << 38);
  EXPECT_EQ(ceil_div((std::int64_t{1} << 40) + 1, 64), (std::int64_t{1} << 34) + 1);
  EXPECT_EQ(ceil_div(0, 64), 0);
  EXPECT_EQ(ceil_div(64, 64), 1);
}

TEST(ProblemShapes, G01_ValueHeadsReadTheirGroupsKeyHead) {
  Problem p;
  p.heads = 2;
  p.value_heads = 6;
  const std::int64_t expected[] = {0, 0, 0, 1, 1, 1};
  for (int head = 0; head < 6; ++head) EXPECT_EQ(p.key_head(head), expected[head]);
}

template <class Offset>
Problem packed(const Offset* offsets, DType dtype, std::int64_t stride = 1) {
  Problem p;
  p.batch = 1;
  p.tokens = 10;
  p.cu_seqlens.data = offsets;
  p.cu_seqlens.dtype = dtype;
  p.cu_seqlens.present = true;
  p.cu_seqlens.strides[0] = stride;
  return p;
}

TEST(ProblemShapes, SequencesComeFromTheOffsets) {
  const std::int32_t narrow[] = {0, 0, 4, 10};
  const std::int64_t wide[] = {0, -1, 0, -1, 4, -1, 10};
  const Problem problems[] = {packed(narrow, DType::i32), packed(wide, DType::i64, 2)};
  for (const Problem& p : problems) {
    const std::int64_t begins[] = {0, 0, 4}, lengths[] = {0, 4, 6};
    for (int n = 0; n < 3; ++n) {
      EXPECT_EQ(p.sequence(n).batch, 0);
      EXPECT_EQ(p.sequence(n).begin, begins[n]);
      EXPECT_EQ(p.sequence(n).length, lengths[n]);
    }
  }
  Problem rows;
  rows.tokens = 7;
  EXPECT_EQ(rows.sequence(3).batch, 3);
  EXPECT_EQ(rows.sequence(3).begin, 0);
  EXPECT_EQ(rows.sequence(3).length, 7);
}

TEST(ProblemShapes, WrongOffsetsStayInsideTheTensor) {
  const std::int64_t wild[] = {-5, 1000, 3, std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min()};
  const Problem p = packed(wild, DType::i64);
  for (int n = 0; n < 4; ++n) {
    const Sequence s = p.sequence(n);
    EXPECT_GE(s.begin, 0);
    EXPECT_GE(s.length, 0);
    EXPECT_LE(s.begin + s.length, p.tokens);
  }
}

TEST(ProblemShapes, SequencesCountTheirOwnIntermediateStates) {
  const std::int32_t offsets[] = {0, 0, 4, 10};
  Problem p = packed(offsets, DType::i32);
  EXPECT_EQ(p.intermediate_count(p.sequence(2)), 0);
  EXPECT_EQ(p.intermediate_capacity(), 0);
  p.intermediate_states.present = true;
  p.state_interval = 3;
  const std::int64_t counts[] = {0, 1, 2};
  for (int n = 0; n < 3; ++n) EXPECT_EQ(p.intermediate_count(p.sequence(n)), counts[n]);
  EXPECT_EQ(p.intermediate_capacity(), 3);
  p.state_interval = 4;  // 1 + 1 states of the 2 that 10 tokens have room for
  EXPECT_EQ(p.intermediate_capacity(), 2);
  p.cu_seqlens = {};
  p.batch = p.sequences = std::int64_t{1} << 33;
  EXPECT_EQ(p.intermediate_count(p.sequence(7)), 2);
  EXPECT_EQ(p.intermediate_capacity(), std::int64_t{1} << 34);
}

TEST(Element, LoadsAndStoresRoundOnce) {
  const float values[] = {0.0f, -0.0f, 1.0f, -2.5f, 0.1f, 65504.0f, 1e-7f, 1.00048828125f /* a tie in f16 */};
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    unsigned char memory[32] = {};
    // Half a unit in the last place of 24, 11 and 8 bits; below f16's normal range half of 2^-24.
    const double ulp = dtype == DType::f32 ? 0.0 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    for (float value : values) {
      store_element(memory, dtype, 3, value);
      const float back = load_element(memory, dtype, 3);
      EXPECT_NEAR(back, value, std::fabs(value) * ulp + (dtype == DType::f16 ? 0x1p-25 : 0.0))
          << name(dtype) << " " << value;
      store_element(memory, dtype, 3, back);
      EXPECT_EQ(load_element(memory, dtype, 3), back);
    }
    store_element(memory, dtype, 3, std::numeric_limits<float>::quiet_NaN());
    EXPECT_TRUE(std::isnan(load_element(memory, dtype, 3)));
    EXPECT_EQ(load_element(memory, dtype, 2), 0.0f) << "a neighbour was written";
  }
}

TEST(Element, BitsAreThoseOfTheFormats) {
  std::uint16_t bits = 0;
  store_element(&bits, DType::f16, 0, 1.5f);
  EXPECT_EQ(bits, 0x3E00);
  store_element(&bits, DType::bf16, 0, 1.5f);
  EXPECT_EQ(bits, 0x3FC0);
  store_element(&bits, DType::f16, 0, 1e6f);
  EXPECT_EQ(bits, 0x7C00);  // infinity
  store_element(&bits, DType::f16, 0, 1.00048828125f);
  EXPECT_EQ(bits, 0x3C00);  // ties go to even
}

TEST(WorkspaceMemory, CallersMemoryIsUsedAsItIs) {
  alignas(256) unsigned char memory[512];
  Execution execution;
  execution.workspace = memory;
  execution.workspace_bytes = sizeof memory;
  EXPECT_EQ(Workspace(512, execution, cpu()).data(), memory);
  EXPECT_EQ(Workspace(0, execution, cpu()).data(), nullptr);
  EXPECT_THROW(Workspace(513, execution, cpu()), InvalidArgument);
  execution.workspace = memory + 8;
  execution.workspace_bytes = 64;
  try {
    Workspace(64, execution, cpu());
    FAIL() << "a misaligned workspace was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "workspace");
  }
}

TEST(WorkspaceMemory, OwnMemoryIsAlignedAndRefusalIsAnError) {
  const Workspace own(1000, Execution{}, cpu());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(own.data()) % 256, 0u);
  std::memset(own.data(), 1, 1000);
  EXPECT_THROW(Workspace(std::size_t{1} << 62, Execution{}, cpu()), OutOfMemory);
}

TEST(Devices, NamesAndProperties) {
  EXPECT_EQ(device_text(cpu()), "cpu");
  EXPECT_EQ(device_text(cuda(3)), "cuda:3");
  EXPECT_EQ(device_properties(cpu()).type, DeviceType::cpu);
  EXPECT_EQ(cuda_unavailable_reason().empty(), cuda_device_count() > 0);
  EXPECT_THROW(device_properties(cuda(cuda_device_count())), NoDevice);
  for (int index = 0; index < cuda_device_count(); ++index) {  // I06: asked of each device, and plausible
    EXPECT_GT(device_properties(cuda(index)).multiprocessors, 0);
    EXPECT_GE(device_properties(cuda(index)).shared_memory, 48u << 10);
  }
}

}  // namespace
}  // namespace delta_attention
