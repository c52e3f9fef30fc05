# SPDX-License-Identifier: BSD-3-Clause
# The plug-in libps_cuda.so, next to psluajit. nvcc is called by hand, not as a language of CMake's: configuring stays
# quick, and a machine without it loses nothing. Machine code for sm_80 and sm_90, and PTX for later chips. The
# runtime is linked in; cuBLASLt is not, and is looked for next to the plug-in first.
file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS src/backend/cuda/*.cu src/backend/cuda/*.cpp)

if(PS_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: switched off (PS_CUDA), so no device cuda")
  return()
endif()
if(PS_CUDA STREQUAL "AUTO" AND (PS_SANITIZE OR PS_FUZZ))
  message(STATUS "CUDA: left out of this kind of build (PS_CUDA=ON puts it in)")
  return()
endif()
find_program(NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NVCC)
  get_filename_component(CUDA_FOLDER ${NVCC} DIRECTORY)
  get_filename_component(CUDA_FOLDER ${CUDA_FOLDER} DIRECTORY)
  find_library(CUBLASLT_LIBRARY cublasLt HINTS ${CUDA_FOLDER} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
  find_path(CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDA_FOLDER} PATH_SUFFIXES include targets/x86_64-linux/include)
endif()
set(CUDA_OLDEST 12.0)                       # the first one that knows sm_90a
set(CUDA_MISSING)
if(NOT NVCC)
  set(CUDA_MISSING "nvcc was not found")
elseif(NOT CUBLASLT_LIBRARY OR NOT CUBLASLT_INCLUDE)
  set(CUDA_MISSING "nvcc is ${NVCC}, cuBLASLt was not found")
else()
  execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE CUDA_VERSION ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" CUDA_VERSION "${CUDA_VERSION}")
  set(CUDA_VERSION "${CMAKE_MATCH_1}")
  if(NOT CUDA_VERSION)
    set(CUDA_MISSING "${NVCC} does not run")
  elseif(CUDA_VERSION VERSION_LESS CUDA_OLDEST)
    set(CUDA_MISSING "${NVCC} is CUDA ${CUDA_VERSION}, at least ${CUDA_OLDEST} is needed")
  endif()
endif()
if(CUDA_MISSING)
  if(PS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PS_CUDA is ON, but ${CUDA_MISSING}; install the CUDA toolkit, or set CUDA_PATH to its folder")
  endif()
  message(STATUS "CUDA: ${CUDA_MISSING}, so no device cuda")
  return()
endif()
message(STATUS "CUDA ${CUDA_VERSION}: ${NVCC}, ${CUBLASLT_LIBRARY}")

# NCCL is loaded when a group of ranks first needs it: its header says how to call it, its folder is where to look last.
find_path(NCCL_INCLUDE nccl.h HINTS ${CUDA_FOLDER} PATH_SUFFIXES include targets/x86_64-linux/include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDA_FOLDER}
             PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
set(CUDA_OWN_SOURCES ${CUDA_SOURCES})
set(NCCL_FLAGS)
if(NCCL_INCLUDE)
  message(STATUS "NCCL: ${NCCL_INCLUDE}/nccl.h, ${NCCL_LIBRARY}")
  set(NCCL_FLAGS -DPS_HAVE_NCCL -I${NCCL_INCLUDE})
else()
  message(STATUS "NCCL: nccl.h was not found, so ranks move memory of GPUs through the host")
  list(FILTER CUDA_OWN_SOURCES EXCLUDE REGEX "/nccl\\.cpp$")
endif()

set(CUDA_ARCHITECTURES -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90
    -gencode arch=compute_90,code=compute_90)
# Warpgroup products are in sm_90a alone; later chips have other ones. Where there is no code for a device, nobody
# starts the kernels of such a file.
set(CUDA_SM_90A_SOURCES attention_hopper.cu)
set(CUDA_FLAGS -std=c++17 -O3 -I${CMAKE_SOURCE_DIR}/src -I${CMAKE_BINARY_DIR}/gen -I${CUBLASLT_INCLUDE} ${NCCL_FLAGS}
    -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unused-parameter,-Wno-unused-function)
file(GLOB CUDA_HEADERS CONFIGURE_DEPENDS src/backend/cuda/*.h src/backend/*.h src/base/*.h src/ps.h src/ops.def)
set(CUDA_OBJECTS)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/cuda)
foreach(source ${CUDA_OWN_SOURCES})
  get_filename_component(name ${source} NAME)
  set(object ${CMAKE_BINARY_DIR}/cuda/${name}.o)
  set(architectures ${CUDA_ARCHITECTURES})
  if(name IN_LIST CUDA_SM_90A_SOURCES)
    set(architectures -gencode arch=compute_90a,code=sm_90a)
  endif()
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -P ${CMAKE_SOURCE_DIR}/cmake/cuda_compile.cmake -- ${object}.resources
            ${NVCC} ${CUDA_FLAGS} ${architectures} -c ${source} -o ${object}
    DEPENDS ${source} ${CUDA_HEADERS} ${CMAKE_BINARY_DIR}/gen/ps_gen.h ${CMAKE_BINARY_DIR}/gen/ps_cdef.h
    COMMENT "Compiling ${name} for CUDA" VERBATIM)
  list(APPEND CUDA_OBJECTS ${object})
endforeach()
get_filename_component(CUBLASLT_FOLDER ${CUBLASLT_LIBRARY} DIRECTORY)
set(CUDA_RPATH $ORIGIN:${CUBLASLT_FOLDER})
if(NCCL_LIBRARY)
  get_filename_component(NCCL_FOLDER ${NCCL_LIBRARY} DIRECTORY)
  set(CUDA_RPATH ${CUDA_RPATH}:${NCCL_FOLDER})
endif()
add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/libps_cuda.so
  COMMAND ${NVCC} -shared -cudart static ${CUDA_OBJECTS} -o ${CMAKE_BINARY_DIR}/libps_cuda.so ${CUBLASLT_LIBRARY}
          -Xlinker --exclude-libs,ALL -Xlinker -rpath,${CUDA_RPATH}
  DEPENDS ${CUDA_OBJECTS} COMMENT "Linking libps_cuda.so" VERBATIM)
add_custom_target(psluajit_cuda ALL DEPENDS ${CMAKE_BINARY_DIR}/libps_cuda.so)
add_dependencies(psluajit_cuda ps_generated)
