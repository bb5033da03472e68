# Everything is set up by the target that needs it: one virtual environment per Python version, made again only
# when pyproject.toml changes. `make test PYTHON=python3.13` uses .venv-3.13 and leaves .venv-3.11 alone.

ifndef PYTHON
# A name in PATH may be a stub of a version manager, so each candidate is run rather than looked up.
PYTHON := $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test fresh parts lint docs console console-check picture proto format bench engines kubernetes agents integrations integrations-all faults soak image deployment fuzz peers clean

# How long: each target of `make fuzz`, and all of `make soak`.
FUZZ_SECONDS ?= 30
# How many command texts `make fuzz` gives to the rules and, if allowed, to real shells; about a quarter of an hour.
FUZZ_TEXTS ?= 200000
SOAK_SECONDS ?= 1800

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/installed ## install, run a job, run a detached one, look at it, stop the server
	@PATH="$(CURDIR)/$(BIN):$$PATH"; export PATH; \
	HOLDFAST_DIRECTORY=$$(mktemp -d); export HOLDFAST_DIRECTORY; \
	trap 'holdfast stop >/dev/null 2>&1 || true; rm -rf "$$HOLDFAST_DIRECTORY"' EXIT; trap 'exit 130' INT TERM; \
	set -e; \
	echo "\$$ holdfast run -- sh -c 'for i in 1 2 3; do echo \$$i; sleep 1; done'"; \
	holdfast run -- sh -c 'for i in 1 2 3; do echo $$i; sleep 1; done'; \
	echo "\$$ id=\$$(holdfast run --detach -- sh -c 'echo begin; sleep 2; echo end; exit 3')"; \
	id=$$(holdfast run --detach -- sh -c 'echo begin; sleep 2; echo end; exit 3'); \
	echo "\$$ holdfast logs -f \$$id"; holdfast logs -f "$$id"; \
	echo "\$$ holdfast wait \$$id; echo \$$?"; code=0; holdfast wait "$$id" || code=$$?; echo "$$code"; \
	test "$$code" = 3; \
	echo "\$$ holdfast run --detach --id server -- sleep 1000"; holdfast run --detach --id server -- sleep 1000; \
	echo "\$$ holdfast ps"; holdfast ps; \
	echo "\$$ holdfast kill server"; holdfast kill server; \
	echo "\$$ holdfast stop"; holdfast stop

test: lint docs parts console ## run every check and all tests
	$(BIN)/python tests/support/run.py

# The programs that tests start, each with the Debian package that has it: "program:package".
PARTS := $(shell sed 's/#.*//' tests/support/parts.txt | awk 'NF == 2 {print $$1 ":" $$2}')
# Debian's PostgreSQL package makes a database cluster; while this file exists, it installs only the programs.
NO_CLUSTER := /etc/postgresql-common/createcluster.d/holdfast.conf
# Packages of servers start them when they are installed; while this program exists and exits with 101, they do not.
NO_START := /usr/sbin/policy-rc.d

# Packages of npm: real agents for the tests of the bridge and of `holdfast mcp`, and the conformance suite of MCP.
# Their install scripts are not run. Out of the tree, so that `clean` leaves them.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
NPM_LISTS := tests/sandbox/agents/package.json:$(CACHE)/holdfast-agents \
	tests/mcp/conformance/package.json:$(CACHE)/holdfast-mcp-conformance

parts: $(VENV)/installed-dev ## install the engines, agents and databases that tests use, where we can; says what is missing
	@PATH="$$PATH:/usr/sbin:/sbin"; \
	absent() { PATH="$$PATH:$$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | paste -sd:)"; for part in $(PARTS); do \
		command -v $${part%%:*} >/dev/null || echo $$part; done; }; \
	if [ -n "$$(absent)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		packages=$$(absent | sed 's/.*://' | tr , '\n' | sort -u); \
		echo "installing for the tests:" $$packages; \
		ours=; [ -e $(NO_START) ] || ours=$(NO_START); \
		trap 'rm -f $(NO_CLUSTER) $$ours; rmdir -p $(dir $(NO_CLUSTER)) 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
		mkdir -p $(dir $(NO_CLUSTER)); echo 'create_main_cluster = false' >$(NO_CLUSTER); \
		[ -z "$$ours" ] || { printf '#!/bin/sh\nexit 101\n' >$$ours; chmod 755 $$ours; }; \
		{ DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$packages || \
			{ apt-get update -q && \
			DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$packages; }; } \
			>/dev/null 2>&1 || echo "apt-get could not install all of it"; \
	fi; \
	for part in $$(absent); do echo "no $${part%%:*}: the tests that need it are skipped"; done
	@PATH="$$PATH:$(CURDIR)/$(BIN)"; \
	for each in $(NPM_LISTS); do \
		list=$${each%%:*}; place=$${each#*:}; new="$$place.$$$$"; \
		if cmp -s "$$list" "$$place/package.json"; then continue; fi; \
		trap 'rm -rf "$$new"' EXIT; trap 'exit 130' INT TERM; \
		echo "installing the packages of $$list (once): $$place"; \
		{ mkdir -p "$$new" && cp "$$list" "$$new" && \
			timeout 120 npm install --prefix "$$new" --ignore-scripts --no-package-lock --no-audit --no-fund \
			--fetch-retries 0 && rm -rf "$$place" && mv "$$new" "$$place"; } >/dev/null 2>&1 || \
			echo "npm could not install them: the tests that need them are skipped"; \
	done

fresh: ## run the demo and all tests in a new minimal Debian root (as root; takes about half an hour)
	sh tests/support/fresh.sh

lint: $(VENV)/installed-dev ## ruff, mypy --strict, the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Built again when a source changes; a machine without npm, or without its packages, has the plain page.
CONSOLE := src/holdfast/console/built
CONSOLE_SOURCES := $(shell find console -path console/node_modules -prune -o -type f -print 2>/dev/null)

console: $(CONSOLE)/index.html ## type-check and build the console; without Node.js the plain page is served

$(CONSOLE)/index.html: $(CONSOLE_SOURCES) | $(VENV)/installed-dev
	@PATH="$$PATH:$(CURDIR)/$(BIN)"; cd console && \
	if [ ! -d node_modules ] || [ package-lock.json -nt node_modules/.package-lock.json ]; then \
		timeout 300 npm ci --ignore-scripts >/dev/null 2>&1 || { rm -rf node_modules; \
			echo "npm could not install the packages of the console: the plain page is served"; exit 0; }; \
	fi; npm run --silent check && npm run --silent build -- --logLevel warn

console-check: $(VENV)/installed-dev parts console ## the console with 10,000 sessions, 50 MB/s of output and a killed service
	HOLDFAST_CONSOLE_CHECKS=yes $(BIN)/python -m pytest -s tests/service/test_console_app.py

proto: $(VENV)/installed-dev ## make the session service's messages from proto/ again
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=src --pyi_out=src --grpc_python_out=src \
		proto/holdfast/session/v1/session.proto

format: $(VENV)/installed-dev ## rewrite the code in the house format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/installed-dev ## measure, and write the table into docs/benchmarks.md
	$(BIN)/python -m bench --markdown docs/benchmarks.md

picture: $(VENV)/installed-dev console ## record the README's terminal session again as docs/terminal.svg, and the console's pictures
	$(BIN)/python -m bench.picture docs/terminal.svg
	$(BIN)/python -m bench.console_pictures docs/pictures

docs: $(VENV)/installed-dev ## build the documentation site into build/site; a broken link is an error
	$(BIN)/python -m mkdocs build --quiet --strict

engines: $(VENV)/installed-dev parts ## run every check of sandboxes over every engine, and every benchmark once
	HOLDFAST_ALL_ENGINE_CHECKS=yes $(BIN)/python -m pytest tests/sandbox/test_fleet_engines.py tests/e2e/test_bench.py

agents: $(VENV)/installed-dev parts ## run every check with real agents, Claude Code and Codex, as clients
	HOLDFAST_ALL_AGENT_CHECKS=yes $(BIN)/python -m pytest tests/mcp/test_mcp_agents.py tests/sandbox/test_codex_client.py tests/sandbox/test_codex_traffic.py tests/e2e/test_bench.py

integrations: ## make the environments of other software, in ~/.cache/holdfast-integrations (one: ONLY=NAME)
	$(PYTHON) tests/support/integrations.py $(ONLY)

integrations-all: $(VENV)/installed-dev parts integrations ## run all suites of other software, those over other engines as well
	HOLDFAST_ALL_INTEGRATION_CHECKS=yes $(BIN)/python -m pytest tests/integrations $(if $(ONLY),-k '$(ONLY)')

kubernetes: $(VENV)/installed-dev parts ## build Kubernetes once (about 15 minutes, cached) and run the tests of pods in a real cluster
	$(BIN)/python -m tests.support.kubernetes.build
	$(PYTHON) tests/support/integrations.py inspect
	HOLDFAST_KUBERNETES=yes $(BIN)/python -m pytest tests/kubernetes

faults: $(VENV)/installed-dev parts ## five minutes of kills, stops and cuts, then the faults of sandboxes and 200 MB each way; nothing may be lost
	$(BIN)/python -m tests.faults --seconds 300 $(FAULTS)
	$(BIN)/python -m pytest tests/sandbox/test_sandbox_faults.py
	HOLDFAST_LONGER_FAULTS=yes $(BIN)/python -m pytest -n0 -s tests/sandbox/test_fleet_faults.py tests/sandbox/test_fleet_restarts.py
	HOLDFAST_INTERRUPTED_SESSIONS=1000 $(BIN)/python -m pytest tests/service/test_interrupted_input.py
	$(BIN)/python -m bench.every_byte

soak: $(VENV)/installed-dev ## half an hour of mixed work and kills: does anything grow? (SOAK_SECONDS)
	$(BIN)/python -m bench.soak --seconds $(SOAK_SECONDS)

image: $(VENV)/installed-dev parts ## build the image of deploy/Dockerfile with a base from this machine's packages, and run it
	rm -rf wheels && $(BIN)/python -m pip wheel --quiet --wheel-dir wheels '.[service,kubernetes,tracing,websocket]'
	HOLDFAST_TEST_IMAGE=yes $(BIN)/python -m pytest tests/sandbox/test_image.py

deployment: $(VENV)/installed-dev parts ## boot systemd with the unit, and start the compose file without a registry
	rm -rf wheels && $(BIN)/python -m pip wheel --quiet --wheel-dir wheels '.[service,kubernetes,tracing,websocket]'
	$(BIN)/python -m tests.support.go_programs
	HOLDFAST_DEPLOYMENT=yes $(BIN)/python -m pytest tests/deployment

fuzz: $(VENV)/installed-fuzz ## random bytes to every parser, with coverage (FUZZ_SECONDS for each); FUZZ_TEXTS command texts to real shells
	$(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m fuzz.shells --texts $(FUZZ_TEXTS)

peers: $(VENV)/installed-bench parts ## compare with the shells and servers of others, and write the tables into docs/benchmarks.md
	@# One that does not install is named by the benchmark and left out.
	-$(PYTHON) tests/support/integrations.py openhands inspect
	$(BIN)/python -m bench.shells --markdown docs/benchmarks.md
	$(BIN)/python -m bench.exec_servers --markdown docs/benchmarks.md

clean: ## remove the virtual environments and the caches
	rm -rf .venv-* build dist wheels console/node_modules $(CONSOLE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made:
	@if [ -z "$(VERSION)" ]; then \
		echo "no Python 3.11 or later found$(if $(PYTHON), as '$(PYTHON)'); name one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is Python $(VERSION); holdfast needs 3.11 or later" >&2; exit 1; }
	@# Debian keeps the part of `venv` that installs pip in a package of its own.
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y python$(VERSION)-venv; \
		else \
			echo "$(PYTHON) cannot make virtual environments; first run: sudo apt-get install python$(VERSION)-venv" >&2; \
			exit 1; \
		fi; \
	fi
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/installed: pyproject.toml $(VENV)/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[websocket]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-bench: pyproject.toml $(VENV)/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@ $(VENV)/installed $(VENV)/installed-dev

$(VENV)/installed-fuzz: pyproject.toml $(VENV)/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	@touch $@ $(VENV)/installed $(VENV)/installed-dev
