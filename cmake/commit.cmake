# SPDX-License-Identifier: BSD-3-Clause
# Writes OUT, a header with the commit of the tree at SOURCE. If it is unchanged, nothing is recompiled.
find_program(GIT git)
set(commit "unknown (the source is not a git checkout)")
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} rev-parse --show-toplevel OUTPUT_VARIABLE top ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  get_filename_component(own "${SOURCE}" REALPATH)
  if(top STREQUAL own)
    execute_process(COMMAND ${GIT} -C ${SOURCE} describe --always --dirty --abbrev=12 --match= OUTPUT_VARIABLE found
                    RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT failed)
      set(commit "${found}")
    endif()
  endif()
endif()
set(text "#define PS_COMMIT \"${commit}\"\n")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT "${text}" STREQUAL "${old}")
  file(WRITE ${OUT} "${text}")
endif()
