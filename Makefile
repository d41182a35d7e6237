# Everything runs from a virtual environment that is made from pyproject.toml on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEVELOPMENT := $(VENV)/.development

.PHONY: bench test test-all check format baseline golden package docs

bench: $(READY)
	$(BIN)/monotile bench --quick --html build/report.html

test: $(DEVELOPMENT)
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/python tests/each_unit.py

# Every case of the tests that `make test` takes a sample of.
test-all: $(DEVELOPMENT)
	$(BIN)/python -m pytest -n auto --dist worksteal --all
	$(BIN)/python tests/each_unit.py --tests

check: $(DEVELOPMENT)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python tests/user_project.py

format: $(DEVELOPMENT)
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

# The source archive and the wheel, tried in an empty environment.
package: $(DEVELOPMENT)
	$(BIN)/python tests/package.py

# The documentation as a site, checked for dead links: build/site/index.html.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python docs/site/build.py

# Record the generated text of every kernel, after a deliberate change of it.
golden: $(DEVELOPMENT)
	$(BIN)/python tests/golden/snapshot.py --refresh

# Every number of a full benchmark, kept in baselines/ under the processor's name.
baseline: $(READY)
	$(BIN)/monotile snap

# Running needs the package alone; testing needs the development packages, torch among them.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(DEVELOPMENT): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
