# What a build hands to others: the symbols of the shared library, and `cmake --install` with a package for find_package.

# Only the library's own names leave the shared library, whatever the headers inside bring along.
if(BUILD_SHARED_LIBS)
  set_target_properties(delta_attention PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    LINK_DEPENDS ${PROJECT_SOURCE_DIR}/src/exports.map)
  target_link_options(delta_attention PRIVATE
    -Wl,--version-script=${PROJECT_SOURCE_DIR}/src/exports.map -Wl,--exclude-libs,ALL)
endif()

option(DELTA_ATTENTION_INSTALL "Add the install rules" ${PROJECT_IS_TOP_LEVEL})
if(NOT DELTA_ATTENTION_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(DELTA_ATTENTION_NEEDS_CUDART OFF)
if(DELTA_ATTENTION_WITH_CUDA AND NOT BUILD_SHARED_LIBS)
  set(DELTA_ATTENTION_NEEDS_CUDART ON)
endif()
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/delta_attention)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/delta_attention-config.cmake.in
  ${PROJECT_BINARY_DIR}/delta_attention-config.cmake INSTALL_DESTINATION ${package_folder})
# Before 1.0 a minor version may break what was.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/delta_attention-config-version.cmake COMPATIBILITY SameMinorVersion)

install(TARGETS delta_attention EXPORT delta_attention-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT delta_attention-targets NAMESPACE delta_attention:: DESTINATION ${package_folder})
install(FILES
  ${PROJECT_BINARY_DIR}/delta_attention-config.cmake
  ${PROJECT_BINARY_DIR}/delta_attention-config-version.cmake
  DESTINATION ${package_folder})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/delta_attention)
