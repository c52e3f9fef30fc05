# SPDX-License-Identifier: BSD-3-Clause
# For tests: the CUDA backend's own sources compiled for the processor (spec/emulate), and a driver that pretends. It
# switches stacks by hand, so it is for x86-64 and not for sanitizers; spec/backend/cuda_spec.lua skips what needs it
# elsewhere.
if(PS_SANITIZE OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  return()
endif()
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  return()
endif()
enable_language(CXX)
add_library(ps_cuda_emulated MODULE spec/emulate/fibres.cpp spec/emulate/streams.cpp
            spec/emulate/memory.cpp spec/emulate/wgmma.cpp spec/emulate/rules.cpp ${CUDA_SOURCES})
set_source_files_properties(${CUDA_SOURCES} PROPERTIES LANGUAGE CXX)
set_target_properties(ps_cuda_emulated PROPERTIES CXX_STANDARD 17 CXX_EXTENSIONS ON CXX_VISIBILITY_PRESET hidden)
target_include_directories(ps_cuda_emulated BEFORE PRIVATE spec/emulate src ${CMAKE_BINARY_DIR}/gen)
# Small panels, so that lm_loss has several; an access that is not aligned to its type traps.
target_compile_definitions(ps_cuda_emulated PRIVATE PS_CUDA_PANEL_NBYTES=153600 PS_HAVE_NCCL)
target_compile_options(ps_cuda_emulated PRIVATE -x c++ -O1 -Wno-unknown-pragmas -Wno-unused-function
                       -Wno-missing-field-initializers -fno-strict-aliasing
                       -fsanitize=alignment -fsanitize-undefined-trap-on-error)
add_dependencies(ps_cuda_emulated ps_generated)

add_library(ps_cuda_driver MODULE spec/emulate/driver.c)
set_target_properties(ps_cuda_driver PROPERTIES C_VISIBILITY_PRESET default OUTPUT_NAME cuda SUFFIX ".so.1"
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/emulated)

add_library(ps_cuda_nccl MODULE spec/emulate/nccl.cpp)
find_package(Threads REQUIRED)
target_link_libraries(ps_cuda_nccl PRIVATE Threads::Threads)
target_include_directories(ps_cuda_nccl PRIVATE spec/emulate)
set_target_properties(ps_cuda_nccl PROPERTIES CXX_STANDARD 17 OUTPUT_NAME nccl SUFFIX ".so.2"
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/emulated)
