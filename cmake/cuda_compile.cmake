# SPDX-License-Identifier: BSD-3-Clause
# cmake -P cuda_compile.cmake -- REPORT NVCC ARGUMENTS...: compiles a file and writes down what its kernels take of a
# multiprocessor, as ptxas says it (-Xptxas -v), for spec/backend/cuda_resources_spec.lua. Warnings and errors are
# printed.
set(command)
foreach(i RANGE 4 ${CMAKE_ARGC})
  if(i GREATER 4 AND i LESS CMAKE_ARGC)
    list(APPEND command "${CMAKE_ARGV${i}}")
  endif()
endforeach()
set(report "${CMAKE_ARGV4}")
execute_process(COMMAND ${command} -Xptxas -v OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE failed)
string(REGEX REPLACE "(^|\n)(ptxas info|    [0-9]+ bytes stack frame)[^\n]*" "" other "${said}")
string(STRIP "${other}" other)
if(other)
  message("${other}")
endif()
if(failed)
  message(FATAL_ERROR "nvcc failed: ${failed}")
endif()
file(WRITE "${report}" "${said}")
