# The CPU routines of one instruction set define nothing outside namespaces of their own: a weak definition of a common name,
# compiled for AVX-512, could otherwise be the one that the linker keeps for a program that runs anywhere.
#   cmake -Dnm=nm -Dinstruction_set=avx2 "-Dobjects=a.o,b.o" -P cpu_symbols.cmake
string(REPLACE "," ";" objects "${objects}")
execute_process(COMMAND ${nm} --defined-only --extern-only ${objects} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${output}")
set(own 0)
foreach(line IN LISTS lines)
  if(NOT line MATCHES "^[0-9a-f]+ [A-Za-z] ([^ ]+)$")
    continue()
  endif()
  set(symbol ${CMAKE_MATCH_1})
  # The renamed Eigen counts as own, as does a template of anyone's that is instantiated with a type of these namespaces.
  if(symbol MATCHES "cpu_${instruction_set}|delta_attention_eigen_${instruction_set}")
    math(EXPR own "${own} + 1")
  elseif(NOT symbol MATCHES "^DW\\.ref\\.")  # a pointer to the exception handler, no code
    message(SEND_ERROR "defined outside the namespaces of ${instruction_set}: ${symbol}")
  endif()
endforeach()
if(own LESS 4)
  message(FATAL_ERROR "expected the four routines of ${instruction_set} in ${objects}, found ${own} symbols")
endif()
