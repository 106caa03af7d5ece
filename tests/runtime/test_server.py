"""The OpenAI-compatible server (and the asynchronous engine below it) refuses by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.nightly]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("vllm")
    from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("server")
    model = make_tiny_model(folder / "model")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    arguments = {
        "--model": str(model),
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--max-model-len": "128",
        "--max-num-batched-tokens": "64",
        "--max-num-seqs": "4",
        "--block-size": "32",
        "--generation-config": "vllm",
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(x for pair in arguments.items() for x in pair),
            *flags,
        ],
        env={
            **clean,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PATCHKIT_ENABLE": "1",
            "PATCHKIT_ADAPTER": "qwen3_moe",
            "PATCHKIT_RUN_DIR": str(folder / "attestations"),
        },
        stdout=log,
        stderr=log,
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 200
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield url, folder
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def post(url: str, path: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def generate(url: str, **changes) -> tuple[int, dict]:
    sampling = {"temperature": 1.0, "max_tokens": 4, "logprobs": 0, "detokenize": False}
    body = {"model": "m", "token_ids": [5, 6, 7], "sampling_params": {**sampling, **changes}}
    return post(url, "/inference/v1/generate", body)


def test_what_is_covered_is_served(server):
    status, answer = generate(server[0])
    assert status == 200, answer
    assert len(answer["choices"][0]["token_ids"]) == 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias"),
    ],
)
def test_what_is_not_is_a_client_error_that_names_it(server, changes, field):
    status, answer = generate(server[0], **changes)
    assert status == 400
    assert f"SamplingParams.{field}" in answer["error"]["message"]
    assert generate(server[0])[0] == 200, "the server goes on"


def test_the_completions_endpoint_too(server):
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.7}
    status, answer = post(server[0], "/v1/completions", body)
    assert status == 400
    assert "SamplingParams.temperature" in answer["error"]["message"]


def test_each_process_attested(server):
    names = {p.name.rsplit("-", 1)[0] for p in Path(server[1], "attestations").iterdir()}
    assert names == {"driver-0", "engine-core-0", "worker-0"}
