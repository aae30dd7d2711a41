# make demo    shows what the project does, on a fresh machine
# make test    runs the tests, on a fresh machine
# make test-peers  tests with libraries that want environments of their own: speculators, SpecForge, lm-eval
# make test-lm-eval  lm-eval alone, scoring a model through the server
# make test-ray  data sets by workers of Ray (installs Ray)
# make test-cpp  the native core's pure logic alone, without a model; part of make test
# make test-page  runs the tests of the server's page in a browser
# make lint    ruff, mypy, clang-format, clang-tidy, stubs
# make bench   measures; prints ratios, writes bench/results/
# make fidelity          every layer against transformers; writes docs/fidelity.md
# make bench-drafting    speed against the engine's own drafting; writes bench/results/
# make bench-server      the server beside extraction in a process; writes bench/results/
# make bench-transformers  speed against transformers; writes bench/results/
# make dev     an editable install that rebuilds on import
# make package builds the sdist and, from it, the wheel; checks both in empty environments

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc cmake python/llamatap vendor -path vendor/llama.cpp -prune -o -type f ! -path '*/__pycache__/*' ! -name '.*' -print) CMakeLists.txt pyproject.toml

# What pip is asked for: a version pinned here may be a smaller build, without CUDA.
TORCH  ?= torch

export LLAMATAP_CACHE ?= $(abspath $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamatap)

# The compiler cache then serves every copy of the sources, wherever it lies.
export CCACHE_BASEDIR ?= /
export CCACHE_NOHASHDIR ?= true

.PHONY: demo test test-cpp test-peers test-lm-eval test-ray test-page architectures lint format stubs bench bench-drafting bench-server dev package golden fidelity bench-transformers neighbours debug sanitize clean

# Debian keeps venv and the headers in packages of their own.
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

# What builds and tests need, installed once for each state of pyproject.toml.
$(VENV)/.tools: pyproject.toml | python
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --group build --group test --group lint
	touch $@

# The package, compiled in the persistent folder build/.
$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(PIP) install --no-build-isolation ".[dataset,demo,server]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/llamatap demo

# The engine's own writer of tiny models of every architecture.
ARCHS := build/archs/test-llama-archs
$(ARCHS): $(VENV)/.installed tests/archs/CMakeLists.txt tests/archs/load_backend.cpp
	$(BIN)/python vendor/fetch.py --set peers
	$(BIN)/cmake -S tests/archs -B build/archs -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
	  -DENGINE_LIBRARIES="$$($(BIN)/python -c 'from llamatap._native import _core; print(_core.__file__.rpartition("/")[0] + "/lib")')"
	$(BIN)/cmake --build build/archs
	touch $@

# Files of tests go to as many processes as there are cores.
test: $(VENV)/.installed $(ARCHS) test-cpp
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

# doctest, as Debian packs it.
.PHONY: doctest
doctest:
	@echo '#include <doctest/doctest.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends doctest-dev; \
	  else \
	    echo "doctest is needed: apt-get install doctest-dev"; \
	    exit 1; \
	  fi; }

# The folder that the package was compiled in: its objects serve tests and clang-tidy.
CORE_BUILD = $(shell ls -d build/cp$$($(BIN)/python -c "import sys; print('%d%d' % sys.version_info[:2])")-*-Release)

test-cpp: $(VENV)/.installed | doctest
	$(BIN)/cmake "$(CORE_BUILD)" >/dev/null
	$(BIN)/cmake --build "$(CORE_BUILD)" --target llamatap_tests
	"$(CORE_BUILD)/llamatap_tests"

# The library that trains drafters against a server of ours: `make test-peers TORCH=...` chooses its torch.
.venv-speculators/.installed: | python
	$(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/python -m pip install --quiet $(TORCH) speculators==0.9.0
	# The index's torchvision goes with the index's torch alone; texts do without.
	.venv-speculators/bin/python -c "import torchvision" 2>/dev/null || \
	  .venv-speculators/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	touch $@

# What SpecForge reads its data with; the engines that it pins are for other things.
.venv-specforge/.installed: | python
	$(PYTHON) -m venv .venv-specforge
	.venv-specforge/bin/python -m pip install --quiet $(TORCH) numpy
	.venv-specforge/bin/python -m pip install --quiet --no-deps specforge==0.2.0
	touch $@

# The harness that scores models, through their log-likelihoods from the server.
.venv-lm-eval/.installed: | python
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -m pip install --quiet "lm-eval[api]==0.4.13"
	touch $@

test-peers: $(VENV)/.installed .venv-speculators/.installed .venv-specforge/.installed .venv-lm-eval/.installed
	$(BIN)/python -m pytest tests/peers tests/python/test_peer_datasets.py

# The harness alone, which needs no PyTorch.
test-lm-eval: $(VENV)/.installed .venv-lm-eval/.installed
	$(BIN)/python -m pytest tests/peers/test_lm_eval.py

# Co-training with PyTorch, beside the code of a trainer: `make test-train TORCH=...` chooses its torch.
.venv-train/.installed: | python
	$(call TEST_VENV,.venv-train)
	.venv-train/bin/python -m pip install --quiet $(TORCH) speculators==0.9.0
	touch $@

test-train: .venv-train/.installed
	.venv-train/bin/python -m pip install --no-build-isolation .
	.venv-train/bin/python -m pytest tests/python/test_train_*.py tests/python/test_connectors*.py tests/python/test_dataset_layouts.py tests/python/test_dataset_saved.py

# Workers of Ray, two of them on this machine.
.venv-ray/.installed: | python
	$(call TEST_VENV,.venv-ray)
	.venv-ray/bin/python -m pip install --quiet "ray[data]==2.60.0" "pyarrow>=14"
	touch $@

test-ray: .venv-ray/.installed
	.venv-ray/bin/python -m pip install --no-build-isolation .
	.venv-ray/bin/python -m pytest tests/python/test_ray.py

# A browser and its driver, as Debian packs them.
.PHONY: browser
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; \
	  else \
	    echo "chromium and chromedriver are needed: apt-get install chromium chromium-driver"; \
	    exit 1; \
	  fi; }

test-page: $(VENV)/.installed | browser
	$(PIP) install --quiet --group page
	$(BIN)/python -m pytest tests/page

architectures: $(ARCHS)
	$(BIN)/python tools/architecture_table.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests/cpp -name '*.cpp' -o -name '*.hpp')
	$(BIN)/python $(BIN)/run-clang-tidy.py -clang-tidy-binary $(BIN)/clang-tidy -p "$(CORE_BUILD)" -quiet '/csrc/'
	$(BIN)/mypy
	$(BIN)/python tools/stubs.py --check

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests/cpp -name '*.cpp' -o -name '*.hpp')

stubs: $(VENV)/.installed
	$(BIN)/python tools/stubs.py

bench: $(VENV)/.installed
	$(BIN)/python bench/capture.py

# The engine's own program of speculative decoding, to measure ours beside.
SPECULATIVE := build/peer/llama-speculative-simple
$(SPECULATIVE): $(VENV)/.installed bench/peer/CMakeLists.txt tests/archs/load_backend.cpp
	$(BIN)/python vendor/fetch.py --set peers
	$(BIN)/cmake -S bench/peer -B build/peer -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
	  -DENGINE_LIBRARIES="$$($(BIN)/python -c 'from llamatap._native import _core; print(_core.__file__.rpartition("/")[0] + "/lib")')"
	$(BIN)/cmake --build build/peer
	touch $@

bench-drafting: build/fidelity/quantize $(SPECULATIVE)
	$(BIN)/python bench/speculation.py

bench-server: $(VENV)/.installed
	$(BIN)/python bench/server.py

dev: $(VENV)/.tools
	$(PIP) install --no-build-isolation --editable ".[dataset,demo,server]"
	rm -f $(VENV)/.installed

package: $(VENV)/.tools
	$(BIN)/python tools/check_package.py

clean:
	rm -rf build dist $(VENV)

# transformers, in an environment of its own: `make golden TORCH=...` chooses its torch.
PEER := .venv-golden/bin/python
.venv-golden/.installed: | python
	$(PYTHON) -m venv .venv-golden
	$(PEER) -m pip install --quiet $(TORCH)
	$(PEER) -m pip install --quiet transformers gguf accelerate numpy diffusers
	touch $@

# The oracle rows of tests/data, from transformers and diffusers.
golden: $(VENV)/.installed .venv-golden/.installed
	$(BIN)/python vendor/fetch.py --set peers
	$(PEER) tests/golden/make_smollm2.py "$$($(BIN)/llamatap fetch smollm2)" tests/data/smollm2_golden.npz
	$(PEER) tests/golden/make_z_image.py vendor/llama.cpp/models tests/data/z_image_golden.npz
	$(PEER) tests/golden/make_layer_numbers.py tests/data/layer_numbers.json
	$(PEER) tests/golden/make_states.py tests/data/states_golden.npz

# The engine's quantiser, which makes files of other types.
QUANTIZE := build/fidelity/quantize
$(QUANTIZE): $(VENV)/.installed tests/fidelity/CMakeLists.txt tests/fidelity/quantize.cpp
	$(BIN)/python vendor/fetch.py
	$(BIN)/cmake -S tests/fidelity -B build/fidelity -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
	  -DENGINE_LIBRARIES="$$($(BIN)/python -c 'from llamatap._native import _core; print(_core.__file__.rpartition("/")[0] + "/lib")')"
	$(BIN)/cmake --build build/fidelity
	touch $@

fidelity: $(QUANTIZE) .venv-golden/.installed
	$(BIN)/python tests/fidelity/measure.py --peer $(PEER)

bench-transformers: $(QUANTIZE) .venv-golden/.installed
	$(BIN)/python bench/against_transformers.py --peer $(PEER)

# Builds and peers of their own, in environments of their own: the usual one stays as it is.
TEST_VENV = $(PYTHON) -m venv $(1) && $(1)/bin/python -m pip install --quiet "pip>=25.1" && \
	$(1)/bin/python -m pip install --quiet --group build --group test

# PyTorch and another package's llama.cpp in one process with ours. Without GGML_NATIVE=OFF that one dies by
# itself on CPUs with AMX (llama.cpp#26954).
neighbours: | python
	$(call TEST_VENV,.venv-neighbours)
	.venv-neighbours/bin/python -m pip install --no-build-isolation .
	.venv-neighbours/bin/python -m pip install $(TORCH)
	CMAKE_ARGS="$(CMAKE_ARGS) -DGGML_NATIVE=OFF" .venv-neighbours/bin/python -m pip install --no-cache-dir llama-cpp-python
	.venv-neighbours/bin/python -m pytest tests/neighbours

# Assertions on, and the arithmetic of a release: compiled otherwise, the engine rounds otherwise.
debug: $(ARCHS) | python
	$(call TEST_VENV,.venv-debug)
	.venv-debug/bin/python -m pip install --no-build-isolation ".[dataset,demo,server]" -C cmake.build-type=Debug \
	  -C "cmake.define.CMAKE_C_FLAGS_DEBUG=-g -O3" -C "cmake.define.CMAKE_CXX_FLAGS_DEBUG=-g -O3"
	.venv-debug/bin/python -m pytest

# Python itself is not instrumented: the runtime is preloaded, and what CPython leaves at exit is not ours.
# Left out are spoilt files: the engine reads enums of values that no enumerator has, and checks them afterwards.
sanitize: $(ARCHS) | python
	$(call TEST_VENV,.venv-sanitize)
	.venv-sanitize/bin/python -m pip install --no-build-isolation ".[dataset,demo,server]" \
	  -C cmake.build-type=RelWithDebInfo -C cmake.define.LLAMATAP_SANITIZE=address,undefined \
	  -C build-dir=build/sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  .venv-sanitize/bin/python -m pytest -p no:cacheprovider --capture=sys -k "not spoilt_files"
