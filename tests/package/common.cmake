# Helpers of the scripts beside this one.

# Runs a command, shows its output only when it fails, and then ends the test. `what` names the step.
function(run what)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what}: exit status ${status}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# Configures and builds the consumer project in `folder`, and runs its programs.
function(build_and_run_consumer folder)
  run("configure the consumer" ${CMAKE_COMMAND} -S ${consumer} -B ${folder} -G ${generator}
    -DCMAKE_BUILD_TYPE=${build_type} -DCMAKE_C_COMPILER=${c} -DCMAKE_CXX_COMPILER=${cxx}
    -DCMAKE_C_FLAGS=${c_flags} -DCMAKE_CXX_FLAGS=${cxx_flags} -DCMAKE_CXX_COMPILER_LAUNCHER=${launcher} -DREADME_PROGRAM=${readme_program} ${ARGN})
  run("build the consumer" ${CMAKE_COMMAND} --build ${folder} --parallel)
  run("run the C program" ${folder}/c_program)
  run("run the program that catches errors" ${folder}/errors)
  run("run the program with softmax attention" ${folder}/softmax)
  run("run the README's program" ${folder}/readme_program)
  if(NOT output MATCHES "${readme_output}")
    message(FATAL_ERROR "the README's program printed\n${output}instead of ${readme_output}")
  endif()
endfunction()
