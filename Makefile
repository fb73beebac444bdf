# Two commands matter to a newcomer: `make demo` and `make test`. Each does all its set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
RUST_SOURCES := $(shell find rust -type f -not -path "*/target/*") Cargo.toml Cargo.lock

.PHONY: help demo build test test-long lint test-rust test-python bench bench-core bench-text bench-front bench-routing bench-engine bench-gpu test-gpu sanitize-gpu clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.deps: requirements-dev.lock
	@command -v cargo >/dev/null || { echo "octavo builds with Rust: install it from https://rustup.rs, then run make again"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "octavo needs Python 3.11 or newer (set PYTHON=python3.x)"; exit 1; }
	@echo "==> creating $(VENV) and installing the locked Python packages (about 3 GB with torch; 1 to 4 minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.lock
	@touch $@

$(VENV)/.wheel: $(VENV)/.deps $(RUST_SOURCES) pyproject.toml
	@echo "==> building the Rust core and installing octavo into $(VENV) (1 to 3 minutes the first time)"
	@VIRTUAL_ENV=$(abspath $(VENV)) PIP_QUIET=1 $(BIN)/maturin develop -q --release
	@touch $@

build: $(VENV)/.wheel  ## .venv/bin/python and .venv/bin/octavo

demo: build  ## a chat answer, 32 requests sharing a prefix, the distance to this machine's limit
	@$(BIN)/python -m octavo.benchmark.demo

lint: $(VENV)/.deps  ## formatting, lints and types of both languages
	cargo fmt --check
	cargo clippy -q --workspace --all-targets -- -D warnings
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/mypy

test-rust: $(VENV)/.deps
ifdef NEXTEST
	cargo nextest run --workspace --no-fail-fast --status-level slow
else
	cargo test -q --workspace
endif

# A worker for each core; torch's threads do not spin while they wait for each other's turn.
test-python: build
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -q -n auto --maxprocesses 8 --dist loadfile -m "not slow and not gpu"

test: lint test-rust test-python  ## everything CI runs (25 minutes at most after the build)

test-long: build  ## soak, fuzz, statistics: the long forms of the proofs
	PROPTEST_CASES=20000 cargo test -q --release -p octavo-core -p octavo-text -p octavo-router
	OCTAVO_FUZZ_SECONDS=600 cargo test -q --release -p octavo-text -p octavo-wire --test fuzz
	OCTAVO_FUZZ_SECONDS=600 cargo test -q --release -p octavo-server --lib fuzz
	$(BIN)/pytest -q -m "slow and not gpu"

test-gpu: build  ## the tests that use a CUDA device
	$(BIN)/pytest -q -m gpu

sanitize-gpu: build  ## a test of each kernel under NVIDIA's compute-sanitizer
	PYTHON=$(BIN)/python tests/kernels/sanitize.sh

bench: bench-core bench-text bench-front bench-routing bench-engine  ## every measured table of docs/ that needs no GPU

bench-core:  ## criterion: scheduler and radix tree
	cargo bench -p octavo-core

bench-text:  ## criterion: tokenizers, detokenizer, parsers
	cargo bench -p octavo-text --bench text

bench-front:  ## requests and tokens a second of the server's front, with an engine that computes nothing
	cargo bench -p octavo-server --bench front -- $(or $(TOKENIZER),$(HOME)/.cache/octavo/models/SmolLM2-135M-Instruct.Q4_1.gguf)

bench-routing:  ## hit rates of prefix-aware routing, on the real scheduler and radix tree
	cargo bench -p octavo-router --bench routing

bench-engine: build
	$(BIN)/python -m benches.engine.run

bench-gpu: build  ## every GPU figure, on one H200; writes the table of docs/performance.md
	$(BIN)/python -m benches.gpu.run

clean:  ## remove what the build made
	rm -rf target $(VENV) .mypy_cache .ruff_cache .pytest_cache
