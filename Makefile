# Two commands do everything, their own set-up included: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install quickstart test lint docs system-packages clean

help:
	@echo "make quickstart   watch a language model learn by reinforcement, here and now (about 3 minutes)"
	@echo "make test         lint, type checks and the whole test suite"
	@echo "make docs         the documentation, into build/docs"
	@echo "make install      only the virtual environment, with the mint command in $(BIN)"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "MinT needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# What only tests need.
.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

quickstart: install
	$(BIN)/python quickstart.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-dev
	$(BIN)/mkdocs build --strict

# The real things tests run against: the code sandbox's jail, a PostgreSQL server, a browser.
SYSTEM_PACKAGES := bubblewrap postgresql-15 chromium
system-packages:
	@{ command -v bwrap && command -v chromium && ls /usr/lib/postgresql/*/bin/postgres; } > /dev/null 2>&1 \
		|| (apt-get update -qq && apt-get install --yes -qq --no-install-recommends $(SYSTEM_PACKAGES)) \
		|| { echo "make test needs $(SYSTEM_PACKAGES); install them with your package manager."; exit 1; }

# Other people's clients run alone: they write one page from all their results.
test: lint system-packages
	$(BIN)/pytest --numprocesses 2 --dist loadfile --ignore tests/compat
	$(BIN)/pytest tests/compat

clean:
	rm -rf .venv .venvs build *.egg-info
