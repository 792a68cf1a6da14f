"""What a model directory says is read; what no block computes is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan.grpo.models.blocks.parts import RoutedExperts
from torchtitan.grpo.models.hf_config import ModelError, read_hf_model
from torchtitan.grpo.models.hf_weights import write_hf
from torchtitan.grpo.weight_wire.model_folder import require_undamaged

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
    "vocab_size": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_theta": 5e5,
    "eos_token_id": 3, "hidden_act": "silu",
}  # fmt: skip
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"]}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 48, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    def make(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def test_both_spellings_of_the_rotary_base_are_read(directory):
    config = {key: v for key, v in QWEN3.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e5}
    assert read_hf_model(directory(config)).model_args.rotary.theta == 7e5


def test_dense_layers_among_sparse_ones_are_read(directory):
    config = MOE | {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 3}
    layers = read_hf_model(directory(config)).model_args.layers
    assert [layer.feed_forward.has_experts for layer in layers] == [False, False, True] * 2
    none = read_hf_model(directory(MOE | {"mlp_only_layers": [0, 1]}))
    assert not none.model_args.has_experts


def test_mixture_of_experts_routes_as_the_server_does(directory):
    (layer,) = read_hf_model(directory(MOE)).model_args.layers.kinds
    assert layer.feed_forward == RoutedExperts(64, 48, num_experts=8, top_k=2, normalizes=True)
    other = {key: v for key, v in MOE.items() if key not in ("num_experts", "norm_topk_prob")}
    (layer,) = read_hf_model(directory(other | {"num_local_experts": 4})).model_args.layers.kinds
    # The other spelling; and transformers takes what is missing for false.
    assert layer.feed_forward == RoutedExperts(64, 48, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN3 | {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* not supported"),
        (QWEN3 | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (QWEN3 | {"attention_bias": True}, "attention_bias"),
        (QWEN3 | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn' is incomplete: .*original_max",
        ),
        (QWEN3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (QWEN3 | {"eos_token_id": None}, r"model\.hf_assets_path: .*eos_token_id"),
    ],
)
def test_what_no_block_computes_is_refused_by_name(directory, config, message):
    with pytest.raises(ModelError, match=message):
        read_hf_model(directory(config))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], r"holds a list where an object must be"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be a whole number .*got 10{9}"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers must be a whole number from 1 .*got -1"),
        ({"hidden_size": "64"}, r"hidden_size must be a whole number .*got '64'"),
        ({"vocab_size": None}, r"vocab_size must be a whole number .*got nothing"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps must be a number between 0 and 1"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object or null"),
        ({"architectures": {"a": 1}}, r"architecture <none> of"),
    ],
)
def test_a_broken_config_is_refused_by_name(tmp_path, repository, content, message):
    sound = json.loads((repository / "assets/reverse_digits/model/config.json").read_text())
    broken = sound | content if isinstance(content, dict) else content
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with pytest.raises(ModelError, match=message):
        read_hf_model(tmp_path)


def _files(**contents: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        for name, content in contents.items():
            name = name.replace("__", "/").replace("_json", ".json").replace("_gguf", ".gguf")
            file = folder / name
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(content)

    return prepare


BASE = '{"base_model_name_or_path": "lab/base"}'
ODD_FOLDERS = {
    "empty": (_files(), "The folder is empty"),
    "adapters": (_files(adapter_config_json=BASE), "adapters only .*base model lab/base. Merge them"),
    "adapters without a base": (_files(adapter_config_json="{}"), "base model <not named>"),
    "damaged adapters": (_files(adapter_config_json="{"), "adapters only"),
    "diffusers": (_files(model_index_json="{}", unet__config_json="{}"), "pipeline of diffusers"),
    "gguf": (_files(model_gguf="GGUF"), "GGUF files"),
    "sentence-transformers": (_files(modules_json="[]"), "sentence-transformers"),
    "one folder further": (_files(main__config_json="{}"), r"a config.json in .*/main: name that"),
    "cache of the Hub": (_files(snapshots__abc__config_json="{}"), "config.json in .*snapshots/abc"),
    "checkpoint": (_files(**{"0_0.distcp": ""}), "checkpoint.initial_load_path"),
    "author's format": (_files(**{"consolidated.safetensors": ""}), "release for transformers"),
    "pipe": (lambda folder: os.mkfifo(folder / "config.json"), "it is a pipe"),
    "pointer": (_files(config_json="version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_FOLDERS)
def test_a_folder_that_is_no_model_is_told_as_what_it_is(case, tmp_path):
    prepare, message = ODD_FOLDERS[case]
    prepare(tmp_path)
    with pytest.raises(ModelError, match=rf"model\.hf_assets_path must be .*{message}"):
        read_hf_model(tmp_path)


def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ModelError, match=r"reading .*config\.json failed: .*recursion"):
        read_hf_model(tmp_path)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "config.json", "tokenizer.json",
             "tokenizer_config.json", "model.safetensors.index.json", "generation_config.json"]
)  # fmt: skip
def test_an_export_that_has_changed_since_is_refused_with_the_file(repository, tmp_path, name):
    is_weight = name.endswith(".safetensors")
    source, target = repository / "assets/reverse_digits/model", tmp_path / "step-1"
    write_hf([("a", torch.ones(8))], source, target, torch.float32)
    read_hf_model(target)
    require_undamaged(target, "model.hf_assets_path", weights=True)
    assert read_hf_model(source).vocab_size, "a directory without checksums is taken as it is"
    content = bytearray((target / name).read_bytes())
    content[len(content) // 2] ^= 1
    (target / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"model.hf_assets_path.* changed since: .*{name}"):
        require_undamaged(target, "model.hf_assets_path", weights=is_weight)
    if not is_weight:
        with pytest.raises(ModelError, match=name):
            read_hf_model(target)
        # What a user adds is no damage.
        content[len(content) // 2] ^= 1
        (target / name).write_bytes(b" " + content)
        read_hf_model(target)
    (target / "sums_export.json").unlink()
    require_undamaged(target, "model.hf_assets_path", weights=is_weight)
