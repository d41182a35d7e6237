# Everything runs from a virtual environment that is made from pyproject.toml on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Builds of torch without CUDA; see the development packages in pyproject.toml.
TORCH_CPU := https://download.pytorch.org/whl/cpu

.PHONY: bench test check format baseline golden

bench: $(READY)
	$(BIN)/monotile bench --quick

test: $(READY)
	$(BIN)/python -m pytest -n auto

check: $(READY)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(READY)
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

# Record the generated text of every kernel, after a deliberate change of it.
golden: $(READY)
	$(BIN)/python tests/golden/snapshot.py --refresh

# Every number of a full benchmark, kept in baselines/ under the processor's name.
baseline: $(READY)
	$(BIN)/monotile snap

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_CPU) torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
