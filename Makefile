# Commands for development and CI. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= logical

BIN := $(VENV)/bin
PARALLEL := --numprocesses $(WORKERS) --maxprocesses 4 --dist loadscope --no-loadscope-reorder
PROTOS := $(shell find protos -name '*.proto')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup protos serve test test-slow test-interleavings test-openapi chaos fuzz soak check audit docs breaking format lossless bench bench-acceptance bench-precision bench-sampling bench-drafting bench-structured-output bench-collectives bench-tensor-parallel bench-forward bench-kernels bench-heads bench-lora bench-transformers bench-mixture bench-single-stream bench-load bench-verification bench-context bench-overhead bench-memory bench-peers bench-control bench-off bench-default-drafter bench-service-control test-browser test-prometheus test-chart monitoring cli-reference models-page migration-page chart third-party gpu-check test-triton gpu-kernels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-23s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .make/setup ## create the environment and install into it, if something has changed

protos: .make/tools ## generate the gRPC stubs, nothing else
	$(BIN)/python setup.py --quiet generate_stubs

serve: .make/setup ## serve smollm2-135m-instruct until Ctrl-C; ARGS are flags of specdec serve
	@exec $(BIN)/specdec serve $(ARGS)

# The tests start many processes, each of which would compile the sources again without byte code,
# which images often switch off.
test: .make/setup ## run the tests that are not slow, in WORKERS processes; ARGS go to pytest
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-slow: .make/setup ## run the slow tests: recovery, load, replicas of the real service
	$(BIN)/python -m pytest -m slow $(ARGS)

test-interleavings: .make/setup ## run 20,000 random histories of an engine whose target is lost again and again
	$(BIN)/python -m pytest -m 'slow or not slow' tests/chaos/test_interleavings.py $(ARGS)

chaos: .make/setup ## put random faults into the real service; ARGS='--minutes 30 --seed 1'
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: .make/setup ## put 10,000 random inputs over every front door; ARGS='--inputs 10000 --seed 1'
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: .make/setup ## run the real service under steady load for an hour; ARGS='--minutes 60'
	$(BIN)/python -m tests.chaos.soak $(ARGS)

test-openapi: .make/setup ## test the HTTP API with schemathesis, from its OpenAPI document
	$(BIN)/python -m pytest -m slow tests/e2e/test_openapi.py $(ARGS)

test-browser: .make/setup .make/axe ## run the tests of the dashboard in the Chromium of the system
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-prometheus: .make/setup ## test dashboard and alerts with promtool and a real Prometheus
	@command -v promtool && command -v prometheus
	$(BIN)/python -m pytest -m 'slow or not slow' tests/tools/test_monitoring.py tests/e2e/test_prometheus.py $(ARGS)

monitoring: .make/setup ## generate Grafana's dashboard and the Prometheus files; ARGS=check only compares
	$(BIN)/python -m tools.monitoring $(ARGS)

migration-page: .make/setup ## generate docs/migration.md from the tables of flags; ARGS=check only compares
	$(BIN)/python -m tools.migration $(ARGS)

cli-reference: .make/setup ## generate docs/cli-reference.md from the commands; ARGS=check only compares
	$(BIN)/python -m tools.cli_reference $(ARGS)

models-page: .make/setup ## generate docs/models.md from the registry of architectures; ARGS=check only compares
	$(BIN)/python -m tools.supported_models $(ARGS)

chart: .make/setup ## generate the generated files of k8s/; ARGS=check only compares
	$(BIN)/python -m tools.chart $(ARGS)

test-chart: .make/setup ## fetch helm 3 and 4 and checkov, and test the chart with them and on a real Ray
	$(BIN)/python -m tools.chart.binaries .make/chart-tools
	$(BIN)/python -m pytest -m 'slow or not slow' tests/k8s $(ARGS)

third-party: .make/tools ## verify the files of the dashboard that come from npm; ARGS=update fetches them again
	$(BIN)/python -m tools.third_party $(or $(ARGS),check)

check: .make/setup ## lint, formatting, types, import rules, language, protos, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python -m tools.language
	$(BIN)/buf lint
	$(MAKE) --no-print-directory docs

audit: .make/setup ## look up the pinned dependencies in the advisories of the package index
	$(BIN)/python -m tools.audit $(ARGS)

docs: .make/setup ## build the documentation site into build/site; any warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

breaking: .make/setup ## check that the protos are compatible with those at AGAINST, by default .git#branch=main
	$(BIN)/buf breaking --against '$(or $(AGAINST),.git#branch=main)'

format: .make/setup ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lossless: .make/setup ## compare outputs with speculation on and off
	$(BIN)/python -m benchmarks.lossless $(ARGS)

bench: .make/setup ## measure throughput
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-acceptance: .make/setup ## compare how many draft tokens the lossless verifiers accept
	$(BIN)/python -m benchmarks.acceptance --output docs/benchmarks/acceptance.json $(ARGS)

bench-structured-output: .make/setup ## generate by JSON schemas, with and without speculation
	$(BIN)/python -m benchmarks.structured_output --output docs/benchmarks/structured-output.json $(ARGS)

bench-sampling: .make/setup ## measure the share of sampling and verification in a step
	$(BIN)/python -m benchmarks.sampling_cost $(ARGS)

bench-kernels: .make/setup ## measure the matrix products of a model and torch's
	$(BIN)/python -m benchmarks.kernels --output docs/benchmarks/kernels.json $(ARGS)

bench-heads: .make/setup ## measure draft heads beside a step of their target
	$(BIN)/python -m benchmarks.heads $(ARGS)

bench-lora: .make/setup ## measure LoRA adapters beside a step of their model
	$(BIN)/python -m benchmarks.lora $(ARGS)

bench-transformers: .make/setup ## measure models that transformers' code runs beside its own generate
	$(BIN)/python -m benchmarks.transformers_backend $(ARGS)

bench-mixture: .make/setup ## measure a mixture of experts: costs of steps beside those of text, and its speed
	$(BIN)/python -m benchmarks.mixture $(ARGS)

bench-drafting: .make/setup ## count accepted draft tokens by method
	$(BIN)/python -m benchmarks.drafting $(ARGS)

bench-collectives: .make/setup ## measure collectives between ranks of one node
	$(BIN)/python -m benchmarks.collectives $(ARGS)

bench-precision: .make/setup ## measure how far other precisions are from fp32
	$(BIN)/python -m benchmarks.precision $(ARGS)

bench-tensor-parallel: .make/setup ## measure steps on several ranks against one process
	$(BIN)/python -m benchmarks.tensor_parallel $(ARGS)

bench-forward: .make/setup ## measure a forward pass on the CPU: native kernels, torch's, the memory bandwidth bound
	$(BIN)/python -m benchmarks.forward_pass $(ARGS)

bench-single-stream: .make/setup ## measure one stream by suite and method
	$(BIN)/python -m benchmarks.single_stream $(ARGS)

bench-load: .make/setup ## measure throughput and latency against concurrency, in process and as a service
	$(BIN)/python -m benchmarks.load $(ARGS)

bench-verification: .make/setup ## measure a forward pass by number of rows, with the memory bandwidth bound
	$(BIN)/python -m benchmarks.verification_cost $(ARGS)

bench-context: .make/setup ## measure a step by context length
	$(BIN)/python -m benchmarks.context_length $(ARGS)

bench-overhead: .make/setup ## measure the overhead of the service and of a step
	$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-memory: .make/setup ## measure memory and start-up time of the service
	$(BIN)/python -m benchmarks.memory $(ARGS)

bench-peers: .make/setup ## set up other engines, in the cache, and compare them with specdec
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-control: .make/setup ## compare goodput's choice of draft tokens with the best fixed number
	$(BIN)/python -m benchmarks.control $(ARGS)

bench-off: .make/setup ## measure the cost of speculation that is switched off at run time
	$(BIN)/python -m benchmarks.off_cost $(ARGS)

bench-default-drafter: .make/setup ## measure the service as it comes against speculation off
	$(BIN)/python -m benchmarks.default_drafter $(ARGS)

bench-service-control: .make/setup ## compare automatic control with fixed numbers, on the real service
	$(BIN)/python -m benchmarks.service_control $(ARGS)

test-triton: .make/triton ## test the GPU kernels without a GPU: Triton's interpreter, and compilation for sm_80 and sm_90
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow or not slow' tests/specdec/kernels/test_triton.py tests/specdec/kernels/triton tests/tools/test_gpu_kernels.py $(ARGS)
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
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools grpcio-tools
	@mkdir -p $(@D) && touch $@

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
	@mkdir -p $(@D) && touch $@
