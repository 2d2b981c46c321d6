#include "safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "errors.h"

namespace delta_attention::cli {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // the limit of the format's own implementation
constexpr std::size_t kMostBytesPerCall = std::size_t{1} << 30;

struct FileDType {
  const char* name;
  unsigned bytes;
};

/// Every whole-byte dtype of the format. A file may hold tensors that are of no use here; they are checked all the same.
constexpr FileDType kFileDTypes[] = {
    {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
    {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8},
};

struct OurDType {
  const char* name;
  DType dtype;
};
constexpr OurDType kOurDTypes[] = {{"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16},
                                   {"F64", DType::f64}, {"I32", DType::i32}, {"I64", DType::i64}};

const char* file_name_of(DType dtype) {
  for (const OurDType& entry : kOurDTypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "F32";
}

/// A name from a file, safe to print: quoted, with control characters escaped.
std::string quoted(const std::string& name) { return json(name).dump(-1, ' ', true); }

[[noreturn]] void bad(const std::string& name, const std::string& what) {
  throw BadInput(fmt::format("tensor {}: {}", quoted(name), what));
}

/// Refuses what a JSON parser lets pass: a name that comes twice, and nesting that no header has.
class HeaderGuard {
 public:
  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    if (depth > 3) throw BadInput("the header nests deeper than the format does");
    if (event == json::parse_event_t::object_start && depth < 2) keys_[depth].clear();
    if (event == json::parse_event_t::key && depth <= 2) {
      const std::string key = parsed.get<std::string>();
      if (!keys_[depth - 1].insert(key).second) throw BadInput(fmt::format("the header has {} twice", quoted(key)));
    }
    return true;
  }

 private:
  std::set<std::string> keys_[2];  // of the header itself and of the entry being read
};

json parse_json(std::string_view text) {
  if (text.empty() || text.front() != '{') {
    throw BadInput("the header does not begin with '{': this is no safetensors file");
  }
  HeaderGuard guard;
  try {
    return json::parse(text.begin(), text.end(),
                       [&](int depth, json::parse_event_t event, json& parsed) { return guard(depth, event, parsed); });
  } catch (const json::exception&) {
    throw BadInput("the header is not valid JSON");
  }
}

const json& member(const std::string& name, const json& entry, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end()) bad(name, fmt::format("the header gives no '{}'", key));
  return *found;
}

std::vector<std::uint64_t> whole_numbers(const std::string& name, const json& array, const char* key) {
  if (!array.is_array()) bad(name, fmt::format("'{}' is not a list", key));
  std::vector<std::uint64_t> numbers;
  for (const json& number : array) {
    if (!number.is_number_unsigned()) {
      bad(name, fmt::format("'{}' holds something else than whole numbers of 0 or more", key));
    }
    numbers.push_back(number.get<std::uint64_t>());
  }
  return numbers;
}

unsigned element_bytes(const std::string& name, const std::string& dtype) {
  for (const FileDType& known : kFileDTypes) {
    if (dtype == known.name) return known.bytes;
  }
  bad(name, fmt::format("unknown dtype {}", quoted(dtype)));
}

std::uint64_t bytes_of_shape(const std::string& name, const TensorEntry& entry) {
  std::uint64_t bytes = element_bytes(name, entry.dtype);
  for (std::uint64_t extent : entry.shape) {
    if (extent > static_cast<std::uint64_t>(INT64_MAX) || __builtin_mul_overflow(bytes, extent, &bytes)) {
      bad(name, fmt::format("the shape {} does not fit in memory", describe(entry)));
    }
  }
  return bytes;
}

TensorEntry parse_entry(const std::string& name, const json& entry, std::uint64_t data_bytes) {
  if (!entry.is_object()) bad(name, "its header entry is not an object");
  const json& dtype = member(name, entry, "dtype");
  if (!dtype.is_string()) bad(name, "'dtype' is not a string");
  TensorEntry result;
  result.dtype = dtype.get<std::string>();
  result.shape = whole_numbers(name, member(name, entry, "shape"), "shape");
  const std::vector<std::uint64_t> offsets = whole_numbers(name, member(name, entry, "data_offsets"), "data_offsets");
  if (offsets.size() != 2) bad(name, "'data_offsets' is not a pair");
  result.begin = offsets[0];
  result.end = offsets[1];
  const std::uint64_t bytes = bytes_of_shape(name, result);
  if (result.begin > result.end || result.end - result.begin != bytes) {
    bad(name,
        fmt::format("{} takes {} bytes, data_offsets are [{}, {}]", describe(result), bytes, result.begin, result.end));
  }
  if (result.end > data_bytes) {
    bad(name, fmt::format("its bytes end at {}, the file's data at {}: the file is truncated", result.end, data_bytes));
  }
  return result;
}

std::map<std::string, std::string> parse_metadata(const json& metadata) {
  std::map<std::string, std::string> result;
  if (!metadata.is_object()) throw BadInput("__metadata__ is not an object");
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) throw BadInput(fmt::format("__metadata__ {}: not a string", quoted(key)));
    result[key] = value.get<std::string>();
  }
  return result;
}

/// The format has neither overlaps nor holes: every byte after the header belongs to one tensor.
void require_exact_cover(const Header& header, std::uint64_t data_bytes) {
  std::vector<std::pair<std::uint64_t, const std::string*>> order;
  for (const auto& [name, entry] : header.tensors) {
    if (entry.end > entry.begin) order.emplace_back(entry.begin, &name);
  }
  std::sort(order.begin(), order.end());
  std::uint64_t covered = 0;
  for (const auto& [begin, name] : order) {
    if (begin < covered) bad(*name, "its bytes overlap those of another tensor");
    if (begin > covered) throw BadInput(fmt::format("bytes {} to {} belong to no tensor", covered, begin));
    covered = header.tensors.at(*name).end;
  }
  if (covered < data_bytes) throw BadInput(fmt::format("{} bytes after the last tensor", data_bytes - covered));
}

std::string system_error_text(const std::string& path) { return fmt::format("{}: {}", path, std::strerror(errno)); }

/// A file open for reading.
class InputFile {
 public:
  explicit InputFile(const std::string& path) : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw IoError(system_error_text(path));
  }
  ~InputFile() { close(descriptor_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::uint64_t size() const {
    struct stat status {};
    if (fstat(descriptor_, &status) != 0) throw IoError(system_error_text(path_));
    if (!S_ISREG(status.st_mode)) throw BadInput("not a regular file");
    return static_cast<std::uint64_t>(status.st_size);
  }

  void read(void* to, std::size_t bytes) const {
    char* at = static_cast<char*>(to);
    while (bytes > 0) {
      const ssize_t got = ::read(descriptor_, at, std::min(bytes, kMostBytesPerCall));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw IoError(system_error_text(path_));
      if (got == 0) throw BadInput("the file became shorter while it was read");
      at += got;
      bytes -= static_cast<std::size_t>(got);
    }
  }

 private:
  std::string path_;
  int descriptor_;
};

std::uint64_t decode_length(const unsigned char (&bytes)[8]) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  return length;
}

std::uint64_t read_header_length(const InputFile& file, std::uint64_t size) {
  unsigned char prefix[8];
  if (size < sizeof prefix) throw BadInput(fmt::format("{} bytes are too few for a safetensors file", size));
  file.read(prefix, sizeof prefix);
  const std::uint64_t length = decode_length(prefix);
  if (length > size - sizeof prefix) {
    throw BadInput(fmt::format(
        "the header says it is {} bytes long, the file has {}: truncated, or no safetensors file", length, size));
  }
  if (length > kMostHeaderBytes) {
    throw BadInput(fmt::format("a header of {} bytes; the format allows {}", length, kMostHeaderBytes));
  }
  return length;
}

const DType* our_dtype(const std::string& name) {
  for (const OurDType& entry : kOurDTypes) {
    if (name == entry.name) return &entry.dtype;
  }
  return nullptr;
}

json header_json(const std::vector<NamedTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t begin = 0;
  for (const auto& [name, tensor] : tensors) {
    const std::uint64_t end = begin + static_cast<std::uint64_t>(tensor.elements()) * size_of(tensor.dtype);
    header[name] = {{"dtype", file_name_of(tensor.dtype)},
                    {"shape", std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.begin() + tensor.rank)},
                    {"data_offsets", {begin, end}}};
    begin = end;
  }
  return header;
}

bool written_directly(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode);
}

/// The file that a chain of symbolic links names, so that the rename replaces the file and not the link.
std::string resolved(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

}  // namespace

std::string describe(const TensorEntry& entry) {
  return fmt::format("{} [{}]", entry.dtype, fmt::join(entry.shape, ","));
}

Header parse_header(std::string_view text, std::uint64_t data_bytes) {
  const json parsed = parse_json(text);
  Header header;
  for (const auto& [name, entry] : parsed.items()) {
    if (name == "__metadata__") {
      header.metadata = parse_metadata(entry);
    } else {
      header.tensors[name] = parse_entry(name, entry, data_bytes);
    }
  }
  require_exact_cover(header, data_bytes);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  try {
    const InputFile file(path);
    const std::uint64_t size = file.size();
    std::string text(read_header_length(file, size), '\0');
    file.read(text.data(), text.size());
    const std::uint64_t data_bytes = size - sizeof(std::uint64_t) - text.size();
    header_ = parse_header(text, data_bytes);
    data_ = Buffer(data_bytes, cpu());
    file.read(data_.data(), data_bytes);
  } catch (const BadInput& error) {
    throw BadInput(path + ": " + error.what());
  }
  for (const auto& [name, entry] : header_.tensors) {
    const DType* dtype = our_dtype(entry.dtype);
    if (dtype == nullptr || entry.begin % size_of(*dtype) == 0) continue;
    Buffer copy(entry.end - entry.begin, cpu());
    std::memcpy(copy.data(), static_cast<const char*>(data_.data()) + entry.begin, copy.bytes());
    realigned_.emplace(name, std::move(copy));
  }
}

ConstTensor SafetensorsFile::find(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) return {};
  const TensorEntry& entry = found->second;
  const DType* dtype = our_dtype(entry.dtype);
  if (dtype == nullptr || entry.shape.empty() || entry.shape.size() > kMaxRank) {
    throw BadInput(fmt::format("{}: tensor {}: expected F32, F16, BF16, F64, I32 or I64 with 1 to {} axes, got {}",
                               path_, quoted(name), kMaxRank, describe(entry)));
  }
  const auto copy = realigned_.find(name);
  ConstTensor view;
  view.data = copy != realigned_.end() ? copy->second.data() : static_cast<const char*>(data_.data()) + entry.begin;
  view.dtype = *dtype;
  view.rank = static_cast<int>(entry.shape.size());
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.shape[axis] = static_cast<std::int64_t>(entry.shape[axis]);
    view.strides[axis] = stride;
    stride *= std::max<std::int64_t>(view.shape[axis], 1);
  }
  return view;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path) : path_(resolved(path)) {
  if (!written_directly(path_)) temporary_ = fmt::format("{}.{}.tmp", path_, getpid());
  open_file();
  discard();  // an interrupted computation leaves nothing behind
}

SafetensorsWriter::~SafetensorsWriter() { discard(); }

void SafetensorsWriter::open_file() {
  const bool direct = temporary_.empty();
  const int flags = O_WRONLY | O_CLOEXEC | (direct ? 0 : O_CREAT | O_EXCL);
  descriptor_ = open(direct ? path_.c_str() : temporary_.c_str(), flags, 0666);
  if (descriptor_ < 0) throw IoError(system_error_text(path_));
}

void SafetensorsWriter::discard() {
  if (descriptor_ < 0) return;
  close(std::exchange(descriptor_, -1));
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void SafetensorsWriter::write_bytes(const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(descriptor_, at, std::min(bytes, kMostBytesPerCall));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw IoError(system_error_text(path_));
    at += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

void SafetensorsWriter::write(std::vector<NamedTensor> tensors, const std::map<std::string, std::string>& metadata) {
  // Wide elements first: then every tensor is aligned to its elements, and no padding (which the format has none of) is needed.
  std::stable_sort(tensors.begin(), tensors.end(), [](const NamedTensor& a, const NamedTensor& b) {
    return size_of(a.contiguous.dtype) > size_of(b.contiguous.dtype);
  });
  std::string text = header_json(tensors, metadata).dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  unsigned char prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<unsigned char>(text.size() >> (8 * i));

  open_file();
  write_bytes(prefix, sizeof prefix);
  write_bytes(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) {
    write_bytes(tensor.data, static_cast<std::size_t>(tensor.elements()) * size_of(tensor.dtype));
  }
  if (!temporary_.empty()) {
    // Some file systems report a full disk only here.
    const bool kept = fsync(descriptor_) == 0 && std::rename(temporary_.c_str(), path_.c_str()) == 0;
    if (!kept) throw IoError(system_error_text(path_));
  }
  if (close(std::exchange(descriptor_, -1)) != 0) throw IoError(system_error_text(path_));
}

}  // namespace delta_attention::cli
