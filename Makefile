# Every target sets itself up: it creates .venv and installs what constraints.txt pins.
#
#   make demo | test | test-fast | test-browser | test-gguf | check | soak | fuzz | bench | docs
#
# TORCH_INDEX=<url> makes pip look for torch there: the CPU or the CUDA wheels of your choice.
# TESTS=tests/store narrows make test-fast to the tests of one folder or file.
# EXTRAS=dev,wandb,... installs more of the optional parts (see pyproject.toml).

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
TORCH_INDEX ?=
comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: install demo test test-fast test-browser test-gguf check soak fuzz bench docs clean

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard agent_forge/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/forge run --preset tiny --session demo_$$(date +%Y%m%d_%H%M%S)

# Tracing costs a third more, so only tests that reach what has a bar (pyproject.toml) are traced.
COVERED := tests/store tests/config tests/cli/test_runs.py tests/faults/test_io.py \
  tests/merge/test_weights.py tests/pipeline/test_orchestrator.py
# Compiled tests are kept even where the shell forbids it: each process would compile them again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

test: $(STAMP)
	$(PYTEST) -m "not soak and not browser" --cov --cov-report= $(COVERED)
	$(BIN)/python -m coverage report --fail-under=95 --skip-covered
	$(PYTEST) -m "not soak and not browser" $(COVERED:%=--ignore=%)

test-fast: $(STAMP)
	$(PYTEST) -m "not soak and not slow and not browser" $(TESTS)

# The dashboard in a headless Chromium; without one it fails. What pages look like: build/browser.
test-browser: $(STAMP)
	@for program in chromium chromedriver; do command -v $$program >/dev/null \
	  || { echo "$$program is missing: apt-get install chromium chromium-driver"; exit 1; }; done
	$(BIN)/python -m pytest -m browser tests/ui

# llama.cpp is compiled for it (about ten minutes on one core); without it those tests fail here.
test-gguf:
	@$(MAKE) --no-print-directory EXTRAS=dev,llama install
	NEED_LLAMA_CPP=1 $(BIN)/python -m pytest tests/model/test_gguf.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -s
	$(BIN)/python tests/mutants.py

# libFuzzer on the C program's reading of model folders; needs clang, and is no part of make test.
# FUZZ_SECONDS=60 makes it shorter. What it found stays in build/fuzz/: an input that crashed is
# tried again with build/fuzz/reader FILE.
CLANG ?= clang
FUZZ_SECONDS ?= 600
FUZZ_FLAGS := -g -O1 -std=gnu11 -D_GNU_SOURCE -ffp-contract=off -Wno-psabi \
  -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
NATIVE := agent_forge/native

fuzz: $(STAMP)
	@mkdir -p build/fuzz/corpus
	@echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' \
	  | $(CLANG) -x c -fsanitize=fuzzer,address,undefined - -o build/fuzz/probe 2>/dev/null \
	  || { echo "make fuzz needs clang with libFuzzer: apt-get install clang, or CLANG=clang-18"; exit 1; }
	$(CLANG) $(FUZZ_FLAGS) tests/native/fuzz_reader.c $(NATIVE)/plain.c $(NATIVE)/avx2.c -lm \
	  -o build/fuzz/reader
	$(BIN)/python -m tests.support.fuzz_corpus build/fuzz/models
	build/fuzz/reader -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 \
	  -max_len=65536 -artifact_prefix=build/fuzz/ -print_final_stats=1 build/fuzz/corpus build/fuzz/models

bench: $(STAMP)
	@for script in $(filter-out %/results.py %/finetunes.py %/experts.py %/real.py %/quietstar.py %/rewards.py %/bitnet.py %/forge.py %/baking.py %/compress.py %/reach.py %/edge.py %/reading.py %/gguf_text.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
