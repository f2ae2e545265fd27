# Every target makes what it needs, .venv first.  `make help` lists them.

# make test PYTHON=python3.12: with that interpreter, in .venv-3.12.
PYTHON ?= python3
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
STAMP := $(VENV)/.stamp
RUN := $(VENV)/bin/python
# Tests run in another order each time; ORDER=7: in that one, as the report named it.
PYTEST := $(RUN) -m pytest -q $(if $(ORDER),--randomly-seed=$(ORDER))

# Tests start hundreds of processes: compile once, even where the environment says not to.
export PYTHONDONTWRITEBYTECODE =

# A kind of test is a folder; one that is not there yet is not run.
tests = $(wildcard $(addprefix tests/,$(1)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-deep test-all check fmt lint type arch unit property \
	cov test-core test-compat test-parallel test-serving test-tools test-launching \
	sim sim-nightly chaos integration mutants numerics programs conformance conformance-c10d conformance-ddp \
	conformance-files docs kills \
	examples soak bench bench-peers bench-clusters bench-serve fuzz test-cuda test-tpu test-xla \
	test-hosts test-clusters test-browser test-outside clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv with everything pinned; PYTHON=python3.12: .venv-3.12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,examples]'
	touch $@

demo: $(STAMP) ## Train a model that is split over processes, and watch it
	$(RUN) examples/train_split_model.py

# A device has to be there before the first backward pass of a process: by themselves.
DEVICE_TESTS = tests/integration/devices
BUT_DEVICES = --ignore=$(DEVICE_TESTS)

# What is quick and what is deep says tests/tiers.py.  Tests of real processes and sockets
# run two at a time however many cores there are: each has several processes.  Those of the
# core wait more than they work, and run four at a time where nothing else runs.
IN_PROCESS = $(call tests,unit property fuzz simulation numerics docs)
OF_PROCESSES = $(call tests,integration chaos conformance examples) $(BUT_DEVICES)
ALL_CORES = -n auto --maxprocesses 4 --dist worksteal
TWO_AT_A_TIME = -n 2 --dist worksteal
FOUR_AT_A_TIME = -n 4 --dist worksteal
# In asyncio's debug mode loops refuse calls from other threads, and say where what nobody
# awaited was made.
IN_DEBUG_MODE = $(call tests,unit simulation numerics integration/core/transport)
PART ?= 1/1

test: $(STAMP) ## Run the quick tests: ten minutes on two cores, on loopback, without a GPU
	$(PYTEST) --tier quick $(ALL_CORES) $(IN_PROCESS)
	$(PYTEST) --tier quick $(TWO_AT_A_TIME) $(OF_PROCESSES)
	$(PYTEST) --tier quick $(TWO_AT_A_TIME) $(DEVICE_TESTS)

test-deep: $(STAMP) ## Run the other tests; PART=2/4: the second of four parts
	$(PYTEST) --tier deep --part $(PART) $(ALL_CORES) $(IN_PROCESS)
	$(PYTEST) --tier deep --part $(PART) $(TWO_AT_A_TIME) $(OF_PROCESSES)
	$(PYTEST) --tier deep --part $(PART) $(TWO_AT_A_TIME) $(DEVICE_TESTS)
	$(PYTEST) --asyncio-debug --tier quick --part $(PART) $(ALL_CORES) $(IN_DEBUG_MODE)

test-all: test test-deep ## Run all tests

# The core, and each part that stands on it, by itself: folders as in asyncrpc/.
quick = $(PYTEST) --tier quick $(1) $(call tests,$(2))
ON_PARALLEL = simulation/test_groups.py simulation/test_elastic.py numerics/ddp
ON_SERVING = simulation/test_replicas.py simulation/test_replica_policies.py \
	simulation/test_weights.py
ON_TOOLS = simulation/test_dashboard.py
NOT_CORE = $(addprefix --ignore=tests/,$(ON_PARALLEL) $(ON_SERVING) $(ON_TOOLS))

test-core: $(STAMP) ## Run the quick tests of the core: six minutes on two cores
	$(call quick,$(ALL_CORES) $(NOT_CORE),unit/core property simulation)
	$(call quick,$(FOUR_AT_A_TIME),integration/core)

test-compat: $(STAMP) ## Those of torch's names
	$(call quick,$(TWO_AT_A_TIME),unit/compat integration/compat)

test-parallel: $(STAMP) ## Those of collectives, data parallelism and pipelines
	$(call quick,$(ALL_CORES),unit/parallel $(ON_PARALLEL))
	$(call quick,$(TWO_AT_A_TIME),integration/parallel)

test-serving: $(STAMP) ## Those of serving
	$(call quick,$(ALL_CORES),unit/serving $(ON_SERVING))
	$(call quick,$(TWO_AT_A_TIME),integration/serving)

test-tools: $(STAMP) ## Those of inspection, metrics and the command line
	$(call quick,$(ALL_CORES),unit/tools $(ON_TOOLS))
	$(call quick,$(TWO_AT_A_TIME),integration/tools)

test-launching: $(STAMP) ## Those of Ray, manifests and preemption, without a cluster
	$(call quick,$(TWO_AT_A_TIME),unit/clusters integration/clusters)

# Accelerators' runtimes replace parts of torch, or need another one: each has an
# environment of its own.  Both run on the CPU here, by PJRT.
TPU := .venv-tpu
XLA := .venv-xla
TPU_PLUGIN = $(TPU)/lib/python3*/site-packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so

# The driver does not outlive a fork: PyTorch's tests start their ranks anew.
test-cuda: $(STAMP) ## Test devices on a GPU, if torch has one here
	ASYNCRPC_TEST_DEVICE=cuda $(RUN) -m pytest -q $(DEVICE_TESTS)
	$(RUN) -m pytest -q -m gpu tests/integration/core/nn tests/integration/compat
	$(RUN) -m tests.conformance --classes g --start spawn

test-tpu: $(TPU)/.stamp ## Test devices on TorchTPU, over a PJRT plugin for the CPU: 1.6 GB
	TPU_SKIP_MDS_QUERY=1 TPU_LIBRARY_PATH="$$(echo $(CURDIR)/$(TPU_PLUGIN))" \
		ASYNCRPC_TEST_DEVICE=tpu $(TPU)/bin/python -m pytest -q \
		-W 'ignore:<TorchTpu/Performance/TcMalloc/>' \
		-W 'ignore:The .grad attribute of a Tensor that is not a leaf' $(DEVICE_TESTS)

# Without its libraries for a real TPU, which are most of it and are not used.
$(TPU)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev]'
	$(TPU)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		torch-tpu==0.2.0 xla-cpu-pjrt==0.0.1 \
		absl-py frozendict immutabledict portpicker psutil pyzmq
	touch $@

test-xla: $(XLA)/.stamp ## Test devices on torch_xla and torch 2.9, by PJRT on the CPU: 7 GB
	PJRT_DEVICE=CPU ASYNCRPC_TEST_DEVICE=xla \
		$(XLA)/bin/python -m pytest -q $(DEVICE_TESTS)

$(XLA)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(XLA)
	grep -v '^torch==' constraints.txt > $(XLA)/constraints.txt
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(XLA)/constraints.txt torch==2.9.0 torch-xla==2.9.0 -e '.[dev]'
	touch $@

# What starts workers on a cluster is tested with the real thing, several nodes on this host.
CLUSTERS := .venv-clusters

test-hosts: $(STAMP) ## Test on hosts made of network namespaces: needs root, not a package
	$(PYTEST) $(TWO_AT_A_TIME) tests/clusters/network

test-clusters: $(CLUSTERS)/.stamp ## Test on real clusters, such as Ray, on this host
	tests/clusters/install.sh
	$(CLUSTERS)/bin/python -m pytest -q $(if $(ORDER),--randomly-seed=$(ORDER)) tests/clusters

$(CLUSTERS)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,examples,peers]'
	touch $@

# The system's Chromium shows the dashboard; Playwright brings no browser of its own.
BROWSER := .venv-browser

test-browser: $(BROWSER)/.stamp ## Test the dashboard in a browser: needs Chromium
	tests/browser/install.sh
	$(BROWSER)/bin/python -m pytest -q $(if $(ORDER),--randomly-seed=$(ORDER)) tests/browser

$(BROWSER)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,browser]'
	touch $@

check: lint type arch ## Lint, types, contracts

fmt: $(STAMP) ## Format, and fix what can be fixed
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

lint: $(STAMP) ## Check style and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

type: $(STAMP) ## Check types
	$(RUN) -m mypy

arch: $(STAMP) ## Check who imports whom, public names, sizes, docstrings
	$(VENV)/bin/lint-imports
	$(PYTEST) $(TWO_AT_A_TIME) tests/architecture

# Without --cov-report= there would be a row for each of 400 files.
cov: $(STAMP) ## Show which share of the code the tests in one process reach, by folder
	$(PYTEST) --cov=asyncrpc --cov-report= $(ALL_CORES) $(call tests,unit property simulation)
	$(RUN) -m tests.coverage_table

unit: $(STAMP) ## Test the machines and codecs, without a loop; PART=1/2: half of them
	$(PYTEST) --part $(PART) $(ALL_CORES) tests/unit

property: $(STAMP) ## Test what must hold for every input, on new examples each time
	ASYNCRPC_EXPLORE=1 $(PYTEST) tests/property

mutants: $(STAMP) ## Show that errors put into machines on purpose are noticed
	$(RUN) -m tests.property.machines.mutants
	$(RUN) -m tests.property.mutants_rref
	$(RUN) -m tests.property.mutants_dashboard

sim: $(STAMP) ## Test workers on virtual time; SCENARIO=churn SEED=7 WORKERS=1000: one run
	$(if $(SCENARIO),$(RUN) -m tests.simulation --scenario $(SCENARIO) \
		--seed $(or $(SEED),0) $(if $(WORKERS),--workers $(WORKERS)),\
		$(PYTEST) tests/simulation)

sim-nightly: $(STAMP) ## The same with 2,000 seeds, and what a worker costs in a large group
	$(RUN) -m tests.simulation --seeds $(or $(SEEDS),2000) --seed $(or $(SEED),0)
	$(RUN) -m tests.simulation --sizes 125 250 500 1000
	$(RUN) -m tests.simulation --scale 64 256 1024

chaos: $(STAMP) ## Break real processes, and make mistakes meanwhile; MINUTES=10 SEED=7
	$(RUN) -m tests.chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

integration: $(STAMP) ## Test real sockets and processes
	$(PYTEST) tests/integration $(BUT_DEVICES)
	$(PYTEST) $(DEVICE_TESTS)

numerics: $(STAMP) ## Test that gradients and steps equal those of one process
	$(PYTEST) tests/numerics

programs: $(STAMP) ## 10,000 random training programs against one process
	$(RUN) -m tests.numerics.programs --programs $(or $(PROGRAMS),10000) \
		--seed $(or $(SEED),0)

CLASSES ?= a,b,c

conformance: $(STAMP) ## PyTorch's own RPC suites against asyncrpc.compat; FILTER=rref JOBS=4
	mkdir -p build
	$(RUN) -m tests.conformance --classes $(CLASSES) --jobs $(or $(JOBS),2) --out build/conformance.json \
		--logs build/conformance $(if $(FILTER),--filter '$(FILTER)')

conformance-c10d: $(STAMP) ## PyTorch's suite of c10d and DDP on our backend; FILTER=ddp
	$(RUN) -m tests.conformance.c10d $(if $(FILTER),--filter '$(FILTER)')

conformance-files: $(STAMP) ## PyTorch's test files of c10d, of a checkout: PYTORCH=../pytorch
	$(RUN) -m tests.conformance.c10d_files $(PYTORCH) $(if $(FILTER),--filter '$(FILTER)')

conformance-ddp: $(STAMP) ## PyTorch's tests of DDP on our DDP; FILTER=hook; without one, its table
	$(RUN) -m tests.conformance.c10d --ddp $(if $(FILTER),--filter '$(FILTER)',--page)

docs: $(STAMP) ## Make build/docs from docstrings and tables; run every code block, follow every link
	rm -rf build/docs
	$(RUN) docs/make_api.py build/docs/api
	$(RUN) -m tests.property.machines.drawing build/docs/machines.md
	$(RUN) docs/make_cli.py
	$(PYTEST) tests/docs

kills: $(STAMP) ## Kill workers at fifty moments: each survivor leaves in time
	ASYNCRPC_POINTS=50 $(PYTEST) tests/integration/core/test_shutdown_kills.py

examples: $(STAMP) ## Run every example
	$(PYTEST) tests/examples

soak: $(STAMP) ## Make 200,000 mixed calls: nothing is left; MINUTES=10: nothing looks stuck
	$(RUN) -m tests.soak.mixed --calls 200000
	$(RUN) -m tests.soak.healthy --minutes $(or $(MINUTES),10)

bench: $(STAMP) ## Measure
	$(RUN) -m tests.bench

# Other libraries have an environment of their own, so that .venv is quick to make.
PEERS := .venv-peers

bench-peers: $(PEERS)/.stamp ## Measure pyzmq, gRPC and Ray as well; UPDATE=1: into the docs
	$(PEERS)/bin/python -m tests.bench.bench_peers $(if $(UPDATE),--update-docs)

bench-clusters: $(PEERS)/.stamp ## Measure clusters of Ray and dask as well; UPDATE=1: into the docs
	$(PEERS)/bin/python -m tests.bench.bench_clusters $(if $(UPDATE),--update-docs)

$(PEERS)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[peers]'
	touch $@

# Libraries that call by torch's RPC, with the torch that they are compared on.
OUTSIDE := .venv-outside

test-outside: $(OUTSIDE)/.stamp ## Run other libraries' use of torch's RPC, on torch and on asyncrpc
	$(OUTSIDE)/bin/python -m tests.outside

# fairscale's setup.py wants torch to be there.
$(OUTSIDE)/.stamp: pyproject.toml tests/outside/requirements.txt
	$(PYTHON) -m venv $(OUTSIDE)
	$(OUTSIDE)/bin/python -m pip install --quiet --disable-pip-version-check \
		setuptools wheel numpy torch==2.13.0
	$(OUTSIDE)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation -r tests/outside/requirements.txt -e .
	touch $@

# BentoML wants older packages of OpenTelemetry than the tests are pinned to.
SERVE := .venv-serve

bench-serve: $(SERVE)/.stamp ## Measure Ray Serve, LitServe, BentoML and FastAPI; QUICK=1 UPDATE=1
	$(SERVE)/bin/python -m tests.bench.bench_serve $(if $(QUICK),--quick) \
		$(if $(UPDATE),--update-docs)

$(SERVE)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVE)
	grep -v '^opentelemetry-' constraints.txt > $(SERVE)/constraints.txt
	$(SERVE)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(SERVE)/constraints.txt -e '.[serve-peers]'
	touch $@

TARGETS ?= frames handshake hello http lanes messages sidecar values

# Ten minutes each: all of them nightly take eighty; what they keep is in .fuzz.
fuzz: $(STAMP) ## Fuzz decoders and messages, each 10 minutes; TARGETS="values" MINUTES=1
	$(RUN) -m pip install --quiet --disable-pip-version-check 'atheris>=2.3'
	for target in $(TARGETS); do \
		$(RUN) -m tests.fuzz $$target --minutes $(or $(MINUTES),10) || exit 1; done

clean: ## Remove what was made, .venv too
	rm -rf .venv .venv-* build dist *.egg-info .fuzz .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find asyncrpc examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
