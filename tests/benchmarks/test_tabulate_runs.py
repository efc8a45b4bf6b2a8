"""The page of several runs, against figures by hand."""

from pathlib import Path
from typing import Any

import tabulate_runs as tool
from metricopt_ext.utils.files import write_json


def put(folder: Path, maximize: bool = True, **tests: list[float | None]) -> Path:
    def method(values: list[float | None]) -> dict[str, Any]:
        return {"test": values, "queries_total": 60, "batch_queries": 0, "seconds": 1.6}

    metric, methods = {"name": "f1", "maximize": maximize}, {name: method(values) for name, values in tests.items()}
    methods["sl_r"] = {**methods["sl_r"], "batch_queries": 900, "seconds": None}
    write_json(
        folder / "report.json", {"task": "classification/a9a", "metric": metric, "seeds": [0, 1, 2], "methods": methods}
    )
    return folder


def rows(page: str) -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]


def test_each_method_is_paired_with_the_best_of_the_others(tmp_path: Path) -> None:
    # Differences of cma_es from metricopt: 0.1, 0.2, 0.3; t of two degrees of freedom is 4.303 at 95%.
    run = put(tmp_path / "run", metricopt=[0.5, 0.5, 0.5], cma_es=[0.6, 0.7, 0.8], sl_r=[0.4, None, 0.4])
    page = tool.tabulate([run])
    assert page.startswith("## run: classification/a9a, f1 (higher is better)\n\n3 seeds.\n")
    table = {row[0]: row[1:] for row in rows(page)}
    half = 4.3027 * 0.1 / 3**0.5
    interval = f"[{0.2 - half:+.4f}, {0.2 + half:+.4f}]"
    assert table["CMA-ES on the metric"] == ["**0.7000 ±0.1000**", f"+0.2000 {interval} MetricOpt", "60", "", "2"]
    assert table["MetricOpt"][1].startswith("-0.2000 [")
    assert table["MetricOpt"][1].endswith("CMA-ES on the metric")
    assert table["SL, refined surrogate"][0] == "0.4000 ±0.0000"
    assert table["SL, refined surrogate"][2:] == ["60", "900", ""]
    few = rows(tool.tabulate([run], ["metricopt", "sl_r"]))
    assert [row[0] for row in few] == ["method", "---", "MetricOpt", "SL, refined surrogate"]
