"""Profiles of the property tests: repeatable and small in CI, `--hypothesis-profile=deep` by hand. Poisoned buffers."""

import os
from importlib.metadata import PackageNotFoundError, version

# One thread for NumPy's products, before NumPy is there: tests run beside each other, on all cores.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Eight devices for JAX, where it is installed, before it is imported; a step is compiled to be run once or twice.
flags = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
try:
    jaxlib = tuple(int(n) for n in version("jaxlib").split(".")[:2])
except PackageNotFoundError:
    jaxlib = (0, 0)
if (0, 8) <= jaxlib <= (0, 10):  # which know them; an unknown flag ends the process
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

import gc  # noqa: E402

gc.set_threshold(0)  # what importing tests makes stays

import sys  # noqa: E402
from collections.abc import Generator, Iterator  # noqa: E402
from contextlib import suppress  # noqa: E402
from importlib import import_module  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

import meshlib.ops.catalogue  # noqa: E402, F401 (tables of tests have a row for every operation)
from meshlib.core import arrays, garbage  # noqa: E402
from tests.effort import DEEP_EXAMPLES, parametrize_rows  # noqa: E402

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "deep", deadline=None, max_examples=DEEP_EXAMPLES, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")

# Constants of loaded modules are nothing to draw: what a test draws would depend on the tests before it, and every
# worker would parse all modules for them.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

# Whatever an executor reads before it wrote it is NaN.
arrays.poisoned = True


def pytest_configure(config: pytest.Config) -> None:
    """What needs an extra that is not installed is not collected for its doctests; tests say that they are skipped."""
    if find_spec("jax") is None:
        here = Path(__file__).parent
        helpers = [str(p) for p in (here / "jax").glob("*.py") if not p.name.startswith("test_")]
        config.option.ignore_glob = [*(config.option.ignore_glob or ()), str(here.parent / "meshlib/jax/*"), *helpers]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of whole tables."""
    parametrize_rows(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Tests without a prompt are not searched for doctests, object by object, by every worker."""
    found = yield
    return found if b">>>" in file_path.read_bytes() else [c for c in found if type(c) is pytest.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each of several workers imports a part of the tests first, which the others then find compiled."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1 or not worker:
        return
    files = sorted(file for asked in session.config.args for file in Path(asked).rglob("test_*.py"))
    for file in files[int(worker.removeprefix("gw")) :: count]:
        with suppress(Exception, pytest.skip.Exception):  # collecting it tells
            import_module(".".join(file.resolve().relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """No garbage is collected while there is memory: a collection takes longer than what it frees took to make."""
    gc.freeze()
    gc.set_threshold(0)
    garbage.FEW_OBJECTS = garbage.LEAST_BYTES = sys.maxsize


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """No later collection looks at what a test leaves; once a process is large, the garbage among it is collected."""
    yield
    if _is_large():
        gc.set_threshold(20_000, 20, 10)
        gc.collect()  # traverses what this test has made: all else is frozen
    gc.freeze()


def _is_large() -> bool:
    """Whether this process takes 2 GiB or its share of a third of the memory; True if the system does not tell."""
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return True
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return resident_pages * page_bytes > min(2 * 2**30, pages * page_bytes / 3 / workers)


def pytest_unconfigure() -> None:
    """A process that ends collects nothing."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Python processes that tests start compile modules once a run, also where nothing is written beside sources."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode:
            # Of all workers of pytest-xdist: each has a folder of its own in that of the run.
            run = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
            compiled = (run or tmp_path_factory.getbasetemp()) / "compiled"
            _link_compiled(compiled)
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(compiled))
        yield


def _link_compiled(folder: Path) -> None:
    """Lets processes whose compiled modules are in `folder` find those that are installed with their sources."""
    for name in ("json", "numpy", "jax", "jaxlib", "ml_dtypes", "einops"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        package = Path(spec.origin).parent
        caches = package.parent.glob("*/__pycache__") if name == "json" else package.rglob("__pycache__")
        for cache in [*caches, package.parent / "__pycache__"]:
            linked = folder / cache.parent.relative_to(cache.anchor)
            linked.mkdir(parents=True, exist_ok=True)
            for file in cache.glob(f"*.{sys.implementation.cache_tag}.pyc"):
                with suppress(FileExistsError):  # the other worker's
                    (linked / file.name).symlink_to(file)
