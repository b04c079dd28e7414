# zbpipe's commands; `make help` lists them.
# Set on the command line: TORCH_VERSION=2.15.0 (newest: what requirements/newest.txt names), PYTHON=python3.12,
# TESTS="passes release" (what of tests/ to run), MARKED="not long" (which of those, as pytest's -m), JOBS=4, CLIENTS=1
# (`make pytest` with torchtitan and PEFT installed).
SHELL := /bin/bash
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
JOBS ?= 3
TESTS ?= .
MARKED ?= not long and not system

TESTED := $(shell sed -n 's/^TESTED = (\(.*\)).*/\1/p' zbpipe/_torch/needs.py | tr -d '",')
NEWEST := $(shell sed -n 's/^torch==//p' requirements/newest.txt)
TORCH := $(TORCH_VERSION:newest=$(NEWEST))

# Torch 2.13.0 and python3 live in .venv, every other pair in a virtual environment of its own. zbpipe is editable in
# each: the source tree has room for a library for each torch and Python.
OF_PYTHON := $(if $(filter python3,$(PYTHON)),,-$(or $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])'),\
	$(error PYTHON=$(PYTHON) does not run: name a Python 3.10 or newer)))
VENV := .venv$(patsubst -2.13.0,,-$(TORCH)$(OF_PYTHON))
RUN := $(abspath $(VENV))/bin/python
BUILD_FILES := pyproject.toml setup.py zbpipe/_version.py $(wildcard _zbpipe_hook/*.py)
C_FILES := $(wildcard csrc/*/*.[ch] csrc/*/*/*.[ch] csrc/*/*/*.cpp)
C_STYLE := $(wildcard csrc/core/*/*.[ch] csrc/pass/*.[ch] csrc/bindings/*.[ch] csrc/shim/*/zbp_*.h csrc/instruments/core/*.[ch] \
	csrc/instruments/bindings/*.c csrc/instruments/shim/zbp_*.h tests/c/*.[ch])
CXX_STYLE := $(filter-out $(C_STYLE), $(wildcard csrc/shim/*/*.h csrc/shim/*/*.cpp csrc/instruments/shim/*.h csrc/instruments/shim/*.cpp)) $(wildcard tests/late_device/device/*.h tests/late_device/device/*.cpp)
ASAN := build/asan$(VENV:.venv%=%)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help torch demo docs wheel wheels library dev test test-core mutants test-system test-long test-all test-clients clients nightly programs asan tsan-torch ubsan tsan valgrind fuzz fuzz-long cov lint fmt bench gpu arm clean pytest

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Set-up. Each stamp in the virtual environment says that its step is done.

$(RUN):
	@$(PYTHON) -c 'import sys; old = sys.version_info < (3, 10); \
		sys.exit(f"zbpipe needs Python 3.10 or newer, and {sys.executable} is {sys.version.split()[0]}" if old else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch-$(TORCH): | $(RUN)
	$(RUN) tools/env.py torch $(TORCH)
	@touch $@

# The compiler compiles what changed; pip installs the tree when the build itself changes.
$(VENV)/.built: $(VENV)/.torch-$(TORCH) $(BUILD_FILES) $(C_FILES)
	@set -eo pipefail; export ZBPIPE_WERROR=1; mkdir -p build; log=build/build$(VENV:.venv%=%).log; \
	echo "building zbpipe for torch $(TORCH), some minutes of CPU:"; \
	{ $(RUN) setup.py --quiet build_ext --inplace 2>&1 | tee $$log | sed -un 's|^\[\([0-9]*\)/\([0-9]*\)\] .*|  part \1 of \2|p'; } || \
		{ cat $$log; exit 1; }; \
	if [ ! -e $(VENV)/.installed ] || [ -n "$$(find $(BUILD_FILES) -newer $(VENV)/.installed)" ]; then \
		echo "installing it into $(VENV)"; \
		$(RUN) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall --editable .; \
		touch $(VENV)/.installed; \
	fi
	@touch $@

$(VENV)/.clients: requirements/clients.txt | $(VENV)/.extras-test
	$(RUN) tools/env.py file $<
	@touch $@

$(VENV)/.extras-%: pyproject.toml | $(VENV)/.built
	$(RUN) tools/env.py extras $*
	@touch $@

# What they do.

torch: $(VENV)/.torch-$(TORCH)

dev: $(VENV)/.built $(VENV)/.extras-test $(VENV)/.extras-lint $(VENV)/.extras-demo ## set up .venv: torch, zbpipe built and editable, every tool

demo: $(VENV)/.built $(VENV)/.extras-demo ## train a small language model on torch's module, then on zbpipe, and compare
	cd examples && $(RUN) -m demo --out $(CURDIR)/zbpipe_demo.png

test: test-core pytest ## run the tests: the C core's, then Python's; with TORCH_VERSION=2.15.0 on that torch

# From tests/: in the root the source tree would come before what is installed, here and in every process that a test starts.
PYTEST := cd tests && OMP_NUM_THREADS=1 $(RUN) -m pytest -c ../pyproject.toml --rootdir ..

# A test that ends its worker is begun again in the next one, and would end as many as there may be.
pytest: $(VENV)/.built $(VENV)/.extras-test $(VENV)/.extras-demo $(if $(CLIENTS),$(VENV)/.clients)
	$(PYTEST) -m "$(MARKED)" -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1 --durations 25 --durations-min 5 $(TESTS)

test-system: ## run the tests that start whole programs: installs, commands, ranks that fail, trainings under the leak tools
	$(MAKE) pytest MARKED="system and not long"

test-long: $(VENV)/.built $(VENV)/.extras-test ## 200 steps of every schedule under the leak tools; thousands of random pipelines
	$(PYTEST) -m long -o faulthandler_timeout=3000 $(TESTS)

test-clients: ## torchtitan, PEFT and the like, in every configuration, on the newest torch
	$(MAKE) clients TORCH_VERSION=newest

clients: $(VENV)/.built $(VENV)/.extras-test $(VENV)/.clients
	export TRITON_INTERPRET=$(if $(wildcard /dev/nvidia0),0,1); \
	$(PYTEST) -m "long or not long" -o faulthandler_timeout=3000 clients schedules/test_models.py schedules/test_differential.py

test-all: test mutants test-system test-long test-clients ## all of these, one after the other: hours

nightly: ## what .ci/run leaves out: the core's sanitizers and branches; all tests on the newest torch
	$(MAKE) ubsan tsan cov
	if command -v valgrind >/dev/null; then $(MAKE) valgrind; fi
	$(MAKE) pytest TORCH_VERSION=newest CLIENTS=1 MARKED="not long"

programs: $(VENV)/.built $(VENV)/.extras-test ## PROGRAMS=100000 random autograd programs, and ten times as many small dense ones, split and whole
	export ZBPIPE_PROGRAMS=$(or $(PROGRAMS),100000); $(PYTEST) -n $(JOBS) -m long -o faulthandler_timeout=3000 passes/test_programs.py passes/test_dense.py

# Without what starts a compiler: it would itself run under the sanitizer, and leaks; and without daemon threads that the
# end of the interpreter stops within a pass, whose frames nobody unwinds.
asan: $(VENV)/.built $(VENV)/.extras-test ## run the tests of passes, leaks and memory under AddressSanitizer and UBSan
	ZBPIPE_SANITIZE=address,undefined ZBPIPE_WERROR=1 $(RUN) setup.py --quiet build --build-lib $(ASAN)
	tools/asan $(RUN) $(ASAN) $(addprefix tests/,passes policy explain kernels compile/test_torch_compile.py leaks memory release) \
		-k "not inductor and not cpp_functions and not daemon_thread"

# In four units: each file alone takes twenty minutes.
tsan-torch: $(VENV)/.built $(VENV)/.extras-test ## run the tests of threads under ThreadSanitizer, on a torch that is not instrumented
	ZBPIPE_SANITIZE=thread ZBPIPE_UNITS=4 ZBPIPE_WERROR=1 $(RUN) setup.py --quiet build --build-lib $(ASAN:build/asan%=build/tsan%)
	tools/tsan $(RUN) $(ASAN:build/asan%=build/tsan%) tests/passes/test_threads.py tests/leaks/test_threads.py

lint: dev ## ruff, mypy, import-linter, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --preview --select PLC2701 --exclude zbpipe/_torch zbpipe
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/clang-format --style=file:.clang-format --dry-run -Werror $(C_STYLE)
	$(VENV)/bin/clang-format --style=file:csrc/shim/.clang-format --dry-run -Werror $(CXX_STYLE)

fmt: dev ## format Python and C in place
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format --style=file:.clang-format -i $(C_STYLE)
	$(VENV)/bin/clang-format --style=file:csrc/shim/.clang-format -i $(CXX_STYLE)

wheel: $(VENV)/.torch-$(TORCH) ## build a wheel for this torch and Python alone into dist
	ZBPIPE_LOCAL=+torch$(TORCH) $(RUN) -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

# In the wheel's tag: the C library that the libraries were linked against.
PLATFORM = manylinux_$(shell getconf GNU_LIBC_VERSION | sed 's/glibc //; s/\./_/')_$(shell uname -m)

wheels: ## build one wheel for this Python into dist, with a library for every torch that was tested
	@set -e; for torch in $(TESTED); do \
		$(MAKE) --no-print-directory library TORCH_VERSION=$$torch; \
	done
	ZBPIPE_PACK=1 $(RUN) setup.py --quiet bdist_wheel --plat-name $(PLATFORM)
	@ls dist/*.whl

library: $(VENV)/.torch-$(TORCH)
	ZBPIPE_WERROR=1 $(RUN) setup.py --quiet build_ext --inplace

docs: $(VENV)/.built $(VENV)/.extras-docs ## build the documentation as a site, build/docs; a warning is an error
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

BENCHMARKS := bubbles step_overhead checkpointed compile stage_zero recorder leak_checks instructions

# Half an hour, and three quarters of one for the instructions, on a machine that does nothing else.
bench: $(VENV)/.built $(VENV)/.extras-bench $(VENV)/.extras-demo ## measure all that the docs say, beside torch's own module: benchmarks/results, and the tables of the docs
	$(RUN) benchmarks/split.py --blocks 1 4 16 64 256 --json benchmarks/results
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(RUN) benchmarks/$$name.py --json benchmarks/results; done
	cd examples && $(RUN) -m demo --out $(CURDIR)/build/zbpipe_demo.png --json $(CURDIR)/benchmarks/results/demo-$(TORCH).json
	$(RUN) benchmarks/tables.py

# Without a virtual environment: PYTHON is the one that has CUDA's torch and pytest.
gpu: ## build and run what wants a GPU on PYTHON's own torch, in nine minutes; ONLY=real_size: four more; DEVICE=cpu rehearses it
	$(PYTHON) tools/gpu.py --device $(or $(DEVICE),cuda) $(if $(ONLY),--only $(ONLY))

arm: ## as root: build zbpipe for aarch64 in build/arm and run what PARTS names there, emulated; tools/arm/arm.sh says more
	tools/arm/arm.sh setup
	tools/arm/arm.sh build
	tools/arm/arm.sh test $(PARTS)

clean: ## remove what was built, and every .venv
	rm -rf build dist *.egg-info .venv .venv-* .pytest_cache .mypy_cache .ruff_cache
	rm -rf zbpipe/_native/torch_*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# core, test-core, mutants, ubsan, tsan, valgrind, fuzz, fuzz-long, cov: the C core alone, without Python and torch.
-include tests/core.mk
