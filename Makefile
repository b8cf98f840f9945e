# What this repository can do. Every target calls tools/bootstrap.py, which sets up what it needs once;
# on Windows without make: python tools/bootstrap.py lab

.DEFAULT_GOAL := help
.PHONY: help lab test course check sync bench badges setup

# The first Python that is new enough; else any, which then says that it is too old.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; exit; }; \
  done; command -v python3 || command -v python)

export IMAGE TORCH PORT ARGS

no_python = echo 'There is no Python here: install 3.11 or newer (https://www.python.org/downloads/), or name one: make PYTHON=/path/to/python' >&2; exit 1;
bootstrap = @$(if $(PYTHON),"$(PYTHON)" tools/bootstrap.py,$(no_python))

help: ## this list
	@echo 'make TARGET [VARIABLE=value ...]'
	@echo
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' Makefile
	@echo
	@echo '  TORCH=cpu     PyTorch without CUDA: 2 GB instead of 6'
	@echo '  IMAGE=colab   the image with the exact versions of Google Colab; IMAGE=local the newest ones'
	@echo '  PORT=8889     the port of JupyterLab'
	@echo '  ARGS="..."    more arguments for the tool that the target runs'
	@echo '  PYTHON=...    the Python to build the images with'

lab: ## open JupyterLab at lesson 01
	$(bootstrap) lab

test: ## run every test, in both images
	$(bootstrap) test

course: ## run every lesson from top to bottom and print a table (ARGS="--html .build/pages" keeps the pages)
	$(bootstrap) course

check: ## lint, types, notebook policy, import contracts
	$(bootstrap) check

sync: ## write the notebooks anew from their .py sources
	$(bootstrap) sync

bench: ## measure our tools beside the others', in one run (ARGS="--only finders")
	$(bootstrap) bench

badges: ## write badges, links and setup cells anew (ARGS="owner/repository" publishes a fork)
	$(bootstrap) badges

setup: ## only build the images
	$(bootstrap) setup
