# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench clean

demo: $(VENV)/.core
	$(VENV)/bin/dcnet train --operators conv tanh-cos --seeds 0 1 2 --plot runs/curves.png

test: $(VENV)/.dev
	$(RUN) -m pytest -n auto

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.dev
	$(VENV)/bin/dcnet bench layers

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core $(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt

$(VENV)/.core:
	$(INSTALL) -e .
	touch $@

$(VENV)/.dev:
	$(INSTALL) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs
