# Decides whether the CUDA kernels are built and for which architectures.
#
#   DELTA_ATTENTION_CUDA        AUTO | ON | OFF
#   CMAKE_CUDA_ARCHITECTURES    the user's list wins; by default 80 and 90a machine code plus PTX of 80, so that every
#                               later GPU runs. Checked against the toolkit here, so that nvcc does not fail in the middle.

set(DELTA_ATTENTION_WITH_CUDA OFF)
if(DELTA_ATTENTION_CUDA STREQUAL "OFF")
  return()
endif()

include(CheckLanguage)
# CMake would fill in the compiler's own default architecture; an unset variable must reach our default instead.
if(DEFINED CMAKE_CUDA_ARCHITECTURES AND CMAKE_CUDA_ARCHITECTURES STREQUAL "")
  unset(CMAKE_CUDA_ARCHITECTURES)
  unset(CMAKE_CUDA_ARCHITECTURES CACHE)
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;80-virtual")
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(DELTA_ATTENTION_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DELTA_ATTENTION_CUDA=ON, but no CUDA compiler was found. Put nvcc on the PATH or set CMAKE_CUDA_COMPILER.")
  endif()
  message(STATUS "CUDA compiler not found: building the CPU backend only")
  return()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)

# The first toolkit that knows an architecture, and the first that no longer does.
function(delta_attention_check_architecture architecture)
  string(REGEX MATCH "^[0-9]+" number "${architecture}")
  if(NOT number)
    return()  # native, all, all-major: CMake resolves these
  endif()
  set(needed 11.0)
  if(number GREATER_EQUAL 100)
    set(needed 12.8)
  elseif(number GREATER_EQUAL 89)
    set(needed 11.8)
  elseif(number GREATER_EQUAL 86)
    set(needed 11.1)
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS needed)
    message(FATAL_ERROR "CUDA architecture ${architecture} needs CUDA ${needed} or later; ${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  if(number LESS 80)
    message(FATAL_ERROR "CUDA architecture ${architecture}: the kernels need compute capability 8.0 or later")
  endif()
endfunction()
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  delta_attention_check_architecture(${architecture})
endforeach()

set(DELTA_ATTENTION_WITH_CUDA ON)
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures: ${CMAKE_CUDA_ARCHITECTURES}")
