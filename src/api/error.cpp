#include "delta_attention/error.h"

namespace delta_attention {

// Destructors live here so that the type information of each class has one home across library boundaries.
Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
Unsupported::~Unsupported() = default;
NoDevice::~NoDevice() = default;
OutOfMemory::~OutOfMemory() = default;
CudaError::~CudaError() = default;

InvalidArgument::InvalidArgument(const std::string& argument, const std::string& expected, const std::string& got)
    : Error(argument + ": expected " + expected + ", got " + got), argument_(argument) {}

}  // namespace delta_attention
