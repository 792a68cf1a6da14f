# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Checks that a server serves exactly the weights of a checkpoint.

    python -m torchtitan.grpo.commands.verify --kind vllm --url http://127.0.0.1:8000 \
        --run outputs/verify --prompts assets/reverse_digits/heldout.jsonl

It compares the logprob of every token of the server's greedy completions with the logprob that
transformers computes from the run's exported checkpoint, and checks that the run pushed its
weights while requests were in flight. The exit status is 0 only if every check succeeds.
"""

import argparse
import asyncio
import io
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from torchtitan.grpo.commands.json_result import Parser
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.inference.kinds import KINDS, make_client
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.observe.summary import numbers_of
from torchtitan.grpo.system.files import check_folder, open_regular, read_regular
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.types import GenerateRequest, Generation

_NEEDED = ("server_version", "policy_version", "steps", "weight_sync_failures")


@dataclass(frozen=True)
class Check:
    what: str
    found: str
    holds: bool
    seconds: float = 0.0  # of the measurement, which checks may share


def read_summary(run: Path, *more: str) -> dict[str, Any]:
    """Reads ``summary.json`` of a finished run; ValueError if a needed key, or one of ``more``, is missing."""
    file = run / "summary.json"
    summary = read_json(file, file.read_text(errors="replace")) if file.is_file() else {}
    if missing := [key for key in (*_NEEDED, *more) if key not in summary]:
        found = "there is no such file" if not summary else f"it names no {missing[0]}"
        raise ValueError(
            f"--run must be job.dump_folder of a finished run with servers, which has written {file}, "
            f"but {found}."
        )
    return summary


def read_json(where: Path | str, text: str) -> dict[str, Any]:
    """Returns a JSON object; if the text is not one, the message of the ValueError begins with ``where``."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is damaged: it must be a JSON object.")
    return found


def read_prompts(file: Path, number: int) -> list[str]:
    with io.TextIOWrapper(
        open_regular(file), "utf-8-sig"
    ) as lines:  # a byte-order mark is passed over
        rows = [json.loads(line) for line, _ in zip(lines, range(number), strict=False)]
    for line, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ValueError(
                f"--prompts needs a text in the column prompt, got none in {file}:{line}."
            )
    return [row["prompt"] for row in rows]


def check_run(run: Path, *, want_in_flight: bool) -> list[Check]:
    summary = read_summary(run)
    file, key = run / "metrics.jsonl", "staleness/mixed_version_fraction"
    lines = enumerate(read_regular(file).decode(errors="replace").splitlines(), 1)
    records = [read_json(f"{file}:{number}", line) for number, line in lines]
    checks = [
        Check(
            "the server's version is the last step's",
            f"{summary['server_version']} of {summary['policy_version']}",
            summary["server_version"] == summary["policy_version"] == summary["steps"],
        ),
        Check(
            "no push failed",
            f"{summary['weight_sync_failures']} failures",
            summary["weight_sync_failures"] == 0,
        ),
    ]
    if want_in_flight:
        mixed = max(numbers_of(records, key), default=0.0)
        found = f"up to {mixed:.0%} of a step's rollouts span two versions"
        if mixed == 0:
            found += (
                ", so the server was idle at each push. Lower rollout.max_concurrent_rollouts, "
                "which makes it slower than the trainer"
            )
        checks.append(Check("requests were in flight while weights were pushed", found, mixed > 0))
    return checks


async def greedy_completions(
    client: InferenceClient, prompts: list[list[int]], max_new_tokens: int, wait_seconds: float
) -> list[Generation]:
    try:
        await wait_until_up([client], [], wait_seconds)
        return await asyncio.gather(
            *(
                client.generate(
                    GenerateRequest(f"verify-{i}", ids, max_new_tokens, temperature=0.0)
                )
                for i, ids in enumerate(prompts)
            )
        )
    finally:
        await client.close()


@torch.no_grad()
def compare(
    checkpoint: Path,
    prompts: list[list[int]],
    answers: list[Generation],
    known_ids: list[int],
    tolerance: float,
) -> tuple[float, int, int]:
    """Compares the server's greedy completions with transformers.

    A token counts as greedy if its logprob is less than the highest one by at most twice the tolerance.
    Only ``known_ids`` count, because a padded vocabulary has ids that no server samples. Returns the
    largest difference of a token's logprob, the number of tokens that are not greedy, and that of all tokens.
    """
    model = load_model(str(checkpoint), "cpu", "float32").eval()
    known_ids = [token for token in known_ids if token < model.config.vocab_size]
    largest, not_greedy, compared = 0.0, 0, 0
    for ids, answer in zip(prompts, answers, strict=True):
        completion = torch.from_numpy(answer.token_ids.astype("int64"))
        tokens = torch.cat([torch.tensor(ids), completion])
        logprobs = model(tokens[None]).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        of_token = logprobs.gather(1, completion[:, None])[:, 0]
        difference = (of_token - torch.from_numpy(answer.logprobs)).abs().max().item()
        largest = max(largest, difference)
        not_greedy += int((of_token < logprobs[:, known_ids].max(-1).values - 2 * tolerance).sum())
        compared += len(completion)
    return largest, not_greedy, compared


def check_server(options: argparse.Namespace) -> list[Check]:
    summary = read_summary(options.run, "hf_checkpoint")
    checkpoint = Path(summary["hf_checkpoint"])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = read_prompts(options.prompts, options.num_prompts)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    client = make_client(options.kind, options.url)
    began = time.monotonic()
    answers = asyncio.run(greedy_completions(client, prompts, options.max_new_tokens, options.wait))
    generated = time.monotonic()
    largest, not_greedy, compared = compare(
        checkpoint, prompts, answers, sorted(set(tokenizer.get_vocab().values())), options.tolerance
    )
    compared_for = time.monotonic() - generated
    versions = {segment.version for answer in answers for segment in answer.segments}
    return [
        Check(
            "completions carry the last version",
            f"{sorted(versions)}",
            versions == {summary["policy_version"]},
            generated - began,
        ),
        Check(
            f"logprobs equal transformers' within {options.tolerance:g}",
            f"largest difference {largest:.2e} over {compared} tokens of {len(prompts)} prompts",
            compared > 0 and largest <= options.tolerance,
            compared_for,
        ),
        Check(
            "every token is transformers' greedy choice",
            f"{not_greedy} of {compared} are not",
            not_greedy == 0,
            compared_for,
        ),
    ]


def main(arguments: list[str] | None, found: Found) -> int:
    parser = Parser("torchtitan-grpo verify", description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", type=Path, required=True, help="the run's dump_folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a prompt column")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--synchronous", action="store_true", help="no request was in flight")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds until the server is up")
    options = parser.parse_args(arguments)
    try:
        check_folder(read_summary(options.run).get("hf_checkpoint", ""))
        checks = check_run(options.run, want_in_flight=not options.synchronous)
        read_prompts(options.prompts, options.num_prompts)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    checks += check_server(options)
    found["checks"] = [
        {"check": c.what, "ok": c.holds, "detail": c.found, "seconds": c.seconds} for c in checks
    ]
    for check in checks:
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.what}: {check.found}")
    failed = [check.what for check in checks if not check.holds]
    if failed:
        found["error"] = f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(None, {}))
