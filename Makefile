# make demo, make test: on a fresh machine they need nothing but Python >= 3.11 with pip, and make.
#
# TORCH_INDEX=URL  one more package index, for a machine whose own index has no CPU build of torch
# WORKERS=N        processes that share the tests (2)
# PYTEST_ARGS=...  handed to pytest
# PYTHON=...       the interpreter that the environments are made from

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
TORCH := 2.13.0
TORCH_INDEX ?=
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
VENV_VLLM := .venv-vllm
INSTALL := -m pip install -qq --no-input --disable-pip-version-check --prefer-binary --no-compile

# Tests start several processes: threads that wait must not spin on the cores that the others need,
# and two single threads get more done than two that wait for each other.
test test-slow test-serving: export OMP_WAIT_POLICY = PASSIVE
test test-slow test-serving: export OMP_NUM_THREADS = 1

.PHONY: venv venv-vllm demo lint test test-slow test-serving clean

venv: $(VENV)/.stamp

venv-vllm: $(VENV_VLLM)/.stamp

demo: venv
	$(VENV)/bin/outrider demo

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: venv
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "not serving and not slow" $(PYTEST_ARGS)

test-slow: venv
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m slow $(PYTEST_ARGS)

test-serving: venv venv-vllm
	OUTRIDER_VLLM_PYTHON="$(CURDIR)/$(VENV_VLLM)/bin/python" \
		$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m serving $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make_venv,FOLDER,CONSTRAINTS): an environment whose pip answers, with the pinned pip.
define make_venv
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv and pip found; set PYTHON=..." >&2; exit 1; }
	@echo "installing $(1) once (constraints from $(2))"
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@$(1)/bin/python $(INSTALL) -c $(2) --upgrade pip
endef

# $(call install_torch,FOLDER,CONSTRAINTS,CPU_ONLY): torch first and by itself, so that nothing else
# decides which build comes: the CPU build where it is wanted and the index has one.
define install_torch
	@if [ -n "$(3)" ] || ! nvidia-smi >/dev/null 2>&1; then build=+cpu; else build=; fi; \
	install="$(1)/bin/python $(INSTALL) -c $(2) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))"; \
	if [ -n "$$build" ] && $$install torch==$(TORCH)$$build 2>$(1)/.torch-log; then exit 0; fi; \
	if [ -n "$$build" ]; then echo "no CPU build torch==$(TORCH)+cpu here (see $(1)/.torch-log); taking torch==$(TORCH)"; fi; \
	$$install torch==$(TORCH)
endef

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(call make_venv,$(VENV),constraints.txt)
	$(call install_torch,$(VENV),constraints.txt)
	@$(VENV)/bin/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM's CPU wheel also asks for torchvision, torchaudio and torchcodec, which do not fit a CPU torch
# and which it does not need: hence the whole pinned list, without dependencies.
$(VENV_VLLM)/.stamp: constraints-vllm.txt
	$(call make_venv,$(VENV_VLLM),constraints-vllm.txt)
	$(call install_torch,$(VENV_VLLM),constraints-vllm.txt,cpu-only)
	@$(VENV_VLLM)/bin/python $(INSTALL) --no-deps -r constraints-vllm.txt
	@touch $@
