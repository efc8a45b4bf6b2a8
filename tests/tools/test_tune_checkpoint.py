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
from testers.tool import HALVES, PARSE, CommandTester

tune = partial(end, tune_checkpoint)

CHANNELS = 6


class TestCheckpoint(CommandTester):
    """Best at biases of 0.03 and -0.03; the halves are what halves of much data would be: nearly the score."""

    program = tune_checkpoint
    code = """
import struct
with open(sys.argv[1], "rb") as file:
    content = file.read()
size = 8 + int.from_bytes(content[:8], "little")
begin, end = json.loads(content[8:size])["model.norm.bias"]["data_offsets"]
bias = struct.unpack(f"<{(end - begin) // 4}f", content[size + begin : size + end])
value = 1 - 100 * sum((each - 0.03 * (-1) ** (i // 2)) ** 2 for i, each in enumerate(bias)) / len(bias)
chance = 0.001 * math.sin(1e4 * sum(bias))
"""
    given = "{checkpoint}"
    switches = ("--checkpoint", "in.safetensors", "--output", "out.safetensors", "--dim", "3")
    kept = "out.safetensors"
    another = ("--seed", "1")
    refused = (
        (("--score", "echo {checkpoint} | tail"), ["--score"]),
        (("--output", "out.pth"), ["--output", "out.pth"]),
        (("--output", "./in.safetensors"), ["--output"]),
        (("--setting", "nms=0.3:0.9"), ["--score", "{nms}"]),
        (("--mix", "in.safetensors"), ["--dim", "--mix"]),
        (("--offsets", "bn.running_var"), ["--offsets", "bn.running_var"]),
        (("--seed", str(2**63)), ["--seed", 2**63, 2**63 - 1]),
        (("--layers", "backbone.*"), ["--layers", "'backbone.*'"]),
        (("--queries", "5"), ["--queries", "5"]),
    )

    @pytest.fixture(autouse=True)
    def checkpoint(self, folder: Path) -> None:
        write(folder)

    def command(self, report: Any) -> list[str]:
        return [sys.executable, "-S", "score.py", self.kept, "tuned"]

    def test_only_what_the_report_names_is_changed(self) -> None:
        report = self.tune(*self.words(self.score(), *HALVES))
        assert (report["task"], report["kept"]) == ("checkpoint", "search")
        (moved,) = report["moved"]
        assert (moved["name"], moved["numbers"]) == ("model.norm", 2 * CHANNELS)
        before, after = load_file("in.safetensors"), load_file(self.kept)
        assert {key for key in before if not torch.equal(before[key], after[key])} == set(moved["keys"])
        self.tune(*self.words(self.score("value = 0.0"), *HALVES, out="same"), out="same")
        assert Path("same.safetensors").read_bytes() == Path("in.safetensors").read_bytes()


def write(folder: Path) -> None:
    """Write a checkpoint."""
    rng = torch.Generator().manual_seed(0)
    state = {
        "embed.weight": torch.randn(7, CHANNELS, generator=rng),
        "model.norm.weight": torch.ones(CHANNELS),
        "model.norm.bias": torch.zeros(CHANNELS),
        "head.bias": torch.zeros(3),
    }
    save_file(state, folder / "in.safetensors", metadata={"format": "pt"})


# The same, as functions, without torch, whose import takes long.
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint, in which tests run."""
    write(tmp_path)
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
def test_a_limit_on_another_number_holds_in_what_is_kept(folder: Path) -> None:
    command, also = program(folder, LARGEST), ["--also", r"largest=largest (\S+)"]
    tune(*words(command, *PARSE, *HALVES, *also, queries=30, out="free"))
    tune(*words(command, *PARSE, *HALVES, *also, "--subject-to", "largest: <= start + 0.01", queries=30))
    free, content = report("free"), report()
    assert free["also"]["largest"]["after"] > 0.015
    assert content["before"] < content["after"] < free["after"]
    assert content["subject to"] == {"largest": "<= 0.01"}
    assert content["also"]["largest"] == {"before": 0.0, "after": pytest.approx(max(map(abs, biases())), abs=1e-9)}
    assert max(map(abs, biases())) <= 0.01 + 1e-9


def test_a_limit_is_relative_to_the_defaults_of_settings(folder: Path) -> None:
    """Settings that spend a part of what may be lost leave the norms the rest."""
    command = program(folder, COSTLY) + " {k}"
    also = ["--also", r"cost=cost (\S+)", "--subject-to", "cost: <= start + 1"]
    tune(*words(command, *PARSE, *HALVES, *also, "--setting", "k=1,2,3", "--default", "k=1", queries=20))
    content = report()
    assert content["settings first"]["settings"]["k"]["after"] == "2"
    assert content["settings first"]["subject to"] == content["subject to"] == {"cost": "<= 2.0"}
    assert content["also"] == {"cost": {"before": 2.0, "after": 2.0}}


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
    tune(*arguments)
    content = report()
    assert content["kept"] == "search"
    assert content["after"] > 0.97  # 0.91 before, and at both finetunes at most that
    assert [each["name"] for each in content["moved"]] == ["one.safetensors", "two.safetensors"]
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
    tune(*words(command, *PARSE, *HALVES, queries=14, out="plain"))
    logs = (next(Path(out).rglob("log.jsonl")).read_text().splitlines() for out in ("out", "plain"))
    shaped, alike = ([json.loads(line).get("phi") for line in lines] for lines in logs)
    assert shaped != alike
    tune(*words(command, *PARSE, "--gradients", "losses_of_mine:nothing", *where, out="other"), status=1)
    assert re.search("model.norm.bias.*gradient", capsys.readouterr().err)


def test_repeats_guard_a_noisy_score(folder: Path) -> None:
    noisy = SCORE + "import random; print('score', score(sys.argv[1])[0] + random.gauss(0, 1e-4))"
    tune(*words(program(folder, noisy), *PARSE, "--repeats", "2", queries=30))
    content = report()
    assert content["guard"]["by"] == "repeats"
    assert content["queries"]["score"] <= 30
    assert content["after"] > content["before"]


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
def test_settings_first_and_the_checkpoint_with_them(folder: Path) -> None:
    command = settable(folder)
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, queries=30))
    content = report()
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
    own = subprocess.run(shlex.split(content["command"]), capture_output=True, text=True, check=True)
    assert float(own.stdout.split()[1]) == pytest.approx(content["after"], abs=1e-8)
    assert shlex.split(content["command"])[3:5] == ["out.safetensors", "tuned"]


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


def test_failures_of_both_stages_count_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = WITH_SETTINGS.replace("value, even", "sys.exit(7) if sys.argv[2] in ('settings-1', '3') else 0; value, even")
    command = settable(folder, code)
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, "--failures", "1", queries=22), status=1)
    said = capsys.readouterr()
    assert "trial settings-1 failed: the program's exit status is 7" in said.out
    assert "trial 3 failed: the program's exit status is 7; 0 trials may fail" in said.err
    tune(*words(command, *PARSE, *HALVES, *SETTINGS, "--failures", "2", "--resume", queries=22))
    assert report()["settings first"]["failed"] == report()["failed"] == 1


# --- Switches -------------------------------------------------------------------------------------------------


def test_a_file_to_mix_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score = ["--score", "echo {checkpoint}", *PARSE, "--queries", "20", "--output-dir", "out"]
    Path("fine.safetensors").write_bytes(b"mine")
    Path("link.safetensors").hardlink_to("fine.safetensors")
    for output in ("./fine.safetensors", "link.safetensors"):
        files = ["--checkpoint", "in.safetensors", "--mix", "fine.safetensors", "--output", output]
        tune(*files, *score, status=2)
        assert "is fine.safetensors of --mix, which is read; use another file" in capsys.readouterr().err
    assert Path("fine.safetensors").read_bytes() == b"mine"


# --- Programs of others ---------------------------------------------------------------------------------------


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
