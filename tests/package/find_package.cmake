# Installs a build of the library, moves the installed folder, and builds the consumer against it.
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/common.cmake)

set(first ${scratch}/first_prefix_${kind})
set(prefix ${scratch}/prefix_${kind})
file(REMOVE_RECURSE ${first} ${prefix} ${scratch}/find_package_${kind})
run("install" ${CMAKE_COMMAND} --install ${installed_from} --prefix ${first})
file(RENAME ${first} ${prefix})

# Nothing installed may lead back to the build, the sources or the folder it was installed to.
file(GLOB_RECURSE texts ${prefix}/*.cmake ${prefix}/*.h)
foreach(file IN LISTS texts)
  file(READ ${file} content)
  foreach(folder ${installed_from} ${source} ${first})
    string(FIND "${content}" "${folder}/" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} mentions ${folder}")
    endif()
  endforeach()
endforeach()

build_and_run_consumer(${scratch}/find_package_${kind} -DCMAKE_PREFIX_PATH=${prefix})

# The version file must turn away a consumer that asks for a later version.
file(WRITE ${scratch}/later_${kind}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(later LANGUAGES CXX)
find_package(delta_attention 99.0 CONFIG REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${scratch}/later_${kind} -B ${scratch}/later_${kind}/build -G ${generator}
  -DCMAKE_CXX_COMPILER=${cxx} -DCMAKE_PREFIX_PATH=${prefix} ERROR_VARIABLE error OUTPUT_QUIET RESULT_VARIABLE status)
if(status EQUAL 0 OR NOT error MATCHES "compatible")
  message(FATAL_ERROR "version 99 was asked for, and find_package said (${status}): ${error}")
endif()
