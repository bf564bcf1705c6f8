"""What importing costs, which way imports run, and which names are public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flwr_modulated

PACKAGE = Path(flwr_modulated.__file__).parent

# A module imports from its own layer and from those below it; a module that is not named is in the third.
LAYERS = (
    {"_typing", "_validate", "_roots", "_blocks", "errors", "noise"},
    {"modulation", "privacy", "_words", "_rounding"},
    {"mechanism", "moments"},
    set(),
    {"flower", "cli"},
)
KNOWN = {"flwr_modulated", "numpy", "scipy", "dp_accounting", "opendp", *sys.stdlib_module_names}
NEVER = {"simulations", "ray", "hydra", "omegaconf"}
LAZY = {"dp_accounting", "matplotlib", "opendp", "pandas", "rich", "statsmodels"}


def layer_of(module: str) -> int:
    return next((i for i, names in enumerate(LAYERS) if module in names), 3)


def imported(node: ast.AST, depth: int) -> list[str]:
    """Absolute names of what a statement imports; `depth` is how many packages the module is in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ["flwr_modulated", "flower"][: depth - node.level + 1] if node.level else []
        parts = [*base, *([node.module] if node.module else [])]
        if parts == ["flwr_modulated"]:
            return [f"flwr_modulated.{alias.name}" for alias in node.names]
        return [".".join(parts)]
    return []


def violations(relative: str, source: str) -> list[str]:
    """Which imports of the module at this path in the package run the wrong way."""
    parts = relative.removesuffix(".py").split("/")
    module, depth = parts[0], len(parts)
    tree = ast.parse(source)
    eager = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        for name in imported(node, depth):
            root, *rest = name.split(".")
            if root == "flwr_modulated" and rest and module != "__init__":
                if layer_of(rest[0]) > layer_of(module):
                    found.append(f"{relative}: {module} is below {rest[0]}")
            elif root == "flwr" and module != "flower":
                found.append(f"{relative}: only flower may import flwr")
            elif root in NEVER:
                found.append(f"{relative}: the package never imports {root}")
            elif root in LAZY and id(node) in eager:
                found.append(f"{relative}: {root} must be imported where it is needed")
            elif layer_of(module) < 3 and root not in KNOWN:
                found.append(f"{relative}: the mathematics does not need {root}")
    return found


def test_imports_run_one_way() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 10
    found = [
        v for path in paths for v in violations(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("privacy.py", "from .mechanism import Mechanism", "privacy is below mechanism"),
        ("privacy.py", "def f():\n    from .mechanism import Mechanism", "privacy is below mechanism"),
        ("moments.py", "from flwr_modulated.estimators import Auto", "moments is below estimators"),
        ("moments.py", "import flwr_modulated.estimators", "moments is below estimators"),
        ("moments.py", "from . import estimators", "moments is below estimators"),
        ("moments.py", "from flwr_modulated import estimators", "moments is below estimators"),
        ("estimators.py", "from .flower.records import Request", "estimators is below flower"),
        ("errors.py", "from .modulation import Modulation", "errors is below modulation"),
        ("planning.py", "def f():\n    import flwr", "only flower may import flwr"),
        ("cli.py", "from flwr.app import Message", "only flower may import flwr"),
        ("flower/client.py", "from simulations.run import main", "never imports simulations"),
        ("flower/client.py", "def f():\n    import ray", "never imports ray"),
        ("datasets.py", "import pandas as pd", "pandas must be imported where it is needed"),
        ("privacy.py", "import dp_accounting", "dp_accounting must be imported where"),
        ("mechanism.py", "import sklearn", "does not need sklearn"),
    ],
)
def test_wrong_ways_are_seen(path: str, source: str, reason: str) -> None:
    assert [v for v in violations(path, source) if reason in v]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("flower/client.py", "from ..moments import Moments\nfrom .records import Request\nimport flwr.app"),
        ("flower/client.py", "from .. import moments"),
        ("noise.py", "def f():\n    import opendp.prelude"),
        ("moments.py", "import numpy as np\nfrom .modulation import Modulation\nimport math"),
    ],
)
def test_right_ways_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


def loaded_by(statement: str, names: set[str]) -> set[str]:
    """Which of these top-level modules a fresh interpreter has loaded after the statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return {name.split(".")[0] for name in run.stdout.split()} & names


def test_importing_the_package_loads_the_mathematics_only() -> None:
    heavy = LAZY | NEVER | {"flwr", "grpc", "typer"}
    assert loaded_by("import flwr_modulated", heavy | {"numpy"}) == {"numpy"}


def test_calibration_and_fitting_stay_light() -> None:
    statement = (
        "import numpy as np; "
        "from flwr_modulated import Auto, Distance, Guarantee, Mechanism, Modulation, Moments; "
        "m = Mechanism(Modulation(), Guarantee(1.0, 1e-5, Distance(1.0))); "
        "g = m.release(np.eye(3), rng=np.random.default_rng(0)); "
        "Auto().estimate(Moments.from_rows(g, np.ones(3), noise_std=m.noise_std).debias())"
    )
    assert loaded_by(statement, NEVER | LAZY | {"flwr"}) == set()


def test_importing_the_flower_glue_loads_no_simulation() -> None:
    wanted = {"flwr", *NEVER, "matplotlib", "statsmodels", "pandas", "opendp", "dp_accounting"}
    assert loaded_by("from flwr_modulated import ModulatedStrategy", wanted) == {"flwr"}


def test_a_device_loads_nothing_of_the_servers_side() -> None:
    """It takes a third more memory, and a second of a small processor."""
    code = (
        "from flwr_modulated import ModulatedClient, DeviceNoise; DeviceNoise(); "
        "import sys; print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    heavy = {"scipy.stats", "scipy.optimize", "flwr_modulated.flower.strategy", "flwr_modulated.inference"}
    assert heavy & set(run.stdout.split()) == set()


class TestPublicNames:
    def test_all_is_sorted_and_unique(self) -> None:
        assert flwr_modulated.__all__ == sorted(set(flwr_modulated.__all__))
        assert dir(flwr_modulated) == flwr_modulated.__all__

    def test_all_is_what_the_package_defines(self) -> None:
        """The public names imported into the package, and those that load on first use."""
        here = {
            name
            for name, value in vars(flwr_modulated).items()
            if not name.startswith("_") and getattr(value, "__module__", "").startswith("flwr_modulated")
        }
        lazy = set(flwr_modulated._LAZY)
        assert here | lazy == set(flwr_modulated.__all__)

    @pytest.mark.global_rng  # importing Flower draws from it
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # and it imports deprecated names
    @pytest.mark.parametrize("name", flwr_modulated.__all__)
    def test_each_resolves_to_something_documented(self, name: str) -> None:
        value = getattr(flwr_modulated, name)
        assert value.__name__ == name
        assert (value.__doc__ or "").strip()

    def test_promised_names(self) -> None:
        promised = {
            *("Modulation", "draw_directions", "Distance", "Replace", "ReplaceRecord", "Guarantee"),
            *("Mechanism", "Moments", "DebiasedMoments", "gradient", "GradientDescent", "Ridge", "Auto"),
            *("ModulatedClient", "ModulatedStrategy"),
        }
        assert promised <= set(flwr_modulated.__all__)

    def test_unknown_name(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Modulator'"):
            flwr_modulated.Modulator  # noqa: B018
