"""tools/tune_checkpoint.py: programs that behave, and those that don't."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.programs import end, started, until
from metricopt_ext.tools import tune_checkpoint

tune = partial(end, tune_checkpoint)

ROOT = Path(__file__).resolve().parents[2]
CHANNELS = 6

# Reads a safetensors file without torch, whose import takes long. The score is best at biases of 0.03 and -0.03; its
# halves are what halves of much data would be: nearly the score.
SCORE = """
import json, math, os, struct, sys, time

def read(path, key):
    with open(path, "rb") as file:
        content = file.read()
    size = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:size])[key]["data_offsets"]
    return struct.unpack(f"<{(end - begin) // 4}f", content[size + begin : size + end])

def score(path):
    bias = read(path, "model.norm.bias")
    value = 1 - 100 * sum((each - 0.03 * (-1) ** (i // 2)) ** 2 for i, each in enumerate(bias)) / len(bias)
    chance = 0.001 * math.sin(1e4 * sum(bias))
    return value, value + chance, value - chance
"""
PRINT = SCORE + 'print("score {:.9f} even {:.9f} odd {:.9f}".format(*score(sys.argv[1])))\n'
HALVES = ["--halves", r"even (\S+)", r"odd (\S+)"]
PARSE = ["--parse", r"score (\S+)"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint, in which tests run."""
    rng = torch.Generator().manual_seed(0)
    state = {
        "embed.weight": torch.randn(7, CHANNELS, generator=rng),
        "model.norm.weight": torch.ones(CHANNELS),
        "model.norm.bias": torch.zeros(CHANNELS),
        "head.bias": torch.zeros(3),
    }
    save_file(state, tmp_path / "in.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(folder: Path, code: str, name: str = "score.py") -> str:
    """Write a program; returns its command."""
    (folder / name).write_text(textwrap.dedent(code))
    return f"{shlex.quote(sys.executable)} -S {name} {{checkpoint}} {{trial}}"


def words(command: str, *more: str, queries: int = 14, out: str = "out") -> list[str]:
    """Return the arguments of a run; a later one of a kind counts."""
    return [
        *("--checkpoint", "in.safetensors", "--score", command, "--queries", str(queries), "--dim", "3"),
        *("--output", f"{out}.safetensors", "--output-dir", out, *more),
    ]


def report(out: str = "out") -> Any:
    return json.loads(Path(out, "report.json").read_text())


def biases(path: str = "out.safetensors") -> list[float]:
    return load_file(path)["model.norm.bias"].tolist()


LARGEST = PRINT + 'print("largest {:.9f}".format(max(map(abs, read(sys.argv[1], "model.norm.bias")))))\n'
COSTLY = f"""{SCORE}
k = int(sys.argv[3])
value, even, odd = (each + 0.1 * k for each in score(sys.argv[1]))
print("cost", k, f"score {{value:.9f}} even {{even + 0.001 * k:.9f}} odd {{odd - 0.001 * k:.9f}}")
"""


@pytest.mark.slow
def test_a_limit_on_another_number_holds_in_what_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, also = program(folder, LARGEST), ["--also", r"largest=largest (\S+)"]
    tune(*words(command, *PARSE, *HALVES, *also, queries=30, out="free"))
    tune(*words(command, *PARSE, *HALVES, *also, "--subject-to", "largest: <= start + 0.01", queries=30))
    free, content, printed = report("free"), report(), capsys.readouterr().out
    assert free["also"]["largest"]["after"] > 0.015
    assert content["before"] < content["after"] < free["after"]
    assert content["subject to"] == {"largest": "<= 0.01"}
    assert content["also"]["largest"] == {"before": 0.0, "after": pytest.approx(max(map(abs, biases())), abs=1e-9)}
    assert max(map(abs, biases())) <= 0.01 + 1e-9
    assert f"besides: largest 0.0000 -> {max(map(abs, biases())):.4f} (<= 0.0100)" in printed


def test_a_limit_is_relative_to_the_defaults_of_settings(folder: Path) -> None:
    """Settings that spend a part of what may be lost leave the norms the rest."""
    command = program(folder, COSTLY) + " {k}"
    also = ["--also", r"cost=cost (\S+)", "--subject-to", "cost: <= start + 1"]
    tune(*words(command, *PARSE, *HALVES, *also, "--setting", "k=1,2,3", "--default", "k=1", queries=20))
    content = report()
    assert content["settings first"]["settings"]["k"]["after"] == "2"
    assert content["settings first"]["subject to"] == content["subject to"] == {"cost": "<= 2.0"}
    assert content["also"] == {"cost": {"before": 2.0, "after": 2.0}}


def test_a_gain_is_kept_and_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program(folder, PRINT), *PARSE, *HALVES, queries=30))
    content = report()
    assert content["task"] == "checkpoint"
    assert content["metric"] == {"name": "score", "maximize": True}
    assert content["before"] == pytest.approx(1 - 100 * 0.03**2)
    assert content["after"] > content["before"] + 0.02
    assert content["kept"] == "search"
    assert content["guard"]["by"] == "halves"
    assert content["queries"] == {"score": 30}
    assert content["failed"] == 0
    assert content["moved"] == [
        {
            "layer": "model.norm",
            "kind": "LayerNorm or GroupNorm",
            "keys": ["model.norm.weight", "model.norm.bias"],
            "channels": CHANNELS,
        }
    ]
    own = subprocess.run([sys.executable, "-S", "score.py", "out.safetensors"], capture_output=True, text=True)
    assert float(own.stdout.split()[1]) == pytest.approx(content["after"], abs=1e-8)
    before, after = load_file("in.safetensors"), load_file("out.safetensors")
    assert {key for key in before if not torch.equal(before[key], after[key])} == set(content["moved"][0]["keys"])
    assert sorted(path.suffix for path in (folder / "out/trials").iterdir()) == [".log"] * 30
    printed = capsys.readouterr().out
    assert "score of the unchanged checkpoint: 0.91 (" in printed
    assert printed.rstrip().endswith(f"out.safetensors is tuned: {content['before']:.4f} -> {content['after']:.4f}")
    assert "30 of 30 queries spent" in (folder / "out/log.txt").read_text()


def finetunes(folder: Path) -> list[str]:
    """Write two finetunes: half of the first is the best of all mixtures, and the second leads away."""
    base, sign = load_file("in.safetensors"), torch.tensor([(-1.0) ** (i // 2) for i in range(CHANNELS)])
    for name, bias in (("one", 0.06 * sign), ("two", 0.05 * torch.ones(CHANNELS))):
        state = {key: value + (0.1 if key == "embed.weight" else 0.0) for key, value in base.items()}
        save_file({**state, "model.norm.bias": bias}, folder / f"{name}.safetensors")
    return ["--mix", "one.safetensors", "two.safetensors"]


@pytest.mark.slow
def test_finetunes_are_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mix = finetunes(folder)
    arguments = [each for each in words(program(folder, PRINT), *PARSE, *HALVES, *mix, queries=30) if each != "--dim"]
    arguments.remove("3")
    tune(*arguments, "--dry-run")
    assert "weight in the mixture" in capsys.readouterr().out
    tune(*arguments)
    content = report()
    assert content["kept"] == "search"
    assert content["after"] > 0.97  # 0.91 before, and at both finetunes at most that
    assert content["moved"] == [{"checkpoint": "one.safetensors"}, {"checkpoint": "two.safetensors"}]
    base, tuned = load_file("in.safetensors"), load_file("out.safetensors")
    assert torch.equal(tuned["model.norm.weight"], base["model.norm.weight"])
    one, two = (load_file(f"{name}.safetensors")["model.norm.bias"] for name in ("one", "two"))
    w = torch.linalg.lstsq(torch.stack([one, two], 1), tuned["model.norm.bias"][:, None]).solution
    assert float((tuned["model.norm.bias"] - torch.stack([one, two], 1) @ w[:, 0]).abs().max()) < 1e-6
    torch.testing.assert_close(tuned["embed.weight"], base["embed.weight"] + 0.1 * w.sum())
    tune(*arguments, "--resume")  # which is at its end
    assert report()["after"] == content["after"]
    save_file({name: each / 2 for name, each in load_file("one.safetensors").items()}, "one.safetensors")
    tune(*arguments, "--resume", status=1)
    assert "mix" in capsys.readouterr().err


@pytest.mark.slow
def test_the_result_does_not_depend_on_jobs(folder: Path) -> None:
    command = program(folder, PRINT.replace("print(", "time.sleep(0.03 * (int(sys.argv[2]) % 3)); print("))
    for jobs in ("1", "2", "3"):
        tune(*words(command, *PARSE, *HALVES, "--jobs", jobs, out=f"out{jobs}"))
    files = [Path(f"out{jobs}.safetensors").read_bytes() for jobs in "123"]
    assert files[0] == files[1] == files[2]
    assert files[0] != Path("in.safetensors").read_bytes()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_file(folder: Path) -> None:
    command = program(folder, PRINT.replace("print(", "time.sleep(0.05); print("))
    arguments = words(command, *PARSE, *HALVES, "--jobs", "2")
    process = started("tune-checkpoint", *arguments)
    until((folder / "out/trials/8.log").exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "out.safetensors").exists()
    tune(*arguments, "--resume")
    tune(*words(command, *PARSE, *HALVES, out="whole"))
    assert (folder / "out.safetensors").read_bytes() == (folder / "whole.safetensors").read_bytes()
    assert not list((folder / "out/trials").glob("*.safetensors"))


@pytest.mark.slow
def test_a_stopped_run_ends_its_programs_and_says_how_to_go_on(folder: Path) -> None:
    code = PRINT.replace(
        "print(", "open('pid', 'w').write(str(os.getpid())); time.sleep(100 * (sys.argv[2] > '0')); print("
    )
    process = started("tune-checkpoint", *words(program(folder, code), *PARSE))
    until((folder / "out/trials/1.log").exists, process)
    time.sleep(0.3)
    pid = int((folder / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; what is finished is kept in out. To go on:" in said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_gain_leaves_the_same_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = (
        "import random, sys; a, b = random.Random(sys.argv[2]).random(), random.Random(sys.argv[2] + 'b').random()\n"
    )
    command = program(folder, noise + "print(f'score {(a + b) / 2} even {a} odd {b}')")
    tune(*words(command, *PARSE, *HALVES))
    assert report()["kept"] == "start"
    assert Path("out.safetensors").read_bytes() == Path("in.safetensors").read_bytes()
    assert (
        capsys.readouterr().out.rstrip().endswith("nothing was kept: out.safetensors is in.safetensors, byte for byte")
    )


def test_gradients_of_a_loss_shape_the_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own").mkdir()
    code = """
        import torch
        from safetensors.torch import load_file

        def gradients(path, keys):
            assert keys == ["model.norm.weight", "model.norm.bias"]
            return {key: torch.ones(4, *load_file(path)[key].shape) for key in keys}

        def nothing(path, keys):
            return {}
    """
    (folder / "own" / "losses_of_mine.py").write_text(textwrap.dedent(code))
    command, where = program(folder, PRINT), ["--gradients-folder", "own"]
    tune(*words(command, *PARSE, *HALVES, "--gradients", "losses_of_mine:gradients", *where, queries=14))
    assert "treated all directions of phi alike" not in capsys.readouterr().out
    tune(*words(command, *PARSE, *HALVES, queries=14, out="plain"))
    assert "treated all directions of phi alike" in capsys.readouterr().out
    tune(*words(command, *PARSE, "--gradients", "losses_of_mine:nothing", *where, out="other"), status=1)
    assert "the gradients lack 'model.norm.weight', which moves" in capsys.readouterr().err
    tune(*words(command, *PARSE, "--gradients", "nowhere_to_be_found:gradients", out="other"), status=1)
    assert "nowhere_to_be_found" in capsys.readouterr().err


def test_without_a_guard_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(program(folder, PRINT), *PARSE))
    assert report()["guard"]["by"] == "none"
    assert "unguarded" in capsys.readouterr().out


def test_less_is_better_where_it_is(folder: Path) -> None:
    tune(*words(program(folder, PRINT.replace("1 - 100", "100")), *PARSE, *HALVES, "--minimize"))
    assert report()["after"] < report()["before"] == pytest.approx(0.09)


def test_repeats_guard_a_noisy_score(folder: Path) -> None:
    noisy = SCORE + "import random; print('score', score(sys.argv[1])[0] + random.gauss(0, 1e-4))"
    tune(*words(program(folder, noisy), *PARSE, "--repeats", "2", queries=30))
    content = report()
    assert content["guard"]["by"] == "repeats"
    assert content["queries"]["score"] <= 30
    assert content["after"] > content["before"]


@pytest.mark.slow
def test_data_held_out_have_the_last_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(folder, PRINT)
    tune(*words(command, *PARSE, "--holdout", program(folder, PRINT, "same.py")))
    content = report()
    assert content["guard"]["by"] == "held-out"
    assert content["queries"]["held out"] == 2
    assert content["kept"] == "search"
    assert content["guard"]["held out"]["search"] == pytest.approx(content["after"])
    for path in (folder / "out/trials").iterdir():
        path.unlink()
    tune(*words(command, *PARSE, "--holdout", program(folder, PRINT, "same.py"), "--resume"))
    assert not list((folder / "out/trials").iterdir())  # each was asked for once
    assert report()["guard"] == content["guard"]
    other = program(folder, PRINT.replace("** (i // 2)", "** (i // 2 + 1)"), "other.py")  # where the gain is a loss
    tune(*words(command, *PARSE, "--holdout", other, out="other"))
    assert report("other")["kept"] == "start"
    assert Path("other.safetensors").read_bytes() == Path("in.safetensors").read_bytes()
    assert "held out, start: 0.91" in capsys.readouterr().out


def test_a_number_in_a_json_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = SCORE + "json.dump({'all': [{'AP': score(sys.argv[1])[0]}]}, open(f'{sys.argv[2]}.json', 'w'))"
    command = program(folder, code)
    tune(*words(command, "--parse-json", "{trial}.json:all.0.AP", "--jobs", "2"))
    assert report()["after"] > report()["before"]
    tune(*words(command, "--parse-json", "0.json:all.0.AP", "--jobs", "2"), status=2)
    assert "put {trial} in its name" in capsys.readouterr().err


# --- Settings first --------------------------------------------------------------------------------------------

WITH_SETTINGS = (
    SCORE
    + """
value, even, odd = score(sys.argv[1])
gain = 0.1 * (sys.argv[3] == "b") - (float(sys.argv[4]) - 0.6) ** 2
chance = 0.001 * math.sin(1e4 * gain)
print("score {:.9f} even {:.9f} odd {:.9f}".format(value + gain, even + gain + chance, odd + gain - chance))
"""
)
SETTINGS = ["--setting", "mode=a,b", "--setting", "t=0.0:1.0"]


def settable(folder: Path, code: str = WITH_SETTINGS, name: str = "score.py") -> str:
    """Write a program with settings; returns its command."""
    return f"{program(folder, code, name)} {{mode}} {{t}}"


@pytest.mark.slow
def test_settings_first_and_the_checkpoint_with_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = settable(folder)
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, queries=30))
    content, printed = report(), capsys.readouterr().out
    first = content["settings first"]
    assert first["before"] == pytest.approx(0.91 - 0.01)
    assert first["settings"]["mode"] == {"before": "a", "best": "b", "after": "b"}
    assert first["assumed"] == ["mode", "t"]
    assert content["before"] == first["after"] > first["before"] + 0.09  # the checkpoint begins where they end
    assert content["after"] > content["before"] + 0.01
    asked = content["queries"]
    assert asked["settings"] <= 11
    assert sum(asked.values()) == 30
    logs = [path.name for path in (folder / "out/trials").iterdir()]
    assert sum(each.startswith("settings-") for each in logs) == asked["settings"] - 1  # the defaults are trial 0
    assert len(logs) == 30
    assert printed.splitlines()[-1] == content["command"]
    own = subprocess.run(shlex.split(content["command"]), capture_output=True, text=True, check=True)
    assert float(own.stdout.split()[1]) == pytest.approx(content["after"], abs=1e-8)
    assert shlex.split(content["command"])[3:5] == ["out.safetensors", "tuned"]
    assert '"mode":\n  value: "b"\n  default: "a"\n' in (folder / "out/inference.yaml").read_text()
    assert f"with the settings: {first['before']:.4f} -> {content['after']:.4f}; to use both:" in printed
    assert "30 of 30 queries spent" in (folder / "out/log.txt").read_text()


@pytest.mark.slow
def test_a_run_with_settings_goes_on_wherever_it_was_killed(folder: Path) -> None:
    command = settable(folder, WITH_SETTINGS.replace("value, even", "time.sleep(0.05); value, even"))
    run = partial(words, command, *PARSE, *HALVES, *SETTINGS, "--holdout", f"{command} --aside", queries=22)
    tune(*run("--jobs", "1", out="whole"))
    asked = report("whole")["queries"]["settings"]
    for out, log in (("first", "settings-2.log"), ("last", "6.log")):
        arguments = run("--jobs", "2", out=out)
        process = started("tune-checkpoint", *arguments)
        until((folder / out / "trials" / log).exists, process)
        time.sleep(0.03)  # a program that is not yet started would still hold the folder's lock
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (folder / f"{out}.safetensors").exists()
        tune(*arguments, "--resume")
        for name in ("{}.safetensors", "{}/inference.yaml"):
            assert Path(name.format(out)).read_bytes() == Path(name.format("whole")).read_bytes()
        assert report(out)["queries"] == report("whole")["queries"]
        assert report(out)["queries"]["settings"] == asked


@pytest.mark.slow
def test_settings_that_gain_nothing_leave_the_checkpoint_its_turn(folder: Path) -> None:
    command = settable(folder, WITH_SETTINGS.replace("0.1 * (", "-0.1 * (").replace("- 0.6", "- 0.5"))
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, queries=30))
    content = report()
    assert {each["after"] for each in content["settings first"]["settings"].values()} == {"a", "0.5"}
    assert content["before"] == content["settings first"]["before"]
    assert content["after"] > content["before"]


def test_failures_of_both_stages_count_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = WITH_SETTINGS.replace("value, even", "sys.exit(7) if sys.argv[2] in ('settings-1', '3') else 0; value, even")
    command = settable(folder, code)
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, "--failures", "1", queries=22), status=1)
    said = capsys.readouterr()
    assert "trial settings-1 failed: the program's exit status is 7" in said.out
    assert "trial 3 failed: the program's exit status is 7; 0 trials may fail" in said.err
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, "--failures", "2", "--resume", queries=22))
    assert report()["settings first"]["failed"] == report()["failed"] == 1


def test_a_dry_run_with_settings_scores_the_defaults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(*words(settable(folder), *PARSE, *SETTINGS, "--dry-run"))
    said = capsys.readouterr().out
    assert "score of the unchanged checkpoint: 0.9 (" in said
    assert ["t", "a", "number", "from", "0", "to", "1", "0.5", "(assumed)"] in [
        line.split() for line in said.splitlines()
    ]


# --- Programs that don't behave -------------------------------------------------------------------------------


def test_a_checkpoint_that_can_not_be_scored_ends_before_anything_is_tuned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; [print('line', i) for i in range(30)]; sys.exit('no such dataset')"
    tune(*words(program(folder, code), *PARSE, "--failures", "5"), status=1)
    said = capsys.readouterr().err
    assert "the unchanged checkpoint can't be scored: the program's exit status is 1" in said
    assert "no such dataset" in said
    assert "line 11\n" in said
    assert "line 10\n" not in said  # of the last 20 lines, the last is the error
    assert not (folder / "out.safetensors").exists()
    tune(*words(program(folder, PRINT), *PARSE))  # the folder is free for the right command


FAILING = PRINT.replace("print(", "sys.exit(7) if int(sys.argv[2]) in (3, 6) else print(")


def test_failures_are_allowed_or_end_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(folder, FAILING)
    tune(*words(command, *PARSE, *HALVES), status=1)
    assert "trial 3 failed: the program's exit status is 7; 0 trials may fail (--failures 0)" in capsys.readouterr().err
    tune(*words(command, *PARSE, *HALVES, "--resume", "--failures", "2"))  # goes on where it ended
    assert report()["failed"] == 2
    tune(*words(command, *PARSE, *HALVES, "--failures", "2", "--jobs", "3", out="again"))
    assert report("again")["failed"] == 2
    assert Path("out.safetensors").read_bytes() == Path("again.safetensors").read_bytes()


def test_nan_is_a_failure_and_the_last_of_two_numbers_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = SCORE + "print('score 0.5'); print('score', score(sys.argv[1])[0] if sys.argv[2] != '4' else float('nan'))"
    tune(*words(program(folder, code), *PARSE), status=1)
    assert "trial 4 failed: the program printed 'nan', which is no finite number" in capsys.readouterr().err
    tune(*words(program(folder, code), *PARSE, "--failures", "1", out="again"))
    assert report("again")["before"] == pytest.approx(0.91)


@pytest.mark.slow
def test_one_that_hangs_is_ended(folder: Path) -> None:
    code = PRINT.replace("print(", "time.sleep(300 * (sys.argv[2] == '2')); print(")
    began = time.monotonic()
    tune(*words(program(folder, code), *PARSE, *HALVES, "--timeout", "10", "--failures", "1"))
    assert time.monotonic() - began < 150
    assert report()["failed"] == 1
    assert "10 s" in (folder / "out/trials/2.log").read_text()


# --- Switches -------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_and_leaves_the_folder_free(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = program(folder, PRINT)
    tune(*words(command, *PARSE, "--dry-run", "--jobs", "2", "--offsets", "head.bias"))
    said = capsys.readouterr().out
    assert "score of the unchanged checkpoint: 0.91 (" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["model.norm", "LayerNorm", "or", "GroupNorm", "12"] in rows
    assert ["head", "offsets", "3"] in rows
    assert ["in", "all", "15"] in rows
    size = 4 * (folder / "in.safetensors").stat().st_size
    assert f"14 queries would take about 1 s, and up to {size / 1e6:.1f} MB of disk" in said
    assert not (folder / "out.safetensors").exists()
    tune(*words(command, *PARSE))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--score", "python score.py in.pth"], "has no {checkpoint}"),
        (["--score", "python score.py {checkpoint} | tail"], "no shell runs it"),
        (["--score", "no-such-program {checkpoint}"], "program 'no-such-program'"),
        (["--holdout", "python score.py"], "--holdout 'python score.py' has no {checkpoint}"),
        (["--parse", "score"], "has no group"),
        (["--halves", "(", "(a)"], "is no regular expression"),
        (["--queries", "0"], "--queries 0: it must be at least 1"),
        (["--jobs", "0"], "--jobs 0"),
        (["--timeout", "0"], "--timeout 0: it must be above 0"),
        (["--output", "out.pth"], "--output out.pth must end in"),
        (["--output", "./in.safetensors"], "is the checkpoint itself"),
        (["--parse-json", "a.json:b"], "not allowed with argument --parse"),
        (["--setting", "nms=0.3:0.9"], "--score has no {nms}, so --setting nms"),
        (["--mix", "in.safetensors"], "--dim is of the norms, which --mix"),
        (["--offsets", "bn.running_var"], "--offsets bn.running_var is no bias, by its name"),
        (["--seed", "9223372036854775808"], "--seed 9223372036854775808: it must be at most 9223372036854775807"),
        (["--default", "nms=0.5"], "nms=0.5: there is no --setting; add"),
    ],
)
def test_switches_that_can_not_be_meant(
    folder: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(*words(program(folder, PRINT), *PARSE, *more), status=2)
    assert message in capsys.readouterr().err


def test_a_file_to_mix_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score = ["--score", "echo {checkpoint}", *PARSE, "--queries", "20", "--output-dir", "out"]
    Path("fine.safetensors").write_bytes(b"mine")
    Path("link.safetensors").hardlink_to("fine.safetensors")
    for output in ("./fine.safetensors", "link.safetensors"):
        files = ["--checkpoint", "in.safetensors", "--mix", "fine.safetensors", "--output", output]
        tune(*files, *score, status=2)
        assert "is fine.safetensors of --mix, which is read; use another file" in capsys.readouterr().err
    assert Path("fine.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "backbone.*"], "--layers 'backbone.*' matches no norm"),
        (["--offsets", "head.offset"], "--offsets 'head.offset' is no tensor"),
        (["--checkpoint", "no.safetensors"], "No such file"),
        (["--output", "folder.safetensors"], "Is a directory"),
        (["--queries", "5"], "--queries 5 with --repeats 1: 5 queries"),
        (["--queries", "6", "--score", "python {checkpoint} {a}", "--setting", "a=1,2"], "of them for the checkpoint"),
    ],
)
def test_what_can_not_be_done(folder: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "folder.safetensors").mkdir()
    tune(*words(program(folder, PRINT), *PARSE, *more), status=1)
    said = capsys.readouterr()
    assert message in said.err
    assert "score of the unchanged" not in said.out  # it is known before anything runs


def test_a_folder_belongs_to_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(folder, PRINT)
    tune(*words(command, *PARSE))
    tune(*words(command, *PARSE), status=1)
    assert "holds an earlier run: add --resume" in capsys.readouterr().err
    tune(*words(command, *PARSE, "--resume", "--seed", "1"), status=1)
    assert "seed was 0, now 1" in capsys.readouterr().err
    before = Path("out.safetensors").read_bytes()
    tune(*words(command, *PARSE, "--resume"))  # all is there
    assert Path("out.safetensors").read_bytes() == before


def test_a_pickled_model_is_refused_with_lines_to_copy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.nn.Linear(2, 2), "in.pth")
    arguments = words(program(folder, "raise SystemExit('must not run')"), *PARSE)
    tune(*arguments, "--checkpoint", "in.pth", "--output", "out.pth", status=1)
    said = capsys.readouterr().err
    assert "\n  import torch\n" in said
    assert "must not run" not in said


# --- Programs of others ---------------------------------------------------------------------------------------

DIGITS = """
import sys, torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torchvision.models import resnet18

torch.set_num_threads(1)
digits = load_digits()
x = F.interpolate(torch.tensor(digits.images[:200] / 16).float()[:, None], size=32).expand(-1, 3, -1, -1)
y = torch.tensor(digits.target[:200])
model = resnet18(num_classes=10)
model.load_state_dict(torch.load(sys.argv[1])["model"])
with torch.inference_mode():
    hits = (model.eval()(x).argmax(1) == y).float()
print(f"accuracy {hits.mean():.4f}, of even rows {hits[::2].mean():.4f}, of odd rows {hits[1::2].mean():.4f}")
"""


@pytest.mark.slow
def test_a_resnet_on_digits(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    torch.save({"epoch": 3, "model": model.state_dict()}, "in.pth")
    command = program(folder, DIGITS).replace(" -S ", " ")
    arguments = words(command, "--parse", r"accuracy ([\d.]+)", "--layers", "layer4.*", "--offsets", "fc.bias")
    halves = ["--halves", r"even rows ([\d.]+)", r"odd rows ([\d.]+)"]
    tune(*arguments, *halves, "--checkpoint", "in.pth", "--output", "out.pth", "--dry-run")
    printed = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["score.py", "in.pth"])
    exec(DIGITS, {})
    assert f"unchanged checkpoint: {float(capsys.readouterr().out[9:15]):.6g} (" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["layer4.0.downsample.1", "BatchNorm", "1024"] in rows
    assert ["fc", "offsets", "10"] in rows


def test_a_hugging_face_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 20}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    code = SCORE + "scale = read(sys.argv[1], 'model.norm.weight')\nprint('score', 1 - (sum(scale) - 8.1) ** 2)"
    place = ["--checkpoint", "model/model.safetensors", "--output", "tuned/model.safetensors"]
    tune(*words(program(folder, code), *PARSE, *place))
    assert report()["after"] > report()["before"]
    assert [each["kind"] for each in report()["moved"]] == ["RMSNorm, scale alone"] * 3
    (folder / "tuned/config.json").write_bytes((folder / "model/config.json").read_bytes())
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    assert 1 - (float(tuned.model.norm.weight.detach().sum()) - 8.1) ** 2 == pytest.approx(report()["after"], abs=1e-5)
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.detectron2
def test_detectron2s_own_training_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    detectron2 = pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")
    script = Path(detectron2.__file__).parents[1] / "tools" / "train_net.py"
    if not script.is_file():
        pytest.skip("needs tools/train_net.py of Detectron2's source tree")
    from detectron2.config import get_cfg
    from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
    from detectron2.modeling import build_model
    from PIL import Image

    things = [each for each in COCO_CATEGORIES if each["isthing"]]
    images = [{"id": i, "file_name": f"{i}.png", "height": 64, "width": 64} for i in range(2)]
    objects = [  # of every class in each image, so that a detector that was never trained hits some
        {
            "id": 100 * i + k,
            "image_id": i,
            "category_id": each["id"],
            "bbox": [0, 0, 60, 60],
            "area": 3600,
            "iscrowd": 0,
        }
        for i in range(2)
        for k, each in enumerate(things, start=1)
    ]
    sets = folder / "datasets" / "coco"
    (sets / "annotations").mkdir(parents=True)
    (sets / "val2017").mkdir()
    for each in images:
        Image.new("RGB", (64, 64), (9, 99, 199)).save(sets / "val2017" / str(each["file_name"]))
    (sets / "annotations" / "instances_val2017_100.json").write_text(
        json.dumps({"images": images, "annotations": objects, "categories": things})
    )
    monkeypatch.setenv("DETECTRON2_DATASETS", str(folder / "datasets"))
    cfg = get_cfg()
    cfg.merge_from_list(TINY_DETECTOR)
    (folder / "tiny.yaml").write_text(cfg.dump())
    torch.manual_seed(0)
    torch.save({"model": build_model(cfg).state_dict(), "iteration": 7}, "in.pth")
    command = f"{sys.executable} {script} --eval-only --config-file tiny.yaml OUTPUT_DIR eval/{{trial}} MODEL.WEIGHTS "
    ap50 = ["--parse", r"copypaste: [\d.]+,([\d.]+)", "--checkpoint", "in.pth", "--output", "out.pth", "--dry-run"]
    tune(*words(command + "{checkpoint}", *ap50))
    printed = capsys.readouterr().out
    own = subprocess.run(shlex.split(command + "in.pth"), capture_output=True, text=True, check=True)
    expected = float(re.findall(ap50[1], own.stdout)[-1])
    assert expected > 0
    assert f"unchanged checkpoint: {expected:.6g} (" in printed
    assert ["backbone.stem.conv1.norm", "BatchNorm", "128"] in [line.split() for line in printed.splitlines()]


TINY_DETECTOR = [
    *("MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "MODEL.BACKBONE.FREEZE_AT", 0, "MODEL.RESNETS.DEPTH", 18),
    *("MODEL.RESNETS.RES2_OUT_CHANNELS", 64, "MODEL.RESNETS.NORM", "BN", "MODEL.ANCHOR_GENERATOR.SIZES", [[16, 64]]),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", 20, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0),
    *("INPUT.MIN_SIZE_TEST", 64, "DATALOADER.NUM_WORKERS", 0, "DATASETS.TEST", ("coco_2017_val_100",)),
]
