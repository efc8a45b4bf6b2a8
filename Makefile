# Every target works from a fresh checkout: it makes the environment first, and again only when
# pyproject.toml changes.
#
# Nothing here needs a GPU. On Linux pip may choose a torch built for CUDA, which also runs on a CPU but is a
# large download. A CPU-only torch does only with a torchvision built for it: PIP_ARGS can point pip to both.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?= -n auto --maxprocesses=8

VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo quality test test-fast test-programs golden-quick test-wheel contract-detectron2 docs nightly \
	test-slow test-drawn test-detectron2 test-faults test-outcomes golden golden-freeze test-compare test-ray \
	test-lowest test-wheel-alone verify-types benchmarks-smoke coverage style clean

help:  ## list the targets
	@sed -nE 's/^([a-z0-9%-]*):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 19

# One pip command, so that one resolution chooses torch and torchvision together.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[classification,retrieval,detection,siblings,files,examples,dev,docs]'
	touch $@

demo: $(STAMP)  ## search phi for a long tail's worst class, for unseen digits, and for shifted digits
	rm -rf out/demo
	.venv/bin/python tools/finetune_classifier.py --config-file configs/classification/digits_longtail.yaml --output-dir out/demo/longtail seed=100 metric.name=worst_recall queries=150 'methods=[class_offsets,logit_adjustment_tuned,guided_es,cma_es]'
	.venv/bin/python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/demo/retrieval seed=300 queries=150
	.venv/bin/python tools/finetune_classifier.py --config-file configs/classification/digits.yaml --output-dir out/demo/shifted seed=100 seeds=3 queries=60

# --- What .ci/run runs

quality: $(STAMP)  ## check lint, format, the order of imports between packages, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: $(STAMP)  ## run the quick tests on all cores; ARGS goes to pytest, e.g. ARGS="-n 2 tests/search"
	$(PYTEST) -m "not slow and not outcome" $(ARGS)

# The core's lower floors.
FAST := tests/adapters tests/tasks tests/utils tests/value

test-fast: $(STAMP)  ## run the quick tests of the core's lower floors, from adapters to value functions: a minute on two cores
	$(PYTEST) -m "not slow and not outcome" $(ARGS) $(FAST)

test-programs: $(STAMP)  ## run five whole programs, one that is killed and resumed, and one under torchrun
	$(PYTEST) -m program $(ARGS) tests/system tests/tools/test_torchrun.py tests/test_faults.py

golden-quick: $(STAMP)  ## compare what a few searches come to, to the last digit, with what was frozen
	$(BIN)/python tests/golden/golden.py check --quick

# An environment that sees the packages of $(VENV), and not the checkout that is installed there: the .pth files
# beside those packages are not read.
define shared
	rm -rf $(1)
	$(BIN)/python -m venv --without-pip $(1)
	cd $(1)/lib/python*/site-packages && $(abspath $(BIN))/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > shared.pth
endef

# Where no checkout is in reach, so that what the wheel lacks is missed.
WHEEL := $(abspath out/wheel)
BUILT = rm -rf $(WHEEL) && $(BIN)/python -m build --no-isolation --outdir $(WHEEL)
README = mkdir $(WHEEL)/readme && cd $(WHEEL)/readme && ../venv/bin/python $(CURDIR)/tests/readme_from_wheel.py $(CURDIR)/README.md

test-wheel: $(STAMP)  ## install the wheel where the checkout can't be imported, and run the README there
	$(BUILT)
	$(call shared,$(WHEEL)/venv)
	$(BIN)/python -m pip --python $(WHEEL)/venv install --no-deps --no-index $(WHEEL)/*.whl
	cd $(WHEEL) && venv/bin/metricopt configs
	$(README)
	rm -rf $(WHEEL)/venv

# An old release that a registry has, for tests alone: its source lies in the environment and runs uncompiled.
# DETECTRON2=PATH takes another source.
DETECTRON2_NEEDS := black cloudpickle fvcore hydra-core iopath 'setuptools<82' tabulate termcolor yacs
WITH_DETECTRON2 = PYTHONPATH=$(if $(DETECTRON2),$(abspath $(DETECTRON2)):)tests .venv-detectron2/bin/python

.venv-detectron2/.installed: $(STAMP) tests/detectron2_06.txt tests/detectron2_06.py
	$(call shared,.venv-detectron2)
	$(BIN)/python -m pip --python .venv-detectron2 install $(PIP_ARGS) $(DETECTRON2_NEEDS)
	$(BIN)/python -m pip download $(PIP_ARGS) --no-deps --no-build-isolation --require-hashes -r tests/detectron2_06.txt -d .venv-detectron2
	mkdir .venv-detectron2/source
	printf '%s\n' $(CURDIR)/.venv-detectron2/source $(CURDIR) > $$(echo .venv-detectron2/lib/python*/site-packages)/detectron2.pth
	tar -xzf .venv-detectron2/*.tar.gz -C .venv-detectron2/source --strip-components=1
	$(BIN)/python tests/detectron2_06.py .venv-detectron2/source/detectron2
	touch $@

contract-detectron2: .venv-detectron2/.installed  ## run the quick tests of Detectron2
	$(WITH_DETECTRON2) -m pytest -p detectron2_06 -rs -m "detectron2 and not slow and not outcome" $(ARGS) tests/detection

docs: $(STAMP)  ## build the documentation site into out/docs; a broken link or anchor fails
	$(BIN)/mkdocs build
	@echo "open out/docs/index.html"

# --- What takes longer: .ci/nightly runs these too

nightly: $(STAMP)  ## run all that is too long for each change, a line a target; what has passed at this commit is not repeated
	.ci/nightly

test-slow: $(STAMP)  ## run the tests of more than two seconds: whole programs, notebooks, examples, ranks
	$(PYTEST) -m "slow and not outcome" $(ARGS) --ignore=tests/test_faults.py

test-detectron2: .venv-detectron2/.installed  ## run all tests of Detectron2; DETECTRON2=PATH takes another source
	$(WITH_DETECTRON2) -m pytest -p detectron2_06 -rs -m detectron2 $(ARGS)

test-faults: $(STAMP)  ## kill runs at 200 drawn moments; METRICOPT_SEED draws others
	METRICOPT_KILLS=$${METRICOPT_KILLS:-200} $(PYTEST) $(ARGS) tests/test_faults.py

test-drawn: $(STAMP)  ## draw 100 examples for each test that draws, others each time
	METRICOPT_DRAWS=$${METRICOPT_DRAWS:-100} $(PYTEST) -m "hypothesis and not outcome" $(ARGS)

test-outcomes: $(STAMP)  ## run the tests of what training and search come to, over many seeds
	$(PYTEST) -m outcome $(ARGS)

# What has PyTorch, oneDNN and MKL compute, and so round, as another processor would.
AS_default = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
AS_avx2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2
AS_avx512 = ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=AVX512

test-outcomes-%: $(STAMP)  ## run them with the instructions of another processor: default, avx2 or avx512
	$(AS_$*) $(PYTEST) -m outcome $(ARGS)

golden: .venv-detectron2/.installed  ## compare all that was frozen
	.venv-detectron2/bin/python tests/golden/golden.py check

golden-freeze: .venv-detectron2/.installed  ## compute all of these numbers anew, and keep them
	.venv-detectron2/bin/python tests/golden/golden.py freeze

test-compare: .venv-compare/.installed  ## run the tests of rivals that other packages bring, BoTorch's and Nevergrad's
	.venv-compare/bin/python -m pytest $(ARGS) -m "not slow or outcome" tests/experiment/test_rivals.py

test-ray: .venv-ray/.installed  ## run the example of workers on Ray
	.venv-ray/bin/python -m pytest $(ARGS) tests/examples/test_examples.py -k ray

.venv-compare/.installed .venv-ray/.installed: .venv-%/.installed: $(STAMP)
	$(call shared,.venv-$*)
	$(BIN)/python -m pip --python .venv-$* install $(PIP_ARGS) -e '.[$*]'
	touch $@

# pyenv answers for a Python that is not its global one only where that is named.
test-python-%: .venv-3.%/.installed  ## run the quick tests of the core's lower floors on another Python: 12 or 13
	.venv-3.$*/bin/python -m pytest $(ARGS) -m "not slow" tests/adapters tests/tasks tests/utils

.venv-3.%/.installed: pyproject.toml
	PYENV_VERSION=3.$* python3.$* -m venv .venv-3.$*
	.venv-3.$*/bin/python -m pip install $(PIP_ARGS) -e '.[classification,siblings,dev]'
	touch $@

# SECURITY.md's promises rest on these, so they must hold on the least that pyproject.toml allows.
LOWEST = $(shell sed -nE 's/^ *"(filelock|pillow|torch|torchvision)>=([0-9.]+).*/\1==\2/p' pyproject.toml | sort -u)

test-lowest: .venv-lowest/.installed  ## run the tests of files on the least filelock, Pillow and torch that are allowed
	.venv-lowest/bin/python -m pytest $(ARGS) tests/test_hostile_files.py tests/utils/test_files.py tests/data/test_images.py

.venv-lowest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install $(PIP_ARGS) $(LOWEST) -e '.[classification,retrieval,detection,dev]'
	touch $@

test-wheel-alone: $(STAMP)  ## install the wheel into an empty environment, and run the program and the README there
	$(BUILT)
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install $(PIP_ARGS) "$$(echo $(WHEEL)/*.whl)[classification]"
	cd $(WHEEL) && venv/bin/metricopt configs && venv/bin/metricopt --version
	cd $(WHEEL) && venv/bin/metricopt finetune-classifier --config-file configs/classification/digits.yaml --output-dir run device=cpu queries=20 seeds=1
	cd $(WHEEL) && venv/bin/python -c "import json; run = json.load(open('run/report.json')); assert run['methods'], run"
	$(README)
	rm -rf $(WHEEL)/venv

verify-types: $(STAMP)  ## check that callers know the types of all that the public names take and return
	$(BIN)/python tests/verify_types.py

SMOKE := out/benchmarks-smoke
TOY := --config-file configs/classification/digits.yaml
TINY := device=cpu seeds=1 workers=1 model.epochs=1 adapter.dim=4 population=8 finetune.steps=6
RECIPE := method.name=recipe method.evals=3 method.rounds=2 method.folds=2 method.trials=0
LEARNED := paper.evals=3 learned.evals=3 learned.tasks=2
TABLE := data.name=breast_cancer data.positive=benign data.standardise=true shift.kind=none model.name=tabular_mlp metric.name=mcr \
	adapter.kind=input_bias 'adapter.layers=[]'
PUBLISHED := model.name=small_cnn 'adapter.layers=["norm*"]' model.epochs=1 adapter.dim=4 finetune.steps=2 device=cpu seeds=1 'budgets=[22]'

benchmarks-smoke: $(STAMP)  ## run the commands of benchmarks/ once at toy size, but those that convert or need files
	rm -rf $(SMOKE)
	.venv/bin/python benchmarks/ablate_recipe.py --output-dir $(SMOKE)/ablations --seeds 1 --workers 1 --changes 'labels: linear' 'ES, 3 pairs' Adam 'K = 2' --task configs/classification/digits.yaml $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/ablate_recipe.py --output-dir $(SMOKE)/paper --strategy paper --seeds 1 --workers 1 --changes Adam 'P = 12' 'ends at random' 'K = 100% of T' --task configs/classification/digits.yaml $(TINY) method.evals=3 queries=20
	.venv/bin/python benchmarks/compare_starts.py --starts 1 --budgets 8 20 $(TOY) --output-dir $(SMOKE)/starts $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/gpu.py --smoke --device cpu --output $(SMOKE)/gpu.json
	.venv/bin/python benchmarks/measure_ap50.py --images 20 --detections 30 --classes 4 --repeats 1 --output-dir $(SMOKE)/ap50
	.venv/bin/python benchmarks/measure_assess.py --output-dir $(SMOKE)/assess --seeds 1-2 digits_plain noise --override device=cpu --override model.epochs=1
	.venv/bin/python benchmarks/measure_checkpoints.py --config-file configs/detection/scenes_torchvision.yaml --output-dir $(SMOKE)/checkpoints --checkpoints 2 device=cpu seeds=1 workers=1 model.steps=4 'data.images=[4,4,4]' 'methods=[]'
	.venv/bin/python benchmarks/measure_correlation.py --config-file benchmarks/configs/siblings/reloss_digits.yaml --output-dir $(SMOKE)/correlation device=cpu seeds=1 workers=1 siblings.reloss.source.training=12 siblings.reloss.source.heldout=4 siblings.reloss.source.checkpoints.count=3 siblings.reloss.source.checkpoints.steps=4 siblings.reloss.training.steps=2 siblings.reloss.training.batches=6
	.venv/bin/python benchmarks/measure_cost.py --output-dir $(SMOKE)/cost --repeats 6
	.venv/bin/python benchmarks/measure_recall.py --size 600 --dim 16 --k 120 --output-dir $(SMOKE)/recall
	.venv/bin/python benchmarks/measure_scale.py --queries 20 --images 60
	.venv/bin/python benchmarks/measure_scale.py --strategy recipe --queries 150 --images 60
	.venv/bin/python benchmarks/measure_search.py --task classification $(TOY) --output-dir $(SMOKE)/search --budgets 20 $(TINY) seeds=2 queries=30
	.venv/bin/python benchmarks/measure_transfer.py --task classification $(TOY) --output-dir $(SMOKE)/transfer --learners recipe paper --to model.name=measure_transfer:wide_cnn model.folder=benchmarks --both $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/reproduce_figure3.py --output-dir $(SMOKE)/figure3 --tasks 4 6 --held-out 3 --starts 2 $(TABLE) metric.name=aucpr seeds=1 device=cpu model.epochs=5 adapter.dim=4 finetune.steps=6 method.evals=3
	.venv/bin/python tools/finetune_classifier.py $(TOY) --output-dir $(SMOKE)/sibling $(TINY) $(TABLE) 'methods=[sl_r,metricopt_paper,metricopt_learned]' $(LEARNED) siblings.trains=phi siblings.threshold_evals=7 siblings.sl.iterations=4 siblings.sl.universal.steps=6 siblings.sl.evals=2 queries=30
	.venv/bin/python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir $(SMOKE)/retrieval $(TINY) $(RECIPE) 'methods=[]' queries=60
	.venv/bin/python benchmarks/published_cifar.py --toy --output-dir $(SMOKE)/published
	.venv/bin/python tools/compare.py --config-file benchmarks/configs/published/noise.yaml --output-dir $(SMOKE)/noise data.root=$(SMOKE)/published/noise.npz $(PUBLISHED)
	.venv/bin/python benchmarks/value_plots.py --task classification $(TOY) --output-dir $(SMOKE)/pictures $(TINY) $(RECIPE) queries=60
	.venv/bin/python benchmarks/ratios.py --smoke --output $(SMOKE)/ratios.json
	.venv/bin/python benchmarks/summarise_siblings.py --run-dir $(SMOKE)/sibling
	.venv/bin/python benchmarks/tabulate_runs.py $(SMOKE)/sibling --output-dir $(SMOKE)
	.venv/bin/python benchmarks/summarise_comparisons.py benchmarks/results/comparison/*.json --output-dir $(SMOKE)

# --- Besides

CORE := adapters methods search value

# In one process: what runs in others, as ranks do, is not counted.
coverage: $(STAMP)  ## report the lines and branches of adapters, methods, search and value that no test of theirs reaches
	mkdir -p out
	.venv/bin/python -m coverage run -m pytest -m "not outcome" $(addprefix tests/,$(CORE))
	.venv/bin/python -m coverage report

style: $(STAMP)  ## fix lint and format where it can be done automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove builds and caches; keep environments and out
	rm -rf build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
