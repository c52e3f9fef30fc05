# SPDX-License-Identifier: BSD-3-Clause
# `cmake --install`, of which tools/deb.sh makes packages, too:
#   bin/psluajit, include/, lib/psluajit/ (the CUDA plug-in, if it was built)
#   share/psluajit/{lua,models,examples,tools,templates,docs}, where the program finds its Lua tree, and README.md
#   share/doc/psluajit: links to README.md and to the folders that it names, and html (the site, if tools/site.sh wrote
#   it into the build folder)
#   share/man/man1, and completions for bash and zsh
# share/psluajit/installed.txt lists the installed files. The next installation removes the files of this list that it
# no longer has: a Lua file that has moved would otherwise be found before the new one.
set(PS_SHARE ${CMAKE_INSTALL_DATADIR}/psluajit)
install(CODE "
  set(PS_SHARE \"\${CMAKE_INSTALL_PREFIX}/${PS_SHARE}\")
  if(NOT EXISTS \"\$ENV{DESTDIR}\${PS_SHARE}/installed.txt\")       # an installation from before the list
    foreach(folder lua models examples tools templates docs)
      file(REMOVE_RECURSE \"\$ENV{DESTDIR}\${PS_SHARE}/\${folder}\")
    endforeach()
  endif()")

install(TARGETS psluajit RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY lua models examples tools templates docs DESTINATION ${PS_SHARE})
install(FILES ${GEN}/ops.lua DESTINATION ${PS_SHARE}/lua/ps)
install(FILES src/ps.h ${GEN}/ps_gen.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES README.md CHANGELOG.md LICENSE DESTINATION ${PS_SHARE})
set(links)
file(MAKE_DIRECTORY ${GEN}/links)
file(RELATIVE_PATH up /${CMAKE_INSTALL_DOCDIR} /${PS_SHARE})
foreach(name README.md CHANGELOG.md LICENSE docs models examples tools)
  file(CREATE_LINK ${up}/${name} ${GEN}/links/${name} SYMBOLIC)
  list(APPEND links ${GEN}/links/${name})
endforeach()
install(FILES ${links} DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(CODE "
  if(EXISTS ${CMAKE_BINARY_DIR}/libps_cuda.so)
    file(INSTALL ${CMAKE_BINARY_DIR}/libps_cuda.so DESTINATION \"\${CMAKE_INSTALL_PREFIX}/lib/psluajit\")
  endif()
  if(EXISTS ${CMAKE_BINARY_DIR}/site/index.html)
    file(INSTALL ${CMAKE_BINARY_DIR}/site/ DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DOCDIR}/html\")
  endif()")
# Manual pages and completions, from the tools' own tables of options.
install(CODE "
  set(manual ${CMAKE_BINARY_DIR}/manual)
  file(REMOVE_RECURSE \${manual})
  execute_process(COMMAND $<TARGET_FILE:psluajit> ${CMAKE_SOURCE_DIR}/tools/man.lua \${manual} RESULT_VARIABLE failed
                  OUTPUT_QUIET)
  if(failed)
    message(FATAL_ERROR \"tools/man.lua failed: \${failed}\")
  endif()
  file(GLOB pages \${manual}/*.1)
  set(share \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}\")
  file(INSTALL \${pages} DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_MANDIR}/man1\")
  file(INSTALL \${manual}/psluajit.bash DESTINATION \"\${share}/bash-completion/completions\" RENAME psluajit)
  file(INSTALL \${manual}/_psluajit DESTINATION \"\${share}/zsh/vendor-completions\")")
install(SCRIPT ${CMAKE_SOURCE_DIR}/cmake/installed.cmake)
