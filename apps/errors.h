#pragma once

// What can go wrong in the program itself, beside the library's own errors. main() turns each into an exit code.

#include <stdexcept>

namespace delta_attention::cli {

/// A file's content, or what the command line says about it, is wrong.
class BadInput : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The system refused to open, read or write a file.
class IoError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// verify found something that does not hold.
class Breach : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace delta_attention::cli
