# make demo        sets up everything and shows what the project does
# make test        sets up everything and runs the tests
# make test-quick  runs a part of them that touches everything, in two minutes
# make test-cpp    runs the C++ tests of the core's pure logic alone; part of make test
# make test-page   runs the tests of the server's page in a browser
# make lint        ruff, mypy, import-linter, clang-format, clang-tidy, stubs
# make format      ruff's and clang-format's automatic fixes
# make stubs       writes python/llamatap/_core.pyi, after a change to csrc/bind
# make bench       prints ratios to a plain decode, writes bench/results/
# make bench-drafting  acceptance and speed of drafting, and against the engine's own; writes bench/results/
# make bench-text-drafters  drafters without a model against the engine's; writes bench/results/
# make architectures   writes docs/architectures.md and its snapshot, after a change of the engine
# make dev         an editable install that rebuilds on import
# make package     builds the sdist and the wheel from it; checks both in empty environments
#
# noxfile.py has what wants an environment or a build of its own: other libraries, Debug, sanitizers.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc cmake python/llamatap vendor -path vendor/llama.cpp -prune -o -type f ! -path '*/__pycache__/*' ! -name '.*' -print) CMakeLists.txt pyproject.toml

export LLAMATAP_CACHE ?= $(abspath $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamatap)

# With these the compiler cache serves every copy of the sources, wherever it is.
export CCACHE_BASEDIR ?= /
export CCACHE_NOHASHDIR ?= true

.PHONY: demo test test-quick test-cpp test-page architectures lint format stubs bench bench-drafting bench-text-drafters dev package clean

# On Debian, venv and the headers are separate packages.
define HAVE_PYTHON
import ensurepip, pathlib, sys, sysconfig
sys.exit(sys.version_info < (3, 10) or not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())
endef
export HAVE_PYTHON

.PHONY: python
python:
	@$(PYTHON) -c "$$HAVE_PYTHON" 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq python3-venv python3-dev; \
	  else \
	    echo "python3 (3.10 or newer) with venv and headers is needed: apt-get install python3-venv python3-dev"; \
	    exit 1; \
	  fi; }

# Tools for builds, installed once for each state of pyproject.toml.
$(VENV)/.build-tools: pyproject.toml | python
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --group build
	touch $@

# Tools for tests and checks.
$(VENV)/.tools: $(VENV)/.build-tools
	$(PIP) install --quiet --group test --group lint --group dev
	touch $@

# The package is compiled in a folder that pip alone never uses: `pip install .` leaves CMake's cache with the paths of
# a build environment that it then removes. Its objects serve C++ tests and clang-tidy too.
CORE_BUILD := build/core
INSTALL := $(PIP) install --no-build-isolation -C build-dir=$(CORE_BUILD)

$(VENV)/.installed: $(VENV)/.build-tools $(SOURCES)
	$(INSTALL) ".[dataset,demo,server]"
	touch $@

# Missing beside a fresh package after `rm -rf build`.
$(CORE_BUILD)/build.ninja: | $(VENV)/.installed
	test -f $@ || $(INSTALL) ".[dataset,demo,server]"

demo: $(VENV)/.installed
	$(BIN)/llamatap demo

# Programs of the engine's own, linked with the engine that the package has: $(1) is the folder of their CMakeLists.txt,
# $(2) the build folder, $(3) the part of the engine's source that they need.
define ENGINE_PROGRAM
$(BIN)/python vendor/fetch.py --set $(3)
$(BIN)/cmake -S $(1) -B $(2) -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
  -DENGINE_LIBRARIES="$$($(BIN)/python -c 'from llamatap._native import _core; print(_core.__file__.rpartition("/")[0] + "/lib")')"
$(BIN)/cmake --build $(2)
touch $@
endef

# Writes tiny models of every architecture.
ARCHS := build/archs/test-llama-archs
$(ARCHS): $(VENV)/.installed tests/archs/CMakeLists.txt tests/archs/load_backend.cpp
	$(call ENGINE_PROGRAM,tests/archs,build/archs,peers)

# Writes files of other quantisations.
build/fidelity/quantize: $(VENV)/.installed tests/fidelity/CMakeLists.txt tests/fidelity/quantize.cpp
	$(call ENGINE_PROGRAM,tests/fidelity,build/fidelity,build)

# Speculative decoding, to measure ours against.
SPECULATIVE := build/peer/llama-speculative-simple
$(SPECULATIVE): $(VENV)/.installed bench/peer/CMakeLists.txt bench/peer/replay.cpp tests/archs/load_backend.cpp
	$(call ENGINE_PROGRAM,bench/peer,build/peer,peers)

# One process a core; each takes whole test files.
test: $(VENV)/.tools $(VENV)/.installed $(ARCHS) test-cpp
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

test-quick: $(VENV)/.tools $(VENV)/.installed $(ARCHS) test-cpp
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile -m "not slow and not real_model and not fuzz"

# doctest, from Debian's packages.
.PHONY: doctest
doctest:
	@echo '#include <doctest/doctest.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends doctest-dev; \
	  else \
	    echo "doctest is needed: apt-get install doctest-dev"; \
	    exit 1; \
	  fi; }

test-cpp: $(VENV)/.installed $(CORE_BUILD)/build.ninja | doctest
	$(BIN)/cmake $(CORE_BUILD) >/dev/null
	$(BIN)/cmake --build $(CORE_BUILD) --target llamatap_tests
	$(CORE_BUILD)/llamatap_tests

# A browser and its driver, from Debian's packages.
.PHONY: browser
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; \
	  else \
	    echo "chromium and chromedriver are needed: apt-get install chromium chromium-driver"; \
	    exit 1; \
	  fi; }

test-page: $(VENV)/.tools $(VENV)/.installed | browser
	$(PIP) install --quiet --group page
	$(BIN)/python -m pytest tests/page

architectures: $(VENV)/.tools $(ARCHS)
	$(BIN)/python tools/architecture_table.py

lint: $(VENV)/.tools $(VENV)/.installed $(CORE_BUILD)/build.ninja
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests/cpp -name '*.cpp' -o -name '*.hpp')
	$(BIN)/python $(BIN)/run-clang-tidy.py -clang-tidy-binary $(BIN)/clang-tidy -p $(CORE_BUILD) -quiet '/csrc/'
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/stubs.py --check

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests/cpp -name '*.cpp' -o -name '*.hpp')

stubs: $(VENV)/.tools $(VENV)/.installed
	$(BIN)/python tools/stubs.py

bench: $(VENV)/.tools $(VENV)/.installed
	$(BIN)/python bench/capture.py

bench-drafting: $(VENV)/.tools build/fidelity/quantize $(SPECULATIVE)
	$(BIN)/python bench/drafting.py

bench-text-drafters: $(SPECULATIVE)
	$(BIN)/python bench/text_drafters.py

dev: $(VENV)/.tools
	$(INSTALL) --editable ".[dataset,demo,server]"
	rm -f $(VENV)/.installed

package: $(VENV)/.tools
	$(BIN)/python tools/check_package.py

clean:
	rm -rf build dist $(VENV)
