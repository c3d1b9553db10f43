# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-all lint docs bench clean browser package resolve results screenshot

demo: $(VENV)/.core
	$(VENV)/bin/dcnet train --operators conv tanh-cos --seeds 0 1 2 --plot runs/curves.png
	$(VENV)/bin/dcnet train --margin a-softmax --features 2 --width 0.5 --epochs 15 --runs runs/features
	$(VENV)/bin/dcnet plot features runs/features/* --out runs/features.png

# Every branch of the code, and each pair of choices.
test: $(VENV)/.dev
	$(RUN) -m pytest -n auto -m "not slow"

# The full products of choices, and long runs.
test-slow: $(VENV)/.dev
	$(RUN) -m pytest -n auto -m slow

test-all: test test-slow

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# pip's answer on a machine with nothing but the public index, for every supported Python; it installs nothing.
resolve: $(VENV)/bin/python
	$(RUN) tests/packaging/resolve.py

# The sdist, the wheel from it, and the wheel in an empty environment, without constraints and outside of this folder.
package: $(VENV)/.dev
	$(RUN) tests/packaging/install_wheel.py

# The tables and pictures of README and docs, from records; it fails where they had been stale.
results: $(VENV)/.dev
	$(RUN) -m dcnet.report.results

# The picture of the page in README, by Chromium; to be looked at before it is committed.
screenshot: $(VENV)/.dev browser
	$(RUN) tests/report/screenshot.py

# What the test of the page, and its picture, need beside Python.
browser:
	@if command -v chromium > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null; \
	else echo "make browser: Chromium is not here, and only root can install it: apt-get install chromium" >&2; exit 1; fi

# Into site/, to be opened at site/index.html; a warning is an error. The notice of the theme's own end is left out.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

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
	rm -rf $(VENV) runs site
