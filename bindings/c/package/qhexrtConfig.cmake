# Lies in lib/cmake/qhexrt, beside include and lib. Targets: qhexrt::qhexrt, and qhexrt::static where the archive is there.
get_filename_component(_qhexrt_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

find_library(_qhexrt_shared NAMES libqhexrt.so qhexrt.dll.lib PATHS "${_qhexrt_prefix}/lib" NO_DEFAULT_PATH NO_CACHE)
if(_qhexrt_shared AND NOT TARGET qhexrt::qhexrt)
  add_library(qhexrt::qhexrt UNKNOWN IMPORTED)
  set_target_properties(qhexrt::qhexrt PROPERTIES
    IMPORTED_LOCATION "${_qhexrt_shared}"
    INTERFACE_INCLUDE_DIRECTORIES "${_qhexrt_prefix}/include")
endif()

find_library(_qhexrt_static NAMES libqhexrt.a PATHS "${_qhexrt_prefix}/lib" NO_DEFAULT_PATH NO_CACHE)
if(_qhexrt_static AND NOT TARGET qhexrt::static)
  find_package(Threads REQUIRED)
  add_library(qhexrt::static STATIC IMPORTED)
  set_target_properties(qhexrt::static PROPERTIES
    IMPORTED_LOCATION "${_qhexrt_static}"
    INTERFACE_INCLUDE_DIRECTORIES "${_qhexrt_prefix}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m")
endif()

if(NOT TARGET qhexrt::qhexrt AND NOT TARGET qhexrt::static)
  set(qhexrt_FOUND FALSE)
  set(qhexrt_NOT_FOUND_MESSAGE "no libqhexrt in ${_qhexrt_prefix}/lib")
endif()
