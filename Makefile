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
.PHONY: help demo test test-slow test-fast coverage test-outcomes test-python test-lowest test-wheel benchmarks-smoke docs quality style clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

# One pip command, so that one resolution chooses torch and torchvision together.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[classification,retrieval,detection,siblings,files,examples,dev,docs]'
	touch $@

demo: $(STAMP)  ## search phi for a long tail's worst class, for unseen digits, and for shifted digits
	rm -rf out/demo
	.venv/bin/python tools/finetune_classifier.py --config-file configs/classification/digits_longtail.yaml --output-dir out/demo/longtail seed=100 metric.name=worst_recall queries=150 search_queries=same
	.venv/bin/python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/demo/retrieval seed=300 queries=150
	.venv/bin/python tools/finetune_classifier.py --config-file configs/classification/digits.yaml --output-dir out/demo/shifted seed=100 seeds=3 queries=60

test: $(STAMP)  ## run the quick tests on all cores; ARGS goes to pytest, e.g. ARGS="-n 2 tests/search"
	.venv/bin/python -m pytest -m "not slow and not outcome" $(ARGS)

test-slow: $(STAMP)  ## run the others but those of outcomes: whole programs, notebooks, ranks, killed runs
	.venv/bin/python -m pytest -m "slow and not outcome" $(ARGS)

# The core's lower floors, without the searches of other packages, which fit for seconds.
FAST := tests/adapters tests/tasks tests/utils tests/value tests/search \
	$(addprefix --ignore=tests/search/test_,ngopt.py noisy_ei.py optuna_sampler.py turbo.py)

test-fast: $(STAMP)  ## run the quick tests of the core, from adapters to searches: a minute and a half on two cores
	.venv/bin/python -m pytest -m "not slow and not outcome" $(ARGS) $(FAST)

CORE := adapters methods search value

# In one process: what runs in others, as ranks do, is not counted.
coverage: $(STAMP)  ## report the lines and branches of adapters, methods, search and value that no test of theirs reaches
	mkdir -p out
	.venv/bin/python -m coverage run -m pytest -m "not outcome" $(addprefix tests/,$(CORE))
	.venv/bin/python -m coverage report

test-outcomes: $(STAMP)  ## run the tests of what training and search come to, over many seeds
	.venv/bin/python -m pytest -m outcome $(ARGS)

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
	.venv-$*/bin/python -m pip install $(PIP_ARGS) -e '.[classification,siblings,dev]'
	touch $@

# SECURITY.md's promises rest on these, so they must hold on the least that pyproject.toml allows.
LOWEST = $(shell sed -nE 's/^ *"(filelock|pillow|torch|torchvision)>=([0-9.]+).*/\1==\2/p' pyproject.toml | sort -u)

test-lowest: .venv-lowest/.installed  ## run the tests of files on the least filelock, Pillow and torch that are allowed
	.venv-lowest/bin/python -m pytest $(ARGS) tests/test_hostile_files.py tests/utils/test_files.py tests/data/test_images.py tests/data/test_decoding.py

.venv-lowest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install $(PIP_ARGS) $(LOWEST) -e '.[classification,retrieval,detection,dev]'
	touch $@

# Where no checkout is in reach, so that what the wheel lacks is missed.
WHEEL := $(abspath out/wheel)

test-wheel: $(STAMP)  ## install the wheel into an empty environment elsewhere, and run the program and the README there
	rm -rf $(WHEEL)
	$(BIN)/python -m build --no-isolation --outdir $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install $(PIP_ARGS) "$$(echo $(WHEEL)/*.whl)[classification]"
	cd $(WHEEL) && venv/bin/metricopt configs && venv/bin/metricopt doctor
	cd $(WHEEL) && venv/bin/metricopt finetune-classifier --config-file configs/classification/digits.yaml --output-dir run device=cpu queries=20 seeds=1
	cd $(WHEEL) && venv/bin/python -c "import json; run = json.load(open('run/report.json')); assert run['methods'], run"
	mkdir $(WHEEL)/readme && cd $(WHEEL)/readme && ../venv/bin/python $(CURDIR)/tests/readme_from_wheel.py $(CURDIR)/README.md
	rm -rf $(WHEEL)/venv

SMOKE := out/benchmarks-smoke
TOY := --config-file configs/classification/digits.yaml
TINY := device=cpu seeds=1 workers=1 model.epochs=1 adapter.dim=4 population=8 finetune.steps=6
RECIPE := method.name=recipe method.evals=3 method.rounds=2 method.folds=2 method.trials=0 'method.learners=[ridge]'
TABLE := data.name=breast_cancer data.standardise=true shift.kind=none model.name=tabular_mlp metric.name=mcr \
	adapter.kind=input_bias 'adapter.layers=[]'
PUBLISHED := model.name=small_cnn 'adapter.layers=["norm*"]' model.epochs=1 adapter.dim=4 finetune.steps=2 device=cpu seeds=1 'budgets=[22]'

benchmarks-smoke: $(STAMP)  ## run each command of benchmarks/ once at toy size, which takes about two minutes
	rm -rf $(SMOKE)
	.venv/bin/python benchmarks/ablate_recipe.py --output-dir $(SMOKE)/ablations --seeds 1 --workers 1 --changes 'ridge alone' 'ES, 3 pairs' 'K = 2' --task configs/classification/digits.yaml $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/compare_starts.py --starts 1 --budgets 8 20 $(TOY) --output-dir $(SMOKE)/starts $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/gpu.py --smoke --device cpu --output $(SMOKE)/gpu.json
	.venv/bin/python benchmarks/measure_ap50.py --images 20 --detections 30 --classes 4 --repeats 1 --output-dir $(SMOKE)/ap50
	.venv/bin/python benchmarks/measure_assess.py --output-dir $(SMOKE)/assess --seeds 1-2 digits_plain noise --override device=cpu --override model.epochs=1
	.venv/bin/python benchmarks/measure_checkpoints.py --config-file configs/detection/scenes_torchvision.yaml --output-dir $(SMOKE)/checkpoints --checkpoints 2 device=cpu seeds=1 workers=1 model.steps=4 'data.images=[4,4,4]' 'methods=[]'
	.venv/bin/python benchmarks/measure_correlation.py --config-file configs/siblings/reloss_digits.yaml --output-dir $(SMOKE)/correlation device=cpu seeds=1 workers=1 siblings.reloss.training=12 siblings.reloss.heldout=4 siblings.reloss.checkpoints=3 siblings.reloss.checkpoint_steps=4 siblings.reloss.loss_steps=2 siblings.reloss.loss_batches=6
	.venv/bin/python benchmarks/measure_cost.py --output-dir $(SMOKE)/cost --repeats 6
	.venv/bin/python benchmarks/measure_recall.py --size 600 --dim 16 --k 120 --output-dir $(SMOKE)/recall
	.venv/bin/python benchmarks/measure_scale.py --queries 20 --images 60
	.venv/bin/python benchmarks/measure_search.py --task classification $(TOY) --output-dir $(SMOKE)/search --budgets 20 $(TINY) seeds=2 queries=30
	.venv/bin/python benchmarks/measure_transfer.py --task classification $(TOY) --output-dir $(SMOKE)/transfer --learners recipe --to model.name=measure_transfer:wide_cnn model.folder=benchmarks --both $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/reproduce_figure3.py --output-dir $(SMOKE)/figure3 --tasks 4 6 --held-out 3 --starts 2 $(TABLE) metric.name=aucpr seeds=1 device=cpu model.epochs=5 adapter.dim=4 finetune.steps=6 method.evals=3
	.venv/bin/python tools/finetune_classifier.py $(TOY) --output-dir $(SMOKE)/sibling $(TINY) $(TABLE) 'methods=[sl_r]' siblings.trains=phi siblings.threshold_evals=7 siblings.sl.iterations=4 siblings.sl.universal_steps=6 siblings.sl.evals=2 queries=30 search_queries=0 pictures=false
	.venv/bin/python benchmarks/published_cifar.py --toy --output-dir $(SMOKE)/published
	.venv/bin/python tools/compare.py --config-file benchmarks/configs/published/noise.yaml --output-dir $(SMOKE)/noise data.root=$(SMOKE)/published/noise.npz $(PUBLISHED)
	.venv/bin/python benchmarks/ratios.py --smoke --output $(SMOKE)/ratios.json
	.venv/bin/python benchmarks/summarise_siblings.py --run-dir $(SMOKE)/sibling
	.venv/bin/python benchmarks/tabulate_runs.py $(SMOKE)/sibling --output-dir $(SMOKE)
	.venv/bin/python benchmarks/summarise_comparisons.py benchmarks/results/comparison/*.json --output-dir $(SMOKE)

docs: $(STAMP)  ## build the documentation site into out/docs; a broken link or anchor fails
	$(BIN)/mkdocs build
	@echo "open out/docs/index.html"

quality: $(STAMP)  ## check lint, format, the order of imports between packages, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tests/verify_types.py

style: $(STAMP)  ## fix lint and format where it can be done automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove builds and caches; keep environments and out
	rm -rf build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
