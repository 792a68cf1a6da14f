# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How many of the texts of `tool_call_texts.jsonl` a server's own parser reads right.

    .venv-vllm/bin/python benchmarks/answer_parsers.py vllm [--cases]
    .venv-sglang/bin/python benchmarks/answer_parsers.py sglang [--cases]

The file, in `tests/unit_tests/grpo/rollout`, has what models may write. A text is read right if its
calls are those of the file, and so is the text beside them, blanks at its ends left aside. Texts with
thinking are left out: it is read before. ``--cases`` names the others. The project's own parsers read
all of them, as `test_tool_calls.py` says.
"""

import contextlib
import importlib
import io
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "tests/unit_tests/grpo/rollout/tool_call_texts.jsonl"
# vLLM's parsers want them to be tokens.
MARKS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    "<｜tool▁sep｜>",
)
PARSERS = {
    "vllm": ["hermes", "llama3_json", "qwen3_coder", "mistral", "deepseek_v31", "deepseek_v3"],
    "sglang": ["hermes", "llama3", "qwen3_coder", "mistral", "deepseekv31", "deepseekv3"],
}
FORMS = ["Hermes", "Llama 3", "Qwen3-Coder", "Mistral", "DeepSeek V3.1", "DeepSeek V3"]
Read = Callable[[str], tuple[str, list[list[Any]]]]


def form_of(one: dict[str, Any]) -> str:
    if one["form"] != "DeepSeek":
        return one["form"]
    return "DeepSeek V3" if one["case"].startswith("V3 ") else "DeepSeek V3.1"


def vllm_reader(name: str, tools: list[dict[str, Any]], texts: list[str]) -> Read:
    tokenizers = importlib.import_module("tokenizers")
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    manager = importlib.import_module("vllm.tool_parsers").ToolParserManager
    letters = sorted({letter for text in texts for letter in text})
    model = tokenizers.models.WordLevel({one: i for i, one in enumerate(letters)}, letters[0])
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_tokens([tokenizers.AddedToken(mark) for mark in MARKS])
    request = protocol.ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=tools
    )

    def read(text: str) -> tuple[str, list[list[Any]]]:
        parser = manager.get_tool_parser(name)(fast(tokenizer_object=inner), request.tools)
        found = parser.extract_tool_calls(text, request)
        calls = [one.function for one in found.tool_calls]
        return found.content or "", [[one.name, json.loads(one.arguments)] for one in calls]

    return read


def sglang_reader(name: str, tools: list[dict[str, Any]], texts: list[str]) -> Read:
    # It does not fit CPU builds of torch.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
    made = importlib.import_module("sglang.srt.function_call.function_call_parser")

    def read(text: str) -> tuple[str, list[list[Any]]]:
        parser = made.FunctionCallParser([tool(**one) for one in tools], name)
        if not parser.has_tool_call(text):
            return text, []
        rest, calls = parser.parse_non_stream(text)
        return rest, [[one.name, json.loads(one.parameters)] for one in calls]

    return read


def main() -> None:
    server, shows_cases = sys.argv[1], "--cases" in sys.argv
    logging.disable(logging.CRITICAL)
    first, *rows = map(json.loads, FILE.read_text().splitlines())
    rows = [one for one in rows if not one["text"].startswith(("<think>", "[THINK]"))]
    right, all_of = Counter[str](), Counter(map(form_of, rows))
    make = vllm_reader if server == "vllm" else sglang_reader
    for form, name in zip(FORMS, PARSERS[server], strict=True):
        read = make(name, first["tools"], [one["text"] for one in rows])
        for one in (one for one in rows if form_of(one) == form):
            found: Any = "an error"
            with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
                found = read(one["text"])
            if found[0].strip() == one["content"].strip() and found[1] == one["calls"]:
                right[form] += 1
            elif shows_cases:
                print(f"{form}: {one['case']}: {found!r:.150}")
    for form in FORMS:
        print(f"{form}: {right[form]} of {all_of[form]}")


if __name__ == "__main__":
    main()
