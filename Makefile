# `make setup` makes .venv; everything else depends on it and runs in it.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
SOURCES := $(sort $(wildcard autosp/*.py autosp/py.typed passes/*.py passes/rules/*.py kernels/*.py cost_model/*.py cost_model/machines/*.toml))
LINT := autosp passes kernels cost_model tests $(wildcard examples benchmarks)
# Ranks are processes; more threads than cores only slow them down.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all check format clean

setup: $(VENV)/linked

# torch by itself and first: the build for this machine's CPU, where one is served, and not replaced afterwards.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools torch numpy
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[hf,dev]' --config-settings editable_mode=strict
	@rm -f $(VENV)/linked
	@touch $@

# A strict editable install links each file, which is what mypy can follow: link again when files come or go. (From the root, mypy would take the folder
# autosp for the whole package: it is started in .venv.)
$(VENV)/linked: $(VENV)/installed $(VENV)/sources
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . --config-settings editable_mode=strict
	@touch $@

$(VENV)/sources: FORCE | $(VENV)/installed
	@echo '$(SOURCES)' | cmp -s - $@ || echo '$(SOURCES)' > $@

FORCE:

demo: setup
	$(BIN)/autosp demo

test: setup
	$(BIN)/pytest

test-all: setup
	AUTOSP_FULL=1 $(BIN)/pytest

check: setup
	$(BIN)/ruff check $(LINT)
	$(BIN)/ruff format --check $(LINT)
	cd $(VENV) && bin/mypy --config-file ../pyproject.toml
	$(BIN)/pytest tests/test_layering.py

format: setup
	$(BIN)/ruff format $(LINT)
	$(BIN)/ruff check --fix $(LINT)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
