# What a person runs. Every target brings .venv up to date first.
BIN := .venv/bin
ENV := .venv/.ready
ARGS ?=
SECONDS ?= 60

.PHONY: help demo bench observe chart test check docs contract fuzz proto clean

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

$(ENV): pyproject.toml constraints.txt .ci/setup
	@.ci/setup

demo: $(ENV)  ## tiny models next to plain vLLM; MODEL=qwen3_vl and TRANSPORT=nixl choose
	@$(BIN)/python -m tests.demo $(if $(MODEL),--model $(MODEL)) $(if $(TRANSPORT),--transport $(TRANSPORT))

bench: $(ENV)  ## speed and memory beside vLLM's own encoder-only instance; ARGS=--quick for whether it can be measured
	@$(BIN)/python -m bench $(ARGS)

observe: $(ENV)  ## producers, a Prometheus, and every query of dashboard and rules; PICTURE=FILE draws the dashboard
	@$(BIN)/python -m tests.observe $(if $(PICTURE),--picture $(PICTURE))

chart: $(ENV)  ## the Helm chart: lint, render, validate, and the real service with each case's command line; ONLY=tls
	@$(BIN)/python -m tests.chart $(if $(ONLY),--only $(ONLY))

test: check  ## the whole gate; ARGS='tests/unit -k pool' runs a part of the tests
	$(BIN)/pytest $(ARGS)

check: $(ENV)  ## lint, types, import rules, what is generated
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter
	.ci/protoc --check
	$(BIN)/python -m tests.metrics_docs --check
	$(BIN)/python -m tests.chart.generate --check

docs: $(ENV)  ## regenerate docs/metrics.md, and the chart's schema and README, from what the code declares
	$(BIN)/python -m tests.metrics_docs
	$(BIN)/python -m tests.chart.generate

contract: $(ENV)  ## load, faults and hostile media on the real service; SCALE=10 for a longer run
	@$(BIN)/python -m tests.serving $(if $(SCALE),--scale $(SCALE))

fuzz: $(ENV)  ## what reads bytes of others, guided by coverage; SECONDS=60 for each target
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

proto: $(ENV)  ## regenerate producer/wire/pb from proto/
	.ci/protoc

clean:  ## remove caches and what builds left; .venv stays
	rm -rf .cache .hypothesis build dist *.egg-info
	find producer consumer_shim tests bench -name __pycache__ -prune -exec rm -rf {} +
