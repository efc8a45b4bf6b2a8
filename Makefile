# Every target works from a fresh checkout: it makes the environment first, and again only when
# pyproject.toml changes.
#
# Nothing here needs a GPU. On Linux pip may choose a torch built for CUDA, which also runs on a CPU but is a
# large download. A CPU-only torch does only with a torchvision built for it: PIP_ARGS can point pip to both.

PYTHON ?= python3
VERSION ?= 3.13
PIP_ARGS ?=
ARGS ?= -n auto --maxprocesses=8

VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-python docs quality style clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 13

# One pip command, so that one resolution chooses torch and torchvision together.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[classification,retrieval,detection,examples,dev,docs]'
	touch $@

demo: $(STAMP)  ## search phi for a long tail's worst class, for unseen digits, and for shifted digits
	rm -rf out/demo
	.venv/bin/python tools/finetune_classifier.py --config-file configs/classification/digits_longtail.yaml --output-dir out/demo/longtail seed=100 metric.name=worst_recall queries=150 search_queries=same
	.venv/bin/python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/demo/retrieval seed=300 queries=150
	.venv/bin/python tools/finetune_classifier.py --config-file configs/classification/digits.yaml --output-dir out/demo/shifted seed=100 seeds=3 queries=60

test: $(STAMP)  ## run the tests on all cores; ARGS goes to pytest in place of that, e.g. ARGS="-n 2 -m 'not slow'"
	.venv/bin/python -m pytest $(ARGS)

# pyenv answers for a Python that is not its global one only where that is named.
test-python:  ## run the quick tests of the core's lower floors on another Python, e.g. VERSION=3.13; skip if it is missing
	@if PYENV_VERSION=$(VERSION) python$(VERSION) --version; then \
	    $(MAKE) .venv-$(VERSION)/.installed && \
	    .venv-$(VERSION)/bin/python -m pytest $(ARGS) -m "not slow" tests/adapters tests/tasks tests/utils; \
	else \
	    echo "skipped: this machine has no python$(VERSION)"; \
	fi

.venv-%/.installed: pyproject.toml
	PYENV_VERSION=$* python$* -m venv .venv-$*
	.venv-$*/bin/python -m pip install $(PIP_ARGS) -e '.[classification,dev]'
	touch $@

docs: $(STAMP)  ## build the documentation site into out/docs; a broken link or anchor fails
	$(BIN)/mkdocs build
	@echo "open out/docs/index.html"

quality: $(STAMP)  ## check lint, format, the order of imports between packages, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

style: $(STAMP)  ## fix lint and format where it can be done automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove builds and caches; keep environments and out
	rm -rf build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
