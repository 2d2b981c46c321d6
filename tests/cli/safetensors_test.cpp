#include "safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "errors.h"
#include "temporary_folder.h"

namespace delta_attention::cli {
namespace {

/// The message of the BadInput that parse_header throws, "" if it accepts the header.
std::string refusal(const std::string& header, std::uint64_t data_bytes) {
  try {
    parse_header(header, data_bytes);
    return "";
  } catch (const BadInput& error) {
    return error.what();
  }
}

std::string little_endian(std::uint64_t value) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(value >> (8 * i));
  return bytes;
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string message_of(const std::string& path) {
  try {
    const SafetensorsFile file(path);
    return "";
  } catch (const BadInput& error) {
    return error.what();
  }
}

TEST(SafetensorsHeader, AcceptsEveryShapeTheFormatHas) {
  EXPECT_EQ(refusal("{}", 0), "");
  EXPECT_EQ(refusal(R"({"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}   )", 24), "");
  EXPECT_EQ(refusal(R"({"scalar":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]}})", 1), "");
  EXPECT_EQ(refusal(R"({"empty":{"dtype":"F16","shape":[0,7],"data_offsets":[0,0]}})", 0), "");
  EXPECT_EQ(
      refusal(
          R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
          12),
      "");
  EXPECT_EQ(parse_header(R"({"__metadata__":{"model":"m"}})", 0).metadata.at("model"), "m");
}

struct BadHeader {
  const char* why;
  const char* header;
  std::uint64_t data_bytes;
  const char* message;  // a part of it
};

void PrintTo(const BadHeader& bad, std::ostream* out) { *out << bad.why; }

class RefusedHeader : public testing::TestWithParam<BadHeader> {};

TEST_P(RefusedHeader, SaysWhatIsWrong) {
  const std::string message = refusal(GetParam().header, GetParam().data_bytes);
  EXPECT_NE(message.find(GetParam().message), std::string::npos) << "the message was: " << message;
}

const BadHeader kBadHeaders[] = {
    {"no_object", "[]", 0, "does not begin with '{'"},
    {"empty", "", 0, "does not begin with '{'"},
    {"no_json", "{nonsense", 0, "not valid JSON"},
    {"cut_json", R"({"x":{"dtype":"F32")", 0, "not valid JSON"},
    {"bad_utf8", "{\"\xff\":1}", 0, "not valid JSON"},
    {"two_objects", "{}{}", 0, "not valid JSON"},
    {"too_deep", R"({"x":{"shape":[[[[1]]]]}})", 0, "nests deeper"},
    {"same_tensor_twice",
     R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
     "\"x\" twice"},
    {"same_key_twice", R"({"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "\"dtype\" twice"},
    {"entry_no_object", R"({"x":7})", 0, "not an object"},
    {"no_dtype", R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1, "gives no 'dtype'"},
    {"dtype_number", R"({"x":{"dtype":32,"shape":[1],"data_offsets":[0,4]}})", 4, "'dtype' is not a string"},
    {"dtype_unknown", R"({"x":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4, "unknown dtype \"F33\""},
    {"shape_missing", R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", 4, "gives no 'shape'"},
    {"shape_negative", R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "whole numbers of 0 or more"},
    {"shape_fraction", R"({"x":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "whole numbers of 0 or more"},
    {"shape_text", R"({"x":{"dtype":"F32","shape":"1","data_offsets":[0,4]}})", 4, "not a list"},
    {"shape_overflows", R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
     "does not fit"},
    {"shape_above_2_63", R"({"x":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}})", 0,
     "does not fit"},
    {"offsets_negative", R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4, "whole numbers of 0 or more"},
    {"offsets_single", R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4]}})", 4, "not a pair"},
    {"offsets_reversed", R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "takes 4 bytes"},
    {"offsets_too_short", R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "takes 8 bytes"},
    {"offsets_past_end", R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7, "truncated"},
    {"overlap",
     R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6,
     "overlap"},
    {"hole",
     R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})", 3,
     "belong to no tensor"},
    {"trailing_bytes", R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 9, "8 bytes after the last tensor"},
    {"metadata_list", R"({"__metadata__":[]})", 0, "__metadata__ is not an object"},
    {"metadata_number", R"({"__metadata__":{"a":1}})", 0, "not a string"},
    {"control_characters_in_name", "{\"\\u001b[31m\":7}", 0, "\"\\u001b[31m\""},
};

INSTANTIATE_TEST_SUITE_P(Hostile, RefusedHeader, testing::ValuesIn(kBadHeaders),
                         [](const auto& info) { return std::string(info.param.why); });

/// Random damage to a sound header: it is accepted or refused with BadInput; anything else ends the test.
TEST(SafetensorsHeader, SurvivesRandomDamage) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string sound =
      R"({"__metadata__":{"a":"b"},"q":{"dtype":"F16","shape":[1,2,3,4],"data_offsets":[0,48]},"k":{"dtype":"F32","shape":[3],"data_offsets":[48,60]}})";
  ASSERT_EQ(refusal(sound, 60), "");
  const std::string alphabet = "{}[]:,\"0123456789-.eEF\\u\xff\x01 ";
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = sound;
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0 && !damaged.empty(); --edits) {
      const std::size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0: damaged[at] = alphabet[random() % alphabet.size()]; break;
        case 1: damaged.erase(at, 1 + random() % 8); break;
        default: damaged.insert(at, damaged.substr(random() % damaged.size(), 1 + random() % 12)); break;
      }
    }
    if (!refusal(damaged, 60).empty()) ++refused;
  }
  EXPECT_GT(refused, 10000);
}

TEST(SafetensorsFile, RefusesWhatIsShorterThanItSays) {
  const TemporaryFolder folder;
  const std::string path = folder.file("bad");
  write_text(path, "");
  EXPECT_NE(message_of(path).find("0 bytes are too few"), std::string::npos);
  write_text(path, "1234567");
  EXPECT_NE(message_of(path).find("7 bytes are too few"), std::string::npos);
  write_text(path, little_endian(100) + "{}");
  EXPECT_NE(message_of(path).find("the header says it is 100 bytes long"), std::string::npos);
  write_text(path, little_endian(UINT64_MAX) + "{}");
  EXPECT_NE(message_of(path).find("truncated"), std::string::npos);
}

TEST(SafetensorsFile, RefusesAHugeHeader) {
  const TemporaryFolder folder;
  const std::string path = folder.file("huge");
  write_text(path, little_endian(200'000'000));
  std::filesystem::resize_file(path, 200'000'008);  // sparse: takes no space
  EXPECT_NE(message_of(path).find("the format allows 100000000"), std::string::npos);
}

TEST(SafetensorsFile, CopiesTensorsThatLieAtOddAddresses) {
  const TemporaryFolder folder;
  const float value = 3.25f;
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  write_text(folder.file("odd"), little_endian(header.size()) + header + "!" +
                                     std::string(reinterpret_cast<const char*>(&value), sizeof value));
  const SafetensorsFile file(folder.file("odd"));
  const ConstTensor x = file.find("x");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.data) % alignof(float), 0u);
  EXPECT_EQ(*static_cast<const float*>(x.data), value);
  EXPECT_FALSE(file.find("y").present());
  EXPECT_THROW(file.find("a"), BadInput);  // U8 is no dtype of the library
}

TEST(SafetensorsFile, RefusesFoldersAndMissingFiles) {
  const TemporaryFolder folder;
  EXPECT_THROW(SafetensorsFile(folder.file(".")), BadInput);
  EXPECT_THROW(SafetensorsFile(folder.file("nothing")), IoError);
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TemporaryFolder folder;
  const float f32[] = {1.0f, -2.5f, 3.0f, 4.0f, 5.0f, 6.0f};
  const double f64[] = {0.1, 0.2};
  const std::uint16_t f16[] = {0x3c00, 0xbc00, 0x0001};
  const std::int32_t i32[] = {7, -8};
  const std::int64_t i64[] = {INT64_MIN};
  {
    SafetensorsWriter writer(folder.file("x"));
    writer.write({{"half", tensor(static_cast<const void*>(f16), DType::f16, {3})},
                  {"brain", tensor(static_cast<const void*>(f16), DType::bf16, {3, 1})},
                  {"single", tensor(f32, {1, 2, 3})},
                  {"double", tensor(f64, {2})},
                  {"int", tensor(i32, {2})},
                  {"long", tensor(i64, {1})},
                  {"nothing", tensor(f32, {0, 5})}},
                 {{"key", "value"}});
  }
  EXPECT_EQ(folder.entries(), 1u);
  const SafetensorsFile file(folder.file("x"));
  EXPECT_EQ(file.header().metadata.at("key"), "value");
  const auto same = [&](const char* name, const void* bytes, std::size_t size, DType dtype) {
    const ConstTensor read = file.find(name);
    ASSERT_TRUE(read.present()) << name;
    EXPECT_EQ(read.dtype, dtype) << name;
    EXPECT_EQ(std::memcmp(read.data, bytes, size), 0) << name;
  };
  same("half", f16, sizeof f16, DType::f16);
  same("brain", f16, sizeof f16, DType::bf16);
  same("single", f32, sizeof f32, DType::f32);
  same("double", f64, sizeof f64, DType::f64);
  same("int", i32, sizeof i32, DType::i32);
  same("long", i64, sizeof i64, DType::i64);
  EXPECT_EQ(describe(file.header().tensors.at("single")), "F32 [1,2,3]");
  EXPECT_EQ(file.find("nothing").elements(), 0);
  for (const auto& [name, entry] : file.header().tensors) {
    EXPECT_TRUE(entry.begin == entry.end || file.find(name).present());
  }
}

TEST(SafetensorsWriter, LeavesNothingBehindWhenItIsNotUsed) {
  const TemporaryFolder folder;
  write_text(folder.file("x"), "before");
  { const SafetensorsWriter writer(folder.file("x")); }
  EXPECT_EQ(folder.entries(), 1u);
  EXPECT_EQ(read_text(folder.file("x")), "before");
}

/// A limit on file size stands for a full disk: write() fails after some bytes.
TEST(SafetensorsWriter, KeepsTheOldFileWhenSpaceRunsOut) {
  const TemporaryFolder folder;
  write_text(folder.file("x"), "before");
  const std::vector<float> numbers(1 << 16, 1.0f);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  {
    SafetensorsWriter writer(folder.file("x"));
    EXPECT_THROW(writer.write({{"x", tensor(numbers.data(), {1 << 16})}}, {}), IoError);
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_text(folder.file("x")), "before");
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsWriter, FollowsSymbolicLinks) {
  const TemporaryFolder folder;
  write_text(folder.file("target"), "before");
  std::filesystem::create_symlink("target", folder.file("link"));
  const float number = 1.0f;
  SafetensorsWriter(folder.file("link")).write({{"x", tensor(&number, {1})}}, {});
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_TRUE(SafetensorsFile(folder.file("target")).find("x").present());
}

}  // namespace
}  // namespace delta_attention::cli
