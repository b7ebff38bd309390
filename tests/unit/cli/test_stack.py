"""From options to command lines."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from baton.cli.stack import STOP_ORDER, Options, etcd_spec, service_specs, shared_cores, up_flags


def flags(command: tuple[str, ...]) -> dict[str, str]:
    """--flag value pairs of a service's command."""
    rest = command[3:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_default_run_has_one_of_each_and_the_frontend_last() -> None:
    specs = service_specs(Options(), "/m.gguf", "127.0.0.1:2379")
    assert [spec.name for spec in specs] == ["router", "kvstore", "prefill-1", "decode-1", "merged-1", "frontend"]
    for spec in specs:
        assert spec.command[1:3] == ("-m", f"services.{spec.role}")
        assert flags(spec.command)["--etcd"] == "127.0.0.1:2379"
    assert flags(specs[-1].command)["--port"] == "8000"
    assert flags(specs[2].command)["--model"] == "/m.gguf"
    assert {spec.role for spec in specs} | {"etcd"} == set(STOP_ORDER)


def test_counts_cores_and_names_reach_the_workers() -> None:
    options = Options(prefill=2, decode=1, merged=0, cores=(0, 3), served_name="m", dtype="float32", fallback="strict")
    specs = {spec.name: flags(spec.command) for spec in service_specs(options, "/m", "e:1")}
    assert set(specs) == {"router", "kvstore", "prefill-1", "prefill-2", "decode-1", "frontend"}
    assert [specs[name]["--core"] for name in ("prefill-1", "prefill-2", "decode-1")] == ["0", "3", "0"]
    assert {specs[n]["--served-name"] for n in ("prefill-1", "decode-1", "frontend")} == {"m"}
    assert specs["decode-1"]["--dtype"] == "float32"
    assert specs["frontend"]["--fallback"] == "strict"


def test_vllm_workers_run_in_an_environment_of_their_own() -> None:
    specs = service_specs(Options(engine="vllm"), "/m", "e:1", "/vllm/bin/python")
    theirs = {spec.name: spec for spec in specs if spec.command[0] == "/vllm/bin/python"}
    assert set(theirs) == {"prefill-1", "decode-1", "merged-1"}
    assert {flags(spec.command)["--engine"] for spec in theirs.values()} == {"vllm"}
    assert not any("--engine" in flags(spec.command) for spec in specs if spec.name not in theirs)
    assert all("--engine" not in spec.command for spec in service_specs(Options(), "/m", "e:1"))


def test_everything_listens_on_the_loopback_only() -> None:
    command = etcd_spec("etcd", "/data", 2379, 2380).command
    urls = [word for word in command if "://" in word]
    assert len(urls) == 5
    assert all("://127.0.0.1:" in url for url in urls)


def test_differences_are_told_in_flags() -> None:
    saved = json.loads(json.dumps(asdict(Options(cores=(0, 1)))))
    assert Options(cores=(0, 1)).differences(saved) == []
    assert Options(decode=2, model="/m").differences(saved) == [
        "--model default -> /m",
        "--decode 1 -> 2",
        "--cores 0,1 -> none",
    ]
    saved |= {"cores": [], "settings": {"BATON_HOST": "h"}}
    assert Options(settings={"BATON_POOL_GIB": "2"}).differences(saved) == [
        "BATON_POOL_GIB default -> 2",
        "BATON_HOST h -> default",
    ]


def test_the_flags_that_start_a_run_again() -> None:
    assert up_flags(json.loads(json.dumps(asdict(Options())))) == []
    saved = Options(model="/m", http_port=0, decode=2, cores=(0, 1), settings={"BATON_POOL_GIB": "2"})
    flags = up_flags(json.loads(json.dumps(asdict(saved))))
    assert flags == ["--model", "/m", "--http-port", "0", "--decode", "2", "--cores", "0,1"]


def test_prefill_workers_may_have_a_chunk_size_of_their_own() -> None:
    def chunks(options: Options) -> list[str]:
        specs = service_specs(options, "/m", "e:1")
        return [flags(s.command)["--chunk-tokens"] for s in specs if s.role in ("prefill", "decode", "merged")]

    assert chunks(Options(chunk_tokens=64)) == ["64", "64", "64"]
    assert chunks(Options(chunk_tokens=64, prefill_chunk_tokens=256)) == ["256", "64", "64"]


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        (Options(merged=0, cores=(0, 1)), {0, 2, 3}),  # prefill on 0, decode on 1
        (Options(merged=0, prefill=2, cores=(0, 1, 2)), {0, 1, 3}),
        (Options(merged=1, cores=(0, 1)), {0, 2, 3}),  # the merged one shares core 0 with the prefill
        (Options(merged=0, cores=(0,)), set()),  # no core only streams
        (Options(merged=2, prefill=0, decode=0, cores=(0, 1)), set()),
        (Options(merged=0), set()),
        (Options(merged=0, cores=(0, 1), engine="vllm"), set()),
    ],
)
def test_everything_but_engines_keeps_off_the_cores_of_streams(options: Options, shared: set[int]) -> None:
    assert shared_cores(options, {0, 1, 2, 3}) == shared
