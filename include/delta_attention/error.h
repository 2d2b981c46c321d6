#pragma once

// Every failure is one of these. A call that throws has launched nothing and written nothing, with the exception of
// CudaError, which reports what the CUDA runtime said.

#include <stdexcept>
#include <string>

#include "delta_attention/version.h"

namespace delta_attention {

class DELTA_ATTENTION_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
};

/// The caller's input is wrong. The message names the argument, what was expected and what came.
class DELTA_ATTENTION_API InvalidArgument : public Error {
 public:
  InvalidArgument(const std::string& argument, const std::string& expected, const std::string& got);
  ~InvalidArgument() override;
  const std::string& argument() const { return argument_; }

 private:
  std::string argument_;
};

/// The input is legal, but this kernel, device or build cannot run it. The message says why and what would.
class DELTA_ATTENTION_API Unsupported : public Error {
 public:
  using Error::Error;
  ~Unsupported() override;
};

/// CUDA tensors were passed and there is no usable CUDA device (or no driver, or a build without CUDA).
class DELTA_ATTENTION_API NoDevice : public Unsupported {
 public:
  using Unsupported::Unsupported;
  ~NoDevice() override;
};

/// An allocation that the call needed was refused. Pass a workspace to keep allocation in your hands.
class DELTA_ATTENTION_API OutOfMemory : public Error {
 public:
  using Error::Error;
  ~OutOfMemory() override;
};

/// A CUDA runtime call failed. The message carries the call and CUDA's own text.
class DELTA_ATTENTION_API CudaError : public Error {
 public:
  using Error::Error;
  ~CudaError() override;
};

}  // namespace delta_attention
