# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint bench clean

demo: $(VENV)/.demo
	$(RUN) examples/digits.py

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

$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) runs
