"""The command line as its user meets it: words, numbers, exit codes, cost."""

import json
import subprocess
import sys

import numpy as np
import pytest
import rich.console  # noqa: F401  (draws from the global state when first imported)
from typer.testing import CliRunner

from flwr_modulated import Distance, Guarantee, InvalidDataError, Mechanism, Modulation
from flwr_modulated.audit import audit_records, read_records
from flwr_modulated.cli import app, main
from flwr_modulated.privacy import calibrate_noise_multiplier

PLAN = ["plan", "--features", "6", "--delta", "1e-5", "--relation", "distance:1"]
WAVES = {"alpha": 0.2, "amplitude": 0.4, "frequency": 0.5, "num_directions": 1}
PLAIN = {"alpha": 0.0, "amplitude": 0.0, "frequency": 0.0, "num_directions": 0}


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class TestPlan:
    def test_needed_devices_in_words(self):
        result = run(*PLAN, "--epsilon", 2, "--target-se", 0.05, "--dropout", 0.2)
        assert result.exit_code == 0
        assert "devices, of which" in result.output
        # No ε without δ, relation and unit.
        flat = " ".join(result.output.split())
        assert "(ε=2, δ=1e-05)-DP, relation distance(1), unit row, labels public" in flat
        assert "one release, tuning-free (default)" in flat
        assert max(len(line) for line in result.output.splitlines()) <= 80

    def test_other_two_questions(self):
        assert "is the smallest to find a coefficient of 0.2" in " ".join(
            run(*PLAN, "--num-clients", 5000, "--power", 0.8, "--effect", 0.2).output.split()
        )
        assert "What to expect of 5,000 devices" in run(*PLAN, "--num-clients", 5000, "--epsilon", 2).output

    def test_json_holds_the_plan(self):
        result = run(*PLAN, "--num-clients", 5000, "--epsilon", 2, "--json")
        document = json.loads(result.output)
        assert document["guarantee"] == {
            "epsilon": 2.0,
            "delta": 1e-5,
            "relation": "distance(1)",
            "unit": "row",
        }
        expected = Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0))).noise_std
        assert document["noise_std"] == pytest.approx(expected)
        assert [row["hides"] for row in document["forecasts"]][-3:] == ["any record", "any record", "nothing"]

    def test_json_has_no_infinity(self):
        """Far too much noise: numbers that do not exist are null."""
        result = run(*PLAN[:-1], "replace:50", "--num-clients", 20, "--epsilon", 0.01, "--json")
        assert json.loads(result.output)["standard_error"] is None

    def test_options_reach_the_mechanism(self):
        options = ["--num-clients", 5000, "--epsilon", 2, "--json", "--releases", 4, "--accounting", "zcdp"]
        options += ["--alpha", 0.2, "--amplitude", 0.4, "--frequency", 0.5, "--directions", 1]
        document = json.loads(run(*PLAN, *options, "--sensitivity", "marginal").output)
        mechanism = Mechanism(
            Modulation(0.2, 0.4, 0.5, 1),
            Guarantee(2.0, 1e-5, Distance(1.0)),
            num_releases=4,
            sensitivity="marginal",
            accounting="zcdp",
        )
        assert document["noise_std"] == pytest.approx(mechanism.noise_std)

    def test_epsilon_alone_gives_the_devices_of_common_targets(self):
        result = run(*PLAN, "--epsilon", 2)
        assert result.exit_code == 0
        assert "(ε=2, δ=1e-05)-DP, relation distance(1), unit row" in result.stdout
        document = json.loads(run(*PLAN, "--epsilon", 2, "--json").stdout)
        for entry in document["needed"]:
            assert f"{entry['num_clients']:,}" in result.stdout
        (wanted,) = (
            entry
            for entry in document["needed"]
            if entry["target"]["value"] == 0.02 and entry["target"]["kind"] == "standard_error"
        )
        whole = json.loads(run(*PLAN, "--epsilon", 2, "--target-se", 0.02, "--json").stdout)
        assert wanted["num_clients"] == whole["num_clients"]

    def test_figure(self, tmp_path):
        path = tmp_path / "plan.png"
        assert run(*PLAN, "--epsilon", 2, "--num-clients", 3000, "--figure", path).exit_code == 0
        assert path.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--num-clients", "2000"], "exactly two of epsilon, num_clients and a target"),
            (["--epsilon", "2", "--figure", "plan.png"], "figure needs a target or num_clients"),
            (["--epsilon", "2", "--power", "0.8"], "effect must be given with power"),
            (["--epsilon", "-1", "--num-clients", "100"], "epsilon must be finite and in (0, inf]"),
            (["--epsilon", "2", "--num-clients", "100", "--accounting", "best"], "accounting must be one of"),
            (
                ["--epsilon", "2", "--num-clients", "100", "--sensitivity", "low"],
                "sensitivity must be one of",
            ),
            (
                ["--epsilon", "2", "--num-clients", "100", "--relation", "ball:1"],
                "relation must be distance:",
            ),
        ],
    )
    def test_errors_end_in_one_line(self, options, message, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["flwr-modulated", *PLAN, *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        seen = capsys.readouterr()
        assert seen.out == ""
        assert seen.err.startswith("Error: ")
        assert message in seen.err
        assert len(seen.err.splitlines()) == 1

    def test_costs_less_than_a_second_of_processor_and_loads_no_server(self):
        """Processor time of the whole command, since wall time says how busy the machine is.

        Measured 0.65 s; the limit leaves room for a slower machine. A second import of SciPy's
        statistics or of dp-accounting takes 0.5 s each, and is named.
        """
        code = (
            "import sys, time, contextlib, io\n"
            "from flwr_modulated.cli import app\n"
            f"sys.argv = ['flwr-modulated', *{[*PLAN, '--epsilon', '2', '--target-r2-loss', '0.02']!r}]\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
            "    app()\n"
            "heavy = {'flwr', 'ray', 'hydra', 'dp_accounting', 'scipy.stats', 'scipy.optimize', 'opendp'}\n"
            "print(time.process_time(), *sorted(heavy & set(sys.modules)))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PATH": "", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
        )
        seconds, *loaded = done.stdout.split()
        assert loaded == []
        assert float(seconds) < 1.5


def record(**changes):
    values = {
        "method": "auto",
        "task": "fair",
        "epsilon": 2.0,
        "delta": 1e-5,
        "relation": "distance(1)",
        "accounting": "exact",
        "sensitivity": "conditional",
        "num_rounds": 1,
        "noise_std": Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0))).noise_std,
        "num_clients": 3000,
        "num_features": 4,
        **PLAIN,
    }
    return values | changes


def mechanism_record(mechanism, **changes):
    return record(
        epsilon=mechanism.guarantee.epsilon,
        relation=str(mechanism.guarantee.relation),
        accounting=mechanism.accounting,
        sensitivity=mechanism.sensitivity,
        num_rounds=mechanism.num_releases,
        noise_std=mechanism.noise_std,
        **{name: getattr(mechanism.modulation, name) for name in WAVES},
        **changes,
    )


def gradient_record(**changes):
    noise = 2 * 1.5 * calibrate_noise_multiplier(2.0, 1e-5, num_compositions=10)
    return (
        record(
            method="local_dp_fedavg",
            relation="replace_record(any)",
            sensitivity=None,
            clip=1.5,
            num_rounds=10,
            noise_std=noise,
        )
        | changes
    )


class TestAudit:
    def write(self, tmp_path, records):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in records), encoding="utf-8")
        return path

    @pytest.mark.parametrize("accounting", ["exact", "zcdp"])
    @pytest.mark.parametrize("sensitivity", ["conditional", "marginal"])
    @pytest.mark.parametrize("num_releases", [1, 10])
    def test_kept_as_calibrated_and_broken_with_a_little_less_noise(
        self, accounting, sensitivity, num_releases
    ):
        mechanism = Mechanism(
            Modulation(**WAVES),
            Guarantee(2.0, 1e-5, Distance(0.5)),
            num_releases=num_releases,
            sensitivity=sensitivity,
            accounting=accounting,
        )
        (finding,) = audit_records([mechanism_record(mechanism)])
        assert finding.kept
        assert finding.sensitivity == pytest.approx(mechanism.l2_sensitivity)
        if accounting == "exact":
            assert finding.exact_epsilon == pytest.approx(2.0, rel=1e-6)
            (less,) = audit_records([mechanism_record(mechanism) | {"noise_std": 0.99 * mechanism.noise_std}])
            assert not less.kept
            assert less.exact_epsilon > 2.01
        else:
            assert finding.exact_epsilon < 1.6

    def test_sensitivity_is_not_taken_from_the_record(self):
        """A number that is too small, or noise for the marginal one under the conditional, is found out."""
        mechanism = Mechanism(
            Modulation(**WAVES), Guarantee(2.0, 1e-5, Distance(1.0)), sensitivity="marginal"
        )
        assert audit_records([mechanism_record(mechanism)])[0].kept
        for claim in (0.1, "conditional"):
            assert not audit_records([mechanism_record(mechanism) | {"sensitivity": claim}])[0].kept

    def test_gradients(self):
        (finding,) = audit_records([gradient_record()])
        assert finding.kept
        assert finding.sensitivity == 3.0
        assert finding.unbiased_error is None
        assert not audit_records([gradient_record(clip=1.6)])[0].kept
        # A trusted server: one record more or less in the mean of 3000.
        central = gradient_record(threat_model="central", noise_std=1.5 / 3000 * 7.0, num_rounds=1)
        assert audit_records([central])[0].sensitivity == pytest.approx(1.5 / 3000)

    def test_errors_of_attackers(self):
        (finding,) = audit_records([record(noise_std=2.0, num_rounds=4)])
        assert finding.unbiased_error == pytest.approx(1.0)
        assert finding.prior_error == pytest.approx(np.sqrt(0.5))

    def test_equal_mechanisms_are_one(self):
        findings = audit_records(
            [record(), record(task="co2", num_features=7), record(), record(epsilon=4.0)]
        )
        assert [finding.num_runs for finding in findings] == [3, 1]
        assert findings[0].tasks == ("fair", "co2")

    def test_command_says_what_is_kept(self, tmp_path):
        result = run("audit", self.write(tmp_path, [record(), gradient_record()]))
        assert result.exit_code == 0
        assert "Every promise is kept." in result.output
        assert "auto: relation distance(1), unit row, δ = 1e-05, accounting exact" in result.output
        assert max(len(line) for line in result.output.splitlines()) <= 80

    def test_command_fails_for_a_broken_promise(self, tmp_path):
        result = run("audit", self.write(tmp_path, [record(), record(noise_std=1.0)]))
        assert result.exit_code == 1
        assert "1 promise(s) NOT kept" in result.output

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no records"),
            ("{}\n[1]\n", "line 2: not a JSON object"),
            ("{\n", "line 1: not a JSON object"),
        ],
    )
    def test_unreadable_files(self, text, message, tmp_path):
        path = tmp_path / "records.jsonl"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidDataError, match=message):
            read_records(path)
        with pytest.raises(InvalidDataError, match="readable file"):
            read_records(tmp_path / "none.jsonl")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"noise_std": 0.0}, "record 1: noise_std must be"),
            ({"noise_std": None}, "record 1: noise_std must be"),
            ({"relation": "ball(1)"}, "record 1: relation must be"),
            ({"epsilon": None}, "record 1: a number is missing"),
        ],
    )
    def test_impossible_values(self, changes, message):
        with pytest.raises(InvalidDataError, match=message):
            audit_records([record(**changes)])

    def test_missing_field_is_named(self):
        incomplete = record()
        del incomplete["noise_std"]
        with pytest.raises(InvalidDataError, match="record 1: 'noise_std' is missing"):
            audit_records([incomplete])
