# zbpipe's commands; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
JOBS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
BUILD_FILES := pyproject.toml setup.py zbpipe/_version.py $(wildcard build_backend/*.py hook/*)
C_FILES := $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cpp)
C_STYLE := $(wildcard csrc/core/*.[ch] csrc/bindings/*.[ch] csrc/shim/zbp_*.h tests/c/*.[ch])
CXX_STYLE := $(filter-out $(C_STYLE), $(wildcard csrc/shim/*))
ASAN := build/asan

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo dev test test-core test-long asan valgrind fuzz cov lint fmt bench clean pytest

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Set-up. Each stamp in .venv says that its step is done.

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch-$(TORCH_VERSION): | $(VENV)/bin/python
	$(RUN) tools/env.py torch $(TORCH_VERSION)
	@touch $@

# The first time, and when the build itself changes, pip installs the tree; after that only what changed is compiled.
$(VENV)/.built: $(VENV)/.torch-$(TORCH_VERSION) $(BUILD_FILES) $(C_FILES)
	@set -e; export ZBPIPE_WERROR=1; \
	if [ ! -e $(VENV)/.installed ] || [ -n "$$(find $(BUILD_FILES) -newer $(VENV)/.installed)" ]; then \
		echo "building zbpipe and installing it into $(VENV)"; \
		$(RUN) -m pip install --quiet --no-build-isolation --no-deps --editable .; \
		touch $(VENV)/.installed; \
	else \
		echo "building zbpipe"; \
		mkdir -p build; $(RUN) setup.py --quiet build_ext --inplace >build/build.log 2>&1 || { cat build/build.log; exit 1; }; \
	fi
	@touch $@

$(VENV)/.extras-%: pyproject.toml | $(VENV)/.built
	$(RUN) tools/env.py extras $*
	@touch $@

# What they do.

dev: $(VENV)/.built $(VENV)/.extras-test $(VENV)/.extras-lint $(VENV)/.extras-demo ## set up .venv: torch, zbpipe built and editable, every tool

demo: $(VENV)/.built $(VENV)/.extras-demo ## train a small language model on torch's module, then on zbpipe, and compare
	$(RUN) -m zbpipe.demo

test: test-core pytest ## run every test: the C core's, then Python's

pytest: $(VENV)/.built $(VENV)/.extras-test $(VENV)/.extras-demo
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile

test-long: $(VENV)/.built $(VENV)/.extras-test ## 200 steps of every schedule under the leak tools
	$(RUN) -m pytest -m long -o faulthandler_timeout=3000

# Without what starts a compiler: it would itself run under the sanitizer, and leaks.
asan: $(VENV)/.built $(VENV)/.extras-test ## run the tests of autograd and memory under AddressSanitizer and UBSan
	ZBPIPE_SANITIZE=address,undefined ZBPIPE_WERROR=1 $(RUN) setup.py --quiet build --build-lib $(ASAN)
	tools/asan $(RUN) $(ASAN) tests/autograd tests/leaks tests/memory tests/release -k "not inductor and not cpp_functions"

lint: dev ## ruff, mypy, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --style=file:.clang-format --dry-run -Werror $(C_STYLE)
	$(VENV)/bin/clang-format --style=file:csrc/shim/.clang-format --dry-run -Werror $(CXX_STYLE)

fmt: dev ## format Python and C in place
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format --style=file:.clang-format -i $(C_STYLE)
	$(VENV)/bin/clang-format --style=file:csrc/shim/.clang-format -i $(CXX_STYLE)

bench: $(VENV)/.built $(VENV)/.extras-bench ## run the benchmarks side by side with torch's own module
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(RUN) "$$file"; done

clean: ## remove what was built, and .venv
	rm -rf build dist *.egg-info .venv .pytest_cache .mypy_cache .ruff_cache
	rm -f zbpipe/_C*.so zbpipe/_build_info.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# core, test-core, valgrind, fuzz, cov: the C core alone, without Python and torch.
-include tests/core.mk
