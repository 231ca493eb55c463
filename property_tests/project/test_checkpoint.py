"""Models on disk: what loads gives the same logits in every form, and what does not says why."""

import json
import re
import struct
import sys
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddtree.kdtr import KdtrError, KdtrFile, read_kdtr, write_kdtr
from ddtree.model import (
    DeepseekV3,
    ModelConfig,
    Yarn,
    deepseek_v3,
    golden_bundle,
    load_model,
    random_weights,
    save_bundle,
)
from ddtree.property_tests.compare import assert_close, assert_same
from ddtree.property_tests.project.fuzz.targets import tiny_models
from ddtree.protocols import KVCache
from ddtree.trees import chain_tree

BUNDLE = golden_bundle("router_groups")
FUSED = "mlp.experts.gate_up_proj"


def bundle_parts(path=BUNDLE):
    """Configuration and weights of a bundle, experts fused as they are there."""
    arrays, metadata = read_kdtr(path)
    return ModelConfig.from_dict(json.loads(metadata["config"])), {k: v for k, v in arrays.items() if "/" not in k}


def split_experts(weights):
    """The hub's names: three matrices an expert."""
    split = {}
    for name, tensor in weights.items():
        if ".mlp.experts." not in name:
            split[name] = tensor
            continue
        prefix = name.rpartition(".")[0]
        for e, matrix in enumerate(tensor):
            parts = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
            for part, rows in (parts if name.endswith(FUSED) else {"down_proj": matrix}).items():
                split[f"{prefix}.{e}.{part}.weight"] = np.ascontiguousarray(rows)
    return split


def write_folder(folder, weights, config, shards=1):
    """A folder as ``save_pretrained`` leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(names.values()):
        save_file({name: weights[name] for name in names if names[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def logits(model):
    ids = read_kdtr(BUNDLE)[0]["golden/prompt"][None]
    return model.forward(
        chain_tree(ids), KVCache(model.new_cache(1, ids.size), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    ).logits


def load(path, **options):
    return load_model(path, **{"dtype": "float64", "backend": "reference"} | options)


# What loads


class Watched(Mapping[str, Any]):
    """Weights of which each is made when it is read; knows how often that was, and the most bytes at a time."""

    def __init__(self, weights):
        self.reads: Counter[str] = Counter()
        self.weights, self.alive, self.most = weights, 0, 0

    def __getitem__(self, name):
        tensor = self.weights[name].copy()
        weakref.finalize(tensor, self.gone, tensor.nbytes)
        self.reads[name] += 1
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        return tensor

    def gone(self, size):
        self.alive -= size

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)

    def __contains__(self, name):
        return name in self.weights


@pytest.mark.parametrize("layout", [dict, split_experts], ids=["fused", "split"])
def test_each_tensor_is_read_once_and_no_two_large_ones_are_held(layout):
    config, weights = bundle_parts()
    watched = Watched(layout(weights))
    model = DeepseekV3(config, watched, dtype="float64", backend="reference")
    assert set(watched.reads.values()) == {1}
    assert set(watched.reads) == set(watched.weights)
    largest, *others = sorted((w.nbytes for w in watched.weights.values()), reverse=True)
    assert sum(others) > 4 * largest
    assert watched.most < 1.5 * largest
    assert watched.alive == 0
    assert_same(logits(model), logits(load(BUNDLE)))


@pytest.mark.parametrize("piece", [1, 1000, 1 << 26])
def test_tensors_are_converted_in_pieces_of_any_size(monkeypatch, piece):
    expected = logits(load(BUNDLE))
    monkeypatch.setattr(deepseek_v3, "PIECE", piece)
    assert_same(logits(load(BUNDLE)), expected)


def test_a_shared_expert_of_several_times_the_size_is_several_experts():
    """As in the largest published models: the sum over its inner rows is that of its parts."""
    settings = bundle_parts()[0].to_dict() | {"n_shared_experts": 3}
    config = ModelConfig.from_dict(settings)
    weights = dict(random_weights(config, 5, std=0.2))
    gates = [name for name in weights if ".shared_experts.gate_proj" in name]
    assert gates
    whole = logits(DeepseekV3(config, weights, dtype="float64", backend="reference"))
    rng = np.random.default_rng(0)
    for gate in gates:  # in another order, the inner rows are the same layer
        order = rng.permutation(len(weights[gate]))
        for part in ("gate", "up", "down"):
            name = gate.replace("gate_proj", f"{part}_proj")
            weights[name] = weights[name][:, order] if part == "down" else weights[name][order]
    shuffled = logits(DeepseekV3(config, weights, dtype="float64", backend="reference"))
    assert_close(shuffled, whole, row=("model", "float64"), scale=np.abs(whole).max())
    weights[gates[0]] = weights[gates[0]] * np.float32(2)
    assert np.abs(logits(DeepseekV3(config, weights, dtype="float64", backend="reference")) - whole).max() > 1e-3


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.experts.gate_up_proj"])
def test_a_model_that_has_no_room_says_which_tensor_and_how_much(monkeypatch, name):
    config, weights = bundle_parts()
    shape = {"lm_head.weight": (config.vocab_size, config.hidden_size)}.get(
        name, (config.n_routed_experts + config.n_shared_experts, 2 * config.moe_intermediate_size, config.hidden_size)
    )
    tensors, empty = Watched(weights), np.empty

    def full(wanted, dtype=float, **options):
        if tuple(np.atleast_1d(wanted)) == shape and tensors.reads[name]:
            raise MemoryError
        return empty(wanted, dtype, **options)

    monkeypatch.setattr(np, "empty", full)
    needed = f"{8 * np.prod(shape):,}"
    with pytest.raises(MemoryError, match=rf"^{re.escape(name)} needs {needed} bytes on the host, and [\d,]+ are free"):
        DeepseekV3(config, tensors, dtype="float64", backend="reference")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", [dict, split_experts], ids=["fused", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_form_of_a_folder_gives_the_bundles_logits(tmp_path, layout, dtype, shards):
    config, weights = bundle_parts()
    cast = {name: w.astype(dtype) for name, w in layout(weights).items()}
    folder = write_folder(tmp_path / "model", cast, config.to_dict(), shards)
    assert_same(logits(load(folder)), logits(load(BUNDLE)))
    assert_same(logits(load(folder, dtype="float32")), logits(load(BUNDLE, dtype="float32")))


def test_float16_weights_are_taken_as_they_are(tmp_path):
    """bfloat16 values beyond float16's range or grid would round: what counts is the file's own values."""
    config, weights = bundle_parts()
    half = {name: w.astype(np.float16) for name, w in weights.items()}
    exact = {name: w.astype(np.float64) for name, w in half.items()}
    expected = logits(DeepseekV3(config, exact, dtype="float64", backend="reference"))
    assert_same(logits(load(write_folder(tmp_path / "model", half, config.to_dict()))), expected)


def test_mixed_layouts_and_what_is_passed_over(tmp_path):
    """A layer's experts fused, another's not; prediction layers and old rotary buffers beside them."""
    config, weights = bundle_parts()
    split = split_experts(weights)
    mixed = {k: v for k, v in weights.items() if "layers.2." not in k} | {
        k: v for k, v in split.items() if "layers.2." in k
    }
    mixed["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    mixed["model.layers.3.enorm.weight"] = np.ones(48, np.float32)
    settings = config.to_dict() | {"num_nextn_predict_layers": 1}
    assert_same(logits(load(write_folder(tmp_path / "model", mixed, settings))), logits(load(BUNDLE)))
    with pytest.raises(ValueError, match=r"have no place for model\.layers\.3\.enorm\.weight"):
        load(write_folder(tmp_path / "model", mixed, settings | {"num_nextn_predict_layers": 0}))


def test_tied_embeddings(tmp_path):
    config, weights = bundle_parts()
    settings = config.to_dict() | {"tie_word_embeddings": True}
    head = weights.pop("lm_head.weight")
    tied = logits(load(write_folder(tmp_path / "model", weights, settings)))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert_same(logits(load(write_folder(tmp_path / "model", weights, settings))), tied)
    untied = logits(load(write_folder(tmp_path / "model", weights, config.to_dict())))
    assert_same(untied, tied)
    weights["lm_head.weight"] = head
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load(write_folder(tmp_path / "model", weights, settings))


def test_bundle_round_trip_keeps_weights_and_what_goes_with_them(tmp_path):
    config, weights = bundle_parts()
    path = tmp_path / "model.kdtr"
    save_bundle(path, config, split_experts(weights), extra={"notes/ids": np.arange(3)}, metadata={"made": "here"})
    assert_same(logits(load(path)), logits(load(BUNDLE)))
    with KdtrFile(path) as bundle:
        assert bundle.metadata["made"] == "here"
        assert bundle["notes/ids"].tolist() == [0, 1, 2]
        assert bundle["model.norm.weight"].dtype == ml_dtypes.bfloat16


# Configurations


def test_configuration_round_trip():
    config, _ = bundle_parts(golden_bundle("yarn"))
    assert config.yarn == Yarn(4.0, 64, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_both_generations_of_rope_settings_mean_the_same():
    config, _ = bundle_parts(golden_bundle("yarn"))
    old = config.to_dict()
    rope = old.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "scoring_func": "sigmoid", "moe_layer_freq": 1}
    assert ModelConfig.from_dict(old) == config
    assert ModelConfig.from_dict(old | {"rope_scaling": None, "eos_token_id": [1, 7]}).yarn is None
    assert ModelConfig.from_dict(old | {"eos_token_id": [1, 7]}).eos_token_ids == (1, 7)


def test_yarn_by_hand():
    """At factor e⁴ a weight of 1 gives 0.1 · 4 + 1 = 1.4, and 0.5 gives 1.2."""
    config, _ = bundle_parts(golden_bundle("yarn"))
    settings = config.to_dict()

    def with_rope(**rope):
        return ModelConfig.from_dict(settings | {"rope_parameters": {"rope_type": "yarn", "factor": np.e**4} | rope})

    bare = with_rope()
    assert bare.attention_factor == pytest.approx(1.4)
    assert bare.attention_scale == pytest.approx(24**-0.5)
    assert bare.yarn.original_max_position_embeddings == 256
    both = with_rope(mscale=1.0, mscale_all_dim=0.5)
    assert both.attention_factor == pytest.approx(1.4 / 1.2)
    assert both.attention_scale == pytest.approx(24**-0.5 * 1.2**2)
    assert with_rope(mscale=1.0, attention_factor=0.9).attention_factor == 0.9


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_bias": True}, "attention_bias must be False, got True"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
    ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    ({"model_type": "llama"}, "model_type must be 'deepseek_v3' or 'kimi_k2', got 'llama'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8' are not supported"),
    ({"num_key_value_heads": 1}, "num_key_value_heads must equal num_attention_heads = 4"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "must be 'default' or 'yarn', got 'linear'"),
    ({"rope_parameters": 5}, "rope_parameters must be null or an object of settings, got 5"),
    ({"rope_scaling": "abc"}, "rope_scaling must be null or an object of settings, got 'abc'"),
    ({"eos_token_id": "abc"}, "eos_token_id must be a token id from 0 to .* got 'abc'"),
    ({"eos_token_id": {"a": 1}}, "eos_token_id must be a token id from 0 to .* got {'a': 1}"),
    ({"eos_token_id": [1, None]}, "eos_token_id must be a token id from 0 to .* got None"),
    ({"eos_token_id": -7}, "eos_token_id must be a token id from 0 to .* got -7"),
    ({"eos_token_id": 1.5}, "eos_token_id must be a token id from 0 to .* got 1.5"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, .* must ask for at most 1,048,576 tensors"),
    ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers = 1000000000 .* must ask for at most 1,048,576"),
    ({"n_routed_experts": 10**9}, "n_routed_experts = 1000000000 must ask for at most 1,048,576 tensors"),
    ({"hidden_size": 10**400}, "hidden_size must be an integer of at least 1 and at most 2.53, got 1000"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ({"kv_lora_rank": None}, "the configuration lacks kv_lora_rank"),
    ({"hidden_size": 0}, "hidden_size must be an integer of at least 1 and at most 2.53, got 0"),
    ({"hidden_size": 48.0}, "hidden_size must be an integer of at least 1 and .* got 48.0"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0 and .* got -1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a number above 0 and at most 2.53, got 0.0"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
    ({"n_group": 5}, "n_group must part n_routed_experts = 12 into equal groups of 2 experts or more, got 5"),
    ({"n_group": 12}, "n_group must part n_routed_experts = 12"),
    ({"topk_group": 5}, "topk_group must be at most n_group = 4, got 5"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok must be at most 6, the experts in topk_group = 2 groups, got 7"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_configurations_that_are_refused(change, message):
    config, _ = bundle_parts()
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        ModelConfig.from_dict(config.to_dict() | change)


YARN: dict[str, list[Any]] = {
    "factor": [0.5, "x", 1e308],
    "original_max_position_embeddings": [0, "x", []],
    "beta_fast": [-1, 0, 2**70, 1e308],
    "beta_slow": [-1, 0, True],
    "mscale": [-1, "x", 1e308],
    "mscale_all_dim": [-1, "x", 1e308, {}],
    "attention_factor": [0, "x", 1e308],
    "rope_theta": [1, 0, [], "x"],
    "truncate": ["0", 1, []],
    "rope_type": [[], 1, ""],
    "partial_rotary_factor": [0, [], "1"],
}


@pytest.mark.parametrize("key, value", [(key, value) for key in YARN for value in [*YARN[key], np.nan]])
def test_yarn_settings_that_are_refused(key, value):
    config, _ = bundle_parts(golden_bundle("yarn"))
    settings = config.to_dict()
    for dropped in ({}, {"factor": None}):  # a factor that is left out follows from the lengths
        rope = settings["rope_parameters"] | dropped | {key: value}
        with pytest.raises(ValueError, match=rf"^{key} .*must be .*got "):
            ModelConfig.from_dict(settings | {"rope_parameters": rope})


# What does not load


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_a_configuration_that_is_no_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"config\.json is not JSON that can be read: "):
        load(tmp_path)
    write_kdtr(tmp_path / "bundle.kdtr", {}, {"config": text.decode(errors="replace")})
    with pytest.raises(ValueError, match=r"bundle\.kdtr: metadata 'config' is not JSON that can be read: "):
        load(tmp_path / "bundle.kdtr")


def test_a_refused_setting_is_named_with_its_file(tmp_path):
    config, weights = bundle_parts()
    settings = config.to_dict() | {"num_hidden_layers": 10**9}
    with pytest.raises(ValueError, match=r"config\.json: num_hidden_layers = 1000000000"):
        load(write_folder(tmp_path / "model", weights, settings))
    write_kdtr(tmp_path / "bundle.kdtr", {}, {"config": json.dumps(settings)})
    with pytest.raises(ValueError, match=r"bundle\.kdtr: metadata 'config': num_hidden_layers = 1000000000"):
        load(tmp_path / "bundle.kdtr")


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", ">f4"])
def test_weights_that_are_not_finite_are_named(tmp_path, dtype, value):
    config, weights = bundle_parts()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights[name] = weights[name].astype(dtype)
    save_bundle(tmp_path / "model.kdtr", config, weights)
    weights[name][3] = value
    message = rf"{name} holds NaN or infinity, weights must be finite".replace(".", r"\.")
    with pytest.raises(ValueError, match=message):
        save_bundle(tmp_path / "model.kdtr", config, weights)
    write_kdtr(tmp_path / "model.kdtr", weights, {"config": json.dumps(config.to_dict())})
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model.kdtr")
    if dtype != ">f4":
        with pytest.raises(ValueError, match=message):
            load(write_folder(tmp_path / "model", weights, config.to_dict()))


def test_wrong_tensors_are_named():
    config, weights = bundle_parts()
    norm, bias = "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"

    def make(changed):
        return DeepseekV3(config, changed, backend="reference")

    with pytest.raises(ValueError, match=r"the weights lack lm_head\.weight, model\.norm\.weight$"):
        make({k: v for k, v in weights.items() if k not in (norm, "lm_head.weight")})
    with pytest.raises(ValueError, match=r"no place for a, b, c, d and 1 more"):
        make(weights | dict.fromkeys("abcde", weights[norm]))
    with pytest.raises(ValueError, match=r"e_score_correction_bias must have shape \(12,\) .* got \(11,\)"):
        make(weights | {bias: weights[bias][:11]})
    with pytest.raises(TypeError, match=r"model\.norm\.weight must be one of float16, .* got int8"):
        make(weights | {norm: weights[norm].astype(np.int8)})
    # one expert of a split layer
    lost = split_experts(weights)
    del lost["model.layers.2.mlp.experts.11.up_proj.weight"]
    with pytest.raises(ValueError, match=r"the weights lack model\.layers\.2\.mlp\.experts\.11\.up_proj\.weight$"):
        make(lost)


def test_quantised_tensors_in_a_folder_are_refused(tmp_path):
    config, weights = bundle_parts()
    folder = write_folder(tmp_path / "model", weights, config.to_dict())
    raw = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    # the same bytes as twice as many of one byte each
    entry = header["model.norm.weight"]
    entry |= {"dtype": "F8_E4M3", "shape": [2 * entry["shape"][0]]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight in model\.safetensors must be .* got F8_E4M3: quantised"
    ):
        load(folder)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_damaged_folders_are_named(tmp_path):
    config, weights = bundle_parts()
    folder = write_folder(tmp_path / "model", weights, config.to_dict(), shards=2)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = "model.norm.weight"
    held = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = {first: second, second: first}[held[name]]

    edit_index(folder, lambda names: names.update({name: other}))
    with pytest.raises(ValueError, match=rf"places {name} in {other}, which does not hold it"):
        load(folder)
    for place in ("../elsewhere.safetensors", "..", "", "config.json", "\ud800.safetensors", "\0.safetensors", 5):
        edit_index(folder, lambda names: names.update({name: place}))  # noqa: B023 - called at once
        message = rf"must place {name} in a \.safetensors file of its own folder, got "
        with pytest.raises(ValueError, match=message + re.escape(repr(place))):
            load(folder)
    edit_index(folder, lambda names: names.update({name: "absent.safetensors"}))
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        load(folder)
    edit_index(folder, lambda names: names.clear())
    with pytest.raises(ValueError, match=r"must have a 'weight_map' from tensors to files, got \{\}"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"not a header at all")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, got list"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(folder)


def test_the_index_chooses_between_shards_that_hold_the_same_tensor(tmp_path):
    config, weights = bundle_parts()
    folder = write_folder(tmp_path / "model", weights, config.to_dict(), shards=2)
    name = "model.norm.weight"
    for chosen, other in ((1, 2), (2, 1)):
        for number, values in ((chosen, weights[name]), (other, weights[name] * 2)):
            path = folder / f"model-0000{number}-of-00002.safetensors"
            save_file(load_file(path) | {name: values.astype(weights[name].dtype)}, path)
        edit_index(folder, lambda names: names.update({name: f"model-0000{chosen}-of-00002.safetensors"}))  # noqa: B023
        assert_same(logits(load(folder)), logits(load(BUNDLE)))


def test_a_missing_library_names_its_install_command(tmp_path, monkeypatch):
    config, weights = bundle_parts()
    folder = write_folder(tmp_path / "model", weights, config.to_dict())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        load(folder)
    load(BUNDLE)  # needs no such library


def test_bundles_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.kdtr")
    path = tmp_path / "other.kdtr"
    write_kdtr(path, {"x": np.zeros(3)}, {"kind": "trace"})
    with pytest.raises(ValueError, match="is no model: its metadata has no 'config', only kind"):
        load(path)
    raw = bytearray(BUNDLE.read_bytes())
    with KdtrFile(BUNDLE) as bundle:
        raw[bundle.entries["model.norm.weight"].offset] ^= 1
    path.write_bytes(raw)
    with pytest.raises(KdtrError, match=r"model\.norm\.weight"):
        load(path)
    with pytest.raises(ValueError, match=r"name must be that of a golden bundle \(.*tiny.*\), got 'large'"):
        golden_bundle("large")


def test_save_bundle_refuses_and_leaves_no_file(tmp_path):
    config, weights = bundle_parts()
    path = tmp_path / "model.kdtr"
    with pytest.raises(ValueError, match=r"lack model\.norm\.weight"):
        save_bundle(path, config, {k: v for k, v in weights.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight must have shape \(48,\) .* got \(47,\)"):
        save_bundle(path, config, weights | {"model.norm.weight": np.ones(47)})
    with pytest.raises(ValueError, match=r"must hold a slash, such as 'golden/notes', got 'notes'"):
        save_bundle(path, config, weights, extra={"notes": np.ones(1)})
    with pytest.raises(ValueError, match="metadata must not hold 'config'"):
        save_bundle(path, config, weights, metadata={"config": "{}"})
    assert not list(tmp_path.iterdir())


SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_hidden_layers",
)  # fmt: skip
SIZES_OF_EXPERTS = ("q_lora_rank", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")


@pytest.mark.parametrize(
    ("experts", "size"),
    [
        *((e, size) for e in (0, 1) for size in SIZES),
        (0, "intermediate_size"),
        *((1, size) for size in SIZES_OF_EXPERTS),
    ],
)
def test_a_size_that_is_only_claimed_is_met_at_a_tensor_and_takes_no_memory(experts, size):
    """Found by fuzzing: rotated pairs were put in order, and all tensors named, before any was seen to be there."""
    config, weights = tiny_models()[experts]
    largest = {"n_routed_experts": 2**17, "num_hidden_layers": 2**15}.get(size, 2**40)
    claimed = config.to_dict() | {size: largest, "num_key_value_heads": None}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"must have shape .* by the configuration|the weights lack"):
            DeepseekV3(ModelConfig.from_dict(claimed), weights, backend="reference")
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


# Random weights

CONFIG = ModelConfig.from_dict(bundle_parts()[0].to_dict() | {"vocab_size": 4096})


def test_random_weights_are_what_transformers_initialises():
    weights = random_weights(CONFIG, 3)
    assert {name: w.shape for name, w in weights.items()} == CONFIG.tensor_shapes()
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    for name, tensor in weights.items():
        if "norm" in name or "bias" in name:
            assert (tensor == ("norm" in name)).all(), name
        else:
            error = 4 / tensor.size**0.5  # of a mean, in standard deviations; a variance's is 1.4 times that
            assert abs(tensor.mean() / 0.02) < error, name
            assert abs((tensor**2).mean() / 0.02**2 - 1) < 1.5 * error, name
    embedding = np.sort(weights["model.embed_tokens.weight"].reshape(-1)).astype(np.float64)
    shares = np.array([NormalDist(0, 0.02).cdf(x) for x in embedding[::97]])
    assert np.abs(shares - np.arange(0, embedding.size, 97) / embedding.size).max() < 2 / embedding.size**0.5
    assert 4 < np.abs(embedding).max() / 0.02 < 4.4


def test_random_weights_follow_from_the_seed_and_the_name_alone():
    once, again, other = random_weights(CONFIG, 3), random_weights(CONFIG, 3), random_weights(CONFIG, 4)
    smaller = random_weights(ModelConfig.from_dict(CONFIG.to_dict() | {"num_hidden_layers": 1}), 3)
    names = [name for name in once if "norm" not in name and "bias" not in name]
    for name in names:
        assert_same(again[name], once[name], name)
        assert (other[name] != once[name]).mean() > 0.99, name
    for name in set(names) & set(smaller):
        assert_same(smaller[name], once[name], name)
    flat = [once[name].reshape(-1)[:2000] for name in names]
    closeness = np.abs(np.corrcoef(np.stack([x for x in flat if len(x) == 2000]))) - np.eye(
        sum(len(x) == 2000 for x in flat)
    )
    assert closeness.max() < 0.12
    assert (
        once["lm_head.weight"].tobytes()[:16].hex() == "7652473d1f8e263d2d2533bcc494e4bb"
    )  # the same numbers in every version


def test_random_weights_with_fused_experts_are_the_same_model():
    fused, split = random_weights(CONFIG, 1, std=0.3, fused_experts=True), random_weights(CONFIG, 1, std=0.3)
    assert any(name.endswith("gate_up_proj") for name in fused)
    assert_same(*(logits(DeepseekV3(CONFIG, w, dtype="float64", backend="reference")) for w in (fused, split)))


def test_random_weights_in_pieces_are_those_in_one(monkeypatch):
    whole = random_weights(CONFIG, 2)["model.embed_tokens.weight"]
    monkeypatch.setattr(import_module("ddtree.model.random_weights"), "_PIECE", 4 * 1001)
    assert_same(random_weights(CONFIG, 2)["model.embed_tokens.weight"], whole)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"seed": -1}, ValueError, r"seed must be .* got -1"),
        ({"seed": 0.5}, TypeError, r"seed must be an integer, got float 0\.5"),
        ({"std": 0.0}, ValueError, r"std must be in 1e-30 … 1e\+30, .*, got 0\.0"),
        ({"std": 1e-40}, ValueError, r"std must be in 1e-30 … 1e\+30, .*, got 1e-40"),
        ({"std": 1e40}, ValueError, r"std must be in 1e-30 … 1e\+30, .*, got 1e\+40"),
        ({"std": float("inf")}, ValueError, r"std must be finite, got inf"),
        ({"std": float("inf")}, ValueError, r"std must be"),
        ({"backend": "no_such"}, ValueError, r"backend must be one of reference, .* got 'no_such'"),
    ],
)
def test_random_weights_refuse(options, error, message):
    with pytest.raises(error, match=message):
        random_weights(CONFIG, **options)


def test_random_weights_have_no_other_names():
    weights = random_weights(CONFIG)
    assert "lm_head.weight" in weights
    assert "lm_head.bias" not in weights
    with pytest.raises(KeyError):
        weights["lm_head.bias"]
