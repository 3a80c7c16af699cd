# `make demo` and `make test` do everything on a machine with Python 3.11 and make.
#
#   make test                the laws and a sample of every matrix: what each change has to pass
#   make test TORCH=2.11.0   the same against another torch, in an environment of its own
#   make test-full           all of it, with ten times the generated cases, drawn by the date or AXES_SEED=..: hours
#   make demo                eight processes train a small Llama
#   make bench               the table of docs/benchmarks.md, measured now
#   make docs                the site, into site/: strictly, and without network
#   make format              ruff's formatting and fixes
#   make clean               removes what the above made

PYTHON ?= python3.11
TORCH  ?=
VENV   := .venv$(if $(TORCH),-$(TORCH))
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(RUN) -m pip --disable-pip-version-check install --quiet --progress-bar off

# Another torch brings its own dependencies, so then only the tools stay pinned.
ifdef TORCH
PINS   := sed -n -e 's/^torch==.*/torch==$(TORCH)/' -e '1,/^transformers==/p'
else
PINS   := cat
endif

.PHONY: test test-full demo bench docs format clean
.DELETE_ON_ERROR:

# Hundreds of processes import axes and the tests: their bytecode is kept also where the environment says otherwise.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -q -m "not full" -n 3 --dist loadfile --no-loadscope-reorder --junitxml $(VENV)/results.xml \
		-o junit_suite_name="torch $$($(RUN) -c 'import torch; print(torch.__version__)')"

test-full: $(STAMP)
	PYTHONDONTWRITEBYTECODE= AXES_CASES=10 AXES_SEED=$${AXES_SEED-$$(date +%F)} $(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=1800

demo: $(STAMP)
	$(RUN) examples/llama.py

bench: $(STAMP)
	$(RUN) -m tests.bench

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Stale once the pins or the dependencies change.
$(STAMP): constraints.txt pyproject.toml
	@echo "installing into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PINS) constraints.txt > $(VENV)/constraints.txt
	$(PIP) -c $(VENV)/constraints.txt --editable '.[test,docs]'
	@touch $@

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
