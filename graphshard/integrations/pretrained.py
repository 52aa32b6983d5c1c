"""Read a pretrained Hugging Face model from its files directly into shards.

    cls.from_pretrained   on the meta device, from the names, shapes and dtypes in the files:
                          renames, casts, fuses, ties, reports; initializes the other parameters
    parallelize           on the meta device: optional tensor parallelism
    graphshard.shard      on the meta device
    fill                  each rank reads its rows, one parameter at a time

transformers' own code transforms the tensors of a checkpoint. Here, it receives stored tensors:
their data is still in the files, and they record operations (``graphshard.params.stored``).
Based on transformers 5.23: ``modeling_utils.py``, ``core_model_loading.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from .._torch.nn import buffers_of, parameters_of
from ..dynamo_backend import backend, shard
from ..options.options import mesh_for
from ..params.broadcast import broadcast_from_first_rank
from ..params.checks import find_groups
from ..params.mesh import MeshGroups
from ..params.meta_init import INITIALIZED, fill, plain_twin
from ..params.plain_params import find_plain_params
from ..params.shard import move_buffers
from ..params.stored import Read, StoredTensor, read_stored
from ..ranks.agree import digest, raise_if_different, raise_on_all_ranks
from ..tools.checkpoint import reading

logger = logging.getLogger(__name__)
Values: TypeAlias = dict[str, torch.Tensor]  # full tensors by parameter name, in memory or in files

_QUANTIZED = (
    "quantized parameters cannot be sharded: load the model with transformers, then call "
    "graphshard.shard with these parameters in ignored_params"
)
_PARALLELIZE = (
    "graphshard splits the model: omit this argument. For tensor parallelism, pass parallelize= "
    "a function that calls parallelize_module"
)
_PLACED = "graphshard places the shards on the mesh: omit this argument"
# Arguments of ``from_pretrained`` that are incompatible with sharding, with advice.
_REFUSED = {
    "device_map": _PLACED,
    "max_memory": _PLACED,
    "offload_folder": (
        "to keep shards in host memory, pass instead "
        'sharding={"offload_policy": CPUOffloadPolicy()}'
    ),
    "distributed_config": _PARALLELIZE,
    "device_mesh": "use mesh= for the mesh to shard over",
    "tp_plan": _PARALLELIZE,
    "tp_size": _PARALLELIZE,
    "quantization_config": _QUANTIZED,
    "gguf_file": _QUANTIZED,
}
_SAME_FILES = (
    "Load the same checkpoint with the same arguments on all ranks: do files differ between nodes?"
)
_COMPARED_BYTES = 64 << 20  # chunk size for comparing two stored tensors
_SAMPLE_SIZE = 64  # elements of each stored tensor that ranks compare


def from_pretrained(
    cls: Any,
    name_or_path: str | PathLike[str] | None,
    mesh: DeviceMesh | None = None,
    *,
    sharding: Mapping[str, Any] | None = None,
    strict: bool = False,
    parallelize: Callable[[Any], object] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a sharded model, bitwise equal to ``cls.from_pretrained`` followed by ``shard``.

    All ranks of the mesh must call this. Each rank reads only its rows of the parameters in
    safetensors files, and holds its shards, all buffers and its rows of one parameter. Exceptions:
    tensors that transformers rebuilds by mixing rows are read in full, one at a time; parameters
    split along a dimension other than the first are read with all columns, then sliced; tied
    parameters that are stored twice are compared, in pieces; ranks compare a few elements of every
    tensor. Parameters that are in no file are initialized by the model, in full, with the values of
    the mesh's first rank unless ``sync_module_states=False``.

    Args:
        cls: model class of transformers, or one of its ``AutoModelFor...`` classes.
        name_or_path: folder, or name on the Hub (every node downloads the files); None if
            ``state_dict`` is passed.
        mesh: see :func:`graphshard.backend`.
        sharding: other arguments of :func:`graphshard.backend`, as a dictionary.
        strict: whether to raise, rather than only report, if a parameter is in no file or a tensor
            in a file is not in the model.
        parallelize: function that splits the model, on the meta device, with torch's
            ``parallelize_module``. All ranks of its mesh and of ``mesh`` must call
            ``from_pretrained``.
        kwargs: arguments of ``cls.from_pretrained``: ``dtype``, ``config``,
            ``attn_implementation``, ``output_loading_info``, ``ignore_mismatched_sizes`` and so on.

    Returns:
        The sharded model in evaluation mode; with ``output_loading_info=True`` a tuple of the model
        and the loading report.

    Raises:
        ValueError: an argument is incompatible with sharding, ranks find different checkpoints,
            ``strict`` finds a mismatch, or another rank cannot load the model.
        Exception: on a rank that cannot load the model: the error of ``cls.from_pretrained``, such
            as ``RuntimeError`` for a mismatched shape.
    """
    options = dict(sharding or {})
    dynamo_backend = backend(mesh, **options)
    mesh = mesh_for(dynamo_backend.options, ())
    groups = MeshGroups(mesh)
    outline = _Outline()
    with raise_on_all_ranks(groups.all_ranks):
        _check_arguments(cls, options, kwargs)
        model, report = outline.build(cls, name_or_path, kwargs)
        if strict:
            _check_complete(report)
    values = _take_values(model, outline.stored)
    descriptions = {name: _describe(value) for name, value in values.items()}
    descriptions |= outline.samples
    raise_if_different(descriptions, groups.all_ranks, lambda *_: _SAME_FILES)
    if parallelize is not None:
        with raise_on_all_ranks(groups.all_ranks):
            parallelize(model)
            _check_ties(model, values)
        plain_params = find_plain_params(model, frozenset())
        groups = find_groups(model, plain_params, mesh, dynamo_backend.options)
    if dynamo_backend.options.sync_module_states:
        _make_new_equal(model, values, groups)
    move_buffers(model, groups.device)
    shard(model, mesh, **options)
    with raise_on_all_ranks(groups.all_ranks):
        fill(model, values, groups)
    return (model, report) if kwargs.get("output_loading_info") else model


def _check_arguments(cls: Any, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, (PreTrainedModel, _BaseAutoModelClass))):
        raise ValueError(
            f"cls={cls!r}: pass a model class of transformers, or one of its AutoModelFor... "
            "classes. Load other models with their own methods, then call graphshard.shard"
        )
    for name, advice in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}={kwargs[name]!r}: {advice}")
    if options.get("ignored_params") is not None:
        raise ValueError(
            "sharding has ignored_params, but the model has no parameters yet: to replicate some, "
            'pass sharding={"overrides": {glob: {"shard": False}}}'
        )


def _check_complete(report: Mapping[str, Any]) -> None:
    mismatches = []
    for key, what in (("missing_keys", "no file has"), ("unexpected_keys", "the model lacks")):
        if report[key]:
            mismatches.append(f"{what} {_first_ten(map(repr, sorted(report[key])))}")
    if mismatches:
        raise ValueError(
            f"strict=True, but {'; '.join(mismatches)}: pass the class that was saved, or "
            "strict=False"
        )


def _first_ten(texts: Iterable[str], separator: str = ", ") -> str:
    texts = list(texts)
    return separator.join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")


# --- on the meta device --------------------------------------------------------------------------


# Threads that overlap would restore each other's patch.
_patching = threading.RLock()


class _Outline:
    """A builder of a pretrained model on meta; initializes only parameters that are in no file."""

    def __init__(self) -> None:
        self.stored: dict[nn.Parameter, StoredTensor] = {}  # source of each parameter
        self.samples: dict[str, str] = {}  # descriptions of the checkpoint's values
        self._load: Callable[..., Any] = PreTrainedModel._load_pretrained_model
        self._thread, self._has_loaded = threading.get_ident(), False

    def build(self, cls: Any, name_or_path: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        arguments = {**kwargs, "output_loading_info": True}
        loads = staticmethod(self._load_outline)
        with _patching, mock.patch.object(PreTrainedModel, "_load_pretrained_model", loads):
            model, report = cls.from_pretrained(name_or_path, **arguments)
        if not self._has_loaded:
            raise ValueError(
                f"{cls.__name__}.from_pretrained did not load {name_or_path} through "
                "PreTrainedModel, so it cannot be sharded while it loads: call "
                f"{cls.__name__}.from_pretrained yourself, then graphshard.shard"
            )
        return model, report

    def _load_outline(
        self,
        model: PreTrainedModel,
        state_dict: Mapping[str, torch.Tensor] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> tuple[Any, Any]:
        """Load names and shapes, not values, instead of ``_load_pretrained_model``."""
        if threading.get_ident() != self._thread:
            return self._load(model, state_dict, checkpoint_files, load_config, expected_keys)
        if load_config.is_quantized:
            raise ValueError(f"{type(model).__name__}: {_QUANTIZED}")
        if self._has_loaded:
            raise ValueError(
                f"{type(model).__name__} loads a second checkpoint. If it is for adapters, load "
                "only the base model, then add them with peft; they are sharded when the model is "
                "compiled. If it is for a nested model, load the model with transformers, then "
                "call graphshard.shard"
            )
        self._has_loaded = True
        tensors, reads = _open(state_dict, checkpoint_files or (), load_config)
        self.samples = {f"{name} in the checkpoint": _sample(t) for name, t in tensors.items()}
        stored = {name: _stored(tensor, reads.get(name)) for name, tensor in tensors.items()}
        on_meta = dataclasses.replace(load_config, device_map={"": "meta"})
        info, offload_index = self._load(model, stored, None, on_meta, expected_keys)
        if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            mismatches = (
                f"{name!r} is {tuple(stored)} in the checkpoint but {tuple(own)} in the model"
                for name, stored, own in sorted(info.mismatched_keys)
            )
            raise RuntimeError(
                f"the checkpoint's shapes differ from those of {type(model).__name__}: "
                f"{_first_ten(mismatches, '; ')}: change the config, or pass "
                "ignore_mismatched_sizes=True to initialize these parameters instead"
            )
        by_name = self._take_stored(model)
        _settle_ties(model, by_name, info)
        return info, offload_index

    def _take_stored(self, model: nn.Module) -> dict[str, StoredTensor]:
        """Replace stored parameters with plain ones on the meta device, and read stored buffers.

        Returns:
            The stored parameters, keyed by name.
        """
        # Mark both as initialized: transformers then initializes only tensors that are in no file.
        by_name: dict[str, StoredTensor] = {}
        for prefix, module in model.named_modules():
            for name, param in parameters_of(module).items():
                if isinstance(param, StoredTensor):
                    plain = nn.Parameter(torch.empty_like(param.meta), param.requires_grad)
                    setattr(plain, INITIALIZED, True)
                    parameters_of(module)[name] = plain
                    self.stored[plain] = by_name[f"{prefix}.{name}".lstrip(".")] = param
            for name, buffer in buffers_of(module).items():
                if isinstance(buffer, StoredTensor):
                    buffers_of(module)[name] = value = read_stored(buffer)
                    setattr(value, INITIALIZED, True)
        return by_name


def _open(
    state_dict: Mapping[str, torch.Tensor] | None, files: Sequence[str], load_config: Any
) -> tuple[Values, dict[str, Read]]:
    """Return the tensors of a checkpoint, and functions that read those of safetensors files."""
    tensors: Values = dict(state_dict or {})
    reads: dict[str, Read] = {}
    for path in map(Path, files):
        if path.suffix == ".safetensors":
            with reading(path):
                mapped, starts = load_file(path), _starts(path)
            tensors |= mapped
            for name, tensor in mapped.items():
                reads[name] = functools.partial(_read_rows, path, starts[name], tensor)
        else:
            tensors |= load_state_dict(
                path, weights_only=load_config.weights_only, disable_mmap=load_config.disable_mmap
            )
    if extra := [name for name in tensors if name.endswith("_extra_state")]:
        raise ValueError(
            f"the checkpoint has {extra[0]!r}, which is neither a parameter nor a buffer: load the "
            "model with its own from_pretrained, then call graphshard.shard"
        )
    return tensors, reads


def _sample(tensor: torch.Tensor) -> str:
    """Describe a few elements in the middle of a tensor, which may be memory-mapped."""
    if tensor.is_meta or not tensor.numel():
        return "no values"
    row = tensor[tuple(size // 2 for size in tensor.shape[:-1])].reshape(-1)
    values = row[len(row) // 2 :][:_SAMPLE_SIZE].tolist()
    return f"values with hash {digest(str(values))[:8]}"


def _stored(tensor: torch.Tensor, read: Read | None) -> StoredTensor:
    meta = torch.empty_like(tensor, device="meta")
    return StoredTensor.create(
        meta, read or (lambda rows: tensor if rows is None else tensor[rows])
    )


def _starts(path: Path) -> dict[str, int]:
    """Return the position of each tensor's first byte in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _read_rows(path: Path, start: int, mapped: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """Read rows of a tensor that begins at byte ``start`` of a safetensors file."""
    # Reading ``mapped`` would kill the process if the file is truncated while it is open, and
    # ``get_slice`` of safetensors' backend "pread" reads the whole tensor.
    begin, shape = 0, list(mapped.shape)
    if rows is not None:
        begin, stop, _ = rows.indices(shape[0])
        shape[0] = max(0, stop - begin)
    values = torch.empty(shape, dtype=mapped.dtype)
    data: Any = values.view(-1).view(torch.uint8).numpy()
    with reading(path), path.open("rb") as file:
        file.seek(start + (begin * mapped.nbytes // mapped.shape[0] if begin else 0))
        if file.readinto(data) < values.nbytes:
            raise EOFError("the file is incomplete")
    return values


def _settle_ties(model: Any, stored: Mapping[str, StoredTensor], info: Any) -> None:
    """Tie parameters as in the config, except those whose stored values differ."""
    # transformers does the same, but cannot compare values on the meta device.
    ties = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(ties.items()):
        if target not in stored or source not in stored:
            continue
        if _are_equal(stored[target], stored[source]):
            info.missing_keys.add(target)  # makes transformers tie it
            continue
        logger.warning(
            "%s: the config ties %r to %r, but their values differ in the checkpoint, so they stay "
            "untied. Set tie_word_embeddings=False in the config to avoid this warning",
            *(type(model).__name__, target, source),
        )
        del ties[target]


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.dim() == 0 or one.numel() == 0:
        return torch.equal(read_stored(one), read_stored(other))
    step = max(1, _COMPARED_BYTES * one.shape[0] // max(one.nbytes, 1))
    parts = [slice(start, start + step) for start in range(0, one.shape[0], step)]
    return all(torch.equal(read_stored(one, part), read_stored(other, part)) for part in parts)


def _take_values(model: nn.Module, stored: Mapping[nn.Parameter, StoredTensor]) -> Values:
    """Return the value of each parameter by its first name; move the parameters to meta."""
    values: Values = {}
    for name, param in model.named_parameters():
        values[name] = stored[param] if param in stored else param.detach()
        assert not _is_new(values[name]) or not values[name].is_meta, f"{name} has no values"
    twins = {param: plain_twin(param, None) for param in model.parameters()}
    for module in model.modules():
        parameters = parameters_of(module)
        parameters.update({n: p if p is None else twins[p] for n, p in parameters.items()})
    return values


def _check_ties(model: nn.Module, values: Values) -> None:
    """Raise a ValueError if ``parallelize`` untied or added a parameter.

    Such a parameter has no value.
    """
    for name, _ in model.named_parameters():
        if name not in values:
            raise ValueError(
                f"parallelize unties {name!r} or adds it: add no parameters, and leave tied "
                "modules out of the plan, because parallelize_module splits them separately"
            )


def _make_new_equal(model: nn.Module, values: Values, groups: MeshGroups) -> None:
    """Broadcast the first rank's buffers, and its values of parameters that are in no file."""
    new = {name: value for name, value in values.items() if _is_new(value)}
    for _, tensor in sorted([*new.items(), *model.named_buffers()]):
        broadcast_from_first_rank(tensor, groups)


def _is_new(value: torch.Tensor) -> bool:
    # Parameters that are in no file were initialized by the model.
    return not isinstance(value, StoredTensor)


def _describe(value: torch.Tensor) -> str:
    origin = "not in the checkpoint" if _is_new(value) else "in the checkpoint"
    return f"{value.dtype} {tuple(value.shape)} ({origin})"
