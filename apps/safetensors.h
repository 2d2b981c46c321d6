#pragma once

// safetensors files: 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes. Files are not trusted:
// whatever is in one, reading it gives tensors or a BadInput that says what is wrong.
// Format: https://github.com/huggingface/safetensors#format

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "delta_attention/tensor.h"
#include "device_memory.h"

namespace delta_attention::cli {

/// One entry of a header: where the tensor lies, counted from the end of the header.
struct TensorEntry {
  std::string dtype;  // as the file writes it: "F16", "BF16", "F32", ...
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct Header {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// Parses and checks a header for a file with `data_bytes` bytes after it. Throws BadInput.
Header parse_header(std::string_view json, std::uint64_t data_bytes);

/// "F16 [1,1024,12,32]"
std::string describe(const TensorEntry& entry);

/// A whole file in memory.
class SafetensorsFile {
 public:
  /// Throws BadInput for a file that is not sound, IoError for one that cannot be read.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const Header& header() const { return header_; }

  /// The tensor of this name, "none" if the file has no such tensor. BadInput if it has and its dtype or rank is not one of ours.
  ConstTensor find(const std::string& name) const;

 private:
  std::string path_;
  Header header_;
  Buffer data_;
  std::map<std::string, Buffer> realigned_;  // copies of tensors that the file stores at odd addresses
};

struct NamedTensor {
  std::string name;
  ConstTensor contiguous;  // in CPU memory
};

/// Writes a file: all or nothing. The bytes go to a temporary file beside the target, which takes the target's name at the end.
/// A target that exists and is no regular file (/dev/stdout, a pipe) is written directly.
class SafetensorsWriter {
 public:
  /// Tries to open the file, so that a wrong path is known before the work is done. Throws IoError.
  explicit SafetensorsWriter(const std::string& path);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void write(std::vector<NamedTensor> tensors, const std::map<std::string, std::string>& metadata);

 private:
  void open_file();
  void discard();
  void write_bytes(const void* data, std::size_t bytes);

  std::string path_;       // symbolic links resolved
  std::string temporary_;  // "" when the target is written directly
  int descriptor_ = -1;
};

}  // namespace delta_attention::cli
