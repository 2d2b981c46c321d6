# Decides whether the CUDA kernels are built and for which architectures.
#
#   DELTA_ATTENTION_CUDA        AUTO | ON | OFF
#   CMAKE_CUDA_ARCHITECTURES    the user's list wins (or the environment's CUDAARCHS); by default 80 and 90a machine code plus
#                               PTX of 80, so that every later GPU runs
#
# Toolkit and architectures are checked here, before CMake tries the compiler, so that a mismatch is one line and not a
# compiler's log.

include(DeltaAttentionArchitectures)
set(DELTA_ATTENTION_WITH_CUDA OFF)
if(DELTA_ATTENTION_CUDA STREQUAL "OFF")
  return()
endif()
if(NOT DELTA_ATTENTION_CUDA MATCHES "^(AUTO|ON)$")
  message(FATAL_ERROR "DELTA_ATTENTION_CUDA is '${DELTA_ATTENTION_CUDA}': AUTO, ON or OFF was expected")
endif()

# CMake's own choice comes first (CMAKE_CUDA_COMPILER, CUDACXX), then nvcc on the PATH or where NVIDIA's packages put it.
set(nvcc "${CMAKE_CUDA_COMPILER}")
if(NOT nvcc)
  set(nvcc "$ENV{CUDACXX}")
endif()
if(NOT nvcc)
  find_program(DELTA_ATTENTION_NVCC nvcc PATHS ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(DELTA_ATTENTION_NVCC)
  set(nvcc "${DELTA_ATTENTION_NVCC}")
endif()
if(NOT nvcc)
  if(DELTA_ATTENTION_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DELTA_ATTENTION_CUDA=ON, but no CUDA compiler was found. Put nvcc on the PATH or set CMAKE_CUDA_COMPILER.")
  endif()
  message(STATUS "CUDA compiler not found: building the CPU backend only")
  return()
endif()
set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "CUDA compiler")

# An empty list would reach nvcc as "compute_"; an unset one would become CMake's own default. Both mean ours.
if("${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "")
  unset(CMAKE_CUDA_ARCHITECTURES CACHE)
  set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
endif()
if("${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;80-virtual")
endif()

delta_attention_nvcc_version(nvcc_version "${nvcc}")
if(nvcc_version)
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    delta_attention_architecture_problem(problem "${architecture}" ${nvcc_version})
    if(problem)
      message(FATAL_ERROR "${problem} (${nvcc}). Set CMAKE_CUDA_ARCHITECTURES to what the toolkit knows, or use a newer toolkit.")
    endif()
  endforeach()
  get_filename_component(device_query "${nvcc}" REALPATH)
  get_filename_component(device_query "${device_query}" DIRECTORY)
  string(APPEND device_query "/__nvcc_device_query")
  if("native" IN_LIST CMAKE_CUDA_ARCHITECTURES AND EXISTS "${device_query}")
    execute_process(COMMAND "${device_query}" RESULT_VARIABLE no_device OUTPUT_QUIET ERROR_QUIET)
    if(no_device)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES=native, but this machine shows no CUDA device. Name the architecture, for example 90a.")
    endif()
  endif()
endif()

if(DELTA_ATTENTION_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(WARNING "${nvcc} does not work here: building the CPU backend only. Configure with -DDELTA_ATTENTION_CUDA=ON to see its error.")
    return()
  endif()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)

set(DELTA_ATTENTION_WITH_CUDA ON)
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures: ${CMAKE_CUDA_ARCHITECTURES}")
