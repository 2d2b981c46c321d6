// The roofline model that the benchmarks print beside measured times: shapes small enough to count by hand.

#include "support/traffic.h"

#include <gtest/gtest.h>

namespace {

using bench::Ceilings;
using bench::softmax_traffic;
using bench::SoftmaxShape;
using bench::Traffic;

/// Four rows and four keys of two f32 channels: q, k, v and out take 32 bytes each, a key with its value 16.
SoftmaxShape four_by_four() {
  SoftmaxShape shape;
  shape.queries = shape.keys = 4;
  shape.dim = 2;
  return shape;
}

TEST(Traffic, ThreeStageWritesAndReadsTheMatrixOfScoresTwice) {
  const Traffic traffic = softmax_traffic("three_stage", four_by_four()).value();
  EXPECT_EQ(traffic.bytes, 4 * 32 + 4 * (4 * 4 * 4));
  EXPECT_EQ(traffic.flops, 4 * 2 * 16);
}

TEST(Traffic, NaiveReadsKeysAndValuesOncePerRow) {
  const SoftmaxShape shape = four_by_four();
  EXPECT_EQ(softmax_traffic("naive", shape)->bytes, 2 * 32 + 4 * (4 * 16));
}

TEST(Traffic, ThreePassReadsKeysAndScoresThemInEveryPass) {
  const Traffic traffic = softmax_traffic("three_pass", four_by_four()).value();
  EXPECT_EQ(traffic.bytes, 2 * 32 + 4 * 4 * (3 * 8 + 8));
  EXPECT_EQ(traffic.flops, (3 + 1) * (2 * 2) * 16);
}

TEST(Traffic, CausalRowsReadAndComputeWhatTheySee) {
  SoftmaxShape shape = four_by_four();
  shape.causal = true;
  const Traffic traffic = softmax_traffic("naive", shape).value();
  EXPECT_EQ(traffic.bytes, 2 * 32 + (1 + 2 + 3 + 4) * 16);
  EXPECT_EQ(traffic.flops, 4 * 2 * (1 + 2 + 3 + 4));
}

TEST(Traffic, CausalCountsFromTheBottomRight) {
  SoftmaxShape shape = four_by_four();
  shape.causal = true;
  shape.queries = 2;
  EXPECT_EQ(bench::visible_pairs(shape), 3 + 4);
  shape.queries = 6;
  EXPECT_EQ(bench::visible_pairs(shape), 0 + 0 + 1 + 2 + 3 + 4);
}

TEST(Traffic, TheMatrixOfScoresDoesNotShrinkUnderAMask) {
  SoftmaxShape shape = four_by_four();
  const Traffic full = softmax_traffic("three_stage", shape).value();
  shape.causal = true;
  EXPECT_EQ(softmax_traffic("three_stage", shape)->bytes, full.bytes);
  EXPECT_EQ(softmax_traffic("three_stage", shape)->flops, full.flops);
}

/// Where all rows share one reading of N keys, an f32 byte meets N/4 operations.
TEST(Traffic, OneBlockOfRowsHasAnIntensityOfAQuarterOfTheRows) {
  SoftmaxShape shape = four_by_four();
  for (const std::int64_t rows : {8, 16}) {
    shape.queries = shape.keys = rows;
    const Traffic traffic = softmax_traffic("tiled", shape).value();
    EXPECT_EQ(traffic.flops / traffic.bytes, static_cast<double>(rows) / 4);
  }
}

/// 300 rows are blocks of 128, 128 and 44, which end at rows 128, 256 and 300.
TEST(Traffic, FlashReadsKeysOncePerBlockOf128Rows) {
  SoftmaxShape shape;
  shape.batch = 2;
  shape.heads = shape.key_heads = 3;
  shape.queries = shape.keys = 300;
  shape.dim = 64;
  shape.element_bytes = 2;
  const double rows = 6 * 300 * 64 * 2 * 2, pair = 64 * 2 * 2;
  EXPECT_EQ(softmax_traffic("flash_tc", shape)->bytes, rows + 6 * 3 * 300 * pair);
  shape.causal = true;
  EXPECT_EQ(softmax_traffic("flash_tc", shape)->bytes, rows + 6 * (128 + 256 + 300) * pair);
}

TEST(Traffic, DecodeReadsTheCacheOnceForAllHeadsThatShareIt) {
  SoftmaxShape shape;
  shape.batch = 3;
  shape.queries = 1;
  shape.keys = 1000;
  shape.heads = 8;
  shape.key_heads = 2;
  shape.dim = 16;
  shape.element_bytes = 2;
  EXPECT_EQ(softmax_traffic("decode", shape)->bytes, 2 * (3 * 8 * 16 * 2) + 2 * (3 * 1000 * 2 * 16 * 2));
  EXPECT_EQ(softmax_traffic("decode", shape)->flops, 4 * 16 * 3 * 8 * 1000);
}

TEST(Traffic, UnknownKernelsHaveNoModel) { EXPECT_FALSE(softmax_traffic("softmax_reference", four_by_four()).has_value()); }

TEST(Traffic, LargeShapesDoNotOverflow) {
  SoftmaxShape shape;
  shape.batch = 64;
  shape.heads = shape.key_heads = 128;
  shape.queries = shape.keys = 1 << 20;
  shape.dim = 128;
  EXPECT_EQ(softmax_traffic("flash_tc", shape)->flops, 4.0 * 64 * 128 * 128 * 0x1p40);
}

TEST(Traffic, TheSlowerOfMemoryAndArithmeticSetsTheTime) {
  const Ceilings ceilings = {100, 10, 1000};
  EXPECT_EQ(predicted_seconds({200, 10, false}, ceilings), 2);
  EXPECT_EQ(predicted_seconds({200, 50, false}, ceilings), 5);
  EXPECT_EQ(predicted_seconds({200, 50, true}, ceilings), 2);
}

}  // namespace
