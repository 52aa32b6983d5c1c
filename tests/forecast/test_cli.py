from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from graphshard.__main__ import main
from graphshard.forecast import command
from graphshard.forecast.largest import LargestResult
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.search import PlannedRecipe, SearchResult
from graphshard.forecast.workload import (
    BatchShape,
    _period,
    config_workload,
    find_config,
    scale_config,
)


def _llama(layers: int) -> str:
    sizes = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2"
    return f"llama:{sizes},vocab_size=96,num_hidden_layers={layers}"


LLAMA = _llama(1)

HEADS = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4"


def _plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def test_text_json_and_page_have_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, page = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ["--json", str(numbers), "--html", str(page)]
    assert _plan(_llama(5), "--gpus", "16", "--batch", "2x32", *files) == 0
    out = capsys.readouterr().out
    found = json.loads(numbers.read_text())
    assert f"{found['time']['step_us'] / 1e3:,.1f} ms" in out
    assert "3 and 4 layers were traced" in out
    assert found["fits"] and found["memory"]["fits"] and found["tokens"] == 16 * 2 * 32
    assert (found["batch"], found["tokens_per_microbatch"]) == ("2x32", 2 * 32)
    kinds = ("parameters", "gradients", "optimizer", "activations", "kept", "gathered", "reducing")
    memory = found["memory"]
    assert memory["allocated"] == sum(memory[kind] for kind in kinds) + memory["buffers"]
    assert {"link", "latency", "compute", "memory bandwidth"} >= {found["binds"]}
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[0])
    assert max(g["predicted"]["peak_bytes"] for g in data["graphs"]) == memory["allocated"]
    shown = {title: rows for title, rows in ((t["title"], t["rows"]) for t in data["tables"])}
    assert dict(shown["forecast"])["bottleneck"] == found["binds"]
    activations = dict(shown["forecast"]).get("activations", "0.00 GB")
    assert activations.endswith(f"{memory['activations'] / 1e9:.2f} GB")
    assert len(shown["what would help"]) == len(found["changes"])
    for graph in data["graphs"]:
        alive = map(sum, zip(*(area["bytes"] for area in graph["memory"]["areas"])))
        assert max(alive) == graph["predicted"]["peak_bytes"]


def test_plan_accepts_model_from_script_and_hardware_from_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))\n"
        "    return model, (torch.zeros(4, 8),), {'mp_policy': None}\n"
        "def broken():\n"
        "    raise RuntimeError('no such data')\n"
        "def numbered():\n"
        "    return torch.nn.Linear(8, 8), (torch.zeros(4, 8),), {3: None}\n"
        "def uneven():\n"
        "    return torch.nn.Linear(8, 8), (torch.zeros(4, 9),)\n"
    )
    from graphshard.cost.devices import HARDWARE

    device = tmp_path / "mine.json"
    device.write_text(HARDWARE["cpu"].to_json())
    arguments = [f"{script}:make", "--gpus", "2", "--device", str(device), "--dtype", "float32"]
    assert _plan(*arguments, "--memory", "8GB") == 0
    out = capsys.readouterr().out
    assert "8 samples" in out
    assert f"options that {script}:make returns are ignored (mp_policy)" in out
    assert _plan(*arguments, "--batch", "1x4096") == 2
    assert f"--batch 1x4096: the inputs of {script}:make set the batch" in capsys.readouterr().err
    assert _plan(*arguments, "--memory", "0.4GB") == 1  # less than any process needs
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert _plan(f"{script}:broken") == 2
    error, at, _more = capsys.readouterr().err.splitlines()
    assert error == "error  RuntimeError: no such data"
    assert at == f"at     {script}:6: raise RuntimeError('no such data')"
    assert _plan(f"{script}:numbered") == 2
    error, *_ = capsys.readouterr().err.splitlines()
    assert f"{script}:numbered returned options with the key 3: keys must be names" in error
    assert _plan(f"{script}:uneven") == 2
    error, *_ = capsys.readouterr().err.splitlines()  # not preceded by a log message of torch
    assert error.startswith("error  RuntimeError: ") and "[4, 9] X [8, 8]" in error


def test_hub_names_are_looked_up_in_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--mine--tiny"
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=96,
    ).save_pretrained(repository / "snapshots/main")
    assert _plan("mine/tiny", "--batch", "1x32") == 0
    assert "mine/tiny, 0.05 million parameters" in capsys.readouterr().out
    assert _plan("mine/other", "--batch", "1x32") == 2
    assert "(hf download mine/other config.json)" in capsys.readouterr().err


def test_error_for_unknown_option_points_to_help_of_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        _plan("gpt2", "--baatch", "1x8")
    error, more = capsys.readouterr().err.splitlines()
    assert error == "error  unrecognized arguments: --baatch 1x8" and more.endswith(" plan --help")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["unheard-of"], "unknown model 'unheard-of': pass FILE.py:FUNCTION"),
        (["meta-llama/Llama-3-8B"], "did you mean llama3-8b? Otherwise download it from the Hub"),
        ([LLAMA + ",num_hidden_layers"], "must be key=value"),
        ([LLAMA + ",hiden_size=8"], "has no 'hiden_size'; did you mean 'hidden_size'?"),
        ([LLAMA, "--batch", "many"], "samples x tokens"),
        ([LLAMA, "--batch", "1x8", "--strategy", "hsdp:3"], "3 must divide the number of GPUs, 8"),
        ([LLAMA, "--batch", "1x8", "--device", "abacus"], "must be one of"),
        (["gpt2", "--batch", "1x2048"], "gpt2 has only 1024 positions for 2048 tokens"),
        (
            [f"bert:{HEADS},is_decoder=True", "--batch", "2x1024"],
            'has only 512 positions for 1024 tokens: pass --batch "2x512"',
        ),
        (
            [f"roberta:{HEADS},is_decoder=True,max_position_embeddings=514", "--batch", "1x514"],
            "has only 512 positions for 514 tokens",  # two rows of the table are for padding
        ),
        (
            [f"vit:{HEADS}", "--batch", "2x64"],
            "takes images, which have no number of tokens: pass only the number of samples, as in "
            "--batch 2",
        ),
        ([_llama(0), "--batch", "1x8"], "num_hidden_layers=0: must be at least 1"),
        (["gemma3:", "--largest"], "configuration gemma3 has no hidden_size to scale"),
        (
            ["deepseek_v3:first_k_dense_replace=8,num_hidden_layers=20", "--largest"],
            "--largest: of the 20 layers of the model that is 7168 wide, 20 differ",
        ),
        (
            [LLAMA, "--batch", "1x8", "--budget", "0.00001GB"],
            "parameters, optimizer state and other",
        ),
        ([LLAMA, "--batch", "1x8", "--recompute", "2"], "recompute=2.0: must be a number from 0"),
        (["--recompute", LLAMA], "must be a number from 0 to 1, or omitted; if this is MODEL"),
        (
            [LLAMA, "--batch", "1x8", "--recompute", "0.5", "--largest"],
            "recompute all layers (1) or none",
        ),
        (
            [LLAMA, "--batch", "1x8", "--largest", "--formula"],
            "--largest cannot be combined with --formula",
        ),
        (
            [LLAMA, "--largest", "--html", "largest.html"],
            "--largest cannot write --html: drop one of the two",
        ),
        (
            [LLAMA, "--offload", "--device", "cpu", "--memory", "1"],
            "shards are in host memory already",
        ),
        ([LLAMA, "--batch", "1x8", "--tp", "3"], "tp=3: must divide the number of GPUs, 8"),
        (
            [LLAMA, "--batch", "1x8", "--tp", "3", "--formula"],
            "error  ValueError: tp=3: must divide",
        ),
        ([LLAMA, "--batch", "1x8", "--tp", "4"], "tp=4: must divide num_key_value_heads=2"),
        ([LLAMA, "--batch", "1x7", "--tp", "2"], "tp=2: must divide the 7 tokens of a sample"),
        (["gpt2", "--batch", "1x8", "--tp", "2"], "gpt2 has no base_model_tp_plan: pass a"),
        ([LLAMA, "--tp", "2", "--dtype", "fp8"], "split parameters cannot use fp8"),
        (
            [LLAMA, "--batch", "1x8", "--device", "A100-40GB", "--dtype", "fp8"],
            'dtype="fp8": A100-40GB has no fp8; use bf16',
        ),
        ([LLAMA, "--json", "nowhere/plan.json"], "must be a file in a folder that exists"),
        (
            [LLAMA, "--batch", "1x8", "--tp", "4", "--largest"],
            "tp=4: must divide num_key_value",
        ),
        (["gpt2", "--batch", "1x8", "--tp", "2", "--search"], "gpt2 has no base_model_tp_plan: "),
        (
            [LLAMA, "--batch", "1x8", "--tp", "2", "--tp-plan", "a.py"],
            "--tp-plan a.py: must be FILE.py:FUNCTION",
        ),
        (
            [LLAMA, "--batch", "1x8", "--tp-plan", "a.py:f"],
            "--tp-plan a.py:f: needs --tp of at least 2, or --search",
        ),
        ([LLAMA, "--tp", "1", "--tp-plan", "a.py:f"], "needs --tp of at least 2, or --search"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = _plan(*arguments)
    except SystemExit as exited:  # an argument that the parser rejects
        status = int(exited.code or 0)
    (line, *_, more) = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and line.startswith("error  ") and error in line
    assert more.startswith("more   ")


def test_search_finds_fastest_recipe_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, numbers = tmp_path / "search.html", tmp_path / "search.json"
    options = ["--gpus", "8", "--batch", "1x32", "--search", "--device", "A100-40GB"]
    assert _plan(LLAMA, *options, "--html", str(page), "--json", str(numbers)) == 0
    out = capsys.readouterr().out
    assert "Not planned: fp8: A100-40GB has no fp8 matrix products" in out
    assert "Not planned: tensor parallelism: tp=4: must divide num_key_value_heads=2" in out
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[0])
    rows = next(t["rows"] for t in data["tables"] if t["title"] == "recipes that fit")
    times = [float(row[-2]) for row in rows]
    assert times == sorted(times)
    strategy, tp = rows[0][:2]
    split = {"1": "", "2": "tp 2, "}
    assert re.search(rf"^recipe +{strategy}, {split[tp]}bf16, adamw", out, re.M)
    # With tp=2, a pair of GPUs shares two samples, which fit as one microbatch.
    microbatches = {tp: {row[-3] for row in rows if row[1] == tp} for tp in split}
    assert microbatches == {"1": {"1 of 1"}, "2": {"1 of 2"}}
    found = json.loads(numbers.read_text())
    fitting = [c["step_us"] / 1e3 for c in found["candidates"] if c["fits"]]
    assert [f"{step_ms:.1f}" for step_ms in fitting] == [row[-2] for row in rows]
    assert found["candidates"][0]["recipe"] == found["recipe"] and found["refused"]


def test_search_keeps_given_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "16", "--batch", "1x32", "--device", "A100-40GB", "--search", "--tp", "2"]
    assert _plan(LLAMA, *options) == 0
    out = capsys.readouterr().out
    # The sizes in strategies count pairs of GPUs, and a node has four pairs.
    rows = set(re.findall(r"^(\w+(?::\d)?) +(\d) +bf16 ", out, re.M))
    allowed = {(strategy, "2") for strategy in ("zero3", "zero2", "hsdp:4", "hpz:4")}
    assert rows and rows <= allowed
    assert re.search(r"^recipe +[\w:]+, tp 2, bf16", out, re.M)
    assert "for 256 tokens" in out  # 8 pairs of GPUs, 32 tokens each


@pytest.mark.parametrize(
    ("mode", "result", "says"),
    [
        ("search", SearchResult((), ()), "none fits"),
        ("largest", LargestResult(()), "nothing fits"),
    ],
)
def test_exit_status_is_1_if_nothing_fits(
    mode: str, result: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(command, mode, return_value=result):
        assert _plan("gpt2", "--gpus", "8", f"--{mode}") == 1
    assert says in capsys.readouterr().out


def test_search_writes_files_if_nothing_fits(tmp_path: Path) -> None:
    page, numbers = tmp_path / "search.html", tmp_path / "search.json"
    candidate = PlannedRecipe(Recipe("zero2"), 4, step_us=2e3, memory_bytes=3 * 10**9, fits=False)
    result = SearchResult((candidate,), ("fp8: a reason",))
    with mock.patch.object(command, "search", return_value=result):
        files = ["--json", str(numbers), "--html", str(page)]
        assert _plan("gpt2", "--search", *files) == 1
    found = json.loads(numbers.read_text())
    assert found["fits"] is False and found["refused"] == ["fp8: a reason"]
    (one,) = found["candidates"]
    assert one["recipe"]["strategy"] == "zero2" and one["samples_per_microbatch"] == 4
    assert (one["step_us"], one["memory_bytes"], one["fits"]) == (2e3, 3e9, False)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[0])
    (table,) = data["tables"]
    assert [(row[0], row[-1]) for row in table["rows"]] == [("zero2", "3.0")]


def test_forecast_is_printed_before_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    shown = mock.MagicMock(as_dict=dict)
    shown.__str__.return_value = "the forecast"

    def forecast(*_: object) -> Any:
        folder.rmdir()
        return shown

    with mock.patch.object(command, "forecast", forecast), pytest.raises(SystemExit):
        _plan(LLAMA, "--json", str(folder / "plan.json"))
    out, err = capsys.readouterr()
    assert "the forecast" in out and "cannot write --json" in err


@pytest.mark.parametrize(
    "options",
    [
        ("--search", "--accumulate", "4"),
        ("--search", "--offload"),
        ("--search", "--strategy", "zero3"),
        ("--largest", "--strategy", "zero2"),
        ("--largest", "--strategy", "zero3"),
    ],
)
def test_settings_that_are_searched_are_refused(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan("gpt2", "--gpus", "8", *options) == 2
    assert f"{options[0]} chooses {options[1]} itself" in capsys.readouterr().err


def test_largest_lists_models_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "4", "--batch", "1x32768", "--device", "A100-40GB"]
    limit = 1.6  # the model itself needs 1.5 GB
    arguments += ["--memory", f"{limit}GB", "--largest"]
    assert _plan(_llama(3), *arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    # Rows of "layers and width" also begin with "layers".
    assert {row[0] for row in rows} == {"layers", "samples"}
    assert all(float(row[-1]) <= limit for row in rows)
    assert any(row[:3] == ["samples", "zero3", "1"] for row in rows)


def test_scaled_config_has_heads_of_same_size() -> None:
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
    }
    config = find_config("qwen3_moe:" + ",".join(f"{name}={size}" for name, size in sizes.items()))
    assert scale_config(config, 1, tp=3) is config
    # Heads and intermediate sizes are multiples of tp.
    for tp, expected in {1: (8, 128, 8, 4, 512, 256), 3: (6, 96, 6, 3, 384, 384)}.items():
        scaled = scale_config(config, 2, tp)
        assert tuple(getattr(scaled, name) for name in sizes) == expected


def test_scaled_config_repeats_pattern_of_layers() -> None:
    config = find_config("gemma3_text:num_hidden_layers=26")  # full attention in every sixth layer
    scaled = scale_config(config, 2)
    assert len(scaled.layer_types) == scaled.num_hidden_layers > 26
    assert _period(scaled.layer_types) == _period(config.layer_types) == 6
    config = find_config("glm_moe_dsa:num_hidden_layers=9")
    assert config.mlp_layer_types == 3 * ["dense"] + 6 * ["sparse"]
    scaled = scale_config(config, 2)
    assert scaled.mlp_layer_types == 3 * ["dense"] + (scaled.num_hidden_layers - 3) * ["sparse"]


@pytest.mark.parametrize(
    ("family", "changes", "period"),
    [
        ("llama", {}, 1),
        ("gemma3_text", {}, 6),
        ("qwen3_moe", {"decoder_sparse_step": 4}, 4),
        ("qwen3_moe", {"mlp_only_layers": [5]}, 7),
        ("deepseek_v3", {"first_k_dense_replace": 4}, 4),
        ("deepseek_v3", {"first_k_dense_replace": 5}, 12),  # only one period repeats
        ("llama4_text", {}, 4),  # lists the numbers of layers with experts, which are all
        ("smollm3", {}, 4),  # layers 3, 7, .. have no rotary embedding
    ],
)
def test_layers_of_different_structure_are_not_repeated(
    family: str, changes: dict[str, Any], period: int
) -> None:
    config = find_config(f"{family}:num_hidden_layers=12")
    for name, value in changes.items():
        setattr(config, name, value)
    assert config_workload(config, family, BatchShape(1, 32)).period == period
