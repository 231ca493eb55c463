"""Models on disk: Hugging Face folders of safetensors, and bundles of one KDTR file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.kdtr import KdtrFile, check_regular, write_kdtr
from ddtree.model.config import ModelConfig
from ddtree.model.deepseek_v3 import WEIGHT_DTYPES, DeepseekV3, check_names

__all__ = ["golden_bundle", "load_model", "save_bundle"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"[^/\\\0\ud800-\udfff]+\.safetensors")  # no other folder, and a name that a file can have
_SAFETENSORS_DTYPES = ("F16", "BF16", "F32", "F64")


def load_model(path: str | os.PathLike[str], *, dtype: str = "float32", backend: str | None = None) -> DeepseekV3:
    """Load a model from disk.

    Parameters
    ----------
    path : str or os.PathLike
        A folder with ``config.json`` and safetensors of a ``deepseek_v3`` model, in one file or in shards, experts one
        by one (the hub's form) or fused (transformers 5's); or a bundle that :func:`save_bundle` wrote.
    dtype : str
        "float32", "float64" or, on a GPU alone, "bfloat16", whatever the type on disk is: see :class:`DeepseekV3`.
    backend : str, optional
        Who serves attention, and so where the model lives: see :class:`DeepseekV3`. Tensors go there one by one, as
        they are on disk, and are converted there; the host never holds more than the largest and a small one.

    Raises
    ------
    MemoryError
        There is no room for the model where it is to live; the tensor is named, with the bytes that it needs.
    FileNotFoundError
        A file is missing.
    ValueError
        The configuration asks for what is not implemented, or a tensor is missing, left over, mis-shaped or quantised
        or holds NaN or infinity, or a file is damaged (:class:`ddtree.kdtr.KdtrError` for a bundle).
    ImportError
        A folder, and the safetensors library is not installed.

    Examples
    --------
    >>> load_model(golden_bundle())
    DeepseekV3(3 layers, hidden 64, vocab 512, float32, numpy)
    """
    path = Path(path)
    if path.is_dir():
        file = path / "config.json"
        config = _read_config(_read_json(file), str(file))
        weights: Mapping[str, Any] = _SafetensorsFolder(path)
        _check_tied(config, weights)
        return DeepseekV3(config, weights, dtype=dtype, backend=backend)
    with KdtrFile(path) as bundle:
        if "config" not in bundle.metadata:
            have = ", ".join(bundle.metadata) or "nothing"
            raise ValueError(f"{path} is no model: its metadata has no 'config', only {have}")
        where = f"{path}: metadata 'config'"
        config = _read_config(_parse_json(bundle.metadata["config"], where), where)
        weights = _BundleWeights(bundle)
        _check_tied(config, weights)
        return DeepseekV3(config, weights, dtype=dtype, backend=backend)


def save_bundle(
    path: str | os.PathLike[str],
    config: ModelConfig,
    weights: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model to one KDTR file: weights by Hugging Face's names, the configuration as JSON in the metadata.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it is replaced if it exists.
    config : ModelConfig
        The model's shape.
    weights : mapping of str to array
        Tensors by Hugging Face's names, experts in either form. They keep their type.
    extra : mapping of str to array, optional
        Further arrays to keep with the model, such as ``golden/logits``. A slash in the name tells them from weights.
    metadata : mapping of str to str, optional
        Further text to keep; ``config`` is taken.

    Raises
    ------
    ValueError
        A tensor is missing, left over or mis-shaped or holds NaN or infinity, or a further name is not allowed; it is
        named. No file is written.
    """
    shapes = check_names(config, weights)
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} must have shape {shape} by the configuration, got {tuple(weights[name].shape)}")
        _finite(name, np.asarray(weights[name]))
    for name in extra or ():
        if "/" not in name:
            raise ValueError(f"a name in extra must hold a slash, such as 'golden/{name}', got {name!r}")
    if "config" in (metadata or ()):
        raise ValueError("metadata must not hold 'config': it is written from the configuration")
    arrays = {name: weights[name] for name in shapes} | dict(extra or {})
    write_kdtr(path, arrays, {"config": json.dumps(config.to_dict(), sort_keys=True), **(metadata or {})})


def golden_bundle(name: str = "tiny") -> Path:
    """Path of a small random model that is installed with the tests, with its expected values beside the weights.

    Parameters
    ----------
    name : str
        "tiny", or one of its variants: "no_interleave", "no_q_lora", "router_bias", "router_groups", "yarn".

    Returns
    -------
    pathlib.Path
        A bundle for :func:`load_model`. Its further arrays (read them with :class:`ddtree.kdtr.KdtrFile`), all from
        transformers in float64 with the prompt and the greedy tokens, P positions together, as input:

        ``golden/prompt``, ``golden/tokens`` : int32
            Token ids of the prompt and of its greedy continuation.
        ``golden/logits`` : float64, shape (P, V)
            Logits after each position.
        ``golden/hidden_states`` : float64, shape (layers + 1, P, hidden_size)
            The embedding, then each layer's output, before the final norm.
        ``golden/cache`` : float64, shape (layers, P, C + R)
            Cache rows: the latent after its norm, then the rotated key, its pairs as halves.
        ``golden/router_weights`` : float64, shape (MoE layers, P, E)
            Weight of each expert in each layer with experts, 0 for those not chosen.

    Raises
    ------
    ValueError
        There is no such bundle.
    """
    from importlib.resources import files

    folder = Path(str(files("ddtree.property_tests"))) / "golden"
    path = folder / f"{name}.kdtr"
    if not path.is_file():
        have = ", ".join(sorted(p.stem for p in folder.glob("*.kdtr"))) or "none: the tests are not installed"
        raise ValueError(f"name must be that of a golden bundle ({have}), got {name!r}")
    return path


def _parse_json(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, an integer too long; lists in lists too deep
        raise ValueError(f"{where} is not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        text = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path.resolve()} is missing: a model's folder has config.json and model.safetensors (or its shards)"
        ) from None
    return _parse_json(text, str(path))


def _read_config(settings: dict[str, Any], where: str) -> ModelConfig:
    try:
        return ModelConfig.from_dict(settings)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _finite(name: str, tensor: NDArray[Any]) -> NDArray[Any]:
    """The tensor, unless it holds NaN or infinity, which in a router's bias misroute tokens and show in no logit."""
    if tensor.dtype.name not in WEIGHT_DTYPES or not tensor.size:
        return tensor
    # Floats of one sign order as their bits do: the largest signed integer is that of a positive float if there is one,
    # the largest unsigned of a negative one. Two maxima are several times faster than np.isfinite on bfloat16.
    for infinity, kind in ((np.inf, "i"), (-np.inf, "u")):
        bits = np.dtype(f"{kind}{tensor.itemsize}").newbyteorder(tensor.dtype.byteorder)
        if tensor.view(bits).max() >= np.array(infinity, tensor.dtype).view(bits):
            raise ValueError(f"{name} holds NaN or infinity, weights must be finite: the checkpoint is damaged")
    return tensor


def _check_tied(config: ModelConfig, weights: Mapping[str, Any]) -> None:
    """A tied output layer that is stored all the same must be the embedding."""
    if config.tie_word_embeddings and "lm_head.weight" in weights:
        head, embedding = (np.asarray(weights[f"{name}.weight"]) for name in ("lm_head", "model.embed_tokens"))
        if not np.array_equal(head, embedding):
            raise ValueError("tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight")


class _BundleWeights(Mapping[str, "NDArray[Any]"]):
    """The tensors of a bundle, each read when it is asked for."""

    def __init__(self, bundle: KdtrFile) -> None:
        self._bundle = bundle
        self._names = [name for name in bundle if "/" not in name]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return _finite(name, self._bundle[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._bundle  # Mapping's own would read the tensor


class _SafetensorsFolder(Mapping[str, "NDArray[Any]"]):
    """The tensors of a folder's shards, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(
                f"loading {folder} needs the safetensors library ({error}): pip install safetensors"
            ) from error
        import ml_dtypes  # noqa: F401 - makes "bfloat16" a NumPy type, which safetensors asks for by name

        placed = self._placed(folder)
        self._shards: dict[str, tuple[str, Any]] = {}
        opened: dict[str, tuple[Any, set[str]]] = {}
        shard: Any
        for file in sorted(set(placed.values())) or [_SINGLE]:
            check_regular(folder / file)
            try:
                shard = safe_open(folder / file, framework="np")
            except SafetensorError as error:
                raise ValueError(f"{folder / file} is not a readable safetensors file: {error}") from error
            opened[file] = shard, set(shard.keys())
            self._shards |= dict.fromkeys(shard.keys(), (file, shard))
        for name, file in placed.items():  # of two shards that hold it, the index chooses
            shard, names = opened[file]
            if name not in names:
                raise ValueError(f"{folder / _INDEX} places {name} in {file}, which does not hold it")
            self._shards[name] = file, shard

    @staticmethod
    def _placed(folder: Path) -> dict[str, str]:
        """The index: which file holds which tensor; empty where all are in one file."""
        if not (folder / _INDEX).is_file():
            if not (folder / _SINGLE).is_file():
                raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors are loaded")
            return {}
        placed = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ValueError(f"{folder / _INDEX} must have a 'weight_map' from tensors to files, got {placed!r}")
        for name, file in placed.items():
            if not isinstance(file, str) or not _SHARD.fullmatch(file):
                raise ValueError(
                    f"{folder / _INDEX} must place {name} in a .safetensors file of its own folder, got {file!r}"
                )
        return placed

    def __getitem__(self, name: str) -> NDArray[Any]:
        file, shard = self._shards[name]
        kind = shard.get_slice(name).get_dtype()
        if kind not in _SAFETENSORS_DTYPES:
            raise ValueError(
                f"{name} in {file} must be one of {', '.join(_SAFETENSORS_DTYPES)}, got {kind}: "
                "quantised weights are not supported; convert the checkpoint to bfloat16"
            )
        return _finite(name, shard.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards  # Mapping's own would read the tensor
