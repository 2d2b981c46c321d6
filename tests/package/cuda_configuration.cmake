# Configures the library for good and bad toolkits and architectures, and reads what CMake says. The bad ones need no toolkit:
# a script that answers `--version` plays nvcc.
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/common.cmake)
include(${source}/cmake/DeltaAttentionArchitectures.cmake)

# --- the table of toolkits, alone ---
function(expect_problem toolkit architecture pattern)
  delta_attention_architecture_problem(problem "${architecture}" ${toolkit})
  if(NOT problem MATCHES "${pattern}")
    message(FATAL_ERROR "architecture ${architecture} with CUDA ${toolkit}: '${problem}' does not match '${pattern}'")
  endif()
endfunction()
foreach(architecture 80 86-real 89 90 90a-real 90-virtual native all all-major)
  expect_problem(12.4.131 ${architecture} "^$")
  expect_problem(13.0.88 ${architecture} "^$")
endforeach()
foreach(architecture 100 100a 103 110 120 120-real 121)
  expect_problem(13.0.88 ${architecture} "^$")
endforeach()
expect_problem(12.4.131 120 "needs CUDA 12.8 or later; nvcc is 12.4.131")
expect_problem(12.4.131 100a-real "needs CUDA 12.8")
expect_problem(12.8.61 103 "needs CUDA 12.9")
expect_problem(12.9.41 110 "needs CUDA 13.0")
expect_problem(11.7.99 90a "needs CUDA 12.0")
expect_problem(11.7.99 90 "needs CUDA 11.8")
expect_problem(13.0.88 75 "compute capability 8.0")
expect_problem(12.4.131 70-real "compute capability 8.0")
expect_problem(13.0.88 90x "not of the form")
expect_problem(13.0.88 hopper "neither a number nor")

# --- whole configurations ---
# Configures in a fresh folder; `status` and `text` come back.
function(configure)
  file(REMOVE_RECURSE ${scratch}/build)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env --unset=CUDACXX --unset=CUDAARCHS ${CMAKE_COMMAND} -S ${source} -B ${scratch}/build
      -G ${generator} -DDELTA_ATTENTION_TESTS=OFF -DDELTA_ATTENTION_BENCH=OFF -DDELTA_ATTENTION_APPS=OFF ${ARGN}
    OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  set(status "${status}" PARENT_SCOPE)
  set(text "${text}" PARENT_SCOPE)
endfunction()
function(expect_failure name pattern)
  configure(${ARGN})
  if(status EQUAL 0 OR NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "${name}: exit status ${status}, expected a failure that says '${pattern}':\n${text}")
  endif()
  message(STATUS "${name}: refused as it should be")
endfunction()
function(expect_architectures name architectures)
  configure(-DDELTA_ATTENTION_CUDA=ON ${ARGN})
  if(NOT status EQUAL 0 OR NOT text MATCHES "architectures: ${architectures} ")
    message(FATAL_ERROR "${name}: exit status ${status}, expected architectures ${architectures}:\n${text}")
  endif()
  message(STATUS "${name}: ${architectures}")
endfunction()

# A toolkit 12.4 on a machine without a GPU.
set(fake ${scratch}/cuda-12.4/nvcc)
set(fake_query ${scratch}/cuda-12.4/__nvcc_device_query)
file(WRITE ${fake} "#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
file(WRITE ${fake_query} "#!/bin/sh\nexit 1\n")
file(CHMOD ${fake} ${fake_query} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)

# Every folder where this machine may have nvcc, for the case without one.
set(nvcc_folders /usr/local/cuda/bin)
string(REPLACE ":" ";" path "$ENV{PATH}")
foreach(folder IN LISTS path ITEMS /usr/local/bin)  # CMake looks there whatever the PATH says
  if(EXISTS ${folder}/nvcc)
    list(APPEND nvcc_folders ${folder})
  endif()
endforeach()

# Lists do not survive as arguments of functions, so they travel in files that fill the cache.
file(WRITE ${scratch}/no_nvcc.cmake "set(CMAKE_IGNORE_PATH \"${nvcc_folders}\" CACHE STRING \"\")\n")
foreach(number 90 120)
  file(WRITE ${scratch}/80_${number}.cmake "set(CMAKE_CUDA_ARCHITECTURES \"80;${number}\" CACHE STRING \"\")\n")
endforeach()

expect_failure("unknown mode" "AUTO, ON or OFF was expected" -DDELTA_ATTENTION_CUDA=MAYBE)
expect_failure("no nvcc" "no CUDA compiler was found" -DDELTA_ATTENTION_CUDA=ON -C ${scratch}/no_nvcc.cmake)
expect_failure("architecture 120 with nvcc 12.4" "120 needs CUDA 12.8 or later; nvcc is 12.4.131" -DDELTA_ATTENTION_CUDA=ON
  -DCMAKE_CUDA_COMPILER=${fake} -DCMAKE_CUDA_ARCHITECTURES=120)
expect_failure("architecture 120 with nvcc 12.4, AUTO" "120 needs CUDA 12.8" -DDELTA_ATTENTION_CUDA=AUTO
  -DCMAKE_CUDA_COMPILER=${fake} -C ${scratch}/80_120.cmake)
expect_failure("native without a GPU" "native, but this machine shows no CUDA device" -DDELTA_ATTENTION_CUDA=ON
  -DCMAKE_CUDA_COMPILER=${fake} -DCMAKE_CUDA_ARCHITECTURES=native)
configure(-DDELTA_ATTENTION_CUDA=AUTO -C ${scratch}/no_nvcc.cmake)
if(NOT status EQUAL 0 OR NOT text MATCHES "building the CPU backend only")
  message(FATAL_ERROR "no nvcc, AUTO: exit status ${status}\n${text}")
endif()

find_program(nvcc nvcc PATHS /usr/local/cuda/bin)
if(NOT nvcc)
  message(STATUS "without nvcc on this machine, the configurations that need a real one were left out")
  return()
endif()
set(with_nvcc -DCMAKE_CUDA_COMPILER=${nvcc})
expect_architectures("unset" "80-real;90a-real;80-virtual" ${with_nvcc})
expect_architectures("empty" "80-real;90a-real;80-virtual" ${with_nvcc} -DCMAKE_CUDA_ARCHITECTURES=)
expect_architectures("90" "90" ${with_nvcc} -DCMAKE_CUDA_ARCHITECTURES=90)
expect_architectures("80 and 90" "80;90" ${with_nvcc} -C ${scratch}/80_90.cmake)
