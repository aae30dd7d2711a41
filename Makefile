# make demo    shows what the project does, on a fresh machine
# make test    runs the tests, on a fresh machine
# make lint    ruff, mypy, clang-format, stubs
# make bench   measures; prints ratios, writes bench/results/
# make dev     an editable install that rebuilds on import
# make package builds the sdist and, from it, the wheel; checks both in empty environments

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc cmake python/llamatap vendor -path vendor/llama.cpp -prune -o -type f ! -path '*/__pycache__/*' -print) CMakeLists.txt pyproject.toml

export LLAMATAP_CACHE ?= $(abspath $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamatap)

# The compiler cache then serves every copy of the sources, wherever it lies.
export CCACHE_BASEDIR ?= /
export CCACHE_NOHASHDIR ?= true

.PHONY: demo test lint format stubs bench dev package golden clean

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
	$(PIP) install --no-build-isolation ".[demo]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/llamatap demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.cpp' -o -name '*.hpp')
	$(BIN)/mypy
	$(BIN)/python tools/stubs.py --check

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc -name '*.cpp' -o -name '*.hpp')

stubs: $(VENV)/.installed
	$(BIN)/python tools/stubs.py

bench: $(VENV)/.installed
	$(BIN)/python bench/capture.py

dev: $(VENV)/.tools
	$(PIP) install --no-build-isolation --editable ".[demo]"
	rm -f $(VENV)/.installed

package: $(VENV)/.tools
	$(BIN)/python tools/check_package.py

clean:
	rm -rf build dist $(VENV)
