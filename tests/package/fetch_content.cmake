# Builds the consumer with the library's sources inside, as a library of the given kind and without CUDA.
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/common.cmake)

set(shared OFF)
if(kind STREQUAL "shared")
  set(shared ON)
endif()
build_and_run_consumer(${scratch}/fetch_content_${kind} -DDELTA_ATTENTION_SOURCE=${source} -DBUILD_SHARED_LIBS=${shared}
  -DDELTA_ATTENTION_CUDA=OFF -DDELTA_ATTENTION_INSTALL=ON)
