"""DDTree for Hugging Face causal language models: those whose forward takes a 4-D mask and position ids.

torch and transformers are imported when a decoder is made, and not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.arrays import array_kind, import_array, to_numpy, use_stream_of
from ddtree.checks import FLOATS
from ddtree.engine import Emission, Engine, Generation
from ddtree.interop.huggingface_cache import CacheView, ModelCache, layer_kinds
from ddtree.protocols import Drafter, TargetOutput
from ddtree.trees import DraftTree, chain_tree, tree_from_parents

__all__ = ["DDTreeDecoder", "HuggingFaceTarget"]

ATTENTION = ("eager", "sdpa")
"""Attention implementations of transformers that add a 4-D mask to the scores."""


class DDTreeDecoder(Engine):
    """Decodes with a Hugging Face causal language model: its own tokens, several a pass.

    The tokens are those of one-token decoding, greedy (as ``model.generate(do_sample=False)``) or sampled with keyed
    noise (:func:`ddtree.choose_tokens`), with any drafter and in any batch.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder in evaluation mode, on one device, of float16, bfloat16, float32 or float64, whose attention is eager
        or sdpa and whose layers are full or sliding-window attention. A small tree is run on it here, whose logits must
        be those of plain passes.
    drafter : callable, optional
        ``(context, depth, topk) -> (log_probs, token_ids)``, see :class:`ddtree.protocols.Drafter`. The results may be
        torch tensors. Where it has an attribute ``hidden_layers``, the context's ``hidden_states`` are torch tensors on
        the model's device; layers are counted as in ``output_hidden_states``, but for the last: its own output, before
        the model's final norm.
    cache : str or callable
        "dynamic" grows; "static" is made at once for the longest request, and all passes over it have one shape, as
        compiled models want it. Or a callable that is given the most rows that a request needs and returns an empty
        transformers cache of dynamic, static or sliding-window layers.
    **options
        ``depth``, ``budget``, ``topk``, ``backend``, ``max_context`` and what else :class:`ddtree.engine.Engine` takes.

    Raises
    ------
    TypeError, ValueError
        A model, drafter or option that cannot serve, and what to change.
    ImportError
        torch or transformers is not installed.

    Notes
    -----
    Prompts of unequal length are batched without a pad token. Logits processors, and what else ``generation_config``
    has but its stop tokens, take no part. On a GPU the operations run on torch's stream through CuPy, which must be
    installed: what a round does outside of the model's forward is two CUDA graphs, for trees of 1 + ``budget`` slots
    whatever was drafted, and the host waits once a round.

    Examples
    --------
    With a model and tokenizer of transformers::

        decoder = ddtree.DDTreeDecoder(model, ddtree.NgramDrafter(), depth=8, budget=32)
        generation = decoder.generate(tokenizer(["def f(x):"], return_tensors="pt"), max_new_tokens=100)
        print(tokenizer.decode(generation.tokens[0]), generation.tau)
    """

    target: HuggingFaceTarget

    def __init__(
        self,
        model: Any,
        drafter: Drafter | None = None,
        *,
        cache: str | Callable[[int], Any] = "dynamic",
        **options: Any,
    ) -> None:
        for option in options:
            if option not in inspect.signature(Engine).parameters or option == "target":
                raise TypeError(f"DDTreeDecoder() takes no argument {option!r}")
        super().__init__(HuggingFaceTarget(model, cache=cache), drafter, **options)

    def generate(
        self,
        prompts: Any = None,
        max_new_tokens: Any = None,
        stop_token_ids: Iterable[int] | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        streamer: Any = None,
        **options: Any,
    ) -> Generation:
        """Continue each prompt: the same tokens in every mode, with any drafter and in any batch.

        Parameters
        ----------
        prompts : sequence of array, int, shape (n,), or array, int, shape (B, n), or mapping
            Token ids of each prompt, 0 … V − 1; or what a tokenizer returns, ``input_ids`` and ``attention_mask``,
            padded on either side. Tensors lie on the model's device.
        max_new_tokens : int
            The most tokens that a request emits, 1 and up. It must be given.
        stop_token_ids : sequence of int, optional
            Tokens that end a request; by default ``model.generation_config.eos_token_id``.
        attention_mask : array, int or bool, shape (B, n), optional
            With ``prompts`` (B, n): 0 at padding, 1 at tokens.
        input_ids : array, int, shape (B, n), optional
            In place of ``prompts``, as ``model.generate`` has it: ``generate(**tokenizer(texts), max_new_tokens=9)``.
        streamer : transformers streamer, optional
            Its ``put`` is given the prompt (1, n), then the tokens (k,) that each round commits; ``end`` is called at
            the end, after an error too. For one prompt.
        **options
            ``temperature``, ``top_p``, ``seed``, ``mode``, ``request_ids``, ``on_round``, ``on_emission`` and
            ``keep_rounds`` of :meth:`ddtree.engine.Engine.generate`.

        Returns
        -------
        Generation

        Raises
        ------
        ValueError, TypeError
            An argument, by name, before any work; or a draft, naming drafter and request.
        NonFiniteLogitsError
            The model's logits after a committed token were unusable: request and position are named.
        """
        _check_options("generate", super().generate, options)
        rows = self.prompt_rows(_prompts(prompts, input_ids), attention_mask)
        _check_given(max_new_tokens)
        stops = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        if streamer is None:
            return super().generate(rows, max_new_tokens, stops, **options)
        with _streaming(streamer, rows) as put:
            also = options.pop("on_emission", None)

            def on_emission(emission: Emission) -> None:
                put(emission.token_ids)
                if also is not None:
                    also(emission)

            return super().generate(rows, max_new_tokens, stops, on_emission=on_emission, **options)

    def stream(
        self,
        prompts: Any = None,
        max_new_tokens: Any = None,
        stop_token_ids: Iterable[int] | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> Iterator[Emission]:
        """Continue each prompt, and yield an :class:`ddtree.engine.Emission` whenever a request's tokens are committed.

        The arguments are those of :meth:`generate` but for ``streamer``, ``on_round`` and ``on_emission``.
        """
        _check_options("stream", super().stream, options)
        rows = self.prompt_rows(_prompts(prompts, input_ids), attention_mask)
        _check_given(max_new_tokens)
        return super().stream(
            rows, max_new_tokens, self.stop_token_ids if stop_token_ids is None else stop_token_ids, **options
        )

    def new_run(self, plan: Any, *arguments: Any) -> Any:
        """Open a generation whose arguments have been checked."""
        if not self.target.on_gpu or plan.policy is not None or self.backend not in (None, "cupy"):
            return super().new_run(plan, *arguments)  # a policy or a backend of the caller's works as it likes
        from ddtree.interop.huggingface_rounds import DeviceRun

        return DeviceRun(self, plan, *arguments)

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end a request where none are given: those of the model's generation config."""
        configured = getattr(getattr(self.target.model, "generation_config", None), "eos_token_id", None)
        tokens = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
        return [token for token in tokens if 0 <= token < self.vocab_size]  # others are never chosen

    def prompt_rows(self, prompts: Any, attention_mask: Any = None) -> list[Any]:
        """Return each prompt's tokens, without padding, on the host; the arguments are those of :meth:`generate`."""
        if isinstance(prompts, Mapping):
            if "input_ids" not in prompts:
                raise ValueError(f"prompts must have input_ids, got a mapping with {', '.join(map(repr, prompts))}")
            attention_mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
            prompts = prompts["input_ids"]
        if isinstance(prompts, str):
            raise TypeError("prompts must be token ids, got a str: pass what the tokenizer makes of it")
        try:
            rows = [self._on_host(f"prompts[{i}]", row) for i, row in enumerate(prompts)]
        except TypeError as error:
            if hasattr(prompts, "__iter__"):
                raise
            raise TypeError(f"prompts must be a sequence, got {type(prompts).__name__} {prompts!r}") from error
        if attention_mask is None:
            return rows
        mask = [np.asarray(self._on_host(f"attention_mask[{i}]", row)) for i, row in enumerate(attention_mask)]
        shapes = [[np.shape(row) for row in part] for part in (rows, mask)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"attention_mask must have the shape of prompts, {shapes[0]}, got {shapes[1]}")
        for i, row in enumerate(mask):
            if not np.isin(row, (0, 1)).all():
                raise ValueError(f"attention_mask[{i}] must be 1 at tokens and 0 at padding, got {row.tolist()}")
        return [np.asarray(row)[kept.astype(np.bool_)] for row, kept in zip(rows, mask, strict=True)]

    def _on_host(self, name: str, row: Any) -> Any:
        device = self.target.device
        if isinstance(row, str):
            raise TypeError(f"{name} must hold token ids, got a str: pass what the tokenizer makes of it")
        if hasattr(row, "device") and array_kind(row) == "torch":
            if row.device != device and not (row.device.type == device.type == "cpu"):
                raise ValueError(
                    f"{name} lies on {row.device} and the model on {device}: move one of them, as in "
                    "input_ids.to(model.device)"
                )
            return to_numpy(row)
        return row


def _prompts(prompts: Any, input_ids: Any) -> Any:
    """The one of them that was given."""
    if (prompts is None) == (input_ids is None):
        raise TypeError(f"prompts or input_ids must be given, got {'neither' if prompts is None else 'both'}")
    return input_ids if prompts is None else prompts


def _check_given(max_new_tokens: Any) -> None:
    if max_new_tokens is None:
        raise TypeError("max_new_tokens must be given: the most tokens that a request emits")


def _check_options(name: str, method: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse what a decoder's method does not take, and say where it belongs."""
    of_decoder = {*inspect.signature(DDTreeDecoder).parameters, *inspect.signature(Engine).parameters}
    for option in options:
        if option not in inspect.signature(method).parameters:
            where = f": give it to DDTreeDecoder(model, drafter, {option}=…)" * (option in of_decoder)
            raise TypeError(f"DDTreeDecoder.{name}() takes no argument {option!r}{where}")


class HuggingFaceTarget:
    """A Hugging Face model as :class:`ddtree.protocols.Target`, with a cache of its own.

    Parameters
    ----------
    model, cache
        As of :class:`DDTreeDecoder`.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        The model.
    vocab_size : int
        Width of its logits.
    max_context : int or None
        The most tokens that a model with a table of positions can have; None where they are computed.
    is_grad_enabled, set_grad_enabled : callable
        torch's own switch of the graph of gradients: its contexts take some 20 µs more between two passes of a model.
    """

    def __init__(self, model: Any, *, cache: str | Callable[[int], Any] = "dynamic") -> None:
        torch = _imported()
        self.is_grad_enabled, self.set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
        self.model = model
        self._parameters = _checked_forward(model)
        self._cache_parameter = "cache" if "cache" in self._parameters else "past_key_values"
        self._constants: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "output_router_logits" in self._parameters:
            self._constants["output_router_logits"] = False  # their loss would read a 4-D mask as a padding mask
        self.config = model.config.get_text_config(decoder=True)
        self._check_state()
        _check_placement(model)
        self.kinds = layer_kinds(self.config)
        self.vocab_size = _vocab_size(model, self.config)
        self._new_cache = self._cache_factory(cache)
        self.max_context = _table_of_positions(model, self.config)
        self._probe()

    @property
    def device(self) -> Any:
        """The torch device that the model is on."""
        return self.model.device

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a CUDA device."""
        return bool(self.device.type == "cuda")

    def open_cache(self, most_rows: list[int]) -> ModelCache:
        """Return a cache for requests that need so many rows each."""
        self._check_state()
        rows = max(most_rows)
        _check_rope(self.config, rows)
        like = self.model.get_input_embeddings().weight.new_empty(0, dtype=self.model.dtype).detach()
        return ModelCache(self._new_cache(rows), self.kinds, len(most_rows), rows, like)

    def forward(
        self, tree: DraftTree, cache: CacheView, *, hidden_layers: tuple[int, ...] = (), last_only: bool = False
    ) -> TargetOutput:
        """Return the logits after each node, and append the nodes' keys; without the last slots, if none is in use."""
        import torch

        host = _used_slots(tree, keep_all=cache.owner.static is not None and not last_only)
        used = np.arange(host.num_slots) < host.node_counts[:, None]
        depths = np.where(used, host.depths, 0)
        inputs: dict[str, Any] = {
            "input_ids": self._sent(np.where(used, host.token_ids, host.token_ids[:, :1])),
            "position_ids": self._sent(self._positions(cache.host_prefix_lens[:, None] + depths)),
            # a prompt is what the model is made for: its own causal mask is right, and takes no memory
            "attention_mask": None if _is_prompt(host, cache) else cache.owner.masks(host, cache),
        }
        last = host.node_counts - 1
        if last_only and "logits_to_keep" in self._parameters:
            rows, last = np.unique(last, return_inverse=True)
            inputs["logits_to_keep"] = self._sent(rows)
        with torch.no_grad():
            logits, hidden_states = self.run(self.arguments(cache.owner.past, **inputs), hidden_layers)
        if last_only:
            logits = logits[torch.arange(len(last), device=logits.device), self._sent(last)][:, None]
        return TargetOutput(import_array(logits.contiguous()), hidden_states)

    def arguments(self, past: Any, **inputs: Any) -> dict[str, Any]:
        """Return what :meth:`run` calls the model with.

        Parameters
        ----------
        past : transformers.Cache
            Of ``ddtree.interop.huggingface_cache.ModelCache``; the model appends keys to it.
        **inputs
            ``input_ids``, ``position_ids`` and ``attention_mask``, and what else the model's forward is to be given.
        """
        return {**inputs, self._cache_parameter: past, **self._constants}

    def run(self, arguments: dict[str, Any], hidden_layers: tuple[int, ...] = ()) -> tuple[Any, dict[int, Any]]:
        """Call the model, with no graph of gradients; return logits and hidden states, torch tensors.

        Parameters
        ----------
        arguments : dict
            Of :meth:`arguments`.
        hidden_layers : tuple of int
            Layers whose hidden states are wanted.
        """
        if not hidden_layers:
            return self.model(**arguments).logits, {}
        with self._hidden_states(hidden_layers, arguments) as hidden_states:
            output = self.model(**arguments)
        return output.logits, hidden_states(output)

    def _positions(self, positions: NDArray[Any]) -> NDArray[Any]:
        """Nodes that stand beyond a table of positions could not be committed: any position of it will do."""
        return positions if self.max_context is None else np.minimum(positions, self.max_context - 1)

    def _sent(self, array: NDArray[Any]) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    @contextmanager
    def _hidden_states(self, layers: tuple[int, ...], inputs: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
        """Have a pass give the hidden states of ``layers``; yield what takes them out of its output."""
        last = self.config.num_hidden_layers
        for layer in layers:
            if not 0 <= layer <= last:
                raise ValueError(f"hidden_layers must lie in 0 … {last}, got {layer}")
        if any(layer < last for layer in layers):
            inputs["output_hidden_states"] = True
        if last not in layers:
            yield lambda output: {layer: output.hidden_states[layer] for layer in layers}
            return
        # transformers ends its hidden states with the normed one
        found: list[Any] = []
        hook = _decoder_layers(self.model)[-1].register_forward_hook(
            lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
        try:
            yield lambda output: {
                layer: found[-1] if layer == last else output.hidden_states[layer] for layer in layers
            }
        finally:
            hook.remove()

    def _cache_factory(self, cache: Any) -> Callable[[int], Any]:
        from transformers import DynamicCache, StaticCache

        known: dict[str, Callable[[int], Any]] = {
            "dynamic": lambda rows: DynamicCache(config=self.model.config),
            "static": lambda rows: StaticCache(config=self.model.config, max_cache_len=rows),
        }
        if callable(cache):
            return cache  # type: ignore[no-any-return]
        if not isinstance(cache, str) or cache not in known:
            got = repr(cache) if isinstance(cache, str) else f"a {type(cache).__name__}"
            raise ValueError(f"cache must be 'dynamic', 'static' or a callable (rows) -> cache, got {got}")
        return known[cache]

    def _check_state(self) -> None:
        """What may change between generations."""
        if self.model.training:
            raise ValueError("model is in training mode, where dropout would change its tokens: call model.eval()")
        attention = getattr(self.config, "_attn_implementation", None)
        if attention not in ATTENTION:
            raise ValueError(
                f"model's attention is {attention!r}, which takes no 4-D mask, and a tree needs one: call "
                f"model.set_attn_implementation('sdpa') (or 'eager')"
            )

    def _probe(self) -> None:
        """Run a small tree, and see that what comes out after a path is what comes out after it alone."""
        if self.vocab_size < 4:
            return  # too few tokens to tell a tree's paths apart by
        for shift in range(3):  # once in a while a router's choice turns on a rounding, and not for all tokens
            apart, allowed = self._apart(np.arange(4) * (self.vocab_size // 4) + shift % (self.vocab_size // 4))
            if apart <= allowed:
                return
        raise ValueError(
            f"model {type(self.model).__name__} does not attend as a 4-D attention_mask and position_ids say: after a "
            f"path of a tree its logits are {apart:.3g} from those after the path alone, and may be {allowed:.3g}; "
            "use a model whose forward heeds both"
        )

    def _apart(self, tokens: NDArray[Any]) -> tuple[float, float]:
        """How far the logits after a tree's path are from those after the path alone, and how far they may be."""
        import torch

        first, root, other, child = tokens.tolist()
        tree, path = tree_from_parents([[root, other, child]], [[-1, 0, 0]]), np.array([[first, root, child]])
        cache = self.open_cache([8])
        try:
            with use_stream_of(cache.like), torch.no_grad():
                self.forward(chain_tree([[first]]), cache.view([0], np.zeros(1, np.int32), 1), last_only=True)
                inside = to_numpy(self.forward(tree, cache.view([0], np.ones(1, np.int32), 3)).logits)
                alone = to_numpy(self.model(input_ids=self._sent(path), use_cache=False).logits.contiguous())
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            name = type(self.model).__name__
            raise ValueError(f"model {name} cannot check a draft tree: {error}") from error
        got, wanted = inside[0, 2].astype(np.float64), alone[0, 2].astype(np.float64)
        # as far as two passes of other shapes may differ by rounding
        allowed = max(1e-3, torch.finfo(self.model.dtype).eps ** 0.5) * np.abs(wanted).max()
        return float(np.abs(got - wanted).max()), float(allowed)


def _imported() -> Any:
    """Return torch; transformers can be imported, too."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"DDTreeDecoder needs torch and transformers ({error}): pip install 'ddtree[huggingface]'"
        ) from error
    return torch


def _checked_forward(model: Any) -> frozenset[str]:
    """Names of the parameters of a model's forward, of which a tree needs some."""
    import torch

    if not isinstance(model, torch.nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TypeError(
            f"model must be a causal language model of transformers, got {type(model).__name__}: load it with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"model must be a decoder alone, got the encoder and decoder {name}")
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise TypeError(
            f"model must give logits of the next token, got {name}, which has no output embeddings: load it with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    base = getattr(model, "_orig_mod", model)  # compiled models and adapters pass all arguments on
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    parameters = frozenset(inspect.signature(base.forward).parameters)
    missing = [p for p in ("input_ids", "attention_mask", "position_ids") if p not in parameters]
    if not parameters & {"cache", "past_key_values"}:
        missing.append("cache")
    if missing:
        raise TypeError(
            f"model {name} cannot check a draft tree: its forward takes no {' and no '.join(missing)}; use a model "
            "with attention over a cache of keys and values"
        )
    return parameters


def _check_placement(model: Any) -> None:
    """One device, and a type that masks and kernels have."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if "meta" in devices:
        raise ValueError(
            "model has parameters without data (on the device 'meta'): load its weights, without offloading"
        )
    if len(devices) > 1:
        raise ValueError(
            f"model is spread over the devices {', '.join(sorted(devices))}: load it on one, as in model.to('cuda')"
        )
    (device,) = devices
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"model must lie on the CPU or on a CUDA device, got {device}: call model.to('cpu')")
    name = str(model.dtype).rpartition(".")[2]
    if name not in FLOATS:
        raise TypeError(f"model must be of type {', '.join(FLOATS)}, got {name}: call model.to(torch.bfloat16)")


def _vocab_size(model: Any, config: Any) -> int:
    """Width of the logits, which may be padded beyond the tokenizer's vocabulary."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return int(config.vocab_size if weight is None or weight.ndim != 2 else weight.shape[0])


def _table_of_positions(model: Any, config: Any) -> int | None:
    """Size of a model's table of positions; None where it has none."""
    import torch

    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not model.get_input_embeddings()]
    learned = any(limit <= table.num_embeddings <= limit + 2 for table in tables)  # OPT's has two rows more
    return limit if limit and learned else None


def _check_rope(config: Any, rows: int) -> None:
    """Refuse lengths at which the frequencies of rotary positions depend on what else is in a pass."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (parameters, *(p for p in parameters.values() if isinstance(p, dict))):
        kind = each.get("rope_type", each.get("type"))
        limit = int(each.get("original_max_position_embeddings") or config.max_position_embeddings)
        if kind in ("dynamic", "longrope") and rows > limit:
            raise ValueError(
                f"model's rotary positions ({kind}) change with the longest position in a pass beyond {limit}, so that "
                f"passes over trees would not agree with others: prompt, new tokens and tree must stay within {limit}, "
                f"got {rows}"
            )


def _decoder_layers(model: Any) -> Any:
    decoder = model.get_decoder()
    for name in ("layers", "h"):
        if hasattr(decoder, name):
            return getattr(decoder, name)
    raise ValueError(
        f"hidden_layers must not have the last layer, since {type(model).__name__} does not show its layers: ask for "
        "the one before"
    )


def _used_slots(tree: DraftTree, *, keep_all: bool) -> DraftTree:
    """The tree on the host, without the last slots if none is in use."""
    n = tree.num_slots if keep_all else int(tree.node_counts.max())
    arrays = {f.name: a for f in fields(tree) if not isinstance(a := getattr(tree, f.name), int)}
    kept: dict[str, Any] = {name: to_numpy(a)[:, :n] if a.ndim > 1 else to_numpy(a) for name, a in arrays.items()}
    return replace(tree, **kept)


def _is_prompt(tree: DraftTree, view: CacheView) -> bool:
    """Whether the trees are sequences with nothing committed before them."""
    chain = tree.parents == np.arange(-1, tree.num_slots - 1)
    return not view.host_prefix_lens.any() and bool((chain | (tree.depths < 0)).all())


@contextmanager
def _streaming(streamer: Any, rows: list[Any]) -> Iterator[Callable[[NDArray[np.int32]], None]]:
    """Have a streamer take one prompt, then what its ``put`` is called with, and end it."""
    import torch

    if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
        raise TypeError(f"streamer must have put and end, as transformers' have, got {type(streamer).__name__}")
    if len(rows) != 1:
        raise ValueError(f"streamer takes one prompt, got {len(rows)}: use stream(...) for several")

    def put(token_ids: NDArray[np.int32]) -> None:
        streamer.put(torch.from_numpy(token_ids.astype(np.int64)))

    try:
        put(np.asarray(rows[0])[None])
        yield put
    finally:
        streamer.end()
