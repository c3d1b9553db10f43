# Every target creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-all lint docs bench clean browser package resolve results screenshot

demo: $(VENV)/.core
	mkdir -p runs
	$(VENV)/bin/dcnet reproduce digits-in-shade figure_shade --jobs 2 --runs runs --records runs --out runs

# All tests but the slow ones, with pairwise combinations of options.
test: $(VENV)/.dev
	$(RUN) -m pytest -n auto -m "not slow"

# All combinations of options, and long runs.
test-slow: $(VENV)/.dev
	$(RUN) -m pytest -n auto -m slow

test-all: test test-slow

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Check that pip resolves the dependencies from the public index, for every supported Python. Installs nothing.
resolve: $(VENV)/bin/python
	$(RUN) tests/packaging/resolve.py

# Build the sdist and the wheel, and use the wheel in an empty environment, without constraints and outside of this folder.
package: $(VENV)/.dev
	$(RUN) tests/packaging/install_wheel.py

# Regenerate the tables and pictures of README and docs from records; fails if any was stale.
results: $(VENV)/.dev
	$(RUN) -m dcnet.report.results

# Take the screenshot of the report page in docs/command_line.md with Chromium. Check the picture before you commit it.
screenshot: $(VENV)/.dev browser
	$(RUN) tests/report/screenshot.py

# Install Chromium, for the tests of the report page and its screenshot.
browser:
	@if command -v chromium > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null; \
	else echo "make browser: Chromium is not installed, and only root can install it: apt-get install chromium" >&2; exit 1; fi

# Build the site into site/; open site/index.html. Warnings are errors. The variable hides a notice of the theme.
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
