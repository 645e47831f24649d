# Megalith: the tasks of a user and of a developer. `make` lists them.
#
# Variables:  PYTHON=python3.12     the interpreter that makes .venv
#             CONSTRAINTS=          install the newest versions instead of the tested ones
#             PIP_FLAGS='-i URL'    anything for pip; PIP_INDEX_URL and the other PIP_* variables work as usual
#             EXTRAS=serve,track    extras beside those that a target installs (docs/install.md)
#             TEST_WORKERS=         run the tests one by one (by default as many files at once as there are cores)
#             WHEELHOUSE=wheelhouse install from that folder only, without network (docs/install.md)
#             TORCH=cu126           the build of torch: auto (by nvidia-smi), cu126, cu130, cpu, pypi (docs/install.md)

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
PIP_FLAGS ?=
WHEELHOUSE ?=
TORCH ?= auto
EXTRAS ?=
ARGS ?=
TEST_WORKERS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
BIN := .venv/bin
export CONSTRAINTS PIP_FLAGS TORCH WHEELHOUSE # scripts/choose_torch.py reads them
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE)) \
	$(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_FLAGS)
# Else each of the processes that tests start, and each worker of pytest, would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE
# pip's arguments for the build of torch, and a prerequisite that asks for it again if TORCH names one
CHOOSE_TORCH := $(BIN)/python scripts/choose_torch.py
named_torch := $(if $(filter-out auto,$(TORCH)),a-named-torch)

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

comma := ,
with_extras = $(subst $() ,$(comma),$(strip $(1) $(EXTRAS)))
unknown_extras := $(strip $(foreach extra,$(subst $(comma), ,$(EXTRAS)),$(if $(shell grep -E '^$(extra) = \[' pyproject.toml),,$(extra))))
$(if $(unknown_extras),$(error EXTRAS names $(unknown_extras), which pyproject.toml does not have))

.DEFAULT_GOAL := help
.PHONY: help quickstart install dev test test-full test-gpu reference campaign ecosystem check format bench bench-scaling speedrun gpu docs pictures wheelhouse release clean a-named-torch

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

quickstart: .venv/.installed-$(call with_extras,plot) ## Install, then train, kill, resume and sample a GPT on this machine (minutes)
	@$(BIN)/megalith quickstart $(ARGS)

install: .venv/.installed-$(call with_extras,plot) ## Install megalith into .venv
dev: .venv/.installed-$(call with_extras,dev) ## Install megalith with everything that tests and checks need

test: .venv/.installed-dev ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_WORKERS) $(ARGS)

test-full: .venv/.installed-dev ## Run all tests, the slow ones too
	PARITY_TABLE=docs/parity.md OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_WORKERS) -m 'full or not full' $(ARGS)

test-gpu: .venv/.installed-dev ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

campaign: .venv/.installed-dev ## Random kills, bit flips, configurations to prove, API fuzzing, simulated clusters as root (ARGS='kill --kills 10 --seed 1')
	$(BIN)/python -m tests.campaigns $(ARGS)

ecosystem: .venv/.installed-dev ## Try transformers, llama.cpp, lm-eval, trackers, ... on small models (docs/results/ecosystem.md)
	$(BIN)/python -m tests.ecosystem $(ARGS)

check: .venv/.installed-dev .venv/.installed-docs ## Formatting, lint, types, spelling, floors, glossary and the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell *.md docs src scripts recipes examples benchmarks tools tasks mkdocs.yml Makefile
	$(BIN)/python -m pytest -q tests/unit/test_floors.py tests/unit/test_glossary.py
	$(MKDOCS) --site-dir build/checked-site

format: .venv/.installed-dev ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: .venv/.installed-plot ## Install megatron-core beside .venv's packages, for `megalith prove --reference megatron`
	$(PIP_INSTALL) --no-deps --target .venv/reference --upgrade megatron-core==0.16.1 psutil typing_extensions

bench: .venv/.installed-dev .venv/.tried-bench ## Measure the commands beside their peers, 15 minutes (docs/results/benchmarks.md)
	$(BIN)/python benchmarks/commands.py $(ARGS)

bench-scaling: .venv/.installed-dev ## Measure how time and memory grow with the work, 25 minutes (docs/results/scaling.md)
	$(BIN)/python benchmarks/scaling.py $(ARGS)

speedrun: .venv/.installed-dev ## Train to the loss of a known run by less arithmetic (ARGS='--text input.txt'; docs/results/learning.md)
	$(BIN)/python benchmarks/speedrun.py $(ARGS)

gpu: .venv/.installed-dev ## Test and measure on the GPUs of this machine, ten minutes; again to continue (docs/gpu.md)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

docs: .venv/.installed-docs ## Write docs/flags.md, and build the site into build/site; any dead link is an error
	$(BIN)/megalith config --flags --markdown > docs/flags.md
	$(MKDOCS)
	@echo 'To read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000'

pictures: .venv/.installed-dev ## Make the pictures of the documentation again, by our own commands and Chromium
	OMP_NUM_THREADS=1 $(BIN)/python scripts/pictures.py
	PAGE_PICTURES=docs $(BIN)/python -m pytest -q tests/e2e/test_page.py tests/e2e/test_serve.py -k page

wheelhouse: | $(BIN)/python ## Collect all files for an install without network (docs/install.md)
	torch=$(if $(named_torch),$$($(CHOOSE_TORCH))) && $(BIN)/python -m pip wheel $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_FLAGS) -w wheelhouse \
		'.[$(call with_extras,dev docs track)]' hatchling editables pip $$torch
	@echo 'wheelhouse/ is complete. On the machine without network: make install WHEELHOUSE=wheelhouse'

release: | $(BIN)/python ## Build wheel and source archive into dist/, check them, and run the quickstart from the wheel alone
	$(PIP_INSTALL) build twine
	rm -rf dist build/wheel
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_FLAGS) dist/*.whl
	cd build/wheel && bin/megalith version && bin/megalith quickstart --minutes 0.5

clean: ## Remove the environment, caches and the quickstart's output
	rm -rf .venv build dist wheelhouse quickstart .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# llama.cpp is compiled, once and for minutes, where there is a compiler; the benchmarks go on without it elsewhere.
.venv/.tried-bench: pyproject.toml $(CONSTRAINTS) | .venv/.installed-dev
	@$(PIP_INSTALL) -e '.[bench]' || echo 'The extra bench could not be installed, for the reason above: llama.cpp takes no part.'
	@touch $@

# The stamp keeps the environment until the package's requirements change, or TORCH names a build.
.venv/.installed-%: pyproject.toml $(CONSTRAINTS) $(named_torch) | $(BIN)/python
	@torch=$$($(CHOOSE_TORCH)) && set -x && $(PIP_INSTALL) -e '.[$*]' $$torch
	@touch $@

a-named-torch:

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Megalith needs Python 3.10 or newer: make PYTHON=/path/to/python3.12'; exit 1; }
	$(PYTHON) -m venv .venv || { echo 'On Debian and Ubuntu: apt-get install python3-venv'; exit 1; }
