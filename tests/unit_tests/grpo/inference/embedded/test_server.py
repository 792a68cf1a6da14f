# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests to the embedded server as a process, over HTTP."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
import torch
from embedded_process import (
    EOS,
    TIMEOUT,
    Client,
    Server,
    Trainer,
    assert_serves,
    make_model,
    reference_logprobs,
    serve_weights,
    served_logprobs,
    weights_of,
)
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from torchtitan.grpo.config import Judge as JudgeSettings
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.rewards.judge import Judge
from torchtitan.grpo.rewards.reward_loading import RewardLog
from torchtitan.grpo.system.child import stop_children
from torchtitan.grpo.weight_wire.process_group import destroy_weight_group


async def test_an_answer_has_the_dialects_shape_and_exact_logprobs(client: Client) -> None:
    await serve_weights(client, make_model(1), "shape")
    await assert_serves(client, make_model(1), [1, 2, 3])
    answer = await client.generate([1, 2, 3], rid="my-id")
    meta = answer["meta_info"]
    assert meta["id"] == "my-id"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 8)
    assert meta["weight_version"] == "shape"
    assert meta["weight_versions"] == [{"version": "shape", "start": 0, "end": 8}]
    info = await client.get("/server_info")
    assert info["embedded"] is True and info["version"].startswith("0.5.")


async def test_prompt_logprobs_have_sglangs_form_and_need_no_new_token(client: Client) -> None:
    await serve_weights(client, make_model(1), "prompt")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 40  # longer than the logits kept at once
    for start in (0, 5):
        answer = await client.generate(
            prompt, logprob_start_len=[start], sampling={"max_new_tokens": 0}
        )
        assert answer["output_ids"] == []
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt[start:]
        assert (entries[0][0] is None) == (start == 0)
        served = torch.tensor([entry[0] for entry in entries[1:]])
        expected = reference_logprobs(make_model(1), prompt[:1], prompt[1:])[start:]
        torch.testing.assert_close(served, expected, atol=1e-4, rtol=0)
    answer = await client.generate(prompt)
    assert "input_token_logprobs" not in answer["meta_info"]


async def test_a_completion_stops_at_the_models_own_eos(client: Client) -> None:
    sampling = {"max_new_tokens": 500, "ignore_eos": False}
    answers = await client.generate([[i] for i in range(8)], sampling=sampling)
    stopped = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    for answer in stopped:
        assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
        assert answer["meta_info"]["finish_reason"]["matched"] == EOS


LONG = {"max_new_tokens": 4000}


async def test_a_running_request_is_aborted_by_its_rid_alone(client: Client) -> None:
    first = asyncio.create_task(client.generate([1], rid="first", sampling=LONG))
    second = asyncio.create_task(client.generate([2], rid="second", sampling=LONG))
    await client.until(lambda info: info["num_running"] == 2)
    assert "unique" in await client.refused("/generate", input_ids=[1], rid="first")
    await client.post("/abort_request", rid="fir")
    answer = await first
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(served_logprobs(answer)) == len(answer["output_ids"]) > 0
    assert not second.done()
    await client.post("/abort_request", abort_all=True)
    assert (await second)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_client_that_goes_away_frees_its_row(client: Client) -> None:
    task = asyncio.create_task(client.generate([1], sampling=LONG))
    await client.until(lambda info: info["num_running"] == 1)
    task.cancel()
    info = await client.until(lambda info: info["num_running"] == 0)
    before = info["num_tokens"]
    await client.generate([1], sampling={"max_new_tokens": 1})
    assert (await client.get("/server_info"))["num_tokens"] == before + 1


async def test_pause_keeps_requests_and_probes_tell_it_from_death(client: Client) -> None:
    await client.post("/pause_generation", mode="retract")
    task = asyncio.create_task(client.generate([1, 2]))
    await client.until(lambda info: info["num_waiting"] == 1)
    assert (await client.call("GET", "/health"))[0] == 200
    assert (await client.call("GET", "/ready"))[0] == 503
    await client.post("/continue_generation")
    assert len((await task)["output_ids"]) == 8
    assert (await client.call("GET", "/ready"))[0] == 200


async def test_sigterm_answers_those_who_wait(model_path: str, tmp_path: Path) -> None:
    """While a request runs and a broadcast is awaited."""
    server = Server(tmp_path, model_path)
    try:
        await asyncio.to_thread(server.wait)
        client = Client(server.url)
        trainer = await Trainer(client).__aenter__()
        await client.post("/begin_weight_update")
        chunk = trainer.describe(weights_of(make_model(3)))
        waiting = asyncio.create_task(
            client.call("POST", "/update_weights_from_distributed", chunk)
        )
        running = asyncio.create_task(client.generate([1], sampling=LONG))
        await client.until(lambda info: info["num_tokens"] > 10)
        server.process.send_signal(signal.SIGTERM)
        answer = await running
        assert "shutting down" in answer["meta_info"]["finish_reason"]["message"]
        assert await asyncio.to_thread(server.process.wait, TIMEOUT) == 0
        # Answered, or cut off: either way it does not hang.
        await asyncio.wait_for(asyncio.wait([waiting]), TIMEOUT)
        waiting.exception()
        destroy_weight_group(trainer.group)
    finally:
        stop_children([server.process])
    assert "Traceback" not in server.log.read_text()


def test_a_directory_without_a_model_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--model-path must be .* {tmp_path}/config.json failed"):
        load_model(str(tmp_path), "cpu", "float32")


CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}={% endfor %}{% if add_generation_prompt %}{{ '?' if bold else '>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_path(model_path: str) -> str:
    """The module's model, whose tokenizer has a token for each character and a chat template."""
    tokenizer = Tokenizer.from_file(f"{model_path}/tokenizer.json")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(f"{model_path}/tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    Path(model_path, "tokenizer_config.json").write_text(json.dumps(config))
    return model_path


def ids_of(text: str) -> list[int]:
    return [ord(character) - ord("0") for character in text]


@pytest.mark.parametrize(
    ("contents", "more", "text"),
    [
        (["12"], {}, "12=>"),
        (["12", "3", "4"], {"model": "any", "stream": False}, "12=3=4=>"),
        (["A"], {"chat_template_kwargs": {"bold": True}, "top_p": 0.9}, "A=?"),
    ],
)
async def test_chat_is_answered_in_the_chat_template(
    client: Client, chat_path: str, contents, more, text
) -> None:
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    greedy = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": False}
    expected = await client.generate(ids_of(text), sampling=greedy)
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"messages": messages, "temperature": 0.0, name: 6, **more}
        answer = await client.post(CHAT, **body)
        (choice,) = answer["choices"]
        ids = ids_of(choice["message"]["content"])
        assert ids == [token for token in expected["output_ids"] if token != EOS]
        assert choice["finish_reason"] == expected["meta_info"]["finish_reason"]["type"]
        assert answer["usage"]["prompt_tokens"] == len(text)
        assert (answer["object"], answer["model"]) == ("chat.completion", chat_path)


USER = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": USER, "stream": True}, "stream"), ({"messages": USER, "n": 2}, "unknown field `n`"),
        ({"messages": USER, "tools": []}, "unknown field `tools`"), ({}, "messages"),
        ({"messages": [{"role": "system", "content": "1"}]}, "cannot render messages: no system"),
        ({"messages": USER, "max_tokens": 5000}, "must be at most 4096 tokens"),
        ({"messages": USER, "temperature": -1}, "temperature"), ({"messages": "hello"}, "messages"),
    ],
)  # fmt: skip
async def test_chat_that_cannot_be_answered_is_refused_by_its_field(
    client: Client, chat_path: str, body, said
) -> None:
    assert said in await client.refused(CHAT, **body)


async def test_the_server_can_judge(client: Client, chat_path: str) -> None:
    options = {"temperature": 0.0, "max_tokens": 8}
    settings = JudgeSettings(
        url=f"{client.url}/v1",
        model="m",
        template="{completion}",
        retries=0,
        score="(.)",
        options=options,
    )
    log = RewardLog(2)
    judge = Judge(settings, TIMEOUT)
    await judge(["?", "?"], ["1", "2"], log.log_metric, log.log_extra)
    await judge._http.close()
    sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": False}
    for number, text in zip("12", log.extra["judge"], strict=True):
        expected = await client.generate(ids_of(f"{number}=>"), sampling=sampling)
        text = text.removesuffix(" (cut: 'length')")
        assert ids_of(text) == [token for token in expected["output_ids"] if token != EOS]
