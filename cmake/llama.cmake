# Every option of the vendored engine. Switches that users may give with -C cmake.define.NAME=VALUE
# (GGML_CUDA, GGML_METAL, GGML_VULKAN, GGML_HIP, GGML_BLAS, ...) pass through untouched. The instruction sets of
# an x86 CPU (GGML_AVX2, ...) do not: they are this machine's, or all of them with LLAMATAP_PORTABLE.

set(LLAMATAP_ENGINE_DIR "" CACHE PATH "A llama.cpp source folder to build instead of the pinned one")
option(LLAMATAP_PORTABLE "Build CPU back ends for every instruction set, chosen at run time, instead of for this machine" OFF)

file(READ "${CMAKE_CURRENT_SOURCE_DIR}/vendor/engine.json" LLAMATAP_PIN)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/vendor/engine.json")

file(GLOB LLAMATAP_PATCHES CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/vendor/patches/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${LLAMATAP_PATCHES})

if(LLAMATAP_ENGINE_DIR)
  set(LLAMATAP_ENGINE_SOURCE "${LLAMATAP_ENGINE_DIR}")
  set(LLAMATAP_ENGINE_COMMIT "local")
  if(NOT EXISTS "${LLAMATAP_ENGINE_SOURCE}/include/llama.h")
    message(FATAL_ERROR "LLAMATAP_ENGINE_DIR=${LLAMATAP_ENGINE_DIR} holds no include/llama.h")
  endif()
else()
  set(LLAMATAP_ENGINE_SOURCE "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp")
  string(JSON LLAMATAP_ENGINE_COMMIT GET "${LLAMATAP_PIN}" upstream_commit)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/vendor/fetch.py" COMMAND_ERROR_IS_FATAL ANY)
endif()

# One layout for native, portable and GPU builds: shared libraries, back ends loaded at run time.
set(BUILD_SHARED_LIBS ON)
set(GGML_BACKEND_DL ON CACHE BOOL "" FORCE)
# Instruction sets are named explicitly: with SOURCE_DATE_EPOCH in the environment ggml would silently
# fall back to SSE, and back ends that are loaded at run time do not take GGML_NATIVE on x86.
if(LLAMATAP_PORTABLE)
  set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
  set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "" FORCE)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
  set(GGML_CPU_ALL_VARIANTS OFF CACHE BOOL "" FORCE)
  execute_process(
    COMMAND "${CMAKE_C_COMPILER}" -march=native -dM -E -x c /dev/null
    OUTPUT_VARIABLE LLAMATAP_NATIVE_MACROS COMMAND_ERROR_IS_FATAL ANY)
  set(macros
      SSE42:__SSE4_2__ AVX:__AVX__ AVX2:__AVX2__ BMI2:__BMI2__ FMA:__FMA__ F16C:__F16C__
      AVX_VNNI:__AVXVNNI__ AVX512:__AVX512BW__ AVX512_VBMI:__AVX512VBMI__ AVX512_VNNI:__AVX512VNNI__
      AVX512_BF16:__AVX512BF16__)
  foreach(pair IN LISTS macros)
    string(REPLACE ":" ";" pair "${pair}")
    list(GET pair 0 feature)
    list(GET pair 1 macro)
    if(LLAMATAP_NATIVE_MACROS MATCHES "#define ${macro} ")
      set(GGML_${feature} ON CACHE BOOL "" FORCE)
    else()
      set(GGML_${feature} OFF CACHE BOOL "" FORCE)
    endif()
  endforeach()
else()
  set(GGML_NATIVE ON CACHE BOOL "Tune the CPU back end for this machine")
  set(GGML_CPU_ALL_VARIANTS OFF CACHE BOOL "" FORCE)
endif()
# The engine's AMX kernels are never chosen and never shipped: GCC miscompiles them (llama.cpp#26954), PyTorch in the
# same thread makes them die, and where a batch is three-dimensional they read beyond the weights (jamba, qwen3next).
foreach(feature AMX_TILE AMX_INT8 AMX_BF16)
  set(GGML_${feature} OFF CACHE BOOL "" FORCE)
endforeach()
# With CUDA graphs the engine computes some passes wrong where the number of tokens changes from pass to pass, as it
# does when texts come and go: states and logits alike, without an error (tests/python/gpu/test_rounds.py).
set(GGML_CUDA_GRAPHS OFF CACHE BOOL "Replay recorded kernels; wrong now and then, see cmake/llama.cmake")
set(GGML_HIP_GRAPHS OFF CACHE BOOL "Replay recorded kernels; wrong now and then, see cmake/llama.cmake")
# A second OpenMP runtime beside PyTorch's starves both; contexts attach the engine's own thread pool.
set(GGML_OPENMP OFF CACHE BOOL "Use OpenMP instead of the engine's own thread pool")
set(GGML_LLAMAFILE ON CACHE BOOL "Use the tinyBLAS kernels")
set(GGML_BUILD_TESTS OFF CACHE BOOL "" FORCE)
set(GGML_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
# The launcher is set once, for our sources too, in CMakeLists.txt.
set(GGML_CCACHE OFF CACHE BOOL "" FORCE)
# Otherwise the engine would be stamped with the commit of this repository.
set(GIT_EXE "" CACHE INTERNAL "")

# Assertions that fail while a model is loaded or a graph is built throw (csrc/engine/abort.hpp).
add_compile_options($<$<COMPILE_LANGUAGE:C>:-fexceptions>)
# Their messages name the file; not where it lay when this was built.
# The compiler cache makes paths relative, and would keep a copy for each absolute one.
set(LLAMATAP_ENGINE_PREFIX "${LLAMATAP_ENGINE_SOURCE}")
if(CCACHE_PROGRAM)
  file(RELATIVE_PATH LLAMATAP_ENGINE_PREFIX "${CMAKE_BINARY_DIR}" "${LLAMATAP_ENGINE_SOURCE}")
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fmacro-prefix-map=${LLAMATAP_ENGINE_PREFIX}/=>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Unique symbols are merged over all libraries of a process, another package's llama.cpp included.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-gnu-unique>)
endif()
if(NOT APPLE)
  # The same of the C++ runtime, where a compiler links it in: exported, it mixes with the process's own.
  add_link_options("-Wl,--exclude-libs,libstdc++.a:libgcc.a")
endif()

# llama.cpp's top CMakeLists.txt is passed over: it would pull in its tools, their libraries and its
# install rules. What its two library folders take from it is these names.
set(LLAMA_VERSION "${LLAMATAP_ENGINE_COMMIT}")
set(LLAMA_BUILD_COMMIT "${LLAMATAP_ENGINE_COMMIT}")
set(LLAMA_VERSION_BASE 0)
set(LLAMA_VERSION_MAJOR 0)
set(GGML_ALL_WARNINGS OFF CACHE BOOL "" FORCE)
function(llama_add_compile_flags)
endfunction()

add_subdirectory("${LLAMATAP_ENGINE_SOURCE}/ggml" engine/ggml EXCLUDE_FROM_ALL SYSTEM)
add_subdirectory("${LLAMATAP_ENGINE_SOURCE}/src" engine/llama EXCLUDE_FROM_ALL SYSTEM)

if(LLAMATAP_SANITIZE)
  # Its count of graphs passes 32,767 in half of an int: undefined by the letter, and as meant with GCC and Clang.
  set_source_files_properties(
    "${LLAMATAP_ENGINE_SOURCE}/ggml/src/ggml-cpu/ggml-cpu.c" TARGET_DIRECTORY ggml-cpu
    PROPERTIES COMPILE_OPTIONS "-fno-sanitize=shift")
endif()

# Names of our own and no version links: the loader takes a library that is already in the process
# for one of the same SONAME, and wheels cannot hold links (each would become a copy).
set(LLAMATAP_ENGINE_TARGETS llama ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
list(REMOVE_ITEM LLAMATAP_ENGINE_TARGETS ggml-cpu-sapphirerapids)  # AMX
foreach(target IN LISTS LLAMATAP_ENGINE_TARGETS)
  foreach(property VERSION SOVERSION PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY ${property})
  endforeach()
  set_target_properties(
    ${target}
    PROPERTIES OUTPUT_NAME "llamatap-${target}"
               INSTALL_RPATH "${LLAMATAP_ORIGIN}"
               LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
endforeach()
